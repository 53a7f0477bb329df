"""hashed_attention over NCCL on two GPUs equals one GPU, in results, gradients and counts of rows."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist

from lightning_dilated.attention import hashed_attention
from lightning_dilated.sequence import SequenceGroup

from ...distributed.test_nccl import on_gpus
from .cases import LOSSES, NAMES, Case, weights
from .test_gpu import CALLS, TOLERANCES

pytestmark = pytest.mark.gpu

LAYOUTS = ("contiguous", "zigzag")
#: results that all ranks share
WHOLE = ("balance", "spread", "d null")
LONG = Case((65536,), group=1, dim=64, groups=4, codes=16, latest=64, probes=2)
CASES = {**CALLS, "long": LONG, "one token": Case((1,), probes=3), "no token": Case((0,))}


def computed(case, at, group=None):
    """Return the results and gradients at the positions `at`, in float64, of a call on the ranks of `group`."""
    *rows, null = (x.detach() for x in case.tensors())
    tensors = [x.cuda().requires_grad_() for x in (*(x[:, at] for x in rows), null)]
    out, losses = hashed_attention(*tensors, **case.settings(), sequence=group)
    results = {"out": out, **{name: getattr(losses, name) for name in LOSSES}}
    loss = 0
    for i, (name, x) in enumerate(results.items()):
        shape = x.shape if name in WHOLE else (x.shape[0], case.seq_len, *x.shape[2:])
        factor = weights(shape, i) if name in WHOLE else weights(shape, i)[:, at]
        shared = group is not None and name in WHOLE and group.rank > 0
        loss = loss + (x.double() * factor.cuda()).sum() * (not shared)
    grads = torch.autograd.grad(loss, tensors)
    results |= {f"d {name}": x for name, x in zip(NAMES, grads, strict=True)} | {"rows": losses.rows}
    return {name: x.detach().double() for name, x in results.items()}


def differences(rank, ranks, dtype):
    """Return [(call, result, largest difference from one GPU, largest value, whether repeated calls differ in bits)]."""
    rows = []
    for layout, (what, case) in product(LAYOUTS, CASES.items()):
        case = replace(case, dtype=dtype)
        group = SequenceGroup(layout=layout)
        at = torch.tensor([p for x in group.shard(case.seq_len).ranges(rank) for p in x], dtype=torch.int64)
        want = computed(case, torch.arange(case.seq_len))
        got, again = (computed(case, at, group) for _ in range(2))
        dist.all_reduce(got["d null"]), dist.all_reduce(again["d null"])
        for name, x in got.items():
            right = want[name] if name in WHOLE else want[name][:, at]
            numbers = [(x - right).abs().max().item(), right.abs().max().item()] if x.numel() else [0.0, 0.0]
            numbers = torch.tensor([*numbers, float(not torch.equal(x, again[name]))], device="cuda")
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
            rows.append((f"{what}, {layout}", name, *numbers.tolist()))
        group.close()
    return rows


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_two_gpus(dtype):
    rows = on_gpus(2, partial(differences, dtype=dtype))
    assert len(rows) == len(LAYOUTS) * len(CASES) * (len(LOSSES) + len(NAMES) + 2)
    for what, name, difference, largest, unlike in rows:
        allowed = 0 if name == "rows" else TOLERANCES[dtype] * largest + 1e-6
        assert difference <= allowed and not unlike, (what, name, difference, largest, unlike)
