"""`parallelize` lists the hooks in the order in which Lightning calls them."""

from typing import get_args
from unittest import mock

import pytest
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from lightning_dilated import OuterSteps
from lightning_dilated.sequence.consensus import ControlGroup
from lightning_dilated.strategy import ddp, parallelize, sequence_strategy

from .runs import Run, launched, make


def hooks(rank, group, fsdp):
    """Return the hooks that a fit calls, in the order of their first calls."""
    calls = []

    def record(strategy, hook, *args):
        calls.append(hook)
        return parallelize.parallelize(strategy, hook, *args)

    built, model, data, _ = make(Run(fsdp=fsdp, double=True, steps=2), launched(rank))
    with mock.patch.object(sequence_strategy, "parallelize", record), mock.patch.object(ddp, "parallelize", record):
        built.fit(model, data)
    return calls


@pytest.mark.parametrize("fsdp", [False, True])
def test_order_of_hooks(pools, fsdp):
    want = [hook for hook in get_args(parallelize.Hook) if not (fsdp and hook == "configure_ddp")]
    for calls in pools(2).run(2, hooks, fsdp):
        assert list(dict.fromkeys(calls)) == want
        assert calls.count("training_step") == 1  # all of them run before the first step


def moved_to(rank, group):
    """Return the devices to which DDP moves its inputs if `device_ids` is set, as Lightning does on GPUs."""
    devices, configure, forward = [], DDPStrategy.configure_ddp, DistributedDataParallel._pre_forward

    def on_gpu(strategy):
        configure(strategy)
        strategy.model.device_ids = [0]

    def recorded(wrapped, *args, **options):
        devices.append(wrapped.device_ids)
        return forward(wrapped, *args, **options)

    built, model, data, _ = make(Run(steps=1), launched(rank))
    with (
        mock.patch.object(DDPStrategy, "configure_ddp", on_gpu),
        mock.patch.object(DistributedDataParallel, "_pre_forward", recorded),
    ):
        built.fit(model, data)
    return devices


def test_ddp_leaves_batches_where_they_are(pools):
    """The module's `transfer_batch_to_device` decides, because a stream keeps its tokens on the host."""
    for devices in pools(2).run(2, moved_to):
        assert devices == [None]


def wrapped(rank, group, strategy):
    """Return, for each step, whether DDP wraps the module."""
    built, model, data, _ = make(Run(steps=2, batch_size=2, strategy=strategy), launched(rank))
    kinds = []
    model.on_train_batch_start = lambda *_: kinds.append(isinstance(built.strategy.model, DistributedDataParallel))
    built.fit(model, data)
    assert built.strategy.model is model  # unwrapped, as Lightning leaves it
    return kinds


@pytest.mark.parametrize("ranks, regions, want", [(1, 1, False), (2, 2, False), (2, 1, True)])
def test_a_rank_that_averages_with_no_other_is_not_wrapped(pools, ranks, regions, want):
    """Without other ranks DDP is not used, because it would copy each gradient twice and store all of them again."""
    strategy = {"regions": regions, "outer": OuterSteps(every=1)} if regions > 1 else {}
    for kinds in pools(ranks).run(ranks, wrapped, strategy):
        assert kinds == [want, want]


def alone(rank, group):
    """Train one rank, where any message to another rank raises."""
    built, model, data, record = make(Run(steps=2), launched(rank))
    refused = mock.Mock(side_effect=AssertionError("a rank alone waits for nobody"))
    model.on_train_start = lambda: [patch.start() for patch in patches]
    model.on_train_end = lambda: [patch.stop() for patch in patches]
    patches = mock.patch.object(dist, "all_reduce", refused), mock.patch.object(ControlGroup, "start_gather", refused)
    built.fit(model, data)
    return len(record.losses), refused.called


def test_steps_of_one_rank_send_nothing(pools):
    assert pools(1).run(1, alone) == [(2, False)]
