"""States: chunks and single tokens equal the whole sequence, the size is constant, and delta is bounded."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated import recurrent_attention
from lightning_dilated.ext.recurrence.chunks import delta_transition, segment_chunks
from lightning_dilated.ext.recurrence.rules import positive
from lightning_dilated.ext.recurrence.runs import Call, Document, tables
from lightning_dilated.recurrence.description import KINDS

from ...examples import examples
from .cases import Case


def in_parts(case, tensors, sizes, detach=False):
    """Compute a sequence part by part. Return (out, state)."""
    outs, state, start = [], None, 0
    for size in sizes:
        part = [x[:, start : start + size] for x in tensors]
        out, state = recurrent_attention(*part, **case.settings(), state=state, return_state=True)
        outs.append(out)
        state = state.detach() if detach else state
        start += size
    return torch.cat(outs, 1), state


@given(
    kind=st.sampled_from(KINDS), segment=st.integers(1, 9), sizes=st.lists(st.integers(0, 11), min_size=1, max_size=5)
)
@settings(max_examples=examples(60), deadline=None)
def test_a_stream_equals_the_whole(kind, segment, sizes):
    case = Case(kind, (sum(sizes),) * 2, segment=segment)
    tensors = case.tensors()
    want, whole = recurrent_attention(*tensors, **case.settings(), return_state=True)
    out, state = in_parts(case, tensors, sizes)
    assert state.tokens.tolist() == whole.tokens.tolist()
    for x, y in zip((out, *state.floating()), (want, *whole.floating()), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)
    losses = [case.loss(o, s.floating()) for o, s in ((out, state), (want, whole))]
    grads = [torch.autograd.grad(x, tensors, allow_unused=True, materialize_grads=True) for x in losses]
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_equals_the_whole_at_every_length(kind):
    case = Case(kind, (25, 25), segment=6)
    tensors = [x.detach() for x in case.tensors()]
    state, sizes = None, set()
    for n in range(1, 26):
        out, state = recurrent_attention(
            *(x[:, n - 1 : n] for x in tensors), **case.settings(), state=state, return_state=True
        )
        whole = recurrent_attention(*(x[:, :n] for x in tensors), **case.settings())
        torch.testing.assert_close(out[:, 0], whole[:, -1], rtol=1e-10, atol=1e-10)
        sizes.add(state.nbytes)
    assert len(sizes) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_different_lengths_go_on(kind):
    case = Case(kind, (9, 4), segment=4)
    tensors = [x.detach() for x in case.tensors()]
    _, state = recurrent_attention(*tensors, **case.settings(), **case.limits(), return_state=True)
    step = [x.detach() for x in case.tensors(1, seed=5)]
    out, _ = recurrent_attention(*step, **case.settings(), state=state, return_state=True)
    for sample, n in enumerate((9, 4)):
        rows = [
            torch.cat([x[sample : sample + 1, :n], y[sample : sample + 1]], 1)
            for x, y in zip(tensors, step, strict=True)
        ]
        alone = recurrent_attention(*rows, **case.settings())
        torch.testing.assert_close(out[sample, 0], alone[0, -1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_detached_states_end_the_gradient(kind):
    case = Case(kind, (12,), segment=4)
    tensors = case.tensors()
    out, _ = in_parts(case, tensors, (8, 4), detach=True)
    (grad,) = torch.autograd.grad(out[:, 8:].sum(), tensors[2], allow_unused=True, materialize_grads=True)
    assert not grad[:, :8].any()
    joined, _ = in_parts(case, tensors, (8, 4))
    assert torch.equal(joined, out)
    assert torch.autograd.grad(joined[:, 8:].sum(), tensors[2])[0][:, :8].any()


def transition(lengths, dim, seed, scale, guarded=True):
    """Return the transition matrix A of each memory segment, for segments of any lengths."""
    g = torch.Generator().manual_seed(seed)
    past, matrices = torch.zeros(dim, 1, dtype=torch.float64), []
    for n in lengths:
        keys = positive(torch.randn(n, 1, dim, generator=g, dtype=torch.float64) * scale)
        rows = tables(Call((Document(0, 0, n),), 1, ((0, range(n)),), n, True), 0, 64)
        pending = torch.zeros(n, 1, dim, dtype=torch.float64)
        chunks = segment_chunks(torch.cat([keys, pending]), torch.zeros_like(torch.cat([keys, pending])), rows)
        step = delta_transition(chunks, past[None, None], rows.closed)
        right = step.right if guarded else chunks.keys / (chunks.keys @ past)
        matrices.append(torch.eye(dim, dtype=torch.float64) - (step.left.mT @ right)[0, 0])
        past = past + keys.sum(0).T
    return matrices


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=6),
    dim=st.integers(1, 16),
    seed=st.integers(0, 99),
    scale=st.sampled_from([0.1, 1.0, 3.0]),
)
@settings(max_examples=examples(60), deadline=None)
def test_delta_transitions_never_expand(lengths, dim, seed, scale):
    for matrix in transition(lengths, dim, seed, scale):
        assert torch.linalg.eigvals(matrix).abs().max() <= 1 + 1e-9


def test_without_the_guard_they_expand():
    wild = transition([16, 2048], 64, 0, 1.0, guarded=False)[1]
    tame = transition([16, 2048], 64, 0, 1.0)[1]
    assert torch.linalg.eigvals(wild).abs().max() > 50
    assert torch.linalg.eigvals(tame).abs().max() <= 1
