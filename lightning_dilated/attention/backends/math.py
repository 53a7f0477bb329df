"""The math engine: plain torch for any device and floating dtype, with exact dropout, in bounded memory.

Shape letters: G samples and segments, J heads, n query rows, m key rows (m = n where causal), D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_dilated.attention.backends.base import Engine
from lightning_dilated.attention.dropout import PairDropout

#: scores formed at once, in elements (16 MiB in fp32); a single row of scores may exceed it
SCORE_BUDGET = 1 << 22
#: memory of a dropout mask's integers, as a multiple of that of its scores
DROPOUT_ROOM = 8


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _tiles(q: Tensor, keys: int, causal: bool, dropout: bool = False) -> Iterator[tuple[slice, slice, slice]]:
    """(groups, rows, keys) rectangles of scores within the budget; where causal, up to the last of the rows."""
    groups, heads, rows, _ = q.shape
    budget = SCORE_BUDGET // DROPOUT_ROOM if dropout else SCORE_BUDGET
    row_step = max(1, min(rows, budget // max(1, heads * keys)))
    group_step = max(1, budget // max(1, heads * keys * row_step))
    for g in range(0, groups, group_step):
        for i in range(0, rows, row_step):
            stop = min(i + row_step, rows)
            yield slice(g, min(g + group_step, groups)), slice(i, stop), slice(0, stop if causal else keys)


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool, first_row: int) -> Tensor:
    s = (q * scale) @ k.transpose(-1, -2)
    if causal:
        i = torch.arange(first_row, first_row + q.shape[2], device=q.device)
        s.masked_fill_(torch.arange(k.shape[2], device=q.device) > i[:, None], -torch.inf)
    return s


def forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, dropout: PairDropout | None
) -> tuple[Tensor, Tensor]:
    """See `Engine`."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(q.shape, dtype=wide)
    lse = q.new_empty(q.shape[:-1], dtype=wide)
    for g, i, j in _tiles(q, k.shape[2], causal, dropout is not None):
        s = _scores(_wide(q[g, :, i]), _wide(k[g, :, j]), scale, causal, i.start)
        lse[g, :, i] = torch.logsumexp(s, -1)
        p = torch.exp_(s.sub_(lse[g, :, i, None]))
        if dropout is not None:
            p *= dropout.factors(g, i, j, p)
        out[g, :, i] = p @ _wide(v[g, :, j])
    return out, lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    dropout: PairDropout | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `Engine`: the backward of flash attention (arXiv 2205.14135, algorithm 4)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    dq = q.new_empty(q.shape, dtype=wide)
    dk, dv = (x.new_zeros(x.shape, dtype=wide) for x in (k, v))
    for g, i, j in _tiles(q, k.shape[2], causal, dropout is not None):
        qi, kj, do = _wide(q[g, :, i]), _wide(k[g, :, j]), _wide(grad[g, :, i])
        delta = (do * out[g, :, i]).sum(-1, keepdim=True)
        p = torch.exp_(_scores(qi, kj, scale, causal, i.start).sub_(lse[g, :, i, None]))
        dp = do @ _wide(v[g, :, j]).transpose(-1, -2)
        if dropout is None:
            dv[g, :, j] += p.transpose(-1, -2) @ do
        else:
            factors = dropout.factors(g, i, j, p)
            dv[g, :, j] += (p * factors).transpose(-1, -2) @ do
            dp *= factors
        ds = p.mul_(dp.sub_(delta)).mul_(scale)
        dq[g, :, i] = ds @ kj
        dk[g, :, j] += ds.transpose(-1, -2) @ qi
    return dq, dk, dv


MATH = Engine(name="math", forward=forward, backward=backward, dropout=True, empty=True)
