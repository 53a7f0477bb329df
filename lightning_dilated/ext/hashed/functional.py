"""hashed_attention, the public function; it checks all arguments before any computation.

Shape letters: B batch, N tokens, H query heads, K kv heads, D head dim, G groups of M codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_dilated._device import send
from lightning_dilated._validation import flag, integer
from lightning_dilated.attention.functional import autocast, check_documents, check_rows, check_scale, group_of
from lightning_dilated.ext.hashed import ranks
from lightning_dilated.ext.hashed.lookup import FLOOR, Inputs, Lookup, Reads, merge_lookups, why_not
from lightning_dilated.ext.hashed.order import LIMITS, codes, keys, largest_key, merge, sort
from lightning_dilated.ext.hashed.rows import HashedRows
from lightning_dilated.pattern.rows import check_bounds
from lightning_dilated.sequence.collectives import sequence_sum
from lightning_dilated.sequence.group import SequenceGroup

#: number of entries in a block, for lookups by code and for soft lookups
BLOCK, SOFT_BLOCK = 64, 256
#: maximum number of tokens of a document for soft lookups
SOFT_TOKENS = 8192


@dataclass(frozen=True)
class HashedLosses:
    """The losses that train the codes of a call, and the number of rows that each query reads.

    S_p are the rows that query p reads, m_pj is the chance that the codes of query p and row j agree, and w_pj are the
    weights of the softmax over S_p and the null key. The losses take w as constant, so they train z_q and z_k only.
    They are fp32 (fp64 for float64 inputs).

    Attributes:
        agree: (B, N, H), -sum over j in S_p of w_pj log m_pj: small if rows with large weights have p's codes.
        contrast: (B, N, H), -sum over j in S_p of w_pj log(m_pj / sum over i in S_p of m_pi): small if the other
            rows of S_p have different codes.
        balance: (B, K), sum over groups and codes of c log(M c), where c is the mean of softmax(z_k) over the real tokens
            of a sample. This KL divergence from the uniform distribution is small if all codes occur.
        spread: (B, K), as `balance`, but for z_q of labelled queries.
        rows: (B, N, K) int64, the size of S_p; 0 at padding. `agree` and `contrast` are 0 at queries without a label.
    """

    agree: Tensor
    contrast: Tensor
    balance: Tensor
    spread: Tensor
    rows: Tensor


def hashed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z_q: Tensor,
    z_k: Tensor,
    null: Tensor,
    *,
    latest: int = 64,
    probes: int = 1,
    scale: float | None = None,
    lengths: Tensor | Sequence[int] | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    soft: bool = False,
    code_scores: bool = True,
    labelled: Tensor | None = None,
    sequence: SequenceGroup | None = None,
) -> tuple[Tensor, HashedLosses]:
    """Attend to earlier rows that have the query's learned code, at a cost almost linear in N.

    A code has the index of the largest logit in each group (the lowest index if logits are equal). Query p reads the
    last `latest` rows j <= p of its document in which z_k has the code that z_q has at p. With `probes`, it also reads
    the latest rows of further codes, each with the second largest logit in a group where it is closest to the largest.
    A row's score is scale q.k + log m, m = product over groups of max(sum(softmax(z_q) softmax(z_k)), 1e-30), the
    chance that the codes agree. One softmax runs over the rows and a null key of score `null` and value 0.

    The choice of rows has no gradient: the losses train the codes. Add their means, weighted, to your loss.

    Sorting finds the rows, O(N log N); scores are O(N (64 + latest)) for any codes; memory is O(N). Products are in
    fp32 (fp64 for float64), also under autocast; on GPUs, Triton kernels round their factors to 11 bits if q has 16
    bits. Repeated runs give the same bits. Gradients cannot be differentiated again. Pass q and k before rotary positions.

    Args:
        q: (B, N, H, D), any floating dtype.
        k, v: (B, N, K, D) with K dividing H; query head h reads kv head h // (H / K).
        z_q, z_k: (B, N, K, G, M) logits, any floating dtype; M ** G is at most 2**31.
        null: (H,), any floating dtype, finite.
        latest: maximum number of rows that a query reads for each code.
        probes: number of codes that a query looks up, at most G + 1.
        scale: scale of q.k; 1/sqrt(D) if None.
        lengths: (B,) integers, the number of tokens in each sample before its padding, where the output is 0.
        cu_seqlens: (documents + 1,) integers that rise from 0 to N, the bounds of documents (B = 1).
        soft: read all rows j <= p, in O(N^2) and for documents of at most 8,192 tokens, to begin the training of codes;
            `latest` and `probes` have no effect.
        code_scores: False leaves log m out of the scores, so that the losses alone train the codes; only with `soft`.
        labelled: (B, N) bool, the queries that the losses agree, contrast and spread count; None: all real tokens.
        sequence: the ranks that share the sequence; None: the active group, or one rank if there is none. On several
            ranks, tensors (B, N, ...) are this rank's tokens; `lengths` and `cu_seqlens` are global, and every rank
            makes the same call with the same `null`. Every rank computes an equal part of the lookups, whatever the
            codes are.

    Returns:
        out (B, N, H, D) in q's dtype, and `HashedLosses`: agree and contrast (B, N, H), small if a query has the codes
        of the rows with large weights, and of no others; balance and spread (B, K), small if all codes occur; and (B,
        N, K), the number of rows that each query reads. On several ranks, N are this rank's tokens, and balance and spread
        are the same on all ranks: divide them by the number of ranks in a loss that ranks add.

    Raises:
        TypeError, ValueError: on every rank, if an argument is invalid on one rank or differs between ranks. The
            message names the argument, its value and what is allowed.
    """
    q, k, v = autocast(q, k, v)
    group = group_of(sequence)
    tensors, words = (q, k, v, z_q, z_k, null), (latest, probes, soft, code_scores)
    check = partial(_checked, tensors, words, scale, lengths, cu_seqlens, labelled, group)
    scale, lengths, cu_seqlens = check() if group is None else group.guard(check)
    number, shard, positions = ranks.agree(group, tensors, (*words, scale), lengths, cu_seqlens)
    documents, sizes = _documents(q, lengths, cu_seqlens, shard.seq_len, positions)
    longest = max(sizes, default=0)
    if soft and longest > SOFT_TOKENS:
        raise ValueError(
            f"soft=True takes at most {SOFT_TOKENS:,} tokens a document, got {longest:,}: set soft=False, or for a model "
            f"soft_until={SOFT_TOKENS} of `Hashed`."
        )

    options, samples = Options(latest, probes, scale, soft, code_scores), sizes if cu_seqlens is None else [sum(sizes)]
    tokens, place = ranks.real_tokens(shard.ranges(0 if group is None else group.rank), samples), None
    if group is not None and group.ranks > 1 and any(sizes):
        place = ranks.Place.of(group, number, shard, samples, k, options.lookups)
    result = compute(tensors, options, documents.to(q.device), tokens, longest, labelled, len(sizes), place=place)
    losses = result.losses(sequence_sum(result.totals, group))
    values = result.out, losses.agree, losses.contrast, losses.balance, losses.spread
    if group is not None and group.ranks > 1:
        values = ranks.Tie.apply(*values)
    out, agree, contrast, balance, spread = values
    return out, HashedLosses(agree, contrast, balance, spread, losses.rows)


class Options(NamedTuple):
    """Options of `hashed_attention`."""

    latest: int
    probes: int
    scale: float
    soft: bool
    code_scores: bool

    @property
    def lookups(self) -> int:
        """P, the number of lookups of a query."""
        return 1 if self.soft else self.probes

    def row_codes(self, z_k: Tensor) -> Tensor:
        """Return the codes (B, N, K, 1) of rows; all rows have the same code if lookups are soft."""
        return torch.zeros_like(z_k[..., :1, 0], dtype=torch.int64) if self.soft else codes(z_k.detach())


class Result(NamedTuple):
    """The results of a call, without the losses of a whole sequence."""

    out: Tensor
    agree: Tensor
    contrast: Tensor
    rows: Tensor
    chance_k: Tensor  # (B, N, K, G, M)
    totals: Tensor  # (2, B, K G M + 1), sums of chances of all rows and of counted queries, and numbers of tokens

    def losses(self, totals: Tensor) -> HashedLosses:
        """Return the losses; `totals` are of whole samples."""
        mean = totals[..., :-1] / totals[..., -1:].clamp_min(1)
        mean = mean.unflatten(2, self.chance_k.shape[2:])
        balance, spread = (mean * (mean * mean.shape[-1]).clamp_min(FLOOR).log()).sum((-2, -1))
        return HashedLosses(self.agree, self.contrast, balance, spread, self.rows)


def compute(
    tensors: Sequence[Tensor],
    options: Options,
    documents: Tensor,
    tokens: int,
    longest: int,
    labelled: Tensor | None = None,
    limit: int = LIMITS[0],
    before: HashedRows | None = None,
    place: ranks.Place | None = None,
) -> Result:
    """Compute `hashed_attention` of checked tensors.

    Args:
        documents: (B, N) int64 on the device, the index of each token's document, below `limit`; -1 for padding.
        tokens: number of tokens that are not padding.
        longest: maximum number of tokens in a document, including earlier calls.
        before: rows of earlier calls that the documents may read; the keys contain a document in place of the sample.
        place: this rank's part of the call; None: one rank.
    """
    q, k, v, z_q, z_k, null = tensors
    dtype = torch.promote_types(q.dtype, torch.float32)
    many = 1 if options.soft else z_q.shape[4] ** z_q.shape[3]
    limits = (limit, many) if before is None else LIMITS
    reach = longest if options.soft else min(options.latest, longest)
    if why_not(q, z_q, dtype) is None:
        return _fused(tensors, options, documents, tokens, reach, labelled, limits, before, place)
    z_q, z_k, null = (x.to(dtype) for x in (z_q, z_k, null))
    if tokens < documents.numel():
        z_q, z_k = (x.masked_fill((documents < 0)[:, :, None, None, None], 0) for x in (z_q, z_k))
    row_codes = options.row_codes(z_k)
    lookup_codes = row_codes if options.soft else codes(z_q.detach(), options.probes)
    block = SOFT_BLOCK if options.soft else BLOCK
    every = keys(torch.cat([row_codes, lookup_codes], -1), documents, limits)
    entries = sort(every, tokens, None if before is None else before.keys)
    chance_q, chance_k = z_q.softmax(-1), z_k.softmax(-1)
    settings = options.scale, options.code_scores
    with torch.autocast(q.device.type, enabled=False):
        rows = Inputs(*(x.flatten(0, 2) for x in (q.unflatten(2, (k.shape[2], -1)), k, v, chance_q, chance_k)))
        if before is not None:
            pairs = (before.k, rows.k), (before.v, rows.v), (before.chances, rows.chance_k)
            rows = rows._replace(**dict(zip(("k", "v", "chance_k"), map(torch.cat, pairs), strict=True)))
        if place is None:
            order = merge(entries, reach, block)
            reads = [x.flatten(0, 1) for x in Lookup.apply(order, lookup_codes.shape[3], settings, *rows)]
            counts = order.counts(lookup_codes.numel())
        else:
            reads, counts = ranks.look_up(place, entries, reach, block, settings, rows)
        read = Reads(*(x.unflatten(0, lookup_codes.shape) for x in reads))
        out, agree, contrast = merge_lookups(read, null.view(k.shape[2], -1))
    real = documents >= 0
    counted = real if labelled is None else real & labelled
    agree, contrast = (x.masked_fill(~counted[..., None], 0) for x in (agree, contrast))
    totals = torch.stack([_total(chance_k, real), _total(chance_q, counted)])
    return Result(out.to(q.dtype), agree, contrast, counts.view(lookup_codes.shape).sum(-1), chance_k, totals)


def _fused(
    tensors: Sequence[Tensor],
    options: Options,
    documents: Tensor,
    tokens: int,
    reach: int,
    labelled: Tensor | None,
    limits: tuple[int, int],
    before: HashedRows | None,
    place: ranks.Place | None,
) -> Result:
    """Compute `compute` by kernels, as one autograd function."""
    from lightning_dilated.ext.hashed import fused

    z_k, real = tensors[4], documents >= 0
    counted = real if labelled is None else real & labelled
    largest = largest_key(limits[0], z_k.shape[2], limits[1])
    words = options.lookups, options.scale, options.code_scores, options.soft
    numbers = fused.Numbers(*words, reach, tokens, limits[1], largest)
    earlier, rows = (None, ()) if before is None else (before.keys, (before.k, before.v, before.chances))
    with torch.autocast(z_k.device.type, enabled=False):
        results = fused.Attend.apply(numbers, place, earlier, documents, counted, *tensors, *rows)
    out, agree, contrast, sums, counts, chance_k = results
    tokens_of = torch.stack([x.sum(1, keepdim=True) for x in (real, counted)])
    return Result(out, agree, contrast, counts, chance_k, torch.cat([sums, tokens_of.to(sums.dtype)], 2))


class SumOver(torch.autograd.Function):
    """Return (B, C), the sum of x (B, N, C) over the tokens (B, N) that are True. `x.sum(1)` takes far longer on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        with torch.autocast(x.device.type, enabled=False):
            return (tokens[:, None].to(x.dtype) @ x)[:, 0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][:, None] * ctx.saved_tensors[0][..., None], None


