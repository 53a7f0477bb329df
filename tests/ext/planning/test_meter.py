"""Meter: bytes counted by hand, views, resizes, wrappers, fake tensors, kinds, and the inside of the package's op."""

import gc

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from lightning_dilated.attention.op import ATTENTION
from lightning_dilated.attention.spec import encode
from lightning_dilated.ext.planning.counting import memory_tracker as meter
from lightning_dilated.ext.planning.counting.memory_tracker import (
    ACTIVATIONS,
    EXCHANGE,
    GRADIENTS,
    PARAMETERS,
    TEMPORARY,
    Meter,
    parts,
)
from lightning_dilated.pattern import DilatedPattern


def test_by_hand():
    w = torch.ones(8, 16)
    with Meter() as m:
        assert m.live == 0
        x = torch.ones(4, 8)
        assert m.live == 4 * 8 * 4
        y = x @ w  # the meter sees w for the first time
        assert m.live == m.peak == 128 + 512 + 4 * 16 * 4
        del x
        assert (m.live, m.peak) == (768, 896)
        m.reset_peak()
        assert m.peak == 768
        z, v = y.relu_(), y.view(-1)[3:]
        z += 1
        assert m.live == m.peak == 768
        del y, z
        assert m.live == 768  # the view still refers to it
        big = torch.empty(1000, dtype=torch.uint8)
        assert m.live == 1768
        del v, big
        assert (m.live, m.peak) == (512, 1768)
    late = torch.ones(3)  # not counted outside of the meter
    assert m.live == 512
    del w
    assert m.live == 0 and late.sum() == 3


def test_resized():
    with Meter() as m:
        x = torch.empty(10)
        x.resize_(100)
        assert m.live == 400
        x.untyped_storage().resize_(8)
        assert m.live == 400  # noticed only at the next operation
        assert len(x[:2]) == 2 and m.live == 8
        y = torch.empty(0)
        assert m.live == 8
        torch.add(torch.ones(4), 1, out=y)
        assert m.live == 8 + 16


def test_rounded():
    with Meter(round_to=512) as m:
        tensors = [torch.empty(1), torch.empty(128), torch.empty(129), torch.empty(0)]
        assert m.live == 512 + 512 + 1024
        tensors.clear()
    assert m.live == 0
    with pytest.raises(ValueError, match="round_to must be at least 1, got 0"):
        Meter(round_to=0)


def test_some_device():
    with Meter(device="meta") as m:
        x, y = torch.empty(10), torch.empty(20, device="meta")
    assert m.live == 80 and len(x) + len(y) == 30


