"""Define the kinds of recurrent attention token by token. Tests compare all other implementations with this reference.

Shape letters: B batch, N tokens, H query heads, K kv heads, D head dim, E value dim, m tokens of a memory segment.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def positive(x: Tensor) -> Tensor:
    """Return elu(x) + 1, the features of kinds linear and delta, computed as exp(x) below 0 to lose no digits."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def unit(x: Tensor) -> Tensor:
    """Scale rows of x to a length just below 1; a zero row stays 0."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return numerator / denominator. If the denominator is 0, the result and its gradient are 0."""
    empty = denominator == 0
    return torch.where(empty, 0, numerator / torch.where(empty, 1, denominator))


class Oracle(NamedTuple):
    """Results for one document: out (N, H, E), the state's matrix (K, D, E) and normalizer (K, D), and the number of
    tokens in the open segment."""

    out: Tensor
    matrix: Tensor
    normalizer: Tensor
    open: int


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    kind: str,
    segment: int = 1,
    causal: bool = True,
    matrix: Tensor | None = None,
    normalizer: Tensor | None = None,
) -> Oracle:
    """Compute one document by the definition, token by token or segment by segment.

    Args:
        q: (N, H, D). k: (N, K, D). v: (N, K, E). log_decay, beta: (N, K), for gated_delta.
        matrix, normalizer: the state before the first token, at the start of a segment; None: zeros.
    """
    matrix = q.new_zeros(k.shape[1], k.shape[2], v.shape[2]) if matrix is None else matrix
    normalizer = q.new_zeros(k.shape[1:]) if normalizer is None else normalizer
    if kind == "gated_delta":
        return _gated_delta(q, k, v, log_decay, beta, matrix, normalizer)
    fq, fk = positive(q), positive(k)
    group = q.shape[1] // k.shape[1]
    out, opened = [], 0
    every = torch.einsum("nkd,nke->kde", fk, v), fk.sum(0)
    for start in range(0, len(q), segment):
        rows = slice(start, start + segment)
        keys, values, z = fk[rows], v[rows], fk[rows].sum(0)
        added = torch.einsum("nkd,nke->kde", keys, values)
        visible = (matrix, normalizer) if causal else (every[0] - added, every[1] - z)
        read, norm = (x.repeat_interleave(group, 0) for x in visible)
        shares = torch.einsum("nhd,hd->nh", fq[rows], norm)
        single = not causal and len(q) <= segment  # a single segment has no other segment to read
        rows_out = ratio(torch.einsum("nhd,hde->nhe", fq[rows], read), shares[..., None])
        out.append(torch.zeros_like(rows_out) if single else rows_out)
        opened = len(keys) % segment
        if opened:  # the state does not include the last segment while it is open
            break
        if kind == "delta":
            past, current = (torch.einsum("nkd,kd->nk", keys, x) for x in (normalizer, z))
            stored = torch.einsum("nkd,kde->nke", keys, matrix)
            added = added - torch.einsum("nkd,nke->kde", keys, ratio(stored, torch.maximum(past, current)[..., None]))
        matrix, normalizer = matrix + added, normalizer + z
    return Oracle(torch.cat([v.new_zeros(0, q.shape[1], v.shape[2]), *out]), matrix, normalizer, opened)


def _gated_delta(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, matrix: Tensor, normalizer: Tensor
) -> Oracle:
    q, k, group = unit(q), unit(k), q.shape[1] // k.shape[1]
    out = [v.new_zeros(0, q.shape[1], v.shape[2])]
    for t in range(len(q)):
        matrix = log_decay[t].exp()[:, None, None] * matrix
        change = beta[t][:, None] * (v[t] - torch.einsum("kd,kde->ke", k[t], matrix))
        matrix = matrix + k[t][:, :, None] * change[:, None, :]
        out.append(torch.einsum("hd,hde->he", q[t], matrix.repeat_interleave(group, 0))[None])
    return Oracle(torch.cat(out), matrix, normalizer, 0)
