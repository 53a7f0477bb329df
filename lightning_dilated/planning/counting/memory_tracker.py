"""Meter: the bytes of living tensors, counted by their storages as operations make them; real tensors and fake ones.

Storages are followed by weak references: what frees them is of no concern, and nothing is kept alive.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

#: kinds of memory, from the bottom of a picture up; what has no kind is temporary
PARAMETERS, GRADIENTS, OPTIMIZER, BATCH = "parameters", "gradients", "optimizer states", "batch"
ACTIVATIONS, EXCHANGE, TEMPORARY = "saved activations", "exchange buffers", "temporary"
KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER, BATCH, ACTIVATIONS, EXCHANGE, TEMPORARY)
#: operators written in Python, whose own operations are counted, too
LOOK_INTO = ("lightning_dilated",)

#: operators that come right after `torch.tensor` made their argument
FRESH = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
#: (serial number of a storage, bytes more or less, seconds of `time.perf_counter`)
Event = tuple[int, int, float]
Labels = Callable[[Any, Sequence[Tensor], Sequence[Tensor]], Iterable[tuple[Tensor, str]]]


@dataclass(slots=True)
class _Held:
    """A living storage."""

    serial: int
    size: int
    ref: weakref.ref


class Meter(TorchDispatchMode):
    """Within, every storage that an operation reads or makes is counted once, from when it is first seen until it is freed.

    Views and results written in place add nothing; a storage that an operation resized counts its new size. A storage that
    is freed after the meter was left is still taken off; new ones are seen only within. Storages that were there before are
    counted from the first operation that reads them, or from `track` on.

    Not seen: memory that an operator written in C++ takes and gives back within a call, `UntypedStorage.resize_` until an
    operation reads the tensor again, and what libraries hold. Operators in `LOOK_INTO` are looked into for real tensors;
    of fake ones only their results exist. Blocks that torch.compile compiled run uncompiled within.

    Args:
        device: count tensors of this device type only ("cuda" for fake tensors that claim to lie there); None: all.
        round_to: sizes are rounded up to a multiple, as an allocator does (512 on CUDA); 1: not.
        record: keep `events`, so that kinds at the peak can be told later.
        labels: called after each operation with (operator, its tensors, its results); gives (tensor, kind) pairs, for
            tensors that have no kind yet, or one by `mark`.

    Attributes:
        live: bytes now.
        peak: the most since the start or `reset_peak`.
        events: with `record`, in order; see `replay`.
        adopted: serial numbers of storages that no operation within made.
    """

    def __init__(
        self, device: str | None = None, round_to: int = 1, record: bool = False, labels: Labels | None = None
    ) -> None:
        super().__init__()
        if round_to < 1:
            raise ValueError(f"round_to must be at least 1, got {round_to!r}.")
        self.device, self.round_to, self.record, self.labels = device, round_to, record, labels
        self.live = self.peak = 0
        self.events: list[Event] = []
        self.adopted: set[int] = set()
        self._kinds: dict[int, str] = {}
        self._marked: dict[int, str] = {}
        self._held: dict[int, _Held] = {}
        self._serials = itertools.count()
        self._since = 0  # the first event after `reset_peak`
        self._lock = threading.RLock()  # storages are freed in other threads, too

    # -- what is asked -----------------------------------------------------------------------------------------------
    def reset_peak(self) -> None:
        """`peak` starts anew from what lives now."""
        self.peak, self._since = self.live, len(self.events)

    def track(self, tensors: Iterable[Tensor | None], kind: str) -> int:
        """Give the tensors' storages a kind, and count those not yet seen; the bytes of all of them, each storage once."""
        with self._lock:
            found = [x for t in tensors if t is not None for x in self._see(t, False)]
            self._kinds.update((x.serial, kind) for x in found)
        return sum({x.serial: x.size for x in found}.values())

    def mark(self, kind: str) -> int:
        """Give a kind to what was made within, lives and has none, such as `ACTIVATIONS` when a forward ends; its bytes."""
        with self._lock:
            known = self._kinds.keys() | self._marked.keys() | self.adopted
            found = [x for x in self._held.values() if x.serial not in known]
            self._marked.update((x.serial, kind) for x in found)
            return sum(x.size for x in found)

    def by_kind(self) -> dict[str, int]:
        """Bytes that live now, by kind; they add up to `live`."""
        found: dict[str, int] = {}
        with self._lock:
            for x in self._held.values():
                kind = self.kind(x.serial)
                found[kind] = found.get(kind, 0) + x.size
        return {kind: n for kind, n in found.items() if n}

    def peak_by_kind(self) -> dict[str, int]:
        """Bytes at the first moment of `peak`, by the kinds that storages have by now; they add up to `peak`.

        Raises:
            RuntimeError: without `record`.
        """
        if not self.record:
            raise RuntimeError("Meter(record=True) keeps the events that peak_by_kind needs.")
        best, most = {}, -1
        for number, _, total, held in self.replay():
            # the state after the last event before the reset is where the peak began
            if number >= self._since - 1 and total > most:
                best, most = dict(held), total
        return {kind: n for kind, n in best.items() if n}

    def kind(self, serial: int) -> str:
        """The kind of a storage, `TEMPORARY` if it was given none."""
        return self._kinds.get(serial) or self._marked.get(serial, TEMPORARY)

    def replay(self) -> Iterator[tuple[int, float, int, dict[str, int]]]:
        """(number of the event, seconds, live bytes, bytes by kind) after each event; the mapping is reused."""
        total, held = 0, {}
        for number, (serial, delta, seconds) in enumerate(self.events):
            kind, total = self.kind(serial), total + delta
            held[kind] = held.get(kind, 0) + delta
            yield number, seconds, total, held

    def restart(self, keep: Sequence[str] = ()) -> None:
        """Begin anew from nothing, but for living storages of the kinds to keep, which count as there before."""
        with self._lock:
            self._held = {key: x for key, x in self._held.items() if self.kind(x.serial) in keep}
            kept = {x.serial: x.size for x in self._held.values()}
            self._kinds, self._marked = {serial: self.kind(serial) for serial in kept}, {}
            self.adopted, self.live, now = set(kept), sum(kept.values()), time.perf_counter()
            self.events = [(serial, size, now) for serial, size in kept.items()] if self.record else []
            self.reset_peak()

    def close(self) -> None:
        """Follow nothing any more; the numbers stay."""
        with self._lock:
            self._held.clear()

    # -- what happens ------------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count its results."""
        if any(hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented  # the operations on what a DTensor or another wrapper holds come one by one
        kwargs = kwargs or {}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        with self._lock:
            for t in given:
                self._see(t, func in FRESH)
        out = self._run(func, args, kwargs, given)
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        with self._lock:
            for t in (*given, *made) if func._schema.is_mutable else made:  # mutable: may have been resized
                self._see(t, True)
            for t, kind in self.labels(func, given, made) if self.labels else ():
                for x in self._see(t, True):
                    self._kinds.setdefault(x.serial, kind)
        return out

    def _run(self, func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> Any:
        """The operation; those within one of `LOOK_INTO` come here, too, where nothing else has a say in it."""
        plain = all(type(t) in (Tensor, torch.nn.Parameter) for t in given)
        if func.namespace not in LOOK_INTO or not given or not plain or _get_current_dispatch_mode() is not None:
            return func(*args, **kwargs)
        key = getattr(torch._C.DispatchKey, torch._C._dispatch_key_for_device(given[0].device.type))
        with self:
            return func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)

    def _see(self, tensor: Tensor, made: bool) -> list[_Held]:
        """Count a tensor's storages as large as they are now."""
        found = []
        for part in parts(tensor):
            if self.device not in (None, part.device.type):
                continue
            storage = part.untyped_storage()
            key = storage._cdata
            held = self._held.get(key)
            if held is None or held.ref() is not storage:
                if held is not None:
                    self._gone(key, held.ref)
                held = _Held(next(self._serials), 0, weakref.ref(storage, partial(self._gone, key)))
                self._held[key] = held
                if not made:
                    self.adopted.add(held.serial)
            size = -(-storage.nbytes() // self.round_to) * self.round_to
            if size != held.size:
                self._change(held, size)
            found.append(held)
        return found

    def _change(self, held: _Held, size: int) -> None:
        delta, held.size = size - held.size, size
        self.live += delta
        self.peak = max(self.peak, self.live)
        if self.record:
            self.events.append((held.serial, delta, time.perf_counter()))

    def _gone(self, key: int, ref: weakref.ref) -> None:
        """A storage was freed."""
        with self._lock:
            held = self._held.get(key)
            if held is None or held.ref is not ref:
                return
            del self._held[key]
            if held.size:
                self._change(held, 0)
            if not self.record:
                self._kinds.pop(held.serial, None), self._marked.pop(held.serial, None)
                self.adopted.discard(held.serial)


def parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with storages of their own that a tensor is made of."""
    if type(tensor) is not Tensor and hasattr(tensor, "__tensor_flatten__"):
        held = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        for x in held:
            if isinstance(x, Tensor):  # a DTensor names its mesh, too
                yield from parts(x)
    elif tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    else:
        raise TypeError(
            f"a Meter counts strided tensors and sparse ones of coordinates, got one of layout {tensor.layout}."
        )
