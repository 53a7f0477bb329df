"""ShardedCheckpoint on one device: a resumed run equals an uninterrupted one, and training continues during writes."""

import json
import re
import threading
import time
from pathlib import Path
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed.checkpoint as dcp

from lightning_dilated import RingDilatedFSDPStrategy
from lightning_dilated.ext.checkpoints import sharded_checkpoint as module
from lightning_dilated.ext.checkpoints.sharded_checkpoint import ShardedCheckpoint

from ...models import text as text_of_letters
from ...models import tiny, trainer
from .checkpoint_runs import STEPS, check_equal, names, run

pytestmark = pytest.mark.full


# -- resuming ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("asynchronous", [True, False], ids=["beside", "waiting"])
def test_resumes_exactly(text, whole, tmp_path, asynchronous):
    options = {"folder": str(tmp_path), "every_n_train_steps": 2, "asynchronous": asynchronous}
    first = run(text, 3, ShardedCheckpoint(**options))
    assert names(tmp_path) == ["step-00000002", "step-00000003"]  # step 3 was saved at the end of the run
    resumed = run(text, STEPS, ShardedCheckpoint(**options, resume="must"), begun=2)
    check_equal(whole, first, resumed)


@pytest.mark.parametrize("path, lost", [("", 0), ("step-00000003", 1)], ids=["folder of several", "one"])
def test_ckpt_path(text, whole, saved, tmp_path, path, lost):
    resumed = run(text, STEPS, ShardedCheckpoint(str(tmp_path)), ckpt_path=str(saved / path), begun=2)
    assert resumed["losses"] == whole["losses"][4 - lost :] and torch.equal(resumed["parameters"], whole["parameters"])


def test_validates(tmp_path):
    """`validate` reads a checkpoint folder on one device without a fit. Lightning itself cannot read folders."""
    data, options = text_of_letters(tmp_path), {"vocab_size": 256, "dtype": torch.float32}
    first, second = tiny(**options), tiny(**options)
    fitted = trainer(callbacks=[ShardedCheckpoint(str(tmp_path / "c"))], enable_checkpointing=True, max_steps=2)
    fitted.fit(first, data)
    (want,) = fitted.validate(first, data, verbose=False)
    other = trainer(callbacks=[ShardedCheckpoint(str(tmp_path / "d"))], enable_checkpointing=True)
    (got,) = other.validate(second, data, ckpt_path=tmp_path / "c", verbose=False)
    assert got == want and not (tmp_path / "d").exists()


def test_ckpt_path_goes_before_resume(text, whole, copied):
    resuming = ShardedCheckpoint(str(copied), resume="auto")
    resumed = run(text, STEPS, resuming, ckpt_path=copied / "step-00000002", begun=2)
    assert resumed["losses"] == whole["losses"][2:]
    assert any("so resume='auto' had no effect" in words for words in resumed["said"])


def test_auto_begins_where_there_is_nothing(text, whole, tmp_path):
    got = run(text, STEPS, ShardedCheckpoint(str(tmp_path / "a" / "b"), resume="auto"))
    check_equal(whole, got)


def test_must(text, tmp_path):
    with pytest.raises(FileNotFoundError, match=f"there is no checkpoint in {tmp_path}"):
        run(text, STEPS, ShardedCheckpoint(str(tmp_path), resume="must"))


def test_another_run_is_not_replaced(text, saved, tmp_path):
    run(text, 1, ShardedCheckpoint(str(tmp_path)))
    for other in (None, tmp_path / "step-00000001"):  # refused even if the run resumes from another folder
        with pytest.raises(
            ValueError, match=r"holds checkpoints of another run .step-00000004, .*choose another folder"
        ):
            run(text, STEPS, ShardedCheckpoint(str(saved)), ckpt_path=other)
    assert len(names(saved)) == 3


def test_fit_twice(text, tmp_path):
    """A second fit continues to write in the same folder."""
    data, saver = {}, ShardedCheckpoint(str(tmp_path), every_n_train_steps=2)
    result = run(text, 3, saver, keep=data)
    data["trainer"].fit_loop.epoch_loop.max_steps = STEPS
    data["trainer"].fit(data["module"], data["data"])
    assert names(tmp_path) == ["step-00000003", "step-00000004", "step-00000006"]
    assert len(result["losses"]) == STEPS


class Counting(pl.Callback):
    """A callback that has a state."""

    def __init__(self):
        self.batches, self.loaded = 0, None

    def on_train_batch_end(self, *args):
        self.batches += 1

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.loaded = state["batches"]


