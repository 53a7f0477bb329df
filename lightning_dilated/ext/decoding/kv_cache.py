"""Cache the keys and values that later tokens can use, so that decoding equals attention over the full sequence.

In a branch, a head uses only its own residue of the current segment. So the cache keeps at most ceil(w / r) rows for
each branch, kv head and residue, for any number of tokens; for a window, it keeps the latest `width` rows of each
residue. The rows of all branches are in one buffer for k and one for v.
Shape letters: B batch, n new tokens, H query heads, K kv heads, D head dim; S slots of a branch (a slot contains the
rows of one residue and one kv head); w segment length, r dilation rate; W taps of `kv_conv`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_dilated import kernels
from lightning_dilated._device import send
from lightning_dilated._validation import integer
from lightning_dilated.attention.backends.base import Engine, Terms, merge
from lightning_dilated.attention.executors.blockwise import suited
from lightning_dilated.attention.rotary import RotaryTable
from lightning_dilated.ext.decoding.cache_slots import Clock, Places, layer_slots
from lightning_dilated.ext.decoding.new_tokens import decode_attention
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.branch import LARGEST
from lightning_dilated.recurrence import Recurrence
from lightning_dilated.sequence.group import active_sequence

if TYPE_CHECKING:
    from lightning_dilated.attention.modules import MultiheadDilatedAttention
    from lightning_dilated.models.transformer import DilatedTransformer

#: maximum number of scores of cached keys that are computed in one step
SCORES = 1 << 26


class KVCache:
    """The keys and values of one layer that later tokens can use; `length`: number of tokens that were added.

    Memory is O(sum over branches of w / r) rows for each kv head; each slot has the size of its branch's longest slot.
    Branches over the whole sequence (segment_length None) keep all rows of the residues that heads use.

    Args:
        pattern: the layer's pattern.
        num_heads: H of the layer.
        num_kv_heads: K of the layer; None means H.
        max_length: maximum number of tokens in a sample; it limits branches with wider segments, and buffers have their
            final size and address from the start. None: buffers grow by doubling, up to ceil(w / r) rows.
        clock: positions shared with other layers' caches, for prompts of different lengths; None: a separate clock.
        recurrence: the layer's recurrence; the cache then also stores its state, which has a constant size.

    Raises:
        ValueError: if the pattern does not allow these numbers of heads.
    """

    def __init__(
        self,
        pattern: DilatedPattern,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        max_length: int | None = None,
        clock: Clock | None = None,
        recurrence: Recurrence | None = None,
    ) -> None:
        self.pattern, self.recurrence = pattern, recurrence
        self.num_heads, self.num_kv_heads = pattern.check_heads(num_heads, num_kv_heads)
        self.max_length = None if max_length is None else integer(max_length, "max_length", 1)
        self.clock = Clock() if clock is None else clock
        #: number of tokens that were added to the longest sample
        self.length = 0
        #: data of the mixers for the next token, by name: the last rows before a convolution (B, W - 1, C), which
        #: `reset` sets to 0, or a state object with `select` and `nbytes`
        self.mixer_states: dict[str, Any] = {}
        self._shape: tuple[int, int, int] | None = None
        self._slots_key = pattern, self.num_heads, self.num_kv_heads
        self._branches = layer_slots(*self._slots_key)
        limit = self.max_length
        self._limited = limit is not None and any(b.longest is None or b.longest > limit for b in self._branches)
        fixed = [0 if limit is None else branch.rows(limit) for branch in self._branches]
        self._places = self.clock.places(self._slots_key, tuple(fixed))
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self._launch: tuple[Any, Any] | None = None  # a key, and the kernels' tables for it
        self._views: list[tuple[Tensor, Tensor]] = []  # for each branch, views of k and v (B, S, capacity, D)

    # -- storing -------------------------------------------------------------------------------------------------------
    def append(self, k: Tensor, v: Tensor) -> None:
        """Add keys and values (B, n, K, D), already rotated if the layer has rotary positions.

        Raises:
            ValueError: if shapes do not fit the layer or earlier calls, or there are more tokens than `max_length`.
        """
        batch, end = len(k), self.length + k.shape[1]
        self.check(k, v)
        before, after = (self.clock.kept(columns, batch) for columns in (self.length, end))
        if end > self.length:
            self._make_room(k, after)
            spans = list(zip(before, after, strict=True))
            to, source = self._places.indices(spans, tuple(k.shape[:3]), k.device)
            for buffer, rows in ((self._k, k), (self._v, v)):
                new_rows = rows.reshape(-1, rows.shape[3]).index_select(0, source)
                buffer.flatten(0, 1).index_copy_(0, to, new_rows.to(buffer.dtype))
        self.length = end

    def check(self, k: Tensor, v: Tensor) -> None:
        """Raise ValueError if keys and values (B, n, K, D) do not fit this layer or the samples of earlier calls."""
        shape, lengths = (k.shape[0], *k.shape[2:]), self.clock.lengths
        if k.shape != v.shape or k.shape[2] != self.num_kv_heads or shape != (self._shape or shape):
            expected = self._shape or ("B", self.num_kv_heads, "D")
            raise ValueError(
                f"the cache takes k and v of (B, n, kv heads, D) with (B, kv heads, D) = {expected}; "
                f"got {tuple(k.shape)} and {tuple(v.shape)}. Make a new cache for each batch."
            )
        if lengths is not None and len(lengths) != shape[0]:
            raise ValueError(f"the cache was made for {len(lengths)} samples (lengths), got a batch of {shape[0]}.")
        end = self.length + k.shape[1]
        if self.length < self.clock.longest < end:
            raise ValueError(
                f"a call must add either tokens of prompts or later ones: the longest prompt has {self.clock.longest} "
                f"tokens, and this call adds tokens {self.length} to {end - 1}."
            )
        if self.clock.ragged and k.shape[1] > 1 and self.length >= self.clock.longest:
            raise ValueError("after prompts of different lengths a call adds one token to each sample.")
        if self._limited and end > (self.max_length or end):
            raise ValueError(
                f"the cache was made for max_length={self.max_length} tokens, but this call adds a token at position "
                f"{end - 1}: raise max_length."
            )
        self._shape = shape

    def _make_room(self, like: Tensor, stops: Sequence[int]) -> None:
        """Make room for all rows below each sample's `stop` that later tokens can use; keep buffers that suffice."""
        capacities = self._places.capacities
        for stop in set(stops) if self.max_length is None else ():
            grown = (b.grown(rows, stop) for b, rows in zip(self._branches, capacities, strict=True))
            capacities = tuple(grown)
        if self._k is not None and capacities == self._places.capacities:
            return
        places = self.clock.places(self._slots_key, capacities)
        for name in ("_k", "_v"):
            old, new = getattr(self, name), like.new_empty((like.shape[0], places.total, like.shape[3]))
            if old is not None:
                for i, rows in enumerate(self._places.capacities):
                    self._rows_of(new, i, places)[:, :, :rows] = self._rows_of(old, i)
            setattr(self, name, new)
        self._places = places
        self._views = [(self._rows_of(self._k, i), self._rows_of(self._v, i)) for i in range(len(self._branches))]

    def _rows_of(self, buffer: Tensor, branch: int, places: Places | None = None) -> Tensor:
        """Return a view of a branch's rows, (B, S, capacity, D)."""
        places = places or self._places
        slots, capacity = len(self._branches[branch].users), places.capacities[branch]
        return buffer.narrow(1, places.bases[branch], slots * capacity).unflatten(1, (slots, capacity))

    def remember(self, name: str, rows: Tensor, new: int) -> None:
        """Store the last W - 1 of `rows` (B, W - 1 + n, C), which end with n new tokens, for the next call.

        Padding of prompts is left out. Later calls update the rows in place, so that a captured graph reads them.
        """
        last = rows[:, new:]
        if self.clock.ragged and self.length < self.clock.longest:
            added = torch.tensor(self.clock.added(self.length, new, len(rows)))
            at = send(added[:, None] + torch.arange(rows.shape[1] - new), rows.device)
            last = rows.gather(1, at[:, :, None].expand(-1, -1, rows.shape[2]))
        if name in self.mixer_states:
            self.mixer_states[name].copy_(last)
        else:
            self.mixer_states[name] = last.clone()

    # -- attending -----------------------------------------------------------------------------------------------------
    def attend(
        self, q: Tensor, out: Tensor, lse: Tensor, start: int, scale: float, engine: Engine | None = None
    ) -> None:
        """Let queries (B, n, H, D) at positions `start`, `start` + 1, ... attend to the cache; merge into out and lse.

        out (B, n, H, D) and lse (B, n, H), in fp32 or wider, are changed in place. If n is 1, positions may differ
        between samples. `engine` computes large blocks; matrix products compute small blocks.
        """
        stops = self.clock.kept(self.length, q.shape[0])
        for rows, stop in _alike(stops):
            begin = stop - 1 if q.shape[1] == 1 and self.length > start else start
            for i in range(len(self._branches)) if stop else ():
                self._attend_branch(i, rows, q[rows], out[rows], lse[rows], begin, stop, scale, engine)

    def _attend_branch(
        self, number: int, samples: slice, q: Tensor, out: Tensor, lse: Tensor, start: int, stop: int, scale: float,
        engine: Engine | None,
    ) -> None:  # fmt: skip
        """Run `attend` for one branch and for samples with `stop` tokens."""
        branch = self._branches[number]
        if branch.window is not None and stop <= start:  # each query reads different cached rows
            self._attend_window(number, samples, q.to(out.dtype) * scale, out, lse, stop)
            return
        first = branch.first(stop - 1)
        end = q.shape[1] if branch.width is None else min(q.shape[1], first + branch.width - start)
        for skip in range(min(end, branch.rate)):
            residue = (start + skip - first) % branch.rate
            lane = branch.lanes.get(residue)
            count = 0 if lane is None else branch.count(residue, first, stop)
            if lane is None or count == 0:
                continue
            heads, rows = _index(lane.heads, q.device), slice(skip, end, branch.rate)
            keys, values = (x[samples, lane.slots, :count] for x in self._views[number])
            if engine is not None and min(len(range(skip, end, branch.rate)), count) >= engine.min_rows:
                part = _by_engine(engine, q[:, rows][:, :, heads], keys.to(q.dtype), values.to(q.dtype), scale)
                _merge(out[:, rows], lse[:, rows], heads, *part)
                continue
            keys, values = keys.to(out.dtype), values.to(out.dtype)
            tile = max(1, SCORES // (len(lane.heads) * count * q.shape[0])) * branch.rate
            for at in range(skip, end, tile):
                rows = slice(at, min(at + tile, end), branch.rate)
                queries = q[:, rows][:, :, heads].to(out.dtype) * scale
                _merge(out[:, rows], lse[:, rows], heads, *_dense(queries, keys, values))

    def _attend_window(self, number: int, samples: slice, q: Tensor, out: Tensor, lse: Tensor, stop: int) -> None:
        """Run `attend` for a window and queries that follow `stop` cached tokens.

        The a-th query of a residue reads the last `window` - 1 - a cached rows.
        """
        branch = self._branches[number]
        for skip in range(min(q.shape[1], branch.rate)):
            residue = (stop + skip) % branch.rate
            lane = branch.lanes.get(residue)
            known, count = len(branch.positions(residue, 0, stop)), branch.count(residue, 0, stop)
            queries = range(skip, q.shape[1], branch.rate)[: branch.window - 1]
            if lane is None or count == 0 or not queries:
                continue
            latest = (torch.arange(known - count, known) % branch.window).to(q.device)
            keys, values = (x[samples, lane.slots].index_select(2, latest).to(q.dtype) for x in self._views[number])
            heads = _index(lane.heads, q.device)
            tile = max(1, SCORES // (len(lane.heads) * count * q.shape[0]))
            for at in range(0, len(queries), tile):
                in_tile = queries[at : at + tile]
                rows = slice(in_tile.start, in_tile.stop, in_tile.step)
                distance = count + torch.arange(at, at + len(in_tile), device=q.device)[:, None]  # to the first key
                visible = distance - torch.arange(count, device=q.device) < branch.window
                _merge(out[:, rows], lse[:, rows], heads, *_dense(q[:, rows][:, :, heads], keys, values, visible))

    def kernel_serves(self, q: Tensor) -> bool:
        """Return whether `step` supports queries q (B, 1, H, D)."""
        if q.shape[1] != 1 or not kernels.available(q.device) or self.length < self.clock.longest:
            return False
        from lightning_dilated.ext.decoding.kernels import serves

        return serves(q[:, 0]) and (self._k is None or self._k.dtype == q.dtype)

    def step(self, q: Tensor, k: Tensor, v: Tensor, scale: float, table: RotaryTable | None) -> Tensor:
        """Add one token with k and v (B, 1, K, D), and return its attention (B, 1, H, D). `table` rotates q and k."""
        from lightning_dilated.ext.decoding.kernels import decode, launch

        self.check(k, v)
        self._places.forget()
        if self.max_length is None or self._k is None:
            self._make_room(k, self.clock.kept(self.length + 1, len(k)))
        positions = self.positions(len(q), q.device)
        if self._launch is None or self._launch[0] != (self._places, len(q), q.device):
            tables = launch(_kernel_slots(self._slots_key, self._places.capacities), self.num_heads, len(q), q.device)
            # keep the tables as long as the cache, because a captured graph reads them
            self._launch = (self._places, len(q), q.device), tables
        rotation = None if table is None else tuple(None if x is None else x.flatten(0, -2) for x in table.on(q.device))
        q, k, v = (x[:, 0] if x.stride(-1) == 1 else x[:, 0].contiguous() for x in (q, k, v))
        with kernels.on(q.device):
            buffers, unrotated = (self._k, self._v), () if table is None else table.unrotated
            out = decode(q, k, v, buffers, positions, self._launch[1], scale, rotation, unrotated)
        self.length += 1
        return out[:, None]

    def positions(self, batch: int, device: torch.device) -> Tensor:
        """Return the position of each sample's next token, (B,) int64 on the device; call it only after the prompts."""
        return self.clock.positions(self.length, batch, device)

    def token_positions(self, x: Tensor) -> tuple[Tensor | None, int | None]:
        """Return the positions of x (B, n, ...) and the largest of them; (None, None) means length, length + 1, ...

        Positions of a single token are a device tensor if samples differ, or if a captured graph may advance them.
        """
        if x.shape[1] != 1 or self.length < self.clock.longest or not (self.clock.ragged or x.is_cuda):
            return None, None
        positions = self.positions(len(x), x.device)
        return positions[:, None] if self.clock.ragged else positions[:1], max(self.clock.kept(self.length, 1))

    # -- samples -------------------------------------------------------------------------------------------------------
    def select(self, indices: Tensor) -> None:
        """Keep the samples at these indices (M,), int64, in this order; B becomes M. Beam search needs this.

        A sample may replace another one only if their prompts have the same length, as beams of one prompt do.

        Raises:
            ValueError: if lengths differ.
        """
        lengths = self.clock.lengths
        if lengths and tuple(lengths[i] for i in indices.tolist()) != lengths:
            raise ValueError("a sample can only replace a sample with a prompt of the same length.")
        if self._k is None or self._v is None or self._shape is None:
            return
        self._k, self._v = (x.index_select(0, indices.to(x.device)) for x in (self._k, self._v))
        for name, x in self.mixer_states.items():
            rows = x.index_select(0, indices.to(x.device)) if isinstance(x, Tensor) else x.select(indices)
            self.mixer_states[name] = rows
        self._shape, self._launch = (len(indices), *self._shape[1:]), None
        self._views = [(self._rows_of(self._k, i), self._rows_of(self._v, i)) for i in range(len(self._branches))]

    def repeat(self, times: int) -> None:
        """Repeat each sample `times` times; copies are adjacent."""
        if self._k is not None:
            self.select(torch.arange(len(self._k)).repeat_interleave(times))

    # -- the context of a layer ----------------------------------------------------------------------------------------
    @classmethod
    def of_layer(
        cls, layer: MultiheadDilatedAttention, max_length: int | None = None, clock: Clock | None = None
    ) -> KVCache:
        """Create an empty cache for a layer; see the class for the other arguments."""
        recurrence = None if layer.recurrence is None else layer.recurrence.description
        heads = layer.num_heads, layer.num_kv_heads
        return cls(layer.attention.pattern, *heads, max_length=max_length, clock=clock, recurrence=recurrence)

    def heads(
        self,
        layer: MultiheadDilatedAttention,
        query: Tensor,
        positions: Any,
        lengths: Tensor | None,
        cu_seqlens: Tensor | None,
        causal: bool,
    ) -> Tensor:
        """Add new tokens (B, n, E); return the heads' outputs (B, n, H, D). The first call may add the prompt.

        Raises:
            ValueError: if the call does not support a cache, or the cache was made for a different layer.
        """
        self._check_layer(layer, causal, lengths is not None or cu_seqlens is not None)
        furthest, later = None, None
        if positions is None:
            positions, furthest = self.token_positions(query)
        table = layer.table(query, positions, self.length, furthest)
        if query.shape[1] == 1:  # `decode_attention` rotates q and k
            table, later = None, table
        q, k, v, *plain = layer.projected(query, table, [m.mix_new(self) for m in layer.mixers if m.mixes])
        added = [m.add_new(query, (*plain, v), self) for m in layer.mixers if m.adds]
        out = decode_attention(q, k, v, self, layer.attention.scale, layer.attention.engine, later)
        for rows in added:
            out = out + rows.to(out.dtype)
        return out

    def _check_layer(self, layer: MultiheadDilatedAttention, causal: bool, packed: bool) -> None:
        if active_sequence() is not None:
            raise ValueError(
                "a cache serves one rank: decode outside of SequenceGroup.active(), or within no_sequence()."
            )
        if not causal or packed:
            raise ValueError("a cache serves causal attention over whole rows: causal=True, no lengths, no cu_seqlens.")
        if layer.training and layer.attention.dropout > 0:
            raise ValueError("a cache serves inference, without dropout: call .eval() first.")
        layer_heads, cache_heads = ((x.num_heads, x.num_kv_heads) for x in (layer, self))
        if self.pattern != layer.attention.pattern or layer_heads != cache_heads:
            raise ValueError(
                f"this cache was made for {self.pattern} and (heads, kv heads) {cache_heads}, but the layer has "
                f"{layer.attention.pattern} and {layer_heads}. Make it by the layer's new_cache()."
            )
        expected = None if layer.recurrence is None else layer.recurrence.description
        if self.recurrence != expected:
            raise ValueError(
                f"this cache was made for recurrence={self.recurrence}, but the layer has {expected}. Make it by the "
                "layer's new_cache()."
            )

    # -- contents ------------------------------------------------------------------------------------------------------
    def reset(self) -> None:
        """Remove all tokens; the buffers keep their addresses."""
        self.length = 0
        self.mixer_states = {name: x.zero_() for name, x in self.mixer_states.items() if isinstance(x, Tensor)}

    def rows(self) -> list[dict[int, int]]:
        """Return, for each branch, {kv head: rows of the longest sample in the cache}, summed over residues."""
        branches = []
        stop = max(self.clock.kept(self.length, 1))
        for branch in self._branches:
            count: Counter[int] = Counter()
            first = branch.first(stop - 1)
            for residue, lane in branch.lanes.items():
                count.update(dict.fromkeys(lane.kv_heads, branch.count(residue, first, stop)))
            branches.append(dict(count))
        return branches

    @property
    def nbytes(self) -> int:
        buffers = (self._k, self._v, *self.mixer_states.values())
        return sum(x.nbytes for x in buffers if x is not None)


def _alike(stops: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """Yield (samples, stop) for runs of consecutive samples with the same stop."""
    start = 0
    for i in range(1, len(stops) + 1):
        if i == len(stops) or stops[i] != stops[start]:
            yield slice(start, i), stops[start]
            start = i


@functools.lru_cache(maxsize=64)
def _kernel_slots(slots_key: tuple[DilatedPattern, int, int], capacities: tuple[int, ...]) -> tuple[Any, ...]:
    from lightning_dilated.ext.decoding.kernels import NO_WINDOW, Slot

    places, slots = Places(layer_slots(*slots_key), capacities), []
    for number, branch in enumerate(places.branches):
        capacity, base = capacities[number], places.bases[number]
        width = branch.width or LARGEST["segment_length"]
        for i, ((residue, kv_head), heads) in enumerate(branch.users.items()):
            skipped = len(range(residue, branch.shift, branch.rate))
            window = branch.window or NO_WINDOW if branch.limit is None else -branch.limit
            place = branch.rate, branch.shift, window, residue, skipped, base + i * capacity, capacity
            slots.append(Slot(number, width, *place, kv_head, heads))
    return tuple(slots)


@functools.lru_cache(maxsize=4096)
def _index(heads: tuple[int, ...], device: torch.device) -> slice | Tensor:
    """Return an index of these heads: a slice, which makes a view, if they are evenly spaced; else a tensor."""
    step = heads[1] - heads[0] if len(heads) > 1 else 1
    if step > 0 and heads == tuple(range(heads[0], heads[-1] + 1, step)):
        return slice(heads[0], heads[-1] + 1, step)
    return torch.tensor(heads, device=device)


def _dense(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (out, lse (B, n, S g)) of q (B, n, S g, D) attending to k, v (B, S, rows, D), with g heads for each slot.

    `visible`: (n, rows) bool, the rows that each query reads; None: all rows.
    """
    batch, new, _, dim = q.shape
    slots = k.shape[1]
    grouped = q.unflatten(2, (slots, -1)).transpose(1, 2).reshape(batch, slots, -1, dim)
    s = grouped @ k.transpose(-1, -2)
    if visible is not None:
        s = s.masked_fill(~visible.repeat_interleave(s.shape[2] // new, 0), -torch.inf)
    lse = torch.logsumexp(s, -1)
    out = torch.softmax(s, -1) @ v
    back = lambda x: x.unflatten(2, (new, -1)).transpose(1, 2).flatten(2, 3)  # noqa: E731
    return back(out), back(lse)


def _by_engine(engine: Engine, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute `_dense` for unscaled queries with an engine."""
    grouped = q.unflatten(2, (k.shape[1], -1)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    out, lse = engine.forward(*suited(engine, grouped, k, v), Terms(False, scale))
    back = lambda x: x.unflatten(2, (q.shape[1], -1)).transpose(1, 2).flatten(2, 3)  # noqa: E731
    return back(out), back(lse)


def _merge(out: Tensor, lse: Tensor, heads: slice | Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a result of these heads into out (B, n, H, D) and lse (B, n, H), in place."""
    total, weight, part_weight = merge(lse[:, :, heads], part_lse)
    out[:, :, heads] = (out[:, :, heads] * weight[..., None]).addcmul_(part.to(out.dtype), part_weight[..., None])
    lse[:, :, heads] = total


def new_caches(
    stack: DilatedTransformer, max_length: int | None = None, lengths: Sequence[int] | None = None
) -> list[KVCache]:
    """Create an empty cache for each block; see `DilatedTransformer.new_caches`."""
    clock = Clock(lengths)
    return [block.attention.new_cache(max_length, clock) for block in stack.blocks]
