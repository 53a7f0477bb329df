"""TokenMean has sums that stay float64 even if the model is cast. The progress bar shows the loss without waiting."""

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
from torch import nn
from torch.utils.data import DataLoader

from lightning_dilated import DilatedPattern, LongNetLM
from lightning_dilated.models.metrics import SLOTS, DeferredScalar, TokenMean

from . import trainer


@pytest.mark.parametrize("cast", ["bfloat16", "half", "float", "to", "to twice"])
def test_sums_stay_wide(cast):
    """In bf16, a sum of ones would stop at 256."""
    module = nn.ModuleDict({"linear": nn.Linear(2, 2), "mean": TokenMean()})
    if cast.startswith("to"):
        module.to(torch.bfloat16)
        module.to("cpu", torch.float16 if cast == "to twice" else None)
    else:
        getattr(module, cast)()
    assert module["linear"].weight.dtype != torch.float64
    for again in range(2):
        for _ in range(1000):
            module["mean"].update(torch.tensor(1.0, dtype=torch.bfloat16), 3)
        assert module["mean"].total.dtype == module["mean"].tokens.dtype == torch.float64
        assert module["mean"].compute() == pytest.approx(1 / 3, rel=1e-7), again
        module["mean"].reset()


def test_follows_the_device():
    module = nn.ModuleDict({"mean": TokenMean()}).to("meta")
    assert module["mean"].total.device.type == "meta" and module["mean"].total.dtype == torch.float64


def test_nan_shows():
    mean = TokenMean()
    mean.update(torch.tensor(float("nan")), 1)
    assert mean.compute().isnan()


# -- the loss in the progress bar --------------------------------------------------------------------------------------
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
    run = trainer(max_epochs=3, callbacks=[bar], enable_progress_bar=True, num_sanity_val_steps=None)
    run.fit(model, DataLoader(text), DataLoader(text))
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
