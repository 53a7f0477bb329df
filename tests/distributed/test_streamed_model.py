"""LongNetLM where ranks share every chunk: losses and gradients equal one rank's pass, and bytes equal the plan."""

import re

import pytest
import torch

from lightning_dilated.ext.planning.counting.workspace import OpCall
from lightning_dilated.ext.planning.streams import Exchange
from lightning_dilated.memory.settings import MemorySettings

from ..ext.streams.test_streaming import CASES, GEOMETRIC, gradients, lm, text
from .calls import positions, sequence
from .test_deferred_checks import as_on_gpus, deferred_checks

TOL = {"rtol": 1e-10, "atol": 1e-10}


def step(rank, group, options, settings, batch, chunk):
    """Return (sum of losses, labels, gradients, (positions, token losses), bytes received by pass) of a rank."""
    model = lm(**options)
    with sequence(group, layout="chunked", stream=chunk) as ours, ours.active():
        part = model.sequence_spec.cut(batch, ours.place)
        model.transformer.memory = MemorySettings(stream=chunk, **settings)
        torch.manual_seed(3 + 1000 * rank)
        total, count = model.loss_terms(part)
        total.backward()
        received = ours.forward_traffic.received, ours.backward_traffic.received
        with torch.no_grad():
            losses = model.eval().token_losses(part)
        grads = {name: p.grad for name, p in model.named_parameters()}
        return total.detach(), int(count), grads, (positions(ours, batch["tokens"].shape[1]), losses), received


def compare(pool, ranks, name, want, grads):
    """Check that the mean loss over all ranks is `want`, with the gradients `grads`."""
    parts = pool.run(ranks, step, *CASES[name])
    count = sum(x[1] for x in parts)
    torch.testing.assert_close(sum(x[0] for x in parts) / count, want, rtol=1e-12, atol=1e-12)
    for key, grad in grads.items():
        torch.testing.assert_close(sum(x[2][key] for x in parts) / count, grad, **TOL, msg=lambda m, k=key: f"{k}: {m}")
    return parts


#: number of ranks, more than 2 where pieces are short
RANKS = {"convolution, short chunks": 3, "chunks of one token": 3, "packed": 4, "dense heads": 4, "not a multiple": 3}


#: slow tests; the other cases cover the same features in less time
SLOW = ("heads, dropout", "block", "chunks of one token", "plain", "convolution", "recurrence", "recurrence, padded")


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in CASES if x != "frozen embedding"]
)
def test_equals_one_pass_of_one_rank(pool, name):
    options, _, batch, _ = CASES[name]
    parts = compare(pool, RANKS.get(name, 2), name, *gradients(lm(**options), batch))
    with torch.no_grad():
        want_losses = lm(**options).eval().token_losses(batch)
    at = torch.cat([torch.tensor(x[3][0], dtype=torch.int64) for x in parts])
    losses = torch.cat([x[3][1] for x in parts], 1)
    torch.testing.assert_close(losses, want_losses[:, at], rtol=1e-12, atol=1e-12)


#: (ranks, tokens, chunk): some ranks have no token of the last chunk, of any chunk, or of all but the first token of a
#: document
EMPTY = ((2, 9, 8), (3, 9, 8), (4, 14, 4), (4, 3, 2), (4, 7, 1))


