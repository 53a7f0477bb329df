"""The kernels of hashed attention in Triton's interpreter: results and all gradients equal the oracle."""

from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated.attention import hashed_attention
from lightning_dilated.ext.hashed import lookup
from lightning_dilated.ext.hashed.oracle import oracle

from ...examples import examples
from ..recurrence.test_gated_delta import exact_dots
from .cases import Case, cases, compare

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def forced(tile=None, part=None):
    """Return a context without the torch path, with tiles of `tile` = (lookups, rows) and parts of `part` lookups."""
    from lightning_dilated.ext.hashed import kernels

    context = ExitStack()
    context.enter_context(mock.patch.object(lookup, "parts", None))
    if tile is not None:
        context.enter_context(mock.patch.object(kernels, "tile", lambda *unused: tile))
    if part is not None:
        context.enter_context(mock.patch.object(kernels, "PART", part))
    return context


def results(rank, group, case, tile=None, part=None):
    with forced(tile, part) as context:
        if case.dtype == torch.bfloat16:
            context.enter_context(exact_dots())
        return case.run()


def equal(interpreter, case, *sizes):
    compare(interpreter.run(1, results, case, *sizes)[0], case.by_definition(), TOLERANCES[case.dtype])


SIZES = st.sampled_from([4, 16])
OPTIONS = {"dtype": st.sampled_from([torch.float32, torch.float16]), "tile": st.tuples(SIZES, SIZES), "part": SIZES}


@given(case=cases(5), **OPTIONS)
@settings(max_examples=examples(4), deadline=None)
def test_any_call(interpreter, case, dtype, tile, part):
    """Compute with tiles of several sizes. Programs sum over few lookups, so tiles of rows have several programs."""
    equal(interpreter, replace(case, dtype=dtype), tile, part)


@pytest.mark.slow
@given(case=cases(), **OPTIONS)
@settings(max_examples=examples(100), deadline=None)
def test_many_calls(interpreter, case, dtype, tile, part):
    equal(interpreter, replace(case, dtype=dtype), tile, part)


LONGER = Case((90, 45), padding=3, group=3, dim=20, groups=3, codes=5, latest=9, probes=3)


@pytest.mark.parametrize("change", [
    {},
    {"dtype": torch.bfloat16},
    {"soft": True, "code_scores": False, "kv_heads": 2, "group": 1},
    {"packed": True, "padding": 0, "groups": 1, "codes": 17, "latest": 80, "probes": 2},
], ids=str)  # fmt: skip
def test_several_tiles(interpreter, change):
    equal(interpreter, replace(LONGER, **{"dtype": torch.float32, **change}))


def in_other_order(rank, group, case):
    """Return the results; and again, with NaN in all new memory, and with the programs of each launch in reverse order."""
    from triton.runtime.interpreter import interpreter_builder as builder

    forward, results = builder.set_grid_idx, []
    reverse = lambda *index: forward(*(n - 1 - i for n, i in zip(builder.grid_dim, index, strict=True)))  # noqa: E731
    with forced((16, 16), 16):
        results.append(case.run())
        torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN
        try:
            with mock.patch.object(builder, "set_grid_idx", reverse):
                results.append(case.run())
        finally:
            torch.use_deterministic_algorithms(False)
    return results


@pytest.mark.parametrize("change", [
    {"documents": (24, 11), "padding": 2, "group": 1},
    {"documents": (30, 30), "padding": 0, "probes": 1, "latest": 20},
    {"documents": (20,), "soft": True, "kv_heads": 2, "group": 1},
    {"documents": (40,), "padding": 0, "group": 1, "dim": 16, "groups": 1, "codes": 2, "probes": 2, "dtype": torch.float16},
], ids=str)  # fmt: skip
def test_old_memory_is_not_read_and_no_program_depends_on_another(interpreter, change):
    got, again = interpreter.run(1, in_other_order, replace(LONGER, **{"dtype": torch.float32, **change}))[0]
    for name, x in got.items():
        assert torch.equal(x, again[name]), name


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_and_one(interpreter, tokens):
    equal(interpreter, Case((tokens,) * 2, kv_heads=3, group=3, dtype=torch.float32))


