"""The branches' parts combined by Triton, in its interpreter: the op against the oracle, with every stretch length."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated import Branch, DilatedPattern, dilated_attention
from lightning_dilated.attention import fused
from lightning_dilated.attention.oracle import oracle
from lightning_dilated.pattern.rows import blocks
from lightning_dilated.sequence import SequenceGroup

from ..attention.strategies import Case
from ..attention.test_equals_oracle import check
from ..pattern.strategies import patterns


def drawn(chosen):
    """A random call, small and rich: the interpreter takes about a second for one."""
    heads = chosen.choice([1, 2]) * (kv_heads := chosen.choice([1, 2]))
    batch, n = chosen.choice([1, 1, 2]), chosen.randint(3, 70)
    branches = []
    for _ in range(chosen.randint(1, 3)):
        width = chosen.choice([None, 8, 16, chosen.randint(2, 20)])
        shift = 0 if width is None else chosen.choice([0, 0, chosen.randrange(width)])
        some = chosen.choice([None, None, tuple(sorted(chosen.sample(range(heads), chosen.randint(1, heads))))])
        branches.append(Branch(width, chosen.randint(1, 4), shift=shift, heads=some))
    pattern = DilatedPattern(branches, offsets=chosen.choice(["interleaved", "blocked"]))
    packed, padded = batch == 1 and chosen.random() < 0.4, batch == 2 and chosen.random() < 0.5
    return Case(
        pattern, batch, n, heads, kv_heads, chosen.choice([5, 8, 16]), chosen.random() < 0.5,
        lengths=(n - 2, n) if padded else None, documents=(0, n // 3, n // 2, n) if packed else None,
    )  # fmt: skip


def random_calls(rank, group, number, examples):
    """How many of the random calls took the kernels, and the most stretches; memory that nobody wrote is NaN."""
    from lightning_dilated.kernels import combine

    torch.use_deterministic_algorithms(True)  # fills what torch.empty makes
    chosen, taken, stretches, real = random.Random(number), [], [], fused.layout

    def layout(*args):
        stretches.append(len(real(*args).stretches))
        return real(*args)

    fused.layout = layout
    for _ in range(examples):
        case, combine.CONFIG = drawn(chosen), (chosen.choice([8, 16, 64]), 4)
        fused.HELD = chosen.choice([3, 8, 20, 10**6]) * case.batch * case.heads * case.head_dim
        taken.append(fused.serves(case.pattern, case.tensors(torch.float32)[0]))
        check(case, "math", torch.float32, 1e-5)
    return sum(taken), max(stretches)


@pytest.mark.parametrize("number, examples", [(0, 12), pytest.param(1, 150, marks=pytest.mark.slow)])
def test_random(interpreter, number, examples):
    taken, stretches = interpreter.run(1, random_calls, number, examples)[0]
    assert taken > examples // 2 and stretches > 2


def attended(rank, group, n):
    """Zero pads that take softmax mass, in stretches."""
    fused.HELD = 8 * 4 * 8
    pattern = DilatedPattern([(8, 1), (16, 4), (64, 8)], offsets="blocked", padding="attended")
    case = Case(pattern, 1, n, 4, 4, 8)
    assert case.counts()[1].any()
    check(case, "math", torch.float32, 1e-5)


@pytest.mark.parametrize("n", [27, 45])
def test_attended_pads(interpreter, n):
    interpreter.run(1, attended, n)


def on_ranks(rank, group, exchange, causal):
    """The largest errors of out, lse and gradients on this rank: parts are added to what other ranks sent."""
    torch.use_deterministic_algorithms(True)
    n, pattern = 23, DilatedPattern([(4, 1), (9, 2), (None, 3)])
    made = torch.Generator().manual_seed(1)
    full = [torch.randn(1, n, heads, 8, generator=made) for heads in (4, 2, 2, 4)]
    *exact, grad = (x.double() for x in full)
    exact = [x.requires_grad_() for x in exact]
    want, _ = oracle(*exact, pattern, causal=causal)
    wanted = [want, *torch.autograd.grad(want, exact, grad)]
    sequence = SequenceGroup(group, exchange=exchange)
    mine = [p for held in sequence.shard(n).ranges(rank) for p in held]
    q, k, v = (x[:, mine].requires_grad_() for x in full[:3])
    fused.HELD = 8 * 4 * 8
    out = dilated_attention(q, k, v, pattern, causal=causal, engine="math", sequence=sequence)
    got = [out, *torch.autograd.grad(out, (q, k, v), full[3][:, mine])]
    sequence.close()
    assert all(x.isfinite().all() for x in got)  # max() of Python would lose a NaN
    return max(float((a.double() - b[:, mine]).abs().max()) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("exchange", ["gather", "switch", "ring"])
def test_on_two_ranks(interpreter, exchange, causal):
    assert max(interpreter.run(2, on_ranks, exchange, causal)) < 1e-5


def with_nan(rank, group):
    """Where lse is NaN and where it is -inf, with the kernels and without."""
    q, found = torch.randn(1, 20, 2, 8, generator=torch.Generator().manual_seed(0)), []
    q[0, 5] = float("nan")
    for fused.OVERLAP in (0.0, 2.5):
        _, lse = dilated_attention(q, q, q, DilatedPattern([(4, 1), (8, 2)]), engine="math", return_lse=True)
        found.append((lse.isnan(), lse == -torch.inf))
    return found


def test_a_nan_shows(interpreter):
    plain, kernels = interpreter.run(1, with_nan)[0]
    assert torch.equal(plain[0], kernels[0]) and torch.equal(plain[1], kernels[1]) and plain[0].any()


def test_segments_wider_than_32_bits():
    """A shard of a longer document: its one segment is as wide as the document."""
    part = blocks(DilatedPattern([(None, 3)]), 2**31, 2, 2, (5, 105))
    table = fused.entries(part, 2, False, torch.device("cpu"), 100).table
    assert (table[:, 4] <= 105).all() and (table[:, 4] >= table[:, 2] + (table[:, 5] - 1) * 3 + 1 - table[:, 2]).all()


def narrow_types(rank, group, dtype):
    """(largest difference from the same call merged block by block in torch, largest value), of out and gradients."""
    made = torch.Generator().manual_seed(2)
    q, k, v, grad = (torch.randn(1, 40, 2, 16, generator=made).to(dtype) for _ in range(4))
    pattern, found = DilatedPattern.longnet([8, 16, 40], [1, 2, 4]), []
    for overlap in (0.0, 2.5):
        fused.OVERLAP = overlap
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = dilated_attention(*leaves, pattern, engine="math")
        found.append([out, *torch.autograd.grad(out, leaves, grad)])
    return [(float((a - b).abs().max()), float(a.abs().max())) for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize("dtype, rounding", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_narrow_types(interpreter, dtype, rounding):
    for worst, largest in interpreter.run(1, narrow_types, dtype)[0]:
        assert worst <= 4 * rounding * largest


@given(patterns(4, 4), st.integers(1, 80), st.integers(1, 90), st.booleans())
@settings(max_examples=200)
def test_layout_has_every_row_once(pattern, seq_len, held, part):
    """Stretches and wide segments together have the rows of the undivided blocks, each once."""
    of = (seq_len // 3, seq_len) if part else (0, seq_len)
    key = pattern, seq_len, 4, 4, (0, 4), False
    made = fused.layout(key, of, held)
    assert [s.start for s in made.stretches] + [of[1] - of[0]] == [0] + [s.stop for s in made.stretches]
    got = [row for b in made.wide for row in rows_of(b)]
    for stretch in made.stretches:
        inside = [row for b in stretch.blocks for row in rows_of(b)]
        assert all(stretch.start <= p < stretch.stop for *_, p in inside)
        got += inside
    want = [row for b in blocks(pattern, seq_len, 4, 4, of) for row in rows_of(b)]
    assert sorted(got) == sorted(want)


def rows_of(b):
    """(branch, head, position) of a block's rows."""
    return [
        (b.branch, b.head + j * b.head_step, b.first + s * b.segment_stride + j * b.position_step + i * b.row_stride)
        for s in range(b.segments)
        for j in range(b.heads)
        for i in range(b.rows)
    ]


def test_what_is_missing(monkeypatch):
    from lightning_dilated import kernels

    assert "not cpu" in kernels.why_not(torch.device("cpu"))
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(kernels, "interpreted", lambda: True)
    kernels._missing.cache_clear()
    try:
        assert "gcc or clang" in kernels.why_not(torch.device("cpu"))
    finally:
        kernels._missing.cache_clear()


@pytest.mark.parametrize(
    "rates, served", [([1, 2, 4, 8, 16], True), ([1] * 2, True), ([1] * 3, False), ([1, 1, 2], True), ([2] * 6, False)]
)
def test_what_overlaps_much_is_not_held(rates, served, monkeypatch):
    monkeypatch.setattr("lightning_dilated.kernels.available", lambda device: True)
    pattern = DilatedPattern([(64, r) for r in rates])
    assert fused.serves(pattern, torch.zeros(1, 4, 2, 8)) == served
    assert not fused.serves(pattern, torch.zeros(1, 4, 2, 8, dtype=torch.float64))
