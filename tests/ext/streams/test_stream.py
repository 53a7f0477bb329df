"""A sequence in chunks: output and gradients equal one pass, and the integer plan has exactly the rows in use."""

import math
import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_dilated import DilatedPattern
from lightning_dilated.attention import backends
from lightning_dilated.attention.backends import Request, sdpa
from lightning_dilated.attention.functional import op_arguments
from lightning_dilated.ext.streams import chunk_call
from lightning_dilated.ext.streams import stream as streams
from lightning_dilated.ext.streams import training as streaming
from lightning_dilated.ext.streams.carried_rows import CarryPlan, chunk_problem
from lightning_dilated.ext.streams.shard import ChunkShard
from lightning_dilated.ext.streams.stream import Store, Stream
from lightning_dilated.sequence.requirements import Document

from ...attention.strategies import Case, cases
from ...examples import examples
from ...pattern.strategies import patterns
from .chunks import Chunks

TOL = {"rtol": 1e-10, "atol": 1e-10}


def compare(case, chunk, dropout=0.0, windows=((0, None),)):
    q, k, v, grad = case.tensors()
    torch.manual_seed(5)
    want = case.run(q, k, v, dropout=dropout)
    grads = torch.autograd.grad(want, (q, k, v), grad)
    torch.manual_seed(5)
    chunks = Chunks(case, chunk, dropout, windows)
    for got, expected in zip(chunks.run(q, k, v, grad), (want, *grads), strict=True):
        torch.testing.assert_close(got, expected, **TOL)
    return chunks


random_calls = given(cases(), st.integers(1, 70), st.sampled_from([0.0, 0.0, 0.3]))


def equals_one_pass(case, chunk, dropout):
    """Check any pattern, shift, documents, lengths, grouped heads, with chunks shorter and longer than all segments."""
    assume(case.seq_len and case.batch)
    compare(replace(case, causal=True, layout="contiguous"), chunk, dropout)


test_equals_one_pass = settings(max_examples=examples(50))(random_calls(equals_one_pass))
test_equals_one_pass_often = pytest.mark.slow(settings(max_examples=examples(500))(random_calls(equals_one_pass)))


@given(cases(longest=40), st.integers(1, 20))
@settings(max_examples=examples(15))
def test_windows_of_heads(case, chunk):
    assume(case.seq_len and case.batch and case.kv_heads > 1)
    group = case.heads // case.kv_heads
    windows = [(h, h + group) for h in range(0, case.heads, group)]
    compare(replace(case, causal=True, layout="contiguous"), chunk, windows=windows)


@given(cases(longest=50), st.integers(1, 50))
@settings(max_examples=examples(30))
def test_carried_rows_are_the_plan(case, chunk):
    """The number of live rows equals the plan, and the plan has exactly the rows that later chunks attend to."""
    assume(case.seq_len and case.batch)
    case = replace(case, causal=True, layout="contiguous", lengths=None)
    chunks = compare(case, chunk)
    bounds = case.documents or (0, case.seq_len)
    samples = (0, case.batch)
    documents = [Document(*samples, a, b) for a, b in pairwise(bounds) if b > a]
    shard = ChunkShard(0, case.seq_len, chunk)
    plan = CarryPlan(chunk_problem(case.pattern, case.heads, case.kv_heads, documents, shard, (0, case.heads)))
    live = [sum(x.count for x in plan.live(i)) for i in range(plan.chunks)]
    assert chunks.rows == live[::-1]
    sees = case.counts()[0][0].view(case.kv_heads, -1, case.seq_len, case.seq_len).sum(1) > 0
    stored = 0
    for i in range(plan.chunks):
        bound = i * chunk
        rows = {(x.head, p) for x in plan.live(i) for p in x.rows}
        assert len(rows) * case.batch == live[i], "a row twice"
        assert rows == {(h, p) for h, p in sees[:, bound:, :bound].any(1).nonzero().tolist()}
        stored += sum(x.count for x in plan.leaving(i))
    assert plan.stored() == stored


