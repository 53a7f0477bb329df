"""Hashed attention of one rank as one autograd function of Triton kernels, without a wait of the host.

The softmax over the rows of all lookups and the null key has one log of a sum for each query and head. So the gradients
of a lookup need no results of the lookup alone, and the backward reads the gradient of the output as it is.

Shape letters: B batch, N tokens, H query heads, K kv heads, R = B N K rows, g query heads for each kv head, D head dim,
G groups of M codes, P lookups for each query.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_dilated import kernels as triton_kernels
from lightning_dilated.ext.hashed import kernels
from lightning_dilated.ext.hashed import token_kernels as of_tokens
from lightning_dilated.ext.hashed.lookup import FLOOR, Inputs
from lightning_dilated.kernels.tiles import block_dim


class Numbers(NamedTuple):
    """The numbers of a call.

    Attributes:
        probes, scale, code_scores, soft: see `hashed_attention`.
        reach: largest number of rows that a lookup reads.
        real: number of tokens without padding.
        limit, largest: see `order.keys`.
    """

    probes: int
    scale: float
    code_scores: bool
    soft: bool
    reach: int
    real: int
    limit: int
    largest: int


class Attend(torch.autograd.Function):
    """Compute out (B, N, H, D), agree and contrast (B, N, H), and the sums of chances (2, B, K G M).

    Further results without gradients are the numbers of rows (B, N, K) that queries read, and the chances of keys.
    """

    @staticmethod
    def forward(ctx: Any, numbers: Numbers, documents: Tensor, counted: Tensor, *tensors: Tensor) -> Any:
        q, k, v, z_q, z_k, null = tensors
        z_q, z_k, null = z_q.contiguous(), z_k.contiguous(), null.contiguous()
        sizes, probes = of_tokens.Logits(*z_q.shape), numbers.probes
        coded = of_tokens.code(z_q, z_k, documents, counted, probes, numbers.soft, numbers.limit, numbers.largest)
        read, reads = of_tokens.listed(coded.keys, probes, numbers.real * sizes.heads * (1 + probes), numbers.reach)
        rows = [x.flatten(0, 2) for x in (q.unflatten(2, (sizes.heads, -1)), k, v)]
        rows = [x if x.stride(-1) == 1 else x.contiguous() for x in rows]
        call = kernels.Call(Inputs(*rows, *coded[:2]), read, probes, numbers.scale, numbers.code_scores, FLOOR)
        group, dim = rows[0].shape[1:]
        new = lambda *shape: torch.empty(shape, dtype=torch.float32, device=q.device)  # noqa: E731
        lookups = sizes.rows * probes
        results = new(lookups, group, dim), new(lookups, group), new(lookups, group), new(lookups)
        kernels.forward(call, results)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        agree, contrast, lse = (new(*q.shape[:3]) for _ in range(3))
        chance, counts = new(sizes.rows), torch.empty(z_q.shape[:3], dtype=torch.int64, device=q.device)
        is_counted = counted.view(torch.uint8)
        if size := sizes.rows * group:
            with triton_kernels.on(q.device):
                _grid(of_tokens._merge, size)(
                    out, agree, contrast, lse, chance, counts, *results, reads, null, documents, is_counted, size,
                    HEADS=sizes.heads, GROUP=group, PROBES=probes, DIM=dim, BLOCK=block_dim(dim), TOKENS=of_tokens.TOKENS,
                )  # fmt: skip
        ctx.numbers, ctx.sizes = numbers, sizes
        ctx.like = q.shape, k.shape, z_q.dtype
        ctx.save_for_backward(*call.inputs, *read[:4], out, lse, chance, null, documents, is_counted)
        chance_k = coded.chance_k.view(z_k.shape)
        ctx.mark_non_differentiable(counts, chance_k)
        return out, agree, contrast, coded.sums, counts, chance_k

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        inputs, saved, numbers, sizes = Inputs(*ctx.saved_tensors[:5]), ctx.saved_tensors, ctx.numbers, ctx.sizes
        read = kernels.Lists(*saved[5:9], numbers.reach)
        out, lse, chance, null, documents, counted = saved[9:]
        d_out, d_agree, d_contrast, d_sums = (x.contiguous() for x in grads[:4])
        (rows, group, dim), probes, tokens = inputs.q.shape, numbers.probes, of_tokens.TOKENS
        call = kernels.Call(inputs, read, probes, numbers.scale, numbers.code_scores, FLOOR)
        new = lambda *shape: torch.empty(shape, dtype=torch.float32, device=out.device)  # noqa: E731
        delta, d_match, d_null, d_chance = new(rows, group), new(rows, group), new(rows, group), new(rows)
        q_shape, k_shape, of_logits = ctx.like
        dq = torch.empty(q_shape, dtype=out.dtype, device=out.device)
        d_z = [torch.empty(sizes, dtype=of_logits, device=out.device) for _ in range(2)]
        widths = {"DIM": dim, "BLOCK": block_dim(dim), "TOKENS": tokens, "HEADS": sizes.heads}
        if not rows:
            return None, None, None, dq, *(out.new_empty(k_shape) for _ in range(2)), *d_z, torch.zeros_like(null)
        with triton_kernels.on(out.device):
            _grid(of_tokens._split_gradients, rows)(
                delta, d_match, d_chance, d_null, d_out, d_agree, d_contrast, out, lse, null, documents, counted, rows,
                GROUP=group, **widths,
            )  # fmt: skip
            of_lookups = kernels.Numbers(delta, lse, chance, d_match, d_chance, d_out)
            padded = numbers.real < documents.numel()
            parts, dk, dv, d_chance_q, d_chance_k = kernels.backward(call, of_lookups, probes, padded)
            if probes == 1:
                dq = parts.view(q_shape)
            else:
                _grid(of_tokens._add_lookups, rows * group)(
                    dq, parts, documents, rows * group, GROUP=group, PROBES=probes, **widths
                )
            pairs = (d_z[1], d_chance_k, inputs.chance_k, d_sums[0], (documents >= 0).view(torch.uint8), 1), (
                d_z[0], d_chance_q, inputs.chance_q, d_sums[1], counted, probes * group,
            )  # fmt: skip
            for d, d_chances, chances, d_sum, counts, count in pairs:
                _grid(of_tokens._of_logits, rows)(
                    d, d_chances, chances, d_sum, documents, counts, rows, sizes.tokens,
                    PARTS=count, TOKENS=tokens, **sizes.options(),
                )  # fmt: skip
        d_null = d_null.view(-1, sizes.heads * group).sum(0).view(null.shape)
        return None, None, None, dq, dk.view(k_shape), dv.view(k_shape), *d_z, d_null.to(null.dtype)


def _grid(kernel: Any, size: int) -> Any:
    """Return the kernel's launcher with a program for each tile of `size` rows."""
    return kernel[(-(-size // of_tokens.TOKENS),)]
