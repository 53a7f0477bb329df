"""The grouped executor: a constant number of kernel launches for all blocks, documents and branches of a rank.

The parts of the whole call are in memory together, so `fused` serves larger calls.
Shape letters: B batch, N tokens, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_dilated import kernels
from lightning_dilated._device import send
from lightning_dilated.attention.dropout import Dropout
from lightning_dilated.attention.executors import fused
from lightning_dilated.attention.executors.base import Call, HeadWindow, Layout
from lightning_dilated.attention.executors.blockwise import suited
from lightning_dilated.attention.executors.tables import work_of
from lightning_dilated.attention.spans import Span
from lightning_dilated.pattern.rows import global_tokens, without_global

if TYPE_CHECKING:
    from lightning_dilated.kernels.grouped import GroupedDrop, Work

#: maximum number of (position, head, feature) triples in a launch's spans: 262,144 tokens, 12 heads of 64
LIMIT = 2 * fused.UNIT
#: tables that CUDA graphs read; they are never freed, because a graph may be replayed at any time
_recorded: dict[int, Work] = {}


def plan(call: Call, spans: Sequence[Span], q: Layout) -> tuple[Work, ...] | None:
    """Return the tables of a call on tensors like q, each for a few launches; None if `Grouped` does not serve it."""
    if call.engine.name != "triton" or q.dtype not in fused.DTYPES or not kernels.available(q.device):
        return None
    if q.shape[3] > 256 or not spans or not fits(spans, q.shape) or global_tokens(call.window.pattern):
        return None
    captured = fused.captured(q.device)
    sizes = _sizes(q.dtype, q.shape[3], call.causal)
    try:
        works = tuple(work_of(call, group, q.device, *sizes, q.lengths, q.bits) for group in _launches(spans, q.shape))
    except LookupError:
        return None
    if captured:
        _recorded.update((id(work), work) for work in works)
    return works if sum(work.rows for work in works) * q.shape[3] <= fused.OVERLAP * math.prod(q.shape) else None


def fits(spans: Sequence[Span], shape: Sequence[int]) -> bool:
    """Return whether each span of a (B, N, H, D) tensor is small enough for a launch."""
    return all(span.batches * span.length * shape[2] * shape[3] <= LIMIT for span in spans)


def block_flops(
    window: HeadWindow, causal: bool, spans: Sequence[Span], shape: Sequence[int], owned: Sequence[int] = ()
) -> float:
    """Return a block's mean FLOPs, forward and backward, in a (B, N, H, D) call; inf if blocks cannot be grouped.

    `owned`: the number of pairs in each batch of segments that a switch gives to this rank. Such batches are never grouped,
    so they can only raise the mean. Without blocks and batches the result is inf.
    """
    pattern = without_global(window.pattern)  # blocks of global tokens are computed one by one
    if not spans or not fits(spans, shape) or pattern is None:
        return math.inf
    window = window._replace(pattern=pattern)
    pairs, calls, rows = 0, 0, 0
    for span in spans:
        span_pairs, span_calls, span_rows = _work_of(window, causal, span.document, span.part)
        pairs, calls, rows = pairs + span.batches * span_pairs, calls + span_calls, rows + span.batches * span_rows
    if rows * shape[3] > fused.OVERLAP * math.prod(shape):
        return math.inf
    sums = (pairs, calls), (pairs + sum(owned), calls + len(owned))
    return 14 * shape[3] * max((total / number for total, number in sums if number), default=math.inf)


@functools.lru_cache(maxsize=4096)
def _work_of(window: HeadWindow, causal: bool, document: int, part: tuple[int, int] | None) -> tuple[int, int, int]:
    """Return (pairs, blocks, rows) of a document, or of a part of it."""
    blocks = window.blocks(document, part)
    return sum(b.pairs(causal) for b in blocks), len(blocks), sum(b.query_rows for b in blocks)


def _launches(spans: Sequence[Span], shape: Sequence[int]) -> list[list[Span]]:
    launches: list[list[Span]] = [[]]
    total = 0
    for span in spans:
        size = span.batches * span.length * shape[2] * shape[3]
        if total + size > LIMIT and launches[-1]:
            launches.append([])
            total = 0
        launches[-1].append(span)
        total += size
    return launches


def _sizes(dtype: torch.dtype, dim: int, causal: bool) -> tuple[tuple[int, ...], int]:
    """Return the rows of a program in each launch, and the output rows of a program that combines results."""
    from lightning_dilated.kernels import combine, grouped

    over_keys, over_rows = (grouped.backward_config(dtype, dim, causal, keys) for keys in (True, False))
    sizes = grouped.config(dtype, dim, causal)[0], over_keys[1], over_rows[0], grouped.PREPARED
    return sizes, combine.CONFIG[0]


def _drop(call: Call, device: torch.device) -> GroupedDrop | None:
    if call.mask is None:
        return None
    from lightning_dilated.kernels.grouped import GroupedDrop

    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    states = _states(call.mask, len(call.window.pattern.branches), device, stream)
    return GroupedDrop(states, call.mask.threshold, 1 / (1 - call.mask.p), call.window.heads[0])


@functools.lru_cache(maxsize=64)
def _states(mask: Dropout, branches: int, device: torch.device, stream: int) -> Tensor:
    """Return the hash states (branches,) int64 on the device, sent on `stream`; cached for the call's backward."""
    return send(mask.states(branches), device)


