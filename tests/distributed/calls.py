"""Attention calls for workers: one rank's slices and results, all ranks' results joined, and a comparison on one rank.

Shape letters: B batch, N tokens of the sequence, L tokens of a rank, H query heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dilated.sequence.group import SequenceGroup

from ..attention.reference import GRADIENTS, close, close_lse, error, gradients
from .strategies import Sharded

NAMES = ("out", "lse", *GRADIENTS)


@dataclass
class Result:
    """Results of a call by name, their positions, and the bytes that this rank sent and received, (forward, backward)."""

    tensors: dict[str, Tensor]
    positions: list[int]
    sent: tuple[int, int] = (0, 0)
    received: tuple[int, int] = (0, 0)


@contextmanager
def sequence(group: dist.ProcessGroup, **settings: Any) -> Iterator[SequenceGroup]:
    """Yield a SequenceGroup, and close it afterwards."""
    sequence_group = SequenceGroup(group, **settings)
    try:
        yield sequence_group
    finally:
        sequence_group.close()


def positions(group: SequenceGroup, seq_len: int) -> list[int]:
    """Return the global positions of this rank's tokens, in local order."""
    return [p for held in group.shard(seq_len).ranges(group.rank) for p in held]


def restride(strides: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same values with the strides that `Case.layout` names, which shards in a model may have."""
    if strides == "fused":
        q, k, v = torch.cat([q, k, v], 2).split([q.shape[2], k.shape[2], k.shape[2]], 2)
    elif strides == "expanded kv":
        k, v = (x[:, :, :1].clone().expand(x.shape) for x in (k, v))
    elif strides != "contiguous":
        a, b = {"transposed": (1, 2), "D strided": (2, 3)}[strides]
        q, k, v = (x.transpose(a, b).clone(memory_format=torch.contiguous_format).transpose(a, b) for x in (q, k, v))
    return q, k, v


def slices(case: Sharded, at: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (q, k, v, grad) at the given positions; q, k and v are leaves."""
    *inputs, grad = (x.detach()[:, at] for x in case.call.tensors(dtype))
    if case.call.layout == "fused":
        grad = grad[:, :, :1, :1].expand(grad.shape)  # an expanded tensor, as the gradient of a sum is
    return *(x.requires_grad_() for x in restride(case.call.layout, *inputs)), grad


def attend(
    rank: int, group: dist.ProcessGroup, case: Sharded, dtype: torch.dtype = torch.float64, dropout: float = 0.0
) -> Result:
    """Run this rank's part of a call, forward and backward. Each rank gets a different random state on purpose."""
    torch.manual_seed(SEED + 1000 * rank)
    with sequence(group, **case.settings()) as ours:
        at = positions(ours, case.call.seq_len)
        q, k, v, grad = slices(case, at, dtype)
        out, lse = case.call.run(q, k, v, sequence=ours, return_lse=True, dropout=dropout, engine=case.engine)
        outputs = (out, lse, *gradients(out, (q, k, v), grad))
        traffic = ours.forward_traffic, ours.backward_traffic
        tensors = {name: x.detach() for name, x in zip(NAMES, outputs, strict=True)}
        return Result(tensors, at, tuple(t.sent for t in traffic), tuple(t.received for t in traffic))


SEED = 5


def alone(case: Sharded, dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> dict[str, Tensor]:
    """Run the same call on one rank without a group."""
    torch.manual_seed(SEED)
    q, k, v, grad = case.call.tensors(dtype)
    out, lse = case.call.run(q, k, v, return_lse=True, dropout=dropout, engine=case.engine)
    return dict(zip(NAMES, (out, lse, *gradients(out, (q, k, v), grad)), strict=True))


def by_definition(case: Sharded, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Compute the same call with the oracle, on inputs that are rounded to `dtype`."""
    *inputs, grad = case.call.tensors(dtype)
    inputs = tuple(x.detach().double().requires_grad_() for x in inputs)
    out, lse = case.call.oracle(*inputs)
    return dict(zip(NAMES, (out, lse, *gradients(out, inputs, grad.double())), strict=True))


def together(results: list[Result], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Join the results of all ranks by global position. Each position must come from exactly one rank."""
    joined = {}
    at = [p for result in results for p in result.positions]
    assert sorted(at) == list(range(len(at))), at
    for name, want in like.items():
        axis = 2 if name == "lse" else 1
        parts = torch.cat([result.tensors[name] for result in results], axis)
        assert parts.shape[axis] == len(at), (name, parts.shape, len(at))
        joined[name] = torch.empty_like(parts).index_copy_(axis, torch.tensor(at, dtype=torch.int64), parts)
        assert joined[name].shape == want.shape, (name, joined[name].shape, want.shape)
    return joined


def compare(case: Sharded, results: list[Result], want: dict[str, Tensor], tol: float) -> None:
    """Assert that the joined results of the ranks equal `want`. The error contains the case."""
    got = together(results, want)
    for name in NAMES:
        (close_lse if name == "lse" else close)(f"{name} of {case}", got[name], want[name].detach(), tol)
    compare_bytes(case, results)


def compare_rounded(case: Sharded, results: list[Result], dtype: torch.dtype) -> None:
    """Assert that several ranks are as exact as one rank, because partial results and gradients are sent in fp32."""
    want, one = by_definition(case, dtype), alone(case, dtype)
    many = together(results, want)
    for name in NAMES:
        close_rounded(f"{name} of {case} in {dtype}", many[name], one[name], want[name])
    compare_bytes(case, results)


def close_rounded(name: str, many: Tensor, one: Tensor, want: Tensor) -> None:
    """Assert that the error of several ranks is little more than the error of one rank."""
    assert many.dtype == one.dtype, name
    finite = want.isfinite()
    assert torch.equal(many.isfinite(), finite), name
    # allow twice the error of one rank, one rounding of the result (by chance, a small call may have no error), and the
    # rounding errors of dozens of merges in fp32
    rounding = torch.finfo(many.dtype).eps + 8 * torch.finfo(torch.float32).eps
    allowed = 2 * error(one[finite], want[finite], 1.0) + rounding
    difference = error(many[finite], want[finite], 1.0)
    assert difference <= allowed, f"{name}: error {difference:.2e}, allowed {allowed:.2e}"


def compare_bytes(case: Sharded, results: list[Result]) -> None:
    """Assert that the bytes sent and the bytes received are equal, summed over ranks."""
    sent, received = (
        torch.tensor([getattr(r, name) for r in results]).sum(0).tolist() for name in ("sent", "received")
    )
    assert sent == received, f"bytes sent {sent}, received {received}: {case}"
