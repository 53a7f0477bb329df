"""Regions that a link of 1 Gbit/s joins train as fast as one region by itself; network namespaces are the two places."""

import json
import os
from pathlib import Path

import pytest

from ..distributed import namespaces

WHY_NOT = namespaces.why_not()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
]
JOB = str(Path(__file__).with_name("region_link_job.py"))
#: MB/s of a link of 1 Gbit/s; what a step may take more than in one region
SPEED, MORE = 125.0, 1.05


def seconds(nodes, folder: Path, way: str, number: int) -> float:
    """Mean seconds of a step on the slower of the two ranks, which train at the same time."""
    name = f"{way}{number}"
    ended = nodes.torchrun(1, [JOB, way, name], folder, 500)
    assert [status for status, _ in ended] == [0, 0], ended
    return max(json.loads((folder / f"{name}_{rank}.json").read_text())["seconds"] for rank in range(2))


def test_a_step_takes_as_long_as_that_of_one_region(tmp_path):
    """In turn, so that both ways meet the same machine; on busy cores the comparison says nothing and is not made."""
    times: dict[str, list[float]] = {"alone": [], "regions": []}
    with namespaces.Nodes(SPEED) as nodes:
        for number in range(3):
            for way, measured in times.items():
                measured.append(seconds(nodes, tmp_path, way, number))
        averaged = seconds(nodes, tmp_path, "data", 0)
    load = os.getloadavg()[0]
    ratio = min(times["regions"]) / min(times["alone"])
    print(json.dumps({**times, "gradients averaged at each step": averaged, "ratio": ratio, "load": load}))
    if load < 4:
        assert ratio < MORE
        assert averaged > MORE * min(times["alone"])  # the link is what regions save
