"""Parts of the profiler: finding and following blocks, host memory, numbers and points."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_dilated.ext.planning import host
from lightning_dilated.ext.planning.counting.memory_tracker import ACTIVATIONS, GRADIENTS, PARAMETERS, TEMPORARY
from lightning_dilated.ext.planning.host import host_memory
from lightning_dilated.ext.profiling.memory.phases import (
    BACKWARD,
    FORWARD,
    OPTIMIZING,
    REST,
    Phase,
    Watch,
    bytes_of,
    find_blocks,
    shares,
    states,
    tensors_of,
)
from lightning_dilated.ext.profiling.memory.probe import Measured, Span
from lightning_dilated.ext.profiling.memory.profiler import MemoryProfiler
from lightning_dilated.ext.profiling.memory.report import metrics, numbers, rows_of, show, top_of, unit_of

from ...models import loader, tiny
from ...models import trainer as quiet
from .stacks import Block, Stack, batches


# -- blocks ------------------------------------------------------------------------------------------------------------
def test_which_blocks():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(
                nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleDict({"a": Block()})])
            )
            self.layers = nn.ModuleList([Stack(3)])
            self.inner[0].append(self.inner[0][0][0])  # a second reference to a block

    module = Nested()
    blocks = find_blocks(module)
    listed = module.inner[0]
    assert blocks == [listed[0][0], listed[0][1], listed[1]["a"], module.layers[0]]
    model = tiny()
    assert find_blocks(model) == list(model.transformer.blocks) and find_blocks(nn.Linear(2, 2)) == []


def followed(module, x, run=None):
    """Return the phases that end during a forward and a backward."""
    watch, ended = Watch(module), []
    watch.attach()
    watch.start()
    watch.border = ended.append
    out = (module if run is None else run)(x)
    watch.enter(BACKWARD)
    out.sum().backward()
    watch.enter(REST)
    watch.stop()
    watch.detach()
    assert all("_compiled_call_impl" not in b.__dict__ for b in watch.blocks if b._compiled_call_impl is None)
    return [(x.stage, x.block) for x in ended]


F, B = FORWARD, BACKWARD
FORWARDS = [(F, None), (F, 0), (F, None), (F, 1), (F, None)]


@pytest.mark.parametrize("again", [None, "reentrant", "other"])
def test_the_order_of_phases(again):
    assert followed(Stack(2, again), torch.ones(4, 8)) == [*FORWARDS, (B, None), (B, 1), (B, 0)]


def test_what_lies_between_blocks():
    """The backward of the first and of the second block ends when the gradient of the block's input exists."""
    module, between = Stack(2), nn.Linear(8, 8)
    run = lambda x: module.layers[1](between(module.layers[0](between(x))))  # noqa: E731
    assert followed(module, torch.ones(4, 8), run) == [*FORWARDS, (B, None), (B, 1), (B, None), (B, 0), (B, None)]


def test_compiled_blocks():
    """Compiled blocks are followed from outside: one graph per block, for any number of steps, followed or not."""
    module, graphs = Stack(2), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for block in module.layers:
        block.compile(backend=backend, fullgraph=True)
    before = [block._compiled_call_impl for block in module.layers]
    module(torch.ones(4, 8))
    compiled = len(graphs)
    assert 1 <= compiled <= 2
    for _ in range(2):
        assert followed(module, torch.ones(4, 8)) == [*FORWARDS, (B, None), (B, 1), (B, 0)]
    assert len(graphs) == compiled and [block._compiled_call_impl for block in module.layers] == before
    torch._dynamo.reset()


def test_a_compiled_whole():
    """In a module compiled as a whole, blocks cannot be distinguished, but total numbers remain."""
    module = Stack(2)
    torch._dynamo.reset()
    whole = torch.compile(module, backend="eager", fullgraph=True)
    assert followed(module, torch.ones(4, 8), whole) == [(F, None), (B, None)]
    torch._dynamo.reset()


def test_copies_are_not_followed():
    module = Stack(2)
    watch = Watch(module)
    watch.attach()
    other = copy.deepcopy(module)
    nn.init.zeros_(other.layers[0].linear.weight)
    assert other(torch.ones(4, 8)).abs().sum() == 0 and all(x._compiled_call_impl is None for x in other.layers)
    assert module.state_dict().keys() == other.state_dict().keys()
    watch.detach()


# -- bytes -------------------------------------------------------------------------------------------------------------
def test_shares():
    """If the known bytes exceed the allocated bytes, later kinds are reduced."""
    parts = shares(700, {PARAMETERS: 512, GRADIENTS: 512, ACTIVATIONS: -5})
    assert parts[PARAMETERS] == 512 and parts[GRADIENTS] == 188 and parts[ACTIVATIONS] == parts[TEMPORARY] == 0
    assert sum(parts.values()) == 700


