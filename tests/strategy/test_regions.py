"""Regions of a job: errors before training, equal initial weights, waiting, metrics and samples."""

import functools
import os
import signal
import time
from datetime import timedelta

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

import lightning_dilated as ld
from lightning_dilated import LongNetLM, OuterSteps, RingDilatedStrategy
from lightning_dilated.callbacks import ShardedCheckpoint
from lightning_dilated.ext.regions.optimizer import OuterOptimizer, split
from lightning_dilated.strategy.mesh import MeshSizes
from lightning_dilated.strategy.preemption import report_lost_ranks

from .runs import PATTERN, VOCAB, Data, Run, launched, make, trainer


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"every": 0}, ValueError, "every must be at least 1"),
        ({"every": 2.5}, TypeError, "every must be an integer"),
        ({"lr": 0}, ValueError, r"lr must be a number in \(0"),
        ({"momentum": 1.0}, ValueError, r"momentum must be a number in \[0, 1\)"),
        ({"mix": 1.0}, ValueError, r"mix must be a number in \[0, 1\)"),
        ({"mix": -0.1}, ValueError, "mix must be"),
        ({"fragments": 0}, ValueError, "fragments must be at least 1"),
        ({"every": 3, "fragments": 4}, ValueError, "fragments=4 must be at most every=3"),
        ({"every": 3, "delay": 3}, ValueError, "delay=3 must be below every=3"),
        ({"delay": -1}, ValueError, "delay must be at least 0"),
        ({"warmup": -1}, ValueError, "warmup must be at least 0"),
        ({"offload": "cpu"}, TypeError, "offload must be True or False"),
    ],
)
def test_settings_of_outer_steps(options, error, words):
    with pytest.raises(error, match=words):
        OuterSteps(**options)


def test_a_state_that_lacks_a_setting_of_later_versions():
    """A state from before a setting existed gets the setting's default, so fragments in flight are kept."""
    named = {"0.weight": torch.nn.Parameter(torch.ones(3))}
    outer = OuterOptimizer(named.items(), OuterSteps(every=3, delay=2))
    for _ in range(3):
        outer.step()
    state = outer.state()
    del state["settings"]["warmup"]
    assert "sent" in state["tensors"]
    assert OuterOptimizer(named.items(), OuterSteps(every=3, delay=2)).load(state) is None
    assert "dropped" in OuterOptimizer(named.items(), OuterSteps(every=3, delay=2, warmup=9)).load(state)


def test_half_precision_with_a_scaler():
    strategy = RingDilatedStrategy(regions=2, outer=OuterSteps())
    strategy.precision_plugin = pl.plugins.MixedPrecision("16-mixed", "cuda", torch.amp.GradScaler(enabled=False))
    with pytest.raises(ValueError, match="regions=2 take no precision='16-mixed'"):
        trainer(strategy, 2)


@pytest.mark.parametrize(
    "callback, words",
    [
        (pl.callbacks.WeightAveraging(device="cpu"), "averages the parameters of one region"),
        (pl.callbacks.Timer("00:01:00:00"), "wait for rank 0 to tell the time"),
        (pl.callbacks.ModelCheckpoint(train_time_interval=timedelta(minutes=5)), "ShardedCheckpoint"),
    ],
)
def test_callbacks_that_do_not_go_with_regions(callback, words):
    from lightning_dilated.strategy.refusals import refuse_callbacks

    built = trainer("ring_dilated", 1, callbacks=[callback], enable_checkpointing=True)
    refuse_callbacks(built, "RingDilatedStrategy", MeshSizes(4), False)
    with pytest.raises(ValueError, match=words):
        refuse_callbacks(built, "RingDilatedStrategy", MeshSizes(4, regions=2), False)


def test_sizes():
    sizes = MeshSizes(8, 2, 2, regions=2)
    assert (sizes.shape, sizes.data, sizes.region_size) == ((2, 1, 2), 4, 4)
    assert MeshSizes(8, regions=4).sequence_size == 2
    built = trainer(RingDilatedStrategy(regions="auto", outer=OuterSteps()), 2, num_nodes=3)
    assert built.strategy.sizes.regions == 3


def test_fragments():
    names = ["embedding.weight", "blocks.0.a", "blocks.0.b.c", "blocks.1.a", "blocks.2.a", "norm.weight", "norm.bias"]
    named = {name: torch.nn.Parameter(torch.zeros(1)) for name in names}
    assert [[*part] for part in split(named, 2)] == [
        ["embedding.weight", "blocks.1.a", "norm.weight", "norm.bias"],
        ["blocks.0.a", "blocks.0.b.c", "blocks.2.a"],
    ]
    with pytest.raises(ValueError, match="fragments=6, but the model has only 5 trained blocks"):
        split(named, 6)


def fit(outer, kind=LongNetLM, callbacks=(), steps=2):
    """Fit on one rank."""
    model = kind(ld.DilatedPattern.longnet([8], [1]), dim=8, depth=1, num_heads=1)
    built = trainer(RingDilatedStrategy(outer=outer), 1, limit_val_batches=0, max_steps=steps, callbacks=[*callbacks])
    built.fit(model, ld.data.ByteDataModule(seq_len=16, batch_size=1))
    return built


