"""Peak memory of the phases of a training step by kind: by CUDA's allocator, or on the CPU by counting tensors.

Also snapshots of CUDA's allocator for pytorch.org/memory_viz.
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

#: most allocations and frees in a history, which keeps the latest
ENTRIES = 200_000


def check_steps(steps: object) -> tuple[int, int] | None:
    """Return `snapshot_steps` as (first, stop), or None.

    Raises:
        TypeError, ValueError: for anything but two integers 0 <= start < stop.
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
    """The allocator's history in steps start, ..., stop - 1 on this rank."""

    def __init__(self, steps: tuple[int, int] | None, device: torch.device) -> None:
        if steps is not None and device.type != "cuda":
            raise ValueError(
                f"snapshot_steps={steps} needs CUDA's allocator to record, and this run is on {device}. Leave "
                "snapshot_steps out: the timeline works on the CPU, too."
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
        """Write the history and stop recording; False without CUDA's allocator."""
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


#: (seconds, bytes by kind from then on)
Point = tuple[float, dict[str, int]]


@dataclass
class Span:
    """A phase that ended: its times, and its peaks in bytes (reserved: None on the CPU).

    `kinds` are the kinds of the allocated bytes at the peak, and add up to them.
    """

    phase: Phase
    start: float
    stop: float
    allocated: int
    reserved: int | None = None
    kinds: dict[str, int] = field(default_factory=dict)


@dataclass
class Measured:
    """A training step; `points` are its timeline."""

    step: int
    spans: list[Span]
    points: list[Point]

    @property
    def top(self) -> Span:
        return max(self.spans, key=lambda x: x.allocated)


class CpuProbe:
    """Counts the tensors on the CPU exactly; `Meter` says what it cannot see.

    Parameters, gradients and optimizer states are known by their storages, before and after each batch, after each
    backward and before the optimizer. Exchange buffers are other tensors that collectives read or write: attention's,
    other calls', and DDP's buckets of gradients once a backward was measured. Saved activations are other tensors that
    the forward made and that live when the backward begins, including the loss and logged values. Everything else is
    temporary, including tensors that the backward makes or recomputes.
    """

    def __init__(self, device: torch.device, module: nn.Module, watch: Watch, sequence: Any = None) -> None:
        self.module, self.watch, self.overall, self._inside = module, watch, (0, None), False
        self._meter = Meter("cpu", record=True, labels=exchanged)

    def start(self) -> None:
        self._meter.restart(keep=[EXCHANGE])  # DDP's buckets: nothing reads them before the backward
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
        """Do nothing: `overall` is up to date."""

    def held(self, allocated: int | None) -> dict[str, int]:
        """Return the bytes by kind now; in a forward everything that it made counts as saved."""
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
    """Reads a GPU's allocator at the borders of phases, and resets its peaks there; nothing waits for the GPU.

    Parameters, gradients, optimizer states and batch are the bytes of these tensors. Saved activations are the bytes
    allocated at the end of a phase of the forward beyond the batch's start, less the other kinds; in the backward, the
    bytes left of them when a phase began. Exchange buffers are the bytes that the sequence's exchanges sent and
    received in the phase. After the forward of a block they include received bytes that it keeps (not with exchange
    "ring", nor if the block is recomputed), at most the bytes that the phase left allocated. The other bytes of the
    peak are temporary: what kernels need in the phase, what a backward makes or recomputes, what libraries and DDP's
    buckets hold all the time, and what FSDP gathers."""

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
        """Do nothing before a backward."""

    def gradients(self) -> None:
        """Do nothing with new gradients."""

    def pause(self, ended: Phase, optimizers: Iterable[Any]) -> None:
        self.border(ended)

    def drop(self) -> None:
        """Do nothing: nothing is held."""

    def finish(self, step: int) -> Measured:
        last = self._spans[-1]
        return Measured(step, self._spans, [(x.start, x.kinds) for x in self._spans] + [(last.stop, last.kinds)])

    def held(self, allocated: int | None) -> dict[str, int]:
        """Return the bytes by kind at the begin of the present phase; bytes allocated since then are temporary."""
        known = {**self._known, GRADIENTS: sum(self._grads.values()), EXCHANGE: sum(self._kept.values())}
        known[ACTIVATIONS] = self._saved()
        return shares(torch.cuda.memory_allocated(self.device) if allocated is None else allocated, known)

    # -- bytes ---------------------------------------------------------------------------------------------------------
    def read(self) -> None:
        """Update `overall` by the allocator's peaks, and reset them."""
        self._stats()

    def _stats(self) -> tuple[int, int, int]:
        """Return (peak allocated, peak reserved, allocated now) since the last call."""
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        torch.cuda.reset_peak_memory_stats(self.device)
        self.overall = (max(self.overall[0], allocated["peak"]), max(self.overall[1] or 0, reserved["peak"]))
        return allocated["peak"], reserved["peak"], allocated["current"]

    def _count(self, groups: Sequence[int | None]) -> None:
        """Count the gradients of some blocks' parameters; None: parameters outside of blocks."""
        for i in groups:
            tensors = (part for g in gradients(self._groups[i]) for part in parts(g))
            self._grads[i] = sum(t.numel() * t.element_size() for t in tensors if t.device == self.device)

    def _left(self) -> int:
        """Return the bytes of unknown kinds allocated now, less those at the batch's start."""
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
        return max(0, now[0] - before[0]), max(0, now[1] - before[1])  # the counters may have been cleared

    def _keeps(self, block: int | None) -> bool:
        """Return whether a block saves received rows for its backward."""
        plan = getattr(self.sequence, "plan", None)
        again = block is not None and getattr(self.watch.blocks[block], "recompute", "none") == "block"
        return not again and getattr(plan, "exchange", None) != "ring"


def held_now(
    device: torch.device, module: nn.Module, optimizers: Iterable[Any], allocated: int | None
) -> dict[str, int]:
    """Return the bytes by kind in a step that is not measured; `allocated`: all bytes, if they are known."""
    tensors_of_kind = {
        PARAMETERS: weights(module),
        GRADIENTS: gradients(module.parameters()),
        OPTIMIZER: states(optimizers),
    }
    sizes = {kind: bytes_of(tensors, device) for kind, tensors in tensors_of_kind.items()}
    return {**sizes, "activations and temporary": max(0, (allocated or 0) - sum(sizes.values()))}
