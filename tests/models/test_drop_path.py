"""Stochastic depth drops whole samples at the published rates, keeps the mean, and is reproducible by seed."""

import pytest
import torch

from lightning_dilated.models.blocks import BlockOptions, drop_path_factors, drop_path_rates
from lightning_dilated.models.transformer import DilatedTransformer

from . import PATTERN


def stack(rate, depth=3):
    torch.manual_seed(0)
    return DilatedTransformer(16, [PATTERN] * depth, 4, causal=False, options=BlockOptions(drop_path=rate)).double()


def test_rates_rise_linearly():
    assert drop_path_rates(0.4, 5) == pytest.approx([0, 0.1, 0.2, 0.3, 0.4]) and drop_path_rates(0.4, 1) == [0]


def test_factors():
    x = torch.empty(20000, 1, 1)
    got = drop_path_factors(0.5, 3, x)
    assert got.shape == (3, 2, 20000, 1, 1)
    for layer, p in zip(got, (0.0, 0.25, 0.5), strict=True):
        assert set(layer.unique().tolist()) == ({1.0} if p == 0 else {0.0, torch.tensor(1 / (1 - p)).item()})
        assert layer.mean().item() == pytest.approx(1, abs=0.02) and (layer == 0).double().mean() == pytest.approx(
            p, abs=0.02
        )
    assert not torch.equal(got[2, 0], got[2, 1])  # attention and feed-forward of a sample are dropped independently
    assert drop_path_factors(0.0, 3, x) is None


def test_a_dropped_branch_adds_nothing():
    model, x = stack(0.999999999), torch.randn(2, 20, 16, dtype=torch.float64)
    want = model.blocks[0](x)  # the second layer drops half of the branches, the last layer all of them
    drops = drop_path_factors_of(model, x, seed=5)
    torch.manual_seed(5)
    got = model(x)
    for block, drop in zip(model.blocks[1:], drops[1:], strict=True):
        y = want + drop[0] * block.attention(block.attention_norm(want))[0]
        want = y + drop[1] * block.ffn(block.ffn_norm(y))
    torch.testing.assert_close(got, model.norm(want))
    assert not drops[2].any() and 0 < (drops[1] == 0).sum() < 4


def drop_path_factors_of(model, x, seed):
    torch.manual_seed(seed)
    return drop_path_factors(model.drop_path, len(model.blocks), x)


def test_in_training_only():
    model, x = stack(0.5), torch.randn(4, 20, 16, dtype=torch.float64)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))
