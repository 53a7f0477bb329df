"""benchmarks/context_parallel.py on the CPU: every supported mode has a row, with the bytes of the plan."""

import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from lightning_dilated import DilatedPattern
from lightning_dilated.ext.profiling.planned import moved
from lightning_dilated.sequence.planner import make_problem

from .forked import run_ranks

pytestmark = pytest.mark.full

FOLDER = Path(__file__).parents[2] / "benchmarks"
HEADS, DIM, DENSE, DILATED = 4, 64, 256, 512
SIZES = (
    f"--cpu --dense {DENSE} --dilated {DILATED} --first 128 --heads {HEADS} --head-dim {DIM} "
    "--dtype float32 --repeats 1"
).split()
COLUMNS = ["tokens", "pattern", "way", "forward + backward ms", "times torch's ring", "received MB", "exposed ms"]


def script():
    """Load context_parallel.py, which imports the script beside it, and return its globals."""
    with mock.patch.object(sys, "path", [str(FOLDER), *sys.path]):
        return runpy.run_path(str(FOLDER / "context_parallel.py"))


#: (exchange, head_size, layout) of the dense rows
WAYS = script()["WAYS"]


def test_ways():
    """The modes include the ring, `auto` in either layout, and `auto` with head groups."""
    assert {("ring", 1, "zigzag"), ("auto", 4, "contiguous"), ("auto", 1, "contiguous"), ("auto", 1, "zigzag")} < set(
        WAYS
    )


def table(rank, group, options, of_torch=None):
    """Return the lines of the table. `of_torch`: seconds to assume for torch's context parallel, which needs GPUs."""
    module = script()
    arguments = mock.patch.object(sys, "argv", ["context_parallel.py", *options])
    with arguments, mock.patch.dict(module["lines"].__globals__, of_torch=lambda *unused: of_torch):
        return list(module["lines"](module["options"](), torch.device("cpu")))


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def planned(n, pattern, ranks, exchange, layout):
    """Return the bytes of both passes on the rank that receives the most."""
    problem = make_problem(pattern, n, HEADS, ranks=ranks, layout=layout, causal=True)
    passes = [moved(problem, exchange, rank, ranks, DIM, 4) for rank in range(ranks)]
    return max(forward.received + backward.received for forward, backward in passes)


def check(rows, ranks):
    """Check the rows of dense patterns, one for each mode that supports this number of ranks, and the geometric row."""
    dense, dilated = DilatedPattern.dense(), DilatedPattern.geometric(128, DILATED)
    want = [(DENSE, dense, "dense", way) for way in WAYS if ranks % way[1] == 0]
    want += [(DILATED, dilated, "geometric(128, N)", ("auto", 1, "contiguous"))]
    for row, (n, pattern, about, (exchange, head_size, layout)) in zip(rows, want, strict=True):
        tokens, said, way, ms, times, received, exposed = row
        chosen, *settings = way.split(", ")
        assert (tokens, said, settings) == (str(n), about, [f"head_size {head_size}", layout])
        assert chosen.split(" (")[0] == exchange and times == ""  # no row of torch's ring to compare with
        assert 0 < float(ms) < 60_000 and 0 < float(exposed) < 60_000 and float(received) > 0.05
        if head_size == 1:
            chosen = chosen.removeprefix("auto (").removesuffix(")")
            assert received == f"{planned(n, pattern, ranks, chosen, layout) / 1e6:.2f}", row


def test_four_ranks(pool):
    first, *other_ranks = pool.run(4, table, SIZES)
    assert other_ranks == [first] * 3
    check([cells(line) for line in first], 4)


def test_beside_torch(pool):
    """Torch's rows come first, without bytes and waits. All later rows have their speed relative to the first row."""
    options = [*SIZES[1:], "--dilated", "--rotate", "allgather", "alltoall"]
    rows = [cells(line) for line in pool.run(4, table, options, 2.0)[0]]
    assert rows[:2] == [
        [str(DENSE), "dense", "torch allgather", "2000.00", "", "", ""],  # no time of torch's ring yet
        [str(DENSE), "dense", "torch alltoall", "2000.00", "1.00", "", ""],
    ]
    assert len(rows) == 2 + len(WAYS) and all(all(row) for row in rows[2:])
    assert all(float(row[4]) == pytest.approx(2000 / float(row[3]), rel=1e-2) for row in rows[2:])


def test_two_ranks_as_of_torchrun(tmp_path):
    """Start the script as users do, from another folder. Two ranks have no row with head_size 4."""
    done = run_ranks(2, FOLDER / "context_parallel.py", *SIZES, cwd=tmp_path)
    assert done.codes == [0, 0], done.stderr[-3000:]
    head, bars, *rows = map(cells, done.stdout.splitlines())
    assert head == COLUMNS and bars == ["---"] * len(COLUMNS)
    check(rows, 2)
