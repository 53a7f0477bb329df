"""CommunicationProfiler on two ranks: logs, table, bytes against the plan and the traffic, and its end."""

import contextlib
import io
import warnings
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch

from lightning_dilated import DilatedPattern, LongNetLM
from lightning_dilated.callbacks import CommunicationProfiler
from lightning_dilated.ext.profiling import communication
from lightning_dilated.sequence.exchange.transport import Flight, Wait
from lightning_dilated.sequence.links import Links

from ...distributed.test_nccl import on_gpus
from ...models import PATTERN as NARROW
from ...models import text
from ...models import trainer as plain_trainer
from ...strategy.runs import Run, launched, make
from .stacks import Kept

pytestmark = pytest.mark.full

NAMES = {
    *("comm/received_mb_forward", "comm/received_mb_backward", "comm/planned_mb", "comm/in_flight_ms"),
    *("comm/exposed_ms", "comm/hidden_fraction", "comm/agreeing_ms"),
}


class Spy(pl.Callback):
    """Records the clock of the group during and after training batches, and after the fit."""

    def __init__(self, fails_at=None):
        self.fails_at, self.within, self.between = fails_at, [], []

    def on_before_optimizer_step(self, trainer, *args):
        self.group = trainer.strategy.sequence
        self.within.append(self.group.forward_traffic.log is not None)
        if trainer.global_step == self.fails_at:
            raise ValueError("trouble")

    def on_validation_start(self, trainer, *args):
        if not trainer.sanity_checking:
            self.between.append(trainer.strategy.sequence.backward_traffic.log)


def fit(rank, group, run, settings, options=None, unlike=False, fails_at=None):
    """Fit, and return this rank's results. `unlike`: rank 1 reports one byte too many as sent."""
    spy, logger, said = Spy(fails_at), Kept("comm/"), io.StringIO()
    profiler = CommunicationProfiler(**settings)
    built, model, data, _ = make(run, launched(rank), callbacks=[profiler, spy], logger=logger, **(options or {}))
    wrong = lambda *x: [replace(y, sent=y.sent + (rank == 1)) for y in summary(*x)]  # noqa: E731
    summary = communication.summary
    with contextlib.redirect_stdout(said), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        patched = mock.patch.object(communication, "summary", wrong) if unlike else contextlib.nullcontext()
        with patched, contextlib.nullcontext() if fails_at is None else pytest.raises(ValueError, match="trouble"):
            built.fit(model, data)
    return {
        "rows": profiler.rows,
        "steps": profiler.steps,
        "unlike": profiler.unlike,
        "latest": profiler.latest,
        "logged": logger.steps,
        "said": " ".join(said.getvalue().split()),
        "warned": [str(x.message) for x in warned if "CommunicationProfiler" in str(x.message)],
        "traffic": [spy.group.forward_traffic.received, spy.group.backward_traffic.received],
        "within": spy.within,
        "between": spy.between,
        "after": [spy.group.forward_traffic.log, spy.group.backward_traffic.log],
        "left": [len(profiler._unread), len(profiler._asked), profiler._group],
    }


def sums(rows, run):
    return sum(x.received for x in rows if x.run == run)


RUNS = {
    "auto": Run(),
    "ring": Run(strategy={"exchange": "ring"}),
    "switch": Run(strategy={"exchange": "switch"}),
    "documents": Run(kind="documents", strategy={"exchange": "gather"}),
    "dealt": Run(fsdp=True, double=True),
    "micro-batches": Run(steps=2, accumulate=2),
}


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks(pool, tmp_path, name):
    run, path = RUNS[name], tmp_path / "folder" / "table.md"
    results = pool.run(2, fit, run, {"warmup": 0, "path": str(path)})
    batches, (*rows, total) = run.steps * run.accumulate, results[0]["rows"]
    for x in results:
        assert (
            x["steps"] == batches and list(x["logged"]) == list(range(run.steps)) and x["unlike"] == x["warned"] == []
        )
        assert all(set(step) == NAMES for step in x["logged"].values()) and set(x["latest"]) == NAMES
        assert x["logged"] == results[0]["logged"] and x["rows"] == results[0]["rows"]
        assert x["after"] == [None, None] and x["left"] == [0, 0, None]
    # for each pass, the rows add up to at least the bytes that any rank received
    for i, way in enumerate(("forward", "backward")):
        most = max(x["traffic"][i] for x in results) / batches
        assert 0 < most <= sums(rows, way)
        if name in ("auto", "ring", "dealt", "micro-batches") and len([x for x in rows if x.run == way]) == 1:
            assert most == sums(rows, way)
    assert all(x.received == x.planned_received and x.sent == x.planned_sent for x in rows)
    assert all(0 <= x.hidden <= x.in_flight and x.exposed > 0 and x.planned > 0 for x in (*rows, total))
    assert total.in_flight <= sum(x.in_flight for x in rows) + 1e-9
    step = results[0]["latest"]
    received = step["comm/received_mb_forward"] + step["comm/received_mb_backward"]
    assert received == pytest.approx(step["comm/planned_mb"], rel=1e-12)
    assert 0 <= step["comm/hidden_fraction"] <= 1 and step["comm/in_flight_ms"] > 0 and step["comm/agreeing_ms"] > 0
    said, written = results[0]["said"], path.read_text()
    assert results[1]["said"] == "" and "received bytes equal the plan" in said
    assert f"| both | all | {total.collectives:g} | {total.received / 1e6:.3f} |" in written
    assert f"2 ranks of a sequence; {batches} batches measured" in written


