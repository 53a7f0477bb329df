"""benchmarks/exchange.py: every exchange and the choice of "auto", planned bytes, and calls that transfer nothing.

benchmarks/choice.py: the same exchanges in alternation, with the bytes and waits in its rows.
"""

import contextlib
import runpy
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from lightning_dilated import DilatedPattern
from lightning_dilated.ext.profiling.planned import moved
from lightning_dilated.ext.profiling.traffic import summary
from lightning_dilated.sequence.exchange import EXCHANGES
from lightning_dilated.sequence.planner import make_problem

pytestmark = pytest.mark.full

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPT = FOLDER / "exchange.py"
SIZES = (
    "--device cpu --local 32 --first 8 --heads 4 --head-dim 8 --dtype float32 --repeats 1 --causal 1 --ranks-per-node 2"
)


def table(rank, group, options):
    """Return the cells of the rows, and the text of the lines."""
    script = runpy.run_path(str(SCRIPT))
    with mock.patch.object(sys, "argv", ["exchange.py", *SIZES.split(), *options]):
        lines = list(script["lines"](rank, script["options"](), torch.device("cpu")))
    return [vars(x) for x in lines], [str(x) for x in lines], script["COLUMNS"]


def test_every_exchange(pool):
    results = pool.run(4, table, ["--still"])
    alone, auto, *exchanges = results[0][0]
    assert all(x[0] == results[0][0] for x in results)  # all ranks return the same rows
    assert alone["name"] == "alone" and auto["name"].removeprefix("auto (").removesuffix(")") in EXCHANGES
    assert [x["name"] for x in exchanges] == list(EXCHANGES)
    for x in (auto, *exchanges):
        assert 0 < x["planned"] == sum(x["received"]) and not x["unlike"]
        assert x["exposed"] > 0 and abs(x["moving"]) < x["both"] + 1
    assert all(text.count("|") == len(results[0][2]) + 1 for text in results[0][1])


def test_head_groups(pool):
    """The rows that head groups trade are counted, but they are not part of the plan's bytes."""
    _, line = pool.run(4, table, ["--head-sizes", "2", "--exchanges", "gather"])[0][0]
    assert (
        line["size"] == 2
        and line["moving"] is None
        and not line["unlike"]
        and sum(line["received"]) > line["planned"] > 0
    )


def in_turn(rank, group, options, replacement=None):
    """Run choice.py. Return the cells of each line. `replacement`: replaces the summary of counts."""
    path = mock.patch.object(sys, "path", [str(FOLDER), *sys.path])  # choice.py imports exchange.py
    with path, mock.patch.object(sys, "argv", ["choice.py", *options.split()]):
        script = runpy.run_path(str(FOLDER / "choice.py"))
        with mock.patch("exchange.summary", partial(replacement, rank)) if replacement else contextlib.nullcontext():
            lines = list(script["lines"](script["options"](), torch.device("cpu")))
    assert all(line.count("|") == len(script["COLUMNS"]) + 1 for line in lines)
    return [line.strip("| \n").split(" | ") for line in lines]


TURNS = "--device cpu --local 128 --first 128 --heads 4 --head-dim 64 --dtype float32 --exchanges gather ring "


def test_in_turn(pool):
    """All ranks report the same rows, the best exchange has the ratio 1.000, and bytes are as planned."""
    first, *other_ranks = pool.run(4, in_turn, TURNS + "--rounds 2 --causal 0 1")
    assert other_ranks == [first] * 3
    problem = partial(make_problem, DilatedPattern.geometric(128, 512), 512, 4, ranks=4)
    for causal, (auto, *named) in ((False, first[:3]), (True, first[3:])):
        chosen = auto[2].removeprefix("auto (").removesuffix(")")
        assert chosen in EXCHANGES and {row[1] for row in (auto, *named)} == {str(causal)}
        assert [row[2] for row in named] == ["gather", "ring"]
        least = min(float(row[4]) for row in named)
        assert "1.000" in {row[7] for row in named if float(row[4]) == least}
        for name, row in zip((chosen, "gather", "ring"), (auto, *named), strict=True):
            ms, below, above, _, exposed = map(float, row[4:9])
            assert below <= ms <= above and exposed > 0
            passes = [moved(problem(causal=causal), name, rank, 4, 64, 4) for rank in range(4)]
            most = max(forward.received + backward.received for forward, backward in passes)
            assert row[9] == f"{most / 1e6:.2f}" and most > 10**5


def unlike(rank, clock, links):
    """Report that rank i waits i + 1 seconds, and that rank 1 sends a byte too many."""
    *rows, total = summary(clock, links)
    return [*(replace(x, sent=x.sent + (rank == 1)) for x in rows), replace(total, exposed=rank + 1.0)]


def test_in_turn_counted_otherwise(pool):
    for rows in pool.run(4, in_turn, TURNS + "--rounds 2", unlike):
        assert [row[8] for row in rows] == ["4000.00"] * 3
        assert all(row[9].endswith(" (NOT as planned)") for row in rows), rows
