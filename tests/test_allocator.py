"""leave_room limits the share of a GPU that torch's allocator may use: simulated cases, and a real GPU."""

import pytest
import torch

from lightning_dilated import _device as allocator

GIB = 2**30


class Gpu:
    """A GPU with 100 GiB, as torch reports it."""

    def __init__(self, monkeypatch, free, held, fraction=1.0):
        self.free, self.held, self.fraction = free, held, fraction
        monkeypatch.setattr(allocator, "_limits", {})
        for name, value in {
            "mem_get_info": lambda device: (int(self.free * GIB), 100 * GIB),
            "memory_reserved": lambda device: int(self.held * GIB),
            "get_per_process_memory_fraction": lambda device: self.fraction,
            "set_per_process_memory_fraction": lambda fraction, device: setattr(self, "fraction", fraction),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


@pytest.mark.parametrize(
    "free, held, before, after",
    [
        (97, 1, 1.0, 0.97),  # CUDA and NCCL use 2 GiB, 1 GiB is left free
        (0, 96, 1.0, 0.95),  # nothing is free: cached memory is released when more is needed
        (97, 1, 0.5, 0.5),  # the user has set a lower limit
        (97, 1, 0.99, 0.97),
        (50, 10, 1.0, 1.0),  # other processes use 40 GiB
        (0.2, 0.1, 1.0, 1.0),
    ],
)
def test_a_gib_is_left(free, held, before, after, monkeypatch):
    gpu = Gpu(monkeypatch, free, held, before)
    allocator.leave_room(torch.device("cuda", 0))
    assert gpu.fraction == pytest.approx(after)


def test_a_later_call_may_give_more(monkeypatch):
    gpu = Gpu(monkeypatch, 94, 1)
    allocator.leave_room(torch.device("cuda", 0))
    gpu.free = 97
    allocator.leave_room(torch.device("cuda", 0))
    assert gpu.fraction == pytest.approx(0.97)


def test_a_cpu_has_no_limit(monkeypatch):
    gpu = Gpu(monkeypatch, 97, 1)
    allocator.leave_room(torch.device("cpu"))
    assert gpu.fraction == 1.0


@pytest.mark.gpu
def test_on_a_gpu():
    """Allocate as much as possible: a GiB is left for others, and freed memory can be allocated again."""
    device = torch.device("cuda", 0)
    (free, total), held = torch.cuda.mem_get_info(device), torch.cuda.memory_reserved(device)
    if total - free - held > allocator.LIBRARIES:
        pytest.skip("other processes hold memory of this GPU")
    allocator.leave_room(device)
    taken = []
    try:
        with pytest.raises(torch.OutOfMemoryError):
            while True:
                taken.append(torch.empty(GIB // 2, dtype=torch.uint8, device=device))
        assert len(taken) > 4
        assert GIB <= torch.cuda.mem_get_info(device)[0] < 2 * GIB
        half = len(taken) // 2
        del taken[half:]
        taken.append(torch.empty(GIB // 4 * half, dtype=torch.uint8, device=device))
    finally:
        del taken
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0, device)
