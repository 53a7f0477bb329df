"""benchmarks/exchange.py: every exchange and what "auto" chose, bytes counted as planned, and calls that move nothing.

benchmarks/choice.py: the same in turn."""

import runpy
import sys
from pathlib import Path
from unittest import mock

import torch

from lightning_dilated.sequence.exchange import EXCHANGES

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPT = FOLDER / "exchange.py"
SIZES = (
    "--device cpu --local 32 --first 8 --heads 4 --head-dim 8 --dtype float32 --repeats 1 --causal 1 --ranks-per-node 2"
)


def table(rank, group, options):
    """The lines, and their text."""
    script = runpy.run_path(str(SCRIPT))
    with mock.patch.object(sys, "argv", ["exchange.py", *SIZES.split(), *options]):
        found = list(script["lines"](rank, script["options"](), torch.device("cpu")))
    return [vars(x) for x in found], [str(x) for x in found], script["COLUMNS"]


def test_every_exchange(pool):
    found = pool.run(4, table, ["--still"])
    alone, auto, *rest = found[0][0]
    assert all(x[0] == found[0][0] for x in found)  # equal on all ranks
    assert alone["name"] == "alone" and auto["name"].removeprefix("auto (").removesuffix(")") in EXCHANGES
    assert [x["name"] for x in rest] == list(EXCHANGES)
    for x in (auto, *rest):
        assert 0 < x["planned"] == sum(x["received"]) and not x["unlike"]
        assert x["exposed"] > 0 and abs(x["moving"]) < x["both"] + 1
    assert all(text.count("|") == len(found[0][2]) + 1 for text in found[0][1])


def test_head_groups(pool):
    """Trading tokens for heads is counted, and no part of the plan's bytes."""
    _, line = pool.run(4, table, ["--head-sizes", "2", "--exchanges", "gather"])[0][0]
    assert (
        line["size"] == 2
        and line["moving"] is None
        and not line["unlike"]
        and sum(line["received"]) > line["planned"] > 0
    )


def in_turn(rank, group, options):
    """The cells of each line."""
    path = mock.patch.object(sys, "path", [str(FOLDER), *sys.path])  # it imports the other script
    with path, mock.patch.object(sys, "argv", ["choice.py", *options.split()]):
        script = runpy.run_path(str(FOLDER / "choice.py"))
        return [line.strip("| \n").split(" | ") for line in script["lines"](script["options"](), torch.device("cpu"))]


def test_in_turn(pool):
    """All ranks say the same, and the best of the named ones is 1.000 of itself."""
    sizes = (
        "--device cpu --local 32 --first 8 --heads 4 --head-dim 8 --dtype float32 --rounds 3 --exchanges gather ring"
    )
    first, *others = pool.run(4, in_turn, sizes)
    assert others == [first] * 3
    auto, *named = first
    assert auto[2].removeprefix("auto (").removesuffix(")") in EXCHANGES
    assert [row[2] for row in named] == ["gather", "ring"]
    assert min(named, key=lambda row: float(row[4]))[-1] == "1.000"
    assert all(float(below) <= float(ms) <= float(above) for *_, ms, below, above, _ in first)
