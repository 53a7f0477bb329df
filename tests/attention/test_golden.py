"""Results of released implementations, with which models were trained, equal the results of this package."""

from pathlib import Path

import pytest
import torch

from lightning_dilated.attention import dilated_attention
from lightning_dilated.pattern import DilatedPattern

from .reference import close, gradients

GOLDEN = Path(__file__).parents[1] / "golden"
LONGNET = sorted((GOLDEN / "longnet_torchscale").glob("*.pt"))
HEAD_GROUPS = sorted((GOLDEN / "head_groups").glob("*.pt"))
ENGINES = ("math", "cpu_flash")
name_of = lambda path: path.stem  # noqa: E731


def load(path):
    data = torch.load(path, weights_only=True)
    q, k, v = (data[x].double().requires_grad_() for x in "qkv")
    return data, q, k, v, data["grad_out"].double()


def longnet(data, padding):
    return DilatedPattern.longnet(data["segment_lengths"], data["dilation_rates"], offsets="blocked", padding=padding)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("path", LONGNET, ids=name_of)
def test_longnet_exact(path, engine):
    data, q, k, v, grad = load(path)
    pattern = longnet(data, "masked")
    out = dilated_attention(q, k, v, pattern, causal=data["causal"], scale=data["scale"], engine=engine)
    for name, got in zip(("out", "dq", "dk", "dv"), (out, *gradients(out, (q, k, v), grad)), strict=True):
        close(f"{name} of {pattern}", got, data[f"exact64_{name}"], 1e-12)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("path", LONGNET, ids=name_of)
def test_longnet_release(path, engine):
    """padding="attended" equals the release's output. So does padding="masked" if the release attended to no pads."""
    data, q, k, v, _ = load(path)
    options = {"causal": data["causal"], "scale": data["scale"], "engine": engine}
    close("attended", dilated_attention(q, k, v, longnet(data, "attended"), **options), data["peer64_out"], 1e-12)
    masked = dilated_attention(q, k, v, longnet(data, "masked"), **options)
    assert torch.allclose(masked, data["peer64_out"], atol=1e-12) is not data["zero_pads_attended"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("path", HEAD_GROUPS, ids=name_of)
def test_head_groups(path, engine):
    data, q, k, v, grad = load(path)
    pattern = DilatedPattern.head_groups(data["segment_lengths"], data["dilation_rates"], data["num_heads"])
    out = dilated_attention(q, k, v, pattern, causal=data["causal"], scale=data["scale"], engine=engine)
    out = out / len(pattern.branches)  # the release divides by the number of branches
    for name, got in zip(("out", "dq", "dk", "dv"), (out, *gradients(out, (q, k, v), grad)), strict=True):
        close(f"{name} of {pattern}", got, data[f"peer64_{name}"], 1e-12)


def test_every_recording_is_here():
    assert len(LONGNET) == 7 and len(HEAD_GROUPS) == 3
    attended = [torch.load(p, weights_only=True)["zero_pads_attended"] for p in LONGNET]
    assert any(attended) and not all(attended)