def chosen(case, queries, rows):
    """Return the tensors of a case in which queries and rows have these codes (N,) in each of their groups."""
    tensors = [x.detach() for x in case.tensors()]
    for z, index in zip(tensors[3:5], (queries, rows), strict=True):
        z.abs_().neg_()
        z.scatter_(-1, index.expand(1, -1)[:, :, None, None, None].expand(*z.shape[:-1], 1), 1.0)
    return [x.requires_grad_() for x in tensors]


def codes_are(rank, group, case, queries, rows, part, tile=None):
    """Run a case with these codes; return the results, and the number of tiles that the forward computed."""
    from lightning_dilated.ext.hashed import kernels

    tensors, calls, match = chosen(case, queries, rows), [], kernels._match

    def counted(*args):
        calls.append(0)
        return match(*args)

    with mock.patch.object(Case, "tensors", lambda *unused: tensors), forced(tile, part):
        got = case.run()
        want = case.by_definition()
        with mock.patch.object(kernels, "_match", counted), torch.no_grad():
            hashed_attention(*tensors, **case.settings())
    return got, want, len(calls)


ALL = torch.zeros(200, dtype=torch.int64)
FEW = torch.where(torch.arange(200) % 40 == 0, 1, 0)
#: codes of queries and of rows
CODES = {
    "all equal": (ALL, ALL),
    "no row has the code": (ALL + 1, ALL),
    "few rows for many queries": (ALL + 1, FEW),
    "few queries for many rows": (FEW, ALL),
    "far apart": (torch.arange(200) % 2 * 5, torch.arange(200) % 6),
}


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("latest", [5, 300])
def test_any_codes(interpreter, name, latest):
    case = Case((200,), groups=2, codes=6, latest=latest, dtype=torch.float32)
    got, want, _ = interpreter.run(1, codes_are, case, *CODES[name], 50)[0]
    compare(got, want, 2e-5)


def test_rows_that_no_query_reads_are_skipped(interpreter):
    """A tile of queries with the first and the last code computes the rows of these codes only."""
    rows = torch.arange(400) % 20
    queries = torch.where(torch.arange(400) < 390, 20, torch.arange(400) % 2 * 19)  # 390 queries read nothing
    case = Case((400,), group=1, groups=1, codes=21, latest=30, dtype=torch.float32)
    _, _, calls = interpreter.run(1, codes_are, case, queries, rows, 4096, (16, 16))[0]
    assert calls == 2 * 2  # 20 rows of each code, in tiles of 16


def below_the_floor(rank, group):
    """Two of three queries read only rows with chances of about 1e-31 in each group, which have no gradient."""
    case = Case((30,), groups=2, codes=2, soft=True, dtype=torch.float32)
    tensors = [x.detach().clone() for x in case.tensors()]
    for z, sign in zip(tensors[3:5], (1, -1), strict=True):
        z.div_(10).add_(36 * sign * torch.tensor([1.0, -1.0]))
    tensors[3][:, ::3] *= -1
    tensors[5].sub_(140)  # with a larger score, the null key would have all weight
    with mock.patch.object(Case, "tensors", lambda *unused: [x.requires_grad_() for x in tensors]), forced():
        return case.run(), case.by_definition()


def test_chances_below_the_floor(interpreter):
    got, want = interpreter.run(1, below_the_floor)[0]
    assert all(x.isfinite().all() for x in got.values())
    compare(got, want, 1e-4)


def strided(rank, group):
    """Compute with parts of joint tensors, transposed chances, and an expanded gradient; return gradients of both ways."""
    case = Case((40,), kv_heads=2, dim=6, group=2, dtype=torch.float32)
    q, k, v, z_q, z_k, null = (x.detach() for x in case.tensors())
    q, k, v = torch.cat([q, k, v], 2).split((4, 2, 2), 2)
    k = k.transpose(-1, -2).contiguous().transpose(-1, -2)
    z_q, z_k = (x.permute(4, 3, 2, 1, 0).contiguous().permute(4, 3, 2, 1, 0) for x in (z_q, z_k))
    grads = []
    for call, context in ((hashed_attention, forced()), (oracle, forced())):
        tensors = [x.requires_grad_() for x in (q, k, v, z_q, z_k, null)]
        with context:
            out, losses = call(*tensors, **case.settings())
            grads.append(torch.autograd.grad(out.sum() + losses.agree.sum(), tensors))
    return grads


