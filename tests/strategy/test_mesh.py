"""Mesh sizes and wrong options of the strategies: errors in Trainer(...), before anything starts."""

from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.fsdp import CPUOffloadPolicy

from lightning_dilated import OuterSteps, RingDilatedFSDPStrategy, RingDilatedStrategy
from lightning_dilated.sequence import Links
from lightning_dilated.strategy import parallelize
from lightning_dilated.strategy.mesh import MeshSizes, RunGroups

from .runs import trainer


@pytest.mark.parametrize(
    "world, sequence, head, want",
    [
        (1, "auto", 1, (1, 1, 1)),
        (4, "auto", 1, (1, 4, 1)),
        (4, 2, 2, (2, 1, 2)),
        (12, 6, 3, (2, 2, 3)),
        (8, 1, 1, (8, 1, 1)),
        (8, [8, 4, 2], 1, (1, 8, 1)),
        (6, [8, 4, 2], 1, (3, 2, 1)),
        (12, [2, 4], 2, (3, 2, 2)),
        (8, 4, "auto", (2, 4, 1)),
    ],
)
def test_shape(world, sequence, head, want):
    assert MeshSizes(world, sequence, head).shape == want


OUTER = {"outer": OuterSteps()}
#: (options of RingDilatedStrategy, part of the error that the constructor or Trainer(...) raises)
WRONG = [
    ({"sequence_size": 3}, r"sequence_size=3 must divide the 4 ranks .*\[1, 2, 4\]"),
    ({"head_size": 3}, r"head_size=3 must divide sequence_size=4; allowed: \[1, 2, 4\]"),
    ({"sequence_size": 2, "head_size": 4}, "head_size=4 must divide sequence_size=2"),
    ({"head_size": "all"}, 'head_size must be "auto" or a number of ranks'),
    ({"sequence_size": "all"}, 'sequence_size must be "auto", a number of ranks or a list'),
    ({"sequence_size": [8, 3]}, r"none of sequence_size=\[8, 3\] divides the 4 ranks .*\[1, 2, 4\]. Add 1"),
    ({"sequence_size": []}, r"none of sequence_size=\[\]"),
    ({"sequence_size": [2, 0]}, "sequence_size must be at least 1"),
    ({"sequence_size": [4, 2], "head_size": 3}, "head_size=3 must divide sequence_size=4"),
    ({"global_batch": 0}, "global_batch must be at least 1"),
    ({"sequence_size": 0}, "sequence_size"),
    ({"exchange": "rings"}, "exchange must be one of auto, gather"),
    ({"layout": "blocks"}, "layout must be one of auto, contiguous, zigzag, strided"),
    ({"bucket_cap_mb": 0}, "bucket_cap_mb must be at least 1"),
    ({"timeout": 0}, r"timeout must be a number in \(0, inf\), got 0. It is in seconds"),
    ({"start_method": "forkserver"}, "start_method must be one of popen, spawn, fork"),  # it shares memory
    ({"regions": 2}, "would never be synchronized: set outer=OuterSteps"),
    ({"regions": "auto"}, "regions='auto' train apart"),
    ({"regions": "two", **OUTER}, "each node is one"),
    ({"regions": 0, **OUTER}, "regions must be at least 1"),
    ({"regions": 2, "outer": {"every": 3}}, "outer must be lightning_dilated.Outer"),
    ({"regions": 3, **OUTER}, r"regions=3 must divide the 4 ranks .* allowed: \[1, 2, 4\]"),
    ({"regions": 2, "sequence_size": 4, **OUTER}, r"must divide the 2 ranks of each of 2 regions .* allowed: \[1, 2\]"),
    ({"regions": 2, "sequence_size": [3, 4], **OUTER}, r"none of sequence_size=\[3, 4\] divides the 2 ranks of each"),
    ({"links": "none.json"}, r"none\.json: No such file .*bench links --output"),
    ({"links": Links()}, "links must be the path of a file"),
    ({"cpu_offload": True}, r"takes no cpu_offload: use RingDilatedFSDPStrategy\(cpu_offload=True\)"),
    (
        {"cpu_offload": CPUOffloadPolicy(pin_memory=False)},
        r"use RingDilatedFSDPStrategy\(cpu_offload=CPUOffloadPolicy\(pin_memory=False",
    ),
]
#: options of RingDilatedFSDPStrategy
WRONG_SHARDED = [
    ({"regions": 2}, "checkpoints hold one sharded model and optimizer"),
    (OUTER, "Take RingDilatedStrategy"),
    ({"links": "none.json"}, r"none\.json: No such file .*bench links --output"),
    ({"links": Links()}, "links must be the path of a file"),
    *(
        ({"cpu_offload": x}, f"cpu_offload must be True, False or .*CPUOffloadPolicy.*got {x!r}")
        for x in ("cpu", 1, None)
    ),
]


@pytest.mark.parametrize(
    "strategy, options, words",
    [*((RingDilatedStrategy, *x) for x in WRONG), *((RingDilatedFSDPStrategy, *x) for x in WRONG_SHARDED)],
)
def test_wrong_options(strategy, options, words):
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=words):
        trainer(strategy(**options), 4)


@pytest.mark.parametrize("name", ["ring_dilated", "ring_dilated_notebook"])
def test_by_name(name):
    strategy = trainer(name, 2).strategy
    assert isinstance(strategy, RingDilatedStrategy) and strategy.sizes.shape == (1, 2, 1)
    assert strategy._start_method == ("fork" if "notebook" in name else "popen")


def test_asked_too_early():
    strategy = trainer("ring_dilated", 1).strategy
    for name in ("sequence", "device_mesh"):
        with pytest.raises(RuntimeError, match="when the Trainer runs"):
            getattr(strategy, name)


def test_the_other_lightning_does_not_know_the_name():
    # `pytorch_lightning` is a separate package with its own registry, in which this package registers nothing
    assert pl.strategies.StrategyRegistry["ring_dilated"]["strategy"] is RingDilatedStrategy


@pytest.mark.parametrize(
    "backend, nodes, given, bucket, beside",
    [
        ("nccl", 1, None, parallelize.ONE_BUCKET, False),
        ("nccl", 2, None, None, True),
        ("nccl", 1, 25, 25, True),
        ("gloo", 1, None, None, None),
        ("gloo", 1, 7, 7, None),
    ],
)
def test_buckets_of_gradients(monkeypatch, backend, nodes, given, bucket, beside):
    """One node sends one bucket after the backward. Several nodes send buckets during it, on few thread blocks."""
    runs = []
    monkeypatch.setattr(parallelize, "gradient_group", lambda timeout, overlapped: runs.append(overlapped) or "a group")
    monkeypatch.setattr(RingDilatedStrategy, "sizes", SimpleNamespace(region_size=2))
    monkeypatch.setattr(
        DDPStrategy, "configure_ddp", lambda self: setattr(self, "model", SimpleNamespace(**self._ddp_kwargs))
    )
    strategy = RingDilatedStrategy(process_group_backend=backend, bucket_cap_mb=given)
    strategy._run_groups = RunGroups()
    strategy.num_nodes, strategy._lightning_module = nodes, SimpleNamespace(trainer=None)
    strategy.configure_ddp()
    settings = vars(strategy.model)
    assert settings.get("bucket_cap_mb") == bucket
    assert runs == ([] if beside is None else [beside]) and ("process_group" in settings) == (beside is not None)
