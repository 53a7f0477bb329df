"""Two regions with a link of 1 Gbit/s between them (in network namespaces) train as fast as one region."""

import json
import os
from pathlib import Path

import pytest

from ..distributed import namespaces

WHY_NOT = namespaces.why_not()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]
JOB = str(Path(__file__).with_name("region_link_job.py"))
#: 1 Gbit/s in MB/s, and the allowed time of a step relative to one region
SPEED, MORE = 125.0, 1.05


def seconds(nodes, folder: Path, way: str, number: int) -> float:
    """Return the mean seconds per step of the slower rank. Both ranks train at the same time."""
    name = f"{way}{number}"
    ended = nodes.torchrun(1, [JOB, way, name], folder, 500)
    assert [status for status, _ in ended] == [0, 0], ended
    return max(json.loads((folder / f"{name}_{rank}.json").read_text())["seconds"] for rank in range(2))


def test_a_step_takes_as_long_as_that_of_one_region(tmp_path):
    """Both ways are measured in alternation, under the same conditions. If the cores are busy, nothing is compared."""
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
        assert averaged > MORE * min(times["alone"])  # averaging gradients over the link is slower than this limit