def test_tensors():
    x = torch.ones(4)
    cpu = torch.device("cpu")
    assert bytes_of([x, x[2:], torch.ones(1), torch.empty(3, device="meta")], cpu) == 20
    assert tensors_of({"a": [x, 3], "b": None}) == [x] and states([object()]) == []
    assert states([SimpleNamespace(state={x: {"step": 3, "m": x}})]) == [x]


# -- the host ----------------------------------------------------------------------------------------------------------
def test_host_memory(tmp_path, monkeypatch):
    status = tmp_path / "status"
    status.write_text("Name:\tx\nVmHWM:\t     200 kB\nVmRSS:\t     150 kB\n")
    assert host_memory(status) == {"host": 150 * 1024, "host_peak": 200 * 1024, "pinned": None}
    elsewhere = host_memory(tmp_path / "none")
    assert elsewhere["host"] is None and elsewhere["host_peak"] > 10**7
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(host.torch.cuda, "host_memory_stats", lambda: {"allocated_bytes.current": 77}, raising=False)
    assert host_memory(status)["pinned"] == 77
    monkeypatch.setattr(host, "pinned_bytes", lambda: 23)  # bytes of offloaded block inputs
    assert host_memory(status)["pinned"] == 100


# -- numbers -----------------------------------------------------------------------------------------------------------
def test_numbers(capsys):
    """Two ranks with reserved bytes. The second rank did not run the backward of its block."""
    host = {"host": 3_000_000, "host_peak": 4_000_000, "pinned": None}
    spans = lambda n: [  # noqa: E731
        *(Span(Phase(FORWARD, 0), 0, 1, n, n + 5, {ACTIVATIONS: n}), Span(Phase(FORWARD, 0), 1, 2, n - 1, n + 6, {})),
        Span(Phase(OPTIMIZING), 2, 3, 7, 8, {}),
    ]
    first = numbers(Measured(4, [*spans(2_000_000), Span(Phase(BACKWARD, 0), 3, 4, 9, 9, {})], []), 1, host)
    gathered = torch.stack([first, numbers(Measured(4, spans(6_000_000), []), 1, host)])
    logged = metrics(gathered, 1)
    assert logged["memory/peak_mb"] == logged["memory/forward_block_1_mb"] == 6 and logged["memory/peak_min_mb"] == 2
    assert logged["memory/forward_reserved_mb"] == 6.000006 and logged["memory/forward_reserved_min_mb"] == 2.000006
    assert logged["memory/host_mb"] == 3 and "memory/pinned_mb" not in logged and "memory/backward_mb" not in logged
    assert logged["memory/at_peak/saved_activations_mb"] == 6
    top, rows = top_of(gathered, 1, 4), rows_of(gathered, 1)
    assert (top.allocated, top.rank, top.step, top.phase) == (6_000_000, 1, 4, Phase(FORWARD, 0))
    assert [x.phase for x in rows] == [Phase(FORWARD, 0), Phase(BACKWARD, 0), Phase(OPTIMIZING)]
    assert (rows[0].allocated, rows[0].rank, rows[0].least, rows[0].reserved) == (6_000_000, 1, 2_000_000, 6_000_006)
    show(rows, top, 1, 9, gathered)
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "most of 9 steps" in said
        and "reserved MB" in said
        and "│ forward of block 1 of 1 │ 6.000 │ 1 │ 2.000 │ 6.000 │" in said
    )
    assert [unit_of(x)[1] for x in (2e9, 2e6, 2e3, 2, 0)] == ["GB", "MB", "kB", "bytes", "bytes"]


# -- refusals ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "settings, error, message",
    [
        ({"every_n_steps": 0}, ValueError, "every_n_steps must be at least 1, got 0"),
        ({"folder": ""}, TypeError, "folder must be a path, or None, got ''"),
        ({"timeline": 1}, TypeError, "timeline must be True or False, got 1"),
        ({"snapshot_on_oom": None}, TypeError, "snapshot_on_oom must be True or False, got None"),
        ({"snapshot_steps": 3}, TypeError, "snapshot_steps must be two integers .start, stop., or None, got 3"),
        ({"snapshot_steps": (1, 2.5)}, TypeError, "snapshot_steps must be two integers"),
        ({"snapshot_steps": (3, 3)}, ValueError, "0 <= start < stop, got .3, 3."),
    ],
)
def test_arguments(settings, error, message):
    with pytest.raises(error, match=message):
        MemoryProfiler(**settings)


@pytest.mark.parametrize(
    "profilers, message",
    [
        ([MemoryProfiler(), MemoryProfiler()], "one MemoryProfiler per Trainer"),
        ([MemoryProfiler(snapshot_steps=(1, 3))], r"snapshot_steps=\(1, 3\) records CUDA's allocator, .* on cpu"),
    ],
)
def test_refused_before_training(tmp_path, profilers, message):
    trainer = quiet(max_steps=1, callbacks=profilers, default_root_dir=tmp_path)
    with pytest.raises(ValueError, match=message):
        trainer.fit(Stack(), loader(*batches(1)))
    assert trainer.global_step == 0
