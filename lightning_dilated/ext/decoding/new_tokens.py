"""Compute the attention of new tokens to each other and to a cache of earlier tokens.

Shape letters: B batch, n new tokens, H query heads, K kv heads, D head dim; w segment length, r dilation rate.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_dilated.attention.backends import MATH, Request, choose
from lightning_dilated.attention.functional import autocast, dilated_attention
from lightning_dilated.attention.rotary import RotaryTable
from lightning_dilated.pattern import DilatedPattern, Global, Window
from lightning_dilated.pattern.branch import LARGEST, AnyBranch
from lightning_dilated.pattern.rows import check_padding

if TYPE_CHECKING:
    from lightning_dilated.ext.decoding.kv_cache import KVCache


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: KVCache,
    scale: float | None = None,
    engine: str = "auto",
    table: RotaryTable | None = None,
) -> Tensor:
    """Compute causal dilated attention of n new tokens that follow the tokens in `cache`, and add them to the cache.

    A single token costs O(sum over branches of w / r) for each head; a GPU runs two kernels for all branches, and a CPU
    runs matrix products. Several tokens (a prompt, or its next chunk) attend to each other in `dilated_attention`, and
    to the cache with the same engine; the two results are merged with their log-sum-exps.

    Args:
        q: (B, n, H, D), rotated to its global positions if positions are rotary.
        k, v: (B, n, K, D); k is rotated in the same way.
        cache: earlier tokens of the same sequences and layer; changed in place.
        scale, engine: as in `dilated_attention`.
        table: rotary table for q and k, if they are not rotated yet.

    Returns:
        (B, n, H, D) in q's dtype; 0 where a head has no branch that covers the position.

    Raises:
        ValueError: if shapes differ from the cache's, or a tensor requires a gradient.
    """
    q, k, v = autocast(q, k, v)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise ValueError("a cache serves inference, without gradients: call under torch.no_grad().")
    start, new = cache.length, q.shape[1]
    check_padding(cache.pattern, start + new)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if cache.kernel_serves(q):
        return cache.step(q, k, v, scale, table)
    if table is not None:
        q, k = table.rotate(q, k)
    wide = torch.promote_types(q.dtype, torch.float32)
    if new == 1 and start >= cache.clock.longest:
        cache.append(k, v)
        out, lse = torch.zeros_like(q, dtype=wide), q.new_full(q.shape[:3], -torch.inf, dtype=wide)
        cache.attend(q, out, lse, start, scale)
        return out.to(q.dtype)
    options = {"causal": True, "scale": scale, "engine": engine}
    if start == 0:
        out = dilated_attention(q, k, v, cache.pattern, **options)
    else:
        merged, lse = torch.zeros_like(q, dtype=wide), q.new_full(q.shape[:3], -torch.inf, dtype=wide)
        if (pattern := _continued(cache.pattern, start)) is not None:
            part, part_lse = dilated_attention(q, k, v, pattern, return_lse=True, **options)
            merged, lse = part.to(wide), part_lse.transpose(1, 2).contiguous()
        chosen = choose(engine, Request.of(q, scale=scale), log=False).engine
        cache.attend(q, merged, lse, start, scale, None if chosen is MATH else chosen)
        out = merged.to(q.dtype)
    cache.append(k, v)
    return out


@functools.lru_cache(maxsize=256)
def _continued(pattern: DilatedPattern, start: int) -> DilatedPattern | None:
    """Return the pattern of the tokens from position `start` on, renumbered from 0, for causal attention.

    Return None if these tokens do not read each other, because the pattern has only global tokens before `start`.
    """

    def continued(b: AnyBranch) -> AnyBranch:
        if isinstance(b, Global):
            return replace(b, tokens=b.tokens - start)
        if isinstance(b, Window):
            return b if b.offset is None else replace(b, offset=(b.offset - start) % b.dilation_rate)
        width = b.segment_length or LARGEST["segment_length"]  # a segment for the whole sequence
        return replace(b, segment_length=width, shift=(b.shift + start) % width)

    remaining = [b for b in pattern.branches if b.tokens is None or b.tokens > start]
    return replace(pattern, branches=tuple(map(continued, remaining)), padding="masked") if remaining else None
