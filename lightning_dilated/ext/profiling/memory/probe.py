"""Measure peak memory by phase of a training step and by kind, from CUDA's allocator or by counting tensors on the CPU.

`Snapshots` writes the history of CUDA's allocator for pytorch.org/memory_viz.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_dilated.ext._compat.torch import dump_memory, record_memory
from lightning_dilated.ext.planning.counting.memory_tracker import (
    ACTIVATIONS,
    BATCH,
    EXCHANGE,
    GRADIENTS,
    KINDS,
    OPTIMIZER,
    PARAMETERS,
    Meter,
    parts,
)
from lightning_dilated.ext.profiling.memory.phases import (
    BACKWARD,
    FORWARD,
    OPTIMIZING,
    Phase,
    Watch,
    bytes_of,
    exchanged,
    gradients,
    shares,
    states,
    tensors_of,
    weights,
)

#: maximum number of allocations and frees in a history; older ones are dropped
ENTRIES = 200_000


def check_steps(steps: object) -> tuple[int, int] | None:
    """Return `snapshot_steps` as a tuple (start, stop), or None.

    Raises:
        TypeError, ValueError: if it is neither None nor two integers with 0 <= start < stop.
    """
    if steps is None:
        return None
    plain = isinstance(steps, (tuple, list)) and len(steps) == 2
    if not plain or not all(isinstance(x, int) and not isinstance(x, bool) for x in steps):
        raise TypeError(f"snapshot_steps must be two integers (start, stop), or None, got {steps!r}.")
    if not 0 <= steps[0] < steps[1]:
        raise ValueError(f"snapshot_steps must be (start, stop) with 0 <= start < stop, got {steps!r}.")
    return steps[0], steps[1]


class Snapshots:
    """Record CUDA's allocator on this rank in steps start, ..., stop - 1."""

    def __init__(self, steps: tuple[int, int] | None, device: torch.device) -> None:
        if steps is not None and device.type != "cuda":
            raise ValueError(
                f"snapshot_steps={steps} records CUDA's allocator, but this run is on {device}. Leave snapshot_steps "
                "out: the timeline also works on the CPU."
            )
        self.steps, self.device, self.recording = steps, device, False

    def begin(self, step: int) -> None:
        if self.steps is not None and not self.recording and self.steps[0] <= step < self.steps[1]:
            record_memory(ENTRIES)
            self.recording = True

    def end(self, step: int, folder: Path, rank: int) -> None:
        if self.recording and step >= self.steps[1] - 1:
            first, stop = self.steps
            self.write(folder / f"memory_steps_{first}_to_{stop - 1}_rank_{rank}.pickle")

    def write(self, path: Path) -> bool:
        """Write the history, stop recording and return True; return False if the device is not a GPU."""
        if self.device.type != "cuda":
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        dump_memory(str(path))
        self.stop()
        return True

    def stop(self) -> None:
        if self.recording:
            self.recording = False
            record_memory(None)


#: (seconds, bytes by kind from that time on)
Point = tuple[float, dict[str, int]]


@dataclass
class Span:
    """A phase that ended: its times, and its peaks in bytes (reserved: None on the CPU).

    `kinds`: the bytes of `allocated` by kind; they add up to `allocated`.
    """

    phase: Phase
    start: float
    stop: float
    allocated: int
    reserved: int | None = None
    kinds: dict[str, int] = field(default_factory=dict)


@dataclass
class Measured:
    """The measurements of a training step; `points`: memory over time."""

    step: int
    spans: list[Span]
    points: list[Point]

    @property
    def top(self) -> Span:
        return max(self.spans, key=lambda x: x.allocated)


