"""Several slides of a patient are one sample with one label: tiles in sequence, positions side by side."""

import numpy as np
import pytest
import torch

from lightning_dilated import LongNetClassifier, SlideEncoder
from lightning_dilated.data import SlideDataModule
from lightning_dilated.ext.slides.sequences import side_by_side

from ...models import PATTERN, trainer
from .test_slides import grid, table, write

#: numbers of tiles in slides s0 to s5; patients are p0 (s0, s3, s4), p1 (s1) and p2 (s2, s5)
TILES, PATIENT = (5, 9, 12, 3, 8, 1), (0, 1, 2, 0, 0, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("groups")
    for i, tiles in enumerate(TILES):
        features = np.stack([np.full(tiles, i), np.arange(tiles)], 1).astype(np.float32)
        write(path / f"s{i}.h5", features, grid(tiles), patch_size_level0=256)
    table(path / "labels.csv", "slide_id,label,patient", *(f"s{i},{p % 2},p{p}" for i, p in enumerate(PATIENT)))
    return str(path)


def data(folder, **options) -> SlideDataModule:
    defaults = {"group_column": "patient", "merge_groups": True, "val_fraction": 0, "test_fraction": 1, "batch_size": 2}
    return SlideDataModule(folder, f"{folder}/labels.csv", **{**defaults, **options})


def test_samples_are_patients(folder):
    dataset = data(folder, classes=["0", "1"]).dataset("test")
    assert len(dataset) == 3 and [dataset.tiles_of(i) for i in range(3)] == [16, 9, 13]
    sample = dataset[0]
    assert sample["slide_id"] == "p0" and sample["length"] == 17 and sample["label"] == 0
    assert sample["features"][1:, 0].tolist() == [0] * 5 + [3] * 3 + [4] * 8
    assert sample["features"][1:, 1].tolist() == [*range(5), *range(3), *range(8)]
    assert (sample["features"][0] == 0).all() and sample["coords"][0].tolist() == [-1, -1]
    # side by side: s0 has 5 columns, s3 has 3 columns
    x = sample["coords"][1:, 0] // 256
    assert x[:5].tolist() == [0, 1, 2, 3, 4] and x[5:8].tolist() == [5, 6, 7] and int(x[8:].min()) == 8
    assert len(set(map(tuple, sample["coords"].tolist()))) == 17


@pytest.mark.parametrize("class_token", [True, False])
def test_any_positions(folder, class_token):
    dataset = data(folder, classes=["0", "1"], class_token=class_token, order="file").dataset("test")
    whole = dataset[0]
    for ranges in ((range(3, 9),), (range(0, 17, 3), range(1, 17, 5)), (range(12, 24),), (range(30, 34),), ()):
        sample = dataset.read_ranges(0, ranges)
        at = [i for x in ranges for i in x]
        assert sample["length"] == whole["length"] and len(sample["features"]) == len(at)
        for row, i in enumerate(at):
            inside = i < whole["length"]
            assert torch.equal(sample["features"][row], whole["features"][i] if inside else torch.zeros(2))
            assert sample["coords"][row].tolist() == (whole["coords"][i].tolist() if inside else [-1, -1])


def test_places_fit_the_grid_of_the_model():
    sizes = np.array([[5, 2], [3, 4], [6, 1], [2, 2]])
    assert side_by_side(sizes, None).tolist() == [[0, 0], [5, 0], [8, 0], [14, 0]]
    assert side_by_side(sizes, 8).tolist() == [[0, 0], [5, 0], [0, 4], [6, 4]]


SIZES = {"feature_dim": 2, "dim": 16, "depth": 1, "num_heads": 4, "segment_lengths": [64], "dilation_rates": [1]}
SIZES |= {"task": "classification", "num_classes": 2, "dropout": 0.0, "drop_path": 0.0}


def test_a_model_trains_on_patients(folder):
    model = SlideEncoder(**SIZES, grid=8)
    trainer(max_steps=1).fit(model, data(folder, test_fraction=0))
    predicted = trainer().predict(model, data(folder))
    assert [name for batch in predicted for name in batch["slide_id"]] == ["p0", "p1", "p2"]
    # p0 takes 15 columns in one row; the second row is below
    module = data(folder)
    module.check_places(256, 8)
    places = module.dataset("test")[0]["coords"] // 256
    assert int(places[:, 0].max()) < 8 and int(places[:, 1].max()) >= 1


def test_without_coordinates_and_packed(folder):
    options = {"feature_dim": 2, "num_classes": 2, "dim": 16, "depth": 1, "num_heads": 4}
    module = data(folder, coords_name=None, class_token=False, pack_tokens=40, batch_size=1, test_fraction=0)
    trainer(max_steps=1).fit(LongNetClassifier(PATTERN, **options), module)


def test_patients_are_counted_and_split(folder):
    module = data(folder, test_fraction=0)
    assert module.class_counts == [2, 1] and module.groups("train") == ["p0", "p1", "p2"]
    assert data(folder, merge_groups=False, test_fraction=0).groups("train") == [f"p{i}" for i in PATIENT]
    with pytest.raises(ValueError, match="the train split has 3 samples, but one batch takes 4"):
        data(folder, test_fraction=0, batch_size=4).check()


def test_refused(folder, tmp_path):
    with pytest.raises(ValueError, match=r"set data\.group_column"):
        data(folder, group_column=None)
    lines = [f"s{i},{int(i == 3)},p{p}" for i, p in enumerate(PATIENT)]
    path = table(tmp_path / "l.csv", "slide_id,label,patient", *lines)
    with pytest.raises(ValueError, match=r"lines 2 and 5: slides 's0' and 's3' of patient 'p0' have different labels"):
        SlideDataModule(folder, path, group_column="patient", merge_groups=True).check()
    path = table(tmp_path / "l.csv", "slide_id,label,patient", *(f"s{i},0,p" for i in range(6)))
    many = SlideDataModule(
        folder, path, classes=["0", "1"], group_column="patient", merge_groups=True, val_fraction=0, test_fraction=1
    )
    many.check_places(256, 9)
    with pytest.raises(
        ValueError, match=r"the 6 slides of patient 'p' take 9 cells .* has positions for 7: set a grid"
    ):
        many.check_places(256, 7)
