"""Slides under the strategies: training, AUROC, accuracy and kappa have the same results as on one rank."""

import functools

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_dilated import RingDilatedFSDPStrategy, RingDilatedStrategy, SlideEncoder
from lightning_dilated.data.sampler import ResumableSampler

from ..ext.slides.slides import SIZES, batch
from .runs import Record, full, launched, trainer

pytestmark = pytest.mark.full

#: 7 slides for validation, so that two data ranks have unequal numbers
TILES = (40, 23, 9, 31, 12, 5, 17)


class Slides(Dataset):
    """Slides of different lengths, each with a blank row."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        sample = {name: x[0] for name, x in batch(TILES[i], seed=i).items()}
        return {**sample, "label": torch.tensor(i % 3), "index": torch.tensor(i)}


def padded(samples):
    """Pad samples on the right to the longest sample."""
    rows = torch.nn.utils.rnn.pad_sequence
    whole = {name: torch.stack([s[name] for s in samples]) for name in ("lengths", "label", "index")}
    features = rows([s["features"] for s in samples], batch_first=True)
    coords = rows([s["coords"] for s in samples], batch_first=True, padding_value=-1)
    return {"features": features, "coords": coords, **whole}


class Data(pl.LightningDataModule):
    """Data with batches of two slides in total over all data ranks."""

    def _loader(self, count, shuffle):
        who = self.trainer.distributed_sampler_kwargs
        sampler = ResumableSampler(Slides(count), shuffle=shuffle, drop_last=shuffle, **who)
        size = 2 // who["num_replicas"]
        return DataLoader(Slides(count), size, sampler=sampler, collate_fn=padded, drop_last=shuffle)

    def train_dataloader(self):
        return self._loader(6, True)

    def val_dataloader(self):
        return self._loader(7, False)


def fitted(rank, group, settings, options, fsdp=False):
    """Return the results of training and validation on this rank."""
    pl.seed_everything(4, verbose=False)
    strategy = (RingDilatedFSDPStrategy if fsdp else RingDilatedStrategy)(**settings)
    record = Record()
    record.on_before_optimizer_step = lambda *args: None
    run = trainer(
        strategy, launched(rank), max_steps=3, precision="32-true", callbacks=[record], num_sanity_val_steps=0
    )
    model = SlideEncoder(**{**SIZES, "task": "ordinal", "num_classes": 3, **options}, optimizer=adam).double()
    data = Data()
    run.fit(model, data)
    if fsdp:
        return record.losses, {}, {name: full(p).detach().clone() for name, p in model.named_parameters()}
    run.validate(model, data, verbose=False)
    metrics = {name: float(x) for name, x in run.callback_metrics.items() if name.startswith("val_")}
    return record.losses, metrics, {name: p.detach().clone() for name, p in model.named_parameters()}


adam = functools.partial(torch.optim.AdamW, lr=0.01)
WAYS = {
    "4, data 2": (4, {"sequence_size": 2}, {}),
    "2, checked": (2, {"check_first_batch": True}, {"layer_decay": 0.5}),
}


def compare(got, want):
    for losses, metrics, parameters in got:
        assert losses == pytest.approx(want[0], rel=1e-6)
        assert metrics == pytest.approx(want[1], rel=1e-6, nan_ok=True)
        for name, p in want[2].items():
            torch.testing.assert_close(parameters[name], p, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("way", WAYS)
def test_many_ranks_are_one(pools, way):
    ranks, settings, options = WAYS[way]
    want = pools(1).run(1, fitted, {}, options)[0]
    names = {"val_loss", "val_auroc", "val_balanced_accuracy", "val_quadratic_kappa"}
    assert set(want[1]) == names and len(set(want[0])) > 1
    compare(pools(ranks).run(ranks, fitted, settings, options), want)


def test_sharded_parameters(pools):
    options = {"freeze_encoder": True}
    want = pools(1).run(1, fitted, {}, options)[0]
    compare(pools(2).run(2, fitted, {}, options, True), (want[0], {}, want[2]))
