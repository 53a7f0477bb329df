"""Jobs in which a rank dies, raises or differs, started as users start them: they end, name the rank, and resume.

Under each launcher, a script on two ranks has the loss of one rank.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ..distributed.forked import run_ranks

pytestmark = pytest.mark.full

JOB = str(Path(__file__).with_name("job.py"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
#: seconds for the strategy's timeout and a start on a busy machine
LIMIT = 180


def start(
    folder: Path, how: str, who: int, ranks: int = 2, launcher: list[str] | None = None, strategy: str | None = None
) -> tuple[int, str]:
    """Return (exit status, output of the job and of all ranks, even those that end after the first process)."""
    command = [*(launcher or [sys.executable]), JOB, how, str(who), str(ranks), *([strategy] if strategy else [])]
    out = folder / "out.txt"
    with out.open("w") as file:
        process = subprocess.Popen(command, cwd=folder, stdout=file, stderr=subprocess.STDOUT)
        status = process.wait(LIMIT)
    end = time.monotonic() + LIMIT
    while time.monotonic() < end and alive(folder):
        time.sleep(0.5)
    assert not alive(folder), "a rank lives on"
    return status, out.read_text()


def alive(folder: Path) -> bool:
    """Return whether a process with the working folder `folder` still runs."""
    for link in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if link.resolve() == folder and "State:\tZ" not in (link.parent / "status").read_text():
                return True
        except OSError:
            pass
    return False


def losses(text: str) -> list[float]:
    return [float(line.split()[1]) for line in text.splitlines() if line.startswith("loss ")]


@pytest.mark.slow  # test_elastic.py tests this with forked ranks
@pytest.mark.parametrize(
    "how, who, words",
    [
        ("kill", 1, "waited in vain for the others, ranks [1] of the job"),
        ("kill", 0, "waited in vain for the others, ranks [0] of the job"),
        ("raise", 1, "trouble of its own"),
        ("config", 1, "pattern: rank 0 has"),
    ],
)
@pytest.mark.parametrize("launcher", [None, [*TORCHRUN, "--nproc-per-node", "2"]])
def test_ends_and_says_why(tmp_path, how, who, words, launcher):
    status, text = start(tmp_path, how, who, launcher=launcher)
    # Lightning's launcher reports dead child processes itself, and may end rank 0 before rank 0 has printed
    expected_words = words, *([f"[rank: {who}] Child process"] if launcher is None and who else [])
    assert status != 0 and any(w in text for w in expected_words), text[-3000:]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    status, text = start(tmp_path_factory.mktemp("job"), "nothing", 0, 1)
    assert status == 0, text[-3000:]
    return losses(text)[0]


@pytest.mark.slow
def test_torchrun_restarts_from_the_last_checkpoint(tmp_path, undisturbed):
    status, text = start(tmp_path, "kill", 1, 2, [*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "1"])
    assert status == 0 and (tmp_path / "once").exists(), text[-3000:]
    assert losses(text) == pytest.approx([undisturbed] * 2, rel=1e-5)


@pytest.mark.slow
def test_goes_on_with_fewer_ranks(tmp_path, undisturbed):
    status, _ = start(tmp_path, "kill", 2, 4)
    assert status != 0
    for ranks in (2, 1):
        again = tmp_path.with_name(f"{tmp_path.name}.{ranks}")
        shutil.copytree(tmp_path, again)
        status, text = start(again, "nothing", 0, ranks)
        assert status == 0, text[-3000:]
        assert losses(text) == pytest.approx([undisturbed] * ranks, rel=1e-5)


@pytest.mark.slow
def test_a_lost_region_is_named(tmp_path):
    ended = run_ranks(4, Path(JOB), "kill", "2+3", "4", "two regions", cwd=tmp_path)
    assert ended.codes == [1, 1, -signal.SIGKILL, -signal.SIGKILL], ended.stderr[-3000:]
    assert ended.stderr.count("Region 1 (ranks 2 to 3) has lost all ranks.") >= 2, ended.stderr[-3000:]


# -- launchers: a script on two ranks has the loss of one rank ---------------------------------------------------------
@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    status, text = start(tmp_path_factory.mktemp("alone"), "nothing", 0, 1)
    assert status == 0, text[-3000:]
    return losses(text)[0]


@pytest.mark.slow  # in CI, tests/test_readme.py runs the README's own script on two ranks
def test_plain_python(tmp_path, alone):
    status, text = start(tmp_path, "nothing", 0, 2)
    assert status == 0 and losses(text) == pytest.approx([alone] * 2, rel=1e-5), text[-3000:]


@pytest.mark.slow
def test_by_name_with_sharded_parameters(tmp_path, alone):
    status, text = start(tmp_path, "nothing", 0, 2, strategy="ring_dilated_fsdp")
    assert status == 0 and losses(text) == pytest.approx([alone] * 2, rel=1e-5), text[-3000:]


@pytest.mark.slow
def test_slurm(tmp_path, alone):
    """Start two processes with srun's environment variables for two tasks of a job step."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"JOB_NAME": "train", "JOB_ID": 1, "NTASKS": 2, "NTASKS_PER_NODE": 2, "NODEID": 0, "NODELIST": "127.0.0.1"}
    tasks = []
    for rank in range(2):
        names = {**job, "PROCID": rank, "LOCALID": rank}
        env = {f"SLURM_{name}": str(value) for name, value in names.items()} | {"MASTER_PORT": str(port)}
        command = [sys.executable, JOB, "nothing", "0", "2"]
        tasks.append(
            subprocess.Popen(command, cwd=tmp_path, env={**os.environ, **env}, stdout=-1, stderr=-2, text=True)
        )
    texts = [task.communicate(timeout=LIMIT)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], texts
    assert losses("\n".join(texts)) == pytest.approx([alone] * 2, rel=1e-5)


@pytest.mark.slow
def test_notebook(tmp_path, alone):
    """A notebook's session cannot run again, so other ranks are forked, as Lightning's usual names request."""
    status, text = start(tmp_path, "notebook", 0, 2, strategy="ring_dilated_notebook")
    assert status == 0 and losses(text)[0] == pytest.approx(alone, rel=1e-5), text[-3000:]


@pytest.mark.parametrize(
    "strategy", [pytest.param(x, marks=pytest.mark.slow) for x in ("ring_dilated", "ring_dilated_fsdp")]
)
def test_notebook_by_another_name(tmp_path, strategy):
    status, text = start(tmp_path, "notebook", 0, 2, strategy=strategy)
    assert status != 0 and "ring_dilated_notebook" in text and "ddp_notebook" not in text, text[-3000:]
