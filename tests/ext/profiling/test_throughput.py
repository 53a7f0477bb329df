"""ThroughputMonitor on a GPU: a batch is timed when the GPU ends it. The host waits only before it logs."""

import itertools
import time
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch.utils.data import DataLoader

from lightning_dilated import DilatedPattern, LongNetLM
from lightning_dilated.callbacks import ThroughputMonitor
from lightning_dilated.ext.profiling import throughput

from ...models import trainer


class Gpu:
    """A simulated GPU that completes one event per second, in order, up to event `done`."""

    def __init__(self):
        self.asked, self.done, self.waited = 0, 0, 0

    def now(self):
        self.asked += 1
        return End(self, self.asked)


class End:
    def __init__(self, gpu, second):
        self.gpu, self.second = gpu, second

    def query(self):
        return self.second <= self.gpu.done

    def synchronize(self):
        self.gpu.waited += not self.query()
        self.gpu.done = max(self.gpu.done, self.second)

    def elapsed_time(self, later):
        assert self.query() and later.query()
        return 1000.0 * (later.second - self.second)


@pytest.fixture
def gpu(monkeypatch):
    simulated = Gpu()
    monkeypatch.setattr(throughput, "_now", simulated.now)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: setattr(simulated, "done", simulated.asked))
    return simulated


def test_batches_are_noted_when_they_have_ended(gpu):
    monitor, stage = ThroughputMonitor(window_size=4), RunningStage.TRAINING
    connector = SimpleNamespace(should_update_logs=False)
    trainer = SimpleNamespace(
        state=SimpleNamespace(stage=stage, fn=TrainerFn.FITTING), _logger_connector=connector,
        strategy=SimpleNamespace(root_device=torch.device("cuda", 0)),
    )  # fmt: skip
    monitor._dims, monitor._sequence, monitor._own_flops = {"tokens": 1}, None, True
    monitor._throughputs[stage] = Throughput(window_size=4)
    module, batch = SimpleNamespace(flops_per_batch=5), {"tokens": torch.zeros(2, 8)}
    monitor._start(trainer)
    gpu.done = gpu.asked

    def times():
        return [round(x) for x in monitor._throughputs[stage]._time]

    for _ in range(3):
        monitor._update(trainer, module, batch, 1)
    assert times() == [] and gpu.waited == 0
    gpu.done += 2
    monitor._update(trainer, module, batch, 1)
    assert times() == [1, 2] and gpu.waited == 0
    connector.should_update_logs = True
    monitor._update(trainer, module, batch, 1)
    assert times() == [2, 3, 4, 5] and gpu.waited == 3  # window_size is 4
    metrics = monitor._throughputs[stage].compute()
    rates = [metrics[f"device/{name}_per_sec"] for name in ("batches", "samples", "items", "flops")]
    assert rates == pytest.approx([1, 2, 16, 5], rel=1e-3)
    connector.should_update_logs = False
    monitor._update(trainer, module, batch, 1)
    monitor._start(trainer)  # a validation or another stage starts, which first records earlier batches
    assert not monitor._under_way
    monitor._update(trainer, module, batch, 1)
    trainer.sanity_checking, trainer.state.fn = False, TrainerFn.VALIDATING
    monitor.on_validation_end(trainer, module)
    assert not monitor._under_way


def test_what_a_run_before_left_is_forgotten():
    monitor, text = ThroughputMonitor(), [{"tokens": torch.arange(16), "labels": torch.arange(16)}]
    model = LongNetLM(DilatedPattern([(16, 1)]), dim=8, depth=1, num_heads=2)
    built = trainer(max_steps=1, callbacks=[monitor])
    for run in (built.fit, built.validate, built.validate):
        monitor._under_way.append((RunningStage.VALIDATING, None, {}))  # None: an event that fails if it is waited for
        run(model, DataLoader(text))
        assert not monitor._under_way


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_rates_are_those_of_the_clock():
    text = [{"tokens": torch.arange(65537)[:-1] % 256, "labels": torch.arange(65537)[1:] % 256}] * 40
    logged, ends = [], []

    class Clock(pl.Callback):
        def on_train_batch_end(self, trainer, *unused):
            if trainer.global_step % 10 == 0:
                torch.cuda.synchronize()
                ends.append(time.perf_counter())

    model = LongNetLM(DilatedPattern.geometric(2048, 65536), dim=256, depth=4, num_heads=4)
    trainer = pl.Trainer(
        accelerator="gpu", devices=1, precision="bf16-mixed", max_steps=40, log_every_n_steps=10, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, callbacks=[ThroughputMonitor(window_size=10), Clock()],
    )  # fmt: skip
    trainer._logger_connector.log_metrics = lambda m, step=None: logged.append(m.get("train/batches_per_sec"))
    trainer.fit(model, DataLoader(text, pin_memory=True))
    rates = [10 / (b - a) for a, b in itertools.pairwise(ends)]
    logged_rates = [x for x in logged if x][-len(rates) :]
    assert logged_rates == pytest.approx(rates, rel=0.15), (logged_rates, rates)
