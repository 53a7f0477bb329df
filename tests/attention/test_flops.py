"""FLOPs in torch's counter: 4 D per (query, key) pair in the forward and 10 D in the backward."""

import pytest
import torch
from hypothesis import given, settings
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_dilated.attention import dilated_attention
from lightning_dilated.pattern import DilatedPattern

from ..examples import examples
from .reference import gradients
from .strategies import Case, cases

PATTERN = DilatedPattern.longnet([8, 24], [1, 3])
TABLE = {
    "full": {},
    "causal": {"causal": True},
    "one document of two tokens": {"documents": (0, 2, 2, 30), "batch": 1},
    "lengths, one empty": {"lengths": (30, 0)},
    "gqa": {"kv_heads": 1},
}


def count(run) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", TABLE)
def test_table(name):
    case = Case(PATTERN, 2, 30, 4, 4, 8).but(**TABLE[name])
    q, k, v, grad = case.tensors(torch.float32)
    pairs = int(case.counts()[0].sum())
    assert count(lambda: case.run(q, k, v)) == 4 * 8 * pairs
    assert count(lambda: gradients(case.run(q, k, v), (q, k, v), grad)) == 14 * 8 * pairs


@settings(max_examples=examples(60))
@given(cases())
def test_random(case):
    q, k, v, grad = case.tensors(torch.float32)
    pairs = int(case.counts()[0].sum())
    assert count(lambda: case.run(q, k, v)) == 4 * case.head_dim * pairs
    assert count(lambda: gradients(case.run(q, k, v), (q, k, v), grad)) == 14 * case.head_dim * pairs


def test_dense_is_what_torch_counts_for_two_matmuls():
    q, k, v = torch.randn(3, 2, 64, 4, 16, requires_grad=True)
    matmuls = lambda: (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)) @ v.transpose(1, 2)  # noqa: E731
    ours = lambda: dilated_attention(q, k, v, DilatedPattern.dense())  # noqa: E731
    assert count(ours) == count(matmuls) > 0
    # the backward of torch's two matmuls is four matmuls; flash attention recomputes the scores, a fifth
    assert count(lambda: ours().sum().backward()) == count(matmuls) * 7 // 2


def test_without_any_memory():
    """FLOPs of a million tokens are counted under FakeTensorMode, so planning a run needs no memory."""
    pattern = DilatedPattern.geometric(2048, 32768)
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 1 << 20, 12, 64, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
        got = count(lambda: dilated_attention(q, k, v, pattern).sum().backward())
    # in every branch a row has 2048 keys, and a head computes one row in r
    assert got == sum(14 * 64 * 12 * (1 << 20) // r * 2048 for r in (1, 2, 4, 8, 16))
