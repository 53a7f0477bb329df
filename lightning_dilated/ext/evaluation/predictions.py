"""PredictionWriter: writes a CSV row for each sequence that `predict` computes.

Shape letters: B sequences of a batch, E numbers of a sequence (such as its embedding).
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor


class WritesInPredict(pl.Callback):
    """Logs in `validate` and `test` that nothing is written, because a fit's recipe may also serve `predict`."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage in ("validate", "test"):
            command = TrainerFn(stage).value
            rank_zero_info(f"{type(self).__name__} writes nothing in `{command}`: run `predict` in place of it")


class PredictionWriter(WritesInPredict, BasePredictionWriter):
    """Writes `predictions.csv` into the run folder, batch by batch. If ranks have different samples, each rank writes
    its own `predictions.RANK.csv`; if ranks share a sequence, the first of these ranks writes.

    A prediction must be a mapping of names to tensors (B,), to tensors (B, E) or to lists of B words or numbers, as
    from `predict_step` of `LongNetLM` and `SlideEncoder`. A tensor (B, E) becomes columns NAME_0, NAME_1 and so on;
    a tensor "embedding" becomes e0, e1 and so on.

    For a text, the last columns are the `file` of the sequence and the `offset` of its first token, in bytes, or in
    tokens for a file of tokens.

    A ' is put before words (names of slides, classes and columns) that begin with = + - @, a tab, a line break or ',
    because a spreadsheet would run them as formulas. Numbers are not changed. To restore a word, remove the first ':
    `text.removeprefix("'")`.

    Args:
        path: path of the CSV; None means `predictions.csv` in the logger's folder.
    """

    def __init__(self, path: str | None = None) -> None:
        super().__init__(write_interval="batch")
        self.path = path
        self._started = False
        self._header: list[str] | None = None

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start a new file. Collective, because all ranks determine the folder."""
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
        # check on every rank of a sequence: if only one raised, the other ranks would wait for it
        columns = _columns(f"{type(pl_module).__name__}.predict_step", prediction)
        columns |= _places(trainer, columns, dataloader_idx)
        if self._header not in (None, list(columns)):
            raise ValueError(
                f"{type(pl_module).__name__}.predict_step returned the columns {_shortened(columns)} after batches with "
                f"{_shortened(self._header)}; all rows of a CSV need the same columns. Return equal names for every batch."
            )
        self._header = list(columns)
        if not getattr(trainer.strategy, "is_first_of_sequence", True):
            return
        self._target.parent.mkdir(parents=True, exist_ok=True)
        # names of files need not be valid text: write their bytes unchanged
        mode = "a" if self._started else "w"
        with self._target.open(mode, newline="", encoding="utf-8", errors="surrogateescape") as file:
            writer = csv.writer(file)
            if not self._started:
                writer.writerow(map(guarded_field, columns))
            writer.writerows(map(guarded_field, row) for row in zip(*columns.values(), strict=True))
        self._started = True

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._started and trainer.is_global_zero:
            print(f"predictions: {self._target}")


def _places(trainer: pl.Trainer, columns: dict[str, list[Any]], dataloader_idx: int) -> dict[str, list[Any]]:
    """Return the columns `file` and `offset`, looked up by `index`; {} if the data set has no method `place_of`."""
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
        raise ValueError(f"{step} must return one value a sequence under every name, but the numbers are {sizes}.")
    out: dict[str, list[Any]] = {}
    for name, x in prediction.items():
        prefix = "e" if name == "embedding" else f"{name}_"
        if isinstance(x, Tensor) and x.ndim == 2:
            new = {f"{prefix}{i}": values for i, values in enumerate(x.T.tolist())}
        else:
            new = {name: x.tolist() if isinstance(x, Tensor) else list(x)}
        if twice := sorted(out.keys() & new.keys()):
            raise ValueError(f"{step} returns two columns {twice[0]!r}, one of them made from {name!r}: rename one.")
        out |= new
    return out


def _is_column(x: Any) -> bool:
    if isinstance(x, Tensor):
        return x.ndim in (1, 2)
    return isinstance(x, (list, tuple)) and all(isinstance(value, (str, int, float)) for value in x)


def _shortened(names: Any) -> str:
    shown = list(names)
    return f"{', '.join(map(str, shown[:6]))}{', ...' if len(shown) > 6 else ''} ({len(shown)})"


#: first characters of formulas, also full-width; and ' itself, so that `removeprefix` restores every word
_MARKED = tuple("'=+-@\t\r\n＝＋－＠")


def guarded_field(value: Any) -> Any:
    """Put ' before a word that begins with ' or like a formula; return anything else, and a lone + or -, unchanged.

    Excel and LibreOffice take a field that begins with = + - @, a tab or a line break for a formula, which may start
    programs and send data away; names of slides and classes come from other people's files.
    """
    marked = isinstance(value, str) and value.startswith(_MARKED) and value not in ("+", "-")
    return f"'{value}" if marked else value
