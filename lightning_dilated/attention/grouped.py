"""Attention over a rank's own blocks in a number of launches that neither documents nor branches add to: `kernels.jobs`.

The parts of the whole call are held at once, so calls above a size go block by block (`fused`).
Shape letters: B batch, N tokens, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_dilated import kernels
from lightning_dilated.attention import fused
from lightning_dilated.attention.blockwise import Call
from lightning_dilated.attention.dropout import Dropout
from lightning_dilated.attention.jobs import send, work_of
from lightning_dilated.attention.views import Span

if TYPE_CHECKING:
    from lightning_dilated.kernels.jobs import GroupedDrop, Work

#: calls up to this many (position, head, feature) triples: 262,144 tokens of 12 heads of 64
LIMIT = 2 * fused.HELD
#: tables that CUDA graphs read; a replay comes at any time, so they stay
_recorded: dict[int, Work] = {}


def plan(call: Call, found: Sequence[Span], q: Tensor) -> Work | None:
    """The work of a call in few launches, or None where it is not to be done so."""
    if call.engine.name != "triton" or q.dtype not in fused.DTYPES or not kernels.available(q.device):
        return None
    if not 0 < q.numel() <= LIMIT or q.shape[3] > 256 or not found:
        return None
    captured = q.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if captured and call.mask:
        return None  # the hash's states are sent with every call
    try:
        work = work_of(call, found, q.device, *_sizes(q.dtype, q.shape[3], call.causal))
    except LookupError:
        return None
    if work.rows * q.shape[3] > fused.OVERLAP * q.numel():
        return None
    if captured:
        _recorded[id(work)] = work
    else:
        work.wait()
    return work


def _sizes(dtype: torch.dtype, dim: int, causal: bool) -> tuple[tuple[int, ...], int]:
    """Rows of a program of each launch, and output rows of one that combines."""
    from lightning_dilated.kernels import grouped_backward, grouped_combine, grouped_forward, jobs

    over_keys, over_rows = (grouped_backward.config(dtype, dim, causal, keys) for keys in (True, False))
    sizes = grouped_forward.config(dtype, dim)[0], over_keys[1], over_rows[0], jobs.PREPARED
    return sizes, grouped_combine.CONFIG[0]


def _drop(call: Call, device: torch.device) -> GroupedDrop | None:
    """The kernels' form of a call's dropout."""
    if call.mask is None:
        return None
    from lightning_dilated.kernels.jobs import GroupedDrop

    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    states = _states(call.mask, len(call.pattern.branches), device, stream)
    return GroupedDrop(states, call.mask.threshold, 1 / (1 - call.mask.p), call.heads[0])


@functools.lru_cache(maxsize=64)
def _states(mask: Dropout, branches: int, device: torch.device, stream: int) -> Tensor:
    """(branches,) int64, sent by that stream; kept for the backward of the same call."""
    return send(mask.states(branches), device)


def _empty(covered: bool, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for a result like a (B, N, ...) tensor; zeros where no span may write."""
    return (torch.empty if covered else torch.zeros)(like.shape, dtype=dtype, device=like.device)


def forward(call: Call, work: Work, inputs: Sequence[Tensor], final: bool) -> tuple[Tensor, Tensor]:
    """out (B, N, H, D), in q's dtype if it is `final`, else fp32, and lse (B, H, N) fp32 of the blocks of q, k, v."""
    from lightning_dilated.kernels.grouped_combine import merge_jobs
    from lightning_dilated.kernels.grouped_forward import forward as run

    q = inputs[0]
    out = _empty(work.positions == q.shape[0] * q.shape[1], q, q.dtype if final else torch.float32)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float32, device=q.device)
    with kernels.on(q.device):
        merge_jobs(out, lse, *run(*inputs, work, call.causal, call.scale, _drop(call, q.device)), work)
    return out, lse


def backward(
    call: Call, work: Work, tensors: Sequence[Tensor], lse: Tensor, total: list[Tensor] | None = None
) -> list[Tensor]:
    """dq, dk, dv of the blocks, in q's dtype, or added to `total`; `tensors`: grad, q, k, v, merged out."""
    from lightning_dilated.kernels.grouped_backward import Backward
    from lightning_dilated.kernels.grouped_combine import sum_jobs

    q, add = tensors[1], total is not None
    if total is None:
        covered = work.positions == q.shape[0] * q.shape[1]
        total = [_empty(covered, x, x.dtype) for x in tensors[1:4]]
    with kernels.on(q.device):
        run = Backward.of(work, list(tensors), lse, call.causal, call.scale, _drop(call, q.device))
        for x, part in zip(total[1:], run.keys(), strict=True):
            sum_jobs(x, part, work, True, add)
        del part  # before dq's are made
        sum_jobs(total[0], run.queries(), work, False, add)
    return total
