"""WithTokenizer: the files of a model's tokenizer travel with its weights, in checkpoints and in folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from lightning_dilated.data.text.tokenizer_files import MAIN, checked_files, read_files, write_files
from lightning_dilated.models.module import DilatedModule


class WithTokenizer(DilatedModule):
    """A DilatedModule over tokens of text."""

    #: the tokenizer that the weights belong to, its files by name, read from a checkpoint or folder; None: no tokenizer
    tokenizer_files: dict[str, str] | None = None

    def current_tokenizer(self) -> dict[str, str] | None:
        """The files of the tokenizer of the Trainer's data, or else `tokenizer_files`."""
        of_data = self._data_setting("tokenizer_files")
        return (of_data() if callable(of_data) else None) or self.tokenizer_files

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """As DilatedModule, and the tokenizer of the data."""
        super().on_save_checkpoint(checkpoint)
        if (tokenizer := self.current_tokenizer()) is not None:
            checkpoint["tokenizer"] = tokenizer

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """As DilatedModule; keep the checkpoint's tokenizer, and warn where the data has another."""
        self.tokenizer_files = files = checked_files(checkpoint.get("tokenizer"), "the checkpoint")
        super().on_load_checkpoint(checkpoint)
        of_data = self.current_tokenizer()
        if files is not None and of_data is not None and of_data[MAIN] != files[MAIN]:
            rank_zero_warn(
                "the checkpoint was trained with another tokenizer than the data has now (their tokenizer.json differ): "
                "equal tokens may mean something else. Set data.tokenizer to the tokenizer of the checkpoint."
            )

    def write_hub_files(self, folder: Path) -> None:
        """Write the tokenizer of the data."""
        write_files(folder, self.current_tokenizer())

    def read_hub_files(self, folder: Path) -> None:
        """Keep the folder's tokenizer."""
        self.tokenizer_files = read_files(folder)
