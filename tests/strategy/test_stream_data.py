"""Streams on data-parallel ranks: losses equal one rank's, and a checkpoint resumes on any number of ranks."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from lightning_dilated import LongNetLM, RingDilatedFSDPStrategy, RingDilatedStrategy
from lightning_dilated.callbacks import ShardedCheckpoint
from lightning_dilated.data import StreamDataModule

from .runs import PATTERN, Record, launched, trainer

pytestmark = pytest.mark.full

STEPS, EPOCH = 9, 6
ALONE = {"sequence_size": 1}


def written(folder):
    rng = torch.Generator().manual_seed(0)
    text = Path(folder) / "text"
    text.write_bytes(bytes(torch.randint(0, 30, (560,), generator=rng).tolist()))
    return str(text)


def part_of_run(rank, group, text, stop, ckpt=None, sharded=None, settings=ALONE, strategy=None, separator=7):
    """Train up to step `stop`, from `ckpt` if given. Return (losses, validation loss, parameters, new checkpoint)."""
    pl.seed_everything(1, verbose=False)
    world, record = launched(rank), Record()
    data = StreamDataModule(text, 16, 4, separator=separator, val_fraction=0.2, test_fraction=0)
    model = LongNetLM(pattern=PATTERN, dim=16, depth=1, kv_conv=2)
    callbacks = [record] if sharded is None else [record, ShardedCheckpoint(sharded, every_n_train_steps=stop)]
    options = {"callbacks": callbacks, "precision": "64-true", "num_sanity_val_steps": 1}
    options["enable_checkpointing"] = sharded is not None
    built = trainer(strategy or RingDilatedStrategy(**settings), world, max_steps=stop, **options)
    built.fit(model, data, ckpt_path=ckpt)
    path = f"{text}.{stop}.{world}.ckpt"
    if sharded is None:
        built.save_checkpoint(path)
    loss = float(built.validate(model, data, verbose=False)[0]["val_loss"])
    return record.losses, loss, torch.cat([p.detach().flatten() for p in model.parameters()]), path


def same(got, want):
    """Compare results, with a tolerance for validation losses, which are summed in float32."""
    for a, b, rtol in zip(got[:3], want[:3], (1e-9, 1e-6, 1e-9), strict=True):
        a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-12)


@pytest.fixture(scope="module")
def whole(pools, tmp_path_factory):
    """An uninterrupted run on one rank."""
    text = written(tmp_path_factory.mktemp("whole"))
    return pools(1).run(1, part_of_run, text, STEPS)[0]


def test_two_ranks_are_one(pools, tmp_path, whole):
    same(pools(2).run(2, part_of_run, written(tmp_path), STEPS)[0], whole)


def test_ddp(pools, tmp_path):
    """DDP logs the loss of each rank and averages gradients. Without documents, ranks have equal numbers of labels."""
    text, arguments = written(tmp_path), (STEPS, None, None, ALONE, "ddp", None)
    got = pools(2).run(2, part_of_run, text, *arguments)
    losses = torch.tensor([x[0] for x in got], dtype=torch.float64).mean(0)
    same((losses, *got[0][1:]), pools(1).run(1, part_of_run, text, *arguments[:4], None, None)[0])


@pytest.mark.parametrize("before, after", [(2, 1), (1, 2), pytest.param(2, 4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stop", [4, EPOCH])
def test_another_number_of_ranks(pools, tmp_path, whole, before, after, stop):
    text = written(tmp_path)
    first = pools(before).run(before, part_of_run, text, stop)[0]
    states = torch.load(first[3], weights_only=True)["streams"]
    assert {n: x["position"] for n, x in states.items()} == dict.fromkeys(range(4), 16 * stop)
    resumed = pools(after).run(after, part_of_run, text, STEPS, first[3])[0]
    same((first[0] + resumed[0], *resumed[1:]), whole)
    again = torch.load(resumed[3], weights_only=True)["streams"]
    assert {n: x["position"] for n, x in again.items()} == dict.fromkeys(range(4), 16 * (STEPS - EPOCH))


def test_folders(pools, tmp_path, whole):
    """`ShardedCheckpoint` also saves the states of streams."""
    text = written(tmp_path)
    first = pools(2).run(2, part_of_run, text, 4, None, str(tmp_path / "folders"))[0]
    resumed = pools(1).run(1, part_of_run, text, STEPS, str(tmp_path / "folders"))[0]
    assert len(resumed[0]) == STEPS - 4
    same((first[0] + resumed[0], *resumed[1:]), whole)


def test_ranks_that_share_a_sequence(pools, tmp_path):
    for message in pools(2).errors(ValueError, 2, part_of_run, written(tmp_path), 1, None, None, {}):
        assert "2 ranks share a sequence, but each stream is read by one rank: set sequence_size=1" in message


def sharded_weights(rank, group, text):
    """Fit with streams and sharded weights."""
    data = StreamDataModule(text, 16, 4, val_fraction=0, test_fraction=0)
    built = trainer(RingDilatedFSDPStrategy(**ALONE), launched(rank), max_steps=1, precision="32-true")
    built.fit(LongNetLM(pattern=PATTERN, dim=16, depth=1), data)


def test_sharded_weights_are_refused(pools, tmp_path):
    for message in pools(2).errors(ValueError, 2, sharded_weights, written(tmp_path)):
        assert "stream=16 is not offered with FSDP" in message
