"""Count the bytes of live tensors (`Meter`), and split a counted step into pieces (`Tape`)."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dilated.ext._compat import torch as compat
from lightning_dilated.ext.planning.counting.workspace import NAMES

#: kinds of memory, in the order of a plot from the bottom up; memory without a kind is temporary
PARAMETERS, GRADIENTS, OPTIMIZER, BATCH = "parameters", "gradients", "optimizer states", "batch"
ACTIVATIONS, EXCHANGE, TEMPORARY = "saved activations", "exchange buffers", "temporary"
KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER, BATCH, ACTIVATIONS, EXCHANGE, TEMPORARY)
#: namespaces of operators that are written in Python; a Meter also counts the operations inside them
LOOK_INTO = ("lightning_dilated",)

#: operators that torch calls on a tensor right after `torch.tensor` made it
FRESH = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
#: (serial number of a storage, change in bytes, seconds of `time.perf_counter`)
Event = tuple[int, int, float]
Labels = Callable[[Any, Sequence[Tensor], Sequence[Tensor]], Iterable[tuple[Tensor, str]]]


@dataclass(slots=True)
class _Held:
    """A storage that is in memory."""

    serial: int
    size: int
    ref: weakref.ref


class Meter(compat.TorchDispatchMode):
    """Count each storage that an operation reads or creates inside the `with` block, from first use until it is freed.

    Views and results written in place add nothing. A storage that an operation resizes counts with its new size.
    Storages that existed before the block are counted from the first operation that reads them, or from `track` on.
    After the block no new storages are counted, but storages that are freed are still subtracted.

    Not counted: memory that a C++ operator allocates and frees during a call, the effect of `UntypedStorage.resize_`
    until an operation reads the tensor again, and memory of libraries. Operations inside operators in `LOOK_INTO` are
    counted for real tensors; for fake tensors only results are counted. Blocks of torch.compile run uncompiled.

    Args:
        device: count only tensors of this device type ("cuda" for fake tensors of that device); None: all tensors.
        round_to: round sizes up to a multiple, as an allocator does (512 on CUDA); 1: do not round.
        record: keep `events`, which `replay` and `peak_by_kind` read.
        labels: a function that is called after each operation with (operator, its tensors, its results) and returns
            (tensor, kind) pairs. Its kinds replace kinds that `mark` gave, but no others.

    Attributes:
        live: bytes now.
        peak: largest value of `live` since the start or the last `reset_peak`.
        events: all changes in order, if `record`; see `replay`.
        adopted: serial numbers of storages that no operation inside the block created.

    Raises:
        ValueError: for an invalid argument.
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
        self._since = 0  # index of the first event after `reset_peak`
        self._lock = threading.RLock()  # other threads may free storages

    # -- queries ------------------------------------------------------------------------------------------------------
    def reset_peak(self) -> None:
        """Set `peak` to the present bytes."""
        self.peak, self._since = self.live, len(self.events)

    def track(self, tensors: Iterable[Tensor | None], kind: str) -> int:
        """Count the tensors' storages and set their kind; return their bytes, each storage counted once."""
        with self._lock:
            storages = [x for t in tensors if t is not None for x in self._see(t, False)]
            self._kinds.update((x.serial, kind) for x in storages)
        return sum({x.serial: x.size for x in storages}.values())

    def mark(self, kind: str) -> int:
        """Give a kind to live storages that were created inside the block and have no kind; return their bytes."""
        with self._lock:
            known = self._kinds.keys() | self._marked.keys() | self.adopted
            storages = [x for x in self._held.values() if x.serial not in known]
            self._marked.update((x.serial, kind) for x in storages)
            return sum(x.size for x in storages)

    def by_kind(self) -> dict[str, int]:
        """Return the present bytes by kind; they add up to `live`."""
        sizes: dict[str, int] = {}
        with self._lock:
            for x in self._held.values():
                kind = self.kind(x.serial)
                sizes[kind] = sizes.get(kind, 0) + x.size
        return {kind: n for kind, n in sizes.items() if n}

    def peak_by_kind(self) -> dict[str, int]:
        """Return the bytes at the first moment of `peak`, by the kinds that storages have now; they add up to `peak`.

        Raises:
            RuntimeError: if `record` is False.
        """
        if not self.record:
            raise RuntimeError("Meter(record=True) keeps the events that peak_by_kind needs.")
        best, most = {}, -1
        for number, _, total, held in self.replay():
            # the state after the last event before `reset_peak` may be the peak
            if number >= self._since - 1 and total > most:
                best, most = dict(held), total
        return {kind: n for kind, n in best.items() if n}

    def kind(self, serial: int) -> str:
        """Return the kind of a storage, `TEMPORARY` if it has none."""
        return self._kinds.get(serial) or self._marked.get(serial, TEMPORARY)

    def replay(self) -> Iterator[tuple[int, float, int, dict[str, int]]]:
        """Yield (index, seconds, live bytes, bytes by kind) after each event; the dict is always the same object."""
        total, held = 0, {}
        for number, (serial, delta, seconds) in enumerate(self.events):
            kind, total = self.kind(serial), total + delta
            held[kind] = held.get(kind, 0) + delta
            yield number, seconds, total, held

    def restart(self, keep: Sequence[str] = ()) -> None:
        """Restart with only the live storages of the kinds in `keep`, and count these as adopted."""
        with self._lock:
            self._held = {key: x for key, x in self._held.items() if self.kind(x.serial) in keep}
            sizes = {x.serial: x.size for x in self._held.values()}
            self._kinds, self._marked = {serial: self.kind(serial) for serial in sizes}, {}
            self.adopted, self.live, now = set(sizes), sum(sizes.values()), time.perf_counter()
            self.events = [(serial, size, now) for serial, size in sizes.items()] if self.record else []
            self.reset_peak()

    def close(self) -> None:
        """Stop tracking storages; the counted numbers remain."""
        with self._lock:
            self._held.clear()

    # -- events --------------------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented  # a DTensor then dispatches operations on its inner tensors, which are counted
        kwargs = kwargs or {}
        inputs = [t for t in compat.leaves((args, kwargs)) if isinstance(t, Tensor)]
        with self._lock:
            for t in inputs:
                self._see(t, func in FRESH)
        out = self._run(func, args, kwargs, inputs)
        results = [t for t in compat.leaves(out) if isinstance(t, Tensor)]
        with self._lock:
            for t in (*inputs, *results) if compat.changes_inputs(func) else results:  # inputs may be resized
                self._see(t, True)
            for t, kind in self.labels(func, inputs, results) if self.labels else ():
                for x in self._see(t, True):
                    self._kinds.setdefault(x.serial, kind)
        return out

    def _run(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> Any:
        """Run the operation. If it is in `LOOK_INTO` and no other mode is active, count the operations inside it."""
        plain = all(type(t) in (Tensor, torch.nn.Parameter) for t in inputs)
        if func.namespace not in LOOK_INTO or not inputs or not plain or compat.in_dispatch_mode():
            return func(*args, **kwargs)
        with self:
            return compat.run_on_device(func, inputs[0].device.type, args, kwargs)

    def _see(self, tensor: Tensor, new: bool) -> list[_Held]:
        """Count a tensor's storages with their present sizes, and return them."""
        storages = []
        for part in parts(tensor):
            if self.device is not None and part.device.type != self.device:  # `device` of fake tensors is slow
                continue
            storage = part.untyped_storage()
            key = compat.storage_key(storage)
            held = self._held.get(key)
            if held is None or held.ref() is not storage:
                if held is not None:
                    self._gone(key, held.ref)
                held = _Held(next(self._serials), 0, weakref.ref(storage, partial(self._gone, key)))
                self._held[key] = held
                if not new:
                    self.adopted.add(held.serial)
            size = -(-storage.nbytes() // self.round_to) * self.round_to
            if size != held.size:
                self._change(held, size)
            storages.append(held)
        return storages

    def _change(self, held: _Held, size: int) -> None:
        delta, held.size = size - held.size, size
        self.live += delta
        self.peak = max(self.peak, self.live)
        if self.record:
            self.events.append((held.serial, delta, time.perf_counter()))

    def _gone(self, key: int, ref: weakref.ref) -> None:
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
    """Yield the plain tensors, each with its own storage, that a tensor consists of."""
    if type(tensor) is not Tensor and hasattr(tensor, "__tensor_flatten__"):
        inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        for x in inner:
            if isinstance(x, Tensor):  # a DTensor's attributes include its mesh
                yield from parts(x)
    elif tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield from compat.sparse_parts(tensor)
    else:
        raise TypeError(
            f"a Meter counts strided tensors and sparse COO tensors, got a tensor of layout {tensor.layout}."
        )


#: kind of memory on a Tape: autocast's copies of parameters
CASTS = "casts"
#: names of the attention op's passes, for `Piece.op`
FORWARD, BACKWARD = "forward", "backward"
#: names, for `Piece.op`, of operators that are separate pieces
OPS = {
    torch.ops.lightning_dilated.attention.default: FORWARD,
    torch.ops.lightning_dilated.attention_backward.default: BACKWARD,
    **NAMES,
}


@dataclass(frozen=True)
class Piece:
    """Memory of a piece of a step.

    Attributes:
        part: the part of the step, such as ("forward", 0) for the first block's forward.
        peak: peak bytes, without the op's workspace.
        begin, static: bytes at the start of the piece, and bytes of parameters and gradients among them.
        op: FORWARD or BACKWARD if the piece is one call of the attention op, one of `workspace.NAMES` if it is one
            call of a recurrence or of hashed heads, else "".
        heads: number of query heads of that call. dtype: the dtype of q.
        spec: encoded arguments of a recurrence or of hashed heads.
        logits: sizes (K, G, M) of the logits of hashed heads.
        casts: bytes of autocast's copies of parameters at the start of the piece.
    """

    part: tuple
    peak: int
    begin: int
    static: int
    op: str = ""
    heads: int = 0
    dtype: torch.dtype | None = None
    spec: str = ""
    casts: int = 0
    logits: tuple[int, ...] = ()


class Tape(Meter):
    """A `Meter` that also records `pieces`; each loop over tiles is a separate piece."""

    #: whether a layer runs all tiles; if not, it skips middle tiles, because their memory equals the second tile's
    every_tile = False

    def __init__(self, **options: Any) -> None:
        super().__init__(labels=self._after, **options)
        self.pieces: list[Piece] = []
        self.part: tuple = ("before",)
        #: (bytes of parameters, bytes of trained parameters) of each block of the main stack, and of the model
        self.blocks: list[tuple[int, int]] = []
        self.whole = (0, 0)
        self.parameters: Sequence[nn.Parameter] = ()
        #: for each stack's name, the bytes of the hidden states that the stack's first block gets
        self.hidden: dict[str, int] = {}
        #: whether the backward has begun
        self.returning = False
        self._begin = self._static = self._casts = 0
        self._paused = False
        self._ranges: list[str] = []
        self._spec = ""

    def enter(self, *part: Any) -> None:
        """End the current piece, and begin a new piece, which belongs to `part`, or by default to the same part."""
        self._cut()
        self.part = part or self.part

    def _range(self, name: str, begins: bool) -> None:
        """Record that a profiler range begins or ends; the range of a loop over tiles is a separate piece."""
        if begins:
            self._ranges.append(name)
        if name == "tiles":
            self.enter()

    def _cut(self, op: str = "", inputs: Sequence[Tensor] = ()) -> None:
        """End the current piece; `inputs`: tensors of the call `op`, from q on."""
        call = (inputs[0].shape[2], inputs[0].dtype) if inputs else (0, None)
        spec = self._spec if op in NAMES.values() else ""
        logits = tuple(inputs[3].shape[2:]) if op.startswith("hashed") else ()
        self.pieces.append(Piece(self.part, self.peak, self._begin, self._static, op, *call, spec, self._casts, logits))
        self._static = sum(x.nbytes for p in self.parameters for x in (p, p.grad) if x is not None)
        self.reset_peak()
        self._begin, self._casts = self.live, self.by_kind().get(CASTS, 0)

    def _after(self, func: Any, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> Iterable[tuple[Tensor, str]]:
        if (op := OPS.get(func)) is not None:
            # the piece before the call; its peak includes the results of the call if they caused the peak
            self.pieces.append(Piece(self.part, self.peak, self._begin, self._static, casts=self._casts))
            self.peak = self.live
            self._cut(op, inputs[op.endswith(BACKWARD) :])  # a backward takes the gradient first
        elif func is compat.CAST and isinstance(inputs[0], nn.Parameter):
            return [(results[0], CASTS)]
        return ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # a shortcut, because this operator is called very often
            return args[0].fake_device
        if self._paused:
            return func(*args, **(kwargs or {}))
        if func in compat.RANGE:
            self._range(args[0] if func is compat.RANGE[0] else self._ranges.pop(), begins=func is compat.RANGE[0])
        self._spec = args[-1] if func in NAMES else ""
        return super().__torch_dispatch__(func, types, args, kwargs)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count no operations inside the `with` block."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def launched(self, func: Any, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Called for each kernel of compiled blocks; `func`: its operator, or None if Inductor generates the kernel."""
