"""Carry rows of keys and values, and their gradients, from chunk to chunk of a sequence.

Chunks are computed in rising order; a layer drops rows that no later chunk reads. Exact training stores dropped rows
and computes the chunks again in falling order: stored rows are read back, and a chunk's rows receive the gradients that
later chunks left for them. If ranks share the sequence, each rank carries the rows that it computed.
Shape letters: B batch, N tokens, C tokens of a chunk, D head dim, n rows; a row is (2, D): K and V.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from lightning_dilated._validation import integer
from lightning_dilated.attention.context import Context, LayerPlace, OpCall
from lightning_dilated.attention.resolve import Resolved
from lightning_dilated.attention.spec import CallSpec
from lightning_dilated.ext.hashed.rows import HashedCarry
from lightning_dilated.ext.recurrence.state import RecurrentState
from lightning_dilated.ext.streams.carried_rows import ENDLESS, CarryPlan
from lightning_dilated.ext.streams.chunk_call import ChunkRoute, chunk_pairs, resolve_chunk
from lightning_dilated.ext.streams.neighbours import ChunkNeighbours
from lightning_dilated.ext.streams.shard import ChunkShard
from lightning_dilated.ext.streams.state import Carried, StreamState
from lightning_dilated.sequence.exchange.row_ops import add_rows, pair
from lightning_dilated.sequence.group import SequenceGroup
from lightning_dilated.sequence.requirements import Document, Problem

#: share of a GPU's memory for stored rows; further rows are stored in pinned host memory
ON_GPU = 1 / 8
#: bytes of a slab of memory for stored rows, and the alignment of rows in it
SLAB, ALIGNED = 64 << 20, 256

T = TypeVar("T")


class Store:
    """Store the dropped rows of all layers, on the device up to a budget and then in pinned host memory.

    Rows share slabs of `SLAB` bytes, because there are thousands of tensors, and torch rounds each pinned allocation up
    to a power of two and takes about a millisecond for it. Copies between GPU and host overlap computation.

    Args:
        budget: bytes on the device; None: the share `ON_GPU` of a GPU's memory, or no limit on a CPU.
    """

    def __init__(self, budget: int | None = None) -> None:
        self.budget, self.on_device, self.on_host = budget, 0, 0
        self._slabs: dict[torch.device, tuple[Tensor, int]] = {}  # the latest slab of each device, and its used bytes

    def put(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Store rows (n, 2, D); return the parts in memory, which `take` needs."""
        if rows.device.type != "cuda" or not len(rows):
            return (rows,)
        if self.budget is None:
            self.budget = int(torch.cuda.get_device_properties(rows.device).total_memory * ON_GPU)
        here = self.on_device + rows.nbytes <= self.budget
        if here:
            self.on_device += rows.nbytes
        else:
            self.on_host += rows.nbytes
        parts = self.room(rows, rows.device if here else torch.device("cpu"))
        sources = zip(parts, rows.split([len(part) for part in parts]), strict=True)
        if here:
            for part, source in sources:
                part.copy_(source)
            return parts
        copies = copy_stream(rows.device)
        copies.wait_stream(torch.cuda.current_stream(rows.device))
        with torch.cuda.stream(copies):
            for part, source in sources:
                part.copy_(source, non_blocking=True)
        rows.record_stream(copies)  # torch must not reuse the rows' memory before the copy has ended
        return parts

    def room(self, rows: Tensor, device: torch.device) -> tuple[Tensor, ...]:
        """Allocate memory for rows; rows are split if a slab is full. A slab is freed with its last rows."""
        parts, row = [], rows[0].nbytes
        while (left := len(rows) - sum(map(len, parts))) > 0:
            slab, taken = self._slabs.get(device, (None, 0))
            if slab is None or taken + row > len(slab):
                pinned = device.type == "cpu" and rows.device.type == "cuda"
                slab, taken = torch.empty(max(SLAB, row), dtype=torch.uint8, device=device, pin_memory=pinned), 0
            count = min(left, (len(slab) - taken) // row)
            part = slab[taken : taken + count * row].view(rows.dtype)
            parts.append(part.view(count, *rows.shape[1:]))
            self._slabs[device] = slab, -(-(taken + count * row) // ALIGNED) * ALIGNED
        return tuple(parts)

    def take(self, parts: tuple[Tensor, ...], device: torch.device) -> Tensor:
        """Return stored rows as one tensor on the device."""
        self._slabs.clear()  # no more rows will be stored
        size = sum(part.nbytes for part in parts)
        if parts[0].device == device:
            self.on_device -= size
            pieces = list(parts)
        else:
            self.on_host -= size
            pieces = _fetched(parts, device)
        return pieces[0] if len(parts) == 1 else torch.cat(pieces)


@functools.lru_cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a GPU's stream for copies to and from the host; there is only one, so that reads follow writes."""
    return torch.cuda.Stream(device)


def _fetched(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    copies, computing = copy_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(copies):
        fetched = [part.to(device, non_blocking=True) for part in parts]
    computing.wait_stream(copies)
    for rows in fetched:
        rows.record_stream(computing)  # torch must not reuse the rows' memory before computation has read them
    return fetched


class LayerRows:
    """The rows that a layer (or a window of heads) carries to the current chunk, and their gradients in the descent.

    Args:
        store: the store for dropped rows; None: chunks are not computed again.
        rows: rows of earlier calls.

    Attributes:
        chunk: the current chunk.
        rows: (n, 2, D) rows of earlier chunks.
        grads: (n, 2, D) gradients of `rows`, in fp32 or wider; None before the descent.
        own_grads: gradients, from later chunks, of the rows that the current chunk leaves; or None.
    """

    def __init__(self, store: Store | None, rows: Tensor | None = None) -> None:
        self.chunk, self.rows = 0, rows
        self.grads: Tensor | None = None
        self.own_grads: Tensor | None = None
        self._route: ChunkRoute | None = None
        self._leaving: Tensor | None = None
        self._store, self._dropped = store, []

    def enter(self, chunk: int, route: ChunkRoute, like: Tensor) -> None:
        """Enter the same chunk again, the next chunk, or, in the descent, the previous one; `like`: the chunk's k."""
        if self.rows is None:
            self.rows = like.new_empty(0, 2, like.shape[3])
        self.rows = self.rows.to(like.device, like.dtype)  # rows of a state may have a different dtype
        if chunk == self.chunk + 1 and self._leaving is not None:
            self._ascend()
        elif chunk == self.chunk - 1 and self._dropped:
            self._descend(route, like)
        elif chunk != self.chunk:
            raise RuntimeError(f"a stream's layer cannot go from chunk {self.chunk} to chunk {chunk}.")
        self.chunk, self._route = chunk, route

    def leave(self, k: Tensor, v: Tensor) -> None:
        """Store the rows of the current chunk's k and v (B, L, K, D) that later chunks read."""
        self._leaving = pair(k, v, self._route.leaving.flat)

    def _ascend(self) -> None:
        if self._store is not None:
            self._dropped.append(self._store.put(self.rows[self._route.dropped]))
        self.rows = torch.cat([self.rows[self._route.staying], self._leaving])
        self._leaving = None

    def after(self) -> Tensor:
        """Return the rows that are carried beyond the last chunk, which must be the current one."""
        self._ascend()
        return self.rows

    def _descend(self, route: ChunkRoute, like: Tensor) -> None:
        stayed = len(route.staying)
        rows = like.new_empty(route.exchange.carried, *self.rows.shape[1:])
        rows[route.staying] = self.rows[:stayed]
        rows[route.dropped] = self._store.take(self._dropped.pop(), rows.device)
        if self.grads is not None:
            grads = torch.zeros(rows.shape, dtype=self.grads.dtype, device=rows.device)
            grads[route.staying] = self.grads[:stayed]
            self.own_grads, self.grads = self.grads[stayed:], grads
        self.rows = rows

    def read_grads(self, dtype: torch.dtype) -> Tensor:
        """Return the tensor (n, 2, D) to which gradients of `rows` are added; without a store, nothing reads it."""
        if self._store is None:
            return torch.zeros(self.rows.shape, dtype=dtype, device=self.rows.device)
        if self.grads is None:
            self.grads = torch.zeros(self.rows.shape, dtype=dtype, device=self.rows.device)
        return self.grads

    def add_own_grads(self, dk: Tensor, dv: Tensor) -> None:
        """Add `own_grads`, which later chunks computed, to the gradients of this chunk's k and v."""
        if self.own_grads is not None and len(self.own_grads):
            add_rows(self._route.leaving, dk, self.own_grads[:, 0])
            add_rows(self._route.leaving, dv, self.own_grads[:, 1])


class LayerCarry(Generic[T]):
    """A layer's values passed from chunk to chunk (`kv_conv` inputs, a recurrence's state), and their gradients."""

    def __init__(self, before: T | None = None) -> None:
        self._after: dict[int, T] = {} if before is None else {-1: before}
        self._grads: dict[int, Any] = {}

    def before(self, chunk: int) -> T | None:
        """Return the value that the previous chunk left; None before the first token."""
        return self._after.get(chunk - 1)

    def last(self) -> T:
        """Return the value that the last chunk left."""
        return self._after[max(self._after)]

    def leave(self, chunk: int, value: T, keeps: bool = True) -> None:
        """Store the value that the next chunk reads; `keeps=False`: free the value that the previous chunk read."""
        self._after[chunk] = value
        if not keeps:
            self._after.pop(chunk - 2, None)

    def pop_grad(self, chunk: int) -> Any:
        """Remove and return the gradient that the next chunk left for this chunk's value, or None."""
        return self._grads.pop(chunk, None)

    def store_grad(self, chunk: int, grad: Any) -> None:
        """Store the gradient of the value that the chunk read, for the previous chunk."""
        if chunk:
            self._grads[chunk - 1] = grad


class Stream(Context):
    """A sequence that a stack of layers computes chunk by chunk. The attention op finds the stream by its name.

    `begin` starts a sequence. Then each layer, given its place (`layers`), computes every chunk in rising order. After
    `descend`, it computes every chunk in falling order.
    """

    def __init__(self) -> None:
        super().__init__()
        self._layers: dict[tuple[int, int], LayerRows] = {}
        self._tails: dict[int, LayerCarry[Tensor]] = {}
        self._states: dict[int, LayerCarry[RecurrentState]] = {}
        self._hashed: dict[int, HashedCarry] = {}
        self._remembered: tuple[int, dict[Any, Any]] = 0, {}
        self.shard, self.rank = ChunkShard(0, 0, 1), 0
        #: the ranks that share the sequence; None: one rank
        self.group: SequenceGroup | None = None
        #: documents of all samples; None: each call has its own, from `lengths` or `cu_seqlens`
        self.documents: tuple[Document, ...] | None = None
        self._before: StreamState | None = None
        self._from_before: dict[tuple[int, int], Carried | None] = {}
        self.left: StreamState | None = None
        self._plans: dict[tuple[Problem, int, int], CarryPlan] = {}
        self._store: Store | None = None
        #: True in the first pass, in which chunks leave rows; False while chunks are computed again
        self.rising = True
        #: None, or a function that is called with (name of a pass, finished chunks, all chunks); the first call of a
        #: pass has 0 finished chunks
        self.watch: Callable[[str, int, int], None] | None = None

    def begin(self, seq_len: int, chunk: int, store: bool, group: SequenceGroup | None = None) -> None:
        """Start a sequence of N tokens in chunks of C.

        Args:
            store: whether chunks will be computed again in falling order.
            group: the ranks that share each chunk; None: this rank computes whole chunks.
        """
        self.end()
        self.group, self.rank, each = (None, 0, 1) if group is None else (group, group.rank, group.ranks)
        self.shard = ChunkShard(0, integer(seq_len, "seq_len", 1), integer(chunk, "stream", 1), each)
        self._store, self.rising = Store() if store else None, True

    def resume(self, state: StreamState, starts: Sequence[Sequence[int]], seq_len: int, chunk: int) -> None:
        """Continue a sequence after `state` with N tokens in chunks of C.

        Args:
            starts: for each sample, the positions at which documents begin, rising; the first may precede the state.
        """
        self.begin(seq_len, chunk, store=False)
        self.shard = replace(self.shard, start=state.position, stop=state.position + seq_len)
        ends = [[*at[1:], ENDLESS] for at in starts]
        self.documents = tuple(
            Document(sample, 1, a, b)
            for sample, (begins, stops) in enumerate(zip(starts, ends, strict=True))
            for a, b in zip(begins, stops, strict=True)
        )
        self._before = state

    def descend(self) -> None:
        """Switch to the second pass, which computes the chunks again in falling order."""
        self.rising = False

    def end(self) -> None:
        """Free all rows and routes."""
        for held in (self._layers, self._tails, self._states, self._hashed, self._plans, self._from_before):
            held.clear()
        self._remembered = 0, {}
        self._before = self.documents = self.group = None

    def state(self) -> StreamState:
        """Return the state after the last chunk; `resume` continues from it."""
        carried = {
            (layer, head): (self._layers[layer, head].after(), tuple(plan.live(plan.chunks)))
            for (_, layer, head), plan in self._plans.items()
        }
        starts = {d.sample: d.start for d in self.documents or ()}  # the start of each sample's last document
        return StreamState(
            self.shard.stop,
            list(starts.values()),
            carried,
            {i: x.last() for i, x in self._tails.items()},
            memories={i: x.last() for i, x in self._states.items()}
            | {-1 - i: x.after() for i, x in self._hashed.items()},
        )

    def take_left(self) -> StreamState:
        """Return and remove the state that the last sequence left; `resume` continues from it."""
        left, self.left = self.left, None
        assert left is not None, "no sequence has continued from a state"
        return left

    def _resumed(self, layer: int, first_head: int) -> Carried | None:
        key = layer, first_head
        if self._before is None:
            return None
        if key not in self._from_before:
            self._from_before[key] = self._before.resumed(key, self.documents or ())
        return self._from_before[key]

    def plan_of(self, problem: Problem, layer: int) -> CarryPlan:
        """Return the plan of a layer's call, or of a window of its heads."""
        key = problem, layer, problem.heads[0]
        if key not in self._plans:
            same = next((p for (other, *_), p in self._plans.items() if other == problem), None)
            if self._before is None and same is not None:
                self._plans[key] = same
            else:
                before = self._resumed(layer, problem.heads[0])
                self._plans[key] = CarryPlan(problem, self.rank, () if before is None else before[1])
        return self._plans[key]

    @property
    def seq_len(self) -> int:
        """The number of tokens, including tokens of earlier calls."""
        return self.shard.stop

    @property
    def chunks(self) -> int:
        return self.shard.chunks

    def number(self, chunk: int) -> int:
        """Return the index of this rank's piece of a chunk."""
        return chunk * self.shard.each + self.rank

    def tokens(self, chunk: int) -> range:
        """Return the positions of this rank's piece of a chunk."""
        return self.shard.piece(self.number(chunk))

    def local(self, chunk: int) -> slice:
        """Return the slice that selects a chunk's tokens from all tokens of this rank."""
        return self.shard.local(self.number(chunk))

    def layers(self, chunk: int, seeds: Sequence[Tensor | None]) -> list[LayerPlace]:
        """Return the place of each layer in a chunk; `seeds`: for each layer, the seed of attention dropout."""
        places = (torch.tensor([layer, chunk], dtype=torch.int64) for layer in range(len(seeds)))
        shared, whole = self.group is not None, len(self.shard.positions(chunk)) == self.shard.stream
        flags = shared, whole, self.shard.stop if self._before is None else None
        return [LayerPlace(self.name, place, seed, *flags) for place, seed in zip(places, seeds, strict=True)]

    def rows_of(self, layer: int, first_head: int) -> LayerRows:
        """Return the rows of a layer, or of its window of heads that begins at `first_head`."""
        key = layer, first_head
        if key not in self._layers:
            before = self._resumed(*key)
            self._layers[key] = LayerRows(self._store, None if before is None else before[0])
        return self._layers[key]

    def tails_of(self, layer: int) -> LayerCarry[Tensor]:
        """Return the last inputs (B, W - 1, C) that a layer's `kv_conv` carries."""
        return self._tails.setdefault(layer, LayerCarry(self._before and self._before.tails.get(layer)))

    def states_of(self, layer: int) -> LayerCarry[RecurrentState]:
        """Return the states of a layer's recurrence; gradients are in the order of `RecurrentState.floating`."""
        return self._states.setdefault(layer, LayerCarry(self._before and self._before.memories.get(layer)))

    def hashed_of(self, layer: int) -> HashedCarry:
        """Return the rows that a layer's hashed heads carry; a `StreamState` has them at -1 - layer."""
        if layer not in self._hashed:
            self._hashed[layer] = HashedCarry(self._store, self._before and self._before.memories.get(-1 - layer))
        return self._hashed[layer]

    def document_starts(self, samples: int, cu_seqlens: Tensor | None) -> list[list[int]]:
        """Return, for each sample, the positions at which documents begin."""
        if self.documents is None:
            return [[0]] * samples if cu_seqlens is None else [cu_seqlens.tolist()[:-1]]
        starts: list[list[int]] = [[] for _ in range(samples)]
        for document in self.documents:
            for sample in range(document.sample, document.sample + document.samples):
                starts[sample].append(document.start)
        return starts

    # -- calls from ops ------------------------------------------------------------------------------------------------
    def resolve(self, call: OpCall) -> tuple[Resolved, int]:
        """See `Context.resolve`."""
        return resolve_chunk(self, call)

    def pairs(
        self, spec: CallSpec, q: Tensor, k: Tensor, documents: tuple[Tensor | None, Tensor | None], place: Tensor | None
    ) -> int:
        """See `Context.pairs`."""
        assert place is not None, "a chunk has a place in a stream"
        return chunk_pairs(self, spec, q.shape, k.shape[2], documents, int(place[1]))

    def neighbours(
        self, x: Tensor, weight: Tensor, documents: tuple[Tensor | None, ...], place: Tensor, backward: bool
    ) -> ChunkNeighbours:
        """Return the rows before a chunk x (B, L, C), for a convolution with `weight` (W, C)."""
        return ChunkNeighbours(self, x, weight, documents, place, backward)

    @property
    def exact(self) -> bool:
        """True if gradients pass from chunk to chunk."""
        return self._store is not None

    def remember(self, chunk: int, key: Any, make: Callable[[], Any]) -> Any:
        """Return make(), cached by `key` until the next chunk, so that layers and passes of a chunk share it."""
        if self._remembered[0] != chunk:
            self._remembered = chunk, {}
        held = self._remembered[1]
        if key not in held:
            held[key] = make()
        return held[key]

    def __deepcopy__(self, memo: Any) -> Stream:
        return Stream()

    def __reduce__(self) -> tuple[type[Stream], tuple[()]]:
        return Stream, ()
