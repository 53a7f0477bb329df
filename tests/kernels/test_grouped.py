"""Grouped launches in Triton's interpreter: the op against the oracle, and the launches per call."""

import contextlib
import itertools
import random
from dataclasses import replace

import pytest
import torch

from lightning_dilated import Branch, DilatedPattern, dilated_attention
from lightning_dilated.attention import resolve
from lightning_dilated.attention.executors import grouped
from lightning_dilated.attention.executors.tables import bits_of
from lightning_dilated.pattern.rows import check_padding, without_global
from lightning_dilated.sequence import SequenceGroup

from ..attention.reference import GRADIENTS, close, gradients, leaves
from ..attention.strategies import LAYOUTS, Case
from ..attention.test_equals_oracle import check
from .test_combine import drawn, sizes_put_back


class Launched:
    """Wraps a kernel and records its name at every launch."""

    def __init__(self, kernel, name, launches):
        self.kernel, self.name, self.launches = kernel, name, launches

    def __getitem__(self, grid):
        self.launches.append(self.name)
        return self.kernel[grid]


@contextlib.contextmanager
def counted():
    """Yield two lists that grow with the calls: kernel names by launch, and whether each pass was grouped."""
    from lightning_dilated.kernels import combine, dense
    from lightning_dilated.kernels import grouped as jobs

    kernels = {
        dense: ["_forward", "_delta", "_backward_keys", "_backward_rows"],
        combine: ["_merge", "_sum", "_grouped_merge", "_grouped_sum"],
        jobs: ["_grouped_forward", "_grouped_delta", "_grouped_keys", "_grouped_rows", "_positions"],
    }
    launches, plans, real = [], [], grouped.plan

    def plan(*args):
        plans.append((works := real(*args)) is not None)
        return works

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "plan", plan)
        for module, names in kernels.items():
            for name in names:
                patch.setattr(module, name, Launched(getattr(module, name), name, launches))
        yield launches, plans


def small_tiles(chosen):
    """Set small tiles, so that loops have several iterations."""
    from lightning_dilated.kernels import combine, dense

    sizes = [(chosen.choice([16, 32]), chosen.choice([16, 32]), 4, 1) for _ in range(2)]
    dense.WIDE, dense.WIDE_BACKWARD = dict.fromkeys([16, 32, 64], sizes[0]), dict.fromkeys([16, 32, 64], sizes[1])
    combine.CONFIG = chosen.choice([8, 16, 64]), 4


@sizes_put_back()
def random_calls(rank, group, number, examples):
    """Return the number of random calls that were grouped."""
    torch.use_deterministic_algorithms(True)  # torch.empty returns NaN
    chosen = random.Random(number)
    with counted() as (_, plans):
        for _ in range(examples):
            small_tiles(chosen)
            case = replace(drawn(chosen), layout=chosen.choice(LAYOUTS))
            if case.batch == 1 and chosen.random() < 0.5:  # several documents, possibly empty
                cuts = sorted(chosen.randint(0, case.seq_len) for _ in range(5))
                case = replace(case, documents=(0, *cuts, case.seq_len))
            with pytest.MonkeyPatch.context() as patch:
                if chosen.random() < 0.3:  # pretend that rows are 2**31 elements apart
                    patch.setattr("lightning_dilated.kernels.grouped.Work.far", lambda *args: True)
                check(case, "triton", torch.float32, 1e-5)
    return sum(plans)


@pytest.mark.parametrize("number, examples", [(0, 5), pytest.param(1, 80, marks=pytest.mark.slow)])
def test_random(interpreter, number, examples):
    assert interpreter.run(1, random_calls, number, examples)[0] > 0.9 * examples


def without_global_tokens(case):
    """Remove global tokens, because the kernels that read lengths on the device do not support them."""
    pattern = without_global(case.pattern)
    return replace(case, pattern=DilatedPattern([(8, 1)]) if pattern is None else pattern)


def lengths_on_the_device(patch, replacement=None):
    """Run calls with lengths or documents on the kernels that read lengths on the device.

    `replacement`: lengths on the device, in place of the call's.
    """

    def alone(code, shape, kv_heads, dtype, device, lengths, bounds, environment):
        limits = torch.tensor(replacement or lengths or [], dtype=torch.int32)
        if bounds is not None:
            limits = torch.frombuffer(bytearray(bounds), dtype=torch.int32)
        bits = 0 if bounds is None else bits_of(len(limits) - 1)
        whole = resolve._cut(code, shape, kv_heads, dtype, device, bits, environment)
        assert whole is not None
        return resolve.Resolved(whole.cut(limits))

    patch.setattr(resolve, "_alone", alone)


