"""LossByPosition: validation loss by position, which shows whether a model uses distant context.

Shape letters: B batch, N tokens, L tokens of this rank.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_dilated.attention.rotary import token_positions
from lightning_dilated.models.longnet.lm import LongNetLM
from lightning_dilated.sequence import active_sequence

#: octaves of positions up to 2^48 tokens
OCTAVES, EIGHTHS = 48, 8
FIELDS = ("step", "part", "first", "last", "tokens", "bits")


class LossByPosition(pl.Callback):
    """Validation loss by octave and by eighth of the position, summed over all ranks; for a LongNetLM.

    Octave k holds positions 2^k - 1 to 2^(k + 1) - 2 of their sequence, counted from 0, or of their document where batches
    are packed; the eighths are those of the sequence's, sample's or document's length. After each validation the
    table is printed and appended to `loss_by_position.csv` in the run's folder, and `loss_by_position.png` is redrawn.
    A model that uses distant context has a loss that falls from octave to octave.

    Args:
        table: print the table.
        picture: draw the picture.

    Attributes:
        rows: of the last validation: mappings of step, part ("octave" or "eighth"), first and last (positions,
            or the number of the eighth), tokens, bits (a token).

    Raises:
        TypeError: as a run starts, for a model that is no LongNetLM.
    """

    def __init__(self, table: bool = True, picture: bool = True) -> None:
        self.table, self.picture = table, picture
        self.rows: list[dict[str, Any]] = []
        self._sums: Tensor | None = None
        self._folder = Path()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check that the model has a loss for each token, and find the folder, which takes all ranks."""
        if not isinstance(pl_module, LongNetLM):
            raise TypeError(
                f"LossByPosition needs a LongNetLM, whose tokens each have a loss; got {type(pl_module).__name__}. Remove "
                "the callback."
            )
        self._folder = Path(trainer.log_dir or trainer.default_root_dir)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._sums = torch.zeros(2, OCTAVES + EIGHTHS, dtype=torch.float64, device=pl_module.device)
        pl_module.watch_losses = self.add  # type: ignore[assignment]  # a LongNetLM, by `setup`

    def add(self, batch: Mapping[str, Any], losses: Tensor) -> None:
        """Add a batch's losses (B, L), of this rank's positions; 0 where the label is -100."""
        if self._sums is None:
            return
        counted = batch["labels"] != -100
        place, length = _places(batch, losses.shape)
        octave = (place + 1).double().log2().floor().long().clamp(max=OCTAVES - 1)
        eighth = OCTAVES + (place * EIGHTHS // length).clamp(max=EIGHTHS - 1)
        for part in (octave, eighth):
            index = part.to(losses.device)[counted]
            self._sums[0].index_add_(0, index, losses.detach()[counted].double())
            self._sums[1].index_add_(0, index, torch.ones_like(index, dtype=torch.float64))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sum over the ranks; rank 0 writes."""
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
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "loss_by_position.csv"
        fresh = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            if fresh:
                writer.writeheader()
            writer.writerows(self.rows)
        if self.table:
            Console().print(_table(self.rows))
        if self.picture:
            _draw(self.rows, self._folder / "loss_by_position.png")


def _places(batch: Mapping[str, Any], shape: torch.Size) -> tuple[Tensor, Tensor]:
    """(each position in its document, tokens of that document), (B, L) int64 on the CPU."""
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
    """A PNG of bits a token against the position, by octave."""
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