def test_some_steps(pool):
    """The second and the fifth of six steps are recorded, and the validation between them is not."""
    run = Run(steps=6)
    options = {"val_check_interval": 1, "limit_val_batches": 1}
    every, some = (
        pool.run(2, fit, run, {"table": False, **settings}, options)[0]
        for settings in ({"warmup": 0}, {"warmup": 1, "every_n_steps": 3})
    )
    assert every["within"] == [True] * 6 and some["within"] == [False, True, False, False, True, False]
    assert every["between"] == some["between"] == [None] * 6
    assert list(every["logged"]) == [0, 1, 2, 3, 4, 5] and list(some["logged"]) == [1, 4] and some["steps"] == 2
    rows_of = lambda x: [(y.run, y.what, y.collectives, y.received) for y in x["rows"]]  # noqa: E731
    assert rows_of(every) == rows_of(some) and every["said"] == some["said"] == ""


def test_other_bytes_than_planned(pool):
    first, second = pool.run(2, fit, Run(steps=2), {}, None, True)
    (message,) = first["warned"]
    assert "Bytes DIFFER from the plan. rank 1, forward rows: sent" in message
    assert "DIFFER from the plan" in first["said"] and second["warned"] == []
    assert first["unlike"] == second["unlike"] and all(x.startswith("rank 1, ") for x in first["unlike"])


def test_heads(pool):
    """Two ranks trade tokens for heads, which is not part of the plan."""
    ended = pool.run(2, fit, Run(strategy={"head_size": 2}), {})[0]
    assert {x.what for x in ended["rows"]} == {"tokens for heads", "heads for tokens", "all"}
    assert ended["unlike"] == [] and ended["rows"][-1].received > 0 and "no exchange except of heads" in ended["said"]
    assert "the plan" not in ended["said"] and ended["latest"]["comm/planned_mb"] == 0


def test_nothing_crosses(pool):
    ended = pool.run(2, fit, Run(model={"pattern": DilatedPattern([(20, 1)])}), {})[0]
    assert "Nothing was exchanged: no segment crosses a shard. 3 batches measured" in ended["said"]
    assert ended["latest"]["comm/hidden_fraction"] == 1 and ended["latest"]["comm/in_flight_ms"] == 0


def test_an_exception(pool):
    for x in pool.run(2, fit, Run(), {}, None, False, 2):
        assert x["after"] == [None, None] and x["left"] == [0, 0, None] and x["rows"] == [] and x["said"] == ""
    assert pool.run(2, fit, Run(), {})[0]["steps"] == 3  # the next fit works normally


class Event:
    """A GPU event that completes on demand. Only the end of the fit may wait for it."""

    reached, waited = False, 0

    def __init__(self, ms):
        self.ms = ms

    def query(self):
        return self.reached

    def synchronize(self):
        self.waited += not self.reached

    def elapsed_time(self, other):
        return other.ms - self.ms


