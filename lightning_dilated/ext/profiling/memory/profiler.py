"""MemoryProfiler: peak memory of each part of a training step, on all ranks, by kind; and a report where it ran out.

Shape letters: R ranks, n numbers of a step.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_dilated._compat.lightning import logged_step
from lightning_dilated._validation import flag, integer
from lightning_dilated.ext.planning.advice import advise as planned
from lightning_dilated.ext.planning.host import host_memory
from lightning_dilated.ext.profiling.memory.phases import BACKWARD, FORWARD, OPTIMIZING, REST, Watch
from lightning_dilated.ext.profiling.memory.probe import (
    CpuProbe,
    CudaProbe,
    Measured,
    Snapshots,
    check_steps,
    held_now,
)
from lightning_dilated.ext.profiling.memory.report import Row, Top, draw, metrics, numbers, rows_of, show, top_of
from lightning_dilated.sequence.consensus import ControlGroup, PendingGather

#: what to try where nothing better is known, the cheapest first
GENERAL = (
    "What makes room, the cheapest first: ActivationRecompute('attention-kept'), then ActivationRecompute('block'), which "
    "keeps a block's input only; the feed-forward and the loss over tiles of tokens, and attention over chunks of heads, "
    "where the model has such settings; offload of activations or optimizer states to the host; strategy="
    "'ring_dilated_fsdp', which deals parameters, gradients and optimizer states to the ranks; more GPUs to a sequence."
)
_UNITS = {"bytes": 1, "byte": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"(\d+(?:\.\d+)?) (bytes|byte|KiB|MiB|GiB|TiB)"
_FACTS = {
    "asked": rf"[Tt]ried to allocate {_SIZE}",
    "total": rf"total capacity of {_SIZE}",
    "free": rf"of which {_SIZE} is free",
    "allowed": rf"{_SIZE} allowed",
    "allocated": rf"{_SIZE} is allocated by PyTorch",
    "unused": rf"{_SIZE} is reserved by PyTorch but unallocated",
}


def find_shortage(error: BaseException) -> BaseException | None:
    """The error of an allocation that failed: this one, or one that it came from."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        if isinstance(current, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(current):
            return current
        seen.append(current)
        current = current.__cause__ or current.__context__
    return None


def parse(text: str) -> dict[str, int]:
    """The bytes that the message of torch's allocator for GPUs or for the CPU names, by the names of `_FACTS`."""
    matches = {name: re.search(pattern, text) for name, pattern in _FACTS.items()}
    return {name: round(float(x[1]) * _UNITS[x[2]]) for name, x in matches.items() if x is not None}


def in_words(size: float) -> str:
    """Bytes as torch writes them."""
    for name in ("GiB", "MiB", "KiB"):
        if abs(size) >= _UNITS[name]:
            return f"{size / _UNITS[name]:.2f} {name}"
    return f"{size:.0f} bytes"


def report(rank: int, phase: str, step: int, text: str, held: Mapping[str, int], advice: str | None) -> str:
    """The message.

    Args:
        phase: what was computed, in words.
        text: torch's message.
        held: bytes by kind.
        advice: what would make it fit, where that is known.
    """
    sizes = parse(text)
    asked = f"an allocation of {in_words(sizes['asked'])}" if "asked" in sizes else "an allocation"
    lines = [
        f"MemoryProfiler: rank {rank} ran out of memory in step {step}, {phase}: {asked} failed. {_missing(sizes)}"
    ]
    kinds = [f"{kind} {in_words(n)}" for kind, n in held.items() if n]
    if kinds:
        lines.append(f"Held by {', '.join(kinds)}.")
    return "\n".join([*lines, advice or GENERAL])


