"""Runs leave nothing behind: the numbers of open files, threads, process groups and signal handlers do not grow."""

import gc
import os
import signal
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_dilated import OuterSteps
from lightning_dilated._compat.torch import process_groups
from lightning_dilated.callbacks import CommunicationProfiler, MemoryProfiler, ShardedCheckpoint

from .runs import Run, launched, make

pytestmark = pytest.mark.full


def held():
    """Count the resources of this process by kind, and list its signal handlers."""
    gc.collect()
    handlers = [signal.getsignal(x) for x in sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})]
    return {
        "open files": len(os.listdir("/proc/self/fd")),
        "threads": sorted(x.name for x in threading.enumerate()),
        "native threads": len(os.listdir("/proc/self/task")),
        "groups": len(process_groups()),
        "handlers": handlers,
    }


class Wrong(Exception):
    """The error that the tests raise in a training step."""


def one_fit(run, world, callbacks=(), fails=False):
    """Fit, then validate, test or predict as the run allows. Return (Trainer, model, data)."""
    trainer, model, data, _ = make(
        run, world, limit_val_batches=2, limit_test_batches=2, callbacks=[x() for x in callbacks]
    )
    if fails:
        model.on_train_batch_end = lambda *args: (_ for _ in ()).throw(Wrong("in a hook"))
        with pytest.raises(Wrong):
            trainer.fit(model, data)
    else:
        trainer.fit(model, data)
    return trainer, model, data


def fits(rank, group, run, count, callbacks=(), fails=False):
    """Return (whether equal, resources after a first fit, resources after `count` more). All Trainers still exist."""
    world, alive = launched(rank), []
    one_fit(run, world)
    before = held()
    for _ in range(count):
        alive.append(one_fit(run, world, callbacks, fails))
    return before == held(), before, held()


def check(answers):
    for equal, before, after in answers:
        assert equal, {name: (x, after[name]) for name, x in before.items() if x != after[name]}


SMALL = Run(steps=1)
KINDS = {
    "one rank": (1, SMALL),
    "one rank, fsdp": (1, SMALL.but(fsdp=True, double=True)),
    "two ranks": (2, SMALL),
    "two ranks, each a sequence": (2, SMALL.but(batch_size=2, strategy={"sequence_size": 1})),
    "two ranks, fsdp": (2, SMALL.but(fsdp=True, double=True)),
    "two regions": (2, SMALL.but(batch_size=2, strategy={"regions": 2, "outer": OuterSteps(every=1)})),
}


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_few_fits(pools, kind, fails):
    ranks, run = KINDS[kind]
    check(pools(ranks).run(ranks, fits, run, 3, (), fails))


def test_callbacks_that_talk_to_other_ranks(pools, tmp_path):
    callbacks = [CommunicationProfiler, partial(MemoryProfiler, timeline=False)]
    check(pools(2).run(2, fits, SMALL, 2, callbacks))


def saving_fits(rank, group, folder):
    """Like `fits`, with callbacks that save checkpoints."""
    world = launched(rank)
    one_fit(SMALL, world)
    before, alive = held(), []
    for number in range(2):
        saving = ShardedCheckpoint(str(Path(folder) / str(number)))
        trainer, model, data, _ = make(SMALL, world, callbacks=[saving], enable_checkpointing=True)
        trainer.fit(model, data)
        trainer.fit_loop.epoch_loop.max_steps = 2
        trainer.fit(model, data)  # continues in the same folder
        alive.append((trainer, len(list((Path(folder) / str(number)).glob("step*")))))
    return before == held(), before, held(), [count for _, count in alive]


def test_callbacks_that_save(pools, tmp_path):
    answers = pools(2).run(2, saving_fits, str(tmp_path))
    check([x[:3] for x in answers])
    assert answers[0][3] == [2, 2]


@pytest.mark.slow
def test_fifty_fits(pools):
    check(pools(1).run(1, fits, SMALL, 50))
    check(pools(2).run(2, fits, SMALL, 50))


def after_a_fit(rank, group, run, folder):
    """Run everything that can follow a fit. Return (whether resources stay equal, before, after, *results of the runs)."""
    world = launched(rank)
    trainer, model, data = one_fit(run, world)
    data.test_dataloader = data.predict_dataloader = data.val_dataloader
    before = held()
    trainer.save_checkpoint(Path(folder) / "after.ckpt")
    saved = sorted(torch.load(Path(folder) / "after.ckpt", weights_only=True)) if not run.fsdp else []
    validated = trainer.validate(model, data, verbose=False)[0]["val_loss"]
    tested = trainer.test(model, data, verbose=False)[0]["test_loss"]
    predicted = trainer.predict(model, data)
    alone = model(torch.randint(0, 11, (1, 40))).shape if not run.fsdp else None
    trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = 99, 2
    trainer.fit(model, data)
    return before == held(), before, held(), validated, tested, len(predicted), saved, alone, trainer.global_step


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_runs_again(pools, kind, tmp_path):
    ranks, run = KINDS[kind]
    run = run.but(steps=1)
    answers = pools(ranks).run(ranks, after_a_fit, run, str(tmp_path))
    check([x[:3] for x in answers])
    for *_, validated, tested, batches, saved, alone, steps in answers:
        assert tested == pytest.approx(validated)
        assert (batches > 0, steps) == (True, 2)
        assert alone in (None, (1, 40, 11))
        assert ("regions" in saved) is (kind == "two regions")


def one_rank_fails(rank, group):
    """Fit with a rank that raises while the other rank waits for it."""
    trainer, model, data, _ = make(SMALL.but(steps=2, strategy={"timeout": 5}), launched(rank))
    if rank == 1:
        model.on_train_batch_end = lambda *args: (_ for _ in ()).throw(Wrong("in a hook"))
    trainer.fit(model, data)


def test_a_rank_that_fails_alone(pools):
    """A failed rank's groups stay open until the process ends, because closing them would wait for the other rank."""
    assert [answer.error for answer in pools(2).answers(2, one_rank_fails)] == ["RuntimeError", "Wrong"]
