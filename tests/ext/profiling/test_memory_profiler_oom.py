"""Out of memory: the report, the rank that writes it, and that it contacts no other rank."""

import warnings
from unittest import mock

import pytest
import torch

from lightning_dilated.ext.profiling.memory import probe
from lightning_dilated.ext.profiling.memory import profiler as memory_profiler
from lightning_dilated.ext.profiling.memory.profiler import (
    GENERAL,
    MemoryProfiler,
    advise,
    find_shortage,
    in_words,
    parse,
    report,
)

from ...models import loader
from ...models import trainer as quiet
from ...strategy.runs import launched, trainer
from .stacks import Kept, Stack, batches

pytestmark = pytest.mark.full

GIB, MIB = 2**30, 2**20
#: messages of torch's allocators for CUDA and for the CPU, with numbers from public reports
MESSAGES = {
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 5.06 GiB is free. "
    "Including non-PyTorch memory, this process has 74.04 GiB memory in use. Of the allocated memory 72.50 GiB is allocated "
    "by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try "
    "setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management  "
    "(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)": {
        "asked": 20 * GIB,
        "total": round(79.11 * GIB),
        "free": round(5.06 * GIB),
        "allocated": round(72.5 * GIB),
        "unused": 512 * MIB,
    },
    "CUDA out of memory. Tried to allocate 546.00 MiB. GPU 0 has a total capacity of 15.77 GiB of which 514.19 MiB is free. "
    "Process 562167 has 15.25 GiB memory in use. 15.25 GiB allowed; Of the allocated memory 13.73 GiB is allocated by "
    "PyTorch, with 46.00 MiB allocated in private pools (e.g., CUDA Graphs), and 736.86 MiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.": {
        "asked": 546 * MIB,
        "total": round(15.77 * GIB),
        "free": round(514.19 * MIB),
        "allowed": round(15.25 * GIB),
        "allocated": round(13.73 * GIB),
        "unused": round(736.86 * MIB),
    },
    "CUDA out of memory. Tried to allocate 2 bytes. GPU 1 has a total capacity of 8.00 GiB of which 0 bytes is free. Of the "
    "allocated memory 14.51 GiB is allocated by PyTorch, and 15.90 MiB is reserved by PyTorch but unallocated.": {
        "asked": 2,
        "total": 8 * GIB,
        "free": 0,
        "allocated": round(14.51 * GIB),
        "unused": round(15.9 * MIB),
    },
    "CUDA out of memory. Tried to allocate 384.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 977.00 MiB is "
    "free. Including non-PyTorch memory, this process has 138.62 GiB memory in use. 135.95 GiB allowed; Of the "
    "allocated memory 135.46 GiB is allocated by PyTorch, and 179.75 MiB is reserved by PyTorch but unallocated.": {
        "asked": 384 * MIB,
        "total": round(139.8 * GIB),
        "free": 977 * MIB,
        "allowed": round(135.95 * GIB),
        "allocated": round(135.46 * GIB),
        "unused": round(179.75 * MIB),
    },
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4000000000 bytes. Error code 12 (Cannot allocate memory)": {"asked": 4_000_000_000},
    "something else": {},
}


@pytest.mark.parametrize("text", MESSAGES)
def test_messages(text):
    assert parse(text) == MESSAGES[text]


def test_what_is_told():
    first, second, third, limited, cpu, other = MESSAGES
    said = report(3, "backward of block 7 of 12", 41, first, {"parameters": 2 * GIB, "temporary": 0}, "Do this.")
    assert said == (
        "MemoryProfiler: rank 3 ran out of memory in step 41, backward of block 7 of 12: an allocation of 20.00 GiB failed. "
        "5.06 GiB of 79.11 GiB was free; 14.94 GiB at least was missing; torch held 512.00 MiB in pieces that nothing "
        "used.\n"
        "Held by parameters 2.00 GiB.\nDo this."
    )
    said = report(0, "x", 0, second, {}, None)
    assert "31.81 MiB at least was missing" in said and "set PYTORCH_ALLOC_CONF=expandable_segments:True" in said
    assert said.endswith(GENERAL) and "Held by" not in said
    assert "an allocation of 2 bytes failed. 0 bytes of 8.00 GiB was free" in report(0, "x", 0, third, {}, None)
    said = report(0, "x", 0, limited, {}, None)  # the process limit is reached before the GPU is full
    assert "322.01 MiB of 139.80 GiB was free; 61.99 MiB at least was missing" in said
    assert "an allocation of 3.73 GiB failed. \n" in report(0, "x", 0, cpu, {}, None)
    assert "x: an allocation failed. \n" in report(0, "x", 0, other, {}, None)
    assert [in_words(x) for x in (0, 1023, 1536, 3 * MIB)] == ["0 bytes", "1023 bytes", "1.50 KiB", "3.00 MiB"]


