"""A job on three nodes (agents of torchrun on one machine) with workers and nodes killed at ten random moments."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from ..distributed.forked import run_ranks
from .killed_job import BATCHES, GLOBAL_BATCH, SEQ_LEN, STEPS
from .test_failures import alive

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
JOB = str(Path(__file__).with_name("killed_job.py"))
#: a node counts as lost after six seconds without a heartbeat
CONF = "is_host=0,last_call_timeout=4,keep_alive_interval=2,keep_alive_max_attempt=3"
#: allowed seconds from a kill to the end of the next optimizer step, if two cores are idle
WORKER, NODE = 15, 20
EPOCH = BATCHES // GLOBAL_BATCH
NODES = 3


def planned(seed: int, moments: list[str], node: bool) -> list[dict]:
    """Plan a kill at each of the moments, in random order, in random steps, with a random delay."""
    draw = random.Random(seed)
    draw.shuffle(moments)
    kills = []
    for number, moment in enumerate(moments):
        first = 4 + 4 * number  # one kill every four steps
        step = draw.randrange(first, first + 4) if moment == "step" else first
        place = {"moment": moment, "step": step, "rank": draw.randrange(NODES), "node": node}
        kills.append({**place, "delay": round(draw.uniform(0, 0.3), 3)})
    return kills


def prepare(folder: Path, kills: list[dict]) -> Path:
    folder.mkdir()
    (folder / "kills.json").write_text(json.dumps(kills))
    # a fifth of the data is for validation, so that every rank has batches
    (folder / "data.bin").write_bytes(random.Random(0).randbytes(BATCHES * SEQ_LEN * 5 // 4 + 10))
    return folder


def entries(folder: Path) -> list[dict]:
    """Return all records of the ranks so far, in order of time."""
    lines = (line for file in folder.glob("log/*.jsonl") for line in file.read_text().split("\n") if line.endswith("}"))
    return sorted(map(json.loads, lines), key=lambda x: x["time"])


class Job:
    """The agents of a job. Their store is in this process, so any agent may die."""

    def __init__(self, folder: Path, fewest: int):
        self.folder, self.fewest, self.agents = folder, fewest, []
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nnodes={self.fewest}:{NODES}",
            "--nproc-per-node=1",
        ]
        command += ["--max-restarts=30", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.store.port}"]
        command += [f"--rdzv-conf={CONF}", "--rdzv-id=job", "--monitor-interval=0.1", JOB]
        env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (self.folder / f"node{len(self.agents)}.txt").open("w") as file:
            agent = subprocess.Popen(command, cwd=self.folder, env=env, stdout=file, stderr=subprocess.STDOUT)
        self.agents.append(agent)

    def finished(self) -> bool:
        return any(x["what"] == "done" and x["step"] == STEPS for x in entries(self.folder))

    def run(self, kills: list[dict], limit: float) -> list[dict]:
        """Start the nodes. Restart a lost node after the others have continued. Return the records of the ranks."""
        for _ in range(NODES):
            self.start()
        end, replaced = time.monotonic() + limit, set()
        try:
            while not self.finished():
                assert time.monotonic() < end, self.texts()
                for number, kill in enumerate(kills):
                    note = self.folder / f"killed_{number}"
                    if kill["node"] and number not in replaced and note.exists():
                        when = json.loads(note.read_text())["time"]
                        if any(x["what"] == "done" and x["time"] > when for x in entries(self.folder)):
                            replaced.add(number)
                            self.start()
                time.sleep(0.2)
            self.wait()
        finally:
            self.stop()
        return entries(self.folder)

    def wait(self, seconds: float = 20) -> None:
        """Wait until the agents of the finished job end. The agent that joined last may not end, for lack of peers."""
        end = time.monotonic() + seconds
        while any(x.poll() is None for x in self.agents) and time.monotonic() < end:
            time.sleep(0.2)

    def stop(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                agent.send_signal(signal.SIGTERM)  # also ends its worker
        time.sleep(3)
        for agent in self.agents:
            agent.kill()
            agent.wait()

    def texts(self) -> str:
        return "\n".join(x.read_text()[-2000:] for x in sorted(self.folder.glob("node*.txt")))


def steps_of(noted: list[dict]) -> dict[str, dict[int, tuple[float, list[int]]]]:
    """Return {attempt: {step: (loss, sorted samples)}} for steps that all ranks completed in the attempt."""
    attempts: dict[str, dict[int, tuple[float, list[int]]]] = {}
    ranks = {x["attempt"]: x["ranks"] for x in noted if x["what"] == "begin"}
    for attempt, count in ranks.items():
        attempt_entries = [x for x in noted if x["attempt"] == attempt]
        done = {x["step"] for x in attempt_entries if x["what"] == "done"}
        for step in done:
            batches = [x for x in attempt_entries if x["what"] == "batch" and x["step"] == step - 1]
            numbers = {x["batch"] for x in batches}
            if len(batches) < count * len(numbers):
                continue  # a rank was killed before it recorded its last step
            loss = sum(x["share"] for x in batches) / len(numbers)
            dealt = {(x["batch"], x["data_rank"]): x["index"] for x in batches}
            attempts.setdefault(attempt, {})[step] = loss, sorted(i for index in dealt.values() for i in index)
    return attempts


def report(kills: list[dict], noted: list[dict], folder: Path) -> list[dict]:
    """Return the kills, each with the seconds until the end of the next step."""
    rows = []
    for number, kill in enumerate(kills):
        when = json.loads((folder / f"killed_{number}").read_text())["time"]
        after = [x for x in noted if x["what"] == "done" and x["time"] > when]
        begun = {x["attempt"]: x["time"] for x in noted if x["what"] == "begin"}
        after = [x for x in after if begun[x["attempt"]] > when]
        ranks = next(x["ranks"] for x in noted if x["what"] == "begin" and x["attempt"] == after[0]["attempt"])
        rows.append({**kill, "seconds": after[0]["time"] - when, "next": after[0]["step"], "ranks": ranks})
    return rows


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return {step: (loss, samples)} of an undisturbed run on one rank."""
    quiet = prepare(tmp_path_factory.mktemp("quiet") / "job", [])
    ended = run_ranks(1, Path(JOB), cwd=quiet)
    assert ended.codes == [0], ended.stderr[-3000:]
    (steps,) = steps_of(entries(quiet)).values()
    assert sorted(steps) == list(range(1, STEPS + 1))
    for first in range(1, STEPS + 1, EPOCH):
        samples = [i for step in range(first, first + EPOCH) for i in steps[step][1]]
        assert sorted(samples) == list(range(BATCHES))  # an epoch has every sample once
    return steps


