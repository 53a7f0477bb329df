"""Foreign or broken contents in a checkpoint folder: links, files, non-finite values, and a full disk."""

import json
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed.checkpoint as dcp

from lightning_dilated.checkpoint import folder as saved_folder
from lightning_dilated.checkpoint.manifest import clean
from lightning_dilated.checkpoint.state import are_finite, nbytes
from lightning_dilated.ext.checkpoints.sharded_checkpoint import ShardedCheckpoint

from ...strategy.runs import launched
from .checkpoint_runs import STEPS, names, run

pytestmark = pytest.mark.full


# -- links and files ---------------------------------------------------------------------------------------------------
def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("oldest", [2, 3])
def test_a_checkpoint_that_was_moved_away_and_linked(text, copied, tmp_path, oldest):
    """When the linked checkpoint is the oldest, the link is deleted. Its target remains, even when later runs start."""
    archive = tmp_path / "archive"
    archive.mkdir()
    name = f"step-0000000{oldest}"
    (copied / name).rename(archive / name)
    (copied / name).symlink_to(archive / name)
    before = contents(archive)
    for step in (5, 6, 7):
        run(text, step, ShardedCheckpoint(str(copied), keep=2, resume="must"))
    assert names(copied) == ["step-00000006", "step-00000007"] and contents(archive) == before


@pytest.mark.parametrize("kind", ["link", "link to nowhere", "file"])
@pytest.mark.parametrize("why", ["partial", "removed", "replaced"])
def test_what_bears_the_name_of_something_unfinished(text, copied, tmp_path, why, kind):
    (target := tmp_path / "target").mkdir()
    (target / "kept").write_text("kept")
    for step in (4, 5):
        path = copied / f".step-0000000{step}.{why}"
        if kind == "file":
            path.write_text("")
        else:
            path.symlink_to(target if kind == "link" else tmp_path / "nowhere")
    for step in (5, 6):
        run(text, step, ShardedCheckpoint(str(copied), keep=2, resume="must"))
    assert names(copied) == ["step-00000005", "step-00000006"] and contents(target) == {
        (target / "kept").relative_to(target): b"kept"
    }


def test_a_link_where_a_checkpoint_is_to_be_written(text, tmp_path):
    """A link appears during the run at a checkpoint's path. Nothing is written through it."""
    (target := tmp_path / "target").mkdir()

    class Links(pl.Callback):
        def on_train_batch_start(self, trainer, *args):
            if trainer.global_step == 0:
                for name in ("step-00000001", ".step-00000002.partial"):
                    (tmp_path / "ck" / name).symlink_to(target)

    run(text, 2, ShardedCheckpoint(str(tmp_path / "ck"), every_n_train_steps=1), Links())
    assert names(tmp_path / "ck") == ["step-00000001", "step-00000002"] and names(target) == []
    assert not any(path.is_symlink() for path in (tmp_path / "ck").iterdir())


def test_a_file_with_a_checkpoints_name(text, tmp_path):
    """A file with a checkpoint's name is renamed, not deleted."""
    (tmp_path / "step-00000002").write_text("mine")
    for step in (3, 4):
        run(text, step, ShardedCheckpoint(str(tmp_path), every_n_train_steps=1, keep=9, resume="auto"))
    assert names(tmp_path) == [
        *(f"step-0000000{n}" for n in (1, 2)),
        "step-00000002.file",
        "step-00000003",
        "step-00000004",
    ]
    assert (tmp_path / "step-00000002.file").read_text() == "mine" and (tmp_path / "step-00000002").is_dir()


def test_nothing_comes_back_in_place_of_a_link(copied, tmp_path):
    """A checkpoint is not restored to a name that a link occupies, even a dangling one."""
    (copied / "step-00000009").symlink_to(tmp_path / "nowhere")
    (copied / ".step-00000009.replaced").mkdir()
    assert clean(copied) == [] and not (copied / ".step-00000009.replaced").exists()


# -- values that are not finite ----------------------------------------------------------------------------------------
class Spoils(pl.Callback):
    """Makes a parameter NaN or infinite after a step, in the part of one rank or of all ranks."""

    def __init__(self, step, value=float("nan")):
        self.step, self.value = step, value

    def on_train_batch_start(self, trainer, module, *args):
        if trainer.global_step == self.step:
            local = next(p for p in module.parameters() if p.ndim == 2).detach()
            (local.to_local() if hasattr(local, "to_local") else local).view(-1)[:1] = self.value


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_good_ones_stay(text, whole, tmp_path, value):
    """Only the newest checkpoint with NaN is kept, and a run resumes from the last finite one."""
    saver = {"folder": str(tmp_path), "every_n_train_steps": 1, "keep": 2}
    run(text, 5, ShardedCheckpoint(**saver), Spoils(3, value))
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000005"]
    assert not json.loads((tmp_path / "step-00000005" / "manifest.json").read_text())["finite"]
    resumed = run(text, STEPS, ShardedCheckpoint(**saver, resume="auto"), begun=2)
    assert resumed["losses"] == whole["losses"][3:] and torch.equal(resumed["parameters"], whole["parameters"])
    (words,) = [w for w in resumed["said"] if "were skipped" in w]
    assert f"{tmp_path}/step-00000003 is loaded: {tmp_path}/step-00000005 holds parameters that are not finite" in words
    assert "damaged" not in words
    assert names(tmp_path) == ["step-00000005", "step-00000006"]  # both checkpoints are finite