def mlp():
    """Two Linears of 8 features without biases (256 bytes per weight), each followed by a Tanh."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Tanh())


def step(model, x, again=False):
    out = checkpoint(model, x, use_reentrant=False) if again else model(x)
    loss = out.sum()
    del out
    yield
    loss.backward()


@pytest.mark.parametrize("again", [False, True])
def test_a_training_step(again):
    """(4, 8) floats are 128 bytes. Linear saves its input, Tanh its output: between two layers, the same tensor."""
    model, x = mlp(), torch.ones(4, 8)
    with Meter(record=True) as m:
        assert m.track(model.parameters(), PARAMETERS) == 512 and m.track([x, None, x], "batch") == 128
        run = step(model, x, again)
        next(run)
        # saved: x; Tanh's output, which is the second Linear's input; the second Tanh's output; the loss
        assert m.mark(ACTIVATIONS) == 4 + (0 if again else 2 * 128)
        assert m.by_kind() == {PARAMETERS: 512, "batch": 128, ACTIVATIONS: 4 + (0 if again else 256)}
        assert sum(m.by_kind().values()) == m.live
        assert list(run) == [] and m.track([p.grad for p in model.parameters()], GRADIENTS) == 512
        del run
        assert m.by_kind() == {PARAMETERS: 512, "batch": 128, GRADIENTS: 512}
        peak = m.peak_by_kind()
        assert sum(peak.values()) == m.peak and peak[PARAMETERS] == 512
        assert list(m.replay())[-1][2] == m.live == 1152
    expected = [p.grad for p in model.parameters()]
    other = mlp()
    list(step(other, x))
    assert all(torch.equal(p.grad, g) for p, g in zip(other.parameters(), expected, strict=True))


def test_kinds_at_the_peak():
    with Meter(record=True) as m:
        first = torch.empty(100)
        second = torch.empty(50)
        del second
        third = torch.empty(25)
        m.track([first], PARAMETERS)
        m.track([third], EXCHANGE)
        assert m.peak_by_kind() == {PARAMETERS: 400, TEMPORARY: 200}
        m.reset_peak()
        assert m.peak_by_kind() == {PARAMETERS: 400, EXCHANGE: 100} and m.peak == 500
        del third
        fourth = torch.empty(1)
        assert m.peak_by_kind() == {PARAMETERS: 400, EXCHANGE: 100} and m.live == 404
        del first, fourth
    with pytest.raises(RuntimeError, match="record=True"):
        Meter().peak_by_kind()


def test_mark_leaves_what_was_there():
    before = torch.ones(5)
    with Meter() as m:
        after = before + 1
        assert m.mark(ACTIVATIONS) == 20 and m.by_kind() == {TEMPORARY: 20, ACTIVATIONS: 20}
        assert m.mark(ACTIVATIONS) == 0 and len(after) == 5
        literal = torch.tensor([1.0, 2.0])  # created inside of an operation that does not return it
        assert m.mark(ACTIVATIONS) == 8 and literal.sum() == 3


def test_labels():
    products = ("aten::mul.Tensor", "aten::mul_.Tensor")
    name = lambda func, inputs, outputs: [(t, EXCHANGE) for t in outputs] if func.name() in products else []  # noqa: E731
    with Meter(labels=name) as m:
        x = torch.ones(4)
        y = x * x
        assert m.by_kind() == {TEMPORARY: 16, EXCHANGE: 16} and len(y) == 4
        z = torch.zeros(8)
        assert m.mark(ACTIVATIONS) == 48 and m.by_kind() == {ACTIVATIONS: 48, EXCHANGE: 16}
        z.mul_(z)  # labels replace marks
        m.track([x], PARAMETERS)  # tracking replaces both
        x.mul_(x)
        assert m.by_kind() == {PARAMETERS: 16, EXCHANGE: 48}


def test_fake_tensors():
    with FakeTensorMode(), Meter(record=True) as m:
        model = nn.Sequential(nn.Linear(1024, 1024), nn.GELU())
        assert m.live == m.track(model.parameters(), PARAMETERS) == (1024 + 1) * 4096
        x = torch.empty(1 << 20, 1024)
        assert m.live == (1024 + 1) * 4096 + (1 << 32)
        y = model(x)
        assert m.live == (1024 + 1) * 4096 + 3 * (1 << 32)  # GELU saves its input
        y.sum().backward()
        del x, y
        gc.collect()
        assert m.live == 2 * (1024 + 1) * 4096
        assert m.track([p.grad for p in model.parameters()], GRADIENTS) == (1024 + 1) * 4096


def test_wrappers():
    """The meter sees operations on the inner tensors, not operations on the wrapper."""
    types = []
    with Meter(labels=lambda func, inputs, outputs: types.extend(map(type, (*inputs, *outputs))) or []) as m:
        x = TwoTensor(torch.ones(4), torch.ones(4))
        y = x + x
        assert m.live == 64
        del x
        assert m.live == 32 and m.track([y], PARAMETERS) == 32
        y.add_(y)
        assert m.live == m.peak - 32 == 32
    assert set(types) == {torch.Tensor}


def test_sparse_gradients():
    table = nn.Embedding(1000, 4, sparse=True)
    with Meter() as m:
        m.track(table.parameters(), PARAMETERS)
        table(torch.tensor([3, 5])).sum().backward()
        assert m.track([table.weight.grad], GRADIENTS) == 2 * 8 + 2 * 16
        assert m.by_kind() == {PARAMETERS: 16000, GRADIENTS: 48}
    with pytest.raises(TypeError, match=r"layout torch\.sparse_csr"):
        list(parts(torch.eye(2).to_sparse_csr()))


def test_restarted():
    with Meter(record=True) as m:
        x, y, z = torch.empty(4), torch.empty(8), torch.empty(16)
        m.track([x], PARAMETERS), m.track([y], EXCHANGE)
        m.restart(keep=[EXCHANGE])
        assert (m.live, m.peak) == (32, 32) and m.by_kind() == m.peak_by_kind() == {EXCHANGE: 32}
        del z  # not known to the meter since the restart
        assert m.live == 32
        x.add_(1)  # known again
        assert m.by_kind() == {EXCHANGE: 32, TEMPORARY: 16} and m.mark(ACTIVATIONS) == 0
        del y
        assert m.by_kind() == {TEMPORARY: 16} and m.peak_by_kind() == {EXCHANGE: 32, TEMPORARY: 16}
        m.restart()
        assert m.live == m.peak == 0 and m.events == []


def test_closed():
    with Meter() as m:
        x = torch.ones(4)
    m.close()
    del x
    assert m.live == 16 and m.by_kind() == {}


# -- inside the package's op -------------------------------------------------------------------------------------------
@torch.library.custom_op("lightning_dilated::_metered", mutates_args=())
def metered(x: torch.Tensor) -> torch.Tensor:
    """Allocates 4096 bytes during the call."""
    room = x.new_zeros(1024)
    return x + room[:1]


@torch.library.custom_op("lightning_dilated::_shrunk", mutates_args=("x",))
def shrunk(x: torch.Tensor) -> None:
    """Resizes the memory of a tensor to 4 bytes."""
    x.untyped_storage().resize_(4)


@metered.register_fake
def _(x):
    return torch.empty_like(x)


def test_inside(monkeypatch):
    x = torch.ones(4)
    for looked, peak in (((), 32), (("lightning_dilated",), 16 + 4096 + 16)):
        monkeypatch.setattr(meter, "LOOK_INTO", looked)
        with Meter() as m:
            y = metered(x)
            assert (m.live, m.peak) == (32, peak) and torch.equal(y, x)
    with Meter() as m:
        shrunk(y := torch.ones(4))
        assert m.live == 4 and m.peak == 16
    with FakeTensorMode() as mode, Meter() as m:  # operations on a fake tensor are not executed
        metered(mode.from_tensor(x))
    assert m.peak == 32


def test_attention_saves_what_it_says():
    """The op saves q, k, v, out ((1, 32, 2, 8) floats, 2048 bytes each) and lse (1, 2, 32), on one rank no more."""
    q, k, v = (torch.randn(1, 32, 2, 8, requires_grad=True) for _ in range(3))
    pattern = DilatedPattern.longnet([8, 32], [1, 2])
    with Meter() as m:
        m.track([q, k, v], PARAMETERS)
        out, *_ = ATTENTION(q, k, v, None, None, None, encode(pattern, True, 0.3, needs_grad=True))
        assert m.mark(ACTIVATIONS) == 2048 + 256
        assert m.peak > m.live  # temporary memory of the engine
        out.sum().backward()
        del out, _
        assert m.track([q.grad, k.grad, v.grad], GRADIENTS) == 3 * 2048
        assert m.by_kind() == {PARAMETERS: 3 * 2048, GRADIENTS: 3 * 2048}


# -- a GPU -------------------------------------------------------------------------------------------------------------
@pytest.mark.gpu
def test_the_allocator_agrees():
    device = torch.device("cuda")
    model, x = mlp().to(device), torch.ones(4, 8, device=device)
    list(step(model, x))  # libraries allocate their workspaces in this step
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with Meter(device="cuda", round_to=512) as m:
        held = m.track([*model.parameters(), x], PARAMETERS)
        run = step(model, x)
        next(run)
        assert torch.cuda.memory_allocated() - before == m.live - held > 0
        list(run)
        assert torch.cuda.memory_allocated() - before == m.live - held > 0