def test_accumulation_and_states_of_callbacks(text, tmp_path):
    """A checkpoint is written only after an optimizer step. Accumulated gradients would be lost otherwise."""
    counting, whole = Counting(), run(text, 4, accumulate_grad_batches=3)
    often = {"folder": str(tmp_path), "every_n_minutes": 1e-9, "every_n_train_steps": None}
    first = run(text, 2, ShardedCheckpoint(**often, keep=9), counting, accumulate_grad_batches=3)
    assert names(tmp_path) == ["step-00000001", "step-00000002"] and counting.batches == 6
    again = Counting()
    resumed = run(text, 4, ShardedCheckpoint(**often, resume="must"), again, accumulate_grad_batches=3, begun=2)
    assert again.loaded == 6
    check_equal(whole, first, resumed)


def test_keeps_the_newest(saved, text, copied):
    assert names(saved) == ["step-00000002", "step-00000003", "step-00000004"]
    run(text, 5, ShardedCheckpoint(str(copied), every_n_train_steps=1, keep=2, resume="must"))
    assert names(copied) == ["step-00000004", "step-00000005"]


def test_an_earlier_one_goes_on(text, whole, copied):
    """After a run has resumed from an earlier checkpoint, the one written last counts as the newest."""
    options = {"folder": str(copied), "every_n_train_steps": 1, "keep": 2}
    run(text, 3, ShardedCheckpoint(**options), ckpt_path=copied / "step-00000002", begun=2)
    assert names(copied) == ["step-00000003", "step-00000004"]
    resumed = run(text, STEPS, ShardedCheckpoint(**options, resume="auto"), begun=3)
    assert resumed["losses"] == whole["losses"][3:]


# -- asynchronous writes -----------------------------------------------------------------------------------------------
class Watching(pl.Callback):
    """Delays the writer until training has made another step."""

    def __init__(self):
        self.go, self.steps_meanwhile, self.real = threading.Event(), [], module.write

    def write(self, *args):
        assert self.go.wait(30)
        self.real(*args)

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == 3:  # step 3 is complete
            self.steps_meanwhile = [trainer.global_step, *names(Path(trainer.checkpoint_callback._target))]
            self.go.set()


def test_training_goes_on_and_does_not_leak_into_the_files(text, whole, tmp_path):
    watching = Watching()
    with mock.patch.object(module, "write", watching.write):
        run(text, 5, ShardedCheckpoint(str(tmp_path), every_n_train_steps=2, at_end=False), watching)
    assert watching.steps_meanwhile == [3, ".in-use"]  # no checkpoint is written yet
    assert names(tmp_path) == ["step-00000002", "step-00000004"]
    resumed = run(text, STEPS, ShardedCheckpoint(str(tmp_path / "b")), ckpt_path=tmp_path / "step-00000002", begun=2)
    assert resumed["losses"] == whole["losses"][2:] and torch.equal(resumed["parameters"], whole["parameters"])


class Raising(pl.Callback):
    """Raises at the third step."""

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == 2:
            raise ZeroDivisionError("by itself")


def slowly(*args, real=module.write):
    time.sleep(0.3)
    real(*args)


def broken(*args):
    raise OSError(28, "No space left on device")


def test_a_run_that_fails_finishes_its_checkpoint(text, tmp_path):
    with mock.patch.object(module, "write", slowly), pytest.raises(ZeroDivisionError):
        run(text, STEPS, ShardedCheckpoint(str(tmp_path), every_n_train_steps=2), Raising())
    assert names(tmp_path) == ["step-00000002"]


@pytest.mark.parametrize("write, says", [
    (broken, "and so did its last checkpoint: OSError: .* No space left"), (slowly, "this checkpoint is incomplete"),
])  # fmt: skip
def test_a_run_that_fails_says_so_of_its_checkpoint(text, tmp_path, monkeypatch, write, says):
    """The run ends with its own error, and waits neither for a slow disk nor for ranks that do not answer."""
    monkeypatch.setattr(module, "write", write)
    monkeypatch.setattr(module, "_LAST", 0.1)
    saver, said = ShardedCheckpoint(str(tmp_path), every_n_train_steps=2), []
    monkeypatch.setattr(module, "rank_zero_warn", said.append)
    with pytest.raises(ZeroDivisionError):
        run(text, STEPS, saver, Raising())
    assert len(said) == 1 and re.match(f"the run failed.*{says}", said[0])
    assert saver._background.wait(30)  # otherwise the writer would still write during the next test


