"""The triton engine in Triton's interpreter, against the oracle, and with dropout against the math engine."""

import itertools
import random

import pytest
import torch

from lightning_dilated import DilatedPattern, dilated_attention

from ..attention.recorder import block_by_block
from ..attention.reference import GRADIENTS, close, gradients, leaves
from ..attention.strategies import Case
from ..attention.test_equals_oracle import check
from ..examples import few_and_many
from .test_combine import drawn, sizes_put_back


@sizes_put_back()
def random_calls(rank, group, number, examples):
    """Check random calls with small tiles, so that loops have several iterations."""
    from lightning_dilated.kernels import dense

    torch.use_deterministic_algorithms(True)  # torch.empty returns NaN
    chosen = random.Random(number)
    with block_by_block() as shapes:
        for _ in range(examples):
            sizes = [(chosen.choice([16, 32]), chosen.choice([16, 32]), 4, 1) for _ in range(2)]
            dense.WIDE, dense.WIDE_BACKWARD = (
                dict.fromkeys([16, 32, 64], sizes[0]),
                dict.fromkeys([16, 32, 64], sizes[1]),
            )
            check(drawn(chosen), "blocks", torch.float32, 1e-5)
    assert len(shapes) >= examples


def pipelined_calls(rank, group, number, examples):
    """Compare the forward kernel for Hopper on random views with a softmax in float64."""
    from lightning_dilated.kernels import pipelined

    torch.use_deterministic_algorithms(True)
    chosen, generator = random.Random(number), torch.Generator().manual_seed(number)
    for _ in range(examples):
        causal, dim, rate = chosen.random() < 0.5, chosen.choice([8, 16, 24, 48]), chosen.choice([1, 2, 3])
        groups, heads, n = chosen.randint(1, 3), chosen.randint(1, 2), chosen.randint(1, 100)
        m = n if causal else chosen.randint(1, 100)
        pipelined.CONFIGS = dict.fromkeys(pipelined.CONFIGS, (chosen.choice([16, 32]), chosen.choice([16, 32]), 4, 2))
        views = []
        for rows in (n, m, m):
            x = torch.randn(groups * rows * rate + rate, heads, dim, generator=generator).half()
            strides = rows * rate * heads * dim, dim, rate * heads * dim, 1
            views.append(x.as_strided((groups, heads, rows, dim), strides, heads * dim * chosen.randrange(rate)))
        assert pipelined.serves(*views, 0.3)
        out, lse = pipelined.forward(*views, causal, 0.3)
        scores = views[0].double() @ views[1].double().transpose(-1, -2) * 0.3
        scores = scores.masked_fill(torch.ones(n, m, dtype=torch.bool).triu(1), -torch.inf) if causal else scores
        torch.testing.assert_close(out.double(), scores.softmax(-1) @ views[2].double(), atol=4e-3, rtol=4e-3)
        torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=2e-5, rtol=2e-5)


def test_what_is_not_pipelined():
    from lightning_dilated.kernels import pipelined

    q = torch.zeros(2, 2, 8, 16, dtype=torch.float16)
    odd = torch.zeros(2, 2, 8, 17, dtype=torch.float16)[..., :16]
    wide = torch.zeros(2, 2, 8, 136, dtype=torch.float16)
    assert pipelined.serves(q, q, q, 0.1)
    for x, scale in (
        (q, 0.0),
        (q, -1.0),
        (q, 1e-45),
        (q.float(), 0.1),
        (odd, 0.1),
        (wide, 0.1),
        (q.flatten()[1:-15].view(1, 1, -1, 16), 0.1),
    ):
        assert not pipelined.serves(x, x, x, scale)
    assert not pipelined.serves(q, q[:, :1].expand(-1, 2, -1, -1), q, 0.1)  # the head stride is 0