def test_which_error():
    oom, cpu = torch.OutOfMemoryError("CUDA"), RuntimeError(list(MESSAGES)[4])
    assert find_shortage(oom) is oom and find_shortage(cpu) is cpu and find_shortage(ValueError("no")) is None
    with pytest.raises(RuntimeError) as real:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert find_shortage(real.value) is real.value and parse(str(real.value)) == {"asked": 1 << 50}
    outer = RuntimeError("in a worker")
    outer.__cause__ = oom
    assert find_shortage(outer) is oom
    outer.__cause__ = outer  # a cycle of causes does not loop forever
    assert find_shortage(outer) is None


def test_advice(monkeypatch):
    monkeypatch.setattr(memory_profiler, "planned", lambda trainer, module: f"Set {trainer} and {module}.")
    assert advise(1, 2) == "Set 1 and 2."
    monkeypatch.setattr(memory_profiler, "planned", lambda trainer, module: 1 / 0)
    assert advise(1, 2).startswith(GENERAL) and "ZeroDivisionError: division by zero" in advise(1, 2)


# -- in fits -----------------------------------------------------------------------------------------------------------
class Forward:
    """Raises in the n-th forward of a block."""

    def __init__(self, n):
        self.left = n

    def __call__(self, out):
        self.left -= 1
        if self.left < 0:
            raise torch.OutOfMemoryError(next(iter(MESSAGES)))
        return out