@sizes_put_back()
def random_lengths(rank, group, number, examples):
    """Check samples of random lengths (0 included) with tables for whole samples. Count calls with attended pads."""
    torch.use_deterministic_algorithms(True)
    chosen, padded = random.Random(number), 0
    for _ in range(examples):
        small_tiles(chosen)
        case = replace(without_global_tokens(drawn(chosen)), layout=chosen.choice(LAYOUTS), documents=None)
        if chosen.random() < 0.5:
            branches = [
                Branch(b.segment_length, b.dilation_rate, heads=b.heads, offset=b.offset) for b in case.pattern.branches
            ]
            pattern = replace(case.pattern, branches=tuple(branches), padding="attended")
            with contextlib.suppress(ValueError):  # some lengths do not allow it
                check_padding(pattern, case.seq_len)
                case, padded = replace(case, pattern=pattern), padded + 1
        lengths = tuple(
            chosen.choice([0, n, case.seq_len]) for n in chosen.choices(range(case.seq_len + 1), k=case.batch)
        )
        with pytest.MonkeyPatch.context() as patch:
            lengths_on_the_device(patch)
            check(replace(case, lengths=lengths), "triton", torch.float32, 1e-5)
    return padded


@pytest.mark.parametrize("number, examples", [(0, 2), pytest.param(1, 100, marks=pytest.mark.slow)])
def test_lengths_on_the_device(interpreter, number, examples):
    assert interpreter.run(1, random_lengths, number, examples)[0] >= examples // 8


@sizes_put_back()
def random_documents(rank, group, number, examples):
    """Check packed documents of random sizes (0 included) with tables for whole rows. Count calls with attended pads."""
    torch.use_deterministic_algorithms(True)
    chosen, padded = random.Random(number), 0
    for _ in range(examples):
        small_tiles(chosen)
        case = replace(without_global_tokens(drawn(chosen)), layout=chosen.choice(LAYOUTS), batch=1, lengths=None)
        if chosen.random() < 0.3:
            branches = [
                Branch(b.segment_length, b.dilation_rate, heads=b.heads, offset=b.offset) for b in case.pattern.branches
            ]
            pattern = replace(case.pattern, branches=tuple(branches), padding="attended")
            with contextlib.suppress(ValueError):  # some lengths do not allow it
                check_padding(pattern, case.seq_len)
                case, padded = replace(case, pattern=pattern), padded + 1
        cuts = sorted(chosen.randint(0, case.seq_len) for _ in range(chosen.choice([0, 1, 3, 6])))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lightning_dilated.attention.executors.fused.OVERLAP", 100)
            lengths_on_the_device(patch)
            if chosen.random() < 0.3:
                patch.setattr("lightning_dilated.kernels.grouped.Work.far", lambda *args: True)
            check(replace(case, documents=(0, *cuts, case.seq_len)), "triton", torch.float32, 1e-5)
    return padded


@pytest.mark.parametrize("number, examples", [(0, 2), pytest.param(1, 20, marks=pytest.mark.slow)])
def test_documents_on_the_device(interpreter, number, examples):
    assert interpreter.run(1, random_documents, number, examples)[0] >= examples // 10


@sizes_put_back()
def beyond_documents(rank, group):
    """Check a row that is longer than its documents: the tail must be 0. Also check invalid bounds."""
    torch.use_deterministic_algorithms(True)
    case = Case(DilatedPattern([(8, 1), (None, 3)]), 1, 24, 2, 1, 8, causal=True)
    q, k, v, grad = case.tensors(torch.float32)

    def run(bounds, n):
        x = leaves(*(t[:, :n] for t in (q, k, v)))
        out, lse = replace(case, documents=bounds).run(*x, engine="triton", return_lse=True)
        return [lse.transpose(1, 2), out, *gradients(out, x, grad[:, :n])]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_dilated.attention.executors.fused.OVERLAP", 100)
        lengths_on_the_device(patch)
        (lse, *longer), (want_lse, *want) = run((0, 5, 5, 14), 24), run((0, 5, 5, 14), 14)
        for a, b in zip((lse, *longer), (want_lse, *want), strict=True):
            assert torch.equal(a[:, :14], b)
        assert all((x[:, 14:] == 0).all() for x in longer) and (lse[:, 14:] == -torch.inf).all()
        assert all(x.isfinite().all() for x in run((7, 9, 2**31 - 1), 24)[1:])
        run((20, 3, 24, 5), 24)  # results are undefined, but no other memory is written


