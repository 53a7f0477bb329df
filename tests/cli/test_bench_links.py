"""`bench links`: two ranks measure, other commands read the file, and its numbers equal the printed table."""

import datetime
import os
import socket
import subprocess
import sys

import pytest
import torch

from lightning_dilated.ext.profiling.bench_links import LAUNCHED, LEAST, Sample, _rings, estimate_links
from lightning_dilated.sequence import Links
from lightning_dilated.sequence.links import VARIABLE, cached

from .test_misuse import refused

pytestmark = pytest.mark.full

SMALL = ["--device", "cpu", "--sizes", 1 << 18, 1 << 24, "--repeats", 2]
USUAL = Links()


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The cache folder of a machine without GPUs and without measured links."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(VARIABLE)
    return tmp_path


def rows_of(text):
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[x.strip() for x in line.split("|")[1:-1]] for line in lines[2:]]


# -- the command -------------------------------------------------------------------------------------------------------
def test_two_ranks_write_the_file_that_groups_read(cli, home, forked_ranks):
    result = cli("bench", "links", *SMALL, "--record", "tables/table.md").ok()
    links, rows = Links.of_this_machine(), rows_of(result.out)
    assert [row[:3] for row in rows] == [["near", "1", "262,144"], ["near", "1", "16,777,216"], ["any", "1", "8"]]
    assert links.round + links.message == pytest.approx(float(rows[-1][3]) / 1e3, rel=0.01)
    assert 1e7 < links.near < 1e12 and links.near != USUAL.near
    assert (links.far, links.message) == (USUAL.far, USUAL.message)
    today = datetime.date.today()
    assert links.source == f"measured on 2 processes of the CPU, {today}; message, far: defaults"
    assert "far keeps its default" in result.out and f"written: {cached()}" in result.out and str(links) in result.out
    assert (home / "tables" / "table.md").read_text().strip() in result.out
    for _, peers, size, took, speed, reckoned in rows[:-1]:
        seconds, received = float(took) / 1e3, int(peers) * int(size.replace(",", ""))
        assert float(speed) == pytest.approx(received / seconds / 1e9, rel=0.01)
        want = links.round + int(peers) * links.message + received / links.near
        assert float(reckoned) / 1e3 == pytest.approx(want, rel=0.01)


@pytest.mark.slow
def test_pretended_nodes(cli, home):
    result = cli("bench", "links", *SMALL, "--ranks", 4, "--ranks_per_node", 2, "--output", "mine.json")
    kinds = [row[:2] for row in rows_of(result.out)]
    assert kinds == [*[["near", "1"]] * 2, *[["far", "1"]] * 2, ["any", "1"], ["any", "3"]], result.err
    links = Links.load(home / "mine.json")
    assert links.far != USUAL.far and "nodes of 2 ranks" in links.source and "defaults" not in links.source
    assert Links.of_this_machine() == USUAL and "to use it, give links=mine.json" in result.out