class CpuProbe:
    """Count the tensors on the CPU with a `Meter`; see its docstring for memory that it does not count.

    Storages of parameters, gradients and optimizer states are identified before and after each batch, after each
    backward and before the optimizer. Exchange buffers are other tensors that collectives read or write: buffers of
    attention and of other calls, and DDP's gradient buckets after the first measured backward. Saved activations are
    other tensors that the forward created and that are in memory when the backward begins, including the loss and
    logged values. All other tensors are temporary, including those that the backward creates or recomputes."""

    def __init__(self, device: torch.device, module: nn.Module, watch: Watch, sequence: Any = None) -> None:
        self.module, self.watch, self.overall, self._inside = module, watch, (0, None), False
        self._meter = Meter("cpu", record=True, labels=exchanged)

    def start(self) -> None:
        self._meter.restart(keep=[EXCHANGE])  # keep DDP's buckets: no operation reads them before the backward
        self._spans: list[tuple[Span, int, int]] = []

    def resume(self, batch: Any, optimizers: Iterable[Any]) -> None:
        self._meter.track(weights(self.module), PARAMETERS)
        self._meter.track(tensors_of(batch), BATCH)
        self.gradients()
        self._meter.track(states(optimizers), OPTIMIZER)
        self._begin(time.perf_counter())
        self._meter.__enter__()
        self._inside = True

    def _begin(self, now: float) -> None:
        self._start, self._first = now, len(self._meter.events)
        self._meter.reset_peak()

    def border(self, ended: Phase) -> None:
        span = Span(ended, self._start, now := time.perf_counter(), self._meter.peak)
        self._spans.append((span, self._first, len(self._meter.events)))
        self.overall = (max(self.overall[0], span.allocated), None)
        self._begin(now)

    def saved(self) -> None:
        self._meter.mark(ACTIVATIONS)

    def gradients(self) -> None:
        self._meter.track(gradients(self.module.parameters()), GRADIENTS)

    def pause(self, ended: Phase, optimizers: Iterable[Any]) -> None:
        self.drop()
        self.border(ended)
        self.gradients()
        self._meter.track(states(optimizers), OPTIMIZER)

    def drop(self) -> None:
        if self._inside:
            self._inside = False
            self._meter.__exit__(None, None, None)

    def read(self) -> None:
        """Do nothing, because `overall` is always up to date."""

    def held(self, allocated: int | None) -> dict[str, int]:
        """Return the present bytes by kind; in a forward, all tensors that the forward created count as saved."""
        self.gradients()
        if self.watch.phase.stage == FORWARD:
            self.saved()
        sizes = self._meter.by_kind()
        return {kind: sizes[kind] for kind in KINDS if kind in sizes}

    def finish(self, step: int) -> Measured:
        after = [{}, *({k: n for k, n in held.items() if n} for *_, held in self._meter.replay())]
        for span, first, stop in self._spans:
            span.kinds = max(after[first : stop + 1], key=lambda x: sum(x.values()))
        begin = self._spans[0][1]
        times = [self._spans[0][0].start, *(seconds for *_, seconds in self._meter.events[begin:])]
        return Measured(step, [x for x, *_ in self._spans], list(zip(times, after[begin:], strict=True)))


