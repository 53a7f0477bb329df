"""benchmarks/choice.py: `auto` and every exchange in turn; the best named one is 1.000 of itself, and all ranks agree."""

import runpy
import sys
from pathlib import Path
from unittest import mock

import torch

from lightning_dilated.sequence.exchange import EXCHANGES

FOLDER = Path(__file__).parents[2] / "benchmarks"
SIZES = "--device cpu --local 32 --first 8 --heads 4 --head-dim 8 --dtype float32 --rounds 2"


def table(rank, group):
    with (
        mock.patch.object(sys, "path", [str(FOLDER), *sys.path]),
        mock.patch.object(sys, "argv", ["choice.py", *SIZES.split()]),
    ):
        script = runpy.run_path(str(FOLDER / "choice.py"))
        return [line.strip("| \n").split(" | ") for line in script["lines"](script["options"](), torch.device("cpu"))]


def test_every_exchange(pool):
    first, *others = pool.run(4, table)
    assert others == [first] * 3
    auto, *named = first
    assert auto[2].removeprefix("auto (").removesuffix(")") in EXCHANGES
    assert {row[2] for row in named} <= set(EXCHANGES) and "gather" in {row[2] for row in named}
    assert "1.000" in {row[-1] for row in named}
    assert all(float(below) <= float(ms) <= float(above) for *_, ms, below, above, _ in first)
