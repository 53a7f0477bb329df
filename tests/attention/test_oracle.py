"""The oracle, the reference of all other tests, against plain Python floats."""

import math

import pytest
import torch
from hypothesis import given, settings

from lightning_dilated.pattern import DilatedPattern

from ..examples import examples
from ..pattern import naive
from .reference import GRADIENTS, close, close_lse, gradients, leaves, oracle, plain
from .strategies import cases


def by_hand(case, q, k, v):
    """Compute (out, lse) as nested lists directly from the definition: exp, sums and a division."""
    group, scale = case.heads // case.kv_heads, case.head_dim**-0.5 if case.scale is None else case.scale
    q, k, v = q.tolist(), k.tolist(), v.tolist()
    out = torch.zeros(case.batch, case.seq_len, case.heads, case.head_dim, dtype=torch.float64)
    lse = torch.full((case.batch, case.heads, case.seq_len), -torch.inf, dtype=torch.float64)
    for b, start, stop in case.spans():
        c = naive.counts(case.pattern, [0, stop - start], case.heads, case.kv_heads, case.causal)
        n_pad = naive.pads(case.pattern, stop - start, case.heads, case.kv_heads)
        attended = case.pattern.padding == "attended" and not case.causal
        for h in range(case.heads):
            for p in range(stop - start):
                total = n_pad[h][p] * 1.0 if attended else 0.0
                value = [0.0] * case.head_dim
                for j in range(stop - start):
                    key, row = k[b][start + j][h // group], v[b][start + j][h // group]
                    score = scale * sum(x * y for x, y in zip(q[b][start + p][h], key, strict=True))
                    weight = c[h][p][j] * math.exp(score)
                    total += weight
                    value = [x + weight * y for x, y in zip(value, row, strict=True)]
                if total:
                    out[b, start + p, h] = torch.tensor([x / total for x in value], dtype=torch.float64)
                    lse[b, h, start + p] = math.log(total)
    return out, lse


@pytest.mark.parametrize("padding", ["masked", "attended"])
def test_by_hand(padding):
    @settings(max_examples=examples(40))
    @given(cases(padding=padding, longest=9))
    def check(case):
        q, k, v, _ = case.tensors()
        out, lse = case.oracle(q, k, v)
        want_out, want_lse = by_hand(case, q, k, v)
        close(f"out of {case}", out, want_out, 1e-12)
        close_lse(f"lse of {case}", lse, want_lse, 1e-12)

    check()


@pytest.mark.parametrize("padding", ["masked", "attended"])
def test_gradients(padding):
    """The gradient of the oracle equals autograd through a softmax with log counts, an independent formulation."""

    @settings(max_examples=examples(40))
    @given(cases(padding=padding, longest=20))
    def check(case):
        q, k, v, grad = case.tensors()
        again = leaves(q, k, v)
        scale = case.head_dim**-0.5 if case.scale is None else case.scale
        got = gradients(case.oracle(q, k, v)[0], (q, k, v), grad)
        want = gradients(plain(*again, *case.counts(), scale), again, grad)
        for name, a, b in zip(GRADIENTS, got, want, strict=True):
            close(f"{name} of {case}", a, b, 1e-12)

    check()


def test_dense_pattern_is_ordinary_attention():
    q, k, v = torch.randn(3, 2, 17, 4, 8, dtype=torch.float64)
    got, _ = oracle(q, k, v, DilatedPattern.dense(), causal=True)
    want = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    close("out", got.transpose(1, 2), want, 1e-14)
