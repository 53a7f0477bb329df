"""Hashed attention as one autograd function of Triton kernels. On one rank, the host does not wait.

The softmax over the rows of all lookups and the null key has one log of a sum for each query and head. So the gradients
of a lookup need no results of the lookup alone, and the backward reads the gradient of the output as it is.

If ranks share a call, `ranks.py` says which rank computes a lookup. The query travels there, and the results return. In
the backward, the gradients of the results travel there, and the gradients of the query return.

Shape letters: B batch, N tokens, H query heads, K kv heads, R = B N K rows, S rows of earlier tokens, g query heads for
each kv head, D head dim, G groups of M codes, P lookups for each query, Q lookups.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_dilated import kernels as triton_kernels
from lightning_dilated.ext.hashed import kernels, ranks
from lightning_dilated.ext.hashed import token_kernels as of_tokens
from lightning_dilated.ext.hashed.lookup import FLOOR, Inputs
from lightning_dilated.ext.hashed.order import Entries, sort
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

    Further results are the numbers of rows (B, N, K) that queries read, and the chances (B, N, K, G, M) of keys.

    Args:
        place: this rank's part of the call; None: one rank.
        earlier: (S,), the keys of rows of earlier tokens; None if there are none.
        tensors: q, k, v, z_q, z_k and null, and with `earlier` also k, v and the chances of the earlier rows.
    """

    @staticmethod
    def forward(
        ctx: Any, numbers: Numbers, place: ranks.Place | None, earlier: Tensor | None, documents: Tensor,
        counted: Tensor, *tensors: Tensor,
    ) -> Any:  # fmt: skip
        (q, k, v, z_q, z_k, null), before = tensors[:6], tensors[6:]
        z_q, z_k, null = z_q.contiguous(), z_k.contiguous(), null.contiguous()
        sizes, probes = of_tokens.Logits(*z_q.shape), numbers.probes
        coded = of_tokens.code(z_q, z_k, documents, counted, probes, numbers.soft, numbers.limit, numbers.largest)
        rows = [x.flatten(0, 2) for x in (q.unflatten(2, (sizes.heads, -1)), k, v)]
        queries, *of_rows = (x if x.stride(-1) == 1 else x.contiguous() for x in rows)
        of_rows.append(coded.chance_k)
        if before:
            of_rows = [torch.cat(x) for x in zip(before, of_rows, strict=True)]
        inputs, many = Inputs(queries, *of_rows[:2], coded.chance_q, of_rows[2]), len(of_rows[0]) - sizes.rows
        if place is None:
            routes, (call, results) = None, _on_one_rank(numbers, sizes.heads, coded.keys, earlier, inputs)
        else:
            keys = coded.keys.view(*z_q.shape[:3], 1 + probes)
            routes, call, results = _on_ranks(numbers, place, sort(keys, numbers.real, earlier), inputs)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        new = lambda *shape: torch.empty(shape, dtype=torch.float32, device=q.device)  # noqa: E731
        agree, contrast, lse = (new(*q.shape[:3]) for _ in range(3))
        chance, counts = new(sizes.rows), torch.empty(z_q.shape[:3], dtype=torch.int64, device=q.device)
        (group, dim), is_counted = queries.shape[1:], counted.view(torch.uint8)
        if size := sizes.rows * group:
            with triton_kernels.on(q.device):
                _grid(of_tokens._merge, size)(
                    out, agree, contrast, lse, chance, counts, *results, null, documents, is_counted, size,
                    HEADS=sizes.heads, GROUP=group, PROBES=probes, DIM=dim, BLOCK=block_dim(dim), TOKENS=of_tokens.TOKENS,
                )  # fmt: skip
        ctx.numbers, ctx.sizes, ctx.place, ctx.routes, ctx.earlier = numbers, sizes, place, routes, many
        ctx.like = q.shape, k.shape, z_q.dtype, bool(before)
        ctx.set_materialize_grads(False)
        chances = coded.chance_q, inputs.chance_k[many:]
        ctx.save_for_backward(*call.inputs, *call.read[:4], out, lse, chance, null, documents, is_counted, *chances)
        ctx.mark_non_differentiable(counts)
        return out, agree, contrast, coded.sums, counts, chances[1].view(z_k.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        saved, numbers, sizes, rows, probes = (
            ctx.saved_tensors,
            ctx.numbers,
            ctx.sizes,
            ctx.sizes.rows,
            ctx.numbers.probes,
        )
        read = kernels.Lists(*saved[5:9], numbers.reach)
        out, lse, chance, null, documents, counted, chance_q, chance_k = saved[9:]
        call = kernels.Call(
            Inputs(*saved[:5]), read, probes if ctx.place is None else 1, numbers.scale, numbers.code_scores, FLOOR
        )
        (group, dim), tokens = call.inputs.q.shape[1:], of_tokens.TOKENS
        new = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=out.device)  # noqa: E731
        likes = out, lse, lse, new(2, sizes.batch, sizes.heads * sizes.groups * sizes.codes)
        d_out, d_agree, d_contrast, d_sums = (
            torch.zeros_like(like) if x is None else x.contiguous() for x, like in zip(grads[:4], likes, strict=True)
        )
        queries = kernels.Numbers(new(rows, group), lse, chance, new(rows, group), new(rows), d_out)
        d_null = new(rows, group)
        widths = {"DIM": dim, "BLOCK": block_dim(dim), "TOKENS": tokens, "HEADS": sizes.heads}
        if rows:
            with triton_kernels.on(out.device):
                _grid(of_tokens._split_gradients, rows)(
                    queries.delta, queries.d_match, queries.d_chance, d_null, d_out, d_agree, d_contrast, out, lse, null,
                    documents, counted, rows, GROUP=group, **widths,
                )  # fmt: skip
        if ctx.place is None:
            padded = numbers.real < documents.numel()
            parts, dk, dv, d_chance_q, d_chance_k = kernels.backward(call, queries, probes, padded)
        else:
            parts, dk, dv, d_chance_q, d_chance_k = _gradients_on_ranks(
                ctx.place, ctx.routes, call, queries, ctx.earlier + rows, rows * probes
            )
        earlier = [x[: ctx.earlier] for x in (dk, dv, d_chance_k)]
        dk, dv, d_chance_k = (x[ctx.earlier :] for x in (dk, dv, d_chance_k))
        if grads[5] is not None:
            d_chance_k += grads[5].view_as(d_chance_k)
        q_shape, k_shape, of_logits, with_earlier = ctx.like
        is_sum = probes == 1 and ctx.place is None
        dq = parts.view(q_shape) if is_sum else new(*q_shape, dtype=out.dtype)
        d_z = [new(*sizes, dtype=of_logits) for _ in range(2)]
        if rows:
            pairs = (
                (d_z[1], d_chance_k, chance_k, d_sums[0], (documents >= 0).view(torch.uint8)),
                (d_z[0], d_chance_q, chance_q, d_sums[1], counted),
            )
            with triton_kernels.on(out.device):
                if not is_sum:
                    _grid(of_tokens._add_lookups, rows * group)(
                        dq, parts, documents, rows * group, GROUP=group, PROBES=probes, **widths
                    )
                for d, d_chances, chances, d_sum, counts in pairs:
                    _grid(of_tokens._of_logits, rows)(
                        d, d_chances, chances, d_sum, documents, counts, rows, sizes.tokens,
                        PARTS=len(d_chances) // rows, TOKENS=tokens, **sizes.options(),
                    )  # fmt: skip
        d_null = d_null.view(-1, sizes.heads * group).sum(0).view(null.shape).to(null.dtype)
        results = dq, dk.view(k_shape), dv.view(k_shape), *d_z, d_null
        return None, None, None, None, None, *results, *(earlier if with_earlier else ())


