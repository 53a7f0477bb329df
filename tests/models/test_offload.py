"""Block inputs that are saved in host memory: their number, their bytes, and when the memory is freed."""

import functools
import gc
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_dilated.ext.planning.counting.footprint import footprint
from lightning_dilated.ext.planning.counting.model_specs import counted_model_of
from lightning_dilated.ext.planning.memory import _on_host_only
from lightning_dilated.memory import head_chunks as chunks
from lightning_dilated.memory import offload
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.models.blocks import TransformerBlock
from lightning_dilated.models.longnet import lm as longnet_lm
from lightning_dilated.models.transformer import DilatedTransformer

from . import batch, tiny
from .test_memory_settings import PATTERN, gradients, same

pytestmark = pytest.mark.full

INPUT = 2 * 21 * 16 * 8  # bytes of the input of a block


@pytest.mark.parametrize(
    "offload, every, inputs", [(1, 1, 5), (0.5, 1, 2), (0.2, 1, 1), (1, 2, 3), (1 + 1e-9, 1, 5), (100, 1, 5)]
)
def test_host_memory(offload, every, inputs):
    model = tiny(PATTERN, depth=5)
    chosen = MemorySettings("block", every=every, offload=offload)
    model.transformer.memory = chosen
    host = model.transformer._host
    for _ in range(3):  # steps after the first allocate nothing
        losses = model.token_losses(batch(2, 21))
        assert len([a for a in host._order if a() is not None]) == inputs
        losses.sum().backward()
        assert host.bytes == inputs * INPUT and sum(b.size for b in host._free) == inputs * INPUT


def test_a_budget_in_gib(monkeypatch):
    monkeypatch.setattr(offload, "GIB", INPUT)
    model = tiny(PATTERN, depth=5)
    want = gradients(model, MemorySettings(), data := batch(2, 21))
    same(gradients(model, MemorySettings("block", offload=3.5), data), want)
    host = model.transformer._host
    assert host.bytes == 3 * INPUT
    torch.autograd.grad(model.token_losses(batch(2, 11)).sum(), list(model.parameters()))
    assert host.bytes <= 3.5 * INPUT  # buffers of the other length were freed


def test_a_forward_without_backward():
    model = tiny(PATTERN, depth=3)
    model.transformer.memory = MemorySettings("block", offload=1)
    losses = model.token_losses(batch(2, 21))
    del losses
    gc.collect()
    host = model.transformer._host
    assert sum(b.size for b in host._free) >= 2 * INPUT  # the input sent last keeps its buffer until the next is sent
    want = gradients(model, MemorySettings(), data := batch(2, 21))
    same(gradients(model, MemorySettings("block", offload=1), data), want)


def test_two_forwards_before_the_backward():
    model = tiny(PATTERN, depth=3)
    first, second = batch(2, 21), batch(2, 21)
    results = []
    for chosen in (MemorySettings(), MemorySettings("block", offload=1)):
        model.transformer.memory = chosen
        loss = model.token_losses(first).sum() + 2 * model.token_losses(second).sum()
        results.append(torch.autograd.grad(loss, list(model.parameters())))
    same(list(results[1]), list(results[0]))


def test_an_empty_shard_sends_nothing():
    """A shard without tokens sends nothing, because CUDA cannot register an empty buffer."""
    stack = DilatedTransformer(16, [PATTERN] * 3, 4, causal=True)
    stack.memory = MemorySettings("block", offload=1)
    stack(torch.randn(1, 0, 16, requires_grad=True)).sum().backward()
    assert not stack._host._order and not stack._host._free


def events_of(stack, monkeypatch):
    """Record events from here on: numbers of blocks that attend, and names of groups when their inputs are fetched."""
    events, fetch, attend = [], offload._Offloaded.fetch, TransformerBlock._attend
    names = {block: number for number, block in enumerate(stack.blocks)}

    def noted(away):
        if away.tensor is None:
            events.append(f"group {away.number}")
        fetch(away)

    monkeypatch.setattr(offload._Offloaded, "fetch", noted)
    monkeypatch.setattr(TransformerBlock, "_attend", lambda b, *x: events.append(names[b]) or attend(b, *x))
    return events


@pytest.mark.parametrize("offload_part", [1, 0.5])
def test_the_next_group_comes_beside_a_groups_first_block(offload_part, monkeypatch):
    """The earlier group's input is fetched after the backward of a group's last block, when fewer inputs are stored."""
    model = tiny(PATTERN, depth=6)
    model.transformer.memory = MemorySettings("block", every=2, offload=offload_part)
    events = events_of(model.transformer, monkeypatch)
    losses = model.token_losses(batch(2, 21))
    assert events == [0, 1, 2, 3, 4, 5]
    events.clear()
    losses.sum().backward()
    # offload 1: the input sent last is still on the GPU; offload 0.5: the input of the last group was never sent
    assert [x for x in events if isinstance(x, str)] == ["group 1", "group 0"]
    assert [x for x in events if not isinstance(x, str)] == [4, 5, 4, 2, 3, 2, 0, 1, 0]
    for group, first in (("group 1", 4), ("group 0", 2)):
        at = events.index(group)
        assert events[at - 1] == first + 1 and events[at + 1] == first


def test_what_comes_back_in_vain_is_waited_for(monkeypatch):
    """If a fetched input is not used, its memory must not be reused before the copy has finished."""
    waits = []
    monkeypatch.setattr(offload._Offloaded, "_wait", lambda self: waits.append(self.number))
    host = offload.Host(1)
    first, second = (host._send(torch.ones(5) * i, False) for i in range(2))
    second.restore()
    assert first.tensor is not None and waits == [0, 1]
    del first
    assert waits == [0, 1, 0] and len(host._free) == 1