def test_modules_that_step_by_themselves():
    class Manual(LongNetLM):
        automatic_optimization = False

    with pytest.raises(
        ValueError, match="outer steps count the steps of one optimizer, and Manual has 1, automatic_opt"
    ):
        fit(OuterSteps(), Manual)


def test_parameters_that_are_trained_later():
    class Frozen(LongNetLM):
        def configure_model(self):
            super().configure_model()
            self.embedding.weight.requires_grad = self.global_step > 0

        def on_train_batch_end(self, *args):
            self.embedding.weight.requires_grad = True

    with pytest.raises(RuntimeError, match=r"\['embedding.weight'\] are trained since this step"):
        fit(OuterSteps(), Frozen)


def test_lost_regions_are_named():
    reasons = dist.HashStore()
    reasons.set("1", "")
    reasons.set("2", "ValueError: no")
    words = report_lost_ranks(reasons, 0, 6, 2, patience=0.2)
    assert "Region 1 (ranks 2 to 3) has lost all ranks." in words
    assert "Region 2 (ranks 4 to 5) has lost all ranks." in words and "Region 0" not in words
    assert "Region 1 (ranks 3 to 5) has lost all" in report_lost_ranks(dist.HashStore(), 0, 6, 3, 0.1)
    assert "Region" not in report_lost_ranks(reasons, 0, 6, patience=0.1)


# -- on ranks ----------------------------------------------------------------------------------------------------------
class Ahead(pl.Callback):
    """Makes the second region wait after its first step until the first region has done four steps."""

    def __init__(self, rank, folder):
        self.rank, self.done, self.seen = rank, folder / "four steps", False

    def on_train_batch_start(self, trainer, *unused):
        end = time.monotonic() + 20
        while self.rank >= 2 and trainer.global_step == 1 and not self.seen and time.monotonic() < end:
            self.seen = self.done.exists()
            time.sleep(0.01)

    def on_train_batch_end(self, trainer, *unused):
        if self.rank == 0 and trainer.global_step == 4:
            self.done.touch()


def ahead(rank, group, run, folder):
    callback = Ahead(rank, folder)
    built, model, data, _ = make(run, launched(rank), limit_val_batches=0, callbacks=[callback])
    built.fit(model, data)
    return callback.seen


@pytest.mark.full
def test_regions_do_not_wait_for_each_other_between_outer_steps(pools, tmp_path):
    run = Run(steps=5, batch_size=2, strategy={"regions": 2, "outer": OuterSteps(every=5)})
    assert pools(4).run(4, ahead, run, tmp_path) == [False, False, True, True]


