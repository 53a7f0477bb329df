"""LossByPosition and RecallByDistance: how well a model uses distant context, by position and by distance.

Shape letters: B batch, N tokens, L tokens of this rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_dilated.attention.rotary import token_positions
from lightning_dilated.ext.evaluation.counting import CountsAnswers, Report, append_rows, check_model, datamodule
from lightning_dilated.sequence import active_sequence

#: number of octaves of positions, enough for 2^48 tokens; and number of equal parts of a sequence
OCTAVES, EIGHTHS = 48, 8
FIELDS = ("step", "part", "first", "last", "tokens", "bits")


class LossByPosition(pl.Callback):
    """Validation loss by octave and by eighth of the position, summed over all ranks; for a LongNetLM or HFCausalLM.

    Octave k has positions 2^k - 1 to 2^(k + 1) - 2, counted from 0 in the sequence, or in the document if batches are
    packed. Eighths divide the length of the sequence, sample or document. After each validation the table is
    printed and appended to `loss_by_position.csv` in the run's folder, and `loss_by_position.png` is redrawn. If a
    model uses distant context, its loss falls from octave to octave.

    Args:
        table: print the table.
        picture: draw the picture.

    Attributes:
        rows: rows of the last validation: mappings of step, part ("octave" or "eighth"), first and last (positions, or
            the number of the eighth), tokens, bits (per token).

    Raises:
        TypeError: when a run starts, for a model other than LongNetLM and HFCausalLM.
        ValueError: when a fit or validation starts, if the batches are steps of streams.
    """

    def __init__(self, table: bool = True, picture: bool = True) -> None:
        self.table, self.picture = table, picture
        self.rows: list[dict[str, Any]] = []
        self._sums: Tensor | None = None
        self._folder = Path()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check that the model has token losses and the data has positions; determine the folder. Collective."""
        check_model(self, pl_module, "watch_losses", ", with a loss for each token")
        if stage in ("fit", "validate"):
            _refuse_streams(trainer, "LossByPosition")
        self._folder = Path(trainer.log_dir or trainer.default_root_dir)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._sums = torch.zeros(2, OCTAVES + EIGHTHS, dtype=torch.float64, device=pl_module.device)
        pl_module.watch_losses = self.add  # type: ignore[assignment]  # a language model, by `setup`

    def add(self, batch: Mapping[str, Any], losses: Tensor) -> None:
        """Add a batch's losses (B, L) at this rank's positions; 0 for labels of -100."""
        if self._sums is None:
            return
        counted = batch["labels"] != -100
        place, length = _places(batch, losses.shape)
        octave = (place + 1).double().log2().floor().long().clamp(max=OCTAVES - 1)
        eighth = OCTAVES + (place * EIGHTHS // length).clamp(max=EIGHTHS - 1)
        for part in (octave, eighth):
            index = part.to(losses.device)[counted].to(self._sums.device)
            self._sums[0].index_add_(0, index, losses.detach()[counted].to(self._sums.device, torch.float64))
            self._sums[1].index_add_(0, index, torch.ones_like(index, dtype=torch.float64))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sum the losses of all ranks; rank 0 writes the table."""
        pl_module.watch_losses = None  # type: ignore[assignment]
        sums, self._sums = self._sums, None
        if sums is None:
            return
        nats, tokens = torch.as_tensor(trainer.strategy.reduce(sums, reduce_op="sum")).cpu()
        if trainer.sanity_checking:
            return
        self.rows = [_row(trainer.global_step, i, nats[i], int(tokens[i])) for i in range(len(tokens)) if tokens[i] > 0]
        if trainer.is_global_zero and self.rows:
            self._write()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Detach from the model."""
        pl_module.watch_losses = None  # type: ignore[assignment]
        self._sums = None

    def _write(self) -> None:
        append_rows(self._folder / "loss_by_position.csv", FIELDS, self.rows)
        if self.table:
            Console().print(_table(self.rows))
        if self.picture:
            _draw(self.rows, self._folder / "loss_by_position.png")


def _places(batch: Mapping[str, Any], shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Return each token's position in its document, and the document's length: two tensors (B, L) int64 on the CPU."""
    size, local = shape
    positions = token_positions(0, local)
    group = active_sequence()
    whole = local if group is None or group.agreed is None else group.agreed.seq_len
    bounds, lengths = batch.get("cu_seqlens"), batch.get("lengths")
    if bounds is not None:
        bounds = torch.as_tensor(bounds).cpu().long()
        document = torch.searchsorted(bounds, positions, right=True).clamp(1, len(bounds) - 1) - 1
        place, length = positions - bounds[document], (bounds[1:] - bounds[:-1])[document]
    else:
        place, length = positions, torch.full_like(positions, whole)
    place, length = place.expand(size, local), length.expand(size, local)
    if lengths is not None:
        length = torch.as_tensor(lengths).cpu().long()[:, None].expand(size, local)
    return place, length.clamp(min=1)


def _row(step: int, i: int, nats: Tensor, tokens: int) -> dict[str, Any]:
    octave = i < OCTAVES
    first, last = (2**i - 1, 2 ** (i + 1) - 2) if octave else (i - OCTAVES, i - OCTAVES)
    part = "octave" if octave else "eighth"
    bits = float(nats) / tokens / math.log(2)
    return {"step": step, "part": part, "first": first, "last": last, "tokens": tokens, "bits": bits}


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"loss by position after step {rows[0]['step']}", title_justify="left")
    for name in ("positions", "labels", "bits a token"):
        table.add_column(name, justify="right")
    for row in rows:
        octave = row["part"] == "octave"
        where = f"{row['first']:,} to {row['last']:,}" if octave else f"eighth {row['first'] + 1} of the sequence"
        table.add_row(where, f"{row['tokens']:,}", f"{row['bits']:.3f}")
    return table


def _draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw a PNG of bits per token against the position, by octave."""
    from matplotlib.figure import Figure

    octaves = [row for row in rows if row["part"] == "octave"]
    figure = Figure(figsize=(6, 3.6), layout="constrained", dpi=120)
    axes = figure.subplots()
    axes.plot([row["first"] + 1 for row in octaves], [row["bits"] for row in octaves], "o-")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("position, from")
    axes.set_ylabel("bits a token")
    axes.grid(alpha=0.3)
    figure.savefig(path)


class RecallByDistance(CountsAnswers):
    """Share of right answers in validation and test, in total and by octave of the distance, summed over all ranks.

    The model is a LongNetLM or HFCausalLM. The data is a `FarRecallDataModule`, or a DataModule with `index` (B,) in
    its batches and a method `distances(split, index)`, which returns (N,) integers for a sample of "val" or "test": at
    each label the distance in tokens back to its answer, or 0 to leave it out. Answers are the likeliest tokens.

    Logs `val_accuracy`, and `val_accuracy_D` for each octave with labels: distances D to 2 D - 1, D a power of two; in
    test `test_accuracy` and `test_accuracy_D`.

    Attributes:
        rows: rows of the last validation or test: mappings of first and last (distances), labels, accuracy.

    Raises:
        TypeError: when a run starts, for another model, or data without `distances`.
        ValueError: when a run starts, if the batches are steps of streams.
    """

    def __init__(self) -> None:
        super().__init__()
        self._distances: Callable[[int], Tensor] | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check that the model makes predictions, and that the data has distances."""
        check_model(self, pl_module, "watch_predictions", ", with an answer for each label")
        data = datamodule(trainer)
        if not callable(getattr(data, "distances", None)):
            kind = "loaders alone" if data is None else type(data).__name__
            raise TypeError(
                "RecallByDistance needs a DataModule with a method distances(split, index), as of FarRecallDataModule; "
                f"got {kind}. Give the Trainer such a DataModule, or remove the callback."
            )
        _refuse_streams(trainer, "RecallByDistance")

    def counters(self, trainer: pl.Trainer, split: str) -> int:
        """Return the number of counters: one for each octave of the distance."""
        self._distances = functools.partial(datamodule(trainer).distances, split)
        return OCTAVES

    def add(self, batch: Mapping[str, Any], predictions: Tensor) -> None:
        """Count a batch's predictions (B, L) at this rank's positions; labels without a distance are left out."""
        if self._counts is None or self._distances is None:
            return
        positions = token_positions(0, predictions.shape[1])  # ranks without labels must call this collective, too
        labels = batch["labels"]
        distances = torch.stack([self._distances(index)[positions] for index in batch["index"].tolist()])
        octave = torch.frexp(distances.double()).exponent.long() - 1  # floor(log2), exact; -1 for 0
        octave = octave.clamp(max=OCTAVES - 1).to(labels.device)
        counted = (labels != -100) & (octave >= 0)
        # a batch that is computed in chunks stays on the CPU
        octaves = octave[counted].to(self._counts.device)
        right = (predictions == labels)[counted].to(self._counts.device)
        self._counts[0].index_add_(0, octaves, right.long())
        self._counts[1].index_add_(0, octaves, torch.ones_like(octaves))

    def evaluate(self, trainer: pl.Trainer, split: str, right: list[int], labels: list[int]) -> Report:
        """Return table rows, and {suffix: accuracy} to log, from each counter's numbers of right answers and labels."""
        rows = [_recall_row(i, right[i], labels[i]) for i in range(OCTAVES) if labels[i]]
        return rows, {"": sum(right) / sum(labels), **{f"_{row['first']}": row["accuracy"] for row in rows}}


def _refuse_streams(trainer: pl.Trainer, callback: str) -> None:
    """Raise ValueError if a DataModule's batches are steps of streams, according to its `sequence_spec`."""
    data = datamodule(trainer)
    if "stream" in getattr(getattr(data, "sequence_spec", None), "whole", ()):
        raise ValueError(
            f"{callback} needs positions in a sequence, but batches of {type(data).__name__} are steps of streams: "
            "remove the callback, or take a DataModule of separate sequences, such as ByteDataModule."
        )


def _recall_row(i: int, right: int, labels: int) -> dict[str, Any]:
    return {"first": 2**i, "last": 2 ** (i + 1) - 1, "labels": labels, "accuracy": right / labels}
