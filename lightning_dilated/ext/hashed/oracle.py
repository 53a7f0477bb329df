"""Hashed attention and its losses as defined here, in float64 and O(N^2). Tests compare `lookup.py` with this oracle.

    m_pj = prod_g max(sum_m softmax(z_q)_pgm softmax(z_k)_jgm, 1e-30),   s_pj = scale q_p.k_j + log m_pj
    out_p = sum_j w_pj v_j,   w_pj = exp(s_pj) / (exp(null) + sum_i exp(s_pi)),   i and j in S_p

S_p are the rows that query p reads: for each code that p looks up, the last L rows j <= p of its document with that
code. `HashedLosses` defines the losses. Shape letters: B batch, N tokens, H query heads, K kv heads, D head dim, G
groups of M codes, L latest rows, P codes that a query looks up.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from lightning_dilated.ext.hashed.functional import HashedLosses


def looked_up(z: list[list[float]], probes: int) -> list[tuple[int, ...]]:
    """Return the P codes that logits (G, M) look up. The first has the index of the largest logit in each group.

    Each further code has the index of the second largest logit in one group: one of the P - 1 groups in which this
    logit is closest to the largest. If logits or groups are equal, the lower index counts.
    """
    ranked = [sorted(range(len(row)), key=lambda m, row=row: (-row[m], m)) for row in z]
    own = tuple(order[0] for order in ranked)
    if probes == 1:
        return [own]
    margins = [(row[order[0]] - row[order[1]], g) for g, (row, order) in enumerate(zip(z, ranked, strict=True))]
    return [own, *((*own[:g], ranked[g][1], *own[g + 1 :]) for _, g in sorted(margins)[: probes - 1])]


def oracle(
    *tensors: Tensor,
    latest=64,
    probes=1,
    scale=None,
    lengths=None,
    cu_seqlens=None,
    labelled=None,
    soft=False,
    code_scores=True,
) -> tuple[Tensor, HashedLosses]:
    """Return out (B, N, H, D) and the losses, differentiable and in float64. For arguments see `hashed_attention`."""
    q, k, v, z_q, z_k, null = (x.double().cpu() for x in tensors)
    (batch, seq_len, heads, dim), kv_heads = q.shape, k.shape[2]
    counts = [seq_len] * batch if lengths is None else lengths
    documents = [(b, 0, n) for b, n in enumerate(counts)]
    if cu_seqlens is not None:
        documents = [(0, start, stop) for start, stop in itertools.pairwise(cu_seqlens)]

    reads = torch.zeros(batch, kv_heads, seq_len, seq_len, dtype=torch.bool)
    for b, start, stop in documents:
        for kv, p in itertools.product(range(kv_heads), range(start, stop)):
            code = [looked_up(z, 1)[0] for z in z_k[b, start : p + 1, kv].tolist()]
            for each in looked_up(z_q[b, p, kv].tolist(), 1 if soft else probes):
                rows = [start + i for i, other in enumerate(code) if soft or other == each]
                reads[b, kv, p, rows if soft else rows[-latest:]] = True

    chance_q, chance_k = z_q.softmax(-1), z_k.softmax(-1)
    match = torch.einsum("bpkgm,bjkgm->bkgpj", chance_q, chance_k).clamp_min(1e-30).log().sum(2)
    reads_of_heads, match = (x.repeat_interleave(heads // kv_heads, 1) for x in (reads, match))
    k, v = (x.repeat_interleave(heads // kv_heads, 2) for x in (k, v))
    scores = torch.einsum("bphd,bjhd->bhpj", q, k) * (dim**-0.5 if scale is None else scale)
    scores = (scores + match if code_scores else scores).masked_fill(~reads_of_heads, -torch.inf)
    null_key = null[:, None, None].expand(batch, heads, seq_len, 1)
    weights = torch.cat([scores, null_key], -1).softmax(-1)[..., :-1]
    out = torch.einsum("bhpj,bjhd->bphd", weights, v)

    constant = weights.detach()
    others = reads_of_heads | ~reads_of_heads.any(-1, keepdim=True)  # all if a query reads none: their weights are 0
    total = match.masked_fill(~others, -torch.inf).logsumexp(-1, keepdim=True)
    real = torch.zeros(batch, seq_len, dtype=torch.bool)
    for b, start, stop in documents:
        real[b, start:stop] = True
    counted = real if labelled is None else real & labelled.cpu()
    means = [
        (x * tokens[:, :, None, None, None]).sum(1) / tokens.sum(1).clamp_min(1)[:, None, None, None]
        for x, tokens in ((chance_k, real), (chance_q, counted))
    ]
    return out, HashedLosses(
        -(constant * match).sum(-1).transpose(1, 2) * counted[..., None],
        (constant * (total - match)).sum(-1).transpose(1, 2) * counted[..., None],
        *((c * (c * c.shape[-1]).clamp_min(1e-30).log()).sum((-2, -1)) for c in means),
        reads.sum(-1).transpose(1, 2),
    )
