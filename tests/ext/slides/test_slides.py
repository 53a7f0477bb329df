"""SlideDataModule: samples, batches, splits, labels, subsets and orders, from .h5 and .pt files."""

import itertools
import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_dilated.data import SlideDataModule, write_synthetic_slides


def module(folder: str, **options) -> SlideDataModule:
    return SlideDataModule(folder, **{"labels_csv": f"{folder}/labels.csv", **options})


def stored(folder: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    with h5py.File(f"{folder}/{name}.h5") as file:
        return file["features"][()], file["coords"][()]


def table(path: Path, columns: str, *lines: str) -> str:
    path.write_text("\n".join([columns, *lines]) + "\n")
    return str(path)


def write(path: Path, features: np.ndarray, coords: np.ndarray | None = None, **attributes) -> None:
    with h5py.File(path, "w") as file:
        file["features"] = features
        if coords is not None:
            file["coords"] = coords
            file["coords"].attrs.update(attributes)


def grid(tiles: int) -> np.ndarray:
    return np.stack([np.arange(tiles) % 7, np.arange(tiles) // 7], 1) * 256


# -- samples and batches -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("class_token", [True, False])
def test_samples_are_the_files(folder, class_token):
    dataset = module(folder, class_token=class_token).dataset("train")
    for i, slide in enumerate(dataset.slides):
        features, coords = stored(folder, slide.name)
        sample, front = dataset[i], int(class_token)
        assert sample["length"] == dataset.length_of(i) == len(features) + front == len(sample["features"])
        assert torch.equal(sample["features"][front:], torch.from_numpy(features))
        assert torch.equal(sample["coords"][front:], torch.from_numpy(coords))
        assert sample["label"] == int(slide.name[-3:]) % 3 and sample["index"] == i
        if class_token:
            assert (sample["features"][0] == 0).all() and sample["coords"][0].tolist() == [-1, -1]


def test_batches_are_padded_on_the_right(folder):
    data = module(folder, batch_size=4)
    batch = next(iter(data.train_dataloader()))
    names = batch.pop("slide_id")
    assert names == [data.dataset("train").slides[i].name for i in batch["index"].tolist()]
    assert {k: v.dtype for k, v in batch.items()} == {
        "features": torch.float32,
        "coords": torch.int64,
        "lengths": torch.int64,
        "label": torch.int64,
        "index": torch.int64,
    }
    assert batch["features"].shape == (4, int(batch["lengths"].max()), 4)
    for i, index in enumerate(batch["index"].tolist()):
        sample, n = data.dataset("train")[index], int(batch["lengths"][i])
        assert torch.equal(batch["features"][i, :n], sample["features"]) and batch["label"][i] == sample["label"]
        assert (batch["features"][i, n:] == 0).all() and (batch["coords"][i, n:] == -1).all()


@pytest.mark.parametrize("index, ranges", [(-1, ()), (99, ()), (0, (range(-1, 3),))])
def test_no_such_sample(folder, index, ranges):
    with pytest.raises(IndexError, match="asked for"):
        module(folder).dataset("train").read_ranges(index, ranges)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_feature_dtype(folder, dtype):
    data = module(folder, feature_dtype=dtype)
    features, _ = stored(folder, data.dataset("train").slides[0].name)
    got = data.dataset("train")[0]["features"]
    assert got.dtype == getattr(torch, dtype)
    assert torch.equal(got[1:], torch.from_numpy(features).to(got.dtype))


FORMS = {
    "boxed": lambda x, c: {"features": x[None], "coords": c},
    "both boxed": lambda x, c: {"features": x[None], "coords": c[None]},
    "float16": lambda x, c: {"features": x.astype(np.float16), "coords": c.astype(np.int32)},
    "big endian": lambda x, c: {"features": x.astype(">f4"), "coords": c.astype(">i4")},
    "unsigned": lambda x, c: {"features": x.astype(np.float64), "coords": c.astype(np.uint64)},
    "other names": lambda x, c: {"feats": x, "xy": c},
}


@pytest.mark.parametrize("chunks", [None, (1, 3)])
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_h5(tmp_path, form, chunks):
    x, c = np.random.default_rng(0).integers(0, 9, (20, 3)).astype(np.float32), grid(20)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, value in FORMS[form](x, c).items():
            plain = chunks is None or value.ndim == 3 or value.shape[1] == 2
            file.create_dataset(name, data=value, **({} if plain else {"chunks": chunks, "compression": "gzip"}))
    names = {"features_name": "feats", "coords_name": "xy"} if form == "other names" else {}
    sample = SlideDataModule(str(tmp_path), val_fraction=0, test_fraction=0, **names).dataset("train")[0]
    assert sample["features"].dtype == torch.float32 and sample["features"][1:].tolist() == x.tolist()
    assert sample["coords"].dtype == torch.int64 and sample["coords"][1:].tolist() == c.tolist()


@pytest.mark.parametrize("new", [True, False], ids=["zip", "torch before 1.6"])
@pytest.mark.parametrize("coords", [True, False])
def test_forms_of_pt(tmp_path, coords, new):
    x, c = torch.randn(20, 3).bfloat16(), torch.from_numpy(grid(20)).int()
    content = {"features": x[None], "coords": c} if coords else x
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=new)
    name = "coords" if coords else None
    data = SlideDataModule(str(tmp_path), val_fraction=0, test_fraction=0, coords_name=name)
    sample, batch = data.dataset("train")[0], next(iter(data.train_dataloader()))
    assert torch.equal(sample["features"][1:], x.float()) and ("coords" in sample) == ("coords" in batch) == coords
    assert not coords or torch.equal(sample["coords"][1:], c.long())


# -- subsets and orders ------------------------------------------------------------------------------------------------
def rows_of(sample: dict, features: np.ndarray) -> list[int]:
    """Return which rows of the file a sample has."""
    at = {tuple(x): i for i, x in enumerate(features.tolist())}
    return [at[tuple(x)] for x in sample["features"][1:].tolist()]


def test_random_subsets(folder):
    """A subset depends only on (seed, epoch, index), keeps the file's order, and repeats no tile."""
    options = {"max_tiles": 6, "over": "sample", "val_fraction": 0, "test_fraction": 0}
    data = module(folder, **options)
    index = next(i for i, s in enumerate(data.dataset("train").slides) if s.tiles > 15)
    features, _ = stored(folder, data.dataset("train").slides[index].name)
    subsets = set()
    for seed, epoch in itertools.product((1, 2), (0, 1)):
        dataset = module(folder, **options, seed=seed).dataset("train")
        dataset.set_epoch(epoch)
        rows = rows_of(dataset[index], features)
        assert dataset.length_of(index) == 7 and rows == sorted(set(rows)) == rows_of(dataset[index], features)
        assert rows_of(dataset.read_ranges(index, (range(4),)), features) == rows[:3]
        subsets.add(tuple(rows))
    assert len(subsets) == 4


def test_raster_order(tmp_path):
    order = np.random.default_rng(0).permutation(20)
    write(tmp_path / "a.h5", order[:, None].astype(np.float32), grid(20)[order])
    options = {"order": "raster", "val_fraction": 0, "test_fraction": 0}
    dataset = SlideDataModule(str(tmp_path), **options).dataset("train")
    assert (
        dataset[0]["features"][1:, 0].tolist() == list(range(20))
        and dataset[0]["coords"][1:].tolist() == grid(20).tolist()
    )
    assert dataset.read_ranges(0, (range(3, 6),))["features"][:, 0].tolist() == [2, 3, 4]


def test_more_ranks_than_tiles(folder):
    """A rank without tiles gets an empty part."""
    data = module(folder)
    dataset = data.dataset("train")
    batch = data.collate([dataset.read_ranges(i, ()) for i in range(2)])
    assert batch["features"].shape == (2, 0, 4) and batch["coords"].shape == (2, 0, 2)
    assert batch["lengths"].tolist() == [dataset.length_of(0), dataset.length_of(1)]


# -- processes ---------------------------------------------------------------------------------------------------------
def test_workers_read_the_same(folder):
    data = module(folder, batch_size=5)
    dataset = data.dataset("train")
    dataset[0]
    alone = list(DataLoader(dataset, batch_size=5, collate_fn=data.collate))
    there = DataLoader(dataset, batch_size=5, collate_fn=data.collate, num_workers=1)
    for left, right in zip(alone, there, strict=True):
        assert left.pop("slide_id") == right.pop("slide_id")
        assert all(torch.equal(left[key], right[key]) for key in left)


def test_pickled_datasets_read_the_same(folder):
    dataset = module(folder).dataset("train")
    before, copy = dataset[1], pickle.loads(pickle.dumps(dataset))
    assert torch.equal(before["features"], copy[1]["features"]) and dataset.fingerprint() == copy.fingerprint()


def test_fingerprints_differ_where_samples_do(folder, tmp_path):
    write_synthetic_slides(tmp_path, slides=12, tiles=(5, 30), features=4, classes=3, seed=1)
    datasets = [module(folder), module(folder), module(folder, seed=1), module(folder, class_token=False)]
    datasets += [module(str(tmp_path)), module(folder, labels="none"), module(folder, feature_dtype="float16")]
    fingerprints = [data.dataset("train").fingerprint() for data in datasets]
    assert fingerprints[0] == fingerprints[1] and len(set(fingerprints)) == len(fingerprints) - 1
