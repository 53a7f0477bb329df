"""TokenMean: a mean over tokens, with sums that stay float64 even if the model is cast."""

import pytest
import torch
from torch import nn

from lightning_dilated.models.metrics import TokenMean


@pytest.mark.parametrize("cast", ["bfloat16", "half", "float", "to", "to twice"])
def test_sums_stay_wide(cast):
    """In bf16, a sum of ones would stop at 256."""
    module = nn.ModuleDict({"linear": nn.Linear(2, 2), "mean": TokenMean()})
    if cast.startswith("to"):
        module.to(torch.bfloat16)
        module.to("cpu", torch.float16 if cast == "to twice" else None)
    else:
        getattr(module, cast)()
    assert module["linear"].weight.dtype != torch.float64
    for again in range(2):
        for _ in range(1000):
            module["mean"].update(torch.tensor(1.0, dtype=torch.bfloat16), 3)
        assert module["mean"].total.dtype == module["mean"].tokens.dtype == torch.float64
        assert module["mean"].compute() == pytest.approx(1 / 3, rel=1e-7), again
        module["mean"].reset()


def test_follows_the_device():
    module = nn.ModuleDict({"mean": TokenMean()}).to("meta")
    assert module["mean"].total.device.type == "meta" and module["mean"].total.dtype == torch.float64


def test_nan_shows():
    mean = TokenMean()
    mean.update(torch.tensor(float("nan")), 1)
    assert mean.compute().isnan()
