"""Attention to the rows with the query's learned code: exact by sorting, and "soft" over all rows.

Letters: B batch, N tokens, D head dim, G groups of M codes, L maximum number of rows that a lookup reads, P lookups (probes)
of a query, K rows, Q lookups, T entries of a block.

The code of a row is the index of its largest logit in each group. Query p looks up its own code and P - 1 others, and for
each it reads the L latest rows j <= p with that code. A row's score is the scaled product q.k plus the log of the chance
that the codes agree. One softmax covers the scores of these rows and a null key with score `null` and value 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

NONE = -1e9
BLOCK = 64
#: number of scores that are computed at a time
SCORES = 1 << 24


@dataclass
class Rows:
    """K rows of a far head. A number combines sequence and code. `packed` joins k, v and the chances of the codes."""

    code: Tensor  # (K,) int64
    position: Tensor  # (K,) int64
    packed: Tensor  # (K, 2 D + G M)

    def latest(self, most: int) -> Rows:
        """Return up to `most` latest rows of each code, sorted by code and position."""
        order = (self.code * (self.position.max() + 1) + self.position).argsort()
        code = self.code[order]
        place = torch.arange(len(code), device=code.device)
        chosen = order[torch.searchsorted(code, code, right=True) - place <= most]
        return Rows(self.code[chosen], self.position[chosen], self.packed[chosen])

    def joined(self, other: Rows) -> Rows:
        pairs = ((self.code, other.code), (self.position, other.position), (self.packed, other.packed))
        return Rows(*(torch.cat(pair) for pair in pairs))


@dataclass
class Read:
    """Results of lookups.

    Attributes:
        out: outputs (…, D). All other attributes are (…,).
        lse: log-sum-exp of the scores.
        match: log chance that the codes agree, averaged by the softmax.
        chance: log of the sum of these chances.
        count: number of rows.
    """

    out: Tensor
    lse: Tensor
    match: Tensor
    chance: Tensor
    count: Tensor

    def shaped(self, *sizes: int) -> Read:
        """Return the results reshaped to `sizes`."""
        pairs = ((self.out, self.out.shape[-1:]), *((z, ()) for z in (self.lse, self.match, self.chance, self.count)))
        return Read(*(z.reshape(*sizes, *tail) for z, tail in pairs))


def numbers(z: Tensor) -> Tensor:
    """Return each code as one number (…), computed from the logits (…, G, M)."""
    place = z.shape[-1] ** torch.arange(z.shape[-2], device=z.device)
    return (z.argmax(-1) * place).sum(-1)


def probed(z: Tensor, probes: int) -> Tensor:
    """Return codes (P, …) to look up: the query's own, and variants with the second choice in an uncertain group."""
    place = z.shape[-1] ** torch.arange(z.shape[-2], device=z.device)
    best = z.topk(2, -1)
    change = (best.indices[..., 1] - best.indices[..., 0]) * place
    unsure = (best.values[..., 0] - best.values[..., 1]).argsort(-1)[..., : probes - 1]
    own = (best.indices[..., 0] * place).sum(-1)
    return torch.cat([own[None], (own[..., None] + change.gather(-1, unsure)).movedim(-1, 0)])


def attend(
    query: Tensor, packed: Tensor, allowed: Tensor, dim: int, groups: int, taught: bool = False
) -> tuple[Tensor, ...]:
    """Return out, lse, match and chance of queries (b, T, D + G M) on rows (b, S, 2 D + G M). The mask is (b, T, S).

    `taught`: scores do not depend on codes, and the codes are trained only by their own losses.
    """
    q, chances_q = query.split([dim, query.shape[-1] - dim], -1)
    k, v, chances_k = packed.split([dim, dim, query.shape[-1] - dim], -1)
    cut = lambda x: x.unflatten(-1, (groups, -1)).transpose(-3, -2)  # noqa: E731
    agree = (cut(chances_q) @ cut(chances_k).mT).float().clamp_min(1e-9).log().sum(-3)
    scores = (q @ k.mT).float() * dim**-0.5
    scores = (scores if taught else scores + agree).masked_fill(~allowed, NONE)
    top = scores.amax(-1, keepdim=True).detach()
    weights = (scores - top).exp() * allowed
    total = weights.sum(-1, keepdim=True)
    share = weights / total.clamp_min(1e-30)
    lse = torch.where(total > 0, total.clamp_min(1e-30).log() + top, NONE)[..., 0]
    match = (share.detach() * agree).sum(-1)
    return share.to(v.dtype) @ v, lse, match, agree.masked_fill(~allowed, NONE).logsumexp(-1)