def _total(chances: Tensor, tokens: Tensor) -> Tensor:
    """Return the sums of chances over some tokens of each sample, and the number of these tokens, (B, K G M + 1)."""
    total = SumOver.apply(chances.flatten(2), tokens)
    return torch.cat([total, tokens.sum(1, keepdim=True).to(total.dtype)], 1)


# -- checks ------------------------------------------------------------------------------------------------------------
def _checked(
    tensors: Sequence[Any],
    options: Sequence[Any],
    scale: Any,
    lengths: Any,
    cu_seqlens: Any,
    labelled: Any,
    group: Any,
) -> tuple[float, Tensor | None, Tensor | None]:
    """Check all arguments as far as one rank can; return scale, lengths and cu_seqlens."""
    _check_tensors(*tensors)
    _check_options(*options, *tensors[3].shape[3:])
    _check_labelled(labelled, tensors[0])
    if group is not None and group.layout == "strided" and group.ranks > 1:
        raise ValueError("layout='strided' has no hashed attention: set layout='contiguous' or 'zigzag'.")
    return check_scale(scale, tensors[0]), *check_documents(tensors[0], lengths, cu_seqlens)


def _check_tensors(q: Any, k: Any, v: Any, z_q: Any, z_k: Any, null: Any) -> None:
    check_rows(q, k, v)
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape, got {tuple(k.shape)} and {tuple(v.shape)}.")
    logits = "(B, N, K, G, M)", 5, k.shape[:3]
    scores = "(H,)", 1, q.shape[2:3]
    for name, x, (letters, dims, first) in (("z_q", z_q, logits), ("z_k", z_k, logits), ("null", null, scores)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor {letters}, got {type(x).__name__}.")
        if x.ndim != dims or x.shape[: len(first)] != first or not x.is_floating_point() or x.device != q.device:
            raise ValueError(
                f"{name} must be a floating tensor {letters} on {q.device} that begins with {tuple(first)}; got {x.dtype} "
                f"{tuple(x.shape)} on {x.device}."
            )
    if z_q.shape != z_k.shape or 0 in z_q.shape[3:]:
        raise ValueError(f"z_q and z_k need equal G and M, at least 1, got {tuple(z_q.shape)}, {tuple(z_k.shape)}.")


def _check_options(latest: Any, probes: Any, soft: Any, code_scores: Any, groups: int, many: int) -> None:
    integer(latest, "latest", 1)
    integer(probes, "probes", 1, f" There are {groups} groups of {many} codes.", groups + 1 if many > 1 else 1)
    if many**groups > 2**31:
        raise ValueError(f"M ** G must be at most 2**31, got {many} ** {groups}: take fewer groups or smaller ones.")
    if not flag(soft, "soft") and not flag(code_scores, "code_scores"):
        raise ValueError("code_scores=False goes with soft=True, which trains codes; set one of them to True.")
    flag(code_scores, "code_scores")


def _check_labelled(labelled: Any, q: Tensor) -> None:
    if labelled is None:
        return
    if not isinstance(labelled, Tensor):
        raise TypeError(f"labelled must be a torch.Tensor (B, N) or None, got {type(labelled).__name__}.")
    if labelled.dtype != torch.bool or labelled.shape != q.shape[:2] or labelled.device != q.device:
        raise ValueError(
            f"labelled must be a bool tensor {tuple(q.shape[:2])} on {q.device}; got {labelled.dtype} "
            f"{tuple(labelled.shape)} on {labelled.device}."
        )


def _documents(
    q: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None, seq_len: int, positions: Tensor
) -> tuple[Tensor, list[int]]:
    """Return the document of each token at `positions`, (B, L) int64, -1 for padding; and each document's length."""
    if cu_seqlens is not None:
        bounds = torch.tensor(check_bounds(cu_seqlens.tolist(), seq_len))
        first = send(bounds, positions.device)
        return torch.searchsorted(first, positions, right=True)[None] - 1, bounds.diff().tolist()
    counts = [seq_len] * len(q) if lengths is None else lengths.tolist()
    if any(not 0 <= n <= seq_len for n in counts):
        raise ValueError(f"lengths must lie in 0..{seq_len} (the padded length), got {counts[:8]}.")
    real = positions < send(torch.tensor(counts, dtype=torch.int64), positions.device)[:, None]
    return torch.where(real, torch.arange(len(q), device=positions.device)[:, None], -1), counts