def test_any_strides(interpreter):
    for got, want in zip(*interpreter.run(1, strided)[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def dirty_padding(rank, group):
    """Return the gradients with clean padding and with NaN in the padding."""
    case, grads = Case((0, 5, 9), padding=4, probes=2, dtype=torch.float32), []
    for value in (None, torch.nan):
        tensors = [x.detach().clone() for x in case.tensors()]
        for x in tensors[:5] if value else ():
            x[0], x[1, 5:], x[2, 9:] = value, value, value
        tensors = [x.requires_grad_() for x in tensors]
        with forced():
            out, losses = hashed_attention(*tensors, **case.settings())
            grads.append(torch.autograd.grad(out.sum() + losses.contrast.sum(), tensors))
    return grads


def test_padding_may_hold_anything(interpreter):
    for clean, dirty in zip(*interpreter.run(1, dirty_padding)[0], strict=True):
        assert torch.equal(clean, dirty)


def shown(rank, group):
    """Return whether NaN in a token's k and z_k is seen in the output of the token."""
    seen = []
    for name in (1, 4):
        tensors = [x.detach().clone() for x in Case((5,), groups=1, codes=1, dtype=torch.float32).tensors()]
        tensors[name][0, 2] = torch.nan
        with forced():
            seen.append(hashed_attention(*tensors)[0].isnan()[0, :, 0, 0].tolist())
    return seen


def test_nan_of_a_read_row_is_not_hidden(interpreter):
    for seen in interpreter.run(1, shown)[0]:
        assert all(seen[2:])


def test_the_work_of_tiles_of_rows():
    """Each lookup that reads a row of a tile is in one program of the tile, and no program has too many lookups.

    The programs that have no work are last, and there is place for all parts.
    """
    from lightning_dilated.ext.hashed import kernels

    generator = torch.Generator().manual_seed(0)
    for rows, lookups, latest in ((70, 900, 5), (300, 50, 40), (64, 4, 1), (1, 7, 3), (90, 999, 90), (33, 800, 2)):
        end = torch.randint(1, rows + 1, (lookups,), generator=generator).sort().values.int()
        read = kernels.Lists(end, torch.clamp(end - latest, min=0), end, torch.arange(rows), latest)
        with mock.patch.object(kernels, "PART", 16):
            todo = kernels.work(read, 16)
        is_used = todo.programs[:, 3] > -2
        assert is_used.tolist() == sorted(is_used.tolist(), reverse=True)
        assert (todo.programs[:, 2] - todo.programs[:, 1]).max() <= 16
        places = []
        for tile in range(-(-rows // 16)):
            programs = todo.programs[is_used & (todo.programs[:, 0] == tile)]
            covered = torch.cat([torch.arange(low, high) for _, low, high, _ in programs.tolist()])
            reads = (read.end > 16 * tile) & (read.begin < 16 * (tile + 1))
            assert covered.tolist() == reads.nonzero()[:, 0].tolist()
            first, parts = todo.tiles[tile].tolist()
            assert parts == (len(programs) if len(programs) > 1 else 0)
            wanted = list(range(first, first + parts)) if parts else [-1]
            assert programs[:, 3].tolist() == wanted
            places += wanted if parts else []
        assert places == list(range(len(places))) and len(places) <= todo.parts


def of(dim=16, groups=4, codes=16, dtype=torch.bfloat16, chances=torch.float32):
    return torch.empty(3, 2, dim, dtype=dtype), torch.empty(3, groups, codes), chances


def reasons(rank, group):
    return [
        lookup.why_not(*of(**x))
        for x in (
            {}, {"dim": 256}, {"dim": 256, "dtype": torch.float32}, {"dim": 257}, {"dtype": torch.float64},
            {"chances": torch.float64}, {"groups": 8}, {"groups": 9}, {"groups": 9, "codes": 2}, {"groups": 1, "codes": 128},
        )
    ]  # fmt: skip


def test_which_calls_are_served(interpreter):
    served, *others = [reason is None for reason in interpreter.run(1, reasons)[0]]
    assert served and others == [True, False, False, False, False, True, False, False, True]
    assert "TRITON_INTERPRET" in lookup.why_not(*of())