def test_slots_hold_the_tiles_of_any_documents():
    """In thousands of random packings, every tile has a program, and the number of programs keeps its bound."""
    from lightning_dilated.kernels.grouped import slots

    chosen, tight = random.Random(0), 0
    for _ in range(4000):
        tokens, tile = chosen.randint(1, 200), chosen.choice([1, 4, 16])
        t = chosen.choice([0, 0, chosen.randrange(40)])
        w = min(chosen.choice([t + 1, 8, 16, 64, 500, chosen.randint(1, 60)]), tokens + t)
        r, t = chosen.choice([1, 2, 4, chosen.randint(1, 70)]), t % w
        a, b, c = slots(w, t, r, tile, tokens)
        cuts = sorted(chosen.choice([0, tokens, chosen.randint(0, tokens)]) for _ in range(chosen.randint(0, 5)))
        begins = [x // a + x // b + c * d for d, x in enumerate((0, *cuts, tokens))]
        for (low, high), first, after in zip(itertools.pairwise((0, *cuts, tokens)), begins, begins[1:], strict=False):
            # the head with the most rows determines which segment a program serves
            index = range(t, t + high - low)
            most = [-(-len([i for i in index if i // w == s]) // r) for s in range(-(-(t + high - low) // w))]
            tiles = sum(-(-rows // tile) for rows in most)
            assert tiles <= after - first
            tight += 0 < tiles == after - first
    assert tight > 1000


def rows_of_buffer(rank, group, number, examples):
    """In random packings, every row has one slot in the buffer and is computed once."""
    from lightning_dilated.attention.executors.tables import packed_jobs, work_of
    from lightning_dilated.attention.spans import Span
    from lightning_dilated.kernels import grouped as jobs
    from lightning_dilated.pattern.rows import used_index

    chosen = random.Random(number)
    for _ in range(examples):
        case = drawn(chosen)
        n, cuts = case.seq_len, sorted(chosen.randint(0, case.seq_len) for _ in range(chosen.randint(0, 9)))
        bits = bits_of(len(cuts) + 1)
        bounds = torch.full((2**bits + 1,), n, dtype=torch.int32)
        bounds[: len(cuts) + 1] = torch.tensor([0, *cuts])
        window = grouped.HeadWindow(case.pattern, case.heads, case.kv_heads, (0, case.heads))
        call = grouped.Call(None, window, False, 1.0)
        work = work_of(call, [Span(0, 1, 0, n)], torch.device("cpu"), (jobs.PREPARED,), 16, True, bits)
        slots = torch.full((work.rows,), -1)
        if work.rows:
            place = work.place(jobs.PREPARED, bounds)
            jobs._positions[(work.grids[jobs.PREPARED].programs,)](slots, *place, BITS=bits, ROWS=jobs.PREPARED)
        table = packed_jobs(window, n, 2**bits)
        want = {}
        for start, stop in itertools.pairwise([0, *cuts, n]):
            for branch in range(len(case.pattern.branches)):
                used = used_index(case.pattern, branch, stop - start, case.heads, case.kv_heads)[1]
                for head, place in used.nonzero().tolist():
                    want.setdefault((head, branch), []).append(start + place)
        got = {}
        for job, after in itertools.pairwise(table.tolist()):
            rows = slots[job[12] : after[12]]
            if (rows >= 0).any():
                got[job[7], job[14]] = rows[rows >= 0].tolist()
        assert got == want, case


@pytest.mark.parametrize("number, examples", [(0, 4), pytest.param(1, 150, marks=pytest.mark.slow)])
def test_rows_of_the_buffer(interpreter, number, examples):
    interpreter.run(1, rows_of_buffer, number, examples)


def test_compiles_without_a_gpu():
    """Compile the kernels: the interpreter accepts variables that change their type between branches, GPUs do not."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lightning_dilated.kernels import combine
    from lightning_dilated.kernels import grouped as jobs

    kinds = dict.fromkeys(("scale", "plain_scale", "keep"), "fp32")
    kinds |= dict.fromkeys(("jobs", "spans", "states", "positions"), "*i64")
    kinds |= dict.fromkeys(
        ("job_of", "first_of", "windows", "lengths", "bounds", "span_of", "entries", "starts"), "*i32"
    )
    kinds |= dict.fromkeys(("lse", "row_lse", "delta", "weights"), "*fp32")
    kinds |= dict.fromkeys(("q", "k", "v", "out", "dq", "dk", "dv", "grad", "second", "parts"), "*bf16")
    tile = {"FAR": False, "LENGTHS": True, "BITS": 5, "ROWS": 32, "DIM": 32, "BLOCK": 32}
    dense = {**tile, "CAUSAL": True, "BAND": False, "DROP": False, "PRECISION": "tf32", "KEYS": 32}
    window = {**dense, "BAND": True}
    out = {"LENGTHS": True, "BITS": 5, "TOKENS": 32, "DIM": 32, "BLOCK": 32}
    for kernel, options in (
        (jobs._grouped_forward, {**dense, "CAUSAL": False, "PADS": True}),
        (jobs._grouped_forward, {**window, "PADS": False}),
        (jobs._grouped_keys, {**window, "CAUSAL": False}),
        (jobs._grouped_keys, window),
        (jobs._grouped_rows, window),
        (jobs._positions, {"BITS": 5, "ROWS": 64}),
        (jobs._grouped_delta, tile),
        (jobs._grouped_keys, dense),
        (jobs._grouped_rows, dense),
        (jobs._grouped_rows, {**dense, "DROP": True, "FAR": True}),
        (combine._grouped_merge, out),
        (combine._grouped_sum, {**out, "ADD": False}),
    ):
        signature = {name: "constexpr" if name in options else kinds.get(name, "i32") for name in kernel.arg_names}
        compiled = triton.compile(ASTSource(kernel, signature, options), target=GPUTarget("cuda", 90, 32))
        assert len(compiled.asm["cubin"]) > 0


def beyond(rank, group):
    """Lengths outside 0..N on the device, with pads and dropout, act like the math engine's lengths 0 and N.

    A launch processes two of the three samples.
    """
    torch.use_deterministic_algorithms(True)
    case = Case(DilatedPattern([(64, 3)], padding="attended"), 3, 11, 1, 1, 8)
    q, k, v, grad = case.tensors(torch.float32)
    results = []
    for engine in ("triton", "math"):
        with pytest.MonkeyPatch.context() as patch, counted() as (launches, _):
            if engine == "triton":
                patch.setattr(grouped, "LIMIT", 2 * q[0].numel())
                lengths_on_the_device(patch, (300, -7, 7))
            x = leaves(q, k, v)
            torch.manual_seed(2)
            out = dilated_attention(*x, case.pattern, lengths=torch.tensor([11, 0, 7]), engine=engine, dropout=0.3)
            results.append([out, *gradients(out, x, grad)])
        assert launches.count("_grouped_forward") == (2 if engine == "triton" else 0)
    for name, a, b in zip(("out", *GRADIENTS), *results, strict=True):
        close(name, a, b, 1e-5, floor=1.0)


@sizes_put_back()
def attended(rank, group, causal):
    """Compare calls in which the softmax counts zero pads."""
    torch.use_deterministic_algorithms(True)
    small_tiles(random.Random(0))
    pattern = DilatedPattern([(8, 1), (16, 4), (64, 8)], offsets="blocked", padding="attended")
    with counted() as (_, plans):
        for scale, lengths in ((None, (45, 27)), (100.0, None)):  # large scores: some rows attend to pads only
            batch = 1 if lengths is None else 2
            case = Case(pattern, batch, 45, 4, 4, 8, scale=scale, causal=causal, lengths=lengths)
            assert case.counts()[1].any() != causal
            check(case, "triton", torch.float32, 1e-5 if scale is None else 1e-3)
    assert all(plans)


@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_attended_pads(interpreter, causal):
    interpreter.run(1, attended, causal)


@sizes_put_back()
def dropped(rank, group, case, on_the_device):
    """Compare dropout with the dropout of the math engine, which has its own tests."""
    torch.use_deterministic_algorithms(True)
    small_tiles(random.Random(1))
    q, k, v, grad = case.tensors(torch.float32)
    results = []
    for engine in ("triton", "math"):
        with pytest.MonkeyPatch.context() as patch, counted() as (launches, _):
            if on_the_device and engine == "triton":
                lengths_on_the_device(patch)
            x = leaves(q, k, v)
            torch.manual_seed(3)
            out = case.run(*x, engine=engine, dropout=0.4)
            results.append([out, *gradients(out, x, grad)])
        assert launches.count("_grouped_rows") == (engine == "triton")
    for name, a, b in zip(("out", *GRADIENTS), *results, strict=True):
        close(f"{name} of {case}", a, b, 1e-5, floor=1.0)


LONGER = Case(DilatedPattern([(16, 1), (40, 3)]), 1, 60, 4, 2, 24)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"batch": 2, "lengths": (60, 41)}, marks=pytest.mark.slow),
        pytest.param({"documents": (0, 9, 9, 41, 60), "causal": True}, marks=pytest.mark.slow),
    ],
    ids=["lengths", "documents"],
)
@pytest.mark.parametrize("on_the_device", [False, True])
def test_dropout(interpreter, changes, on_the_device):
    interpreter.run(1, dropped, LONGER.but(**changes), on_the_device)


def on_ranks(rank, group, dropout):
    """Return the largest errors of out and gradients on this rank, where gradients of other ranks are added."""
    torch.use_deterministic_algorithms(True)
    n, pattern = 23, DilatedPattern([(4, 1), (9, 2), (None, 3)])
    generator = torch.Generator().manual_seed(1)
    *full, grad = (torch.randn(1, n, heads, 8, generator=generator) for heads in (2, 1, 1, 2))

    def call(engine, inputs, grad, **options):
        torch.manual_seed(5)
        inputs = leaves(*inputs)
        out = dilated_attention(*inputs, pattern, causal=True, dropout=dropout, engine=engine, **options)
        return [out, *gradients(out, inputs, grad)]

    sequence = SequenceGroup(group, exchange="gather")
    local = [p for run in sequence.shard(n).ranges(rank) for p in run]
    with counted() as (launches, plans):
        got = call("triton", [x[:, local] for x in full], grad[:, local], sequence=sequence)
    sequence.close()
    assert all(plans) and launches.count("_grouped_sum") == 2
    assert all(x.isfinite().all() for x in got)  # Python's max() could drop a NaN
    return max(float((a - b[:, local]).abs().max()) for a, b in zip(got, call("math", full, grad), strict=True))


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.4])
def test_on_two_ranks(interpreter, dropout):
    assert max(interpreter.run(2, on_ranks, dropout)) < 1e-5


def launches_of(rank, group, documents):
    with counted() as (launches, _):
        check(LONGER.but(heads=2, kv_heads=1, documents=documents, causal=True), "triton", torch.float32, 1e-5)
    return launches


@pytest.mark.parametrize("documents", [None, (0, 7, 20, 21, 33, 40, 60)])
def test_documents_add_no_launches(interpreter, documents):
    assert sorted(interpreter.run(1, launches_of, documents)[0]) == sorted(
        [
            "_grouped_forward",
            "_grouped_merge",
            "_grouped_delta",
            "_grouped_keys",
            "_grouped_rows",
            *["_grouped_sum"] * 2,  # one for dk and dv, one for dq
        ]
    )


def not_grouped(rank, group):
    """Return the launches of a call above the size limit, and of a call with much overlap."""
    with counted() as (launches, plans):
        check(LONGER.but(seq_len=20, pattern=DilatedPattern([(8, 1)] * 3)), "triton", torch.float32, 1e-5)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grouped, "LIMIT", 10)
            check(LONGER.but(seq_len=20), "triton", torch.float32, 1e-5)
    assert plans and not any(plans)
    return launches


def test_large_calls_go_block_by_block(interpreter):
    launches = interpreter.run(1, not_grouped)[0]
    assert "_forward" in launches and not any("grouped" in name for name in launches)


def narrow(rank, group):
    """Check float16, which has its own tiles. bfloat16 needs a GPU: the interpreter multiplies its bits as integers."""
    q, k, v, grad = LONGER.tensors(torch.float16)
    results = []
    for engine, dtype in (("triton", torch.float16), ("math", torch.float32)):
        with counted() as (launches, _):
            x = leaves(q, k, v, dtype=dtype)
            out = LONGER.run(*x, engine=engine)
            results.append([out, *gradients(out, x, grad.to(dtype))])
        assert launches.count("_grouped_rows") == (engine == "triton")
    for name, a, b in zip(("out", *GRADIENTS), *results, strict=True):
        close(name, a, b, 4e-3, floor=1.0)


@pytest.mark.parametrize("calls", [beyond_documents, beyond, pytest.param(narrow, marks=pytest.mark.slow)])
def test_in_the_interpreter(interpreter, calls):
    interpreter.run(1, calls)