@given(st.data())
@settings(max_examples=examples(20))
def test_several_layers_keep_their_own_rows(data):
    """Two layers with different patterns in one stream keep separate rows."""
    first, second = data.draw(patterns(2, 2)), data.draw(patterns(2, 2))
    n, chunk = data.draw(st.integers(2, 40)), data.draw(st.integers(1, 20))
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(1, n, 2, 4, dtype=torch.float64, generator=generator, requires_grad=True)

    def run(x, layers):
        for pattern, layer in zip((first, second), layers, strict=True):
            x = x + torch.ops.lightning_dilated.attention(*op_arguments(x, x.sin(), x, pattern, True, chunk=layer))[0]
        return x

    want = run(x, [None, None])
    (want_grad,) = torch.autograd.grad(want.square().sum(), x)
    stream = Stream()
    stream.begin(n, chunk, store=True)
    cut = lambda i: x[:, stream.tokens(i).start : stream.tokens(i).stop].detach()  # noqa: E731
    with torch.no_grad():
        for i in range(stream.chunks - 1):
            run(cut(i), stream.layers(i, [None, None]))
    stream.descend()
    for i in range(stream.chunks - 1, -1, -1):
        part = cut(i).requires_grad_()
        out = run(part, stream.layers(i, [None, None]))
        torch.testing.assert_close(out, want[:, stream.tokens(i).start : stream.tokens(i).stop], **TOL)
        (grad,) = torch.autograd.grad(out.square().sum(), part)
        torch.testing.assert_close(grad, want_grad[:, stream.tokens(i).start : stream.tokens(i).stop], **TOL)


def test_chunks_out_of_order_and_of_other_lengths_are_refused():
    pattern = DilatedPattern.longnet([8, 32], [1, 4])
    stream = Stream()
    stream.begin(24, 8, store=True)
    x = torch.randn(1, 8, 2, 4, dtype=torch.float64)

    def attend(x, layer):
        return torch.ops.lightning_dilated.attention(*op_arguments(x, x, x, pattern, True, chunk=layer))[0]

    zeroth, first, second = (stream.layers(i, [None])[0] for i in range(3))
    with pytest.raises(ValueError, match="chunk 1 of 24 tokens has 8 tokens, 8 to 15; got 7"):
        attend(x[:, :7], first)
    with pytest.raises(RuntimeError, match="cannot go from chunk 0 to chunk 2"):
        attend(x, second)
    name = stream.name
    del stream
    with pytest.raises(ValueError, match=name):
        attend(x, zeroth)


@pytest.mark.parametrize("pairs", [12.0, math.inf, 0.0])
def test_few_carried_keys_are_tritons(pairs, monkeypatch):
    """In both passes, Triton computes calls with up to `pairs` pairs. The call's own engine computes larger calls."""
    ran, plain = {"forward": [], "backward": []}, backends.ENGINES["math"]

    def recorded(name, q):
        run = getattr(plain, name)
        return lambda *x: ran[name].append(x[q].shape[2] * x[q + 1].shape[2]) or run(*x)

    fake = replace(plain, forward=recorded("forward", 0), backward=recorded("backward", 1))
    monkeypatch.setitem(backends.ENGINES, "triton", fake)
    monkeypatch.setattr(chunk_call, "triton_up_to", lambda *unused: (pairs, pairs))
    compare(Case(DilatedPattern.longnet([4, 16, 64], [1, 2, 4]), 1, 61, 2, 2, 4, causal=True), 8)
    sizes = set(ran["backward"])
    assert sizes == set(ran["forward"]) and bool(sizes) == bool(pairs) and all(x <= pairs for x in sizes)
    assert (max(sizes, default=0) > 12) == (pairs == math.inf)


def test_carried_keys_are_cudnns_where_triton_cannot_serve_or_was_not_asked_for():
    """Triton is used only with "auto", and only if it supports the call."""
    gpu = Request(torch.device("cuda"), torch.bfloat16, 64, capability=(8, 0), changing=True)
    carried = backends.triton_up_to("auto", gpu)
    assert carried == (backends.CHANGING_UP_TO,) * 2 and carried[0] > 1024 * 2048
    assert not any(sum(backends.triton_up_to(name, gpu)) for name in ("cudnn", "sdpa", "flash"))
    assert not sum(backends.triton_up_to("auto", replace(gpu, head_dim=512)))
    assert not sum(backends.triton_up_to("auto", replace(gpu, device=torch.device("cpu"))))


