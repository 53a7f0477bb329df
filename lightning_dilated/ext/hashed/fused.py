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
from lightning_dilated.sequence.group import SequenceGroup


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
        earlier_keys: (S,), the keys of rows of earlier tokens; None: a call without earlier rows.
        tensors: q, k, v, z_q, z_k and null, and with `earlier_keys` also k, v and the chances of the earlier rows.
    """

    @staticmethod
    def forward(
        ctx: Any, numbers: Numbers, place: ranks.Place | None, earlier_keys: Tensor | None, documents: Tensor,
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
            of_rows = [torch.cat([old.to(new.dtype), new]) for old, new in zip(before, of_rows, strict=True)]
        inputs, earlier = Inputs(queries, *of_rows[:2], coded.chance_q, of_rows[2]), len(of_rows[0]) - sizes.rows
        if place is None:
            shared, (call, results) = None, _on_one_rank(numbers, sizes.heads, coded.keys, earlier_keys, inputs)
        else:
            entries = sort(coded.keys.view(*z_q.shape[:3], 1 + probes), numbers.real, earlier_keys)
            routes, call, results = _on_ranks(numbers, place, entries, inputs)
            shared = place.group, place.number, routes
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
        ctx.numbers, ctx.sizes, ctx.shared, ctx.earlier = numbers, sizes, shared, earlier
        ctx.like = q.shape, k.shape, (tensors[3].dtype, tensors[4].dtype), bool(before)
        ctx.set_materialize_grads(False)
        chances = coded.chance_q, inputs.chance_k[earlier:]
        ctx.save_for_backward(*call.inputs, *call.read[:4], out, lse, chance, null, documents, is_counted, *chances)
        ctx.mark_non_differentiable(counts)
        return out, agree, contrast, coded.sums, counts, chances[1].view(z_k.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        numbers, sizes, shared, earlier = ctx.numbers, ctx.sizes, ctx.shared, ctx.earlier
        saved, rows, probes = ctx.saved_tensors, sizes.rows, numbers.probes
        out, lse, chance, null, documents, counted, *chances = saved[9:]
        options = probes if shared is None else 1, numbers.scale, numbers.code_scores, FLOOR
        call = kernels.Call(Inputs(*saved[:5]), kernels.Lists(*saved[5:9], numbers.reach), *options)
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
        if shared is None:
            padded = numbers.real < documents.numel()
            parts, dk, dv, d_chance_q, d_chance_k = kernels.backward(call, queries, probes, padded)
        else:
            parts, dk, dv, d_chance_q, d_chance_k = _gradients_on_ranks(
                *shared, call, queries, earlier + rows, rows * probes
            )
        of_earlier = [x[:earlier] for x in (dk, dv, d_chance_k)]
        dk, dv, d_chance_k = (x[earlier:] for x in (dk, dv, d_chance_k))
        if grads[5] is not None:
            d_chance_k += grads[5].reshape(d_chance_k.shape)
        q_shape, k_shape, of_logits, with_earlier = ctx.like
        is_sum = probes == 1 and shared is None
        dq = parts.view(q_shape) if is_sum else new(*q_shape, dtype=out.dtype)
        if rows and not is_sum:
            with triton_kernels.on(out.device):
                _grid(of_tokens._add_lookups, rows * group)(
                    dq, parts, documents, rows * group, GROUP=group, PROBES=probes, **widths
                )
        masks = counted, (documents >= 0).view(torch.uint8)
        each = zip(of_logits, (d_chance_q, d_chance_k), chances, d_sums.unbind()[::-1], masks, strict=True)
        d_z = [_gradient_of_logits(sizes, documents, *x) for x in each]
        d_null = d_null.view(-1, sizes.heads * group).sum(0).view(null.shape).to(null.dtype)
        results = dq, dk.view(k_shape), dv.view(k_shape), *d_z, d_null
        return None, None, None, None, None, *results, *(of_earlier if with_earlier else ())


def _gradient_of_logits(
    sizes: of_tokens.Logits,
    documents: Tensor,
    dtype: torch.dtype,
    d_chances: Tensor,
    chances: Tensor,
    d_sum: Tensor,
    counts: Tensor,
) -> Tensor:
    """Return the gradient (B, N, K, G, M) of logits from gradients of chances (parts R, G, M) and of their sums."""
    d_z = torch.empty(sizes, dtype=dtype, device=chances.device)
    if sizes.rows:
        with triton_kernels.on(chances.device):
            _grid(of_tokens._of_logits, sizes.rows)(
                d_z, d_chances, chances, d_sum, documents, counts, sizes.rows, sizes.tokens,
                PARTS=len(d_chances) // sizes.rows, TOKENS=of_tokens.TOKENS, **sizes.options(),
            )  # fmt: skip
    return d_z


def _on_one_rank(
    numbers: Numbers, heads: int, keys: Tensor, earlier_keys: Tensor | None, inputs: Inputs
) -> tuple[kernels.Call, list[Tensor]]:
    """Compute all lookups; return the call, and the lookups' results with the numbers of rows that they read."""
    probes, earlier = numbers.probes, 0 if earlier_keys is None else len(earlier_keys)
    every = keys if earlier_keys is None else torch.cat([earlier_keys, keys])
    size = numbers.real * heads * (1 + probes) + earlier if numbers.real else 0
    entries = (x[:size] for x in every.sort(stable=True))  # padding is last
    read, reads = of_tokens.listed(*entries, probes, min(earlier, size), True, numbers.reach, len(inputs.q) * probes)
    call, results = _look_up(numbers, inputs, read, probes)
    return call, [*results, reads]