def test_without_the_option(text, tmp_path):
    run(text, 5, ShardedCheckpoint(str(tmp_path), every_n_train_steps=1, keep=2, keep_finite=False), Spoils(2))
    assert names(tmp_path) == ["step-00000004", "step-00000005"]


def test_nothing_finite_is_left(text, tmp_path):
    """The run raises if no finite checkpoint is left. A checkpoint that is given by its path is loaded anyway."""
    run(text, 2, ShardedCheckpoint(str(tmp_path), every_n_train_steps=1), Spoils(0))
    words = (
        "none of the 1 checkpoints in .* is whole and finite: .*step-00000002 holds parameters.*A ckpt_path that names"
    )
    with pytest.raises(ValueError, match=words):
        run(text, 3, ShardedCheckpoint(str(tmp_path), resume="auto"))
    resumed = run(text, 3, ShardedCheckpoint(str(tmp_path)), ckpt_path=tmp_path / "step-00000002")
    assert resumed["step"] == 3


def spoiled(rank, group, text, folder, strategy):
    """Put NaN into the part of rank 1 only, with sharded parameters."""
    spoils = [Spoils(2)] if rank == 1 or strategy == "ring_dilated" else []
    saver = ShardedCheckpoint(folder, every_n_train_steps=1, keep=1)
    run(text, 3, saver, *spoils, strategy=strategy, world=launched(rank))


@pytest.mark.parametrize("strategy", ["ring_dilated", "ring_dilated_fsdp"])
def test_all_ranks_decide_alike(pool, text, tmp_path, strategy):
    pool.run(2, spoiled, text, str(tmp_path), strategy)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def test_what_is_finite():
    nan, good, whole = torch.tensor([[1.0, float("nan")]]), torch.ones(3), torch.ones(2, dtype=torch.int64)
    state = {
        "a": good,
        "b": nan,
        "c": whole,
        "d": torch.tensor([float("inf")]),
        "e": torch.tensor([complex(0, float("nan"))]),
    }
    assert are_finite(state, ["a", "c", "missing"]) and are_finite(state, [])
    assert [are_finite(state, ["a", name]) for name in "bde"] == [False] * 3
    assert nbytes({"x": [good, {"y": nan}], "z": 3}) == 12 + 8


# -- a full disk -------------------------------------------------------------------------------------------------------
TORCHS = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")


@pytest.mark.parametrize("error, free, says", [
    (OSError(28, "No space left on device"), 2**40, True), (TORCHS, 2**10, True), (TORCHS, 2**40, False),
])  # fmt: skip
def test_a_full_disk(text, tmp_path, error, free, says):
    """The previous checkpoint stays complete, whatever error torch raises about the full disk."""
    run(text, 1, ShardedCheckpoint(str(tmp_path)))
    failing = mock.patch.object(dcp.FileSystemWriter, "write_data", side_effect=error)
    little = mock.patch.object(saved_folder.shutil, "disk_usage", return_value=mock.Mock(free=free))
    with pytest.raises(OSError) as raised, failing, little if free < 2**20 else mock.MagicMock():
        saver = ShardedCheckpoint(str(tmp_path), every_n_train_steps=2, resume="auto")
        with mock.patch.object(ShardedCheckpoint, "_check_room"):
            run(text, STEPS, saver)
    assert str(error) in str(raised.value)
    words = f"No space left on device: {tmp_path} has "
    assert (words in str(raised.value)) == says
    if says:
        assert "MiB left, and a checkpoint takes 0.2 MiB. Earlier checkpoints are complete." in str(raised.value)
    assert names(tmp_path) == ["step-00000001"]
    assert run(text, 2, ShardedCheckpoint(str(tmp_path), resume="must"))["step"] == 2


def full(rank, group, text, folder, who, strategy):
    """Return the error of a run in which rank `who` has a full disk."""

    def write_data(*args, real=dcp.FileSystemWriter.write_data, **kwargs):
        if rank == who:
            raise TORCHS
        return real(*args, **kwargs)

    usage = mock.Mock(free=2**10 if rank == who else 2**40)
    with (
        mock.patch.object(dcp.FileSystemWriter, "write_data", write_data),
        mock.patch.object(saved_folder.shutil, "disk_usage", return_value=usage),
        mock.patch.object(ShardedCheckpoint, "_check_room"),
    ):
        try:
            run(text, 2, ShardedCheckpoint(folder), strategy=strategy, world=launched(rank))
        except OSError as error:
            return str(error)


@pytest.mark.parametrize("strategy, who", [("ring_dilated", 1), ("ring_dilated_fsdp", 0)])
def test_all_ranks_say_that_the_disk_of_one_is_full(pool, text, tmp_path, strategy, who):
    for message in pool.run(2, full, text, str(tmp_path), who, strategy):
        assert f"No space left on device: {tmp_path} has 0.0 MiB left, and a checkpoint takes 0." in message
        assert f"rank {who}: " in message and "inline_container" in message
