"""A checkpoint resumes on any number of ranks with the same samples, losses and parameters."""

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from lightning_dilated import LongNetLM, RingDilatedStrategy
from lightning_dilated.data import ByteDataModule

from .runs import PATTERN, Record, launched, trainer, write_bytes

pytestmark = pytest.mark.full

STEPS = 6


def part_of_run(rank, group, folder, settings, stop, ckpt, dropout):
    """Train up to step `stop`, from a checkpoint if given, and save. Return (losses, parameters, checkpoint)."""
    pl.seed_everything(1, verbose=False)
    world, record = launched(rank), Record()
    size = settings.get("sequence_size", world)
    rows = 1 if "global_batch" in settings else 2 * size // world
    data = ByteDataModule(folder, seq_len=64, batch_size=rows, val_fraction=0, test_fraction=0)
    model = LongNetLM(pattern=PATTERN, dim=16, depth=1, attention_dropout=dropout)
    built = trainer(RingDilatedStrategy(**settings), world, max_steps=stop, callbacks=[record], precision="64-true")
    built.fit(model, data, ckpt_path=ckpt)
    path = f"{folder}.{stop}.{world}.{'.'.join(map(str, np.atleast_1d(size)))}.ckpt"
    built.save_checkpoint(path)
    return record.losses, torch.cat([p.detach().flatten() for p in model.parameters()]), path


WAYS = {"1": (1, {}), "2": (2, {}), "4": (4, {}), "4, data 2": (4, {"sequence_size": 2})}
#: cases in CI: more ranks, fewer ranks, one rank, other data ranks; other pairs run with `-m slow`
CI = {("2", "4"), ("4", "1"), ("4", "4, data 2"), ("4, data 2", "2")}


@pytest.mark.parametrize(
    "before, after",
    [pytest.param(x, y, marks=[] if (x, y) in CI else pytest.mark.slow) for x in WAYS if x != "1" for y in WAYS],
)
def test_another_number_of_ranks(pools, tmp_path, before, after):
    """An ordinary loader would restart at sample 0, while batch numbers continue."""
    folder = write_bytes(tmp_path / "text", 4000)
    before, after = WAYS[before], WAYS[after]
    # attention dropout depends on the row in a batch, so runs with two rows must not use it
    dropout = 0.0 if before[1] or after[1] else 0.1
    whole, parameters, _ = pools(1).run(1, part_of_run, folder, {}, STEPS, None, dropout)[0]
    ranks, settings = before
    first, _, path = pools(ranks).run(ranks, part_of_run, folder, settings, STEPS // 2, None, dropout)[0]
    ranks, settings = after
    resumed, got, _ = pools(ranks).run(ranks, part_of_run, folder, settings, STEPS, path, dropout)[0]
    torch.testing.assert_close(torch.tensor(first + resumed), torch.tensor(whole), rtol=1e-9, atol=0)
    torch.testing.assert_close(got, parameters, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "ways",
    [
        [(4, {"sequence_size": 1}), (2, {"sequence_size": 1})],
        [(2, {"sequence_size": [4, 1]}), (4, {"sequence_size": [3, 2, 1]}), (1, {})],
    ],
    ids=["four, two", "two, four, one"],
)
def test_as_many_sequences_a_step_as_before(pools, tmp_path, ways):
    """With `global_batch`, a step has the same samples on any number of ranks."""
    folder = write_bytes(tmp_path / "text", 4000)
    _, parameters, _ = pools(1).run(1, part_of_run, folder, {"global_batch": 4}, STEPS, None, 0.0)[0]
    path, each = None, STEPS // len(ways)
    for number, (ranks, settings) in enumerate(ways, 1):
        settings = {"global_batch": 4, **settings}
        losses, got, path = pools(ranks).run(ranks, part_of_run, folder, settings, number * each, path, 0.0)[0]
        taken = 4 * each // (1 if ranks == 1 else ranks // (2 if settings["sequence_size"] == [3, 2, 1] else 1))
        assert len(losses) == taken, "batches of a rank"
    torch.testing.assert_close(got, parameters, rtol=1e-9, atol=1e-12)


def test_epochs_of_whole_steps(pools, tmp_path):
    """Ten sequences in steps of four: an epoch has two steps on any number of ranks, also if a run resumes."""
    folder = write_bytes(tmp_path / "text", 641)
    settings = {"global_batch": 4, "sequence_size": 1}
    _, parameters, _ = pools(1).run(1, part_of_run, folder, settings, STEPS, None, 0.0)[0]
    first, _, path = pools(4).run(4, part_of_run, folder, settings, 3, None, 0.0)[0]
    resumed, got, _ = pools(2).run(2, part_of_run, folder, settings, STEPS, path, 0.0)[0]
    assert len(first) == 3 and len(resumed) == 6, "batches of a rank"
    torch.testing.assert_close(got, parameters, rtol=1e-9, atol=1e-12)
