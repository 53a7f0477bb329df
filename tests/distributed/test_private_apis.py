"""Private interfaces of torch that sequence groups use: a failure here names the one that changed."""

from datetime import timedelta

import torch

from lightning_dilated._compat.torch import gloo_backend


def gathered(rank, group):
    """Gather every rank's number over backends of two names."""
    out = []
    for name in ("first", "second"):
        tensors = [torch.empty(1) for _ in range(group.size())]
        gloo_backend(group, name, timedelta(seconds=30)).allgather([tensors], [torch.tensor([rank + 1.0])]).wait()
        out.append([x.item() for x in tensors])
    return out


def test_a_gloo_backend_of_its_own(pool):
    """Uses the default store, and the constructor of ProcessGroupGloo, as of torch 2.11 to 2.13."""
    assert pool.run(2, gathered) == [[[1.0, 2.0]] * 2] * 2
