"""ShardedCheckpoint on several ranks: exact with any strategy and number of ranks. All ranks agree, and none hangs."""

import contextlib
import json
import os
import threading
import time
from pathlib import Path
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from lightning_dilated.checkpoint.folder import read_tensors
from lightning_dilated.checkpoint.ranks import RankGroup
from lightning_dilated.checkpoint.state import assign_writers

from ...distributed.pool import Pool
from ...strategy.runs import launched
from .checkpoint_runs import on_rank, run, with_options

pytestmark = pytest.mark.full

STEPS = 4


@pytest.fixture(scope="module")
def whole(text):
    """An uninterrupted run on one device."""
    return run(text, STEPS)


@pytest.fixture(scope="module")
def four():
    """A pool of four ranks for one test."""
    workers = Pool(4)
    yield workers
    workers.close()


def go(request, ranks, text, steps, saved, **options):
    """Return rank 0's results of a run. A single rank runs without a process group."""
    if ranks == 1:
        from lightning_dilated.ext.checkpoints.sharded_checkpoint import ShardedCheckpoint

        return run(text, steps, ShardedCheckpoint(**saved), **{**options, "strategy": "auto"})
    pool = request.getfixturevalue("four" if ranks == 4 else "pool")
    results = pool.run(ranks, with_options, text, steps, saved, options)
    assert all(torch.equal(x["parameters"], results[0]["parameters"]) for x in results)
    return results[0]