@pytest.mark.slow
def test_under_a_launcher(home):
    """Two processes with torchrun's variables are two nodes: rank 0 prints, and a node's first rank writes the file."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    argv = [sys.executable, "-m", "lightning_dilated", "bench", "links", *map(str, SMALL)]
    variables = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    variables |= {
        "CUDA_VISIBLE_DEVICES": "",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    ranks = []
    for rank in range(2):
        own = {"RANK": str(rank), "XDG_CACHE_HOME": str(home / f"node{rank}")}
        ranks.append(
            subprocess.Popen(argv, env={**os.environ, **variables, **own}, cwd=home, stdout=subprocess.PIPE, text=True)
        )
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0] and said[1] == ""
    assert [row[0] for row in rows_of(said[0])] == ["far", "far", "any"]
    first, second = (Links.load(home / f"node{rank}" / "lightning-dilated" / "links.json") for rank in range(2))
    assert first == second and first.near == USUAL.near and first.far != USUAL.far
    assert first.source.endswith("; message, near: defaults")


REFUSED = {
    "one rank": (["--ranks", 1], ["at least 2 ranks, got 1"]),
    "no ranks": (["--ranks", 0], ["at least 2 ranks, got 0"]),
    "nodes": (["--ranks_per_node", 3], ["--ranks_per_node 3 must divide the 2 ranks"]),
    "empty nodes": (["--ranks_per_node", 0], ["--ranks_per_node 0 must divide"]),
    "sizes": (["--sizes", 0], ["--sizes must be at least 1, got 0"]),
    "repeats": (["--repeats", 0], ["--repeats must be at least 1"]),
    "timeout": (["--timeout", "nan"], ["--timeout must be a number in"]),
    "a folder": (["--output", "."], ["cannot be written"]),
    "device": (["--device", "tpu"], ["--device", "cuda"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(cli, home, name):
    argv, texts = REFUSED[name]
    refused(cli("bench", "links", "--device", "cpu", *argv), texts)
    assert not cached().exists()


@pytest.mark.parametrize(
    "told, argv, texts",
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, [], ["LOCAL_WORLD_SIZE=None", "torchrun"]),
        (dict.fromkeys(LAUNCHED, "2"), ["--ranks", 4], ["--ranks 4: the launcher started 2 ranks"]),
    ],
    ids=["half", "other ranks"],
)
def test_launchers_that_say_otherwise(cli, home, monkeypatch, told, argv, texts):
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    refused(cli("bench", "links", "--device", "cpu", *argv), texts)


def test_the_cpu_does_not_speak_for_gpus(cli, home, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    refused(cli("bench", "links", *SMALL), ["links for runs on GPUs", "name a file with --output"])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpus(cli, tmp_path):
    cli("bench", "links", "--repeats", 3, "--output", "links.json").ok()
    links = Links.load(tmp_path / "links.json")
    assert torch.cuda.get_device_name() in links.source and 1e9 < links.near < 2e12 and links.round < 5e-3


def test_ranks_that_die(cli, home):
    result = cli("bench", "links", *SMALL, "--timeout", 0.01)
    assert result.code == 1 and "did not finish within 0.01 s" in result.err and "Nothing was written" in result.err
    assert not cached().exists()


# -- the numbers -------------------------------------------------------------------------------------------------------
TRUE = Links(near=2e11, far=4e10, round=3e-5, message=5e-6)


def sample(kind, peers, size):
    """Return a measurement. Its seconds are exactly a round, plus a message and its bytes to each peer."""
    bandwidth = {"few": float("inf"), "near": TRUE.near, "far": TRUE.far}[kind]
    return Sample(kind, peers, size, TRUE.round + peers * TRUE.message + peers * size / bandwidth)


@pytest.mark.parametrize(
    "cases, kept",
    [
        ([("few", 1), ("few", 7), ("near", 3), ("far", 2)], []),
        ([("few", 1), ("few", 3), ("near", 3)], ["far"]),
        ([("few", 1), ("few", 3), ("far", 3)], ["near"]),
    ],
)
def test_numbers_of_a_machine_as_it_is_reckoned(cases, kept):
    samples = [
        sample(kind, p, n) for kind, p in cases for n in ((8,) if kind == "few" else (1 << 16, 1 << 22, 1 << 26))
    ]
    links = estimate_links(samples, "here")
    for name in ("near", "far", "round", "message"):
        want = getattr(USUAL if name in kept else TRUE, name)
        assert getattr(links, name) == pytest.approx(want, rel=1e-6), name
    assert links.source == ("here; far: defaults" if kept == ["far"] else "here; near: defaults" if kept else "here")


def test_latencies_that_noise_turned_round():
    few = [Sample("few", 1, 8, 1e-4), Sample("few", 3, 8, 9e-5)]
    links = estimate_links([*few, Sample("near", 3, 1 << 20, 1e-3)], "here")
    assert links.message == LEAST and links.round == pytest.approx(1e-4 - LEAST) and 3e9 < links.near < 4e9


def test_sizes_that_tell_nothing():
    with pytest.raises(ValueError, match="--sizes 64: messages took no longer than a few bytes do; give larger sizes"):
        estimate_links([Sample("few", 1, 8, 1e-4), Sample("near", 1, 64, 9e-5)], "here")


@pytest.mark.parametrize("ranks, per_node", [(2, 2), (6, 3), (8, 2), (3, 1)])
def test_who_sends_to_whom(ranks, per_node):
    rings = [_rings(rank, ranks, per_node) for rank in range(ranks)]
    for kind, same in (("few", None), ("near", True), ("far", False)):
        for rank, ring in enumerate(rings):
            length, at = ring[kind]
            peers = [at(step) for step in range(1, length)]
            assert rank not in peers and len(set(peers)) == len(peers)
            assert same is None or all((p // per_node == rank // per_node) == same for p in peers)
            for step, peer in enumerate(peers, 1):
                assert rings[peer][kind][1](-step) == rank  # receivers and senders count equal bytes
