"""Jobs on several nodes (agents of torchrun on one machine): if a worker or a node dies, the other nodes continue."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from ..distributed.forked import agent_store, run_ranks
from .test_failures import JOB, LIMIT, alive, losses

pytestmark = pytest.mark.full

#: a node counts as lost after three seconds without a heartbeat
CONF = "is_host=0,last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=3"


def start_nodes(folder: Path, how: str, who: int, nodes: int, fewest: int, strategy: str = "", **env: str):
    """Return [(exit status, output)] of each agent. The agents' store is in this process, so any agent may die."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={fewest}:{nodes}", "--nproc-per-node=1"]
    command += ["--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{store.port}"]
    command += [f"--rdzv-conf={CONF}", "--rdzv-id=job", JOB, how, str(who), "1", *([strategy] if strategy else [])]
    agents, texts = [], [folder / f"node{number}.txt" for number in range(nodes)]
    for text in texts:
        with text.open("w") as file:
            agents.append(
                subprocess.Popen(command, cwd=folder, env={**os.environ, **env}, stdout=file, stderr=subprocess.STDOUT)
            )
    end = time.monotonic() + LIMIT
    try:
        for agent in agents:
            agent.wait(max(end - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        pytest.fail("the job did not end:\n" + "\n".join(text.read_text()[-3000:] for text in texts))
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.terminate()  # also ends its worker
                agent.wait(LIMIT)
    while time.monotonic() < end and alive(folder):
        time.sleep(0.1)
    assert not alive(folder), "a rank lives on"
    return [(agent.returncode, text.read_text()) for agent, text in zip(agents, texts, strict=True)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    ended = run_ranks(1, Path(JOB), "nothing", "0", "1", cwd=tmp_path_factory.mktemp("job"))
    assert ended.codes == [0], ended.stderr[-3000:]
    return losses(ended.stdout)[0]


def went_on(folder: Path, outcomes, undisturbed: float, ranks: int) -> list[str]:
    """Check that `ranks` nodes finished with the loss of an undisturbed run. Return the restart counts they print."""
    assert (folder / "once").exists(), "nothing happened"
    text = "\n".join(text for _, text in outcomes)
    well = [text for status, text in outcomes if status == 0]
    assert len(well) == ranks, text[-6000:]
    assert losses("\n".join(well)) == pytest.approx([undisturbed] * ranks, rel=1e-5)
    reports = [line.split() for line in text.splitlines() if line.startswith("ranks ")]
    assert [words[1] for words in reports] == [str(ranks)] * ranks
    return sorted(words[3] for words in reports)


def test_goes_on_when_ranks_start_anew(tmp_path, undisturbed):
    """Ranks restart with the same store, and only the agent of the dead worker counts a restart, as on two nodes."""
    store = agent_store()
    died = run_ranks(2, Path(JOB), "kill", "1", "2", cwd=tmp_path, store=store)
    assert died.codes == [1, -signal.SIGKILL], died.stderr[-3000:]
    assert "waited in vain for the others, ranks [1] of the job" in died.stderr, died.stderr[-3000:]
    again = run_ranks(2, Path(JOB), "kill", "1", "2", cwd=tmp_path, store=store, restarts=(0, 1))
    assert again.codes == [0, 0], again.stderr[-3000:]
    assert losses(again.stdout) == pytest.approx([undisturbed] * 2, rel=1e-5)
    assert [x for x in again.stdout.splitlines() if x[:5] == "ranks"] == [f"ranks 2 restarts {x}" for x in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "who, env",
    [
        (1, {}),
        (0, {}),
        (1, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
        (0, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
    ],
)
def test_a_worker_of_two_nodes_dies(tmp_path, undisturbed, who, env):
    """Only the agent of the dead worker counts a restart, so torchrun's count cannot be the name of an attempt."""
    outcomes = start_nodes(tmp_path, "kill", who, 2, 2, **env)
    assert went_on(tmp_path, outcomes, undisturbed, 2) == ["0", "1"]


@pytest.mark.slow
def test_a_worker_of_two_nodes_dies_with_sharded_parameters(tmp_path, undisturbed):
    outcomes = start_nodes(tmp_path, "kill", 1, 2, 2, "ring_dilated_fsdp")
    assert went_on(tmp_path, outcomes, undisturbed, 2) == ["0", "1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "who, env",
    [
        (2, {}),
        (2, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
        (0, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),  # otherwise the agents would use the dead agent's store
    ],
)
def test_a_node_of_three_dies(tmp_path, undisturbed, who, env):
    outcomes = start_nodes(tmp_path, "node", who, 3, 2, **env)
    went_on(tmp_path, outcomes, undisturbed, 2)


@pytest.mark.slow
def test_a_worker_of_three_nodes_dies(tmp_path, undisturbed):
    outcomes = start_nodes(tmp_path, "kill", 2, 3, 3)
    assert went_on(tmp_path, outcomes, undisturbed, 3) == ["0", "0", "1"]


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [2, 3])
def test_a_region_dies_and_the_others_go_on(tmp_path, nodes):
    """Each node is a region. The remaining regions load the common checkpoint and print that they do."""
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    ended = start_nodes(tmp_path, "node", nodes - 1, nodes, 1, "regions", **env)
    text = "\n".join(text for _, text in ended)
    well = [text for status, text in ended if status == 0]
    assert (tmp_path / "once").exists() and len(well) == nodes - 1 == len(losses("\n".join(well))), text[-6000:]
    assert f"is of {nodes} region(s) with outer steps, this run has {nodes - 1}." in text
