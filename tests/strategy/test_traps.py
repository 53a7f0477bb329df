"""Pitfalls of Lightning that no hook of the strategy guards against; test_hooks has the other pitfalls."""

import inspect
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jsonargparse
import pytest
import torch
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch import callbacks
from torch.utils.data import DataLoader

import lightning_dilated as ld
from lightning_dilated import LongNetLM, RingDilatedFSDPStrategy, RingDilatedStrategy
from lightning_dilated.callbacks import ThroughputMonitor
from lightning_dilated.sequence import sequence_gather

from .runs import PATTERN, Data, Run, full, launched, make, trainer
from .test_hooks import N, Numbers, Plain

pytestmark = pytest.mark.full


def dealt_weights_move(rank, group):
    built, model, data, _ = make(Run(fsdp=True, double=True, steps=1), launched(rank))
    before = [p.detach().clone() for p in model.parameters()]
    built.fit(model, data)
    return min(float((full(p) - b).abs().max()) for p, b in zip(model.parameters(), before, strict=True))


def test_sharded_weights_move(pools):
    """Optimizers must be created after sharding. tests/cli shows that LightningCLI's own is refused."""
    assert min(pools(2).run(2, dealt_weights_move)) > 0


def gathered(rank, group):
    """Return (gradient of a gather's input, weights). The output gradient is transposed, as after attention."""
    sequence = ld.sequence.SequenceGroup(group)
    x = torch.arange(12.0).view(1, 3, 4) + 100 * rank
    x.requires_grad_()
    out = sequence_gather(x, 1, sequence)
    weights = torch.arange(24.0).view(1, 4, 6)
    out.backward(weights.transpose(1, 2))
    return x.grad, weights


def test_gradient_of_a_gather_is_not_read_by_rows(pools):
    """With gloo, torch.distributed.nn's all_gather silently misreads a gradient that is not row-major."""
    for rank, (got, weights) in enumerate(pools(2).run(2, gathered)):
        assert torch.equal(got, 2 * weights.transpose(1, 2)[:, 3 * rank : 3 * rank + 3])
    source = Path(ld.__file__).parent.rglob("*.py")
    assert not [p for p in source if "distributed.nn" in p.read_text()]


class Odd:
    """A user's class that is stored in the hyperparameters."""


def odd_checkpoint(rank, group, folder):
    """Resume from a checkpoint without a class, which must resume, and from one with a class."""
    world, path = launched(rank), f"{folder}/odd"

    def run(ckpt, steps, weights_only=True, **hparams):
        built = trainer(RingDilatedFSDPStrategy(), world, max_steps=steps)
        model = LongNetLM(pattern=PATTERN, vocab_size=11, dim=16, depth=1)
        model.hparams.update(hparams)
        built.fit(model, Data(Run(fsdp=True)), ckpt_path=ckpt, weights_only=weights_only)
        built.save_checkpoint(path)
        return built.global_step

    run(None, 1)
    assert run(path, 2) == 2
    run(None, 1, odd=Odd())
    run(path, 2, weights_only=False)


def test_classes_in_checkpoints(pools, tmp_path):
    """Lightning ignores `weights_only` if a strategy loads after `setup`. A folder never loads a class."""
    for error in pools(2).errors(ValueError, 2, odd_checkpoint, str(tmp_path)):
        assert "odd/meta.pt cannot be read" in error and "test_traps.Odd" in error
        assert "add_safe_globals" in error


REFUSED = {
    "on exception": (
        RingDilatedStrategy,
        lambda: callbacks.OnExceptionCheckpoint("nowhere"),
        "ModelCheckpoint(every_n",
    ),
    "throughput": (RingDilatedStrategy, lambda: callbacks.ThroughputMonitor(len), "2 times as many sequences"),
}
if "save_on_exception" in inspect.signature(callbacks.ModelCheckpoint).parameters:
    kept = lambda: callbacks.ModelCheckpoint(save_on_exception=True)  # noqa: E731
    REFUSED["checkpoint on exception"] = (RingDilatedStrategy, kept, "ModelCheckpoint(every_n")
if hasattr(callbacks, "WeightAveraging"):
    REFUSED["averaging"] = (RingDilatedFSDPStrategy, callbacks.WeightAveraging, "ring_dilated'")


def with_callback(rank, group, name):
    strategy, callback, _ = REFUSED[name]
    built = trainer(strategy(), launched(rank), max_steps=1, callbacks=[callback()], enable_checkpointing=True)
    built.fit(Plain(), DataLoader(Numbers()))


@pytest.mark.parametrize("name", REFUSED)
def test_callbacks_that_go_wrong(pools, name):
    """Refused callbacks wait for a rank that raised, copy sharded parameters, or count a sequence once per rank."""
    for error in pools(2).errors(ValueError, 2, with_callback, name):
        assert REFUSED[name][1]().__class__.__name__ in error and REFUSED[name][2] in error
    assert not Path("nowhere").exists()  # the error itself must not trigger OnExceptionCheckpoint


def averaged(rank, group):
    average = callbacks.WeightAveraging()
    built = trainer(RingDilatedStrategy(), launched(rank), max_steps=2, callbacks=[average])
    model = Plain()
    built.fit(model, DataLoader(Numbers()))
    return model.project.weight.detach()


