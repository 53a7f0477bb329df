"""AttentionWriter: under `predict`, a file for each slide with what the class token attends to.

Shape letters: B slides, N rows (the blank one in front), T tiles of a slide, H heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import lightning.pytorch as pl
import numpy as np

from lightning_dilated.models import SlideEncoder


class AttentionWriter(pl.Callback):
    """Writes `attention/SLIDE_ID.npz` into the run folder for every slide that a SlideEncoder predicts, with the arrays
    `attention` (T,), or (T, H) with heads="all", and `coords` (T, 2), both in the order in which the tiles were read.

    These go on to `data.heat_map(attention, coords, tile_size)` and `data.write_attention(path, attention, coords)`. Every
    slide is encoded a second time for it, up to the layer.

    Args:
        layer, heads: as in `SlideEncoder.attention_map`; of one layer.
        path: of the folder; None means `attention` in the logger's folder.

    Raises:
        TypeError, ValueError: when predicting begins, for another model, or where ranks share a slide or deal its weights.
    """

    def __init__(self, layer: int = -1, heads: Literal["mean", "all"] = "mean", path: str | None = None) -> None:
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise TypeError(f"layer must be the number of one layer, such as -1 for the last; got {layer!r}.")
        if heads not in ("mean", "all"):
            raise ValueError(f"heads must be mean or all, got {heads!r}.")
        self.layer, self.heads, self.path = layer, heads, path

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """See that it can be done, and find the folder, in which every rank takes part."""
        if not isinstance(pl_module, SlideEncoder):
            raise TypeError(f"AttentionWriter is for a SlideEncoder, got {type(pl_module).__name__}: leave it out.")
        strategy = trainer.strategy
        shared = getattr(getattr(strategy, "sequence", None), "ranks", 1)
        if shared > 1 or getattr(strategy, "deals_parameters", False):
            why = f"{shared} ranks share each slide" if shared > 1 else "the ranks deal the model's parameters"
            raise ValueError(
                f"AttentionWriter takes whole slides and whole weights on a rank, but {why}: predict with strategy "
                "'ring_dilated' and trainer.devices 1 (or sequence_size 1), or leave the callback out."
            )
        if not -pl_module.depth <= self.layer < pl_module.depth:
            raise ValueError(f"AttentionWriter has layer={self.layer}, but the model has {pl_module.depth} layers.")
        self._folder = Path(self.path or Path(trainer.log_dir or trainer.default_root_dir) / "attention")

    def on_predict_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Mapping[str, Any],
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Write the files of one batch."""
        names = batch.get("slide_id")
        if names is None or any(Path(name).name != name for name in names):
            raise ValueError(
                f"AttentionWriter names its files by the batch's slide_id, a list of file names without folders; got "
                f"{names!r}. SlideDataModule gives it."
            )
        tiles, coords = batch["features"][:, 1:], batch["coords"][:, 1:]  # the first row is blank
        lengths = batch["lengths"] - 1 if batch.get("lengths") is not None else None
        with trainer.precision_plugin.predict_step_context():
            maps = cast(SlideEncoder, pl_module).attention_map(
                tiles, coords, lengths, layer=self.layer, heads=self.heads
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        for i, name in enumerate(names):
            count = tiles.shape[1] if lengths is None else int(lengths[i])
            found = maps[i, ..., :count].T if self.heads == "all" else maps[i, :count]
            # the ending is put on by hand: savez would leave one that a name has
            with (self._folder / f"{name}.npz").open("wb") as file:
                np.savez(file, attention=found.cpu().numpy(), coords=coords[i, :count].cpu().numpy())

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say where the files are."""
        if trainer.is_global_zero and self._folder.exists():
            print(f"attention: {self._folder}")
