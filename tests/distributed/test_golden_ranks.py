"""The recorded cases on 2 and 4 ranks. The release's distributed code is wrong by 14 to 150 % on the causal cases."""

from pathlib import Path

import pytest
import torch

from lightning_dilated.attention import dilated_attention
from lightning_dilated.pattern import DilatedPattern

from ..attention.reference import close
from .calls import positions, sequence

FILES = sorted((Path(__file__).parents[1] / "golden" / "longnet_torchscale").glob("*.pt"))


def recorded(rank, group, path, exchange, head_size):
    """Return (positions, out, dq, dk, dv) of this rank."""
    data = torch.load(path, weights_only=True)
    pattern = DilatedPattern.longnet(data["segment_lengths"], data["dilation_rates"], offsets="blocked")
    with sequence(group, exchange=exchange, head_size=head_size) as ours:
        own_positions = positions(ours, data["q"].shape[1])
        q, k, v = (data[x].double()[:, own_positions].requires_grad_() for x in "qkv")
        out = dilated_attention(q, k, v, pattern, causal=data["causal"], scale=data["scale"], sequence=ours)
        return (
            torch.tensor(own_positions),
            out.detach(),
            *torch.autograd.grad(out, (q, k, v), data["grad_out"].double()[:, own_positions]),
        )


@pytest.mark.parametrize("exchange, head_size", [("gather", 1), ("ring", 1), ("switch", 1), ("auto", 2)])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_longnet_on_ranks(pool, path, ranks, exchange, head_size):
    data = torch.load(path, weights_only=True)
    parts = pool.run(ranks, recorded, path, exchange, head_size)
    where = torch.cat([p[0] for p in parts])
    for i, name in enumerate(("out", "dq", "dk", "dv"), 1):
        got = torch.cat([p[i] for p in parts], 1)[:, torch.argsort(where)]
        close(f"{name} of {path.stem}", got, data[f"exact64_{name}"], 1e-12)