def _empty(covered: bool, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocate a result like a (B, N, ...) tensor; zeros unless the spans cover all rows."""
    return (torch.empty if covered else torch.zeros)(like.shape, dtype=dtype, device=like.device)


def _wait(work: Work, device: torch.device) -> None:
    """Make this stream wait for the tables, which another stream may have sent. A CUDA graph need not wait for them."""
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        work.wait()


def _covered(works: Sequence[Work], q: Tensor) -> bool:
    return sum(work.positions for work in works) == q.shape[0] * q.shape[1]


def _sum(
    call: Call,
    work: Work,
    tensors: Sequence[Tensor],
    lse: Tensor,
    total: list[Tensor],
    add: bool,
    lengths: Tensor | None,
) -> None:
    """Write a work's gradients to their rows, or add them to the rows."""
    from lightning_dilated.kernels.combine import sum_jobs
    from lightning_dilated.kernels.grouped import Backward

    run = Backward.of(work, list(tensors), lse, call.causal, call.scale, _drop(call, lse.device), lengths)
    sum_jobs(total[1:], run.keys(), work, True, add, lengths)  # frees these parts before the parts of dq are made
    sum_jobs(total[:1], run.queries(), work, False, add, lengths)


@dataclass(frozen=True)
class Grouped:
    """Executor that computes all blocks in the launches of `works`.

    `lengths` on the device are the lengths of samples, (B,), or the bounds of documents, (2**bits + 1,) int32.
    """

    call: Call
    works: tuple[Work, ...]
    lengths: Tensor | None = None

    def masked(self, mask: Dropout) -> Grouped:
        return replace(self, call=replace(self.call, mask=mask))

    def cut(self, lengths: Tensor) -> Grouped:
        """Return this executor with lengths of samples or bounds of documents; the works must be built for these."""
        for work in self.works[:1]:
            if work.bits and len(lengths) <= 2**work.bits:  # the missing documents are empty
                lengths = torch.cat([lengths, lengths[-1:].expand(2**work.bits + 1 - len(lengths))])
        return replace(self, lengths=lengths.contiguous())

    def forward(self, inputs: Sequence[Tensor], final: bool) -> tuple[Tensor, Tensor, None]:
        from lightning_dilated.kernels.combine import merge_jobs
        from lightning_dilated.kernels.grouped import forward

        call, (q, k, v) = self.call, suited(self.call.engine, *inputs)
        out = _empty(_covered(self.works, q), q, q.dtype if final else torch.float32)
        shape = q.shape[0], q.shape[2], q.shape[1]
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
        if not _covered(self.works, q):
            lse.fill_(-torch.inf)
        with kernels.on(q.device):
            for work in self.works:
                _wait(work, q.device)
                rows = forward(q, k, v, work, call.causal, call.scale, _drop(call, q.device), self.lengths)
                merge_jobs(out, lse, *rows, work, self.lengths)
        return out, lse, None

    def backward(
        self, tensors: Sequence[Tensor], lse: Tensor, received: Tensor | None, total: list[Tensor] | None = None
    ) -> list[Tensor]:
        """Return dq, dk, dv of the blocks in q's dtype, or add them to `total`."""
        add, tensors = total is not None, suited(self.call.engine, *tensors)
        if total is None:
            total = [_empty(_covered(self.works, tensors[1]), x, x.dtype) for x in tensors[1:4]]
        with kernels.on(lse.device):
            for work in self.works:
                _wait(work, lse.device)
                _sum(self.call, work, tensors, lse, total, add, self.lengths)
        return total
