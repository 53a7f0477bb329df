"""Measure peak memory of each part of a training step by kind, on all ranks, and report why memory ran out."""

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
from lightning_dilated.ext.profiling.memory.probe import CpuProbe, CudaProbe, Measured, Snapshots, check_steps, held_now
from lightning_dilated.ext.profiling.memory.report import Row, Top, draw, metrics, numbers, rows_of, show, top_of
from lightning_dilated.sequence.consensus import ControlGroup, PendingGather

#: general advice, the cheapest measures first
GENERAL = (
    "What makes room, the cheapest first: ActivationRecompute('attention-kept'), then ActivationRecompute('block'), which "
    "keeps a block's input only; the feed-forward and the loss over tiles of tokens, and attention over chunks of heads, "
    "if the model has such settings; offload of activations or optimizer states to the host; strategy="
    "'ring_dilated_fsdp', which shards parameters, gradients and optimizer states; more GPUs for each sequence."
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
    """Return the error of a failed allocation: this error or one of its causes; None if no allocation failed."""
    visited: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in visited:
        if isinstance(current, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(current):
            return current
        visited.append(current)
        current = current.__cause__ or current.__context__
    return None


def parse(text: str) -> dict[str, int]:
    """Parse a message of torch's GPU or CPU allocator; return its numbers of bytes by their names in `_FACTS`."""
    matches = {name: re.search(pattern, text) for name, pattern in _FACTS.items()}
    return {name: round(float(x[1]) * _UNITS[x[2]]) for name, x in matches.items() if x is not None}


def in_words(size: float) -> str:
    """Format bytes as torch does."""
    for name in ("GiB", "MiB", "KiB"):
        if abs(size) >= _UNITS[name]:
            return f"{size / _UNITS[name]:.2f} {name}"
    return f"{size:.0f} bytes"


def report(rank: int, phase: str, step: int, text: str, held: Mapping[str, int], advice: str | None) -> str:
    """Return the text of the warning.

    Args:
        rank, step: the rank and the step that ran out of memory.
        phase: description of the phase.
        text: torch's message.
        held: bytes in memory, by kind.
        advice: text about settings that would fit; None: general advice.
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
    """Describe the bytes that were free and the bytes that were missing."""
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
    """Return the planner's advice for this run; None if it has none."""
    try:
        return planned(trainer, pl_module)
    except Exception as error:  # an error here must not hide the run's own error
        return f"{GENERAL} (The planner could not say more: {type(error).__name__}: {error})"


_fits = itertools.count()


class MemoryProfiler(pl.Callback):
    """Log the peak memory of each part of a training step, print a table at the end of fit, and draw a timeline.

    A step ends with the batch in which an optimizer steps. Its phases are the forward and the backward of
    each block (TransformerBlocks, or else the children of ModuleLists; numbered from 1), work outside blocks ("other"),
    the optimizer, and the rest. A block's backward includes recomputation. Validation is not part of a step.

    Each name is the maximum over ranks in MB of 1e6 bytes; the same name with `_min_mb` is the minimum. Logged are
    `memory/peak_mb` of the step; `memory/forward_mb`, `backward`, `optimizer`, `rest`; `memory/forward_block_1_mb`,
    `forward_other`, ...; on GPUs, the same for reserved bytes, `memory/peak_reserved_mb`, ...; for the host process
    `memory/host_mb` (resident), `memory/host_peak_mb` and on GPUs `memory/pinned_mb`; `memory/at_peak/KIND_mb`.

    On GPUs, the allocator is read, and nothing waits for the GPU. Measured steps reset the allocator's peaks between
    phases, so `torch.cuda.max_memory_allocated()` and DeviceStatsMonitor see only the time since the last reset: read
    `peak_allocated` and `peak_reserved` here instead. On the CPU, live tensors are counted (`planning.Meter`), without
    memory that a kernel allocates and frees. Counting is slower, and compiled blocks run uncompiled in measured steps.
    `CpuProbe` and `CudaProbe` describe each KIND; memory of an unknown kind counts as temporary.

    A rank that runs out of memory warns with the phase, the missing bytes, the memory in use by kind, and settings that
    would help; then the error is raised. Other ranks are not involved.

    Args:
        every_n_steps: measure one step in this many, starting with the second step; 1: measure all steps.
        folder: folder for timelines and snapshots; None: the logger's folder, or the Trainer's root.
        timeline: write `memory_timeline.png` of the last measured step, on the rank with the highest peak.
        snapshot_steps: (start, stop) of this fit, counted from 0: every rank writes the history of CUDA's allocator in
            these steps as `memory_steps_START_to_LAST_rank_RANK.pickle`, for pytorch.org/memory_viz.
        snapshot_on_oom: if a GPU runs out of memory, write `memory_oom_rank_RANK.pickle`.

    Attributes:
        latest: the last logged numbers, on every rank.
        rows: the table's `Row`s, in bytes. Set on every rank after fit.
        top: the highest peak of all measured steps and ranks.
        measured: the last measured step of this rank, with its timeline.
        steps: number of measured steps.
        peak_allocated, peak_reserved: peak bytes on this rank: on a GPU, since other code last reset the allocator's
            peaks; on a CPU, in measured steps (`peak_reserved`: None).

    Raises:
        TypeError, ValueError: for an invalid argument; at the start of fit if the device is neither a GPU nor a CPU, or
            if it is a CPU and `snapshot_steps` is set.
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
        self._watch: Watch = None  # type: ignore[assignment]  # None outside a fit, like the probe
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
        """Raise ValueError if the run cannot be measured."""
        if stage != "fit":
            return
        if sum(isinstance(x, MemoryProfiler) for x in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError("use one MemoryProfiler per Trainer: a second one would reset the first one's peaks.")
        device = trainer.strategy.root_device
        if device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"MemoryProfiler reads CUDA's allocator or counts tensors on the CPU, but this run is on {device}. "
                "Leave it out."
            )
        self._snapshots = Snapshots(self.snapshot_steps, device)
        self._folder = self.folder or Path(trainer.log_dir or trainer.default_root_dir)  # log_dir is collective

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reset all numbers, and open a new connection between hosts for this fit."""
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
        """Register hooks that run after each optimizer's step."""
        for optimizer in trainer.optimizers:
            if hasattr(optimizer, "register_step_post_hook"):
                self._hooks.append(optimizer.register_step_post_hook(lambda *_: self._after_optimizer(pl_module)))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the last steps while loggers are open."""
        self._read(trainer, last=True)
        self._snapshots.stop()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the table on the first rank; draw the timeline on the rank with the highest peak."""
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
        """Stop measuring."""
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
        """Begin a step, or continue one."""
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
        """End the batch, and end the step if an optimizer stepped; log earlier steps that all ranks have reported."""
        self._watch.stop()
        if self._measuring:
            self._probe.pause(self._watch.phase, trainer.optimizers)
        if self._stepped:
            self._end_step(trainer)
        self._read(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Discard an aborted batch and its step."""
        if self._watch.on:
            self._watch.stop()
            self._probe.drop()
            self._open = False

    def _end_step(self, trainer: pl.Trainer) -> None:
        self._snapshots.end(self._count, self._folder, trainer.global_rank)
        self._open, self._count = False, self._count + 1
        if not self._measuring:
            return
        # the step at which Lightning logs this batch's values
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
        """Log steps that every rank has reported; `last`: wait for all steps."""
        while self._asked and (last or self._asked[0][1].done()):
            step, pending = self._asked.popleft()
            self._log(trainer, step, torch.stack(pending.wait()))

    def _log(self, trainer: pl.Trainer, step: int, vectors: torch.Tensor) -> None:
        self.latest, top = metrics(vectors, self._blocks), top_of(vectors, self._blocks, step)
        self._highest = top.rank
        if self.top is None or top.allocated > self.top.allocated:
            self.top = top
        self._most = vectors if self._most is None else torch.maximum(self._most, vectors)
        for logger in trainer.loggers if step > self._logged else ():
            logger.log_metrics(self.latest, step=step)
        self._logged = step

    # -- out of memory -----------------------------------------------------------------------------------------------
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Warn if memory ran out, without waiting for other ranks; then stop measuring."""
        error = find_shortage(exception)
        if error is not None and self._watch is not None:
            self._probe.drop()  # do not count the memory of the report
            try:
                warnings.warn(self._message(trainer, pl_module, str(error)), stacklevel=2)
            except Exception as trouble:  # an error here must not hide the run's own error
                warnings.warn(f"MemoryProfiler could not say what filled the memory: {trouble!r}", stacklevel=2)
        self._let_go()

    def _message(self, trainer: pl.Trainer, pl_module: pl.LightningModule, text: str) -> str:
        """Return the text of the warning, and write the snapshot."""
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
