"""Fits over NCCL leave nothing behind. Errors name ranks that drift."""

import os
from functools import partial

import pytest

from lightning_dilated import RingDilatedStrategy

from ..distributed.test_nccl import on_gpus
from .runs import Data, Run, make, trainer
from .test_alike import Counting, Drift
from .test_leaves_nothing import held

pytestmark = pytest.mark.gpu

SMALL = Run(steps=1, precision="32-true")
DEVICE = {"accelerator": "gpu"}


def join(rank, ranks):
    """Set a launcher's environment variables. Trainers then create the process groups."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(x) for name, x in variables.items()}, TORCHELASTIC_RUN_ID="tests")


def many_fits(rank, ranks, fsdp):
    """Raise if this process has more resources after the 53rd fit than after the third."""
    join(rank, ranks)
    counts = []

    def fit():
        built, model, data, _ = make(SMALL.but(fsdp=fsdp), ranks, **DEVICE)
        built.fit(model, data)
        counts.append((built, model))

    for _ in range(3):  # the first fits load kernels
        fit()
    before = held()
    for _ in range(50):
        fit()
    after = held()
    grown = {x: (before[x], n) for x, n in after.items() if isinstance(n, int) and n > before[x]}
    assert not grown and before["threads"] == after["threads"] and before["handlers"] == after["handlers"], grown


@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_fifty_fits(ranks, fsdp):
    on_gpus(ranks, partial(many_fits, fsdp=fsdp), group=False)


def drifting(rank, ranks):
    """Return (error of a fit in which rank 1 drifts, step of the error) for a weight, a learning rate, and no drift."""
    join(rank, ranks)
    results = []
    for what in ("weight", "learning rate", "nothing"):
        strategy = RingDilatedStrategy(check_replicas=1)
        built = trainer(strategy, ranks, max_steps=6, callbacks=[Drift(what)], **DEVICE)
        try:
            built.fit(Counting(), Data(SMALL))
        except RuntimeError as error:
            results.append((str(error), built.global_step))
        else:
            results.append(("", built.global_step))
    return results


def test_parameters_that_drift():
    *drifted, nothing = on_gpus(2, drifting, group=False)
    for error, step in drifted:
        assert "ranks [0, 1] of the job hold unlike values" in error and "embedding.weight" in error, error
        assert step <= 4
    assert nothing == ("", 6)
