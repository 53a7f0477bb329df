"""Under each launcher, a script on two ranks has the loss of one rank. Restarts are tested in test_failures."""

import os
import socket
import subprocess
import sys

import pytest

from .test_failures import JOB, LIMIT, losses, start


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
