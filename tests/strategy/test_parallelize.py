"""`parallelize` lists its hooks in the order in which Lightning calls them."""

from typing import get_args
from unittest import mock

import pytest

from lightning_dilated.strategy import ddp, parallelize, sequence_strategy

from .runs import Run, launched, make


def hooks(rank, group, fsdp):
    """The hooks of a fit, in the order of their first calls."""
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
    want = [hook for hook in get_args(parallelize.Hook) if not (fsdp and hook == "_setup_model")]
    for calls in pools(2).run(2, hooks, fsdp):
        assert list(dict.fromkeys(calls)) == want
        assert calls.count("training_step") == 1  # before the first step only
