"""The profiler on GPUs, with a simulated allocator and with the real one."""

from types import SimpleNamespace

import pytest
import torch

from lightning_dilated.ext.planning.counting.memory_tracker import (
    ACTIVATIONS,
    BATCH,
    EXCHANGE,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARY,
)
from lightning_dilated.ext.profiling.memory.phases import BACKWARD, FORWARD, OPTIMIZING, REST, Phase, Watch
from lightning_dilated.ext.profiling.memory.probe import CudaProbe
from lightning_dilated.ext.profiling.memory.profiler import MemoryProfiler
from lightning_dilated.sequence.exchange.transport import Traffic

from ...models import loader
from ...models import trainer as quiet
from .stacks import Stack, batches


# -- CUDA's allocator, played ------------------------------------------------------------------------------------------
class Allocator:
    """Reports numbers in the format of torch.cuda."""

    def __init__(self, monkeypatch, current):
        self.current = self.peak = current
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", self.stats)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.current)

    def stats(self, device):
        entry = lambda n: {"all": {"current": self.current + n, "peak": self.peak + n}}  # noqa: E731
        return {"allocated_bytes": entry(0), "reserved_bytes": entry(5000)}

    def reset(self, device):
        self.peak = self.current

    def go(self, current, peak):
        """Set a peak, then the current number of bytes."""
        self.current, self.peak = current, max(self.peak, peak)


def played(monkeypatch, exchange="gather"):
    """Simulate a step of two blocks. It starts with 8152 bytes: weights 512, momenta 512, batch 128, other owners 7000."""
    module, allocator, x = Stack(2), Allocator(monkeypatch, 8152), torch.ones(4, 8)
    optimizer = module.configure_optimizers()
    optimizer.state = {p: {"momentum_buffer": torch.zeros_like(p)} for p in module.parameters()}
    sequence = SimpleNamespace(
        forward_traffic=Traffic(), backward_traffic=Traffic("backward"), plan=SimpleNamespace(exchange=exchange)
    )
    watch = Watch(module)
    probe = CudaProbe(torch.device("cpu"), module, watch, sequence)
    probe.start()
    watch.start()
    allocator.go(8152, 9999)  # a peak from before the step does not count
    probe.resume(x, [optimizer])
    watch.border = probe.border

    def then(phase, current, peak, received=0, sent=0):
        """End the current phase with these numbers, and begin another phase."""
        way = sequence.backward_traffic if watch.phase.stage == BACKWARD else sequence.forward_traffic
        way.received_from[1] += received
        way.sent_to[1] += sent
        allocator.go(current, peak)
        watch.enter(*phase)

    then((FORWARD, 0), 8160, 8170)
    then((FORWARD,), 9160, 9660, received=300, sent=100)
    then((FORWARD, 1), 9160, 9160)
    then((FORWARD,), 10160, 10760, received=300, sent=100)
    then((BACKWARD,), 10200, 10300)
    then((BACKWARD, 1), 10200, 10250)
    module.layers[1].linear.weight.grad = torch.zeros(8, 8)
    then((BACKWARD, 0), 9516, 11000, received=50, sent=20)
    module.layers[0].linear.weight.grad = torch.zeros(8, 8)
    then((REST,), 8664, 9900)
    then((OPTIMIZING,), 8664, 8664)
    probe.pause(watch.phase, [optimizer])
    return probe, probe.finish(7)