def _missing(sizes: Mapping[str, int]) -> str:
    """How much of the bytes that `parse` read there was, and how much was missing."""
    asked, room, unused = sizes.get("asked"), sizes.get("free"), sizes.get("unused", 0)
    if room is not None and {"allowed", "allocated"} <= sizes.keys():
        room = max(0, min(room, sizes["allowed"] - sizes["allocated"] - unused))
    parts = []
    if room is not None:
        total = f" of {in_words(sizes['total'])}" if "total" in sizes else ""
        parts.append(f"{in_words(room)}{total} was free")
    if asked is not None and room is not None and asked > room:
        parts.append(f"{in_words(asked - room)} at least was missing")
    if unused:
        parts.append(f"torch held {in_words(unused)} in pieces that nothing used")
    text = f"{'; '.join(parts)}." if parts else ""
    if asked is not None and unused and asked <= unused + (room or 0):
        text += " In one piece that would have been enough: set PYTORCH_ALLOC_CONF=expandable_segments:True."
    return text


def advise(trainer: Any, pl_module: Any) -> str | None:
    """What the planner would change about this run; None where it has nothing to say."""
    try:
        return planned(trainer, pl_module)
    except Exception as error:  # the run is ending already: its own error is the one to show
        return f"{GENERAL} (The planner could not say more: {type(error).__name__}: {error})"


_fits = itertools.count()