def one_call(rank, group, case, dtype, dropout):
    """Compare a call with the math engine in float32, which has its own tests. Return the largest |out|."""
    q, k, v, grad = case.tensors(dtype)
    results = []
    with block_by_block() as shapes:
        for engine, wide in (("blocks", dtype), ("math", torch.float32)):
            x = leaves(q, k, v, dtype=wide)
            torch.manual_seed(3)
            out = case.run(*x, engine=engine, dropout=dropout)
            results.append([out, *gradients(out, x, grad.to(wide))])
    assert shapes
    tol = {torch.float32: 1e-5, torch.float16: 4e-3}[dtype]
    for name, a, b in zip(("out", *GRADIENTS), *results, strict=True):
        close(f"{name} of {case}", a, b, tol, floor=1.0)
    return float(results[0][0].abs().max())


LONGER = Case(DilatedPattern([(64, 1), (100, 3)]), 1, 150, 2, 1, 24, causal=True)


# bfloat16 is tested in tests/attention/test_gpu.py: the interpreter would multiply its bits as integers
@pytest.mark.parametrize(
    "dtype, causal",
    [
        (torch.float32, False),
        (torch.float16, True),
        pytest.param(torch.float32, True, marks=pytest.mark.slow),
        pytest.param(torch.float16, False, marks=pytest.mark.slow),
    ],
)
def test_dtypes(interpreter, dtype, causal):
    assert interpreter.run(1, one_call, LONGER.but(causal=causal), dtype, 0.0)[0] > 0


@pytest.mark.parametrize("causal", [pytest.param(False, marks=pytest.mark.slow), True])
def test_dropout(interpreter, causal):
    """The mask is the same as in every other engine: a hash of branch, head and global positions."""
    interpreter.run(1, one_call, LONGER.but(causal=causal, batch=2, seq_len=110, lengths=(110, 50)), torch.float32, 0.4)


@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
def test_any_scale(interpreter, scale):
    interpreter.run(1, one_call, LONGER.but(scale=scale, seq_len=40), torch.float32, 0.0)


@pytest.mark.parametrize("head_dim", [1, 17, 48])
def test_head_dims(interpreter, head_dim):
    interpreter.run(1, one_call, LONGER.but(head_dim=head_dim, seq_len=40), torch.float32, 0.0)


def on_two_ranks(rank, group, dropout):
    """Return the largest difference of out and gradients between this rank and a run on one rank with the same seed."""
    from lightning_dilated.sequence import SequenceGroup

    pattern, n = DilatedPattern([(8, 1), (None, 3)]), 18
    generator = torch.Generator().manual_seed(0)
    *full, grad = (torch.randn(1, n, 2, 8, generator=generator) for _ in range(4))

    def call(inputs, grad, **options):
        torch.manual_seed(5)
        inputs = leaves(*inputs)
        out = dilated_attention(*inputs, pattern, dropout=dropout, engine="triton", **options)
        return [out, *gradients(out, inputs, grad)]

    sequence = SequenceGroup(group)
    local = [p for run in sequence.shard(n).ranges(rank) for p in run]
    got = call([x[:, local] for x in full], grad[:, local], sequence=sequence)
    sequence.close()
    assert all(x.isfinite().all() for x in got)
    return max(float((a - b[:, local]).abs().max()) for a, b in zip(got, call(full, grad), strict=True))


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.5])
def test_on_two_ranks(interpreter, dropout):
    assert max(interpreter.run(2, on_two_ranks, dropout)) < 1e-5


