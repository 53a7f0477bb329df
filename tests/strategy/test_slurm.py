"""recipes/slurm.sbatch under a SLURM on this machine: preempted jobs and jobs that run out of time are requeued."""

import csv
import re
from pathlib import Path

import pytest

from ..distributed.forked import run_ranks
from . import slurm

WHY_NOT = slurm.why_not()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]
CHECKOUT = Path(__file__).resolve().parents[2]
SCRIPT, STEPS = CHECKOUT / "recipes" / "slurm.sbatch", 240
#: one node with two CPUs runs two ranks
SIZES = ["--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1"]
SMALL = {
    "trainer.accelerator": "cpu", "trainer.precision": "32-true", "trainer.strategy.global_batch": "2",
    "trainer.max_steps": str(STEPS), "trainer.log_every_n_steps": "1", "data.paths": "data.txt", "data.seq_len": "256",
    "data.num_workers": "0", "model.dim": "16", "model.depth": "1", "model.num_heads": "2",
    "model.pattern": '{"hybrid": {"local": 64, "global_every": 1}}',
}  # fmt: skip
OPTIONS = [word for name, value in SMALL.items() for word in (f"--{name}", value)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    daemons = slurm.Slurm(tmp_path_factory.mktemp("slurm"))
    yield daemons
    daemons.close()


def prepare(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "data.txt").write_text("".join(f"{i * i % 1009} " for i in range(12000)))
    return folder


def losses(folder: Path) -> dict[int, float]:
    """Return {step: training loss} of all attempts. If attempts repeat a step, their losses must be equal."""
    by_step: dict[int, float] = {}
    for file in sorted(folder.glob("runs/elastic/version_*/metrics.csv")):
        for row in csv.DictReader(file.read_text().splitlines()):
            if row.get("train_loss"):
                step, loss = int(row["step"]), float(row["train_loss"])
                assert by_step.setdefault(step, loss) == pytest.approx(loss, rel=1e-5)
    return by_step


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = prepare(tmp_path_factory.mktemp("undisturbed"))
    command = ["fit", "--config", str(CHECKOUT / "recipes" / "elastic.yaml"), *OPTIONS, "--trainer.devices", "2"]
    script = folder / "run.py"
    script.write_text("import sys\nfrom lightning_dilated.cli.main import main\nsys.exit(main())\n")
    ended = run_ranks(2, script, *command, cwd=folder)
    assert ended.codes == [0, 0], ended.stderr[-3000:]
    return losses(folder)


def text(folder: Path) -> str:
    return "\n".join(x.read_text() for x in folder.glob("slurm-*.out"))


def started(folder: Path) -> bool:
    """Return whether the first checkpoint is complete."""
    return any(folder.glob("runs/elastic/checkpoints/step-*/manifest.json"))


def begin(cluster, folder: Path) -> str:
    """Submit a training job. Return its number."""
    number = cluster.submit(*SIZES, str(SCRIPT), *OPTIONS, cwd=prepare(folder))
    cluster.until(lambda: started(folder) or "COMPLETED" in cluster.job(number)["JobState"], "it trains", 300)
    return number


def ended_well(cluster, number: str, folder: Path, undisturbed: dict[int, float], status: str) -> None:
    """Check that all ranks ended with `status`, after one requeue, with the losses of an undisturbed run."""
    states = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    cluster.until(lambda: cluster.job(number).get("JobState") in states, "the job ends", 400)
    job, output = cluster.job(number), text(folder)
    assert (job["JobState"], job["Restarts"], job["ExitCode"]) == ("COMPLETED", "1", "0:0"), output[-5000:]
    assert re.search(rf"Exited with exit code {status}\b", output), output[-5000:]
    by_step = losses(folder)
    assert sorted(by_step) == list(range(STEPS)) == sorted(undisturbed)
    assert [by_step[i] for i in range(STEPS)] == pytest.approx([undisturbed[i] for i in range(STEPS)], rel=1e-5)


def test_preempted(cluster, undisturbed, tmp_path):
    """A job of higher priority takes the node. The ranks save and end in time, and the script requeues the job."""
    number = begin(cluster, tmp_path)
    urgent = cluster.submit("--partition=high", "--ntasks=2", "--wrap", "sleep 2", "--output=urgent.out", cwd=tmp_path)
    ended_well(cluster, number, tmp_path, undisturbed, "143")
    assert cluster.job(urgent)["JobState"] == "COMPLETED"


def test_time_is_up(cluster, undisturbed, tmp_path):
    """As the script's `--signal` requests, SLURM sends USR1 before the time is up, and rank 0 requeues the job."""
    number = begin(cluster, tmp_path)
    cluster.ask("scancel", "--signal=USR1", number)
    ended_well(cluster, number, tmp_path, undisturbed, "138")
