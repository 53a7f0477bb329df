"""AttentionWriter: writes the attention of each slide that `predict` computes.

Shape letters: B slides of a batch, N rows (blank row first), F features, T tiles of a slide, H heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_dilated._validation import flag, integer, one_of
from lightning_dilated.ext.evaluation.predictions import WritesInPredict
from lightning_dilated.ext.slides.encoder import SlideEncoder
from lightning_dilated.ext.slides.files import slide_name
from lightning_dilated.ext.slides.heat_maps import write_heat_map
from lightning_dilated.ext.slides.module import SlideDataModule

#: endings of thumbnails
THUMBNAILS = (".png", ".jpg", ".jpeg", ".tif", ".tiff")


class AttentionWriter(WritesInPredict):
    """Writes `attention/SLIDE_ID.npz` into the run folder for every slide that a SlideEncoder predicts, with the arrays
    `attention` (T,), or (T, H) with heads="all", and `coords` (T, 2), both in the order in which the tiles were read.
    Also writes `attention/SLIDE_ID.png`, a heat map (`data.write_heat_map`; the mean over all heads).

    The arrays fit `data.heat_map(attention, coords, tile_size)` and `data.write_attention(path, attention, coords)`.
    Every slide is encoded a second time, up to the chosen layer.

    Args:
        layer, heads: as in `SlideEncoder.attention_map`; one layer only.
        path: path of the folder; None means `attention` in the logger's folder.
        pictures: write the PNGs.
        thumbnails: the background of the heat maps: a folder of pictures of whole slides, called SLIDE_ID.png, .jpg,
            .jpeg, .tif or .tiff; or one file, for one slide. If a slide has no picture, warn and use white.
        scale: scale of the colours, see `data.write_heat_map`.

    Raises:
        TypeError, ValueError, FileNotFoundError: when `predict` begins, for a model other than SlideEncoder, ranks that
            share a slide or shard weights, missing thumbnails, or thumbnails of merged groups or slides without a size.
    """

    def __init__(
        self,
        layer: int = -1,
        heads: Literal["mean", "all"] = "mean",
        path: str | None = None,
        pictures: bool = True,
        thumbnails: str | None = None,
        scale: Literal["rank", "linear"] = "rank",
    ) -> None:
        integer(layer, "layer", hint=" It is the number of one layer; -1 is the last.")
        one_of(heads, "heads", ("mean", "all"))
        one_of(scale, "scale", ("rank", "linear"))
        self.layer, self.heads, self.path = layer, heads, path
        self.pictures, self.thumbnails, self.scale = flag(pictures, "pictures"), thumbnails, scale
        if thumbnails is not None and not pictures:
            raise ValueError("thumbnails are the background of pictures: set pictures to True, or omit thumbnails.")
        #: {slide: (path of its thumbnail, size of the slide)}
        self._grounds: dict[str, tuple[Path, tuple[int, int]]] = {}

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the model and strategy, and determine the folder. Collective, because all ranks determine it."""
        if not isinstance(pl_module, SlideEncoder):
            raise TypeError(f"AttentionWriter is for a SlideEncoder, got {type(pl_module).__name__}: leave it out.")
        strategy = trainer.strategy
        shared = getattr(getattr(strategy, "sequence", None), "ranks", 1)
        if shared > 1 or getattr(strategy, "shards_parameters", False):
            why = f"{shared} ranks share each slide" if shared > 1 else "the ranks shard the model's parameters"
            raise ValueError(
                f"AttentionWriter takes whole slides and whole weights on a rank, but {why}: predict with strategy "
                "'ring_dilated' and trainer.devices 1 (or sequence_size 1), or leave the callback out."
            )
        if not -pl_module.depth <= self.layer < pl_module.depth:
            raise ValueError(f"AttentionWriter has layer={self.layer}, but the model has {pl_module.depth} layers.")
        self._grounds = {} if self.thumbnails is None else self._find_thumbnails(Path(self.thumbnails), trainer)
        self._folder = Path(self.path or Path(trainer.log_dir or trainer.default_root_dir) / "attention")

    def _find_thumbnails(self, where: Path, trainer: Any) -> dict[str, tuple[Path, tuple[int, int]]]:
        """Return {slide: (thumbnail, the slide's size)} of the slides to be predicted."""
        data = trainer.datamodule
        if not isinstance(data, SlideDataModule) or data.merge_groups:
            what = "samples of several slides" if isinstance(data, SlideDataModule) else "no SlideDataModule's slides"
            raise ValueError(f"thumbnails are matched with slides by name, but these are {what}: leave thumbnails out.")
        sizes = {slide.name: slide.extent for slide in data.dataset("test").slides}
        if not where.exists():
            raise FileNotFoundError(f"thumbnails {where}: no such file or folder.")
        if where.is_dir():
            paths = {slide_name(x.stem): x for x in sorted(where.iterdir()) if x.suffix.lower() in THUMBNAILS}
        elif len(sizes) == 1:
            paths = dict.fromkeys(sizes, where)
        else:
            raise ValueError(
                f"thumbnails {where} is one file, but {len(sizes)} slides are predicted: give a folder of files "
                "SLIDE_ID.png."
            )
        without = [name for name in sizes if name not in paths]
        if without:
            rank_zero_warn(
                f"{len(without)} of {len(sizes)} slides have no thumbnail in {where}, so their heat maps have a white "
                f"background: {', '.join(without[:5])}{', ...' if len(without) > 5 else ''}."
            )
        unknown = [name for name in sizes if name in paths and sizes[name] is None]
        if unknown:
            raise ValueError(
                f"thumbnails need the size of a slide, which the files of {len(unknown)} slides do not state (as TRIDENT's "
                f"level0_width and level0_height of coords), the first {unknown[0]}: leave thumbnails out, or draw by "
                "data.write_heat_map with slide_size."
            )
        return {name: (paths[name], cast(tuple[int, int], size)) for name, size in sizes.items() if name in paths}

    def on_predict_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Mapping[str, Any],
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        names = batch.get("slide_id")
        if names is None or any(Path(name).name != name for name in names):
            raise ValueError(
                f"AttentionWriter names its files by the batch's slide_id, a list of file names without folders; got "
                f"{names!r}. Batches of SlideDataModule have it."
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        features, coords, bounds = batch["features"], batch["coords"], batch.get("cu_seqlens")
        if bounds is None:
            self._write(trainer, pl_module, names, features, coords, batch.get("lengths"))
            return
        for i, name in enumerate(names):  # slides packed into one row
            rows = slice(int(bounds[i]), int(bounds[i + 1]))
            self._write(trainer, pl_module, [name], features[:, rows], coords[:, rows], None)

    def _write(
        self, trainer: pl.Trainer, module: Any, names: Any, features: Tensor, coords: Tensor, lengths: Tensor | None
    ) -> None:
        """Encode slides (B, N, F), and write the files of each."""
        tiles, coords = features[:, 1:], coords[:, 1:]  # the first row is blank
        counts = None if lengths is None else lengths - 1
        with trainer.precision_plugin.predict_step_context():
            maps = cast(SlideEncoder, module).attention_map(tiles, coords, counts, layer=self.layer, heads=self.heads)
        for i, name in enumerate(names):
            count = tiles.shape[1] if counts is None else int(counts[i])
            attention = maps[i, ..., :count].T if self.heads == "all" else maps[i, :count]
            # savez may append an ending to a path, but not to an open file
            values, places = attention.cpu().numpy(), coords[i, :count].cpu().numpy()
            with (self._folder / f"{name}.npz").open("wb") as file:
                np.savez(file, attention=values, coords=places)
            if self.pictures:
                thumbnail, size = self._grounds.get(name, (None, None))
                mean = values.mean(1) if values.ndim == 2 else values
                picture = self._folder / f"{name}.png"
                options: dict[str, Any] = {"thumbnail": thumbnail, "slide_size": size, "scale": self.scale}
                write_heat_map(picture, mean, places, module.tile_size, **options)

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero and self._folder.exists():
            print(f"attention: {self._folder}")