def test_events_are_read_once_they_are_reached():
    profiler, logger = CommunicationProfiler(warmup=0), Kept("comm/")
    trainer = SimpleNamespace(loggers=[logger], fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace()))
    profiler._group = SimpleNamespace(links=Links(), watch=lambda clock: None)
    profiler._quiet, events = None, []
    for step in range(3):
        trainer.fit_loop.epoch_loop._batches_that_stepped = step
        profiler.on_train_batch_start(trainer)
        begin, wait, end = marks = [Event(x) for x in (1.0, 4.0, 6.0 + step)]
        profiler._clock.flights.append(Flight("forward", "rows", 0, 10**6, begin, end))
        profiler._clock.waits.append(Wait("forward", "rows", wait, end))
        events += [marks]
        for x in events[step - 1] if step else ():  # events complete one step later
            x.reached = True
        profiler.on_train_batch_end(trainer)
        assert list(logger.steps) == list(range(step)) and len(profiler._unread) == 1
    assert not any(x.waited for marks in events for x in marks)
    profiler.on_train_end(trainer, None)
    assert all(x.waited for x in events[-1]) and list(logger.steps) == [0, 1, 2] and not profiler._unread
    rows = [(x["comm/in_flight_ms"], x["comm/exposed_ms"], x["comm/hidden_fraction"]) for x in logger.steps.values()]
    assert rows == [pytest.approx((5 + i, 2 + i, 3 / (5 + i))) for i in range(3)]
    assert all(x["comm/received_mb_forward"] == 1 for x in logger.steps.values())


# -- one rank ----------------------------------------------------------------------------------------------------------
def lm():
    return LongNetLM(NARROW, dim=16, depth=1, num_heads=4)


def one_rank(folder, profiler, **options):
    built = plain_trainer(callbacks=[profiler], default_root_dir=folder, **{"strategy": "ring_dilated", **options})
    built.fit(lm(), datamodule=text(folder))
    return built


@pytest.mark.parametrize(
    "steps, said",
    [
        (3, "Nothing was exchanged: one rank holds the sequence. 2 batches measured"),
        (1, "No training batch was measured"),
    ],
)
def test_one_rank(tmp_path, capsys, steps, said):
    profiler = CommunicationProfiler(path=tmp_path / "table.md")
    built = one_rank(tmp_path, profiler, devices=1, max_steps=steps)
    assert said in " ".join(capsys.readouterr().out.split()) and said in (tmp_path / "table.md").read_text()
    assert profiler.steps == steps - 1 and (set(profiler.latest) == NAMES) == (steps > 1)
    built.validate(lm(), datamodule=text(tmp_path), verbose=False)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"strategy": "auto"}, "SingleDeviceStrategy shares no sequence. Take Trainer.strategy='ring_dilated'"),
        ({"callbacks": [CommunicationProfiler(), CommunicationProfiler()]}, "one CommunicationProfiler per Trainer"),
    ],
)
def test_refused_before_training(tmp_path, options, message):
    callbacks = {"callbacks": [CommunicationProfiler()], "strategy": "ring_dilated", **options}
    built = plain_trainer(devices=1, max_steps=1, default_root_dir=tmp_path, **callbacks)
    with pytest.raises(ValueError, match=message):
        built.fit(lm(), datamodule=text(tmp_path))
    assert built.global_step == 0


@pytest.mark.parametrize(
    "settings, error, message",
    [
        ({"every_n_steps": 0}, ValueError, "every_n_steps must be at least 1, got 0"),
        ({"every_n_steps": 1.5}, TypeError, "every_n_steps must be an integer, got 1.5"),
        ({"warmup": -1}, ValueError, "warmup must be at least 0, got -1"),
        ({"table": 1}, TypeError, "table must be True or False, got 1"),
        ({"path": ""}, TypeError, "path must be a file to write, or None, got ''"),
        ({"path": 3}, TypeError, "path must be .*got 3"),
    ],
)
def test_arguments(settings, error, message):
    with pytest.raises(error, match=message):
        CommunicationProfiler(**settings)


# -- two GPUs ----------------------------------------------------------------------------------------------------------
def fit_on_gpu(rank, ranks):
    """Call `fit` on GPUs with NCCL."""
    model = {"pattern": DilatedPattern.geometric(512, 8192), "dim": 128, "num_heads": 4}
    run = Run(seq_len=8192, steps=6, precision="bf16-mixed", model=model)
    return fit(rank, None, run, {}, {"accelerator": "gpu"})


@pytest.mark.gpu
def test_two_gpus():
    results = on_gpus(2, fit_on_gpu)
    assert results["steps"] == 5 and results["unlike"] == [] and results["left"] == [0, 0, None]
    assert list(results["logged"]) == [1, 2, 3, 4, 5]
    numbers = torch.tensor([list(x.values()) for x in results["logged"].values()])
    assert numbers.isfinite().all() and (numbers >= 0).all()
    *rows, total = results["rows"]
    assert {(x.run, x.what) for x in rows} == {("forward", "rows"), ("backward", "gradients")}
    assert all(x.received == x.planned_received > 0 and x.sent == x.planned_sent for x in rows)
    assert all(x.in_flight > 0 and 0 <= x.hidden <= x.in_flight for x in (*rows, total))
    print(results["said"])
