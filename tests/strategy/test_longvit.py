"""One image on several ranks: training and metrics of a LongViT are those of one rank, for images of unlike size."""

import functools

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_dilated import LongViT, RingDilatedFSDPStrategy, RingDilatedStrategy
from lightning_dilated.data.sampler import ResumableSampler
from lightning_dilated.ext.slides.longvit.image_patches import image_patches

from ..ext.slides.images import SIZES, pixels
from .runs import Record, full, launched, trainer

pytestmark = pytest.mark.full

#: pixels of images; 20 x 20 are the 25 patches of the table
SHAPES = ((20, 20), (36, 28), (12, 20), (4, 44), (40, 16), (8, 8))


class Images(Dataset):
    """Images of unlike size, as patches."""

    def __len__(self):
        return len(SHAPES)

    def __getitem__(self, i):
        patches, grid = image_patches(pixels(1, 3, *SHAPES[i], seed=i), 4)
        return {"patches": patches[0], "grid": grid[0], "label": torch.tensor(i % 2)}


def padded(samples):
    """Samples padded on the right to the largest."""
    whole = {name: torch.stack([s[name] for s in samples]) for name in ("grid", "label")}
    return {"patches": torch.nn.utils.rnn.pad_sequence([s["patches"] for s in samples], batch_first=True), **whole}


class Data(pl.LightningDataModule):
    """Two images a batch over all data ranks."""

    def train_dataloader(self):
        who = self.trainer.distributed_sampler_kwargs
        sampler = ResumableSampler(Images(), shuffle=True, drop_last=True, **who)
        return DataLoader(Images(), 2 // who["num_replicas"], sampler=sampler, collate_fn=padded, drop_last=True)

    val_dataloader = train_dataloader


adam = functools.partial(torch.optim.AdamW, lr=0.01)


def fitted(rank, group, settings, options, fsdp=False):
    """What training and validation leave on this rank."""
    pl.seed_everything(4, verbose=False)
    strategy = (RingDilatedFSDPStrategy if fsdp else RingDilatedStrategy)(**settings)
    record = Record()
    record.on_before_optimizer_step = lambda *args: None
    run = trainer(
        strategy, launched(rank), max_steps=3, precision="32-true", callbacks=[record], num_sanity_val_steps=0
    )
    options = {**SIZES, "image_size": 20, "task": "classification", "num_classes": 2, **options}
    model = LongViT(**options, optimizer=adam).double()
    run.fit(model, Data())
    metrics = {} if fsdp else run.validate(model, Data(), verbose=False)[0]
    return record.losses, metrics, {name: full(p).detach().clone() for name, p in model.named_parameters()}


WAYS = {
    "4, data 2": (4, {"sequence_size": 2}, {"norm_at": "patches"}),
    "4, strided, attended": (4, {"layout": "strided"}, {"padding": "attended"}),
}


@pytest.mark.parametrize("way", WAYS)
def test_many_ranks_are_one(pools, way):
    ranks, settings, options = WAYS[way]
    want = pools(1).run(1, fitted, {}, options)[0]
    assert len(set(want[0])) > 1 and "val_auroc" in want[1]
    compare(pools(ranks).run(ranks, fitted, settings, options), want)


def test_sharded_parameters(pools):
    want = pools(1).run(1, fitted, {}, {})[0]
    compare(pools(2).run(2, fitted, {}, {}, True), (want[0], {}, want[2]))


def compare(found, want):
    for losses, metrics, parameters in found:
        assert losses == pytest.approx(want[0], rel=1e-6)
        assert metrics == pytest.approx(want[1], rel=1e-6, nan_ok=True)
        for name, p in want[2].items():
            torch.testing.assert_close(parameters[name], p, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def pixels_alone(rank, group):
    """An image where several ranks hold one sequence."""
    strategy = RingDilatedStrategy()
    data = DataLoader([{"image": pixels(3, 8, 8), "label": torch.tensor(0)}] * 2, 1)
    model = LongViT(**{**SIZES, "task": "classification", "num_classes": 2}).double()
    trainer(strategy, launched(rank), max_steps=1, precision="32-true").fit(model, data)


def test_an_image_alone_is_refused_on_several_ranks(pools):
    for answer in pools(2).answers(2, pixels_alone):
        assert answer.error == "ValueError" and "none of ['patches']" in answer.message
