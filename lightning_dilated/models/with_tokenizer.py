"""WithTokenizer stores the files of a model's tokenizer with the weights, in checkpoints and in folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from lightning_dilated.data.tokenizer_files import MAIN, checked_files, read_files, write_files
from lightning_dilated.models.module import DilatedModule


class WithTokenizer(DilatedModule):
    """A DilatedModule over tokens of text that stores its tokenizer's files."""

    #: {name: contents} of the tokenizer's files, read from the weights' checkpoint or folder; None: no tokenizer
    tokenizer_files: dict[str, str] | None = None

    def current_tokenizer(self) -> dict[str, str] | None:
        """Return the tokenizer's files of the Trainer's data, or `tokenizer_files` if the data has no tokenizer."""
        read_data_files = self._data_setting("tokenizer_files")
        return (read_data_files() if callable(read_data_files) else None) or self.tokenizer_files

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Also store the tokenizer of the data."""
        super().on_save_checkpoint(checkpoint)
        if (tokenizer := self.current_tokenizer()) is not None:
            checkpoint["tokenizer"] = tokenizer

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the checkpoint's tokenizer, and warn if the data has a different one."""
        self.tokenizer_files = files = checked_files(checkpoint.get("tokenizer"), "the checkpoint")
        super().on_load_checkpoint(checkpoint)
        data_files = self.current_tokenizer()
        if files is not None and data_files is not None and data_files[MAIN] != files[MAIN]:
            rank_zero_warn(
                "the checkpoint was trained with another tokenizer than the data has now (their tokenizer.json differ): "
                "equal tokens may mean something else. Set data.tokenizer to the tokenizer of the checkpoint."
            )

    def write_hub_files(self, folder: Path) -> None:
        """Write the tokenizer of the data."""
        write_files(folder, self.current_tokenizer())

    def read_hub_files(self, folder: Path) -> None:
        """Load the folder's tokenizer."""
        self.tokenizer_files = read_files(folder)