def test_the_allocator(monkeypatch):
    probe, measured = played(monkeypatch)
    spans = [(x.phase, x.allocated, x.reserved, x.kinds) for x in measured.spans]
    base = {PARAMETERS: 512, OPTIMIZER: 512, BATCH: 128}
    none = {GRADIENTS: 0, EXCHANGE: 0, ACTIVATIONS: 0}
    kinds = lambda **amounts: {**base, **none, **{names[k]: n for k, n in amounts.items()}}  # noqa: E731
    names = {"g": GRADIENTS, "e": EXCHANGE, "a": ACTIVATIONS, "t": TEMPORARY}
    assert spans == [
        # memory of other owners always counts as temporary
        (Phase(FORWARD), 8170, 13170, kinds(a=8, t=7010)),
        # 1000 bytes remain, including 300 of rows; 400 bytes are in transit
        (Phase(FORWARD, 0), 9660, 14660, kinds(a=708, e=400, t=7400)),
        (Phase(FORWARD), 9160, 14160, kinds(a=708, e=300, t=7000)),
        (Phase(FORWARD, 1), 10760, 15760, kinds(a=1408, e=700, t=7500)),
        (Phase(FORWARD), 10300, 15300, kinds(a=1448, e=600, t=7100)),
        (Phase(BACKWARD), 10250, 15250, kinds(a=1448, e=600, t=7050)),
        # activations as at the start of the phase, which frees them together with their rows
        (Phase(BACKWARD, 1), 11000, 16000, kinds(a=1448, e=670, t=7730)),
        (Phase(BACKWARD, 0), 9900, 14900, kinds(a=808, e=300, g=256, t=7384)),
        (Phase(REST), 8664, 13664, kinds(g=512, t=7000)),
        (Phase(OPTIMIZING), 8664, 13664, kinds(g=512, t=7000)),
    ]
    assert probe.overall == (11000, 16000)
    assert all(sum(x.kinds.values()) == x.allocated for x in measured.spans) and measured.step == 7
    assert measured.points[0][1] == spans[0][3] and len(measured.points) == len(spans) + 1
    assert measured.top.phase == Phase(BACKWARD, 1)
    assert probe.held(8800) == {**kinds(g=512), TEMPORARY: 8800 - 512 * 3 - 128}


def test_the_allocator_around_the_ring(monkeypatch):
    """Rows that a ring receives are not saved for the backward."""
    measured = played(monkeypatch, "ring")[1]
    spans = {(x.phase, i): x.kinds for i, x in enumerate(measured.spans)}
    assert spans[Phase(FORWARD, 0), 1][ACTIVATIONS] == 1008 and spans[Phase(FORWARD), 2][EXCHANGE] == 0


# -- a GPU -------------------------------------------------------------------------------------------------------------
@pytest.mark.gpu
def test_a_gpu(tmp_path):
    """Peaks do not exceed reserved memory. They exceed the CPU's by memory that libraries allocate."""
    profiler = MemoryProfiler(1, folder=tmp_path, snapshot_steps=(1, 2))
    built = quiet(max_steps=3, callbacks=[profiler], accelerator="gpu", devices=1)
    torch.cuda.reset_peak_memory_stats()
    built.fit(Stack(3), loader(*batches(4, 1 << 20)))  # 32 MB per activation
    spans = {x.phase: x for x in profiler.measured.spans if x.phase != Phase(FORWARD)}
    x = 32 << 20
    assert (
        spans[Phase(FORWARD, 2)].kinds[ACTIVATIONS] // x == 3 and spans[Phase(FORWARD, 0)].kinds[ACTIVATIONS] // x == 1
    )
    # batch, saved activations, output of the Linear; plus memory of libraries, such as cuBLAS's workspace
    assert 1 + 3 + 1 <= spans[Phase(FORWARD, 2)].allocated // x < 8
    assert spans[Phase(BACKWARD, 0)].kinds[BATCH] == x and spans[Phase(OPTIMIZING)].kinds[GRADIENTS] == 3 * 256
    assert all(sum(s.kinds.values()) == s.allocated <= s.reserved for s in profiler.measured.spans)
    assert profiler.peak_allocated == profiler.top.allocated >= torch.cuda.max_memory_allocated()
    assert profiler.rows[0].reserved is not None and (tmp_path / "memory_timeline.png").exists()
    assert (tmp_path / "memory_steps_1_to_1_rank_0.pickle").stat().st_size > 1000


@pytest.mark.gpu
def test_a_gpu_that_is_full(tmp_path):
    module = Stack(2)
    module.layers[1].fails = lambda out: torch.empty(1 << 50, dtype=torch.uint8, device=out.device)
    built = quiet(max_steps=1, callbacks=[MemoryProfiler(folder=tmp_path)], accelerator="gpu", devices=1)
    warning = pytest.warns(UserWarning, match=r"forward of block 2 of 2: an allocation of 1048576.00 GiB failed")
    with warning as warned, pytest.raises(torch.OutOfMemoryError):
        built.fit(module, loader(*batches(2)))
    assert any("at least was missing" in str(w.message) for w in warned)
    assert (tmp_path / "memory_oom_rank_0.pickle").exists()
