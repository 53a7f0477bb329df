"""Writers for `predict`: PredictionWriter, a CSV row for each sequence, and AttentionWriter, weights for each slide.

Shape letters: B sequences of a batch, E numbers of a sequence (such as its embedding), N rows (the blank one first), T tiles
of a slide, H heads.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_dilated._validation import flag, integer, one_of
from lightning_dilated.data import SlideDataModule, write_heat_map
from lightning_dilated.data.files import guarded_field
from lightning_dilated.ext.slides.files import slide_name
from lightning_dilated.models import SlideEncoder


class PredictionWriter(BasePredictionWriter):
    """Writes `predictions.csv` into the run folder, batch by batch; if several ranks have different samples, one file
    each: `predictions.RANK.csv`. Of the ranks that share a sequence the first one writes.

    A prediction must be a mapping of names to tensors (B,), to tensors (B, E) or to lists of B words or numbers, as the
    `predict_step` of `LongNetLM` and `SlideEncoder` returns it. A tensor (B, E) has columns NAME_0, NAME_1 and so on, or,
    called "embedding", e0, e1 and so on: in one file with its name, batch by batch, which any spreadsheet reads.

    Of a text, the last columns are the `file` and the `offset` of the sequence's first token in it, in bytes, or in tokens
    of a file of tokens.

    Words (names of slides, classes and columns) that begin with = + - @, a tab, a line break or ' are written with a ' in
    front, since a spreadsheet would run them as a formula; numbers never are. To read a word back, take off the first '
    where it begins with one, as `data.files.plain_field` does.

    Args:
        path: of the CSV; None means `predictions.csv` in the logger's folder.
    """

    def __init__(self, path: str | None = None) -> None:
        super().__init__(write_interval="batch")
        self.path = path
        self._started = False
        self._header: list[str] | None = None

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start a new file; every rank takes part in finding the folder."""
        self._started, self._header = False, None
        self._target = self._find_target(trainer)

    def _find_target(self, trainer: pl.Trainer) -> Path:
        path = Path(self.path) if self.path else Path(trainer.log_dir or trainer.default_root_dir) / "predictions.csv"
        writers = trainer.distributed_sampler_kwargs or {"num_replicas": 1}
        return path if writers["num_replicas"] == 1 else path.with_suffix(f".{writers['rank']}{path.suffix}")

    def write_on_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        prediction: Any,
        batch_indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        # checked on every rank of a sequence: if only one raised, the others would wait for it
        columns = _columns(f"{type(pl_module).__name__}.predict_step", prediction)
        columns |= _places(trainer, columns, dataloader_idx)
        if self._header not in (None, list(columns)):
            raise ValueError(
                f"{type(pl_module).__name__}.predict_step returned the columns {_some(columns)} after batches with "
                f"{_some(self._header)}; the rows of one CSV have the same ones. Return the same names for every batch."
            )
        self._header = list(columns)
        if not getattr(trainer.strategy, "is_first_of_sequence", True):
            return
        self._target.parent.mkdir(parents=True, exist_ok=True)
        # names of files need not be text: their bytes are written unchanged
        mode = "a" if self._started else "w"
        with self._target.open(mode, newline="", encoding="utf-8", errors="surrogateescape") as file:
            writer = csv.writer(file)
            if not self._started:
                writer.writerow(map(guarded_field, columns))
            writer.writerows(map(guarded_field, row) for row in zip(*columns.values(), strict=True))
        self._started = True

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say that `validate` writes nothing."""
        _say_when(self, trainer)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say that `test` writes nothing."""
        _say_when(self, trainer)

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._started and trainer.is_global_zero:
            print(f"predictions: {self._target}")


def _say_when(writer: pl.Callback, trainer: pl.Trainer) -> None:
    """Say that a writer of predictions writes in `predict` only; nothing in a fit, whose recipe may serve `predict`, too."""
    if trainer.state.fn in (TrainerFn.VALIDATING, TrainerFn.TESTING):
        command = trainer.state.fn.value
        rank_zero_info(f"{type(writer).__name__} writes nothing in `{command}`: run `predict` in place of it")


def _places(trainer: pl.Trainer, columns: dict[str, list[Any]], dataloader_idx: int) -> dict[str, list[Any]]:
    """Columns of where each sequence begins, by its `index`; none for data that do not say it."""
    if "index" not in columns or {"file", "offset"} & columns.keys():
        return {}
    loaders: Any = trainer.predict_dataloaders
    loader = loaders[dataloader_idx] if isinstance(loaders, list | tuple) else loaders
    place_of = getattr(getattr(loader, "dataset", None), "place_of", None)
    if not callable(place_of):
        return {}
    places = [place_of(int(index)) for index in columns["index"]]
    return {"file": [file for file, _ in places], "offset": [offset for _, offset in places]}


def _columns(step: str, prediction: Any) -> dict[str, list[Any]]:
    """{column: one value a sequence}."""
    if not isinstance(prediction, Mapping) or not prediction or not all(map(_is_column, prediction.values())):
        kind = type(prediction).__name__
        if isinstance(prediction, Mapping):
            kinds = {n: tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for n, x in prediction.items()}
            kind = f"{kind} {kinds}"
        raise TypeError(
            f"{step} must return a mapping of names to tensors (B,) or (B, E), or to lists of B words or numbers, for "
            f"PredictionWriter, got {kind}. Change it, or leave the callback out."
        )
    sizes = {name: len(x) for name, x in prediction.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"{step} must return one value a sequence under every name, got {sizes} of them.")
    out: dict[str, list[Any]] = {}
    for name, x in prediction.items():
        prefix = "e" if name == "embedding" else f"{name}_"
        if isinstance(x, Tensor) and x.ndim == 2:
            new = {f"{prefix}{i}": values for i, values in enumerate(x.T.tolist())}
        else:
            new = {name: x.tolist() if isinstance(x, Tensor) else list(x)}
        if twice := sorted(out.keys() & new.keys()):
            raise ValueError(f"{step} returns two columns {twice[0]!r}, one of them out of {name!r}: rename one.")
        out |= new
    return out


