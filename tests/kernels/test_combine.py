"""Triton combines the parts of branches in its interpreter: the op against the oracle, with any stretch length."""

import contextlib
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated import Branch, DilatedPattern, Global, Window, dilated_attention
from lightning_dilated.attention import resolve
from lightning_dilated.attention.executors import HeadWindow, fused
from lightning_dilated.attention.executors import fused as stretches
from lightning_dilated.attention.executors.tables import entries
from lightning_dilated.attention.oracle import oracle
from lightning_dilated.pattern.rows import blocks
from lightning_dilated.sequence import SequenceGroup

from ..attention.strategies import Case
from ..attention.test_equals_oracle import check
from ..examples import examples
from ..pattern.strategies import patterns


def drawn(chosen):
    """Draw a small call with many features, because the interpreter needs about a second for a call."""
    heads = chosen.choice([1, 2]) * (kv_heads := chosen.choice([1, 2]))
    batch, n = chosen.choice([1, 1, 2]), chosen.randint(3, 70)
    branches = []
    for _ in range(chosen.randint(1, 3)):
        width = chosen.choice([None, 8, 16, chosen.randint(2, 20)])
        if chosen.random() < 0.2:
            branches.append(Window(chosen.choice([1, 3, 8, chosen.randint(1, 40)]), chosen.choice([1, 1, 2, 3])))
            continue
        shift = 0 if width is None else chosen.choice([0, 0, chosen.randrange(width)])
        some = chosen.choice([None, None, tuple(sorted(chosen.sample(range(heads), chosen.randint(1, heads))))])
        branches.append(Branch(width, chosen.randint(1, 4), shift=shift, heads=some))
    rows = lambda b: 1 if isinstance(b, Window) else len(b.heads or range(heads)) / heads / b.dilation_rate  # noqa: E731
    while sum(map(rows, branches)) > fused.OVERLAP:  # more rows would not be computed in fused calls
        branches.pop()
    if chosen.random() < 0.2:  # at any index: with dropout, it changes the masks of later branches
        branches.insert(chosen.randint(0, len(branches)), Global(chosen.choice([1, 3, n // 2 + 1])))
    pattern = DilatedPattern(branches, offsets=chosen.choice(["interleaved", "blocked"]))
    packed, padded = batch == 1 and chosen.random() < 0.4, batch == 2 and chosen.random() < 0.5
    return Case(
        pattern, batch, n, heads, kv_heads, chosen.choice([5, 8, 16]), chosen.random() < 0.5,
        lengths=(n - 2, n) if padded else None, documents=(0, n // 3, n // 2, n) if packed else None,
    )  # fmt: skip


@contextlib.contextmanager
def sizes_put_back():
    """Restore the default sizes of programs and stretches for the next test in this process."""
    from lightning_dilated.kernels import combine, dense

    sizes = {combine: ("MERGE", "SUM", "CONFIG"), dense: ("WIDE", "WIDE_BACKWARD")}
    sizes[fused] = ("FORWARD", "DENSE", "THIN", "ONE_PIECE", "OVERLAP", "layout", "_result")
    with pytest.MonkeyPatch.context() as patch:
        for module, names in sizes.items():
            for name in names:
                patch.setattr(module, name, getattr(module, name))
        yield


def hold(*sizes):
    """Set the limits of stretches: for the forward, the backward of dense and of thin branches, and undivided calls."""
    fused.FORWARD, fused.DENSE, fused.THIN, fused.ONE_PIECE = sizes


def leaves(stretch):
    """Return the innermost stretches, in which parts are combined."""
    return [stretch] if not stretch.inner else [leaf for inner in stretch.inner for leaf in leaves(inner)]


@sizes_put_back()
def random_calls(rank, group, number, examples):
    """Return counts over random calls: calls with kernels, results that reuse a part's memory, and the most stretches.

    Uninitialized memory is NaN.
    """
    from lightning_dilated.kernels import combine

    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN
    chosen, taken, cut, real, result, in_place = random.Random(number), [], [], fused.layout, fused._result, []

    def layout(*args):
        cut.append(len(leaves(real(*args))))
        return real(*args)

    def counted(*args):
        combined = result(*args)
        in_place.append(args[3] is not None and combined.data_ptr() == args[3].data_ptr())
        return combined

    fused.layout, fused._result = layout, counted
    for i in range(examples):
        case, combine.MERGE, combine.SUM = drawn(chosen), *((chosen.choice([8, 16, 64]), 4) for _ in range(2))
        if i % 3 == 0:  # one branch has every row
            pattern = replace(case.pattern, branches=(Branch(8, 1), *case.pattern.branches[:2]))
            whole = {"seq_len": (case.seq_len + 7) // 8 * 8, "kv_heads": case.heads, "lengths": None, "documents": None}
            case = replace(case, pattern=pattern, **whole)
        unit = case.batch * case.heads * case.head_dim
        hold(*(chosen.choice([3, 8, 20, 10**6]) * unit for _ in range(4)))
        taken.append(fused.serves(case.pattern, case.tensors(torch.float32)[0]))
        check(case, chosen.choice(["math", "auto"]), torch.float32, 1e-5)
    return sum(taken), sum(in_place), max(cut)


@pytest.mark.parametrize("number, examples", [(0, 6), pytest.param(1, 150, marks=pytest.mark.slow)])
def test_random(interpreter, number, examples):
    taken, in_place, cut = interpreter.run(1, random_calls, number, examples)[0]
    assert taken > examples // 2 and in_place and cut > 2


@sizes_put_back()
def attended(rank, group, n):
    """Compare a call in stretches with the oracle. The softmax counts zero pads."""
    hold(*[8 * 4 * 8] * 4)
    pattern = DilatedPattern([(8, 1), (16, 4), (64, 8)], offsets="blocked", padding="attended")
    case = Case(pattern, 1, n, 4, 4, 8)
    assert case.counts()[1].any()
    check(case, "math", torch.float32, 1e-5)


@pytest.mark.parametrize("n", [27, 45])
def test_attended_pads(interpreter, n):
    interpreter.run(1, attended, n)


@sizes_put_back()
def on_ranks(rank, group, exchange, causal, branches):
    """Return the largest errors of out, lse and gradients on this rank, where parts of other ranks are added."""
    torch.use_deterministic_algorithms(True)
    n, pattern = 23, DilatedPattern(branches)
    rng = torch.Generator().manual_seed(1)
    full = [torch.randn(1, n, heads, 8, generator=rng) for heads in (2, 1, 1, 2)]
    *exact, grad = (x.double() for x in full)
    exact = [x.requires_grad_() for x in exact]
    want, _ = oracle(*exact, pattern, causal=causal)
    expected = [want, *torch.autograd.grad(want, exact, grad)]
    sequence = SequenceGroup(group, exchange=exchange)
    own_positions = [p for held in sequence.shard(n).ranges(rank) for p in held]
    q, k, v = (x[:, own_positions].requires_grad_() for x in full[:3])
    hold(*[8 * 2 * 8] * 4)
    out = dilated_attention(q, k, v, pattern, causal=causal, engine="math", sequence=sequence)
    got = [out, *torch.autograd.grad(out, (q, k, v), full[3][:, own_positions])]
    sequence.close()
    assert all(x.isfinite().all() for x in got)  # Python's max() could drop a NaN
    return max(float((a.double() - b[:, own_positions]).abs().max()) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("exchange", ["gather", "switch", "ring"])
def test_on_two_ranks(interpreter, exchange, causal):
    """With a dense branch alone, ranks of a switch have no local blocks."""
    for branches in ([(4, 1), (9, 2), (None, 3)], [(None, 1)]):
        assert max(interpreter.run(2, on_ranks, exchange, causal, branches)) < 1e-5


@sizes_put_back()
def samples_apart(rank, group):
    """Check samples that fold into one axis in one branch, but not in the other, which has a short last segment."""
    torch.use_deterministic_algorithms(True)
    case = Case(DilatedPattern([(8, 1), (16, 2)]), 2, 40, 2, 2, 8)
    check(case, "auto", torch.float32, 1e-5)
    hold(*[8 * 2 * 8] * 4)
    check(case, "auto", torch.float32, 1e-5)


def odd_widths(rank, group):
    """Check segments longer than a program, with a width that is no multiple of the rate: residues vary by segment."""
    torch.use_deterministic_algorithms(True)
    for width, tokens in ((205, 620), (401, 802)):
        check(Case(DilatedPattern([(width, 3)]), 1, tokens, 1, 1, 8), "math", torch.float32, 1e-5)


@pytest.mark.parametrize("calls", [samples_apart, odd_widths])
def test_in_the_interpreter(interpreter, calls):
    interpreter.run(1, calls)


@sizes_put_back()
def with_nan(rank, group):
    """Return the positions of NaN and of -inf in lse, with and without the kernels."""
    q, results = torch.randn(1, 20, 2, 8, generator=torch.Generator().manual_seed(0)), []
    q[0, 5] = float("nan")
    for fused.OVERLAP in (0.0, 2.5):
        resolve.forget()
        _, lse = dilated_attention(q, q, q, DilatedPattern([(4, 1), (8, 2)]), engine="math", return_lse=True)
        results.append((lse.isnan(), lse == -torch.inf))
    return results


def test_a_nan_shows(interpreter):
    plain, kernels = interpreter.run(1, with_nan)[0]
    assert torch.equal(plain[0], kernels[0]) and torch.equal(plain[1], kernels[1]) and plain[0].any()


def test_segments_wider_than_32_bits():
    """The table clips a segment to its document's shard, because the segment's width exceeds 32 bits."""
    part = blocks(DilatedPattern([(None, 3)]), 2**31, 2, 2, (5, 105))
    table = entries(part, 2, False, torch.device("cpu"), 0, 100).table
    assert (table[:, 4] <= 105).all() and (table[:, 4] >= table[:, 2] + (table[:, 5] - 1) * 3 + 1 - table[:, 2]).all()


@sizes_put_back()
def narrow_types(rank, group, dtype):
    """Return, for each result, (largest difference from a merge block by block in torch, largest value)."""
    rng = torch.Generator().manual_seed(2)
    q, k, v, grad = (torch.randn(1, 40, 2, 16, generator=rng).to(dtype) for _ in range(4))
    pattern, results = DilatedPattern.longnet([8, 16, 40], [1, 2, 4]), []
    for overlap in (0.0, 2.5):
        fused.OVERLAP = overlap
        resolve.forget()
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = dilated_attention(*leaves, pattern, engine="math")
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
    return [(float((a - b).abs().max()), float(a.abs().max())) for a, b in zip(*results, strict=True)]


@pytest.mark.parametrize("dtype, rounding", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_narrow_types(interpreter, dtype, rounding):
    for worst, largest in interpreter.run(1, narrow_types, dtype)[0]:
        assert worst <= 4 * rounding * largest


@given(
    patterns(4, 4),
    st.integers(1, 80),
    st.integers(1, 90),
    st.integers(1, 90),
    st.booleans(),
    st.integers(0, 3) | st.none(),
)
@settings(max_examples=examples(200))
def test_layout_has_every_row_once(pattern, seq_len, dense, thin, part, own):
    """Stretches contain each row of the undivided blocks once, within their own positions."""
    bounds = (seq_len // 3, seq_len) if part else (0, seq_len)
    laid_out = stretches.layout(HeadWindow(pattern, 4, 4, (0, 4)), seq_len, bounds, (dense, thin), own)
    ends = leaves(laid_out)
    assert [s.start for s in ends] + [bounds[1] - bounds[0]] == [0] + [s.stop for s in ends]
    got = []

    def look(stretch):
        rows = [row for b in stretch.blocks for row in rows_of(b)]
        assert all(stretch.start <= p < stretch.stop for *_, p in rows)
        got.extend(rows)
        for inner in stretch.inner:
            look(inner)

    look(laid_out)
    want = [row for b in blocks(pattern, seq_len, 4, 4, bounds) for row in rows_of(b)]
    assert sorted(got) == sorted(want)


def test_layout_of_the_paper():
    """Dense branches are in short stretches, thin branches in longer ones around them, wide segments in the whole."""
    pattern = DilatedPattern.geometric(2048, 2**17)
    laid_out = stretches.layout(HeadWindow(pattern, 4, 4, (0, 4)), 2**17, (0, 2**17), (2**12, 2**14))
    assert {b.branch for b in laid_out.blocks} == {4, 5, 6} and [s.stop for s in laid_out.inner] == [
        2**14 * i for i in range(1, 9)
    ]
    assert all({b.branch for b in s.blocks} == {1, 2, 3} for s in laid_out.inner)
    assert all(s.stop - s.start == 2**12 and {b.branch for b in s.blocks} == {0} for s in leaves(laid_out))


def rows_of(b):
    """Return [(branch, head, position)] of the rows that a block computes."""
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


def test_a_table_says_where_parts_lie():
    combine = pytest.importorskip("lightning_dilated.kernels.combine")
    cpu, parts = torch.device("cpu"), [torch.zeros(2, 3, 4, 8), torch.zeros(1, 3, 2, 8).transpose(0, 1)]
    weights = [torch.zeros(x.shape[:3]) for x in parts]
    rows = zip(parts, weights, strict=True)
    want = [[x.data_ptr(), *x.stride()[:3], y.data_ptr(), *y.stride()] for x, y in rows]
    assert combine._addresses(parts, weights, cpu).tolist() == want
    assert combine._addresses(parts, (), cpu).tolist() == [[*row[:4], 0, 0, 0, 0] for row in want]