def check(kills: list[dict], fewest: int, folder: Path, undisturbed: dict, capsys) -> list[dict]:
    """Run the job. Each step that any attempt completed must have the loss and samples of the undisturbed run."""
    job = Job(prepare(folder, kills), fewest)
    noted = job.run(kills, 900)
    assert len(list(folder.glob("killed_?"))) == len(kills), job.texts()
    rows = report(kills, noted, folder)
    with capsys.disabled():
        print()
        for row in rows:
            print(json.dumps({**row, "load": os.getloadavg()[0]}))
    completed = steps_of(noted)
    assert set().union(*completed.values()) == set(undisturbed)
    for steps in completed.values():
        for step, (loss, samples) in steps.items():
            assert samples == undisturbed[step][1]
            assert loss == pytest.approx(undisturbed[step][0], rel=1e-6)
    end = time.monotonic() + 60
    while alive(folder) and time.monotonic() < end:
        time.sleep(0.2)
    assert not alive(folder), "a rank lives on"
    return rows


def check_seconds(rows: list[dict], limit: float) -> None:
    """Check that the job continued within the limit, unless other programs use the cores."""
    if os.getloadavg()[1] > 4:
        pytest.skip(f"the machine is busy (load {os.getloadavg()[1]:.1f}): only losses and samples were compared")
    assert all(row["seconds"] <= limit for row in rows), rows


@pytest.mark.parametrize("seed", [0])
def test_ten_workers_are_killed(tmp_path, undisturbed, capsys, seed):
    moments = ["step"] * 6 + ["checkpoint"] * 2 + ["validation"] * 2
    rows = check(planned(seed, moments, node=False), NODES, tmp_path / "job", undisturbed, capsys)
    assert {x["ranks"] for x in rows} == {NODES}
    check_seconds(rows, WORKER)


@pytest.mark.parametrize("moment", ["step", "checkpoint", "validation"])
def test_a_node_is_killed_and_comes_back(tmp_path, undisturbed, capsys, moment):
    folder = tmp_path / "job"
    rows = check(planned(len(moment), [moment], node=True), NODES - 1, folder, undisturbed, capsys)
    assert [x["ranks"] for x in rows] == [NODES - 1]
    begun = [x["ranks"] for x in entries(folder) if x["what"] == "begin"]
    assert begun[-1] == NODES  # the lost node rejoined
    check_seconds(rows, NODE)
