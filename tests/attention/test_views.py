"""Rows are views of the tensor's storage, and one view serves several samples if the strides allow it."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings

from lightning_dilated.attention import dilated_attention
from lightning_dilated.attention.backends import ENGINES
from lightning_dilated.attention.executors.blockwise import suited
from lightning_dilated.attention.spans import RowViews, Span, add_rows, cell_view, joined, spans
from lightning_dilated.pattern import Branch, DilatedPattern
from lightning_dilated.pattern.rows import blocks

from ..examples import examples
from .recorder import record
from .strategies import LAYOUTS, Case, cases


def positions(span: Span, block, kv: bool) -> torch.Tensor:
    """Return positions (b, S, J, n) of the queries or of the keys within a sample."""
    first, rows = block.keys if kv and block.keys else (block.first, block.rows)
    b, s, j, i = (torch.arange(n) for n in (span.batches, block.segments, block.heads, rows))
    first += span.start
    place = s[:, None, None] * block.segment_stride + j[:, None] * block.position_step + i * block.row_stride
    return (first + place).expand(len(b), -1, -1, -1)


def picked(x: torch.Tensor, span: Span, block, kv: bool) -> torch.Tensor:
    """Copy the rows (b, S, J, n, D) by fancy indexing."""
    head, step = (block.kv_head, block.kv_head_step) if kv else (block.head, block.head_step)
    sample = span.batch + torch.arange(span.batches)[:, None, None, None]
    return x[sample, positions(span, block, kv), (head + torch.arange(block.heads) * step)[:, None]]


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@settings(max_examples=examples(150))
@given(cases())
def test_views_are_the_rows(case):
    q, k, _, _ = case.tensors()
    options = case.options()
    for x, kv in ((q.detach(), False), (k.detach(), True)):
        for whole in spans(case.batch, case.seq_len, options["lengths"], options["cu_seqlens"]):
            for block in blocks(case.pattern, whole.length, case.heads, case.kv_heads):
                cells = cell_view(x, whole, block, kv)
                assert same_storage(cells, x) and torch.equal(cells, picked(x, whole, block, kv))
                parts = list(joined(whole, block, x))
                for span in parts:
                    (rows,) = RowViews([x], (kv,)).of(span, block)
                    assert same_storage(rows, x)
                    assert torch.equal(rows, picked(x, span, block, kv).flatten(0, 1))
                assert sum(span.batches for span in parts) == whole.batches


@settings(max_examples=examples(100))
@given(cases(longest=24))
def test_add_rows_adds_every_head(case):
    # several query heads may share one kv row, so their contributions must be added, not overwritten
    options = case.options()
    for kv in (False, True):
        heads = case.kv_heads if kv else case.heads
        got = torch.zeros(case.batch, case.seq_len, heads, case.head_dim, dtype=torch.float64)
        want = got.clone()
        for span in spans(case.batch, case.seq_len, options["lengths"], options["cu_seqlens"]):
            for block in blocks(case.pattern, span.length, case.heads, case.kv_heads):
                rows = block.key_rows if kv else block.rows
                shape = (span.batches * block.segments, block.heads, rows, case.head_dim)
                part = torch.randn(shape, dtype=torch.float64)
                add_rows(got, part, span, block, kv)
                head, step = (block.kv_head, block.kv_head_step) if kv else (block.head, block.head_step)
                index = (
                    (span.batch + torch.arange(span.batches))[:, None, None, None],
                    positions(span, block, kv),
                    (head + torch.arange(block.heads) * step)[:, None],
                )
                want.index_put_(index, part.unflatten(0, (span.batches, block.segments)), accumulate=True)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n, w, batch", list(product([16, 17, 24, 64], [4, 7, 16, 100], [1, 3])))
def test_calls(n, w, batch, monkeypatch):
    """One call serves all samples if B = 1, w divides N, or there is one segment; otherwise, each sample has a call."""
    calls = record(monkeypatch, "math")
    q, k, v = torch.randn(3, batch, n, 2, 4)
    dilated_attention(q, k, v, DilatedPattern.dense(w), engine="math")
    whole, tail = n // w, bool(n % w)
    joins = batch == 1 or whole == 1 or not tail
    want = (whole > 0) * (1 if joins else batch) + tail  # the short last segment is one view for all samples either way
    assert len(calls.forward) == want
    assert sum(call[0].shape[0] for call in calls.forward) == batch * (whole + tail)
    assert all(same_storage(a, b) for call in calls.forward for a, b in zip(call, (q, k, v), strict=True))


@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x != "D strided"])
@pytest.mark.parametrize("engine", ["math", "cpu_flash"])
def test_the_engine_reads_the_input_itself(engine, layout, monkeypatch):
    calls = record(monkeypatch, engine)
    pattern = DilatedPattern([(8, 1), Branch(16, 2, shift=5), (None, 4)])
    case = Case(pattern, 2, 40, 4, 2, 8, causal=True, layout=layout)
    q, k, v, _ = case.tensors()
    case.run(q, k, v, engine=engine)[..., 0].sum().backward()
    assert all(same_storage(a, b) for call in calls.forward for a, b in zip(call, (q, k, v), strict=True))
    assert all(same_storage(a, b) for call in calls.backward for a, b in zip(call[1:4], (q, k, v), strict=True))
    assert len(calls.forward) == len(calls.backward) > 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "make, kept",
    [
        (lambda: torch.randn(2, 16, 4, 8), True),
        (lambda: torch.randn(2, 16, 3, 4, 8)[:, :, 1], True),
        (lambda: torch.randn(2, 16, 12, 8)[:, :, 4:8], True),
        (lambda: torch.randn(2, 4, 16, 8).transpose(1, 2), True),
        (lambda: torch.randn(2, 16, 1, 8).expand(2, 16, 4, 8), True),
        (lambda: torch.randn(2, 16, 8, 4).transpose(2, 3), False),
        (lambda: torch.randn(2, 16, 4, 16)[..., ::2], False),
        (lambda: torch.randn(()).expand(2, 16, 4, 8), False),
    ],
    ids=["contiguous", "fused", "fused heads", "transposed", "expanded", "D strided", "every other", "scalar"],
)
def test_only_what_an_engine_cannot_read_is_copied(make, kept, engine):
    x = make()
    (got,) = suited(ENGINES[engine], x)
    assert (got is x) == kept and torch.equal(got, x) and ENGINES[engine].takes_strides(got)


@pytest.mark.parametrize(
    "batch, n, lengths, documents, want",
    [
        (0, 8, None, None, []),
        (2, 8, [0, 0], None, []),
        (3, 8, None, None, [Span(0, 3, 0, 8)]),
        (4, 8, [5, 5, 0, 5], None, [Span(0, 2, 0, 5), Span(3, 1, 0, 5)]),
        (3, 8, [5, 0, 0], None, [Span(0, 1, 0, 5)]),
        (1, 8, None, [0, 0, 3, 3, 8], [Span(0, 1, 0, 3), Span(0, 1, 3, 5)]),
        (1, 0, None, [0, 0], []),
    ],
    ids=["no samples", "all empty", "whole", "a gap", "empty last", "empty documents", "no tokens"],
)
def test_spans(batch, n, lengths, documents, want):
    as_tensor = lambda x: None if x is None else torch.tensor(x, dtype=torch.int32)  # noqa: E731
    assert spans(batch, n, as_tensor(lengths), as_tensor(documents)) == want