def _look_up(numbers: Numbers, inputs: Inputs, read: kernels.Lists, probes: int) -> tuple[kernels.Call, list[Tensor]]:
    """Compute lookups; return the call, and out (Q, g, D), lse and match (Q, g), and chance (Q,)."""
    call = kernels.Call(inputs, read, probes, numbers.scale, numbers.code_scores, FLOOR)
    lookups, (group, dim) = len(inputs.q) * probes, inputs.q.shape[1:]
    shapes = (lookups, group, dim), (lookups, group), (lookups, group), (lookups,)
    results = [torch.empty(x, dtype=torch.float32, device=inputs.q.device) for x in shapes]
    kernels.forward(call, results)
    return call, results


def _on_ranks(
    numbers: Numbers, place: ranks.Place, entries: Entries, inputs: Inputs
) -> tuple[ranks.Routes, kernels.Call, list[Tensor]]:
    """Compute the lookups of this rank's part; return its routes and call, and as `_on_one_rank` its own results."""
    routes, ids = ranks.find_routes(place, entries, numbers.reach)
    traffic, there = place.group.forward_traffic, routes.there()
    *received, rows, lookups = ranks.move(place.group, traffic, "hashed rows", there, (*inputs, *ids))
    keys, positions = torch.cat([rows, lookups]).unbind(1)
    order = ranks.lexical(keys, positions)  # stable: a row comes before its token's lookups
    read, reads = of_tokens.listed(keys[order], order, 1, len(rows), False, numbers.reach, len(lookups))
    call, results = _look_up(numbers, Inputs(*received), read, 1)
    home = [routes.lookups.back()] * 5
    results = [x if x.ndim > 1 else x[:, None] for x in (*results, reads)]
    results = ranks.move(place.group, traffic, "results of lookups", home, results)
    return routes, call, [_placed(x, routes.results, entries.number) for x in results]


def _gradients_on_ranks(
    group: SequenceGroup, number: int, routes: ranks.Routes, call: kernels.Call, queries: kernels.Numbers, rows: int,
    lookups: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return what `kernels.backward` returns, for this rank's rows and lookups. Gradients of chance_q have no heads.

    Args:
        number: number of the call in its group.
        queries: the numbers of this rank's queries.
        rows, lookups: numbers of this rank's rows and lookups.
    """
    ranks.agree_backward(group, number)
    (received, heads, dim), own, traffic = call.inputs.q.shape, len(queries.chance), group.backward_traffic
    lse, chances = queries.lse.view(own, heads), torch.stack([queries.chance, queries.d_chance], 1)
    tensors = queries.d_out.view(own, heads, dim), torch.cat([queries.delta, lse, queries.d_match, chances], 1)
    d_out, of_queries = ranks.move(group, traffic, "gradients of results", [routes.lookups] * 2, tensors)
    delta, lse, d_match, chance, d_chance = (x.contiguous() for x in of_queries.split((heads, heads, heads, 1, 1), 1))
    of_lookups = kernels.Numbers(delta, lse, chance, d_match, d_chance, d_out)
    dq, dk, dv, d_chance_q, d_chance_k = kernels.backward(call, of_lookups, 1, False)
    dq, d_chance_q = dq.view(received, heads, dim), d_chance_q.view(received, heads, *d_chance_q.shape[1:]).sum(1)
    home = [routes.lookups.back()] * 2 + [routes.rows.back()] * 3
    grads = ranks.move(group, traffic, "gradients of hashed rows", home, [dq, d_chance_q, dk, dv, d_chance_k])
    dq, d_chance_q = (_placed(x, routes.results, lookups) for x in grads[:2])
    dk, dv, d_chance_k = (ranks.add_up(x, routes.rows.index, rows).to(x.dtype) for x in grads[2:])
    return dq, dk, dv, d_chance_q, d_chance_k


def _placed(x: Tensor, index: Tensor, number: int) -> Tensor:
    """Return `number` rows: x at `index`. All other rows belong to padding and are not initialized."""
    return x.new_empty(number, *x.shape[1:]).index_copy_(0, index, x)


def _grid(kernel: Any, size: int) -> Any:
    """Return the kernel's launcher with a program for each tile of `size` rows."""
    return kernel[(-(-size // of_tokens.TOKENS),)]
