"""Compute the scores and sums of hashed attention, and their gradients, in blocks of an `Order`.

A few blocks are computed at a time, and again in the backward, so memory is O(N). Sums are added in a fixed order.
Where `why_not` returns None, the kernels of `fused.py` compute a call instead.

Shape letters: B batch, N tokens, K kv heads, R = B N K rows, g query heads for each kv head, D head dim, G groups of M
codes, P lookups for each query, b blocks of T entries, S rows that a block may read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_dilated import kernels
from lightning_dilated.ext.hashed.order import Order

#: smaller chances are raised to this number and have no gradient, so that the log of a chance is never infinite
FLOOR = 1e-30
#: number of scores and chances to compute at a time: 32 MB in fp32, and several times that in the backward
PART = 1 << 23
#: largest head dim that the kernels take for each dtype of q, k and v
LARGEST = {torch.bfloat16: 256, torch.float16: 256, torch.float32: 128}
#: largest number of codes in all groups that the kernels take, if the codes of a group count as 16, 32, 64, ...
WIDEST = 128


class Inputs(NamedTuple):
    """The inputs of all rows: q (R, g, D), k and v (R, D), and chances of codes (R, G, M), which sum to 1 over M."""

    q: Tensor
    k: Tensor
    v: Tensor
    chance_q: Tensor
    chance_k: Tensor


def why_not(q: Tensor, logits: Tensor, chances: torch.dtype) -> str | None:
    """Return None if the kernels compute q (..., D) with logits (..., G, M) and this dtype of chances, else the reason."""
    dtype, dim, (groups, codes) = q.dtype, q.shape[-1], logits.shape[-2:]
    if chances != torch.float32 or dim > LARGEST.get(dtype, 0):
        return f"takes head dims up to 256 (up to 128 in fp32), not {dim} in {dtype} with {chances} chances"
    if groups * max(16, 1 << (codes - 1).bit_length()) > WIDEST:
        return f"takes at most {WIDEST} codes in all groups, not {groups} groups of {codes}"
    return kernels.why_not(q.device)


class Reads(NamedTuple):
    """The results of lookups without the null key. If a lookup reads no row, means are 0 and logs of sums are -inf."""

    out: Tensor  # (R, P, g, D), the mean of v under the softmax of scores
    lse: Tensor  # (R, P, g), the log of the sum of exp(score)
    match: Tensor  # (R, P, g), the mean of log chances under the same softmax, which gets no gradient from it
    chance: Tensor  # (R, P), the log of the sum of chances


def attend(inputs: Inputs, reads: Tensor, scale: float, code_scores: bool) -> Reads:
    """Return results (b, T, ...) for q (b, T, g, D), chance_q (b, T, G, M), k, v, chance_k (b, S, ...) and `reads`."""
    q, k, v, chance_q, chance_k = inputs
    empty = ~reads.any(-1, keepdim=True)
    match = (chance_q.transpose(1, 2) @ chance_k.permute(0, 2, 3, 1)).clamp_min(FLOOR).log().sum(1)
    scores = (q.flatten(1, 2) @ k.mT).unflatten(1, q.shape[1:3]) * scale
    scores = (scores + match[:, :, None] if code_scores else scores).masked_fill(~reads[:, :, None], -torch.inf)
    top = scores.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True).masked_fill(empty[:, :, None], 1)
    share = weights / total
    return Reads(
        (share.flatten(1, 2) @ v).unflatten(1, q.shape[1:3]),
        (total.log() + top)[..., 0].masked_fill(empty, -torch.inf),
        (share.detach() * match[:, :, None]).sum(-1),
        match.masked_fill(~(reads | empty), -torch.inf).logsumexp(-1).masked_fill(empty[..., 0], -torch.inf),
    )


def parts(order: Order, inputs: Inputs) -> Iterator[tuple[Tensor, Inputs, Tensor, Tensor]]:
    """Yield a few blocks at a time: indices in `order.rows` (b, S), two arguments of `attend`, and lookups (b T,)."""
    size, most, dtype = order.block, order.block + order.reach, inputs.chance_q.dtype
    step = max(1, PART // (size * most * (3 * inputs.q.shape[1] + 2 * inputs.chance_q.shape[1])))
    offsets = torch.arange(-order.reach, size, device=order.first.device)
    for i in range(0, len(order.first), step):
        entries = slice(i * size, (i + step) * size)
        rows = order.first[i : i + step, None] + offsets
        begin, end = (x[entries].view(-1, size, 1) for x in (order.begin, order.end))
        query, row = order.tokens[entries].view(-1, size), order.rows[rows.clamp(0, len(order.rows) - 1)]
        numbers = (query, row, row, query, row)
        block = Inputs(*(x[i].to(dtype) for x, i in zip(inputs, numbers, strict=True)))
        yield rows, block, (rows[:, None] >= begin) & (rows[:, None] < end), order.lookups[entries]


class Lookup(torch.autograd.Function):
    """Compute the `Reads` of all lookups in an `Order` from the tensors of `Inputs`."""

    @staticmethod
    def forward(ctx: Any, order: Order, probes: int, settings: tuple[float, bool], *tensors: Tensor) -> Any:
        inputs = Inputs(*tensors)
        (tokens, group, dim), new = inputs.q.shape, inputs.chance_q.new_full
        size = tokens * probes + 1  # entries that are not lookups write to the last place
        shapes = (size, group, dim), (size, group), (size, group), (size,)
        results = [new(*x) for x in zip(shapes, (0, -torch.inf, 0, -torch.inf), strict=True)]
        ctx.probes, ctx.settings = probes, settings
        ctx.order = order
        ctx.save_for_backward(*tensors)
        for _, block, reads, lookups in parts(order, inputs):
            for result, x in zip(results, attend(block, reads, *settings), strict=True):
                result[lookups] = x.flatten(0, 1)
        return tuple(x[:-1].unflatten(0, (tokens, probes)) for x in results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        order, inputs = ctx.order, Inputs(*ctx.saved_tensors)
        grads = tuple(torch.cat([x.flatten(0, 1), x.new_zeros(1, *x.shape[2:])]) for x in grads)
        new, widths = grads[0].new_zeros, [x.shape[1:].numel() for x in (inputs.k, inputs.v, inputs.chance_k)]
        queries = [new(len(grads[0]), *x.shape[1:]) for x in (inputs.q, inputs.chance_q)]
        # the L places before the first row and the T places after the last row belong to no row
        sums = new(order.reach + len(order.rows) + order.block, sum(widths))
        for rows, block, reads, lookups in parts(order, inputs):
            with torch.enable_grad(), torch.autocast(inputs.q.device.type, enabled=False):
                read = attend(Inputs(*(x.requires_grad_() for x in block)), reads, *ctx.settings)
                wanted = [x[lookups].view(y.shape) for x, y in zip(grads, read, strict=True)]
                q, k, v, chance_q, chance_k = torch.autograd.grad(read, block, wanted)
            for total, x in zip(queries, (q, chance_q), strict=True):
                total[lookups] = x.flatten(0, 1)
            columns = torch.cat([k, v, chance_k.flatten(2)], -1).flatten(0, 1)
            number = (rows - rows[0, 0]).flatten()
            # add a row's gradients from several blocks in a fixed order; on a GPU, index_add_ adds in any order
            columns, lengths = columns[number.argsort(stable=True)], torch.bincount(number)
            first = int(rows[0, 0]) + order.reach
            place = sums[first : first + len(lengths)]
            place += torch.segment_reduce(columns, "sum", lengths=lengths, unsafe=True, initial=0)
        d_q, d_chance_q = (x[:-1].unflatten(0, (-1, ctx.probes)).sum(1) for x in queries)
        by_token = new(len(inputs.k), sum(widths))
        by_token[order.rows] = sums[order.reach : order.reach + len(order.rows)]
        d_k, d_v, d_chance_k = by_token.split(widths, -1)
        results = (d_q, d_k, d_v, d_chance_q, d_chance_k)
        return None, None, None, *(x.reshape(y.shape).to(y.dtype) for x, y in zip(results, inputs, strict=True))


def merge_lookups(read: Reads, null: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Merge `read` (B, N, K, P, ...) with the null key (K, g); return out (B, N, H, D), agree, contrast (B, N, H)."""
    null_key = null[:, None].expand_as(read.lse[:, :, :, :1])
    share = torch.cat([null_key, read.lse], 3).softmax(3)[:, :, :, 1:]
    out = (share[..., None] * read.out).sum(3)
    constant = share.detach()
    match = (constant * read.match).sum(3)
    empty = torch.isinf(read.chance).all(-1, keepdim=True)
    total = read.chance.masked_fill(empty, 0).logsumexp(-1, keepdim=True)
    return out.flatten(2, 3), -match.flatten(2, 3), (constant.sum(3) * total - match).flatten(2, 3)