class Fault(torch.autograd.Function):
    """The identity, with a backward that calls a function."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.call(grad), None


class Backward(Forward):
    """Raises in the n-th backward of a block."""

    def __call__(self, out):
        return Fault.apply(out, super().__call__)


def fails(folder, profiler, where, block=1, steps=4, **options):
    """Return the warning of a fit that runs out of memory."""
    module, logger = Stack(), Kept()
    module.layers[block].fails = where
    built = quiet(max_steps=steps, callbacks=[profiler], logger=logger, default_root_dir=folder, **options)
    with (
        warnings.catch_warnings(record=True) as warned,
        pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 20"),
    ):
        warnings.simplefilter("always")
        built.fit(module, loader(*batches(8)), loader(*batches(1)))
    assert all("_compiled_call_impl" not in x.__dict__ for x in module.layers)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    (said,) = [str(x.message) for x in warned if "MemoryProfiler" in str(x.message)]
    return said


@pytest.mark.parametrize("every", [1, 50])
def test_in_the_forward(tmp_path, monkeypatch, every):
    """The third step fails in its forward, whether or not the profiler measures this step."""
    monkeypatch.setattr(memory_profiler, "planned", lambda trainer, module: f"{type(module).__name__} needs less.")
    said = fails(tmp_path, MemoryProfiler(every), Forward(2))
    assert "rank 0 ran out of memory in step 2, forward of block 2 of 2: an allocation of 20.00 GiB failed" in said
    known = "Held by parameters 512 bytes, gradients 512 bytes, optimizer states 512 bytes, "
    details = "batch 128 bytes, saved activations 256 bytes" if every == 1 else "activations and temporary 72.50 GiB"
    assert said.endswith(f"\n{known}{details}.\nStack needs less.")
    assert not list(tmp_path.glob("*.pickle"))  # the CPU's allocator cannot write snapshots


def test_in_the_backward(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_profiler, "planned", lambda trainer, module: None)
    said = fails(tmp_path, MemoryProfiler(1), Backward(1), block=0)
    assert "in step 1, backward of block 1 of 2: " in said and said.endswith(GENERAL)
    assert "Held by parameters 512 bytes, gradients 256 bytes, optimizer states 512 bytes, batch 128 bytes" in said


def test_in_validation(tmp_path):
    said = fails(tmp_path, MemoryProfiler(1), Forward(1), val_check_interval=1)
    assert "in step 0, validation: " in said or "in step 1, validation: " in said


def test_in_the_optimizer(tmp_path):
    class Full(Stack):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            optimizer.register_step_post_hook(
                mock.Mock(side_effect=torch.OutOfMemoryError("Tried to allocate 2 bytes."))
            )
            return optimizer

    built = quiet(max_steps=2, callbacks=[MemoryProfiler(1)], default_root_dir=tmp_path)
    with pytest.warns(UserWarning, match="in step 0, optimizer: an allocation of 2 bytes"), pytest.raises(RuntimeError):
        built.fit(Full(), loader(*batches(8)))


def test_another_error_is_not_told(tmp_path):
    module = Stack()
    module.layers[1].fails = mock.Mock(side_effect=ValueError("trouble"))
    built = quiet(max_steps=2, callbacks=[MemoryProfiler(1)], default_root_dir=tmp_path)
    with warnings.catch_warnings(record=True) as warned, pytest.raises(ValueError, match="trouble"):
        warnings.simplefilter("always")
        built.fit(module, loader(*batches(8)))
    assert not [x for x in warned if "MemoryProfiler" in str(x.message)]


def test_trouble_while_telling(tmp_path, monkeypatch):
    """If the report fails, the error of the run is raised nevertheless."""
    monkeypatch.setattr(MemoryProfiler, "_message", mock.Mock(side_effect=KeyError("lost")))
    assert "could not say what filled the memory: KeyError('lost')" in fails(tmp_path, MemoryProfiler(1), Forward(0))


def one_of_two_fails(rank, group):
    """Rank 1 runs out of memory while rank 0 raises another error. No rank waits for the other."""
    module = Stack()
    errors = [ValueError("trouble"), torch.OutOfMemoryError(next(iter(MESSAGES)))]
    module.layers[1].fails = mock.Mock(side_effect=errors[rank])
    built = trainer("ddp", launched(rank), max_steps=2, callbacks=[MemoryProfiler(1, timeline=False)])
    with warnings.catch_warnings(record=True) as warned, pytest.raises(type(errors[rank])):
        warnings.simplefilter("always")
        built.fit(module, loader(*batches(8)))
    return [str(x.message) for x in warned if "MemoryProfiler" in str(x.message)]


def test_no_other_rank_is_asked(pool):
    first, second = pool.run(2, one_of_two_fails)
    assert first == [] and "rank 1 ran out of memory in step 0, forward of block 2 of 2" in second[0]


# -- snapshots ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def recorded(monkeypatch):
    """Record the calls of torch's memory history recorder."""
    calls = []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda *a, **k: calls.append(k.get("enabled", "all")))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: calls.append(path))
    return calls


def test_snapshots(tmp_path, recorded):
    snapshots = probe.Snapshots((1, 3), torch.device("cuda"))
    for step in range(5):
        snapshots.begin(step)
        snapshots.end(step, tmp_path / "new", 2)
    assert recorded == ["all", str(tmp_path / "new" / "memory_steps_1_to_2_rank_2.pickle"), None]
    assert snapshots.write(tmp_path / "x.pickle") and recorded[3:] == [str(tmp_path / "x.pickle")]
    short = probe.Snapshots((0, 9), torch.device("cuda"))
    short.begin(0)
    short.stop()
    assert recorded[4:] == ["all", None]
    assert not probe.Snapshots(None, torch.device("cpu")).write(tmp_path / "y.pickle") and len(recorded) == 6


def test_a_snapshot_where_memory_ran_out(tmp_path, recorded, monkeypatch):
    monkeypatch.setattr(
        probe.Snapshots,
        "__init__",
        lambda self, steps, device: vars(self).update(steps=None, device=torch.device("cuda"), recording=False),
    )
    said = fails(tmp_path, MemoryProfiler(1), Forward(0))
    path = str(tmp_path / "memory_oom_rank_0.pickle")
    assert said.endswith(f"A snapshot for pytorch.org/memory_viz: {path}") and recorded == [path]
    assert "A snapshot" not in fails(tmp_path, MemoryProfiler(1, snapshot_on_oom=False), Forward(0))
