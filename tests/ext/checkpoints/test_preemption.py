"""A signal ends a fit: the last step is saved, the exit status shows the signal, and the job can resume."""

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lightning_dilated.data import ByteDataModule
from lightning_dilated.ext.checkpoints import sharded_checkpoint as module
from lightning_dilated.ext.checkpoints.sharded_checkpoint import ShardedCheckpoint
from lightning_dilated.strategy import preemption

from ...distributed.forked import run_ranks
from ...strategy.runs import Losses, launched
from ...strategy.test_failures import LIMIT, TORCHRUN, alive, losses
from .checkpoint_runs import STEPS, names, run

pytestmark = pytest.mark.full

TERM, INT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1


class Sends(pl.Callback):
    """Sends a signal to its own process, in the batch after `step` optimizer steps or at the moment `at`."""

    def __init__(self, signum, step=2, at="batch", rank=0):
        self.signum, self.step, self.at, self.rank, self.validations = signum, step, at, rank, 0

    def _send(self, trainer, at):
        if trainer.global_step == self.step and at == self.at and trainer.global_rank == self.rank:
            os.kill(os.getpid(), self.signum)

    def on_train_start(self, trainer, *args):
        self._send(trainer, "start")

    def on_train_batch_start(self, trainer, *args):
        self._send(trainer, "batch")

    def on_validation_batch_start(self, trainer, module, batch, index, *args):
        self.validations += 1
        if index == 0:
            self._send(trainer, "validation")


def ended(*args, **options):
    """Return the exit status of a run that ends by a signal."""
    with pytest.raises(SystemExit) as error:
        run(*args, **options)
    return error.value.code


