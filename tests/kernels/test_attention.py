"""The triton engine in Triton's interpreter: against the oracle, and with dropout against the math engine's mask."""

import random

import pytest
import torch

from lightning_dilated import DilatedPattern, dilated_attention

from ..attention.reference import GRADIENTS, close, gradients, leaves
from ..attention.strategies import Case
from ..attention.test_equals_oracle import check
from .test_combine import drawn


def random_calls(rank, group, number, examples):
    """Random calls on tiles so small that their loops have several turns."""
    from lightning_dilated.kernels import backward, forward

    torch.use_deterministic_algorithms(True)  # what torch.empty makes is NaN until it is written
    chosen = random.Random(number)
    for _ in range(examples):
        sizes = [(chosen.choice([16, 32]), chosen.choice([16, 32]), 4, 1) for _ in range(2)]
        forward.WIDE, backward.WIDE = dict.fromkeys([16, 32, 64], sizes[0]), dict.fromkeys([16, 32, 64], sizes[1])
        check(drawn(chosen), "triton", torch.float32, 1e-5)


@pytest.mark.parametrize("number, examples", [(0, 8), pytest.param(1, 60, marks=pytest.mark.slow)])
def test_random(interpreter, number, examples):
    interpreter.run(1, random_calls, number, examples)


def one_call(rank, group, case, dtype, dropout):
    """{name: (error, allowed)} against the math engine in float32, which is tested by itself."""
    q, k, v, grad = case.tensors(dtype)
    found = []
    for engine, wide in (("triton", dtype), ("math", torch.float32)):
        x = leaves(q, k, v, dtype=wide)
        torch.manual_seed(3)
        out = case.run(*x, engine=engine, dropout=dropout)
        found.append([out, *gradients(out, x, grad.to(wide))])
    tol = {torch.float32: 1e-5, torch.float16: 4e-3}[dtype]
    for name, a, b in zip(("out", *GRADIENTS), *found, strict=True):
        close(f"{name} of {case}", a, b, tol, floor=1.0)
    return float(found[0][0].abs().max())


LONGER = Case(DilatedPattern([(64, 1), (100, 3)]), 1, 150, 2, 1, 24, causal=True)


# bfloat16 is for tests/attention/test_gpu.py: the interpreter multiplies its bits as integers
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_dtypes(interpreter, dtype, causal):
    assert interpreter.run(1, one_call, LONGER.but(causal=causal), dtype, 0.0)[0] > 0


@pytest.mark.parametrize("causal", [False, True])
def test_dropout(interpreter, causal):
    """The mask is that of every other engine: a hash of branch, head and global positions."""
    interpreter.run(1, one_call, LONGER.but(causal=causal, batch=2, lengths=(150, 70)), torch.float32, 0.4)


@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
def test_any_scale(interpreter, scale):
    interpreter.run(1, one_call, LONGER.but(scale=scale, seq_len=40), torch.float32, 0.0)


@pytest.mark.parametrize("head_dim", [1, 17, 48])
def test_head_dims(interpreter, head_dim):
    interpreter.run(1, one_call, LONGER.but(head_dim=head_dim, seq_len=40), torch.float32, 0.0)


def on_two_ranks(rank, group, dropout):
    """out and gradients of this rank's tokens, beside those of one rank, of the same seed."""
    from lightning_dilated.sequence import SequenceGroup

    pattern, n = DilatedPattern([(8, 1), (None, 3)]), 30
    made = torch.Generator().manual_seed(0)
    *full, grad = (torch.randn(1, n, 2, 8, generator=made) for _ in range(4))

    def call(inputs, grad, **options):
        torch.manual_seed(5)
        inputs = leaves(*inputs)
        out = dilated_attention(*inputs, pattern, dropout=dropout, engine="triton", **options)
        return [out, *gradients(out, inputs, grad)]

    sequence = SequenceGroup(group)
    mine = [p for held in sequence.shard(n).ranges(rank) for p in held]
    got = call([x[:, mine] for x in full], grad[:, mine], sequence=sequence)
    sequence.close()
    assert all(x.isfinite().all() for x in got)
    return max(float((a - b[:, mine]).abs().max()) for a, b in zip(got, call(full, grad), strict=True))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_on_two_ranks(interpreter, dropout):
    assert max(interpreter.run(2, on_two_ranks, dropout)) < 1e-5
