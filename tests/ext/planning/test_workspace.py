"""Memory of the op besides its inputs, against peaks measured on an H200 and counted by hand."""

from dataclasses import replace

import pytest
import torch

from lightning_dilated.attention.executors import fused
from lightning_dilated.ext.planning.counting.workspace import OpCall, engine_of, workspace
from lightning_dilated.pattern import Branch, DilatedPattern, Global

GIB = 2**30
FIVE = DilatedPattern.longnet([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])
GIGAPATH = DilatedPattern.longnet([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16], offsets="blocked")

#: benchmarks/results/2026-11-21_h200_speed.md and 2026-11-22_h200_speed.md: GiB besides q, k, v and dO
MEASURED = {
    "32,768": (OpCall(FIVE, 12, 12, 64, False, 32768, engine="cudnn"), 0.33),
    "131,072": (OpCall(FIVE, 12, 12, 64, True, 131072), 1.31),
    "1,048,576": (OpCall(FIVE, 12, 12, 64, True, 1 << 20), 8.10),
    "ten branches": (OpCall(DilatedPattern.geometric(2048, 1 << 20), 12, 12, 64, True, 1 << 20), 8.19),
    "GigaPath's": (OpCall(GIGAPATH, 16, 16, 48, False, 1 << 20), 9.45),
    "grouped launch": (OpCall(FIVE, 12, 12, 64, True, 131072, engine="triton"), 1.51),
}


def peak(call):
    """Return the peak bytes of both passes besides q, k, v and dO. The backward also needs the forward's results."""
    forward, backward = workspace(call)
    return sum(call.results) + max(backward, forward - call.results[1])


@pytest.mark.parametrize("name", MEASURED)
def test_measured(name):
    call, gib = MEASURED[name]
    assert peak(call) / GIB == pytest.approx(gib, rel=0.01, abs=0.005)


def test_by_hand():
    """Without stretches, the first branch writes into the result. The second branch needs additional memory."""
    pattern, n = DilatedPattern.longnet([64, 128], [1, 2]), 1024
    call = OpCall(pattern, 2, 2, 64, False, n, engine="cudnn")
    rows, row = 2 * n, 64 * 2
    # the second branch has half of the rows; its backward needs dq in fp32, delta and the log-sum-exp
    own = rows * (row + 4)
    # the first branch writes into out, and its log-sum-exp exists until the branches are merged
    assert workspace(call)[0] == rows // 2 * (row + 4) + 0 * own
    assert workspace(call)[1] == rows // 2 * (3 * row + 4 * 64 + 8)
    assert call.results == (rows * (row + 4), 3 * rows * row)


@pytest.mark.parametrize("tokens", [1 << 10, 1 << 20])
def test_a_block_of_everything_is_the_result(tokens):
    """Dense attention needs only the workspace of the engine, at any length."""
    call = OpCall(DilatedPattern.dense(), 16, 16, 128, True, tokens, engine="cudnn")
    assert workspace(call) == (0, call.rows * (4 * 128 + 2 * 4))


@pytest.mark.parametrize("engine", ["triton", "cudnn"])
def test_global_tokens(engine):
    """Other branches have fp32 results, and the blocks of global tokens are computed one at a time."""
    pattern, n = DilatedPattern([(64, 1), (128, 2), Global(4)]), 1024
    call = OpCall(pattern, 2, 2, 64, False, n, engine=engine)
    without_global = replace(call, pattern=DilatedPattern([(64, 1), (128, 2)]), final=False)
    rows, row = 2 * n, 64 * 2
    crossing = (rows - 2 * 4) * (row + 2 * 4 * 64 + 4 * 4)  # other tokens attend to the four global ones
    assert workspace(call)[0] == max(workspace(without_global)[0], rows * 2 * 64 + crossing)
    part = (rows - 2 * 4) * (3 * row + 2 * 4 + (4 * 64 if engine == "cudnn" else 0))
    assert workspace(call)[1] == 3 * rows * row + max(workspace(without_global)[1], part, 3 * rows * row)


def test_stretches_bound_it(monkeypatch):
    """Beyond the limits the workspace of the dense branch stops growing."""
    monkeypatch.setattr(fused, "UNIT", 1)  # only the limits named below take effect
    for name, times in (("FORWARD", 4), ("DENSE", 1), ("THIN", 2), ("ONE_PIECE", 2)):
        monkeypatch.setattr(fused, name, times * 4096 * 2 * 64)
    workspace.cache_clear()
    try:
        pattern = DilatedPattern.longnet([64, 128], [1, 2])
        call = OpCall(pattern, 2, 2, 64, False, 65536, engine="cudnn")
        assert workspace(call)[1] == workspace(replace(call, tokens=2 * 65536))[1] > 0
        row = 2 * 64 * 2
        dense, thin = 4096 * 3 * row, 8192 // 2 * 3 * row
        assert workspace(call)[1] == dense + thin + 4096 * 2 * (4 * 64 + 8)
    finally:
        workspace.cache_clear()


@pytest.mark.parametrize("change, engine", [
    ({}, "cudnn"),
    ({"tokens": 4096}, "triton"),  # on this GPU, small blocks run in grouped launches
    ({"tokens": 4096, "capability": (8, 0)}, "cudnn"),
    ({"tokens": 200_000}, "cudnn"),
    ({"tokens": 200_001}, "triton"),  # not a multiple of 64, and the next call may have another length
    ({"tokens": 200_001, "whole": 400_064}, "cudnn"),
    ({"tokens": 200_000, "whole": 400_001}, "triton"),
    ({"dtype": torch.float32}, "triton"),
    ({"head_dim": 256}, "flash"),
    ({"dropout": True}, "triton"),
    ({"engine": "math"}, "math"),
])  # fmt: skip
def test_engine_of_a_gpu(change, engine):
    """The choice does not depend on this machine's GPU."""
    assert engine_of(replace(OpCall(FIVE, 12, 12, 64, True, 1 << 20), **change)).name == engine


def test_no_engine_of_a_family():
    with pytest.raises(ValueError, match=r"cudnn takes a head dim up to 128, not 512.*'math'"):
        engine_of(OpCall(FIVE, 12, 12, 512, True, 4096, engine="sdpa"))


def test_overlapping_branches_go_one_by_one():
    """Three dense branches are merged one after the other into fp32 sums."""
    three = OpCall(DilatedPattern([Branch(w, 1) for w in (64, 128, 256)]), 2, 2, 64, False, 4096, engine="cudnn")
    nine = replace(three, pattern=DilatedPattern([Branch(64 + i, 1) for i in range(9)]))
    rows = 2 * 4096
    assert workspace(three)[1] >= 3 * rows * 64 * 4 - three.results[1]
    assert workspace(nine)[1] <= workspace(three)[1]


def test_nothing_of_nothing():
    assert workspace(OpCall(FIVE, 12, 12, 64, True, 0)) == (0, 0)


def test_a_window_of_heads_needs_its_share():
    call = OpCall(FIVE, 12, 12, 64, True, 1 << 17, engine="cudnn")
    some = replace(call, window=(0, 3))
    assert 0 < workspace(some)[1] <= workspace(call)[1] // 3
