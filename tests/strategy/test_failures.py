"""Jobs in which a rank dies, raises or differs, started as users start them: they end, name the rank, and resume."""

import shutil
import signal
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
