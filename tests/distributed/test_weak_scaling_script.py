"""benchmarks/weak_scaling.py on two ranks of torchrun: its row, with the bytes of the plan."""

import math
from pathlib import Path

import pytest

from lightning_dilated import DilatedPattern
from lightning_dilated.ext.profiling.planned import moved
from lightning_dilated.sequence.planner import make_problem

from .forked import run_ranks

pytestmark = pytest.mark.full

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "weak_scaling.py"
RANKS, TOKENS, FIRST, DIM, DEPTH, HEADS = 2, 1024, 1024, 256, 2, 4
ON_CPU = "--accelerator cpu --precision 32-true --no-compile --steps 2 --warm 2"
SIZES = f"--tokens {TOKENS} --first {FIRST} --dim {DIM} --depth {DEPTH} --heads {HEADS} {ON_CPU}"
COLUMNS = [
    *("GPUs", "tokens of each", "widest segment", "strategy", "exchange, head_size", "recompute", "ms"),
    *("thousand tokens/s of each", "of all", "exposed ms", "received MB forward", "backward", "peak GiB", "loss"),
]


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def planned(exchange):
    """Return the planned bytes of a step, (forward, backward), each on the rank that receives the most."""
    n = RANKS * TOKENS
    problem = make_problem(DilatedPattern.geometric(FIRST, n), n, HEADS, ranks=RANKS, causal=True)
    passes = [moved(problem, exchange, rank, RANKS, DIM // HEADS, 4) for rank in range(RANKS)]
    return [DEPTH * max(x.received for x in of_ranks) for of_ranks in zip(*passes, strict=True)]


def test_two_ranks(tmp_path):
    done = run_ranks(RANKS, SCRIPT, *SIZES.split(), cwd=tmp_path)
    assert done.codes == [0, 0], done.stderr[-3000:]
    head, bars, row = (cells(line) for line in done.stdout.splitlines() if line.startswith("|"))
    assert head == COLUMNS and bars == ["---"] * len(COLUMNS)
    said = dict(zip(COLUMNS, row, strict=True))
    assert row[:4] == ["2", "1,024", "2,048", "ring_dilated"] and said["recompute"] == "none"
    exchange, head_size = said["exchange, head_size"].split()
    assert head_size == "1"
    want = planned(exchange)
    assert [said["received MB forward"], said["backward"]] == [f"{x / 1e6:.1f}" for x in want] and min(want) > 10**6
    ms, of_each, of_all, exposed = (
        float(said[name]) for name in ("ms", "thousand tokens/s of each", "of all", "exposed ms")
    )
    assert 0 < exposed < 60_000 and 0 < ms < 60_000
    assert abs(of_each - TOKENS / ms) < 0.06 + 0.01 * of_each and abs(of_all - 2 * of_each) < 0.16
    assert abs(float(said["loss"]) - math.log(256)) < 1  # mean over both ranks' bytes; one rank's share is half of it
    assert not list(tmp_path.iterdir())


def test_hybrids_take_zigzag(tmp_path):
    """layout="auto" chooses zigzag, because the model declares its longest sequence."""
    options = f"--tokens 4096 --hybrid 1 --dim 16 --depth 1 --heads 1 {ON_CPU}"
    done = run_ranks(RANKS, SCRIPT, *options.split(), cwd=tmp_path)
    assert done.codes == [0, 0], done.stderr[-3000:]
    *_, row = (cells(line) for line in done.stdout.splitlines() if line.startswith("|"))
    assert row[2] == "dense in 1 of 1, zigzag"
