"""LongNetLM in an active sequence: sums over ranks of loss and gradients equal one rank's, packed or not."""

from itertools import pairwise

import pytest
import torch

from lightning_dilated import DilatedPattern, MultiheadDilatedAttention, Recurrence
from lightning_dilated.ext.planning.counting.model_specs import counted_model_of
from lightning_dilated.ext.planning.estimate import Facts, estimate
from lightning_dilated.ext.planning.gpus import GPUS
from lightning_dilated.ext.planning.setup import Setup
from lightning_dilated.memory.settings import MemorySettings

from ..models import tiny
from .calls import positions, sequence

N = 37
BOUNDS = [0, 9, 10, 23, N]
LABELS_END = [i - 1 for i in BOUNDS[1:]]
MODELS = {
    "as they are": {},
    "shifted layers": {"shift_layers": "odd"},
    "shifted layers below 16, gqa": {"shift_layers": "odd", "shift_below": 16, "num_kv_heads": 2},
    "hybrid": {"pattern": {"hybrid": {"local": 5, "global_every": 2}}, "depth": 4, "rotary_base": [1e4, "none", 1e5]},
    "hybrid, gqa, far": {
        "pattern": {"hybrid": {"local": 4, "global_every": 3, "far": {"segment_lengths": [16], "dilation_rates": [2]}}},
        "depth": 3,
        "num_kv_heads": 2,
    },
    "hybrid, gqa, kv_conv": {
        "pattern": {"hybrid": {"local": 5, "global_every": 2}}, "depth": 2, "num_kv_heads": 2, "kv_conv": 4,
        "global_rotary": False,
    },
    "recurrence": {"recurrence": [{}, {"kind": "delta", "segment": 5}], "num_kv_heads": 2},
    "recurrence, linear": {"recurrence": {"kind": "linear", "segment": 4, "conv": 0}, "kv_conv": 3},
}  # fmt: skip


def model(options):
    """Build a model that has the same weights on every rank."""
    torch.manual_seed(6)
    net = tiny(**{"pattern": DilatedPattern.longnet([4, 16], [1, 2]), **options})
    for name, parameter in net.named_parameters():
        if "conv" in name or name.endswith("recurrence.scale"):  # initial values would have no effect
            torch.nn.init.normal_(parameter, std=0.3)
    return net


def data(packed):
    """Return one row of tokens. The last token of a document has no label."""
    rng = torch.Generator().manual_seed(8)
    tokens, labels = (torch.randint(11, (1, N), generator=rng) for _ in range(2))
    labels[:, LABELS_END] = -100
    return {
        "tokens": tokens,
        "labels": labels,
        **({"cu_seqlens": torch.tensor(BOUNDS, dtype=torch.int32)} if packed else {}),
    }


def terms(net, batch):
    """Return [sum of the loss, number of labels, gradient of each parameter]."""
    total, count = net.loss_terms(batch)
    return [total.detach(), count, *torch.autograd.grad(total, list(net.parameters()))]


def part(rank, group, options, packed, layout):
    with sequence(group, layout=layout) as ours, ours.active():
        at = positions(ours, N)
        batch = {k: v if k == "cu_seqlens" else v[:, at] for k, v in data(packed).items()}
        return terms(model(options), batch)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_equal_one(pool, name, packed, ranks, layout):
    want = terms(model(MODELS[name]), data(packed))
    if packed:  # one row equals the separate documents
        whole = data(packed)
        apart = [
            terms(model(MODELS[name]), {k: whole[k][:, a:b] for k in ("tokens", "labels")}) for a, b in pairwise(BOUNDS)
        ]
        close([sum(column) for column in zip(*apart, strict=True)], want)
    parts = pool.run(ranks, part, MODELS[name], packed, layout)
    close([sum(column) for column in zip(*parts, strict=True)], want)


def close(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def exchanged(rank, group, kind):
    """Return the bytes that a layer with a recurrence received, (forward, backward)."""
    layer = MultiheadDilatedAttention(
        16, 4, DilatedPattern.dense(4), num_kv_heads=2, causal=True, recurrence=kind, dtype=torch.float32
    )
    with sequence(group) as ours, ours.active():
        layer(torch.randn(1, 4, 16))[0].sum().backward()
        return ours.forward_traffic.received, ours.backward_traffic.received


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["gated_delta", "linear", "delta"])
def test_maps_of_a_recurrence_are_as_many_bytes_as_said(pool, kind, ranks):
    """Only the recurrence sends rows: segments are as long as a rank's tokens, and there is no convolution."""
    recurrence = Recurrence(kind, None if kind == "gated_delta" else 4, conv=0)
    want = recurrence.exchanged_bytes(ranks, 2, 4)
    results = pool.run(ranks, exchanged, recurrence)
    assert max(forward for forward, _ in results) == 2 * want  # the backward repeats the forward
    assert max(backward for _, backward in results) == want


# -- the plan ----------------------------------------------------------------------------------------------------------
CUT = 64  # 4 ranks of 16 tokens: no unshifted segment crosses ranks


TURNS = {
    "the second shifted": {"shift_layers": "odd", "depth": 3},
    "hybrid": {"pattern": {"hybrid": {"local": 16, "global_every": 3}}, "depth": 5},
}


def received(rank, group, name):
    """Return the bytes received in a step, (forward, backward)."""
    with sequence(group) as ours, ours.active():
        net, tokens = model(TURNS[name]), torch.zeros(1, 16, dtype=torch.int64)
        terms(net, {"tokens": tokens, "labels": tokens})
        return ours.forward_traffic.received, ours.backward_traffic.received


@pytest.mark.parametrize("name", TURNS)
def test_plan_of_layers_that_differ(pool, name):
    """`plan` predicts the transferred bytes. It counts fp32, and these ranks use fp64, so the factor is 2."""
    net = model(TURNS[name])
    facts = Facts.of(net, counted_model_of(net, "32-true"))
    step = estimate(facts, MemorySettings(), CUT, Setup("ring_dilated", 4, 4), GPUS["H200"]).step
    means = torch.tensor(pool.run(4, received, name), dtype=torch.float64).mean(0)
    assert means.tolist() == [2 * step.bytes(run)[0] for run in ("forward", "backward")] and means.min() > 0
