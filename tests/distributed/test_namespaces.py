"""Two nodes of two ranks on one machine, in network namespaces with a slow link: bytes on the link, and its speed."""

import json
from pathlib import Path

import pytest

from lightning_dilated.ext.profiling.planned import collectives
from lightning_dilated.sequence import Links
from lightning_dilated.sequence.planner import make_problem, price

from . import namespace_job, namespaces

WHY_NOT = namespaces.why_not()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]
JOB = str(Path(__file__).with_name("namespace_job.py"))
#: speed of the link in MB/s, number of calls
SPEED, CALLS = 25.0, 20


def far_sent(problem, exchange: str, rank: int) -> int:
    """Return the planned bytes that a rank sends to the other node in a call, forward plus backward."""
    passes = collectives(problem, exchange, rank, 2, namespace_job.DIM, 8)
    parts = (x.bytes("sends", rank) for steps in passes for x in steps)
    return sum(n for sent in parts for peer, n in sent.items() if peer // 2 != rank // 2)


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """{exchange: counts of the four ranks}. Every rank has compared its results with a run on one rank."""
    folder, counts = tmp_path_factory.mktemp("nodes"), {}
    with namespaces.Nodes(SPEED) as nodes:
        for exchange in ("gather", "hierarchical_gather", "hierarchical_butterfly"):
            ended = nodes.torchrun(2, [JOB, exchange, str(CALLS)], folder, 300)
            assert [status for status, _ in ended] == [0, 0], ended
            files = [folder / f"{exchange}_{rank}.json" for rank in range(4)]
            counts[exchange] = [json.loads(file.read_text()) for file in files]
    print(json.dumps(counts))
    return counts


@pytest.mark.parametrize("exchange", ["gather", "hierarchical_gather", "hierarchical_butterfly"])
def test_bytes_over_the_link(counted, exchange):
    """The count of each rank equals its plan. The node's interface sent these bytes, plus packet headers."""
    problem = make_problem(namespace_job.PATTERN, namespace_job.N, namespace_job.HEADS, ranks=4)
    planned = [CALLS * far_sent(problem, exchange, rank) for rank in range(4)]
    assert [x["sent"] for x in counted[exchange]] == planned
    for node in range(2):
        payload, wire = sum(planned[2 * node : 2 * node + 2]), counted[exchange][2 * node]["wire"]
        assert payload < wire < 1.1 * payload + 200_000  # acknowledgements of received packets, and control messages
    highest = price(problem, exchange, 2, namespace_job.DIM, 8, Links())
    assert CALLS * highest.far == max(x["received"] for x in counted[exchange])


def test_a_row_enters_a_node_once(counted):
    """A flat exchange sends a row to each rank of a node that needs it; a hierarchical exchange sends it once."""
    received = {exchange: sum(x["received"] for x in ranks) for exchange, ranks in counted.items()}
    assert received["hierarchical_gather"] == received["hierarchical_butterfly"] == received["gather"] / 2


def test_bench_links(tmp_path):
    """The two ranks of a node share the measured speed of the link. Within a node the speed is far higher."""
    speed = 8.0
    with namespaces.Nodes(speed) as nodes:
        words = ["-m", "lightning_dilated", "bench", "links", "--device", "cpu", "--output", "links.json"]
        sizes = ["--sizes", "65536", "8388608", "--repeats", "3"]
        ended = nodes.torchrun(2, [*words, *sizes], tmp_path, 400)
    assert [status for status, _ in ended] == [0, 0], ended
    links = Links.load(tmp_path / "links.json")
    print(links)
    assert 0.4 < links.far / (speed * 1e6 / 2) < 1.2  # busy cores may slow it down
    assert links.near > 10 * links.far