# -- one rank ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("strategy", ["auto", "ring_dilated", "ring_dilated_fsdp"])
@pytest.mark.parametrize("signum, status", [(TERM, 143), (INT, 130)])
def test_the_last_step_is_saved(text, whole, tmp_path, strategy, signum, status):
    before = {name: signal.getsignal(name) for name in (TERM, INT)}
    shown = Losses()
    assert ended(text, STEPS, ShardedCheckpoint(str(tmp_path)), Sends(signum), shown, strategy=strategy) == status
    assert names(tmp_path) == ["step-00000003"] and shown.losses == pytest.approx(whole["losses"][:3], rel=1e-9)
    assert before == {name: signal.getsignal(name) for name in (TERM, INT)}
    resumed = run(text, STEPS, ShardedCheckpoint(str(tmp_path), resume="auto"), begun=2, strategy=strategy)
    assert resumed["losses"] == pytest.approx(whole["losses"][3:], rel=1e-9)
    torch.testing.assert_close(resumed["parameters"], whole["parameters"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("step", [pytest.param(x, marks=pytest.mark.slow) if x in (1, 3, 4) else x for x in range(6)])
def test_at_any_batch_of_two_epochs(text, tmp_path, step):
    """An epoch has three batches. The resumed run equals an uninterrupted one, also across epochs."""
    options = {"limit_train_batches": 3, "limit_val_batches": 0}
    whole = run(text, 6, **options)
    sends = Sends(TERM, step)
    assert ended(text, 6, ShardedCheckpoint(str(tmp_path)), sends, **options) == 143
    assert names(tmp_path) == [f"step-0000000{step + 1}"]
    resumed = run(text, 6, ShardedCheckpoint(str(tmp_path), resume="auto"), begun=2, **options)
    assert resumed["losses"] == whole["losses"][step + 1 :] and torch.equal(resumed["parameters"], whole["parameters"])


def test_gradients_that_wait_are_not_lost(text, tmp_path):
    """After a signal in the first of three micro-batches, the run ends only after the optimizer step."""
    whole = run(text, 4, accumulate_grad_batches=3)
    assert ended(text, 4, ShardedCheckpoint(str(tmp_path)), Sends(TERM, 1), accumulate_grad_batches=3) == 143
    assert names(tmp_path) == ["step-00000002"]
    resumed = run(text, 4, ShardedCheckpoint(str(tmp_path), resume="auto"), begun=2, accumulate_grad_batches=3)
    assert torch.equal(resumed["parameters"], whole["parameters"])


def test_before_the_first_batch(text, copied, tmp_path):
    """If a fresh or resumed run has made no step, nothing is saved."""
    assert ended(text, STEPS, ShardedCheckpoint(str(tmp_path / "new")), Sends(TERM, 0, "start")) == 143
    assert names(tmp_path / "new") == []
    before = {path.name: path.stat().st_mtime_ns for path in copied.iterdir()}
    assert ended(text, STEPS, ShardedCheckpoint(str(copied), resume="must"), Sends(TERM, 4, "start")) == 143
    assert {path.name: path.stat().st_mtime_ns for path in copied.iterdir()} == before


@pytest.mark.parametrize("at_end", [True, False])
def test_in_the_last_batch(text, tmp_path, at_end):
    assert ended(text, 3, ShardedCheckpoint(str(tmp_path), at_end=at_end), Sends(TERM, 2)) == 143
    assert names(tmp_path) == ["step-00000003"]


@pytest.mark.parametrize("strategy", ["auto", "ring_dilated"])
def test_in_a_validation(text, tmp_path, strategy):
    """After a signal, a running validation is finished, but a due validation does not start."""
    data = ByteDataModule(text, seq_len=64, batch_size=2, val_fraction=0.2, test_fraction=0)
    options = {"strategy": strategy, "val_check_interval": 2, "limit_val_batches": 2}
    with mock.patch("tests.ext.checkpoints.checkpoint_runs.ByteDataModule", return_value=data):
        sends = Sends(TERM, 2, "validation")
        assert ended(text, STEPS, ShardedCheckpoint(str(tmp_path / "a")), sends, **options) == 143
        assert names(tmp_path / "a") == ["step-00000002"] and sends.validations == 2
        sends = Sends(TERM, 1)
        assert ended(text, STEPS, ShardedCheckpoint(str(tmp_path / "b")), sends, **options) == 143
        assert names(tmp_path / "b") == ["step-00000002"] and sends.validations == 0
        resumed = run(text, STEPS, ShardedCheckpoint(str(tmp_path / "b"), resume="must"), begun=2, **options)
        assert resumed["step"] == STEPS


@pytest.mark.parametrize("asynchronous", [True, False])
def test_while_a_checkpoint_is_written(text, tmp_path, asynchronous):
    """Both the checkpoint that is being written and the newer one are completed."""
    real, sent = module.write, threading.Event()

    def write(*args):
        if not sent.is_set():
            sent.set()
            os.kill(os.getpid(), TERM)
            time.sleep(0.2)
        real(*args)

    with mock.patch.object(module, "write", write):
        saver = ShardedCheckpoint(str(tmp_path), every_n_train_steps=2, asynchronous=asynchronous)
        assert ended(text, 1000, saver) == 143
    assert names(tmp_path) in (["step-00000002"], ["step-00000002", "step-00000003"])


def test_a_checkpoint_that_fails_then(text, tmp_path, monkeypatch):
    """If writing the last checkpoint fails, the exit status shows that the step was not saved."""
    said = []
    monkeypatch.setattr(module, "rank_zero_warn", said.append)
    monkeypatch.setattr(module, "write", mock.Mock(side_effect=OSError(28, "No space left on device")))
    assert ended(text, STEPS, ShardedCheckpoint(str(tmp_path)), Sends(TERM)) == 1
    assert len(said) == 1 and "No space left on device" in said[0]


def test_a_handler_of_the_users_stays(text, tmp_path):
    """A signal handler of the user remains, even if it ignores the signal, as nohup's does."""
    before = signal.signal(INT, signal.SIG_IGN)
    try:
        assert run(text, 3, ShardedCheckpoint(str(tmp_path)), Sends(INT))["step"] == 3
    finally:
        signal.signal(INT, before)


@pytest.mark.parametrize("step", [1, 99])
def test_the_trainer_gets_its_own_functions_back(text, tmp_path, monkeypatch, step):
    """The Trainer's own functions are restored after a fit, even if a signal ended it."""
    saver, trainers = ShardedCheckpoint(str(tmp_path)), []
    monkeypatch.setattr(ShardedCheckpoint, "on_fit_start", lambda self, trainer, *args: trainers.append(trainer))
    with contextlib.suppress(SystemExit):
        run(text, STEPS, saver, Sends(TERM, step))
    (trainer,) = trainers
    assert "advance" not in vars(trainer.fit_loop.epoch_loop)
    assert not {x for x in vars(trainer._signal_connector) if x.endswith("_fn") or x.startswith("register")}
    assert saver._lock is None and saver._preemption is None


# -- SLURM's requeue ---------------------------------------------------------------------------------------------------
@pytest.fixture
def slurm(monkeypatch, tmp_path):
    """Environment of a SLURM job with one task, and a `scontrol` that records its arguments."""
    job = {"JOB_NAME": "train", "JOB_ID": 17, "NTASKS": 1, "NTASKS_PER_NODE": 1, "PROCID": 0, "LOCALID": 0, "NODEID": 0}
    for name, value in {**job, "NODELIST": "127.0.0.1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "scontrol"
    script.write_text(f'#!/bin/sh\necho "$@" $(ls "{tmp_path}/ck") >> {tmp_path}/asked\nexit ${{SCONTROL:-0}}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return tmp_path / "asked"


@pytest.mark.parametrize("strategy", ["auto", "ring_dilated"])
def test_requeue(text, whole, tmp_path, slurm, strategy):
    """The checkpoint is complete when `scontrol` is called, and Lightning saves nothing itself."""
    options = {"strategy": strategy, "plugins": [SLURMEnvironment()], "default_root_dir": tmp_path}
    assert ended(text, STEPS, ShardedCheckpoint(str(tmp_path / "ck")), Sends(USR1), **options) == 138
    assert slurm.read_text() == "requeue 17 step-00000003\n"
    assert not list(tmp_path.glob("*.ckpt"))
    resumed = run(text, STEPS, ShardedCheckpoint(str(tmp_path / "ck"), resume="auto"), begun=2, **options)
    assert resumed["losses"] == pytest.approx(whole["losses"][3:], rel=1e-9)


def test_requeue_of_an_array_that_slurm_refuses(text, tmp_path, slurm, monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "15")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    monkeypatch.setenv("SCONTROL", "1")
    saver = ShardedCheckpoint(str(tmp_path / "ck"))
    assert ended(text, STEPS, saver, Sends(USR1), plugins=[SLURMEnvironment()]) == 1
    assert slurm.read_text() == "requeue 15_2 step-00000003\n" and names(tmp_path / "ck") == ["step-00000003"]


def test_requeue_by_lightning(text, tmp_path, slurm):
    """Without a ShardedCheckpoint, Lightning requeues the job once, and training continues."""
    (tmp_path / "ck").mkdir()
    options = {"strategy": "ring_dilated", "plugins": [SLURMEnvironment()], "default_root_dir": tmp_path}
    result = run(text, STEPS, Sends(USR1, 1), Sends(USR1, 3), **options)
    assert result["step"] == STEPS and slurm.read_text() == "requeue 17\n"
    assert [p.name for p in tmp_path.glob("*.ckpt")] == ["hpc_ckpt_1.ckpt"]


@pytest.mark.parametrize("job", ["", "17; rm -r /", "17_"])
def test_requeue_of_no_job(monkeypatch, job):
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    with pytest.raises(RuntimeError, match="its number is"):
        preemption.requeue_job()


# -- two ranks ---------------------------------------------------------------------------------------------------------
def on_two(rank, group, text, folder, strategy, signum, who, options):
    """Return (exit status, losses) of a run on two ranks, where one rank receives a signal."""
    shown, saver = Losses(), ShardedCheckpoint(folder, resume="auto")
    senders = [Sends(signum, rank=who)] if signum else []
    try:
        run(text, STEPS, saver, shown, *senders, strategy=strategy, world=launched(rank), **options)
    except SystemExit as end:
        return end.code, shown.losses
    return 0, shown.losses


@pytest.mark.parametrize("strategy, signum, who", [
    ("ring_dilated", TERM, 1), ("ring_dilated", INT, 0), ("ring_dilated_fsdp", TERM, 0), ("ring_dilated_fsdp", INT, 1),
    ("ddp", TERM, 1),
])  # fmt: skip
def test_all_ranks_save(pool, text, whole, tmp_path, strategy, signum, who):
    if strategy == "ddp":  # DDP ranks train on different data and share no sequence, so losses are not compared
        from lightning.pytorch.strategies import DDPStrategy as strategy

        strategy = strategy(process_group_backend="gloo")
    results = pool.run(2, on_two, text, str(tmp_path), strategy, signum, who, {})
    assert [status for status, _ in results] == [128 + signum] * 2
    assert names(tmp_path) == ["step-00000003"]
    resumed = pool.run(2, on_two, text, str(tmp_path), strategy, 0, 0, {})
    assert [status for status, _ in resumed] == [0, 0]
    if isinstance(strategy, str):
        for (_, first), (_, second) in zip(results, resumed, strict=True):
            assert [*first, *second] == pytest.approx(whole["losses"], rel=1e-9)


# -- jobs --------------------------------------------------------------------------------------------------------------
JOB = str(Path(__file__).with_name("preempted_job.py"))


def job(folder, *args, launcher=None, environment=None, act=None):
    """Return (exit status, output) of a job. `act` may send signals to its process once all ranks train."""
    out = folder / "out.txt"
    command = [*(launcher or [sys.executable]), JOB, *map(str, args)]
    root = Path(module.__file__).parents[3]
    env = {**os.environ, "PYTHONPATH": str(root), **(environment or {})}
    with out.open("w") as file:
        process = subprocess.Popen(
            command, cwd=folder, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        if act is not None:
            end = time.monotonic() + LIMIT
            while len(list(folder.glob("ready*"))) < int(args[1]) and time.monotonic() < end:
                time.sleep(0.1)
            act(process)
        status = process.wait(LIMIT)
    end = time.monotonic() + LIMIT
    while time.monotonic() < end and alive(folder):
        time.sleep(0.2)
    assert not alive(folder), "a process lives on"
    return status, out.read_text()


def check_job(folder, outcome, status, step=3):
    """Check the exit status of a job, and that its only checkpoint is complete and has this step."""
    assert outcome[0] == status, outcome[1][-3000:]
    assert names(folder / "ckpt") == [f"step-{step:08d}"], outcome[1][-3000:]


def test_a_job_of_two_ranks(tmp_path, monkeypatch, capsys):
    """Ranks are forked here. The launchers of Lightning and torchrun are tested with -m slow."""
    ran = run_ranks(2, Path(JOB), "ring_dilated", "2", "5", "0", "SIGTERM", "1", cwd=tmp_path)
    assert ran.codes == [143, 143], ran.stderr[-3000:]
    assert names(tmp_path / "ckpt") == ["step-00000003"], ran.stderr[-3000:]
    with contextlib.chdir(tmp_path):  # resume the same script on one rank
        monkeypatch.setattr(sys, "argv", [JOB, "auto", "1", "4", "0", "SIGTERM", "nobody"])
        runpy.run_path(JOB, run_name="__main__")
    assert len(losses(capsys.readouterr().out)) == 1


slow = pytest.mark.slow


@slow
@pytest.mark.parametrize("strategy, signum, who, status", [
    ("ring_dilated", "SIGTERM", 0, 143), ("ring_dilated", "SIGTERM", 1, 143), ("ring_dilated_fsdp", "SIGTERM", 0, 143),
    ("ring_dilated_fsdp", "SIGTERM", 1, 143), ("ring_dilated", "SIGINT", 0, 130), ("ring_dilated", "SIGINT", 1, 130),
    ("ring_dilated_fsdp", "SIGINT", 0, 130),
])  # fmt: skip
def test_jobs(tmp_path, strategy, signum, who, status):
    check_job(tmp_path, job(tmp_path, strategy, 2, 5, 0, signum, who), status)


@slow
@pytest.mark.parametrize("strategy", ["ring_dilated", "ring_dilated_fsdp"])
def test_a_job_in_a_validation(tmp_path, strategy):
    check_job(tmp_path, job(tmp_path, strategy, 2, 5, 0, "SIGTERM", "validation"), 143, step=2)


@slow
@pytest.mark.parametrize("signum", [TERM, INT])
@pytest.mark.parametrize("strategy", ["ring_dilated", "ring_dilated_fsdp"])
def test_a_group_of_processes(tmp_path, strategy, signum):
    """A scheduler or a terminal signals the whole process group. The loaders' workers must not make the fit fail."""
    outcome = job(tmp_path, strategy, 2, 100_000, 2, act=lambda p: os.killpg(p.pid, signum))
    assert outcome[0] == 128 + signum, outcome[1][-3000:]
    (name,) = names(tmp_path / "ckpt")
    assert outcome[1].count(f"after step {int(name[5:])}\n") == 2, outcome[1][-3000:]


@slow
def test_interrupted_twice(tmp_path):
    """The second interrupt ends the job immediately, although rank 0 is waiting for a stopped rank."""

    def act(process):
        ranks = [int((tmp_path / f"ready{i}").read_text()) for i in range(2)]
        os.kill(ranks[1], signal.SIGSTOP)
        time.sleep(1)
        os.kill(ranks[0], INT)
        time.sleep(1)
        assert process.poll() is None
        os.kill(ranks[0], INT)
        assert process.wait(10) == 130

    assert job(tmp_path, "ring_dilated", 2, 100_000, 0, act=act)[0] == 130


@slow
@pytest.mark.parametrize("signum", [TERM, INT])
def test_torchrun(tmp_path, signum):
    """The agent forwards the signal to its workers, and a worker forwards it to its child processes."""
    outcome = job(tmp_path, "ring_dilated", 2, 100_000, 2, launcher=[*TORCHRUN, "--nproc-per-node", "2"],
                act=lambda p: p.send_signal(signum))  # fmt: skip
    assert outcome[0] != 0
    (name,) = names(tmp_path / "ckpt")
    assert outcome[1].count(f"after step {int(name[5:])}\n") == 2, outcome[1][-3000:]


@slow
def test_torchrun_restarts_a_worker_that_was_told_to_end(tmp_path):
    """The lock of the terminated workers does not block the restarted workers."""
    launcher = [*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "1"]
    status, text = job(tmp_path, "ring_dilated", 2, 5, 0, "SIGTERM", 1, launcher=launcher)
    assert status == 0 and len(losses(text)) == 2, text[-3000:]
    assert names(tmp_path / "ckpt") == ["step-00000003", "step-00000005"]


@slow
@pytest.mark.parametrize("strategy", ["ring_dilated", "ring_dilated_fsdp"])
def test_slurm_requeues_a_job_of_two_tasks(tmp_path, slurm, strategy):
    """Both tasks get the signal, as under srun, but `scontrol` is called once."""
    (tmp_path / "ck").mkdir()
    command = [sys.executable, JOB, strategy, "2", "100000", "0"]
    root = str(Path(module.__file__).parents[3])
    tasks = []
    for rank in range(2):
        variables = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NTASKS": 2, "SLURM_NTASKS_PER_NODE": 2}
        env = {**os.environ, **{k: str(v) for k, v in variables.items()}, "PYTHONPATH": root, "MASTER_PORT": "29731"}
        tasks.append(subprocess.Popen(command, cwd=tmp_path, env=env, stdout=-1, stderr=-2, text=True))
    end = time.monotonic() + LIMIT
    while len(list(tmp_path.glob("ready*"))) < 2 and time.monotonic() < end:
        time.sleep(0.1)
    for task in tasks:
        task.send_signal(USR1)
    texts = [task.communicate(timeout=LIMIT)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [138, 138], texts
    assert slurm.read_text() == "requeue 17\n" and len(names(tmp_path / "ckpt")) == 1