class MemoryProfiler(pl.Callback):
    """Logs the peak memory of each part of a training step, prints a table at the end of fit, and draws a timeline.

    A step is all batches up to the one that an optimizer steps in. Its phases are the forward and the backward of each block
    (TransformerBlocks, or else the children of ModuleLists; counted from 1), what lies outside of blocks ("other"), the
    optimizer, and the rest. A block's backward has the recomputation of its activations in it. Validation is no part of a
    step.

    Logged at the step they belong to, in MB of 1e6 bytes, each as the most and (`..._min_mb`) the least of any rank:
    `memory/peak_mb` of the step; `memory/forward_mb`, `backward`, `optimizer`, `rest`; `memory/forward_block_1_mb`,
    `forward_other`, ...; on GPUs the same of what the allocator has reserved, `memory/peak_reserved_mb`, ...; and of the
    process on the host `memory/host_mb` (resident), `memory/host_peak_mb` and on GPUs `memory/pinned_mb`. Further
    `memory/at_peak/KIND_mb`: what the peak of the rank with the highest one is made of.

    On GPUs the numbers are those of torch's allocator, and nothing waits for the GPU; its peaks begin anew at the borders of
    phases of measured steps, so `torch.cuda.max_memory_allocated()` (and what DeviceStatsMonitor logs) reads the time since
    the last border only: read `peak_allocated` and `peak_reserved` here instead. On the CPU living tensors are counted, see
    `planning.Meter`: exact to a byte but for what a kernel takes and gives back, slower, and blocks that were compiled
    run uncompiled in measured steps. Kinds: see `CpuProbe` and `CudaProbe`; what is not known is temporary.

    A rank that runs out of memory reports in a warning the phase, the missing bytes, what held the memory and what would
    help; then the error is raised. No other rank takes part.

    Args:
        every_n_steps: of so many steps one is measured: the second, and every so many after it; with 1 all.
        folder: for timelines and snapshots; None: the logger's, or the Trainer's root.
        timeline: write `memory_timeline.png` of the step measured last, by the rank with the highest peak.
        snapshot_steps: (start, stop) of this fit, counted from 0: a history of CUDA's allocator in these steps is written by
            every rank as `memory_steps_START_to_LAST_rank_RANK.pickle`, for pytorch.org/memory_viz.
        snapshot_on_oom: where a GPU's memory ran out, write `memory_oom_rank_RANK.pickle`.

    Attributes:
        latest: the numbers logged last, on every rank.
        rows: after fit, on every rank: the table's `Row`s, in bytes.
        top: the highest peak of all measured steps and ranks.
        measured: this rank's step measured last, with its timeline.
        steps: how many steps were measured.
        peak_allocated, peak_reserved: the most bytes on this rank; on GPUs since the allocator's peaks were last reset by
            someone else, on the CPU (where nothing is reserved: None) in measured steps.

    Raises:
        TypeError, ValueError: when made, naming the argument; at the start of fit for devices other than GPUs and CPUs, and
            for `snapshot_steps` on the CPU.
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        folder: str | Path | None = None,
        timeline: bool = True,
        snapshot_steps: tuple[int, int] | None = None,
        snapshot_on_oom: bool = True,
    ) -> None:
        self.every_n_steps = integer(every_n_steps, "every_n_steps", 1)
        if folder is not None and (not isinstance(folder, (str, Path)) or not str(folder)):
            raise TypeError(f"folder must be a path, or None, got {folder!r}.")
        for name, value in (("timeline", timeline), ("snapshot_on_oom", snapshot_on_oom)):
            flag(value, name)
        self.folder, self.timeline = None if folder is None else Path(folder), timeline
        self.snapshot_steps, self.snapshot_on_oom = check_steps(snapshot_steps), snapshot_on_oom
        self._watch: Watch = None  # type: ignore[assignment]  # None only outside of a fit, as is the probe
        self._reset()

    def _reset(self) -> None:
        self.latest: dict[str, float] = {}
        self.rows: list[Row] = []
        self.top: Top | None = None
        self.measured: Measured | None = None
        self.steps = self._count = self._blocks = self._highest = 0
        self.peak_allocated = 0
        self.peak_reserved: int | None = None
        self._logged, self._open, self._measuring, self._stepped = -1, False, False, False
        self._most: torch.Tensor | None = None
        self._asked: deque[tuple[int, PendingGather]] = deque()
        self._hooks: list[Any] = []

    # -- hooks of the fit --------------------------------------------------------------------------------------------
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what cannot be measured before anything is trained."""
        if stage != "fit":
            return
        if sum(isinstance(x, MemoryProfiler) for x in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError("one MemoryProfiler a Trainer: of two, one would reset the other's peaks. Leave one out.")
        device = trainer.strategy.root_device
        if device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"MemoryProfiler reads CUDA's allocator or counts tensors on the CPU, and this run is on {device}. "
                "Leave it out."
            )
        self._snapshots = Snapshots(self.snapshot_steps, device)
        self._folder = self.folder or Path(trainer.log_dir or trainer.default_root_dir)  # every rank has to ask

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin anew, with a connection between hosts of this fit's own."""
        self._let_go()
        self._reset()
        self._watch = Watch(pl_module)
        self._watch.attach()
        self._blocks, device = len(self._watch.blocks), trainer.strategy.root_device
        probe = CudaProbe if device.type == "cuda" else CpuProbe
        self._probe: CudaProbe | CpuProbe = probe(
            device, pl_module, self._watch, getattr(trainer.strategy, "sequence", None)
        )
        self._quiet = None
        if trainer.world_size > 1 and dist.is_available() and dist.is_initialized():
            self._quiet = ControlGroup(cast(dist.ProcessGroup, dist.group.WORLD), None, f"memory-{next(_fits)}")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """See the ends of optimizers' steps."""
        for optimizer in trainer.optimizers:
            if hasattr(optimizer, "register_step_post_hook"):
                self._hooks.append(optimizer.register_step_post_hook(lambda *_: self._after_optimizer(pl_module)))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log what is left, while loggers are open."""
        self._read(trainer, last=True)
        self._snapshots.stop()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the table on the first rank; draw the timeline on the one with the highest peak."""
        self._peaks()
        if self._most is not None:
            self.rows = rows_of(self._most, self._blocks)
        if trainer.is_global_zero:
            show(self.rows, self.top, self._blocks, self.steps, self._most)
        if self.timeline and self.measured is not None and trainer.global_rank == self._highest:
            device = trainer.strategy.root_device
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
            who = f"rank {trainer.global_rank} of {trainer.world_size}, {name}"
            draw(self.measured, self._folder, who, self._blocks)
        self._let_go()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Follow nothing any more."""
        self._let_go()

    def _let_go(self) -> None:
        if self._watch is None:
            return
        self._probe.drop()
        self._watch.detach()
        self._snapshots.stop()
        for hook in self._hooks:
            hook.remove()
        self._watch = self._probe = self._quiet = None  # type: ignore[assignment]
        self._hooks, self._open = [], False
        self._asked.clear()

    # -- hooks of a step ---------------------------------------------------------------------------------------------
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin a step, or go on with one."""
        if not self._open:
            self._open, self._stepped = True, False
            self._measuring = self._count % self.every_n_steps == 1 % self.every_n_steps
            self._snapshots.begin(self._count)
            if self._measuring:
                self._probe.start()
        self._watch.start()
        if self._measuring:
            self._probe.resume(batch, trainer.optimizers)
            self._watch.border = self._probe.border

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        self._watch.enter(BACKWARD)
        if self._measuring:
            self._probe.saved()

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._measuring:
            self._probe.gradients()
        self._watch.enter(REST if pl_module.automatic_optimization else FORWARD)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if self._measuring:
            self._probe.gradients()
        self._stepped = True
        self._watch.enter(OPTIMIZING)

    def _after_optimizer(self, pl_module: pl.LightningModule) -> None:
        if self._watch is not None and self._watch.phase.stage == OPTIMIZING:
            self._watch.enter(REST if pl_module.automatic_optimization else FORWARD)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """End the batch, and the step if an optimizer stepped; log earlier ones that all ranks have reported by now."""
        self._watch.stop()
        if self._measuring:
            self._probe.pause(self._watch.phase, trainer.optimizers)
        if self._stepped:
            self._end_step(trainer)
        self._read(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget a batch that was aborted, with its step."""
        if self._watch.on:
            self._watch.stop()
            self._probe.drop()
            self._open = False

    def _end_step(self, trainer: pl.Trainer) -> None:
        self._snapshots.end(self._count, self._folder, trainer.global_rank)
        self._open, self._count = False, self._count + 1
        if not self._measuring:
            return
        # the number that Lightning logs this batch's own values with
        step = logged_step(trainer)
        self.measured, self._measuring = self._probe.finish(step), False
        self.steps += 1
        self._peaks()
        vector = numbers(self.measured, self._blocks, host_memory())
        if self._quiet is None:
            self._log(trainer, step, vector[None])
        else:
            self._asked.append((step, self._quiet.start_gather(vector)))

    def _peaks(self) -> None:
        self._probe.read()
        self.peak_allocated, self.peak_reserved = self._probe.overall

    # -- numbers -----------------------------------------------------------------------------------------------------
    def _read(self, trainer: pl.Trainer, last: bool = False) -> None:
        """Log steps that every rank has reported; `last`: wait for them."""
        while self._asked and (last or self._asked[0][1].done()):
            step, asked = self._asked.popleft()
            self._log(trainer, step, torch.stack(asked.wait()))

    def _log(self, trainer: pl.Trainer, step: int, vectors: torch.Tensor) -> None:
        self.latest, top = metrics(vectors, self._blocks), top_of(vectors, self._blocks, step)
        self._highest = top.rank
        if self.top is None or top.allocated > self.top.allocated:
            self.top = top
        self._most = vectors if self._most is None else torch.maximum(self._most, vectors)
        for logger in trainer.loggers if step > self._logged else ():
            logger.log_metrics(self.latest, step=step)
        self._logged = step

    # -- where memory ran out ----------------------------------------------------------------------------------------
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Report an error of memory, without other ranks; and stop following."""
        error = find_shortage(exception)
        if error is not None and self._watch is not None:
            self._probe.drop()  # what follows is not to be counted
            try:
                warnings.warn(self._message(trainer, pl_module, str(error)), stacklevel=2)
            except Exception as trouble:  # the run's own error is the one to show
                warnings.warn(f"MemoryProfiler could not say what filled the memory: {trouble!r}", stacklevel=2)
        self._let_go()

    def _message(self, trainer: pl.Trainer, pl_module: pl.LightningModule, text: str) -> str:
        """The message; also writes the snapshot."""
        where = self._watch.phase.in_words(self._blocks) if self._watch.on else "outside of training batches"
        if trainer.validating or trainer.sanity_checking:
            where = "validation"
        allocated = parse(text).get("allocated")
        if self._measuring and self._watch.on:
            kinds = self._probe.held(allocated)
        else:
            kinds = held_now(trainer.strategy.root_device, pl_module, trainer.optimizers, allocated)
        step, rank = logged_step(trainer), trainer.global_rank
        message = report(rank, where, step, text, kinds, advise(trainer, pl_module))
        path = self._folder / f"memory_oom_rank_{rank}.pickle"
        if self.snapshot_on_oom and self._snapshots.write(path):
            message += f"\nA snapshot for pytorch.org/memory_viz: {path}"
        return message
