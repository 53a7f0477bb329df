"""write_synthetic_slides: shaped like real slides, equal for equal seeds, with features that predict the label."""

import csv
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from lightning_dilated.data import SlideDataModule, check_coordinates, write_synthetic_slides


def load(folder: Path) -> list[tuple[np.ndarray, np.ndarray, int]]:
    out = []
    for path in sorted(folder.glob("*.h5")):
        with h5py.File(path) as file:
            out.append((file["features"][()], file["coords"][()], int(file["coords"].attrs["patch_size_level0"])))
    return out


def lines(folder: Path) -> list[dict[str, str]]:
    with open(folder / "labels.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_shape_of_slides(tmp_path):
    assert write_synthetic_slides(tmp_path, slides=10, tiles=(30, 90), features=5, tile_size=224) == str(
        tmp_path / "labels.csv"
    )
    slides, sizes = load(tmp_path), []
    for features, coords, tile_size in slides:
        sizes.append(len(features))
        assert features.shape == (len(coords), 5) and features.dtype == np.float32 and coords.dtype == np.int64
        assert tile_size == 224 and (coords % 224 == 0).all()
        check_coordinates(coords, 224)
        cells = coords // 224 - (coords // 224).min(0)
        assert len(coords) < np.prod(cells.max(0) + 1)  # a tissue mask, not a full rectangle
    assert len(set(sizes)) > 5 and min(sizes) >= 30 and max(sizes) <= 90
    table = lines(tmp_path)
    assert [x["slide_id"] for x in table] == [f"slide_{i:03d}" for i in range(10)]
    assert [x["label"] for x in table] == ["0", "1"] * 5 and len({x["patient"] for x in table}) == 5
    assert all(0.2 <= float(x["score"]) - int(x["label"]) <= 0.65 for x in table)


def test_one_seed_one_folder(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_synthetic_slides(tmp_path / name, slides=3, seed=seed)
    a, b, c = (load(tmp_path / name) for name in "abc")
    for (x, p, _), (y, q, _), (z, _, _) in zip(a, b, c, strict=True):
        assert np.array_equal(x, y) and np.array_equal(p, q) and (x.shape != z.shape or not np.array_equal(x, z))
    assert lines(tmp_path / "a") == lines(tmp_path / "b")


@pytest.mark.parametrize("signal, lowest, highest", [(2.0, 0.9, 1.0), (0.0, 0.2, 0.8)])
def test_the_mean_knows_the_label(tmp_path, signal, lowest, highest):
    """A nearest-mean classifier of slide means, fitted on half of them, predicts the others if there is a signal."""
    write_synthetic_slides(tmp_path, slides=40, features=8, signal=signal)
    means = np.stack([features.mean(0) for features, _, _ in load(tmp_path)])
    labels = np.array([int(x["label"]) for x in lines(tmp_path)])
    centres = np.stack([means[:20][labels[:20] == c].mean(0) for c in (0, 1)])
    guess = ((means[20:, None] - centres) ** 2).sum(-1).argmin(1)
    assert lowest <= (guess == labels[20:]).mean() <= highest


def test_pt_holds_the_same(tmp_path):
    for kind in ("h5", "pt"):
        write_synthetic_slides(tmp_path / kind, slides=4, kind=kind)
    one, other = (
        SlideDataModule(str(tmp_path / kind), str(tmp_path / kind / "labels.csv")).dataset("train")
        for kind in ("h5", "pt")
    )
    for i in range(len(one)):
        assert all(torch.equal(one[i][k], other[i][k]) for k in ("features", "coords"))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"slides": 0}, "slides must be .*got .*0"),
        ({"tiles": (9, 3)}, r"tiles must be \(least, most\), got \(9, 3\)"),
        ({"features": 2.0}, r"features must be .*got .*2\.0"),
        ({"kind": "zarr"}, "kind must be one of h5, pt; got 'zarr'"),
    ],
)
def test_wrong_values(tmp_path, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        write_synthetic_slides(tmp_path, **options)
