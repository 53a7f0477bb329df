"""Advice after running out of memory: its text, and that the training process is not changed."""

import re
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lightning_dilated as ld
from lightning_dilated.callbacks import MemoryProfiler
from lightning_dilated.ext.planning import advice
from lightning_dilated.ext.planning.advice import _by_host, _otherwise, advise, answer, question_of
from lightning_dilated.ext.planning.counting import dry_run
from lightning_dilated.ext.planning.counting.model_specs import counted_model_of
from lightning_dilated.ext.planning.estimate import Case, Facts
from lightning_dilated.ext.planning.gpus import GPUS
from lightning_dilated.ext.planning.setup import Setup
from lightning_dilated.ext.profiling.memory import profiler
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.sequence import group

pytestmark = pytest.mark.full

FIVE = DilatedPattern.longnet([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])
TWO = DilatedPattern.longnet([2048, 32768], [1, 4])
H200, ONE = GPUS["H200"], Setup()


def advice_of(run, model, tokens=None):
    """Return the advice, computed in this process."""
    question = question_of(run, model, tokens)
    return None if question is None else answer(question)


def trainer(**options):
    settings = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, **options}
    return pl.Trainer(enable_progress_bar=False, enable_model_summary=False, **settings)


def test_advice():
    model = ld.LongNetLM(FIVE, dim=768, depth=12, num_heads=12)
    run = trainer(precision="bf16-mixed")
    assert advice_of(run, model, 1 << 16) is None  # the run fits without changes
    said = advice_of(run, model, 1 << 20)
    assert "1,048,576 tokens on 1 GPU(s) take 4" in said and "with all kept" in said
    assert "ActivationRecompute('attention-kept')" in said


@pytest.mark.slow
def test_advice_of_block_inputs_on_the_host():
    """The model does not fit without offloading."""
    model = ld.LongNetLM(FIVE, dim=768, depth=12, num_heads=12)
    said = advice_of(trainer(precision="bf16-mixed"), model, 5 << 20)
    assert (
        "Take about 2 GPUs or ActivationRecompute('block', every=2, tile=16384, head_chunks=6, offload=1.0), for"
        in said
    )
    assert "Less is needed with residual_dtype=bfloat16 of the model." in said


def test_block_inputs_on_the_host():
    """Six inputs are offloaded, each of 5M tokens with 768 fp32 numbers."""
    model = ld.LongNetLM(TWO, dim=768, depth=12, num_heads=12)
    subject = counted_model_of(model)
    case, able = Case(subject, Facts.of(model, subject), ONE, H200), [MemorySettings("block", 2, 0, 1 << 14, 2)]
    (said,) = _by_host(case, able, 5 << 20)
    assert said.startswith("ActivationRecompute('block', every=2, tile=16384, head_chunks=2, offload=1.0), for which")
    assert "the host keeps 90.0 GiB of each rank's block inputs" in said and case.host == 0
    assert _by_host(case, able, 1 << 30) == [] == _by_host(case, [MemorySettings()], 4096)
    now = replace(able[0], offload=1.0)  # the run already uses the advice
    assert _otherwise(case, able, now, 5 << 20, model) == (
        " By the plan that fits, if the host has room for the block inputs."
    )


def test_advice_takes_the_datas_length_and_the_strategy():
    model = ld.LongNetLM(FIVE, dim=768, depth=12, num_heads=12)
    run = trainer(precision="bf16-mixed", strategy="ring_dilated")
    assert advice_of(run, model) is None
    run._data_connector._datahook_selector = None
    run.datamodule = SimpleNamespace(seq_len=1 << 20)
    assert "1,048,576 tokens" in advice_of(run, model)


LONG = DilatedPattern.longnet([2048, 1 << 17], [1, 16])


@pytest.mark.parametrize(
    "step, streams, now, says",
    [
        (1 << 14, 4, MemorySettings(), None),  # 65,536 tokens per step fit without changes
        (
            *(1 << 17, 8, MemorySettings()),
            "131,072 tokens at a time of 8 stream(s) take x GiB of each GPU with all kept, up to x of it for what is "
            "carried from step to step. It is x with ActivationRecompute('attention-kept').",
        ),
        (
            *(1 << 17, 32, MemorySettings()),
            "131,072 tokens at a time of 32 stream(s) take x GiB of each GPU with all kept, up to x of it for what is "
            "carried from step to step. It is x with ActivationRecompute('block', tile=16384, stream=65536), which ends "
            "gradients every 65,536 tokens.",
        ),
        (
            *(1 << 17, 512, MemorySettings("none", stream=1 << 16)),
            "65,536 tokens at a time of 512 stream(s) take x GiB of each GPU with all kept, stream=65536, up to x of it for "
            "what is carried from step to step. Fewer tokens do not help: lower data.streams, or take more GPUs, which",
        ),
    ],
    ids=["fits", "recompute", "shorter chunks", "fewer streams"],
)
def test_advice_for_steps_of_streams(tmp_path, step, streams, now, says):
    """A step has the tokens of all streams, and memory includes the state carried from earlier steps."""
    with (tmp_path / "text").open("wb") as file:
        file.truncate(1 << 30)  # a sparse file, which is not read
    model = ld.LongNetLM(LONG, dim=768, depth=12, num_heads=12)
    run = trainer(precision="bf16-mixed")
    run._data_connector._datahook_selector = None
    run.datamodule = ld.data.StreamDataModule(str(tmp_path / "text"), step, streams, val_fraction=0, test_fraction=0)
    said = answer(replace(question_of(run, model), settings=now))
    assert said is None if says is None else re.search(re.escape(says).replace("x", "[0-9.]+"), said), said