@pytest.mark.parametrize("at", ["write_data", "finish"])
@pytest.mark.parametrize("asynchronous", [True, False], ids=["beside", "waiting"])
def test_a_full_disk_ends_the_run(text, tmp_path, asynchronous, at):
    options = {"folder": str(tmp_path), "every_n_train_steps": 2, "asynchronous": asynchronous}
    full = mock.patch.object(dcp.FileSystemWriter, at, side_effect=OSError(28, "No space left on device"))
    with full, pytest.raises(OSError, match=r"step-00000002 could not be written: .*No space left on device"):
        run(text, STEPS, ShardedCheckpoint(**options))
    assert names(tmp_path) == []


@pytest.mark.gpu
def test_on_a_gpu(text, tmp_path):
    """Copies to pinned host memory are complete before training continues."""
    whole, watching = run(text, STEPS, accelerator="gpu"), Watching()
    with mock.patch.object(module, "write", watching.write):
        saver = ShardedCheckpoint(str(tmp_path / "c"), every_n_train_steps=2, at_end=False)
        run(text, 4, saver, watching, accelerator="gpu")
    other = ShardedCheckpoint(str(tmp_path / "d"))
    resumed = run(text, STEPS, other, ckpt_path=tmp_path / "c" / "step-00000002", begun=2, accelerator="gpu")
    assert resumed["losses"] == pytest.approx(whole["losses"][2:], rel=1e-9)
    torch.testing.assert_close(resumed["parameters"], whole["parameters"], rtol=1e-9, atol=1e-12)


# -- before training ---------------------------------------------------------------------------------------------------
def test_a_folder_that_cannot_be(text, tmp_path):
    (tmp_path / "a").write_text("")
    with pytest.raises(OSError, match=f"cannot use the folder {tmp_path}/a/b: NotADirectoryError"):
        run(text, STEPS, ShardedCheckpoint(str(tmp_path / "a" / "b")))


def test_a_disk_that_is_too_small(text, tmp_path):
    little = mock.patch.object(module.shutil, "disk_usage", return_value=mock.Mock(free=1000))
    with little, pytest.raises(OSError, match=f"{tmp_path} has 0.00 GiB left, and the parameters alone take"):
        run(text, STEPS, ShardedCheckpoint(str(tmp_path)))


@pytest.mark.parametrize("options, says", [
    ({"keep": 0}, "keep must be at least 1, got 0"),
    ({"keep": None}, "keep must be an integer, got None"),
    ({"every_n_train_steps": 2.5}, "every_n_train_steps must be an integer, got 2.5 of type float. Or None."),
    ({"every_n_train_steps": True}, "every_n_train_steps must be an integer, got the bool True"),
    ({"every_n_minutes": -1}, r"every_n_minutes must be a number in \(0, inf\), got -1"),
    ({"resume": True}, "resume must be one of never, auto, must; got True"),
    ({"every_n_train_steps": None, "at_end": False}, "nothing would be saved"),
])  # fmt: skip
def test_options(options, says):
    with pytest.raises((TypeError, ValueError), match=says):
        ShardedCheckpoint(**options)


def test_lightning_takes_it_for_a_checkpoint_callback(text, tmp_path):
    trainer = pl.Trainer(callbacks=[ShardedCheckpoint()], accelerator="cpu", logger=False)
    assert [type(c) for c in trainer.checkpoint_callbacks] == [ShardedCheckpoint]
    run(text, 1, ShardedCheckpoint(), default_root_dir=tmp_path)
    assert names(tmp_path / "checkpoints") == ["step-00000001"]


def test_the_manifest_says_what_is_there(saved):
    manifest = json.loads((saved / "step-00000004" / "manifest.json").read_text())
    assert sorted([*manifest["files"], "manifest.json"]) == names(saved / "step-00000004")
    assert (manifest["step"], manifest["ranks"]) == (4, 1)


def test_strategies_that_it_does_not_know(tmp_path):
    trainer = mock.Mock(strategy=type("DeepSpeedStrategy", (), {})())
    with pytest.raises(ValueError, match=r"does not know how DeepSpeedStrategy stores its state. Take 'ring_dilated'"):
        ShardedCheckpoint(str(tmp_path)).setup(trainer, None, "fit")


def test_a_strategy_that_assembles_files(tmp_path):
    trainer = mock.Mock(strategy=RingDilatedFSDPStrategy(save_distributed_checkpoint=False))
    with pytest.raises(ValueError, match=r"assembles every checkpoint on rank 0, .* leave that option out"):
        ShardedCheckpoint(str(tmp_path)).setup(trainer, None, "fit")


def test_fast_dev_run_writes_nothing(text, tmp_path):
    run(text, 1, ShardedCheckpoint(str(tmp_path / "a")), fast_dev_run=True)
    assert names(tmp_path) == []
