"""Sending tensors to a GPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_dilated import _device as transfer
from lightning_dilated._device import send
from lightning_dilated.sequence.collectives import scalar

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def test_on_the_cpu_as_it_is():
    x = torch.arange(3)
    assert send(x, CPU) is x


def test_by_pinned_memory_only_outside_of_traces():
    x = torch.arange(3)
    assert not transfer._copies_directly(x, GPU)
    assert transfer._copies_directly(x, CPU) and transfer._copies_directly(x[:0], GPU)
    traced = torch.compile(lambda x: x + int(transfer._copies_directly(x, GPU)), fullgraph=True, backend="eager")
    assert traced(x).tolist() == [1, 2, 3]
    with FakeTensorMode():
        assert transfer._copies_directly(torch.arange(3), GPU)


def test_scalars():
    for x, dtype in ((3, torch.int64), (0.5, torch.float32), (torch.tensor(3.0, dtype=torch.float64), torch.float64)):
        sent = scalar(x, CPU)
        assert sent.shape == () and sent.dtype == dtype and sent == x
    np = pytest.importorskip("numpy")
    assert scalar(np.float64(0.1), CPU).dtype == torch.float64 and scalar(np.array(3), CPU) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("pinned", [False, True])
def test_written_to_after_it_was_sent(pinned):
    x = torch.arange(1 << 20)
    x = x.pin_memory() if pinned else x
    for _ in range(3):
        torch.cuda._sleep(200_000_000)
        sent = send(x, GPU)
        x += 1
        torch.cuda.synchronize()
        assert torch.equal(sent.cpu(), x - 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nothing_is_waited_for():
    x = torch.arange(1 << 16)
    send(x, GPU), send(x, GPU)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        send(x, GPU)
        scalar(3, GPU)
        with pytest.raises(RuntimeError, match="synchron"):
            x.to(GPU)
    finally:
        torch.cuda.set_sync_debug_mode("default")