def exact(query: Tensor, code: Tensor, position: Tensor, rows: Rows, latest: int, dim: int, groups: int) -> Read:
    """Look up queries (Q, D + G M), which have a code and a position, by sorting.

    Rows and lookups are sorted together by code and position, and a row comes before a lookup with the same key. A block
    of T sorted entries reads its own rows and the L rows before it, whatever their codes. A mask selects the right ones.
    """
    size, count, device = len(rows.code), len(code), code.device
    span = torch.maximum(rows.position.max(), position.max()) + 1
    places = torch.cat([(rows.code * span + rows.position) * 2, (code * span + position) * 2 + 1])
    entries = -(-(size + count) // BLOCK) * BLOCK
    order = torch.full((entries,), size + count, device=device)
    order[: size + count] = places.argsort()
    is_row = order < size
    before = is_row.cumsum(0) - is_row.long()
    sorted_rows = torch.zeros(size + 1, dtype=torch.long, device=device)
    sorted_rows.scatter_(0, torch.where(is_row, before, size), order)
    lookup = (order - size).clamp(0, count - 1)
    first = torch.searchsorted(rows.code[sorted_rows[:size]], code[lookup])
    begin = torch.where(is_row | (order >= size + count), before, torch.maximum(first, before - latest))
    window = torch.arange(-latest, BLOCK, device=device)
    slots = before.view(-1, BLOCK)[:, :1] + window
    parts = []
    step = max(1, SCORES // (BLOCK * (BLOCK + latest)))
    for i in range(0, len(slots), step):
        some, entry = slots[i : i + step], slice(i * BLOCK, (i + step) * BLOCK)
        chosen = sorted_rows[some.clamp(0, size - 1)]
        packed = rows.packed.index_select(0, chosen.flatten()).unflatten(0, chosen.shape)
        queries = query.index_select(0, lookup[entry]).unflatten(0, (-1, BLOCK))
        least, most = (x[entry].view(-1, BLOCK, 1) for x in (begin, before))
        allowed = (some[:, None] >= least) & (some[:, None] < most)
        parts.append([x.flatten(0, 1) for x in attend(queries, packed, allowed, dim, groups)])
    place = torch.empty(entries + 1, dtype=torch.long, device=device)
    place.scatter_(0, order.clamp(max=entries), torch.arange(entries, device=device))
    at = place[size : size + count]
    reads = (before - begin).index_select(0, at)
    return Read(*(torch.cat(x).index_select(0, at) for x in zip(*parts, strict=True)), reads)


def soft(query: Tensor, packed: Tensor, dim: int, groups: int, taught: bool = False) -> Read:
    """Read all rows j <= p of tensors (B, N, …), in parts of batch and queries that the backward recomputes."""
    size, device = query.shape[1], query.device
    step, cut = max(1, SCORES // size**2), -(-size // 4)
    parts = []
    for begin in range(0, size, cut):
        end = min(size, begin + cut)
        allowed = torch.arange(begin, end, device=device)[:, None] >= torch.arange(end, device=device)
        some = []
        for i in range(0, len(query), step):
            args = (attend, query[i : i + step, begin:end], packed[i : i + step, :end], allowed, dim, groups, taught)
            some.append(checkpoint(*args, use_reentrant=False))
        parts.append([torch.cat(x) for x in zip(*some, strict=True)])
    counts = torch.arange(1, size + 1, device=device).expand(len(query), -1)
    return Read(*(torch.cat(x, 1) for x in zip(*parts, strict=True)), counts)


def mix(read: Read, null: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Merge lookups (P, …) and the null key in one softmax. Return outputs (…, D) and two losses, `agree` and `contrast`."""
    total = torch.logaddexp(read.lse.logsumexp(0), null)
    share = (read.lse - total).exp()
    out = (share[..., None].to(read.out.dtype) * read.out).sum(0)
    weight = share.detach()
    match = (weight * read.match).sum(0)
    chance = read.chance.logsumexp(0).clamp_min(-100)
    return out, -match, weight.sum(0) * chance - match


def balance(chances: Tensor) -> Tensor:
    """Return the KL divergence of the mean code chances (…, G, M) from uniform chances, summed over groups."""
    mean = chances.flatten(0, -3).mean(0)
    return (mean * (mean * chances.shape[-1]).clamp_min(1e-9).log()).sum()
