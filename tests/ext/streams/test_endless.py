"""`model.stream` on endless sequences: calls equal the whole sequence, and the state is bounded."""

import io
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lightning_dilated as ld
from lightning_dilated.memory.settings import MemorySettings

from ...examples import examples
from .test_streaming import GEOMETRIC, HYBRID, VOCABULARY, lm

MODELS = {
    "geometric": lm(),
    "shifted": lm([GEOMETRIC, GEOMETRIC.shifted()], num_kv_heads=2),
    "convolution": lm(kv_conv=4),
    "dense heads": lm(HYBRID, kv_conv=3),
    "recurrence": lm(recurrence=[{}, {"kind": "linear", "segment": 5, "conv": 0}, None], kv_conv=3),
    "hashed": lm(
        hashed={"groups": 2, "codes": 2, "latest": 3, "heads": 2, "layers": [0, 2]}, kv_conv=3, num_kv_heads=4
    ),
    "recurrence, delta": lm(recurrence={"kind": "delta", "segment": 6}, num_kv_heads=2),
}


def call(model, tokens, sizes, starts=None, chunk=7, **options):
    """Make calls of these sizes. Return (nats of each token, states)."""
    state, nats, states, at = None, [], [], 0
    for n in sizes:
        begin = None if starts is None else starts[:, at : at + n]
        part, state = model.stream(
            tokens[:, at : at + n], None, state, starts=begin, chunk=chunk, per_token=True, **options
        )
        nats.append(part)
        states.append(state)
        at += n
    return torch.cat(nats, 1), states


def expected(model, tokens, starts):
    """Compute the same nats from whole samples with packed documents. The first token of a document has 0 nats."""
    rows = []
    for row, begin in zip(tokens, starts, strict=True):
        bounds = torch.tensor([0, *[int(x) for x in begin.nonzero()[:, 0] if x], len(row)], dtype=torch.int32)
        labels = torch.cat([row[1:], row.new_full((1,), -100)])
        labels[bounds[1:-1].long() - 1] = -100
        batch = {"tokens": row[None], "labels": labels[None], "cu_seqlens": bounds}
        rows.append(torch.cat([torch.zeros(1, 1, dtype=torch.float64), model.token_losses(batch)[:, :-1]], 1))
    return torch.cat(rows)


@given(st.data(), st.sampled_from(sorted(MODELS)))
@settings(max_examples=examples(10))
def test_equals_the_whole(data, name):
    """Calls and chunks may have any length, and documents may begin anywhere, differently in each sample."""
    model, batch = MODELS[name].eval(), data.draw(st.integers(1, 3))
    sizes = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    n, chunk = sum(sizes), data.draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(n)
    tokens = torch.randint(0, VOCABULARY, (batch, n), generator=generator)
    starts = torch.zeros(batch, n, dtype=torch.bool)
    for row in starts:
        row[data.draw(st.lists(st.integers(0, n - 1), max_size=3))] = True
    with torch.no_grad():
        got, _ = call(model, tokens, sizes, starts if data.draw(st.booleans()) or starts.any() else None, chunk)
        torch.testing.assert_close(got, expected(model, tokens, starts), rtol=1e-10, atol=1e-10)