class CudaProbe:
    """Read a GPU's allocator between phases, and reset its peaks there; nothing waits for the GPU.

    Parameters, gradients, optimizer states and the batch are counted from tensors. Saved activations are computed:
    in the forward, bytes at the end of a phase minus bytes at the batch's start and bytes of other kinds; in the
    backward, the same difference at the start of the phase. Exchange buffers are the bytes that the sequence's
    exchanges sent and received in the phase, and received bytes that earlier blocks saved (at most the bytes that their
    forward left allocated; none with exchange "ring" or if the block is recomputed). All other bytes of the peak are
    temporary: workspaces of kernels, tensors that a backward creates or recomputes, memory of libraries and of DDP's
    buckets, and parameters that FSDP gathers."""

    def __init__(self, device: torch.device, module: nn.Module, watch: Watch, sequence: Any = None) -> None:
        self.device, self.module, self.watch, self.sequence = device, module, watch, sequence
        self.overall: tuple[int, int | None] = (0, 0)
        inside = {i: list(block.parameters()) for i, block in enumerate(watch.blocks)}
        known = {id(p) for group in inside.values() for p in group}
        self._groups = {**inside, None: [p for p in module.parameters() if id(p) not in known]}

    def start(self) -> None:
        self._spans: list[Span] = []

    def resume(self, batch: Any, optimizers: Iterable[Any]) -> None:
        self._optimizers = optimizers
        self._known = {
            PARAMETERS: bytes_of(weights(self.module), self.device),
            OPTIMIZER: bytes_of(states(optimizers), self.device),
            BATCH: bytes_of(tensors_of(batch), self.device),
        }
        self._grads: dict[int | None, int] = {}
        self._count(list(self._groups))
        self._kept: dict[int | None, int] = {}
        self._moved()
        self._other = 0
        self._held = self._stats()[2]
        self._other = self._left()
        self._start = time.perf_counter()

    def border(self, ended: Phase) -> None:
        peak, reserved, held = self._stats()
        known = {**self._known, GRADIENTS: sum(self._grads.values())}
        sent, received = self._moved()
        known[EXCHANGE], known[ACTIVATIONS] = sum(self._kept.values()) + sent + received, self._saved()
        if ended.stage == FORWARD and self._keeps(ended.block):
            saved = min(received, max(0, held - self._held))
            self._kept[ended.block] = self._kept.get(ended.block, 0) + saved
        elif ended.stage == BACKWARD:
            self._kept.pop(ended.block, None)
        all_of_them = ended.block is None or ended.stage != self.watch.phase.stage
        self._count(list(self._groups) if all_of_them else [ended.block])
        if ended.stage == OPTIMIZING:
            self._known[OPTIMIZER] = known[OPTIMIZER] = bytes_of(states(self._optimizers), self.device)
        self._held = held
        if ended.stage == FORWARD:
            known[ACTIVATIONS] = self._saved()
        now = time.perf_counter()
        self._spans.append(Span(ended, self._start, now, peak, reserved, shares(peak, known)))
        self._start = now

    def saved(self) -> None:
        """Do nothing: `border` computes saved activations."""

    def gradients(self) -> None:
        """Do nothing: `border` counts gradients."""

    def pause(self, ended: Phase, optimizers: Iterable[Any]) -> None:
        self.border(ended)

    def drop(self) -> None:
        """Do nothing: there is no `Meter` to leave."""

    def finish(self, step: int) -> Measured:
        last = self._spans[-1]
        return Measured(step, self._spans, [(x.start, x.kinds) for x in self._spans] + [(last.stop, last.kinds)])

    def held(self, allocated: int | None) -> dict[str, int]:
        """Return the bytes by kind at the start of the present phase; bytes allocated since then count as temporary."""
        known = {**self._known, GRADIENTS: sum(self._grads.values()), EXCHANGE: sum(self._kept.values())}
        known[ACTIVATIONS] = self._saved()
        return shares(torch.cuda.memory_allocated(self.device) if allocated is None else allocated, known)

    # -- bytes ---------------------------------------------------------------------------------------------------------
    def read(self) -> None:
        """Update `overall` with the allocator's peaks, and reset the peaks."""
        self._stats()

    def _stats(self) -> tuple[int, int, int]:
        """Return (peak allocated, peak reserved, present allocated) bytes; the peaks are since the last call."""
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        torch.cuda.reset_peak_memory_stats(self.device)
        self.overall = (max(self.overall[0], allocated["peak"]), max(self.overall[1] or 0, reserved["peak"]))
        return allocated["peak"], reserved["peak"], allocated["current"]

    def _count(self, groups: Sequence[int | None]) -> None:
        """Count the bytes of gradients of the blocks in `groups`, where None means parameters outside blocks."""
        for i in groups:
            tensors = (part for g in gradients(self._groups[i]) for part in parts(g))
            self._grads[i] = sum(t.numel() * t.element_size() for t in tensors if t.device == self.device)

    def _left(self) -> int:
        """Return the allocated bytes of unknown kind, minus the bytes of unknown kind at the batch's start."""
        return self._held - sum(self._known.values()) - sum(self._grads.values()) - self._other

    def _saved(self) -> int:
        return max(0, self._left() - sum(self._kept.values()))

    def _moved(self) -> tuple[int, int]:
        """Return the (sent, received) bytes of the sequence's exchanges since the last call."""
        if self.sequence is None:
            return 0, 0
        traffic = (self.sequence.forward_traffic, self.sequence.backward_traffic)
        now = (sum(x.sent for x in traffic), sum(x.received for x in traffic))
        before, self._counted = getattr(self, "_counted", now), now
        return max(0, now[0] - before[0]), max(0, now[1] - before[1])  # 0 if other code reset the counters

    def _keeps(self, block: int | None) -> bool:
        """Return whether a block saves received rows for its backward."""
        plan = getattr(self.sequence, "plan", None)
        again = block is not None and getattr(self.watch.blocks[block], "recompute", "none") == "block"
        return not again and getattr(plan, "exchange", None) != "ring"


def held_now(
    device: torch.device, module: nn.Module, optimizers: Iterable[Any], allocated: int | None
) -> dict[str, int]:
    """Return the bytes by kind in a step that is not measured; `allocated`: all allocated bytes, or None if unknown."""
    tensors_of_kind = {
        PARAMETERS: weights(module),
        GRADIENTS: gradients(module.parameters()),
        OPTIMIZER: states(optimizers),
    }
    sizes = {kind: bytes_of(tensors, device) for kind, tensors in tensors_of_kind.items()}
    return {**sizes, "activations and temporary": max(0, (allocated or 0) - sum(sizes.values()))}
