"""The math engine: plain torch for any device and floating dtype, with exact dropout, in bounded memory.

Shape letters: G samples and segments, J heads, n query rows, m key rows (m = n if causal), D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_dilated.attention.backends.base import Band, Engine, Terms

#: maximum number of scores in memory at once (16 MiB in fp32); a single row of scores may exceed it
SCORE_BUDGET = 1 << 22
#: ratio of the memory of a dropout mask's integers to the memory of the scores
DROPOUT_ROOM = 8


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _tiles(q: Tensor, keys: int, band: Band | None, dropout: bool = False) -> Iterator[tuple[slice, slice, slice]]:
    """Yield (groups, rows, keys) of tiles of scores within the budget; with a band, omit keys that no row sees."""
    groups, heads, rows, _ = q.shape
    budget = (SCORE_BUDGET // DROPOUT_ROOM if dropout else SCORE_BUDGET) // max(1, heads)
    band = band or Band(-rows, keys)
    span = band.upper - band.lower
    # a tile of s rows has s * min(keys, s + span) scores; with more than `span` rows most of them would be masked
    most = max(budget // max(1, keys), (math.isqrt(span * span + 4 * budget) - span) // 2)
    row_step = max(1, min(rows, most, max(64, span)))
    group_step = max(1, budget // max(1, min(keys, row_step + span) * row_step))
    for g in range(0, groups, group_step):
        for i in range(0, rows, row_step):
            stop = min(i + row_step, rows)
            low, high = max(0, i + band.lower), min(keys, stop + band.upper)
            yield slice(g, min(g + group_step, groups)), slice(i, stop), slice(low, max(low, high))


def _scores(q: Tensor, k: Tensor, scale: float, band: Band | None, i: slice, j: slice) -> Tensor:
    """Return the scores of query rows i and key rows j, -inf outside the band."""
    s = (q * scale) @ k.transpose(-1, -2)
    if band is not None:
        distance = (
            torch.arange(j.start, j.stop, device=q.device) - torch.arange(i.start, i.stop, device=q.device)[:, None]
        )
        s.masked_fill_((distance < band.lower) | (distance > band.upper), -torch.inf)
    return s


def _band(q: Tensor, terms: Terms) -> Band | None:
    return Band(-q.shape[2], 0) if terms.band is None and terms.causal else terms.band


def forward(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """Compute a block's out and lse, see `Engine`."""
    scale, dropout, band = terms.scale, terms.dropout, _band(q, terms)
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(q.shape, dtype=wide)
    lse = q.new_empty(q.shape[:-1], dtype=wide)
    for g, i, j in _tiles(q, k.shape[2], band, dropout is not None):
        s = _scores(_wide(q[g, :, i]), _wide(k[g, :, j]), scale, band, i, j)
        lse[g, :, i] = torch.logsumexp(s, -1)
        p = torch.exp_(s.sub_(lse[g, :, i, None]))
        if dropout is not None:
            p *= dropout.factors(g, i, j, p)
        out[g, :, i] = p @ _wide(v[g, :, j])
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, terms: Terms
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a block's dq, dk and dv with the backward of flash attention (arXiv 2205.14135, algorithm 4)."""
    scale, dropout, band = terms.scale, terms.dropout, _band(q, terms)
    wide = torch.promote_types(q.dtype, torch.float32)
    dq = q.new_empty(q.shape, dtype=wide)
    dk, dv = (x.new_zeros(x.shape, dtype=wide) for x in (k, v))
    for g, i, j in _tiles(q, k.shape[2], band, dropout is not None):
        qi, kj, do = _wide(q[g, :, i]), _wide(k[g, :, j]), _wide(grad[g, :, i])
        delta = (do * out[g, :, i]).sum(-1, keepdim=True)
        p = torch.exp_(_scores(qi, kj, scale, band, i, j).sub_(lse[g, :, i, None]))
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


MATH = Engine(name="math", forward=forward, backward=backward, dropout=True, bands=True, empty=True)
