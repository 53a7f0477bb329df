"""If a run of a real Trainer is stopped and resumed, it gets the samples of an uninterrupted run."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_dilated.data import ByteDataModule, TokenDataModule

from .runs import BATCHES, SAMPLES, SEQ_LEN, Recorder, data, every_step, run


def test_uninterrupted_epochs_are_different_permutations(file: str) -> None:
    model, _ = run(data(file), max_epochs=3)
    assert [batch_idx for batch_idx, _ in model.seen] == list(range(BATCHES)) * 3
    epochs = [model.samples()[start : start + 10] for start in (0, 10, 20)]
    assert all(len(set(epoch)) == 10 and set(epoch) <= set(range(SAMPLES)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    other, _ = run(data(file, seed=4), max_epochs=1)
    assert other.samples() != epochs[0]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [7, 5])
def test_stopped_by_max_steps(file: str, tmp_path: Path, workers: int, stop: int) -> None:
    whole, _ = run(data(file), max_steps=13)
    first, trainer = run(data(file, num_workers=workers), max_steps=stop)
    trainer.save_checkpoint(tmp_path / "stopped.ckpt")
    second, _ = run(data(file, num_workers=workers), tmp_path / "stopped.ckpt", max_steps=13)
    assert first.seen + second.seen == whole.seen
    assert second.validated_after == [step for step in whole.validated_after if step > stop]


@pytest.mark.parametrize("ask_for_steps", [False, True])
@pytest.mark.parametrize("limits", [{"max_steps": 15}, {"max_epochs": 3}])
@pytest.mark.parametrize("step", [3, 5, 7, 10])
def test_model_checkpoint_at_a_step(file: str, tmp_path: Path, step: int, limits: dict, ask_for_steps: bool) -> None:
    whole, _ = run(data(file), callbacks=[every_step(tmp_path)], max_epochs=3)
    resumed, _ = run(data(file), tmp_path / f"step={step}.ckpt", ask_for_steps=ask_for_steps, **limits)
    assert resumed.seen == whole.seen[step:]
    assert len(resumed.seen) == 15 - step


@pytest.mark.parametrize("validate", [False, True])
@pytest.mark.parametrize("limits", [{"max_steps": 15}, {"max_epochs": 3}])
def test_model_checkpoint_at_the_end_of_an_epoch(file: str, tmp_path: Path, validate: bool, limits: dict) -> None:
    share = {} if validate else {"val_fraction": 0.0, "val_limit": None}
    if not validate:
        Path(file).write_bytes(Path(file).read_bytes()[: SAMPLES * SEQ_LEN + 1])
    checkpoint = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    whole, _ = run(data(file, **share), callbacks=[checkpoint], max_epochs=3)
    resumed, _ = run(data(file, num_workers=2, **share), tmp_path / "epoch=0.ckpt", **limits)
    assert resumed.seen == whole.seen[BATCHES:]


def test_resumed_again_and_again(file: str, tmp_path: Path) -> None:
    whole, _ = run(data(file), max_steps=24)
    read_indices, ckpt = [], None
    for stop in (3, 7, 8, 10, 18, 20, 24):
        model, trainer = run(data(file), ckpt, max_steps=stop)
        ckpt = tmp_path / f"{stop}.ckpt"
        trainer.save_checkpoint(ckpt)
        read_indices += model.seen
    assert read_indices == whole.seen


def test_epoch_end_checkpoint_after_the_trainers_epoch_count_drifted(file: str, tmp_path: Path) -> None:
    whole, _ = run(data(file), max_epochs=4)
    _, trainer = run(data(file), max_steps=7)
    trainer.save_checkpoint(tmp_path / "stopped.ckpt")
    checkpoint = ModelCheckpoint(tmp_path, filename="end-{step}", save_top_k=-1)
    run(data(file), tmp_path / "stopped.ckpt", callbacks=[checkpoint], max_steps=15)
    resumed, trainer = run(data(file), tmp_path / "end-step=10.ckpt", max_epochs=4)
    assert trainer.current_epoch == 4
    assert resumed.seen == whole.seen[10 : 10 + len(resumed.seen)]
    assert len(resumed.seen) >= BATCHES


def test_a_stop_by_steps_resumed_by_epochs_keeps_the_data_position(file: str, tmp_path: Path) -> None:
    whole, _ = run(data(file), max_epochs=3)
    _, trainer = run(data(file), max_steps=7)
    trainer.save_checkpoint(tmp_path / "stopped.ckpt")
    resumed, _ = run(data(file), tmp_path / "stopped.ckpt", max_epochs=4)
    assert resumed.samples() == whole.samples()[14:30]


@pytest.mark.parametrize("crash_at", [0, 5, 7, 9])
def test_a_batch_that_crashed_is_served_again(file: str, tmp_path: Path, crash_at: int) -> None:
    whole, _ = run(data(file), max_epochs=3)
    with pytest.raises(KeyError, match="crash"):
        run(data(file), callbacks=[OnExceptionCheckpoint(tmp_path)], crash_at=crash_at, max_epochs=3)
    resumed, _ = run(data(file), tmp_path / "on_exception.ckpt", max_epochs=3)
    assert resumed.seen == whole.seen[crash_at:]
    assert resumed.validated_after == [step for step in whole.validated_after if step > crash_at]


@pytest.mark.parametrize("step", [2, 3, 4])
def test_limited_epochs(file: str, tmp_path: Path, step: int) -> None:
    whole, _ = run(data(file), callbacks=[every_step(tmp_path)], max_epochs=3, limit_train_batches=3)
    assert [batch_idx for batch_idx, _ in whole.seen] == [0, 1, 2] * 3
    resumed, _ = run(data(file), tmp_path / f"step={step}.ckpt", max_epochs=3, limit_train_batches=3)
    assert resumed.seen == whole.seen[step:]


@pytest.mark.parametrize(
    ("step", "batch_size", "rest"),
    [(2, 1, 7), (5, 1, 0), (2, 3, 2), (1, 4, 2)],
    ids=["smaller", "smaller-at-epoch-end", "larger", "larger-early"],
)
@pytest.mark.parametrize("ask_for_steps", [False, True])
def test_another_batch_size(
    file: str, tmp_path: Path, step: int, batch_size: int, rest: int, ask_for_steps: bool
) -> None:
    whole, _ = run(data(file), callbacks=[every_step(tmp_path)], max_epochs=2)
    module = data(file, batch_size=batch_size)
    resumed, _ = run(module, tmp_path / f"step={step}.ckpt", ask_for_steps=ask_for_steps, max_epochs=2)
    # an epoch has 11 // batch_size batches; batch numbers start so that the epoch ends with the usual last number
    per_epoch = SAMPLES // batch_size
    first = len(resumed.seen) - per_epoch
    assert first == rest
    assert [number for number, _ in resumed.seen] == [*range(per_epoch - first, per_epoch), *range(per_epoch)]
    used = step * 2
    known = whole.samples()[used:10]  # the uninterrupted run omitted the last sample
    assert resumed.samples()[: first * batch_size][: len(known)] == known[: first * batch_size]
    assert resumed.samples()[first * batch_size :][:9] == whole.samples()[10:19][: per_epoch * batch_size]
    assert len(resumed.validated_after) == (2 if first else 1)


def test_a_rest_smaller_than_the_new_batch_is_left_out(file: str, tmp_path: Path) -> None:
    whole, _ = run(data(file), callbacks=[every_step(tmp_path)], max_epochs=2)
    resumed, _ = run(data(file, batch_size=4), tmp_path / "step=4.ckpt", max_steps=6)
    assert resumed.seen == [(0, tuple(whole.samples()[10:14])), (1, tuple(whole.samples()[14:18]))]


@pytest.mark.parametrize(
    ("change", "named"),
    [({"seed": 4}, "seed"), ({"seq_len": 2}, "seq_len|num_samples"), ({"val_fraction": 0.4}, "num_samples")],
    ids=["seed", "seq_len", "size"],
)
@pytest.mark.parametrize("limits", [{"max_steps": 9}, {"max_epochs": 2}])
def test_a_checkpoint_of_other_data_is_refused(
    file: str, tmp_path: Path, change: dict, named: str, limits: dict
) -> None:
    _, trainer = run(data(file), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    settings = {"seq_len": SEQ_LEN, "batch_size": 2, "val_fraction": 0.125, "test_fraction": 0, "seed": 3}
    with pytest.raises(ValueError, match=f"written with ({named}) = .*start a new run"):
        run(ByteDataModule(file, **{**settings, **change}), tmp_path / "a.ckpt", **limits)


OTHERS = {
    "another file of that size": lambda path, other: data(str(other)),
    "documents end otherwise": lambda path, other: tokens(path, eos_token=9),
    "another type of token": lambda path, other: tokens(path, dtype="int32"),
}


def tokens(path: Path, **options: object) -> TokenDataModule:
    """Return 11 sequences of 4 tokens in documents. The values are valid as uint32 and as int32."""
    settings = {"vocab_size": 20, "dtype": "uint32", "eos_token": 7, "val_fraction": 0, "test_fraction": 0, "seed": 3}
    return TokenDataModule(str(path), SEQ_LEN, **{**settings, **options})


@pytest.mark.parametrize("name", OTHERS)
def test_other_data_of_the_same_size_is_refused_by_both_fingerprints(file: str, tmp_path: Path, name: str) -> None:
    """A run stops in mid-epoch. With other data of the same size, the rest of the epoch would have wrong samples."""
    numbers, other = tmp_path / "tokens.bin", tmp_path / "other.bin"
    numbers.write_bytes(np.arange(SAMPLES * SEQ_LEN + 1, dtype=np.uint32).__mod__(17).tobytes())
    other.write_bytes(Path(file).read_bytes()[::-1])
    make = (lambda: data(file)) if "file" in name else (lambda: tokens(numbers))
    _, trainer = run(make(), max_steps=3)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    keys = [x.dataset("train").fingerprint() for x in (make(), OTHERS[name](numbers, other))]
    assert keys[0] != keys[1]
    says = re.escape(f"written with fingerprint = {keys[0]} of the training data, but it is {keys[1]} now")
    with pytest.raises(ValueError, match=says):
        run(OTHERS[name](numbers, other), tmp_path / "a.ckpt", max_steps=9)
    resumed, _ = run(make(), tmp_path / "a.ckpt", max_steps=4)
    assert len(resumed.seen) == 1


def test_data_that_was_moved_is_the_same(file: str, tmp_path: Path) -> None:
    whole, trainer = run(data(file), max_steps=3)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    (tmp_path / "elsewhere").mkdir()
    moved = Path(file).rename(tmp_path / "elsewhere" / Path(file).name)
    resumed, _ = run(data(str(moved)), tmp_path / "a.ckpt", max_steps=5)
    assert not set(resumed.samples()) & set(whole.samples())


def test_a_checkpoint_that_has_no_fingerprint_yet(file: str, tmp_path: Path) -> None:
    _, trainer = run(data(file), max_steps=3)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    stored = torch.load(tmp_path / "a.ckpt", weights_only=True)
    states = [stored["ByteDataModule"]["train"], *stored["loops"]["fit_loop"]["state_dict"]["combined_loader"]]
    assert all(state.pop("fingerprint") for state in states)
    torch.save(stored, tmp_path / "old.ckpt")
    with pytest.warns(UserWarning, match="has no fingerprint"):
        resumed, _ = run(data(file), tmp_path / "old.ckpt", max_steps=4)
    assert len(resumed.seen) == 1


def test_a_checkpoint_may_be_tested_on_other_data(file: str, tmp_path: Path) -> None:
    _, trainer = run(data(file), max_steps=3)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    module = ByteDataModule(file, seq_len=2, val_fraction=0.4, test_fraction=0)
    model = Recorder()
    trainer.validate(model, module, ckpt_path=str(tmp_path / "a.ckpt"), weights_only=True, verbose=False)
    assert len(model.validated_after) == 1


@pytest.mark.parametrize("limits", [{"max_steps": 10}, {"max_epochs": 3}])
def test_one_module_in_several_fits(file: str, tmp_path: Path, limits: dict) -> None:
    whole, _ = run(data(file), max_steps=10)
    module = data(file)
    first, trainer = run(module, max_steps=7)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    resumed, _ = run(module, tmp_path / "a.ckpt", **limits)
    assert first.samples() + resumed.samples() == whole.samples()
    again, _ = run(module, max_steps=7)
    assert again.seen == first.seen


def test_evaluation_of_a_checkpoint_leaves_the_training_position(file: str, tmp_path: Path) -> None:
    module = data(file)
    _, trainer = run(module, max_steps=3)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(Recorder(), module, ckpt_path=str(tmp_path / "a.ckpt"), weights_only=True)
    position = module.state_dict()
    trainer.validate(Recorder(), module, ckpt_path=str(tmp_path / "a.ckpt"), weights_only=True, verbose=False)
    assert module.state_dict() == position
    assert position["train"]["samples"] == 8
    assert module.train_dataloader().state_dict()["samples"] == 0


class LateRestore(SingleDeviceStrategy):
    """Restores all states after the optimizers are created, as the sharding strategies do."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True


@pytest.mark.parametrize("step", [3, 5])
@pytest.mark.parametrize("ask_for_steps", [False, True])
def test_late_restore(file: str, tmp_path: Path, step: int, ask_for_steps: bool) -> None:
    whole, _ = run(data(file), callbacks=[every_step(tmp_path)], max_epochs=2)
    ckpt = tmp_path / f"step={step}.ckpt"
    resumed, _ = run(data(file), ckpt, ask_for_steps=ask_for_steps, max_epochs=2, strategy=LateRestore("cpu"))
    assert resumed.seen == whole.seen[step:]
