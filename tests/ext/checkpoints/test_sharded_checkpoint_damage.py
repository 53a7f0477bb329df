"""Damaged or incomplete ShardedCheckpoints: the previous one is used, and a warning describes the damage."""

import os
import signal

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lightning_dilated.checkpoint import folder as saved_folder
from lightning_dilated.checkpoint import manifest as saved_files
from lightning_dilated.checkpoint.manifest import SavedFolder
from lightning_dilated.checkpoint.ranks import RankGroup
from lightning_dilated.ext.checkpoints import sharded_checkpoint as module
from lightning_dilated.ext.checkpoints.sharded_checkpoint import ShardedCheckpoint

from ...distributed import forked
from .checkpoint_runs import STEPS, names, run

pytestmark = pytest.mark.full


def shard(path):
    return path / "__0_0.distcp"


def truncate(path):
    shard(path).write_bytes(shard(path).read_bytes()[:-100])


def flip(path):
    data = bytearray(shard(path).read_bytes())
    data[len(data) // 2] ^= 1
    shard(path).write_bytes(data)


def edit_manifest(path):
    content = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(content.replace('"step": 4', '"step": 5'))


DAMAGE = {
    "truncated": (truncate, r"__0_0.distcp has [\d,]+ bytes in place of"),
    "a flipped bit": (flip, r"__0_0.distcp has other bytes than were written"),
    "no shard": (lambda path: shard(path).unlink(), r"__0_0.distcp is missing"),
    "no meta.pt": (lambda path: (path / "meta.pt").unlink(), r"meta.pt is missing"),
    "no .metadata": (lambda path: (path / ".metadata").unlink(), r"\.metadata is missing"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), r"manifest.json is missing"),
    "another manifest": (edit_manifest, r"manifest.json cannot be read .*its own checksum differs"),
    "a list": (lambda path: (path / "manifest.json").write_text("[]"), r"manifest.json cannot be read"),
    "half a manifest": (lambda path: os.truncate(path / "manifest.json", 40), r"manifest.json cannot be read"),
    "nothing in it": (lambda path: [p.unlink() for p in path.iterdir()], r"manifest.json is missing"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_one_is_passed_over(text, whole, copied, how):
    hurt, says = DAMAGE[how]
    hurt(copied / "step-00000004")
    resumed = run(text, STEPS, ShardedCheckpoint(str(copied), resume="auto"), begun=2)
    (words,) = [w for w in resumed["said"] if "damaged checkpoints" in w]
    assert f"{copied}/step-00000003 is loaded: {copied}/step-00000004/" in words
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(words)
    assert resumed["losses"] == whole["losses"][3:] and torch.equal(resumed["parameters"], whole["parameters"])


def test_a_damaged_one_that_was_named(text, copied):
    flip(copied / "step-00000004")
    words = f"step-00000004 is damaged: .*__0_0.distcp has other bytes.*newest undamaged one is {copied}/step-00000003"
    with pytest.raises(ValueError, match=words):
        run(text, STEPS, ShardedCheckpoint(str(copied)), ckpt_path=copied / "step-00000004")


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_every_byte_is_looked_at_by_one_rank(copied, ranks):
    path = copied / "step-00000004"
    for name in (".metadata", "__0_0.distcp", "meta.pt"):
        whole = (path / name).read_bytes()
        for place in (0, len(whole) // 3, len(whole) - 1):
            (path / name).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            messages = [
                words for rank in range(ranks) if (words := SavedFolder.read(path)._damage(RankGroup(rank, ranks)))
            ]
            assert messages == [f"{path / name} has other bytes than were written (its checksum differs)"]
        (path / name).write_bytes(whole)
    assert SavedFolder.read(path).damage(RankGroup()) is None


@pytest.mark.parametrize("resume", ["auto", "must"])
def test_nothing_good_is_left(text, copied, resume):
    flip(copied / "step-00000002")
    truncate(copied / "step-00000003")
    shard(copied / "step-00000004").unlink()
    words = (
        f"none of the 3 checkpoints in {copied} is whole: .*4/__0_0.distcp is missing; .*3/__0_.* in place of .*; .*2/"
    )
    with pytest.raises(ValueError, match=words):
        run(text, STEPS, ShardedCheckpoint(str(copied), resume=resume))


def test_no_checkpoint_at_all(text, tmp_path):
    with pytest.raises(FileNotFoundError, match="is no checkpoint, and contains no"):
        run(text, STEPS, ShardedCheckpoint(str(tmp_path / "b")), ckpt_path=tmp_path)


def killed(text, folder, where):
    """Run a process that dies at its third checkpoint."""
    spot = {
        "bytes": (dcp.FileSystemWriter, "write_data"),
        "metadata": (dcp.FileSystemWriter, "finish"),
        "manifest": (saved_folder, "commit"),
        "rename": (saved_files, "_sync"),
        "old": (saved_folder, "prune"),
    }[where]
    real, calls = getattr(*spot), []

    def dies(*args, **kwargs):
        calls.append(1)
        if len(calls) == (6 if where == "rename" else 3):  # third checkpoint; a checkpoint calls _sync twice
            if where in ("bytes", "metadata"):  # leave half of the file
                real(*args, **kwargs)
                os.truncate(os.path.join(folder, ".step-00000003.partial", "__0_0.distcp"), 1000)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(*spot, dies)
    run(text, 6, ShardedCheckpoint(folder, every_n_train_steps=1, keep=2))


slow = {"marks": pytest.mark.slow}


@pytest.mark.parametrize("where, last", [
    ("bytes", 2), ("rename", 3), pytest.param("metadata", 2, **slow), pytest.param("manifest", 2, **slow),
    pytest.param("old", 3, **slow),
])  # fmt: skip
def test_killed_while_saving(text, whole, tmp_path, where, last):
    """If a run is killed while it saves, complete checkpoints survive. The next run first removes incomplete ones."""
    process = forked.context().Process(target=killed, args=(text, str(tmp_path), where))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert (".step-00000003.partial" in names(tmp_path)) == (last == 2)
    resumed = run(text, STEPS, ShardedCheckpoint(str(tmp_path), resume="must"), begun=2)
    assert resumed["losses"] == whole["losses"][last:] and not [w for w in resumed["said"] if "damaged" in w]
    said = [w for w in resumed["said"] if f"{tmp_path}/step-00000003 was still being written when its job ended" in w]
    assert len(said) == (last == 2)
    assert names(tmp_path) == [f"step-0000000{n}" for n in (last - 1, last, 6)]


def test_killed_while_replacing(copied):
    """A replaced checkpoint is first moved away. It is restored if the new checkpoint of the same step is missing."""
    (copied / "step-00000004").rename(copied / ".step-00000004.replaced")
    (copied / ".step-00000003.replaced").mkdir()
    (copied / ".step-00000002.removed").mkdir()
    (copied / ".step-00000005.partial").mkdir()
    assert module.clean(copied) == ["step-00000005"]
    assert names(copied) == ["step-00000002", "step-00000003", "step-00000004"]
