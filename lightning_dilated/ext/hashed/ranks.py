"""Compute hashed attention on several ranks, which share the work evenly, whatever the codes are.

The sorted list of all rows and lookups is cut into R parts by a sample sort. Each rank sorts its own entries, and every
h-th entry is a sample. Of the sorted samples of all ranks, R - 1 at equal distances are splitters, with which parts
start. A rank sends each row and each lookup to the rank that computes its part. It also sends the last L rows before a
part that have the splitter's code, because lookups in the part read them. Results return the same way; gradients travel
back along both ways.

In a chunk of a stream, the rows of earlier chunks are entries of the ranks that carry them. Among the rows of a key,
the position of an earlier row is its `HashedRows.numbers`, which is less than the position of every token of the chunk.
No part starts at an earlier row, so a part may have L entries more.

For E entries, h = max(1, E // max(4 R^2, 4096)). Between two samples, a rank has fewer than h entries. Therefore a part
has at most E / R + (R + 2) h + 1 entries, at most 3/2 E / R + 3, and at most L rows before it.

Shape letters: B batch, N tokens of this rank, L latest rows, R ranks, K kv heads, g query heads for each kv head, D head
dim, G groups of M codes, P lookups for each query, E rows and lookups of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_dilated.ext.hashed.lookup import Inputs, Lookup, why_not
from lightning_dilated.ext.hashed.order import Entries, merge
from lightning_dilated.ext.hashed.rows import HashedRows
from lightning_dilated.sequence.exchange.transport import Block, Traffic, Wire, joined
from lightning_dilated.sequence.group import SequenceGroup
from lightning_dilated.sequence.shard import Shard

#: least number of samples of all ranks
SAMPLES = 4096


@dataclass(frozen=True)
class Place:
    """This rank's part of a call.

    Attributes:
        number: number of the call in its group.
        positions: (N,) int64, the positions of this rank's tokens.
        entries: number of rows and lookups of each rank, without padding.
        longest: largest number of rows with one key on a rank.
        earlier: this rank's rows of earlier chunks; None without a stream.
    """

    group: SequenceGroup
    number: int
    positions: Tensor
    kv_heads: int
    entries: tuple[int, ...]
    longest: int
    earlier: HashedRows | None = None

    @property
    def step(self) -> int:
        """h, the distance of samples."""
        return max(1, sum(self.entries) // max(4 * self.group.ranks**2, SAMPLES))

    @classmethod
    def of(
        cls, group: SequenceGroup, number: int, shard: Shard, lengths: Sequence[int], k: Tensor, lookups: int
    ) -> Place:
        """Return the place in a call on samples of `lengths` with k (B, N, K, D) and P `lookups` for each query."""
        tokens = [real_tokens(shard.ranges(rank), lengths) for rank in range(group.ranks)]
        entries = tuple(n * k.shape[2] * (1 + lookups) for n in tokens)
        return cls(group, number, local_positions(shard, group.rank, k.device), k.shape[2], entries, shard.longest)

    @classmethod
    def of_chunk(
        cls, group: SequenceGroup, number: int, pieces: Sequence[range], lengths: Sequence[int], rows: HashedRows,
        lookups: int,
    ) -> Place:  # fmt: skip
        """Return the place in a chunk, with the `pieces` of all ranks and this rank's `rows` of earlier chunks."""
        device = rows.keys.device
        earlier = swap(group, torch.full((group.ranks, 1), len(rows.keys), device=device)).flatten().tolist()
        tokens = [real_tokens([x], lengths) * rows.heads * (1 + lookups) for x in pieces]
        entries = tuple(map(sum, zip(tokens, earlier, strict=True)))
        longest, own = max(map(sum, zip(map(len, pieces), earlier, strict=True))), pieces[group.rank]
        positions = torch.arange(own.start, own.stop, device=device)
        return cls(group, number, positions, rows.heads, entries, longest, rows)

    def gather(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the rows of all ranks, which have `counts` rows."""
        sends = dict.fromkeys(range(len(counts)), len(rows))
        posted = wire(self.group, self.group.forward_traffic)
        return posted.post(rows.repeat(len(counts), 1), sends, dict(enumerate(counts)), what="samples").wait()


def wire(group: SequenceGroup, traffic: Traffic) -> Wire:
    """Return the wire between the ranks of a group."""
    return Wire(group.group, tuple(range(group.ranks)), group.rank, traffic)


def swap(group: SequenceGroup, rows: Tensor) -> Tensor:
    """Send row r to rank r, and return the rows (R, ...) that the ranks sent."""
    counts = dict.fromkeys(range(len(rows)), 1)
    return wire(group, group.forward_traffic).post(rows, counts, counts, what="counts").wait()


def sums(group: SequenceGroup, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of x (n,) over all ranks, and over lower ranks. Each rank adds a part, in the order of ranks."""
    parts = nn.functional.pad(x, (0, -len(x) % group.ranks)).view(group.ranks, -1)
    total = swap(group, parts).cumsum(0, dtype=x.dtype)
    lower = torch.cat([torch.zeros_like(total[:1]), total[:-1]])
    total, lower = swap(group, torch.stack([total[-1:].expand_as(lower), lower], 1)).unbind(1)
    return total.flatten()[: len(x)], lower.flatten()[: len(x)]


def agree(
    group: SequenceGroup | None, tensors: Sequence[Tensor], options: Sequence[Any], lengths: Any, cu_seqlens: Any
) -> tuple[int, Shard, Tensor]:
    """Compare a call on all ranks; return its number, its shard, and the positions (N,) of this rank's tokens."""
    if group is None:
        return 0, (shard := Shard(tensors[0].shape[1], 1)), local_positions(shard, 0, tensors[0].device)
    names = ("latest", "probes", "soft", "code_scores", "scale")
    facts = {
        "call": "hashed_attention",
        "shapes": [(*x.shape[:1], *x.shape[2:]) for x in tensors],
        **same_kind(tensors),
        "requires grad": [torch.is_grad_enabled() and x.requires_grad for x in tensors],
        **dict(zip(names, options, strict=True)),
        "lengths": None if lengths is None else lengths.tolist(),
        "cu_seqlens": None if cu_seqlens is None else cu_seqlens.tolist(),
    }
    agreed = group.agree(facts, tensors[0].shape[1])
    shard = group.shard(agreed.seq_len)
    return agreed.number, shard, local_positions(shard, group.rank, tensors[0].device)


def same_kind(tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Return facts about a call's tensors that decide what ranks send."""
    q, logits = tensors[0], tensors[3]
    compiled = why_not(q, logits, torch.promote_types(q.dtype, torch.float32)) is None
    return {"dtypes": [x.dtype for x in tensors], "computed by": "kernels" if compiled else "torch"}


def local_positions(shard: Shard, rank: int, device: torch.device) -> Tensor:
    """Return the positions (N,) int64 of a rank's tokens."""
    runs = [torch.arange(x.start, x.stop, x.step, device=device) for x in shard.ranges(rank)]
    return torch.cat([torch.empty(0, dtype=torch.int64, device=device), *runs])


def real_tokens(ranges: Sequence[range], lengths: Sequence[int]) -> int:
    """Return the number of tokens at positions in `ranges` of samples of `lengths`."""
    return sum(max(0, min(x.stop, n) - x.start) for x in ranges for n in lengths)


class Route(NamedTuple):
    """The rows that a rank sends, `index`, sorted by receiver (None: all rows), and {rank: number of rows}."""

    index: Tensor | None
    sends: dict[int, int]
    receives: dict[int, int]

    def back(self) -> Route:
        """Return the route of one result for each received row."""
        return Route(None, self.receives, self.sends)


class Routes(NamedTuple):
    """The routes of a call."""

    rows: Route
    lookups: Route
    results: Tensor  # (lookups to send,), the index in a flattened (B, N, K, P)

    def there(self) -> list[Route]:
        """Return the routes of the tensors of `Inputs`, and of the ids of rows and of lookups."""
        ids = [Route(None, route.sends, route.receives) for route in (self.rows, self.lookups)]
        return [self.lookups, self.rows, self.rows, self.lookups, self.rows, *ids]


def move(
    group: SequenceGroup, traffic: Traffic, what: str, routes: Sequence[Route], tensors: Sequence[Tensor]
) -> list[Tensor]:
    """Send rows of each tensor by its route, all in one collective, and return the received rows."""
    blocks = [
        Block(x if route.index is None else x[route.index], route.sends, route.receives)
        for x, route in zip(tensors, routes, strict=True)
    ]
    posted = wire(group, traffic).post_together(blocks, what)
    return [joined(x, block.rows) for x, block in zip(posted.wait(), blocks, strict=True)]


def agree_backward(group: SequenceGroup, number: int) -> None:
    """Compare on all ranks which call's backward begins."""
    group.agree({"call": f"backward of hashed_attention, call {number}"})


class Exchange(torch.autograd.Function):
    """Send rows of several tensors, each by its route. The backward returns gradients and adds them in a fixed order."""

    @staticmethod
    def forward(ctx: Any, place: Place, routes: Sequence[Route], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.number = place.group, place.number
        ctx.routes, ctx.like = routes, [(len(x), x.dtype) for x in tensors]
        received = tuple(move(place.group, place.group.forward_traffic, "hashed rows", routes, tensors))
        ctx.mark_non_differentiable(*(x for x in received if not x.is_floating_point()))
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        agree_backward(group := ctx.group, ctx.number)
        numbers = [i for i, (_, dtype) in enumerate(ctx.like) if dtype.is_floating_point]
        routes, grads = [ctx.routes[i].back() for i in numbers], [grads[i] for i in numbers]
        moved = move(group, group.backward_traffic, "gradients of hashed rows", routes, grads)
        results: list[Any] = [None] * len(ctx.like)
        for i, grad in zip(numbers, moved, strict=True):
            (length, dtype), index = ctx.like[i], ctx.routes[i].index
            results[i] = grad if index is None else add_up(grad, index, length).to(dtype)
        return None, None, *results


def add_up(x: Tensor, index: Tensor, length: int) -> Tensor:
    """Add rows of x with equal `index` in fp32 (fp64); on a GPU, index_add_ would add them in any order."""
    wide = x[index.argsort(stable=True)].to(torch.promote_types(x.dtype, torch.float32)).flatten(1)
    # unlike bincount, which reads the largest index, this does not make the host wait
    counts = torch.zeros(length, dtype=torch.int64, device=x.device).scatter_add_(0, index, torch.ones_like(index))
    sums = torch.segment_reduce(wide, "sum", lengths=counts, unsafe=True, initial=0)
    return sums.view(length, *x.shape[1:])


class Tie(torch.autograd.Function):
    """Return all tensors unchanged. A loss of one of them then runs the backward of all, in which all ranks take part."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def look_up(
    place: Place, entries: Entries, reach: int, block: int, settings: tuple[float, bool], inputs: Inputs
) -> tuple[list[Tensor], Tensor]:
    """Return the `Reads` of this rank's lookups, (B N K P, ...), and the number of rows that each lookup reads."""
    routes, ids = find_routes(place, entries, reach)
    *received, row_ids, lookup_ids = Exchange.apply(place, routes.there(), *inputs, *ids)
    order = merge(received_entries(row_ids, lookup_ids), reach, block)
    read = Lookup.apply(order, 1, settings, *received)
    back = Exchange.apply(place, (routes.lookups.back(),) * 5, *read, order.counts(len(lookup_ids))[:, None])
    fillers = (0, -torch.inf, 0, -torch.inf, 0)  # of padding, as in `Lookup`
    *read, counts = (
        x.new_full((entries.number, *x.shape[2:]), filler).index_copy(0, routes.results, x.flatten(0, 1))
        for x, filler in zip(back, fillers, strict=True)
    )
    return read, counts


def only_rows(keys: Tensor, number: int) -> Entries:
    """Sort rows by their keys."""
    keys, order = keys.sort(stable=True)
    return Entries(keys, torch.ones_like(order, dtype=torch.bool), order, torch.full_like(order, number), order, number)


def received_entries(row_ids: Tensor, lookup_ids: Tensor) -> Entries:
    """Sort received rows and lookups, with keys and positions (n, 2)."""
    number, lookups = len(row_ids), len(lookup_ids)
    keys, positions = torch.cat([row_ids, lookup_ids]).unbind(1)
    index = lexical(keys, positions)  # stable: a row comes before its token's lookups
    if not number or not lookups:  # nothing to read, or no query
        index = index[:0]
    is_row = index < number
    query = index - number
    return Entries(keys[index], is_row, query.clamp_min(0), torch.where(is_row, lookups, query), index[is_row], lookups)


def lexical(keys: Tensor, positions: Tensor) -> Tensor:
    """Return the indices that sort by key, then by position; stable."""
    first = positions.argsort(stable=True)
    return first[keys[first].argsort(stable=True)]


def find_routes(place: Place, entries: Entries, reach: int) -> tuple[Routes, tuple[Tensor, Tensor]]:
    """Cut the sorted list of all ranks; return this rank's routes, and the keys and positions of what it sends.

    Keys and positions (n, 2) are int64, of rows and of lookups. Collective; the host waits for the counts.
    """
    if place.earlier is not None and not len(entries.keys):  # a rank without tokens, too, has rows that others read
        entries = only_rows(place.earlier.keys, entries.number)
    is_row, tokens, keys = entries.is_row, entries.queries, entries.keys.long()
    positions, local = find_positions(place, entries)
    ids = torch.stack([keys, positions], 1)
    first, cuts = find_cuts(place, keys, local, splitters(place, ids))
    edges = torch.cat([cuts.new_zeros(1), cuts, cuts.new_full((1,), len(tokens))])
    rows_before = torch.cat([is_row.new_zeros(1, dtype=torch.int64), is_row.cumsum(0)])
    row_edges = rows_before[edges]
    lookups = (edges - row_edges).diff()
    # each rank offers its latest rows before a part; the part's rank wants the L latest of all ranks
    back = torch.arange(min(reach, place.longest), device=tokens.device)
    row_positions = torch.cat([ids[is_row, 1], ids.new_full((1,), -1)])
    is_before = back < (row_edges[1:-1] - rows_before[first])[:, None]
    latest = row_positions[torch.where(is_before, row_edges[1:-1, None] - 1 - back, -1)]
    latest = torch.cat([latest.new_full((1, len(back)), -1), latest])
    offers = swap(place.group, torch.cat([row_edges.diff()[:, None], lookups[:, None], latest], 1))
    latest = offers[:, 2:]
    limit = latest.flatten().topk(min(reach, latest.numel())).values[-1].clamp_min(0)
    before = (latest >= limit).sum(1, keepdim=True)
    table = [
        row_edges[:-1, None],
        row_edges[1:, None],
        lookups[:, None],
        swap(place.group, before),
        offers[:, :2],
        before,
    ]
    starts, stops, asked, wanted, rows, queries, halo = torch.cat(table, 1).T.tolist()

    row_ids, lookup_entries = ids[is_row], (~is_row).nonzero().flatten()
    spans = [slice(start - n, stop) for start, stop, n in zip(starts, stops, wanted, strict=True)]
    sent = torch.cat([entries.rows[x] for x in spans])
    routes = Routes(
        Route(sent, _counts(x.stop - x.start for x in spans), _counts(map(sum, zip(rows, halo, strict=True)))),
        Route(tokens[lookup_entries], _counts(asked), _counts(queries)),
        entries.lookups[lookup_entries],
    )
    return routes, (torch.cat([row_ids[x] for x in spans]), ids[lookup_entries])


def find_positions(place: Place, entries: Entries) -> tuple[Tensor, Tensor]:
    """Return each entry's position, and the index of its token in `place.positions`; -1 for rows of earlier chunks."""
    local = entries.queries // place.kv_heads % max(1, len(place.positions))
    if place.earlier is None or not len(place.earlier.keys):
        return place.positions[local], local
    positions = nn.functional.pad(place.positions, (0, 1))[local]  # a rank without tokens has earlier rows only
    earlier, index = entries.is_row.nonzero()[:, 0], entries.rows
    earlier, index = (x[index < len(place.earlier.keys)] for x in (earlier, index))
    positions[earlier] = place.earlier.numbers[index]
    return positions, local.index_fill(0, earlier, -1)


def _counts(numbers: Iterable[int]) -> dict[int, int]:
    return {rank: n for rank, n in enumerate(numbers) if n}


def splitters(place: Place, ids: Tensor) -> Tensor:
    """Return key and position (R - 1, 2) at which each part but the first starts. Collective."""
    ranks, step = place.group.ranks, place.step
    samples = place.gather(ids[::step], [-(-n // step) for n in place.entries])
    samples = samples[lexical(*samples.unbind(1))]
    return samples[torch.arange(1, ranks, device=ids.device) * len(samples) // ranks]


def find_cuts(place: Place, keys: Tensor, local: Tensor, splits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of sorted entries before the key of each splitter, and before the splitter, (R - 1,) each."""
    key, position = splits.T.contiguous()
    first, end = (torch.searchsorted(keys, key, right=right) for right in (False, True))
    new_key = torch.ones_like(keys)
    new_key[1:] = keys[1:] != keys[:-1]
    number = new_key.cumsum(0)  # a key's number and a local token fit in one integer, a key and a position do not
    width = len(place.positions) + 2
    before = torch.cat([number.new_zeros(1), number])[first]
    token = torch.searchsorted(place.positions, position)
    return first, torch.searchsorted(number * width + local, (before + 1) * width + token).minimum(end)


def planned_sums(size: int, itemsize: int, ranks: int) -> int:
    """Return the bytes that a rank sends to other ranks in `sums` of a vector (size,)."""
    return 3 * -(-size // ranks) * itemsize * (ranks - 1)


def planned_bytes(
    inputs: Inputs, ranks: int, samples: int, latest: int, sent: tuple[int, int], received: tuple[int, int],
    kernels: bool,
) -> tuple[int, int]:  # fmt: skip
    """Return the bytes that a rank sends to other ranks in forward and backward.

    Args:
        inputs: tensors of any number of tokens, also without values.
        samples: number of this rank's samples.
        latest: number of rows that a rank offers for each part: L, or the largest number of tokens on a rank if less.
        sent, received: numbers of rows and of lookups that this rank sends to other ranks, and receives from them.
        kernels: whether kernels compute the call. Their backward sends the gradient of the query's output and 3 g + 2
            numbers in fp32 to each lookup.
    """
    width = lambda *tensors: sum(x.shape[1:].numel() * x.element_size() for x in tensors)  # noqa: E731
    q, k, v, chance_q, chance_k = inputs
    row, lookup = width(k, v, chance_k), width(q, chance_q)
    result = (q.shape[1] * (q.shape[2] + 2) + 1) * chance_q.element_size()
    grad = 4 * (3 * q.shape[1] + 2) + width(q) if kernels else result
    control = (ranks - 1) * (16 * samples + 8 * (2 + latest) + 8)
    forward = sent[0] * (row + 16) + sent[1] * (lookup + 16) + received[1] * (result + (4 if kernels else 8)) + control
    return forward, received[0] * row + received[1] * lookup + sent[1] * grad
