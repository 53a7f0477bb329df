"""The progress bar shows the newest loss that has arrived, without waiting for the GPU."""

import copy
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_dilated import DilatedPattern, LongNetLM
from lightning_dilated.models.metrics import SLOTS, DeferredScalar

ROOT = Path(__file__).parents[2]


def test_on_a_cpu_at_once():
    newest = DeferredScalar()
    assert [newest.of(torch.tensor(x, requires_grad=True)) for x in (1.5, 2.5)] == [1.5, 2.5]


def test_copies_begin_anew():
    newest = DeferredScalar()
    assert newest.last() is None
    newest.of(torch.tensor(1.5))
    newest._free = [lambda: None]  # CUDA events cannot be pickled, nor can a function
    for copied in (copy.deepcopy(newest), pickle.loads(pickle.dumps(newest))):
        assert isinstance(copied, DeferredScalar) and copied.last() is None and newest.last() == 1.5


class Shown(pl.callbacks.TQDMProgressBar):
    """Records the value in the bar after each batch, and the exact loss."""

    def __init__(self):
        super().__init__()
        self.shown, self.losses = [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.shown.append(self.get_metrics(trainer, module)["train_loss"])
        self.losses.append(trainer.callback_metrics["train_loss"].item())
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)


def test_the_bar_shows_the_loss():
    bar, text = Shown(), [{"tokens": torch.arange(33)[i : i + 32], "labels": torch.arange(33)[:32]} for i in range(2)]
    model = LongNetLM(DilatedPattern([(16, 1)]), dim=8, depth=1, num_heads=2)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    pl.Trainer(accelerator="cpu", max_epochs=3, callbacks=[bar], **quiet).fit(model, DataLoader(text), DataLoader(text))
    assert len(bar.shown) == 6 and bar.shown == bar.losses
    assert bar.trainer.progress_bar_metrics["train_loss"] == bar.losses[-1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_what_has_arrived():
    newest, x = DeferredScalar(), torch.tensor(1.5, device="cuda")
    newest.of(x)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    assert newest.of(x * 2) == 1.5  # the second value is not ready before the sleep ends
    torch.cuda.synchronize()
    assert newest.of(x * 6) == 3.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_many_under_way():
    newest, x = DeferredScalar(), torch.arange(20.0, device="cuda")
    newest.of(x[0])
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    assert [newest.of(y) for y in x[1:]] == [0.0] * 19  # a value is skipped if no slot is free
    assert newest.last() == 19.0
    assert newest.of(x[0]) == SLOTS
    torch.cuda.synchronize()
    assert newest.of(x[0]) == 0.0


@pytest.mark.gpu
@pytest.mark.parametrize(
    "strategy, model, least",
    [
        ("RingDilatedStrategy", "LongNetLM", 5),
        ("RingDilatedStrategy", "LongNetLM 600", 5),
        ("RingDilatedStrategy", "LongNetLM+recurrence", 5),
        ("RingDilatedStrategy", "LongNetLM+recurrence 600", 5),
        ("RingDilatedFSDPStrategy", "LongNetLM", 5),
        ("RingDilatedStrategy", "LongNetMLM", 3.5),
        ("RingDilatedStrategy", "LongNetClassifier", 0.5),
    ],
)
@pytest.mark.parametrize("gpus", [1, 2])
def test_no_step_waits_for_the_gpu(gpus, strategy, model, least):
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    command += ["-m", "tests.models.steps_without_waits", strategy, *model.split()]
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=150)
    shown = re.search(r"shown ([\d.]+)", ran.stdout)
    assert ran.returncode == 0 and shown and float(shown[1]) > least, (ran.stdout + ran.stderr)[-3000:]
