"""Private interfaces of torch that sequence groups use. If one changes, the failing test names it."""

from datetime import timedelta

import torch

from lightning_dilated._compat.torch import gloo_backend


def gathered(rank, group):
    """Gather the numbers of all ranks, over two backends with different names."""
    out = []
    for name in ("first", "second"):
        tensors = [torch.empty(1) for _ in range(group.size())]
        gloo_backend(group, name, timedelta(seconds=30)).allgather([tensors], [torch.tensor([rank + 1.0])]).wait()
        out.append([x.item() for x in tensors])
    return out


def test_a_gloo_backend_of_its_own(pool):
    """This depends on the default store and on the constructor of ProcessGroupGloo, as in torch 2.11 to 2.13."""
    assert pool.run(2, gathered) == [[[1.0, 2.0]] * 2] * 2