def in_chunks(rank, group):
    """Run both passes of a stream where triton attends to carried rows, and a different engine attends to the rest."""
    from unittest import mock

    from lightning_dilated.attention.backends import TRITON
    from lightning_dilated.ext.streams import chunk_call
    from lightning_dilated.kernels import dense

    from ..ext.streams.chunks import Chunks

    case = Case(DilatedPattern([(16, 1), (None, 3)]), 1, 90, 4, 2, 8, causal=True)
    q, k, v, grad = case.tensors(torch.float32)
    want = case.run(q, k, v, engine="math")
    expected = want, *torch.autograd.grad(want, (q, k, v), grad)
    chunks = Chunks(case, 40)
    chunks.options["engine"] = "math"
    with (
        mock.patch.object(chunk_call, "triton_up_to", lambda *unused: (1e9, 1e9)),
        mock.patch.object(dense, "forward", wraps=dense.forward) as forward,
        mock.patch.object(dense, "backward", wraps=dense.backward) as backward,
    ):
        got = chunks.run(q, k, v, grad)
    assert TRITON.forward_into is not None and forward.call_count and backward.call_count
    for name, a, b in zip(("out", *GRADIENTS), got, expected, strict=True):
        close(name, a, b, 1e-5, floor=1.0)


def test_carried_rows_of_a_stream(interpreter):
    interpreter.run(1, in_chunks)


def chained(rank, group, number, examples, device="cpu"):
    """Run the forward over the keys in several calls, each from the state of the previous call, with pads and dropout.

    Compare with one call over all keys, scattered to the same rows.
    """
    from lightning_dilated.kernels.dense import Drop, Into, forward

    torch.use_deterministic_algorithms(True)
    chosen, generator = random.Random(number), torch.Generator(device).manual_seed(number)
    for _ in range(examples):
        groups, heads, n, m = (chosen.randint(1, most) for most in (2, 2, 40, 60))
        dim = chosen.choice([5, 16, 20])
        q, k, v = (torch.randn(groups, heads, rows, dim, generator=generator, device=device) for rows in (n, m, m))
        at = torch.randperm(groups * heads * n + 4, generator=generator, device=device)[: groups * heads * n].view(
            groups, heads, n
        )
        batch, all_heads = chosen.choice([(b, h) for b in (1, 2) for h in (1, 2) if (at.numel() + 4) % (b * h) == 0])
        length = (at.numel() + 4) // batch // all_heads
        whole = at.new_zeros(batch, length, all_heads, dim).float(), at.new_zeros(batch, all_heads, length).float()
        whole[1].fill_(-torch.inf)
        pads, dropped = chosen.choice([0, 0, 3]), chosen.random() < 0.5
        numbers = torch.arange(groups * heads, device=device).view(groups, heads)
        keys = torch.arange(m, device=device).expand(groups, heads, m)
        drop = lambda part: Drop(7, 2**31, 2.0, numbers, numbers, at, part.contiguous()) if dropped else None  # noqa: B023, E731
        cuts = sorted({0, m, chosen.randint(0, m), chosen.randint(0, m)})
        for first, stop in itertools.pairwise(cuts):
            state = Into(*whole, at, pads if stop == m else 0)
            forward(q, k[:, :, first:stop], v[:, :, first:stop], False, 0.3, drop(keys[..., first:stop]), into=state)
        kv = [torch.cat([x, x.new_zeros(groups, heads, pads, dim)], 2) for x in (k, v)]
        out, lse = forward(q, *kv, False, 0.3, drop(torch.cat([keys, keys[..., :1].expand(groups, heads, pads)], 2)))
        out_rows, lse_rows = whole[0].view(-1, dim), whole[1].transpose(1, 2).flatten()
        torch.testing.assert_close(out_rows[at], out, atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(lse_rows[at], lse, atol=2e-6, rtol=2e-6)
        assert int(lse_rows.isneginf().sum()) == 4  # rows that were not addressed are unchanged


RANDOM = {random_calls: (4, 60), pipelined_calls: (8, 100), chained: (6, 100)}


@pytest.mark.parametrize("calls, number, examples", few_and_many(RANDOM))
def test_random(interpreter, calls, number, examples):
    interpreter.run(1, calls, number, examples)


@pytest.mark.gpu
def test_chain_on_a_gpu():
    chained(0, None, 2, 20, "cuda")