def _is_column(x: Any) -> bool:
    if isinstance(x, Tensor):
        return x.ndim in (1, 2)
    return isinstance(x, (list, tuple)) and all(isinstance(value, (str, int, float)) for value in x)


def _some(names: Any) -> str:
    """The first names, and how many there are."""
    shown = list(names)
    return f"{', '.join(map(str, shown[:6]))}{', ...' if len(shown) > 6 else ''} ({len(shown)})"


#: endings of thumbnails
THUMBNAILS = (".png", ".jpg", ".jpeg", ".tif", ".tiff")


class AttentionWriter(pl.Callback):
    """Writes `attention/SLIDE_ID.npz` into the run folder for every slide that a SlideEncoder predicts, with the arrays
    `attention` (T,), or (T, H) with heads="all", and `coords` (T, 2), both in the order in which the tiles were read; and
    `attention/SLIDE_ID.png`, a heat map of it (`data.write_heat_map`; of all heads their mean).

    The arrays go on to `data.heat_map(attention, coords, tile_size)` and `data.write_attention(path, attention, coords)`.
    Every slide is encoded a second time for it, up to the layer.

    Args:
        layer, heads: as in `SlideEncoder.attention_map`; of one layer.
        path: of the folder; None means `attention` in the logger's folder.
        pictures: write the PNGs.
        thumbnails: a folder of pictures of whole slides, called SLIDE_ID.png, .jpg, .jpeg, .tif or .tiff, on which the heat
            maps are drawn; or one such file, for one slide. A slide without one gets a white ground, which is reported.
        scale: of the colours, see `data.write_heat_map`.

    Raises:
        TypeError, ValueError, FileNotFoundError: when predicting begins, for another model, or if ranks share a slide or
            shard the weights; for thumbnails that are not there, of patients, or of slides whose size no file states.
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
            raise ValueError("thumbnails are the ground of pictures: set pictures to True, or leave thumbnails out.")
        #: thumbnail, and size of the slide where it has one, of each slide
        self._grounds: dict[str, tuple[Path, tuple[int, int]]] = {}

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the model and strategy, and find the folder, which takes every rank."""
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

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say that `validate` writes nothing."""
        _say_when(self, trainer)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say that `test` writes nothing."""
        _say_when(self, trainer)

    def _find_thumbnails(self, where: Path, trainer: Any) -> dict[str, tuple[Path, tuple[int, int]]]:
        """{slide: (thumbnail, the slide's size)} of the slides to be predicted."""
        data = trainer.datamodule
        if not isinstance(data, SlideDataModule) or data.merge_groups:
            what = "samples of several slides" if isinstance(data, SlideDataModule) else "no SlideDataModule's slides"
            raise ValueError(f"thumbnails are matched with slides by name, and these are {what}: leave thumbnails out.")
        sizes = {slide.name: slide.extent for slide in data.dataset("test").slides}
        if not where.exists():
            raise FileNotFoundError(f"thumbnails {where}: no such file or folder.")
        if where.is_dir():
            found = {slide_name(x.stem): x for x in sorted(where.iterdir()) if x.suffix.lower() in THUMBNAILS}
        elif len(sizes) == 1:
            found = dict.fromkeys(sizes, where)
        else:
            raise ValueError(
                f"thumbnails {where} is one file, but {len(sizes)} slides are predicted: give a folder of files "
                "SLIDE_ID.png."
            )
        without = [name for name in sizes if name not in found]
        if without:
            rank_zero_warn(
                f"{len(without)} of {len(sizes)} slides have no thumbnail in {where}, so their heat maps have a white "
                f"ground: {', '.join(without[:5])}{', ...' if len(without) > 5 else ''}."
            )
        unknown = [name for name in sizes if name in found and sizes[name] is None]
        if unknown:
            raise ValueError(
                f"thumbnails need the size of a slide, which the files of {len(unknown)} slides do not state (as TRIDENT's "
                f"level0_width and level0_height of coords), the first {unknown[0]}: leave thumbnails out, or draw by "
                "data.write_heat_map with slide_size."
            )
        return {name: (found[name], cast(tuple[int, int], size)) for name, size in sizes.items() if name in found}

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
                f"{names!r}. SlideDataModule gives it."
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
        """Encode slides (B, N, F), and write a file for each."""
        tiles, coords = features[:, 1:], coords[:, 1:]  # the first row is blank
        counts = None if lengths is None else lengths - 1
        with trainer.precision_plugin.predict_step_context():
            maps = cast(SlideEncoder, module).attention_map(tiles, coords, counts, layer=self.layer, heads=self.heads)
        for i, name in enumerate(names):
            count = tiles.shape[1] if counts is None else int(counts[i])
            attention = maps[i, ..., :count].T if self.heads == "all" else maps[i, :count]
            # savez would not append the ending to a name that has one
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