@pytest.mark.parametrize("shape", EMPTY, ids=str)
@pytest.mark.parametrize("recurrent", [False, True])
def test_a_convolution_of_documents_on_ranks_without_a_token(pool, shape, recurrent):
    ranks, tokens, chunk = shape
    options = {"recurrence": {"kind": "delta", "segment": 4}} if recurrent else {"kv_conv": 4}
    batch = {**text(tokens), "cu_seqlens": torch.tensor([0, 2, tokens], dtype=torch.int32)}
    want, grads = gradients(lm(**options), batch)
    parts = pool.run(ranks, step, options, {}, batch, chunk)
    count = sum(x[1] for x in parts)
    torch.testing.assert_close(sum(x[0] for x in parts) / count, want, rtol=1e-12, atol=1e-12)
    for key, grad in grads.items():
        torch.testing.assert_close(sum(x[2][key] for x in parts) / count, grad, **TOL, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("ranks", [2, 3])
def test_truncated_gradients_are_those_of_one_rank(pool, ranks):
    """Gradients end at the same chunk boundaries as on one rank."""
    options, batch = {"kv_conv": 3}, text(61)
    want, grads = gradients(lm(**options), batch, stream=16, truncate=True, policy="block")
    parts = pool.run(ranks, step, options, {"truncate": True, "policy": "block"}, batch, 16)
    count = sum(x[1] for x in parts)
    torch.testing.assert_close(sum(x[0] for x in parts) / count, want, rtol=1e-12, atol=1e-12)
    for key, grad in grads.items():
        torch.testing.assert_close(sum(x[2][key] for x in parts) / count, grad, **TOL, msg=lambda m, k=key: f"{k}: {m}")


def deferring(rank, group, options, batch, chunk):
    """Return (sum of losses, number of checks deferred in the second step); checks are deferred as on GPUs."""
    model = lm(**options)
    with sequence(group, layout="chunked", stream=chunk) as ours, ours.active(), ours.trusting():
        as_on_gpus(ours)
        model.transformer.memory = MemorySettings(stream=chunk)
        for _ in range(2):
            total, _ = model.loss_terms(model.sequence_spec.cut(batch, ours.place))
            total.backward()
            deferred = deferred_checks(ours)
            ours.settle()
        return total.detach(), deferred


@pytest.mark.parametrize(("ranks", "tokens", "chunk"), [(2, 47, 16), pytest.param(3, 28, 10, marks=pytest.mark.slow)])
def test_a_short_last_chunk_with_deferred_checks(pool, ranks, tokens, chunk):
    """A short last chunk may give a rank the same length as a full chunk, but it changes the other ranks' lengths."""
    options, batch = {"kv_conv": 3}, text(tokens)
    parts = pool.run(ranks, deferring, options, batch, chunk)
    want, _ = lm(**options).loss_terms(batch)
    torch.testing.assert_close(sum(x[0] for x in parts), want.detach())
    assert len({x[1] for x in parts}) == 1 and parts[0][1] > 0


def refused(rank, group, layout, stream, endless):
    model, batch = lm(), text()
    with sequence(group, layout=layout, stream=stream) as ours, ours.active():
        model.transformer.memory = MemorySettings(stream=16)
        part = model.sequence_spec.cut(batch, ours.place)
        _ = model.stream(part["tokens"], part["labels"]) if endless else model.loss_terms(part)


def test_refusals(pool):
    for arguments, why in (
        (("contiguous", None, False), r"with layout='contiguous' its ranks .* Set layout='chunked'"),
        (("chunked", 8, False), "streams chunks of 16 tokens, but its ranks share chunks of 8: set equal"),
        (("chunked", 16, True), "endless streams are computed on one rank each.*set sequence_size=1"),
    ):
        for got in pool.errors(ValueError, 2, refused, *arguments):
            assert re.search(why, got), got


SETTINGS = ({}, {"policy": "block"}, {"truncate": True}, {"policy": "attention-kept"})
SHAPES = ((3, 64, 16), (4, 40, 5))


@pytest.mark.parametrize(
    ("settings", "shape"), [*((x, (2, 61, 13)) for x in SETTINGS), *(({}, x) for x in SHAPES)], ids=str
)
def test_bytes_are_planned(pool, settings, shape):
    """The mean of the bytes that ranks receive equals `plan`, over all layers, chunks and passes."""
    ranks, tokens, chunk = shape
    patterns = [GEOMETRIC, GEOMETRIC.shifted()]
    parts = pool.run(ranks, step, {"pattern": patterns, "num_kv_heads": 2}, settings, text(tokens), chunk)
    call = OpCall(patterns[0], 4, 2, 4, True, tokens, torch.float64, others=(patterns[1],))
    plan = Exchange.of(call, 3, tokens, MemorySettings(stream=chunk, **settings), ranks)
    forward, backward = (sum(x[4][i] for x in parts) / ranks for i in range(2))
    assert (plan.forward, plan.backward) == pytest.approx((forward, backward)) and backward > 0
