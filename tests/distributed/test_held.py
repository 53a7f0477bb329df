"""What a rank holds in a step of many is what one rank holds of as many tokens, where no segment reaches beyond them."""

import pytest
import torch

from lightning_dilated import LongNetLM
from lightning_dilated.models.memory import MemorySettings
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.planning.counting.meter import Meter
from lightning_dilated.sequence import SequenceGroup

from .test_trust import as_on_gpus

L = 512
SETTINGS = [
    MemorySettings("block", every=2, offload=1, tile=128, head_chunks=2),
    MemorySettings("block", offload=0.5),
    MemorySettings("attention-kept"),
]


def made(settings):
    torch.manual_seed(0)
    model = LongNetLM(DilatedPattern([(128, 1), (256, 2)]), dim=32, depth=8, num_heads=4)
    model.configure_model()
    model.transformer.memory = settings
    return model


def step(model):
    tokens = torch.arange(L)[None] % 256
    loss, _ = model.token_mean({"tokens": tokens, "labels": tokens})
    loss.backward()
    model.zero_grad(set_to_none=True)


def peak(model):
    """Bytes of a step, the second one."""
    step(model)
    with Meter() as meter:
        step(model)
    return meter.peak


def ranks_peak(rank, group, settings):
    model, ours = made(settings), SequenceGroup(group)
    as_on_gpus(ours)
    try:
        with ours.active(), ours.trusting():
            found = peak(model)
            ours.settle()
    finally:
        ours.close()
    return found


@pytest.mark.parametrize("settings", SETTINGS, ids=["tiled", "block", "attention-kept"])
def test_ranks_hold_what_one_does(pool, settings):
    alone = peak(made(settings))
    for found in pool.run(2, ranks_peak, settings):
        assert abs(found - alone) < 0.01 * alone, (found, alone)