@pytest.mark.skipif(not hasattr(callbacks, "WeightAveraging"), reason="Lightning has none before 2.6")
def test_weights_are_averaged_where_each_rank_has_all(pools):
    """Weights can be averaged if every rank has all of them; only averaging of sharded weights is refused."""
    a, b = pools(2).run(2, averaged)
    assert torch.equal(a, b)


class Slow(Plain):
    def training_step(self, batch, batch_idx):
        time.sleep(0.01)
        return super().training_step(batch, batch_idx)


def measured(rank, group):
    logged = {}
    monitor = ThroughputMonitor(window_size=3)
    built = trainer(RingDilatedStrategy(), launched(rank), max_steps=6, log_every_n_steps=1, callbacks=[monitor])
    with mock.patch.object(built._logger_connector, "log_metrics", lambda m, step=None: logged.update(m)):
        built.fit(Slow(), DataLoader(Numbers(), batch_size=2, drop_last=True))
    return logged


@pytest.mark.parametrize("ranks", [1, 2])
def test_throughput_counts_a_sequence_once(pools, ranks):
    """Two ranks that share a sequence do not double the throughput."""
    rates = pools(ranks).run(ranks, measured)[0]
    assert 0 < rates["train/batches_per_sec"] < 100
    assert rates["train/samples_per_sec"] == pytest.approx(2 * rates["train/batches_per_sec"])
    assert rates["train/items_per_sec"] == pytest.approx(N * rates["train/samples_per_sec"])
    assert rates["train/device/items_per_sec"] == pytest.approx(rates["train/items_per_sec"] / ranks)


def counted_flops(rank, group, run):
    """Return ({logged rate: value}, FLOPs per batch that the callback counts) for a run with a language model."""
    logged, world, passed = {}, launched(rank), []
    built, model, data, _ = make(run, world, callbacks=[ThroughputMonitor(window_size=2)], log_every_n_steps=1)
    real = Throughput.update
    spy = lambda self, **values: passed.append(values["flops"]) or real(self, **values)  # noqa: E731
    log = mock.patch.object(built._logger_connector, "log_metrics", lambda m, step=None: logged.update(m))
    with log, mock.patch.object(Throughput, "update", spy):
        built.fit(model, data)
    return logged, *passed[:1], hasattr(model, "flops_per_batch")


@pytest.mark.parametrize("kind", ["whole", "documents", "lengths"])
def test_flops_of_a_shared_sequence(pools, kind):
    """Each of two ranks does half of the work that one rank would do."""
    run = Run(kind=kind, steps=4, batch_size=1 if kind == "documents" else 2)
    alone, flops, _ = pools(1).run(1, counted_flops, run)[0]
    logged, same, left = pools(2).run(2, counted_flops, run)[0]
    assert same == flops > 0 and not left
    if kind == "lengths":
        return  # batches have different lengths, and a rate covers several of them
    rate = flops * logged["train/batches_per_sec"]
    assert logged["train/flops_per_sec"] == pytest.approx(rate)
    assert logged["train/device/flops_per_sec"] == pytest.approx(rate / 2)
    assert alone["train/device/flops_per_sec"] == pytest.approx(flops * alone["train/batches_per_sec"])


def test_peak_of_an_h200():
    """Lightning's table lists the peak for sparse products, and does not contain the name of this GPU."""
    from lightning_dilated.ext.profiling import throughput

    def run(device, precision):
        return SimpleNamespace(
            strategy=SimpleNamespace(root_device=torch.device(device)),
            precision_plugin=SimpleNamespace(precision=precision),
        )

    with mock.patch("torch.cuda.get_device_name", lambda device: "NVIDIA H200"):
        assert throughput._peak(run("cuda:0", "bf16-mixed")) == pytest.approx(989.4e12)
        assert throughput._peak(run("cuda:0", "32-true")) is None
    assert throughput._peak(run("cpu", "bf16-mixed")) is None


@pytest.mark.parametrize("strategy", [RingDilatedStrategy, RingDilatedFSDPStrategy])
def test_options_on_the_command_line(strategy):
    """Without types, "2" would remain a string, and **kwargs would add the twenty options of DDP."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(strategy)
    parsed = parser.parse_args(["--sequence_size", "2", "--head_size=1", "--allow=[a]"])
    assert parsed.sequence_size == 2 and parser.parse_args([]).sequence_size == "auto" and parsed.allow == ["a"]
    assert {"self", *vars(parsed)} == set(
        inspect.signature(strategy.__init__).parameters
    )  # only options of the strategy itself, all with a default
    with pytest.raises(jsonargparse.ArgumentError, match="sequence_size"):
        parser.parse_args(["--sequence_size", "two"])


@pytest.mark.parametrize(
    "dims, shape, want",
    [
        ({"x": 1}, (2, 5), (2, 10)),
        ({"x": -2}, (2, 5, 3), (2, 10)),
        ({"x": 0}, (5, 2), (2, 10)),
        ({"x": 0}, (5,), (1, 5)),
    ],
)
def test_tokens_of_a_batch(dims, shape, want):
    monitor = ThroughputMonitor()
    monitor._dims, monitor._sequence = dims, None
    assert (monitor.samples_of({"x": torch.zeros(shape)}), monitor.tokens_of({"x": torch.zeros(shape)})) == want
    with pytest.raises(ValueError, match="finds none of"):
        monitor.samples_of({"y": torch.zeros(shape)})