def test_state_is_bounded_and_can_be_saved():
    """Segment widths bound the rows for any stream length. A state can be saved to a file of plain tensors."""
    model = MODELS["convolution"].eval()
    tokens = torch.randint(0, VOCABULARY, (2, 64 * 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want, states = call(model, tokens, [64 + 16] + [64] * 10 + [48])
        sizes = [s.nbytes for s in states]
        most = 3 * sum(-(-b.segment_length // b.dilation_rate) for b in GEOMETRIC.branches) * 4 * 2 * 2 * 4 * 8
        assert max(sizes) <= most + 3 * 2 * 3 * 32 * 8 + 2 * 16 * 8
        assert len(set(sizes[:-1])) == 1
        file = io.BytesIO()
        torch.save(states[4].state_dict(), file)
        file.seek(0)
        state = ld.StreamState.of(torch.load(file, weights_only=True))
        assert {f.name for f in fields(state)} == states[4].state_dict().keys()
        at = states[4].position
        again, _ = model.stream(tokens[:, at:], None, state, per_token=True)
        torch.testing.assert_close(again, want[:, at:], rtol=1e-10, atol=1e-10)
        total, _ = model.stream(tokens[:, at:], None, states[4])
        torch.testing.assert_close(total, want[:, at:].sum(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["recurrence", "recurrence, delta"])
def test_state_of_a_recurrence_can_be_saved(name):
    """The state of a recurrence does not grow, and continues from a file of plain tensors."""
    model = MODELS[name].eval()
    tokens = torch.randint(0, VOCABULARY, (2, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want, states = call(model, tokens, [50] * 4)
        assert len({sum(x.nbytes for x in s.memories.values()) for s in states}) == 1
        assert len({s.nbytes - sum(x.nbytes for x, _ in s.rows.values()) for s in states}) == 1
        file = io.BytesIO()
        torch.save(states[1].state_dict(), file)
        file.seek(0)
        state = ld.StreamState.of(torch.load(file, weights_only=True))
        again, _ = model.stream(tokens[:, 100:], None, state, per_token=True)
        torch.testing.assert_close(again, want[:, 100:], rtol=1e-10, atol=1e-10)
        other = MODELS["geometric"].eval()
        with pytest.raises(ValueError, match=r"the state was left by a model of .*recurrence="):
            other.stream(tokens[:, 100:], None, state)


@pytest.mark.parametrize("more", [{}, {"policy": "block", "head_chunks": 2}, {"policy": "attention-kept"}])
def test_training_is_truncated(more):
    """Training call by call gives the same gradients as the whole sequence with `truncate`."""
    name = "geometric" if more.get("head_chunks") else "convolution"
    model, tokens = MODELS[name].train(), torch.randint(0, VOCABULARY, (2, 64))
    labels = tokens.roll(-1, 1)
    model.transformer.memory = MemorySettings(stream=16, truncate=True, **more)
    model.zero_grad()
    want = model.loss_terms({"tokens": tokens, "labels": labels})[0]
    want.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    state, total = None, 0.0
    for at in (0, 32):
        nats, state = model.stream(tokens[:, at : at + 32], labels[:, at : at + 32], state, chunk=16)
        nats.backward()
        total += float(nats)
    model.transformer.memory = MemorySettings()
    assert total == pytest.approx(float(want), abs=1e-9)
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.grad, grads[key], rtol=1e-10, atol=1e-10)


def test_a_state_of_another_model_is_refused_and_another_precision_is_not():
    tokens = torch.randint(0, VOCABULARY, (1, 40))
    with torch.no_grad():
        _, state = MODELS["geometric"].stream(tokens)
        for name in ("shifted", "convolution", "dense heads"):
            with pytest.raises(ValueError, match="the state was left by a model of 3 layers of 16"):
                MODELS[name].stream(tokens, state=state)
        want, _ = MODELS["geometric"].stream(tokens, state=state)
        narrow = lm().float()
        got, _ = narrow.stream(tokens, state=state)
        assert float(got) == pytest.approx(float(want), rel=1e-4)


def test_refusals():
    model, tokens = MODELS["geometric"], torch.randint(0, VOCABULARY, (2, 8))
    for bad, message in [
        (tokens[0], r"tokens must be integers \(B, n\), not empty"),
        (tokens[:, :0], r"not empty; got \(2, 0\)"),
        (tokens.double(), "float64"),
    ]:
        with pytest.raises(ValueError, match=message):
            model.stream(bad, bad)
    with pytest.raises(ValueError, match="training needs labels"):
        model.stream(tokens)
    with pytest.raises(ValueError, match=r"labels must be \(2, 8\)"):
        model.stream(tokens, tokens[:, 1:])
    with pytest.raises(ValueError, match="starts must be bool"):
        model.stream(tokens, tokens, starts=tokens)
    with torch.no_grad():
        _, state = model.stream(tokens)
    with pytest.raises(ValueError, match="the state is of 2 sequences, but tokens has 1"):
        model.stream(tokens[:1], tokens[:1], state)