class Sent(pl.Callback):
    """Records messages between regions after the first step, as (function of torch.distributed, numbers sent)."""

    names = (
        "all_reduce",
        "all_gather",
        "all_gather_object",
        "broadcast",
        "gather_object",
        "reduce",
        "all_to_all_single",
    )

    def __init__(self, rank):
        self.rank, self.calls, self.usual = rank, [], {}

    def on_train_batch_end(self, trainer, *unused):
        if trainer.global_step == 1:
            self.usual = {name: getattr(dist, name) for name in self.names}
            for name, function in self.usual.items():
                setattr(dist, name, functools.partial(self.note, name, function))

    def note(self, name, function, *args, **kwargs):
        if len({rank // 2 for rank in dist.get_process_group_ranks(kwargs.get("group") or dist.group.WORLD)}) > 1:
            self.calls.append((name, args[0].numel() if isinstance(args[0], torch.Tensor) else None))
        return function(*args, **kwargs)

    def on_train_end(self, *unused):
        for name, function in self.usual.items():
            setattr(dist, name, function)


def between(rank, group, run):
    callback = Sent(rank)
    built, model, data, _ = make(run, launched(rank), limit_val_batches=0, callbacks=[callback])
    built.fit(model, data)
    parts = [sum(p.numel() for p in part.named.values()) for part in built.strategy._regions.outer.fragments]
    return callback.calls, parts, sum(p.numel() for p in model.parameters())


@pytest.mark.full
def test_only_fragments_go_between_regions(pools):
    """Regions send the second half of the blocks at steps 2, 6, 10 and the first half at 4 and 8, each with a flag."""
    outer = OuterSteps(every=4, fragments=2, delay=1)
    run = Run(steps=10, batch_size=2, clip=1.0, strategy={"regions": 2, "outer": outer})
    for calls, (first, second), parameters in pools(4).run(4, between, run):
        assert first + second == parameters
        assert calls == [("all_reduce", n + 1) for n in (second, first, second, first, second)]


def begun(rank, group):
    """Return (parameters of this rank's model, parameters with which its region begins)."""

    class Begin(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            self.parameters = torch.cat([p.detach().flatten() for p in pl_module.parameters()])

    world, begin = launched(rank), Begin()
    model = LongNetLM(PATTERN, vocab_size=VOCAB, dim=16, depth=1)
    torch.manual_seed(rank)
    model.configure_model()
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    strategy = RingDilatedStrategy(regions=2, outer=OuterSteps(every=4))
    built = trainer(strategy, world, max_steps=1, limit_val_batches=0, callbacks=[begin])
    built.fit(model, Data(Run(batch_size=2)))
    return before, begin.parameters


@pytest.mark.full
def test_all_regions_begin_with_the_first_ones_parameters(pools):
    results = pools(4).run(4, begun)
    assert not torch.equal(results[0][0], results[2][0])
    assert all(torch.equal(begin, results[0][0]) for _, begin in results)


def validated(rank, group, run):
    """Return (validation loss within a fit, loss of a later `validate`, parameters)."""
    built, model, data, _ = make(run, launched(rank), val_check_interval=3, check_val_every_n_epoch=None)
    built.fit(model, data)
    within = float(built.callback_metrics["val_loss"])
    built.validate(model, data, verbose=False)
    return within, float(built.callback_metrics["val_loss"]), {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.full
def test_metrics_are_those_of_the_mean_over_all_samples(pools):
    run = Run(steps=3, batch_size=2, masked=0.4, strategy={"regions": 2, "outer": OuterSteps(every=20)})
    results = pools(4).run(4, validated, run)
    model = make(run.but(strategy={}), 1)[1].double()
    model.load_state_dict(results[0][2], strict=False)
    total = count = 0.0
    for index in range(12):
        one = validation_batch(run, index)
        with torch.no_grad():
            losses, tokens = model.loss_terms(model._shifted(one))
        total, count = total + float(losses), count + int(tokens)
    for within, after, _ in results:
        assert within == pytest.approx(total / count, rel=1e-6) and after == pytest.approx(total / count, rel=1e-6)


def validation_batch(run, index):
    from .runs import Tokens, collate

    return collate(run, [Tokens(run)[index]])


def batch_bytes(rank, group, settings, text):
    """Return (bytes of each batch on this rank, number of batches per step)."""

    class See(pl.Callback):
        def __init__(self):
            self.batches = []

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.batches.append(batch["tokens"].flatten().tolist())

    see = See()
    model = LongNetLM(PATTERN, dim=16, depth=1)
    data = ld.data.ByteDataModule(text, seq_len=8, batch_size=1, val_fraction=0, test_fraction=0)
    built = trainer(RingDilatedStrategy(**settings), launched(rank), max_epochs=1, callbacks=[see])
    built.fit(model, data)
    return see.batches, built.global_step


@pytest.mark.full
def test_global_batch_counts_all_regions_and_no_sample_comes_twice(pools, tmp_path):
    """40 different sequences in steps of 8: each of two regions has two data ranks and takes four per step."""
    (tmp_path / "a").write_bytes(bytes(x for i in range(41) for x in [i] * 8))
    settings = {"regions": 2, "outer": OuterSteps(every=2), "sequence_size": 1, "global_batch": 8}
    results = pools(4).run(4, batch_bytes, settings, str(tmp_path))
    assert [steps for _, steps in results] == [5] * 4
    samples = [tuple(batch) for batches, _ in results for batch in batches]
    assert len(samples) == 40 == len({*samples})


class Signalled(pl.Callback):
    """Sends SIGTERM to the last rank in its sixth batch."""

    def on_train_batch_start(self, trainer, *unused):
        if trainer.global_rank == 3 and trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGTERM)


def ended(rank, group, run, folder):
    """Return (error of a fit, its number of steps)."""
    saver = ShardedCheckpoint(folder, every_n_train_steps=None)
    callbacks = [Signalled(), saver]
    built, model, data, _ = make(
        run, launched(rank), limit_val_batches=0, callbacks=callbacks, enable_checkpointing=True
    )
    code = None
    try:
        built.fit(model, data)
    except SIGTERMException as error:
        code = error.code
    return code, built.global_step


@pytest.mark.full
@pytest.mark.parametrize(
    "outer, last", [(OuterSteps(every=4), 8), (OuterSteps(every=4, delay=2), 10), (OuterSteps(every=6, fragments=2), 9)]
)
def test_a_signal_ends_all_regions_after_an_outer_step(pools, tmp_path, outer, last):
    run = Run(steps=20, batch_size=2, strategy={"regions": 2, "outer": outer})
    assert pools(4).run(4, ended, run, str(tmp_path)) == [(128 + signal.SIGTERM, last)] * 4
    assert [path.name for path in tmp_path.glob("step-*")] == [f"step-{last:08}"]


def saved_by_time(rank, group, run, folder):
    saver = ShardedCheckpoint(folder, None, every_n_minutes=1e-6, at_end=False, keep=10, asynchronous=False)
    built, model, data, _ = make(run, launched(rank), limit_val_batches=0, callbacks=[saver], enable_checkpointing=True)
    built.fit(model, data)


@pytest.mark.full
def test_checkpoints_by_time_are_due_at_outer_steps(pools, tmp_path):
    run = Run(steps=7, batch_size=2, strategy={"regions": 2, "outer": OuterSteps(every=3)})
    pools(4).run(4, saved_by_time, run, str(tmp_path))
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000003", "step-00000006"]