def test_the_first_input_has_no_gradient(monkeypatch):
    """After a frozen embedding, the input stays on the GPU, and a group's first block fetches the group before it."""
    stack = DilatedTransformer(16, [PATTERN] * 6, 4, causal=True)
    stack.memory = MemorySettings("block", every=2, offload=1)
    events = events_of(stack, monkeypatch)
    out = stack(torch.randn(1, 21, 16))
    events.clear()
    out.sum().backward()
    assert events == [4, 5, "group 1", 4, 2, 3, 2, 0, 1, 0]


def test_longer_and_longer_sequences():
    """Buffers of earlier lengths must be freed, or growing lengths would fill the host's memory."""
    stack = DilatedTransformer(16, [PATTERN] * 3, 4, causal=True)
    stack.memory = MemorySettings("block", offload=1)
    for tokens in range(10, 60):
        stack(torch.randn(1, tokens, 16, requires_grad=True)).sum().backward()
        assert stack._host.bytes <= offload.ROOM * 3 * tokens * 16 * 4
    assert stack._host.bytes == sum(b.size for b in stack._host._free)


def test_memory_is_given_back_when_copies_are_done(monkeypatch):
    """CUDA may still read a buffer after the host has moved on, so it is freed only when its copies have finished."""
    host, waits = offload.Host(1), []
    host._send(torch.ones(5), False)
    host._leaving = None
    monkeypatch.setattr(host, "_stream", SimpleNamespace(synchronize=lambda: waits.append(len(host._free))))
    host._free_buffers()
    assert waits == [1] and not host._free and host.bytes == 0


@functools.cache
def counted(settings):
    """Return the footprint for both cases, because it does not depend on which inputs are offloaded."""
    model = tiny(PATTERN, torch.float32, depth=8, residual_dtype="bfloat16")
    return footprint(counted_model_of(model, "bf16-mixed", settings), (42, 63))


@pytest.mark.parametrize("offload_part", [1, 0.5])
def test_what_is_on_the_gpu_beside(offload_part, monkeypatch):
    """The plan counts the group inputs that are still on the GPU: the first one, which the caller of the blocks stores,
    and the one sent last, until a later one is sent or kept. The wider output of the embedding is freed.
    """
    inputs, counts, init = [], [], offload._Offloaded.__init__
    keep = lambda x: inputs.append(StorageWeakRef(x.untyped_storage()))  # noqa: E731
    monkeypatch.setattr(offload._Offloaded, "__init__", lambda a, host, x, *args: keep(x) or init(a, host, x, *args))
    there = lambda: sum(not x.expired() for x in inputs)  # noqa: E731
    monkeypatch.setattr(chunks, "products", lambda *given, f=chunks.products: counts.append(there()) or f(*given))
    nats = longnet_lm.token_nats
    monkeypatch.setattr(longnet_lm, "token_nats", lambda *given: counts.append(there()) or nats(*given))
    model = tiny(PATTERN, torch.float32, depth=8, residual_dtype="bfloat16")
    model.embedding.register_forward_hook(lambda module, given, out: keep(out))
    chosen = MemorySettings("block", every=2, offload=offload_part, tile=21, head_chunks=2)
    model.transformer.memory = chosen
    inputs.clear()
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = model.loss_terms(batch(1, 21))
    assert inputs[0].expired()
    windows, in_loss = counts[:-1], counts[-1]
    groups = [windows[i : i + 4] for i in range(0, 16, 4)]  # two blocks with two chunks of heads each
    plan = counted(MemorySettings("block", every=2, tile=21, head_chunks=2))
    plan = replace(plan, subject=replace(plan.subject, memory=chosen))
    away = round(4 * offload_part)
    moments = {moment.part: moment for moment in reversed(plan.moments)}
    planned = lambda *part: away - _on_host_only(plan, moments[part], away)  # noqa: E731
    assert groups == [[1] * 4] + [[2] * 4] * (away - 1) + [[1] * 4] * (4 - away)
    assert groups[-1][0] == planned("forward", 6) and in_loss == planned("behind", 7)
    counts.clear()
    loss.backward()
    assert counts[0] == planned("backward", 7)


def test_closed_with_forwards_that_wait():
    """Close while two forwards await their backwards, after a forward with a freed graph and one without gradients."""
    stack = DilatedTransformer(16, [PATTERN] * 3, 4, causal=True)
    stack.memory = MemorySettings("block", offload=1)
    x = torch.randn(1, 10, 16, requires_grad=True)
    waiting = [stack(x), stack(x)]
    stack(x)
    with torch.no_grad():
        stack(x)
    host = stack._host
    assert host.bytes >= 6 * 640
    stack.free_host_memory()
    assert host.bytes == 0 and not host._free and not any(a._buffer or a.tensor is not None for a in host._waiting)
    for out in waiting:
        with pytest.raises(RuntimeError, match="freed at the end of training"):
            out.sum().backward()
    del waiting, out
    gc.collect()
    assert host.bytes == 0 and not host._free
    want = torch.autograd.grad(stack(x).sum(), x)
    stack.memory = MemorySettings()
    same(want, torch.autograd.grad(stack(x).sum(), x), 1e-6)


def test_closed_where_the_gpu_failed(monkeypatch):
    """Closing waits for the copies, which raises the GPU's error."""
    host, waits = offload.Host(1), []

    def synchronize():
        waits.append(len(host._waiting))
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    away = host._send(torch.ones(5), False)
    monkeypatch.setattr(host, "_stream", SimpleNamespace(synchronize=synchronize))
    host.close()
    assert waits == [1] and host.bytes == 0 and away.tensor is None and away._buffer is None