def _on_one_rank(
    numbers: Numbers, heads: int, keys: Tensor, earlier: Tensor | None, inputs: Inputs
) -> tuple[kernels.Call, list[Tensor]]:
    """Compute all lookups; return the call, and the lookups' results with the numbers of rows that they read."""
    probes, many = numbers.probes, 0 if earlier is None else len(earlier)
    every = keys if earlier is None else torch.cat([earlier, keys])
    size = numbers.real * heads * (1 + probes) + many if numbers.real else 0
    entries = (x[:size] for x in every.sort(stable=True))  # padding is last
    read, reads = of_tokens.listed(*entries, probes, min(many, size), True, numbers.reach, len(inputs.q) * probes)
    call, results = _look_up(numbers, inputs, read, probes)
    return call, [*results, reads]


def _look_up(numbers: Numbers, inputs: Inputs, read: kernels.Lists, probes: int) -> tuple[kernels.Call, list[Tensor]]:
    """Compute lookups; return the call, and out (Q, g, D), lse and match (Q, g), and chance (Q,)."""
    call = kernels.Call(inputs, read, probes, numbers.scale, numbers.code_scores, FLOOR)
    many, (group, dim) = len(inputs.q) * probes, inputs.q.shape[1:]
    shapes = (many, group, dim), (many, group), (many, group), (many,)
    results = [torch.empty(x, dtype=torch.float32, device=inputs.q.device) for x in shapes]
    kernels.forward(call, results)
    return call, results