@pytest.mark.slow
def test_advice_of_parameters_on_the_host():
    """Offloaded parameters do not count as memory of the GPU."""
    model = ld.LongNetLM(FIVE, dim=8192, depth=64, num_heads=64)
    strategies = (ld.RingDilatedFSDPStrategy(cpu_offload=x) for x in (False, True))
    said = [advice_of(trainer(precision="bf16-mixed", strategy=x), model, 1 << 14) for x in strategies]
    assert "do not fit: take RingDilatedFSDPStrategy(cpu_offload=True), or more GPUs" in said[0]
    assert "GiB" in said[1] and "do not fit" not in said[1]


def test_advice_amid_a_step():
    """The profiler asks in mid-step, when ranks share a sequence and gradients are disabled."""
    model = ld.LongNetLM(FIVE, dim=64, depth=2, num_heads=4)
    expected = advice_of(trainer(precision="bf16-mixed"), model, 1 << 24)
    with group._active.with_top(SimpleNamespace(ranks=2, name="other")), torch.no_grad():
        assert advice_of(trainer(precision="bf16-mixed"), model, 1 << 24) == expected != None  # noqa: E711


def test_the_gpu_of_a_run(monkeypatch):
    """Memory and name are taken from the GPU itself, speeds from the data sheet."""
    here = SimpleNamespace(name="NVIDIA A100-SXM4-40GB", total_memory=39 << 30, major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: here)
    gpu = advice._gpu(SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cuda"))))
    assert (gpu.name, gpu.memory, gpu.capability) == (here.name, 39 << 30, (8, 0))
    assert (gpu.flops, gpu.bandwidth) == (GPUS["A100-40GB"].flops, GPUS["A100-80GB"].bandwidth)


def test_no_advice():
    assert advice_of(trainer(precision="64-true"), ld.LongNetLM(FIVE, dim=64, depth=1, num_heads=4), 4096) is None
    assert advice_of(trainer(), pl.LightningModule(), 4096) is None
    assert advice_of(trainer(), ld.SlideEncoder(), 4096) is None  # it has no loss to train


# -- in a process of its own -------------------------------------------------------------------------------------------
REPLACED = {(torch, "rms_norm"), (torch, "layer_norm"), (torch, "log_softmax"), (nn.Module, "to")}


def small(**options):
    return ld.LongNetLM(TWO, dim=64, depth=2, num_heads=4, **options)


def test_nothing_is_replaced_in_the_process_that_trains(monkeypatch):
    """Advice for a trained model, with objects that cannot be pickled, equals the advice for a new model."""
    run, model = trainer(precision="bf16-mixed"), small(optimizer=lambda parameters: torch.optim.SGD(parameters, 1.0))
    model.configure_model()
    model.note, model.held = (lambda: None), torch.zeros(3)
    expected = advice_of(run, small(), 1 << 24)

    def never(*unused):
        raise AssertionError("this process counted")

    for owner, name in ((dry_run, "step"), (dry_run.compat, "replaced"), (dry_run, "as_on_gpu")):
        monkeypatch.setattr(owner, name, never)
    before, replaced, done = {x: getattr(*x) for x in REPLACED}, set(), threading.Event()

    def look():
        while not done.wait(0.001):
            replaced.update(x for x in REPLACED if getattr(*x) is not before[x])

    thread = threading.Thread(target=look)
    thread.start()
    try:
        said = advise(run, model, 1 << 24)
    finally:
        done.set()
        thread.join()
    assert not replaced and said == expected and "ActivationRecompute('attention-kept')" in said
    assert model.held is not None and model.transformer.memory == MemorySettings()


HANGS = """import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])
time.sleep(99)"""
FAULTS = {"hangs": (HANGS, "TimeoutError: no plan was ready after 1 s"),
          "fails": ("raise SystemExit('broken')", "RuntimeError: the process that plans ended with exit code 1: broken"),
          "says nothing": ("pass", "ended with exit code 0: no output")}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_process_that_fails_or_hangs(name, monkeypatch):
    code, says = FAULTS[name]
    monkeypatch.setattr(advice, "COMMAND", (sys.executable, "-c", code))
    monkeypatch.setattr(advice, "TIMEOUT", 1.0 if name == "hangs" else 60.0)
    monkeypatch.setattr(advice, "_tokens", lambda trainer: 4096)
    began = time.monotonic()
    said = profiler.advise(trainer(), small())
    assert said.startswith(profiler.GENERAL) and says in said and time.monotonic() - began < 60


def test_a_class_that_no_other_process_can_import(monkeypatch):
    class Here(ld.LongNetLM):
        pass

    monkeypatch.setattr(advice, "_tokens", lambda trainer: 4096)
    said = profiler.advise(trainer(), Here(FIVE, dim=64, depth=2, num_heads=4))
    assert said.startswith(profiler.GENERAL) and "Here cannot be pickled, so no other process can plan it" in said


class Full(ld.LongNetLM):
    def loss_terms(self, batch):
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")


def test_the_runs_own_error_goes_on(monkeypatch, tmp_path):
    """If the planning process hangs after a fit ran out of memory, the fit still raises its own error."""
    monkeypatch.setattr(advice, "COMMAND", (sys.executable, "-c", "import time; time.sleep(600)"))
    monkeypatch.setattr(advice, "TIMEOUT", 1.0)
    monkeypatch.setattr(advice, "_tokens", lambda trainer: 4096)

    run = trainer(callbacks=[MemoryProfiler(1)], max_steps=1, default_root_dir=tmp_path)
    rows = [{"tokens": torch.zeros(64, dtype=torch.int64), "labels": torch.zeros(64, dtype=torch.int64)}]
    with (
        pytest.warns(UserWarning, match="no plan was ready after 1 s"),
        pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 2"),
    ):
        run.fit(Full(FIVE, dim=64, depth=2, num_heads=4), DataLoader(rows))
