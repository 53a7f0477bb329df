"""Slides under the strategy: each rank reads only its slice of a file, and the slices form the whole batch."""

from pathlib import Path

import h5py
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_dilated import RingDilatedStrategy, loss_share
from lightning_dilated.data import SlideDataModule, write_synthetic_slides
from lightning_dilated.sequence.shard import Place
from lightning_dilated.strategy.loader import RankDataset

from .runs import launched, trainer

pytestmark = pytest.mark.full

#: bytes needed to open a file: its head and the index of its chunks
HEAD = 300_000
COORDS = 16


def bytes_read() -> int:
    """Return the bytes that this process has read, as the system counts them."""
    words = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(words["rchar"])


needs_proc = pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs /proc")


def large(folder: Path, tiles: int, width: int, chunked: bool) -> int:
    """Write a slide of several megabytes. Return the bytes per tile."""
    x = np.random.default_rng(0).standard_normal((tiles, width)).astype(np.float32)
    coords = np.stack([np.arange(tiles) % 64, np.arange(tiles) // 64], 1) * 256
    with h5py.File(folder / "large.h5", "w") as file:
        file.create_dataset("features", data=x, **({"chunks": (1, width)} if chunked else {}))
        file.create_dataset("coords", data=coords)
    return width * 4 + COORDS


@needs_proc
@pytest.mark.parametrize("chunked", [False, True], ids=["contiguous file", "file in chunks"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_slice_is_read_and_no_more(tmp_path, layout, chunked):
    tiles = 4001
    tile = large(tmp_path, tiles, 512, chunked)
    data = SlideDataModule(str(tmp_path), val_fraction=0, test_fraction=0).dataset("train")
    whole, ranks = data[0], []
    for rank in range(2):
        dataset, before = RankDataset(data, Place(2, rank, layout)), bytes_read()
        ranks.append(dataset.__getitems__([0])[0])
        read, own_tiles = bytes_read() - before, len(ranks[-1]["features"]) - (rank == 0)
        assert own_tiles in range(1999, 2003) and own_tiles * tile <= read <= own_tiles * tile + HEAD
    order = [p for rank in range(2) for r in Place(2, rank, layout).ranges(tiles + 1) for p in r]
    for name in ("features", "coords"):
        assert torch.equal(torch.cat([x[name] for x in ranks]), whole[name][order])


class Mean(pl.LightningModule):
    """Predicts the label of each slide from the mean of its tiles, and records its batches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(width, 1), []

    def training_step(self, batch, batch_idx):
        self.seen.append(
            {k: v.clone() for k, v in batch.items() if isinstance(v, torch.Tensor)} | {"slide_id": batch["slide_id"]}
        )
        real = batch["coords"][..., 0] >= 0
        error = (self.layer(batch["features"])[..., 0] - batch["label"][:, None]).square() * real
        loss = loss_share(error.sum(), int(real.sum()))
        self.log("train_loss", loss, reduce_fx="sum", sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fit(rank, group, folder, batch_size, options):
    """Return (batches, weights) of a fit of four steps."""
    pl.seed_everything(1, verbose=False)
    data = SlideDataModule(folder, f"{folder}/labels.csv", batch_size=batch_size, **options)
    data.check()
    model = Mean(data.feature_dim)
    trainer(RingDilatedStrategy(), launched(rank), max_steps=4, limit_val_batches=0).fit(model, data)
    return model.seen, model.layer.weight.detach().clone()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("slides")
    write_synthetic_slides(path, slides=10, tiles=(9, 40), features=6)
    return str(path)


RUNS = {
    "one slide": (1, {}),
    "three slides": (3, {}),
    "without a class token": (2, {"class_token": False}),
    "random subsets": (2, {"max_tiles": 12, "over": "sample"}),
    "raster": (2, {"order": "raster"}),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_parts_make_up_the_batch(pools, folder, name):
    batch_size, options = RUNS[name]
    ((whole, want),) = pools(1).run(1, fit, folder, batch_size, options)
    results = pools(2).run(2, fit, folder, batch_size, options)
    for step, batch in enumerate(whole):
        parts = [batches[step] for batches, _ in results]
        for entry in ("features", "coords"):
            assert torch.equal(torch.cat([part[entry] for part in parts], 1), batch[entry])
        for entry in ("lengths", "label", "index"):
            assert all(torch.equal(part[entry], batch[entry]) for part in parts)
        assert all(part["slide_id"] == batch["slide_id"] and len(batch["slide_id"]) == batch_size for part in parts)
    for _, weights in results:
        torch.testing.assert_close(weights, want, rtol=1e-5, atol=1e-6)


class Batched(torch.utils.data.Dataset):
    """Has `read_ranges` and `__getitems__`; the first takes precedence."""

    seq_len = 10

    def __len__(self):
        return 4

    def __getitems__(self, indices):
        raise AssertionError("whole samples were asked for")

    def read_ranges(self, index, ranges):
        return {"x": torch.tensor([p for r in ranges for p in r])}


def test_a_dataset_of_batches_is_read_by_ranges():
    loader = DataLoader(RankDataset(Batched(), Place(2, 1)), batch_size=2)
    assert next(iter(loader))["x"].tolist() == [[5, 6, 7, 8, 9]] * 2