@pytest.mark.gpu
def test_few_shapes_for_cudnn(monkeypatch):
    """cuDNN plans each shape. A stream of 32 chunks with a short last one has no more shapes than a stream of 8."""
    shapes = set()

    def watched(name):
        run = getattr(sdpa.compat, name)
        return lambda *x: shapes.add((name, *(t.shape for t in x if isinstance(t, torch.Tensor)))) or run(*x)

    pattern, counts = DilatedPattern.geometric(256, 2**20), []
    for name in ("_forward", "_backward"):
        monkeypatch.setattr(sdpa.compat, f"cudnn_attention{name}", watched(f"cudnn_attention{name}"))
    engine = replace(sdpa.CUDNN, forward=sdpa._without_dropout(sdpa.compat.cudnn_attention_forward))
    monkeypatch.setitem(backends.ENGINES, "cudnn", engine)
    monkeypatch.setattr(backends, "GROUPED_BELOW", {})
    for chunks in (8, 32):
        shapes.clear()
        case = Case(pattern, 1, chunks * 32768 - 12345, 2, 2, 64, causal=True)
        q, k, v, grad = (x.detach() for x in case.tensors(torch.bfloat16, "cuda"))
        Chunks(case, 32768).run(q, k, v, grad)
        counts.append(len(shapes))
    assert counts[0] > 0 and counts[1] <= counts[0], counts


def test_stored_rows_share_memory(monkeypatch):
    """Stored rows do not overlap. They share slabs, and are split if a slab is full."""
    monkeypatch.setattr(streams, "SLAB", 4096)
    store, cpu = Store(), torch.device("cpu")
    sizes, kinds = [1, 3, 50, 2, 1, 7], [torch.bfloat16, torch.float32, torch.float64]
    rows = [torch.randn(n, 2, 8).to(kinds[i % 3]) for i, n in enumerate(sizes * 3)]
    stored = [store.room(x, cpu) for x in rows]
    for x, parts in zip(rows, stored, strict=True):
        for part, source in zip(parts, x.split([len(part) for part in parts]), strict=True):
            part.copy_(source)
    for x, parts in zip(rows, stored, strict=True):
        assert all(part.dtype == x.dtype and part.storage_offset() * part.element_size() % 256 == 0 for part in parts)
        assert torch.equal(store.take(parts, cpu), x)
    storages = [part.untyped_storage() for parts in stored for part in parts]
    slabs = {x.data_ptr(): x.nbytes() for x in storages}
    assert sum(slabs.values()) < 1.5 * sum(x.nbytes for x in rows) + 4096 and set(slabs.values()) == {4096}
    assert max(map(len, stored)) > 1


@pytest.mark.gpu
def test_stored_rows_are_copied_beside_the_computation():
    """While the GPU computes, rows are copied in both directions, before they are read or their memory is reused."""
    store, device = Store(0), torch.device("cuda", torch.cuda.current_device())
    shape, stored, copies = (4096, 2, 64), [], streams.copy_stream(device)
    want = [torch.randn(shape, device=device) for _ in range(100)]
    for x in want:
        torch.cuda._sleep(100_000)
        rows = x + 0  # computed when the GPU has waited
        stored.append(store.put(rows))
        del rows
        torch.full(shape, torch.nan, device=device)  # would be allocated in the rows' memory if that had been freed
    assert store.on_host == 100 * want[0].nbytes and not store.on_device
    same = []
    for i, x in enumerate(reversed(want)):
        rows = store.take(stored.pop(), device)
        if i % 2:  # meanwhile, the next copies may use the memory of the previous rows
            torch.cuda._sleep(1_000_000)
        same.append((rows == x).all())  # does not wait for the GPU
        del rows
    assert torch.stack(same).all()
    computing = torch.cuda.current_stream()
    parts = store.put(want[0])
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)  # two seconds
    rows = store.take(parts, device)
    time.sleep(0.2)
    assert copies.query() and not computing.query()
    assert torch.equal(rows, want[0]) and store.on_host == 0


def test_parameter_gradients_are_summed_in_fp32():
    """The gradient is a sum of 600 ones. In bfloat16 the sum would stop at 256."""
    layer = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    chunks = streaming.Chunks(600, 1, 1)
    streaming.streamed_sum(Stream(), lambda *_: layer.weight.sum(), chunks, [layer], layer.weight).backward()
    assert layer.weight.grad.item() == 600


def test_gradients_of_carried_rows_are_summed_in_fp32():
    """In each of 300 chunks, the gradient of the first token's value grows by about 1."""
    case = Case(DilatedPattern.dense(), 1, 300, 1, 1, 4, causal=True)
    q, k, v = torch.zeros(3, 1, 300, 1, 4, dtype=torch.bfloat16)
    grad = torch.arange(1, 301).bfloat16().view(1, 300, 1, 1).expand(1, 300, 1, 4)
    dv = Chunks(case, 1).run(q, k, v, grad)[3]
    torch.testing.assert_close(dv[0, 0, 0].float(), torch.full((4,), 300.0), rtol=0.02, atol=0)
