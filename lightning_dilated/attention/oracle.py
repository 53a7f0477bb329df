"""The oracle: dilated attention by its definition, O(N^2) in float64. Every other path is tested against it.

    out[p,h] = sum_j c(p,j,h) exp(s_pj) v_j / sum_j c(p,j,h) exp(s_pj),   s = scale q.k,   0 for rows without a key

Shape letters: B batch, N tokens, H query heads, D head dim.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import counts, pads


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: DilatedPattern,
    *,
    causal: bool = False,
    scale: float | None = None,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out (B, N, H, D) and lse (B, H, N), float64 and differentiable; lse is -inf for rows without a key."""
    batch, seq_len, num_heads, head_dim = q.shape
    kv_heads = k.shape[2]
    scale = head_dim**-0.5 if scale is None else scale
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(num_heads // kv_heads, dim=2) for x in (k, v))

    documents = [0, seq_len] if cu_seqlens is None else cu_seqlens.tolist()
    c = torch.zeros(batch, num_heads, seq_len, seq_len, dtype=torch.float64)
    n_pad = torch.zeros(batch, num_heads, seq_len, dtype=torch.float64)
    for b in range(batch):
        for start, stop in itertools.pairwise(documents):
            stop = stop if lengths is None else int(lengths[b])
            c[b, :, start:stop, start:stop] = counts(pattern, stop - start, num_heads, causal, kv_heads).double()
            n_pad[b, :, start:stop] = pads(pattern, stop - start, num_heads, causal, kv_heads).double()
    c, n_pad = c.to(q.device), n_pad.to(q.device)

    s = torch.einsum("bphd,bjhd->bhpj", q, k) * scale
    s = s.masked_fill(c == 0, -torch.inf)
    top = s.detach().amax(-1) if seq_len else n_pad.clone()
    top = torch.where(n_pad > 0, top.clamp(min=0), top)  # a pad's score is 0
    top = torch.where(torch.isinf(top), 0.0, top)
    e = c * torch.exp(s - top[..., None])
    z = e.sum(-1) + n_pad * torch.exp(-top)
    out = torch.einsum("bhpj,bjhd->bphd", e / torch.where(z > 0, z, 1.0)[..., None], v)
    return out, torch.where(z > 0, torch.log(torch.where(z > 0, z, 1.0)) + top, -torch.inf)