def _on_ranks(
    numbers: Numbers, place: ranks.Place, entries: Entries, inputs: Inputs
) -> tuple[ranks.Routes, kernels.Call, list[Tensor]]:
    """Compute the lookups of this rank's part; return its routes and call, and as `_on_one_rank` its own results."""
    routes, traffic = ranks.find_routes(place, entries, numbers.reach), place.group.forward_traffic
    tensors = *inputs, routes.row_ids, routes.lookup_ids
    *received, rows, lookups = ranks.move(place.group, traffic, "hashed rows", routes.there(), tensors)
    keys, positions = torch.cat([rows, lookups]).unbind(1)
    order = ranks.lexical(keys, positions)  # stable: a row comes before its token's lookups
    read, reads = of_tokens.listed(keys[order], order, 1, len(rows), False, numbers.reach, len(lookups))
    call, results = _look_up(numbers, Inputs(*received), read, 1)
    home = [routes.lookups.back()] * 5
    results = [x if x.ndim > 1 else x[:, None] for x in (*results, reads)]
    results = ranks.move(place.group, traffic, "results of lookups", home, results)
    return routes, call, [_placed(x, routes.results, entries.number) for x in results]


def _gradients_on_ranks(
    place: ranks.Place, routes: ranks.Routes, call: kernels.Call, queries: kernels.Numbers, rows: int, lookups: int
) -> tuple[Tensor, ...]:
    """Return what `kernels.backward` returns, for this rank's rows and lookups. Gradients of chance_q have no heads.

    Args:
        queries: the numbers of this rank's queries.
        rows, lookups: numbers of this rank's rows and lookups.
    """
    ranks.agree_backward(place)
    (many, group, dim), own, traffic = call.inputs.q.shape, len(queries.chance), place.group.backward_traffic
    lse, chances = queries.lse.view(own, group), torch.stack([queries.chance, queries.d_chance], 1)
    tensors = queries.d_out.view(own, group, dim), torch.cat([queries.delta, lse, queries.d_match, chances], 1)
    there = [routes.lookups] * 2
    d_out, of_queries = ranks.move(place.group, traffic, "gradients of results", there, tensors)
    delta, lse, d_match, chance, d_chance = (x.contiguous() for x in of_queries.split((group, group, group, 1, 1), 1))
    received = kernels.Numbers(delta, lse, chance, d_match, d_chance, d_out)
    dq, dk, dv, d_chance_q, d_chance_k = kernels.backward(call, received, 1, False)
    dq, d_chance_q = dq.view(many, group, dim), d_chance_q.view(many, group, *d_chance_q.shape[1:]).sum(1)
    home = [routes.lookups.back()] * 2 + [routes.rows.back()] * 3
    grads = ranks.move(place.group, traffic, "gradients of hashed rows", home, [dq, d_chance_q, dk, dv, d_chance_k])
    dq, d_chance_q = (_placed(x, routes.results, lookups) for x in grads[:2])
    dk, dv, d_chance_k = (ranks.add_up(x, routes.rows.index, rows).to(x.dtype) for x in grads[2:])
    return dq, dk, dv, d_chance_q, d_chance_k


def _placed(x: Tensor, index: Tensor, number: int) -> Tensor:
    """Return `number` rows, of which those at `index` are x; the other rows, of padding, are not initialized."""
    return x.new_empty(number, *x.shape[1:]).index_copy_(0, index, x)


def _grid(kernel: Any, size: int) -> Any:
    """Return the kernel's launcher with a program for each tile of `size` rows."""
    return kernel[(-(-size // of_tokens.TOKENS),)]
