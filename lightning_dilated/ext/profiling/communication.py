"""Measure bytes and time of attention's exchanges in training, and compare them with the plan.

No step waits for a GPU: a step's events are read some steps later, after the GPU has passed them. Then the hosts
exchange their measurements.
"""

from __future__ import annotations

import itertools
import warnings
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from lightning_dilated._compat.lightning import logged_step
from lightning_dilated._validation import flag, integer
from lightning_dilated.ext.profiling.traffic import EXCHANGED, Sums, reach, reached, summary
from lightning_dilated.sequence.consensus import ControlGroup, PendingGather
from lightning_dilated.sequence.exchange.transport import TrafficLog
from lightning_dilated.sequence.group import SequenceGroup

COLUMNS = (
    *("pass", "what", "collectives", "received MB", "planned MB"),
    *("in flight ms", "exposed ms", "hidden %", "planned ms"),
)
#: maximum number of differences from the plan that a rank reports
FEW = 4
_fits = itertools.count()


class CommunicationProfiler(pl.Callback):
    """Log what attention exchanges in a training batch, and print a table with the plan at the end of fit.

    The callback logs the following numbers at the step of the batch, each as the maximum over the sequence's ranks:

    - `comm/received_mb_forward` and `comm/received_mb_backward`: received MB (1e6 bytes); `comm/planned_mb`: their sum
      according to the plan, which leaves out the exchanges of head groups.
    - `comm/in_flight_ms`: time in which rows were being sent; `comm/exposed_ms`: time in which computation waited for
      rows (on a GPU the compute stream, on CPUs the host); `comm/agreeing_ms`: the host's waits for control messages.
    - `comm/hidden_fraction`: share of all ranks' time in flight in which nothing waited; 1 if nothing was sent.

    If gradients accumulate over several batches, the first measured batch represents the step.

    Not measured: gradients that DDP or FSDP average, and `sequence_sum`, `sequence_mean` and `sequence_gather`. Rows of
    a recomputed forward count as forward. The callback warns if bytes differ from the plan.

    Args:
        every_n_steps: measure one training batch in this many.
        table: print the means of the measured batches at the end of fit.
        path: file for the table as Markdown.
        warmup: training batches before the first measured one; they make communicators and compile kernels.

    Attributes:
        latest: the last logged numbers, on every rank.
        rows: the table's `Sums`: the mean batch, as the maximum over the sequence's ranks. Set on every rank after fit.
        unlike: descriptions of bytes that differ from the plan. Set after fit.
        steps: number of measured batches.

    Raises:
        TypeError, ValueError: for an invalid argument; at the start of fit if the strategy has no sequence.
    """

    def __init__(
        self, every_n_steps: int = 1, table: bool = True, path: str | Path | None = None, warmup: int = 1
    ) -> None:
        self.every_n_steps, self.warmup = integer(every_n_steps, "every_n_steps", 1), integer(warmup, "warmup", 0)
        flag(table, "table")
        if path is not None and (not isinstance(path, (str, Path)) or not str(path)):
            raise TypeError(f"path must be a file to write, or None, got {path!r}.")
        self.table, self.path = table, None if path is None else Path(path)
        self._group: SequenceGroup = None  # type: ignore[assignment]  # None only outside of a fit
        self._reset()

    def _reset(self) -> None:
        self.latest: dict[str, float] = {}
        self.rows: list[Sums] = []
        self.unlike: list[str] = []
        self.steps, self._batches, self._logged = 0, 0, -1
        self._clock: TrafficLog | None = None
        self._unread: deque[tuple[int, TrafficLog]] = deque()
        self._asked: deque[tuple[int, PendingGather]] = deque()
        self._measured = _Measured()

    # -- hooks -------------------------------------------------------------------------------------------------------
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Raise ValueError if the strategy has no sequence."""
        if stage == "fit" and not isinstance(getattr(trainer.strategy, "sequence", None), SequenceGroup):
            raise ValueError(
                "CommunicationProfiler measures how the ranks of a sequence exchange rows, and "
                f"{type(trainer.strategy).__name__} shares no sequence. Take Trainer(strategy='ring_dilated') or "
                "'ring_dilated_fsdp', or leave the callback out."
            )
        if sum(isinstance(x, CommunicationProfiler) for x in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError("use one CommunicationProfiler per Trainer: a second one would replace its clock.")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reset all numbers. Every fit has a new channel, because an earlier fit may have left messages unread."""
        self._reset()
        self._group = group = trainer.strategy.sequence  # type: ignore[attr-defined]  # `setup` looked for it
        channel = f"communication-{next(_fits)}"
        self._quiet = ControlGroup(group.group, group.timeout, channel) if group.ranks > 1 else None

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Attach a clock to the exchanges of this batch if it is measured."""
        number, self._batches = self._batches - self.warmup, self._batches + 1
        self._clock = TrafficLog() if number >= 0 and number % self.every_n_steps == 0 else None
        self._group.watch(self._clock)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Detach the clock, and log earlier batches that can be read."""
        if self._clock is not None:
            self._group.watch(None)
            # the step at which Lightning logs this batch's values
            self._unread.append((logged_step(trainer), self._clock))
            self._clock = None
        self._read(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log all measured batches before validation; during validation, a rank might have to wait for others."""
        if self._group is not None:
            self._read(trainer, last=True)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the last batches while loggers are open."""
        self._group.watch(None)
        self._read(trainer, last=True)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gather the ranks' measurements; print and write the table on the first rank."""
        self.steps, ranks = self._measured.steps, [self._measured]
        if self._group.ranks > 1:
            ranks = [self._measured] * self._group.ranks
            dist.all_gather_object(ranks, self._measured, group=self._group.group)
        self.rows, self.unlike = _merged(ranks), [f"rank {i}, {x}" for i, rank in enumerate(ranks) for x in rank.unlike]
        if self.unlike and self._group.rank == 0:
            warnings.warn(f"CommunicationProfiler: {_unlike_plan(self.unlike)}", stacklevel=2)
        if trainer.is_global_zero:
            self._show(ranks)
        self._detach()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Stop measuring."""
        self._detach()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Stop measuring."""
        self._detach()

    def _detach(self) -> None:
        if self._group is not None:
            self._group.watch(None)
        self._group = self._quiet = self._clock = None  # type: ignore[assignment]
        self._unread.clear()
        self._asked.clear()

    # -- numbers -----------------------------------------------------------------------------------------------------
    def _read(self, trainer: pl.Trainer, last: bool = False) -> None:
        """Log batches that can be read without waiting, or all if `last`. The ranks exchange numbers batch by batch."""
        while self._unread and (last or reached(self._unread[0][1])):
            step, clock = self._unread.popleft()
            reach(clock)
            rows = summary(clock, self._group.links)
            self._measured.add(rows, clock)
            numbers = torch.tensor(_numbers(rows, clock.agreeing), dtype=torch.float64)
            if self._quiet is None:
                self._log(trainer, step, numbers[None])
            else:
                self._asked.append((step, self._quiet.start_gather(numbers)))
        while self._asked and (last or self._asked[0][1].done()):
            step, pending = self._asked.popleft()
            self._log(trainer, step, torch.stack(pending.wait()))

    def _log(self, trainer: pl.Trainer, step: int, numbers: torch.Tensor) -> None:
        forward, backward, *planned, in_flight, exposed, _, agreeing = numbers.amax(0).tolist()
        in_flight_sum, hidden = (numbers[:, i].sum().item() for i in (4, 6))
        values = {
            **{"received_mb_forward": forward, "received_mb_backward": backward, "planned_mb": sum(planned)},
            **{"in_flight_ms": in_flight, "exposed_ms": exposed, "agreeing_ms": agreeing},
            "hidden_fraction": hidden / in_flight_sum if in_flight_sum else 1.0,
        }
        self.latest = {f"comm/{name}": x for name, x in values.items()}
        for logger in trainer.loggers if step > self._logged else ():
            logger.log_metrics(self.latest, step=step)
        self._logged = step

    # -- the table ---------------------------------------------------------------------------------------------------
    def _show(self, ranks: list[_Measured]) -> None:
        title, notes = "attention's exchange in a training batch, most of any rank", _notes(ranks, self.unlike)
        cells = [_cells(x) for x in self.rows] if _sent_any(ranks) else []
        if self.table:
            shown = Table(title=title, title_justify="left")
            for i, name in enumerate(COLUMNS):
                shown.add_column(name, justify="left" if i < 2 else "right")
            for row in cells:
                shown.add_row(*row)
            Console().print(*([shown] if cells else []), *notes, sep="\n", highlight=False)
        if self.path is not None:
            lines = [COLUMNS, ("---",) * len(COLUMNS), *cells] if cells else []
            text = "".join(f"| {' | '.join(x)} |\n" for x in lines)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text("\n".join([f"{title}\n", *([text] if text else []), *notes]) + "\n", encoding="utf-8")


@dataclass
class _Measured:
    """Sums of one rank's measurements over all batches."""

    steps: int = 0
    agreeing: float = 0.0
    exchanges: tuple[str, ...] = ()
    rows: tuple[Sums, ...] = ()
    unlike: tuple[str, ...] = ()  # the first `FEW` differences from the plan

    def add(self, rows: list[Sums], clock: TrafficLog) -> None:
        unlike = [
            f"{x.run} {x.what}: sent {x.sent} and received {x.received} bytes, planned {x.planned_sent} and "
            f"{x.planned_received}"
            for x in rows
            if x.as_planned is False
        ]
        self.unlike = (*self.unlike, *unlike)[:FEW]
        self.steps, self.agreeing = self.steps + 1, self.agreeing + clock.agreeing
        self.exchanges = tuple(dict.fromkeys((*self.exchanges, *(x.exchange for x in clock.planned))))
        sums = {(x.run, x.what): x for x in self.rows}
        for x in rows:
            sums[x.run, x.what] = sums[x.run, x.what] + x if (x.run, x.what) in sums else x
        self.rows = tuple(sums.values())


def _numbers(rows: list[Sums], agreeing: float) -> list[float]:
    """Return this rank's numbers of a batch: received MB (forward, backward), planned MB (forward, backward), ms in
    flight, ms exposed, ms hidden, and ms of control messages."""
    sums = lambda name: [sum(getattr(x, name) for x in rows if x.run == y) / 1e6 for y in ("forward", "backward")]  # noqa: E731
    total = rows[-1]
    times = [1e3 * x for x in (total.in_flight, total.exposed, total.hidden, agreeing)]
    return [*sums("received"), *sums("planned_received"), *times]


def _merged(ranks: list[_Measured]) -> list[Sums]:
    """Return the mean batch: maxima over ranks, and the hidden share of the summed time in flight of all ranks."""
    keys = dict.fromkeys((x.run, x.what) for rank in ranks for x in rank.rows)
    merged = []
    for key in sorted(keys, key=lambda x: x[0] == "both"):  # the total stays last
        rows = [x for rank in ranks for x in rank.rows if (x.run, x.what) == key]
        most = {
            name: max(getattr(x, name) for x in rows) / ranks[0].steps for name in list(Sums.__dataclass_fields__)[2:]
        }
        in_flight = sum(x.in_flight for x in rows)
        most["hidden"] = most["in_flight"] * sum(x.hidden for x in rows) / in_flight if in_flight else 0.0
        merged.append(Sums(*key, **most))
    return merged


def _unlike_plan(unlike: list[str]) -> str:
    return f"Bytes DIFFER from the plan. {'; '.join(unlike)}."


def _sent_any(ranks: list[_Measured]) -> bool:
    return any(x.collectives for x in ranks[0].rows)  # one rank suffices, because all ranks enter each collective


def _notes(ranks: list[_Measured], unlike: list[str]) -> list[str]:
    steps, exchanges = ranks[0].steps, ranks[0].exchanges
    if not steps:
        return ["No training batch was measured: the fit ended before the first batch after warmup."]
    agreeing = max(x.agreeing for x in ranks) / steps * 1e3
    if not _sent_any(ranks):
        why = "no segment crosses a shard" if len(ranks) > 1 else "one rank holds the sequence"
        return [f"Nothing was exchanged: {why}. {steps} batches measured, {agreeing:.3f} ms of agreeing in each."]
    how = ", ".join(exchanges) or "no exchange except of heads"
    lines = [
        f"{how}; {len(ranks)} ranks of a sequence; {steps} batches measured, {agreeing:.3f} ms of agreeing in each."
    ]
    if unlike or exchanges:
        lines.append(_unlike_plan(unlike) if unlike else "Sent and received bytes equal the plan on every rank.")
    return lines


def _cells(x: Sums) -> tuple[str, ...]:
    megabytes, ms = lambda n: f"{n / 1e6:.3f}", lambda s: f"{s * 1e3:.3f}"
    counted = x.what in EXCHANGED or x.what == "all"
    hidden = f"{100 * x.hidden / x.in_flight:.1f}" if x.in_flight else "-"
    plan = (megabytes(x.planned_received), ms(x.planned)) if counted else ("-", "-")
    times = (ms(x.in_flight), ms(x.exposed), hidden)
    return (x.run, x.what, f"{x.collectives:g}", megabytes(x.received), plan[0], *times, plan[1])