DDP, FSDP = "ring_dilated", "ring_dilated_fsdp"
WAYS = [
    ((2, DDP), (2, DDP)),
    ((2, FSDP), (2, FSDP)),
    ((2, DDP), (1, DDP)),
    ((2, FSDP), (1, DDP)),
    ((1, DDP), (2, FSDP)),
    pytest.param((1, DDP), (2, DDP), marks=pytest.mark.slow),
    pytest.param((2, FSDP), (2, DDP), marks=pytest.mark.slow),
    pytest.param((4, DDP), (2, FSDP), marks=pytest.mark.slow),
    pytest.param((4, FSDP), (2, FSDP), marks=pytest.mark.slow),
    pytest.param((2, DDP), (4, DDP), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("before, after", WAYS, ids=str)
def test_resumes_exactly(request, text, whole, tmp_path, before, after):
    saved = {"folder": str(tmp_path), "every_n_train_steps": 1, "keep": 2}
    first = go(request, before[0], text, 2, saved, strategy=before[1])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
    files = json.loads((tmp_path / "step-00000002" / "manifest.json").read_text())["files"]
    assert sum(name.endswith(".distcp") for name in files) == before[0]
    resumed = go(request, after[0], text, STEPS, {**saved, "resume": "must"}, strategy=after[1], begun=2)
    losses = torch.tensor([*first["losses"], *resumed["losses"]])
    torch.testing.assert_close(losses, torch.tensor(whole["losses"]), rtol=1e-9, atol=0)
    torch.testing.assert_close(resumed["parameters"], whole["parameters"], rtol=1e-9, atol=1e-12)
    assert (resumed["step"], resumed["rate"]) == (whole["step"], whole["rate"])


@pytest.mark.parametrize("strategy", [DDP, FSDP])
def test_equals_the_undisturbed_run(request, pool, text, tmp_path, strategy):
    """With the same number of ranks, a resumed run equals the undisturbed run bit by bit."""
    whole = pool.run(2, with_options, text, STEPS, None, {"strategy": strategy})[0]
    saved = {"folder": str(tmp_path), "every_n_train_steps": 2, "at_end": False}
    go(request, 2, text, 3, saved, strategy=strategy)
    for how in ({"ckpt_path": str(tmp_path)}, {"ckpt_path": str(tmp_path / "step-00000002")}):
        resumed = go(request, 2, text, STEPS, {"folder": str(tmp_path / "b")}, strategy=strategy, begun=2, **how)
        assert resumed["losses"] == whole["losses"][2:] and torch.equal(resumed["parameters"], whole["parameters"])
        os.system(f"rm -r {tmp_path}/b")


def beside(rank, group, text, folder, strategy):
    """List the folder after step 3, before the checkpoint of step 2 is written."""
    from lightning_dilated.ext.checkpoints import sharded_checkpoint as module

    go_on, real, entries = threading.Event(), module.write, []

    class Watching(pl.Callback):
        def on_train_batch_start(self, trainer, *args):
            if trainer.global_step == 3:
                entries.extend(path.name for path in Path(folder).iterdir())
                trainer.strategy.barrier()  # otherwise a rank could list the folder while another already writes
                go_on.set()

    def write(*args):
        assert go_on.wait(30)
        real(*args)

    with mock.patch.object(module, "write", write):
        saver = module.ShardedCheckpoint(folder, every_n_train_steps=2, at_end=False)
        run(text, 3 + 1, saver, Watching(), strategy=strategy, world=launched(rank))
    return entries


@pytest.mark.parametrize("strategy", [DDP, FSDP])
def test_training_goes_on_and_does_not_leak_into_the_files(request, pool, text, whole, tmp_path, strategy):
    assert pool.run(2, beside, text, str(tmp_path), strategy) == [[".in-use"]] * 2
    how = {"strategy": strategy, "ckpt_path": str(tmp_path / "step-00000002"), "begun": 2}
    resumed = go(request, 2, text, STEPS, {"folder": str(tmp_path / "b")}, **how)
    torch.testing.assert_close(torch.tensor(resumed["losses"]), torch.tensor(whole["losses"][2:]), rtol=1e-9, atol=0)
    torch.testing.assert_close(resumed["parameters"], whole["parameters"], rtol=1e-9, atol=1e-12)


# -- damage ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("strategy", [DDP, FSDP])
def test_all_ranks_pass_over_a_damaged_one(request, text, whole, tmp_path, strategy):
    """If the file that rank 1 checks is damaged, all ranks skip the checkpoint."""
    saved = {"folder": str(tmp_path), "every_n_train_steps": 1}
    go(request, 2, text, 3, saved, strategy=strategy)
    hurt = tmp_path / "step-00000003" / "__1_0.distcp"
    data = bytearray(hurt.read_bytes())
    data[-200] ^= 4
    hurt.write_bytes(data)
    resumed = go(request, 2, text, STEPS, {**saved, "resume": "auto"}, strategy=strategy, begun=2)
    (words,) = [w for w in resumed["said"] if "damaged checkpoints" in w]
    assert f"{tmp_path}/step-00000002 is loaded: {hurt} has other bytes than were written" in words
    torch.testing.assert_close(resumed["parameters"], whole["parameters"], rtol=1e-9, atol=1e-12)


def refused(rank, group, text, saved, options):
    """Return the error that a run raises on this rank."""
    try:
        on_rank(rank, group, text, STEPS, saved, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("strategy", [DDP, FSDP])
def test_all_ranks_refuse_a_damaged_one_that_was_named(request, pool, text, tmp_path, strategy):
    go(request, 2, text, 2, {"folder": str(tmp_path)}, strategy=strategy)
    (tmp_path / "step-00000002" / "__1_0.distcp").unlink()
    options = {"strategy": strategy, "ckpt_path": str(tmp_path / "step-00000002")}
    for message in pool.run(2, refused, text, {"folder": str(tmp_path / "b")}, options):
        assert message.startswith("ValueError") and "__1_0.distcp is missing" in message


# -- failures of one rank ----------------------------------------------------------------------------------------------
def failing(rank, group, text, saved, who, where, strategy):
    """Return the error of a run in which the disk of one rank is full, or rank 0 cannot finish the checkpoint."""
    target = {
        "bytes": (dcp.FileSystemWriter, "write_data"),
        "copy": ("HostStager", "stage"),
        "commit": (None, "commit"),
    }[where]
    from lightning_dilated.checkpoint import manifest
    from lightning_dilated.ext.checkpoints import sharded_checkpoint as module

    owner = {"copy": module.HostStager, "commit": manifest}.get(where, target[0])
    real = getattr(owner, target[1])

    def full(*args, **kwargs):
        if rank == who:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    with mock.patch.object(owner, target[1], full):
        return refused(rank, group, text, saved, {"strategy": strategy})


@pytest.mark.parametrize("strategy", [DDP, FSDP])
@pytest.mark.parametrize("where, who", [("bytes", 1), ("copy", 1), ("commit", 0)])
def test_a_full_disk_of_one_rank_ends_all(pool, text, tmp_path, where, who, strategy):
    saved = {"folder": str(tmp_path), "every_n_train_steps": 1}
    for message in pool.run(2, failing, text, saved, who, where, strategy):
        assert message.startswith("OSError") and f"{tmp_path}/step-00000001 could not be" in message
        assert f"rank {who}: OSError: [Errno 28] No space left on device" in message
    assert list(tmp_path.iterdir()) == []


def blind(rank, group, text, saved, folder, strategy):
    """Return the error of a run that resumes from a checkpoint on the local disk of one node."""
    options = {"strategy": strategy, "ckpt_path": str(folder if rank == 0 else folder.with_name("other"))}
    return refused(rank, group, text, saved, options)


def alone(rank, group, text, folder, where, strategy, asynchronous):
    """Let rank 1 raise while the others wait for it. Return the error, and the remaining checkpoints."""
    from lightning_dilated.checkpoint import folder as written
    from lightning_dilated.ext.checkpoints import sharded_checkpoint as module

    owner, name = {
        "before save": (written, "_write_files"),
        "writer": (dcp, "FileSystemWriter"),
        "save": (dcp, "save"),
        "part": (module, "replicated_sizes"),
        "bits": (module, "bits_by_name"),
    }[where]
    error = mock.patch.object(owner, name, side_effect=LookupError("no such thing"))
    saver = module.ShardedCheckpoint(folder, every_n_train_steps=2, at_end=False, asynchronous=asynchronous)
    with error if rank == 1 else contextlib.nullcontext():
        try:
            run(text, STEPS, saver, strategy=strategy, world=launched(rank))
        except OSError as raised:
            return str(raised), [x.name for x in Path(folder).glob("step-*")]


@pytest.mark.parametrize(
    "where, strategy, asynchronous",
    [
        ("before save", DDP, True),
        ("writer", FSDP, False),
        ("save", DDP, False),
        ("save", FSDP, True),
        ("part", DDP, True),
        ("bits", DDP, True),
    ],
)
def test_an_error_of_one_rank_ends_all_with_its_cause(pool, text, tmp_path, where, strategy, asynchronous):
    """Ranks that wait for others in a checkpoint's collectives raise immediately, not after the timeout of an hour."""
    begin = time.monotonic()
    for words, files in pool.run(2, alone, text, str(tmp_path), where, strategy, asynchronous):
        assert "rank 1: LookupError: no such thing" in words and "step-00000002" in words and not files
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize("strategy", [DDP, FSDP])
def test_a_checkpoint_that_not_all_see(request, pool, text, tmp_path, strategy):
    """A rank that does not see the checkpoint must not leave the other rank waiting."""
    go(request, 2, text, 2, {"folder": str(tmp_path)}, strategy=strategy)
    saved, folder = {"folder": str(tmp_path / "b")}, tmp_path / "step-00000002"
    for message in pool.run(2, blind, text, saved, folder, strategy):
        assert message.startswith("ValueError") and f"{tmp_path / 'other' / 'manifest.json'} is missing" in message


def unseen(rank, group, text, saved):
    """Return the error of a run with a folder that only one node sees."""
    from lightning_dilated.ext.checkpoints import sharded_checkpoint as module

    real = module._look

    def look(probe):
        return real(probe.with_name("other") if rank == 1 else probe)

    with mock.patch.object(module, "_look", look):
        return refused(rank, group, text, saved, {"strategy": DDP})


def test_a_folder_that_not_all_see(pool, text, tmp_path):
    for message in pool.run(2, unseen, text, {"folder": str(tmp_path)}):
        assert "rank 1: FileNotFoundError: rank 0 writes it, and this rank does not see it" in message


# -- writers -----------------------------------------------------------------------------------------------------------
def test_writers_have_even_loads():
    sizes = {f".optimizer_0.{i}": n for i, n in enumerate([50, 1, 30, 30, 20, 0, 7])}
    for ranks in (1, 2, 3, 5, 9):
        writers = assign_writers(sizes, ranks, nn.Module())
        assert sorted(name for part in writers for name in part) == sorted(sizes)
        assert max(sum(sizes[n] for n in part) for part in writers) <= max(50, sum(sizes.values()) / ranks + 30)


def test_buffers_are_rank_0s():
    sizes = {".state_dict.weight": 4, ".state_dict.running": 900, ".optimizer_0.weight": 5}
    assert assign_writers(sizes, 2, nn.Linear(1, 1)) == [
        {".state_dict.running"},
        {".state_dict.weight", ".optimizer_0.weight"},
    ]


def with_buffer(rank, group, text, folder, strategy):
    """Run a model with buffers that differ between the ranks at the end. Return the saved buffers."""
    from lightning_dilated import LongNetLM
    from lightning_dilated.ext.checkpoints.sharded_checkpoint import ShardedCheckpoint

    class Counting(LongNetLM):
        def build(self):
            super().build()
            for i in range(4):
                self.register_buffer(f"seen{i}", torch.zeros(5 + i))

        def on_train_batch_end(self, *args):
            for i in range(4):
                getattr(self, f"seen{i}").fill_(rank + 1)

    saver = ShardedCheckpoint(folder, every_n_train_steps=None)
    run(text, 2, saver, strategy=strategy, world=launched(rank), model=Counting)
    held = read_tensors(Path(folder) / "step-00000002", "state_dict.")["state_dict"]
    return [held[f"seen{i}"].tolist() for i in range(4)]


@pytest.mark.parametrize("strategy", [DDP, FSDP])
def test_buffers_that_differ(pool, text, tmp_path, strategy):
    for buffers in pool.run(2, with_buffer, text, str(tmp_path), strategy):
        assert buffers == [[1.0] * (5 + i) for i in range(4)]


def test_a_rank_alone_needs_no_group():
    assert RankGroup().gather(3) == [3] and RankGroup().together("x", lambda y: y + 1, 2) == 3
    with pytest.raises(OSError, match="it failed: ZeroDivisionError: division by zero"):
        RankGroup().together("it failed", lambda: 1 / 0)
