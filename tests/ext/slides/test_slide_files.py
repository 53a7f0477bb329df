"""SlideReader returns the file's rows in any order, whichever rows it reads together."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated.ext.slides import files as slide_files
from lightning_dilated.ext.slides.files import SlideReader, slide_name

from ...examples import examples
from .test_slides import grid, write

TILES = 200


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[str]:
    """A slide as .h5 and as .pt. Tile t has the features (t, -t)."""
    folder, x = tmp_path_factory.mktemp("files"), np.arange(TILES, dtype=np.float32)
    x = np.stack([x, -x], 1)
    write(folder / "a.h5", x, grid(TILES))
    torch.save({"features": torch.from_numpy(x)[None], "coords": torch.from_numpy(grid(TILES))}, folder / "a.pt")
    return [str(folder / "a.h5"), str(folder / "a.pt")]


@settings(max_examples=examples(60))
@given(
    rows=st.lists(st.integers(0, TILES - 1), unique=True, max_size=60),
    block=st.integers(1, 50),
    near=st.integers(1, 20),
)
def test_random_rows(files, rows, block, near):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slide_files, "BLOCK", block)
        patch.setattr(slide_files, "NEAR", near)
        for path in files:
            features, coords = SlideReader().read(path, np.array(rows, dtype=np.int64))
            assert features.tolist() == [[t, -t] for t in rows] and coords.tolist() == grid(TILES)[rows].tolist()


def test_only_rows_that_are_asked_for_must_be_finite(tmp_path):
    x = np.ones((10, 2), np.float32)
    x[4] = np.nan
    write(tmp_path / "a.h5", x, grid(10))
    features, _ = SlideReader().read(str(tmp_path / "a.h5"), np.array([2, 3, 5]))
    assert features.isfinite().all()
    with pytest.raises(ValueError, match="tile 4 has a feature that is NaN"):
        SlideReader().read(str(tmp_path / "a.h5"), np.array([9, 4, 2]))


@pytest.mark.parametrize("path", ["x/a.h5", "a.svs", "a.svs.H5", "a.pt", "a.tiff.pth", "a"])
def test_names(path):
    assert slide_name(path) == "a"


@pytest.mark.parametrize(
    "attributes, size",
    [
        ({"patch_size_level0": 512, "patch_size": 256}, 512),
        ({"patch_size": 256, "patch_level": 0}, 256),
        ({"patch_size": 256, "patch_level": 1}, None),
        ({}, None),
    ],
)
def test_tile_sizes(tmp_path, attributes, size):
    write(tmp_path / "a.h5", np.ones((3, 2), np.float32), grid(3), **attributes)
    assert SlideReader().inspect(str(tmp_path / "a.h5")).tile_size == size
