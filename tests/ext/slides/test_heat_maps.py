"""heat_map and write_attention: every weight is at its tile, and nothing in a file is lost or silently overwritten."""

import h5py
import numpy as np
import pytest
import torch
from matplotlib import colormaps
from PIL import Image

from lightning_dilated.attention import attention_weights
from lightning_dilated.data import SlideDataModule, heat_map, write_attention, write_heat_map
from lightning_dilated.pattern import DilatedPattern

from .test_slides import grid, write

TILES = 20


@pytest.fixture
def slide(tmp_path) -> str:
    write(tmp_path / "a.h5", np.random.default_rng(0).standard_normal((TILES, 3)).astype(np.float32), grid(TILES))
    return str(tmp_path / "a.h5")


def stored(path: str, name: str = "attention") -> np.ndarray:
    with h5py.File(path) as file:
        return file[name][()]


# -- heat_map ----------------------------------------------------------------------------------------------------------
def test_each_tile_lies_at_its_cell():
    coords = grid(TILES) + np.array([512, 256])
    picture = heat_map(torch.arange(TILES), torch.from_numpy(coords))
    assert picture.shape == (4, 9) and np.isnan(picture).sum() == 36 - TILES
    for i, (x, y) in enumerate(coords):
        assert picture[y // 256, x // 256] == i


def test_rows_without_a_tile_are_left_out():
    coords = np.concatenate([[[-1, -1]], grid(5), [[-1, -1]]])
    picture = heat_map([9.0, 0, 1, 2, 3, 4, 9], coords)
    assert picture.tolist() == [[0, 1, 2, 3, 4]]


def test_tiles_that_share_a_cell_are_added():
    coords = np.concatenate([grid(TILES), [[130, 40]]])
    weights = np.full(TILES + 1, 0.5)
    picture = heat_map(weights, coords)
    assert picture[0, 0] == 1.0 and np.nansum(picture) == weights.sum()


@pytest.mark.parametrize(
    "weights, coords, options, message",
    [
        (np.ones((2, 20)), grid(TILES), {}, r"weights \(N,\) and coords \(N, 2\), got \(2, 20\)"),
        (np.ones(19), grid(TILES), {}, "got .19,. and .20, 2."),
        (np.ones(20), grid(TILES) // 2, {}, "128 apart.*set tile_size=128"),
        (np.ones(20), grid(TILES) * 0.5, {}, "must be integers"),
        (np.ones(2), -np.ones((2, 2), int), {}, "got no tile"),
        (np.ones(2), [[0, 0], [10**6, 10**6]], {"tile_size": 50}, "20001 x 20001 cells: set a larger tile_size"),
    ],
)
def test_refused_maps(weights, coords, options, message):
    with pytest.raises(ValueError, match=message):
        heat_map(weights, coords, **options)


# -- write_attention ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(TILES,), (TILES, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_written_beside_what_is_there(slide, shape, dtype):
    before = stored(slide, "features"), stored(slide, "coords")
    weights = torch.rand(shape).to(dtype)
    write_attention(slide, weights)
    assert stored(slide).dtype == np.float32 and np.array_equal(stored(slide), weights.float().numpy())
    assert all(
        np.array_equal(a, b) for a, b in zip(before, (stored(slide, "features"), stored(slide, "coords")), strict=True)
    )


def test_not_overwritten_unless_told(slide):
    write_attention(slide, np.zeros(TILES))
    with pytest.raises(ValueError, match="holds 'attention' already: pass overwrite=True, or another name"):
        write_attention(slide, np.ones(TILES))
    assert (stored(slide) == 0).all()
    write_attention(slide, np.ones(TILES), name="second")
    write_attention(slide, np.ones((TILES, 2)), overwrite=True)
    assert (stored(slide) == 1).all() and stored(slide).shape == (TILES, 2) and (stored(slide, "second") == 1).all()


def test_coordinates_say_which_tile(slide):
    order = np.random.default_rng(1).permutation(TILES)[:15]
    coords = np.concatenate([[[-1, -1]], grid(TILES)[order]])
    write_attention(slide, np.concatenate([[99], order]), coords)
    values = stored(slide)
    assert np.isnan(values).sum() == 5 and (values[order] == order).all()


@pytest.mark.parametrize("order", ["file", "raster"])
def test_attention_of_a_class_token(slide, tmp_path, order):
    """As a user would: run a slide with its class token, and write the weights of position 0 into the file."""
    data = SlideDataModule(slide, order=order, val_fraction=0, test_fraction=0)
    batch = next(iter(data.train_dataloader()))
    q = torch.nn.functional.pad(batch["features"], (0, 5)).unflatten(2, (2, 4)) + 0.1
    weights = attention_weights(q, q, DilatedPattern.longnet([8, 32], [1, 2]), [0], lengths=batch["lengths"])
    rows = weights[0, :, 0].T  # axes (N, H)
    write_attention(slide, rows, batch["coords"][0])
    assert np.array_equal(stored(slide), rows[1:].float().numpy()[:TILES]) and not np.isnan(stored(slide)).any()
    picture = heat_map(rows.mean(1), batch["coords"][0])
    assert np.nansum(picture) == pytest.approx(float(rows[1:].mean(1).sum()), rel=1e-5)


BAD = {
    "a class token": (np.ones(21), {}, "20 tiles, but weights have 21 rows, as if with a class token: leave its row out"),
    "too few": (np.ones(7), {}, "has 20 tiles, but weights have 7 rows, or give coords"),
    "too many dimensions": (np.ones((1, 2, 20)), {}, r"must be \(N,\) or \(N, H\), got \(1, 2, 20\)"),
    "NaN": (np.full(20, np.nan), {}, "not all finite: nothing was written"),
    "coords": (np.ones(20), {"coords": grid(19)}, r"coords must be \(20, 2\)"),
    "coords twice": (np.ones(20), {"coords": grid(20) // 2048}, "coordinates occur twice"),
    "another slide": (np.ones(20), {"coords": grid(20) + 1}, r"has no tile at \(1, 1\) \(20 of 20 are missing\)"),
    "the features": (np.ones(20), {"name": "features", "overwrite": True}, "which is an array of the slide itself"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refused_writes(slide, name):
    weights, options, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        write_attention(slide, weights, **options)
    with h5py.File(slide) as file:
        assert sorted(file) == ["coords", "features"]


def test_other_files(tmp_path):
    with pytest.raises(ValueError, match=r"written to \.h5 files"):
        write_attention(str(tmp_path / "a.pt"), np.ones(3))


# -- write_heat_map ----------------------------------------------------------------------------------------------------
def colour(share: float) -> np.ndarray:
    return np.round(255 * np.array(colormaps["inferno"](float(share))[:3]))


def test_a_picture_without_a_thumbnail(tmp_path):
    """Each tile is a square, coloured by the share of tiles with lower weights (ties equal). Other cells are white."""
    weights = np.array([0.0, 9, 1, 1, 100])
    write_heat_map(tmp_path / "a.png", weights, grid(5) * 2)
    picture = np.array(Image.open(tmp_path / "a.png"))
    assert picture.shape == (16, 9 * 16, 3)
    for i, share in enumerate([0, 3 / 4, 1 / 4, 1 / 4, 1]):
        assert (picture[:, 32 * i : 32 * i + 16] == colour(share)).all()
        assert (picture[:, 32 * i + 16 : 32 * i + 32] == 255).all()
    write_heat_map(tmp_path / "b.png", weights, grid(5) * 2, scale="linear")
    assert (np.array(Image.open(tmp_path / "b.png"))[:, 32:48] == colour(0.09)).all()
    write_heat_map(tmp_path / "c.png", np.full(5, 0.2), grid(5) * 2)
    assert (np.array(Image.open(tmp_path / "c.png"))[:, 32:48] == colour(0)).all()


def test_a_large_slide_is_drawn_small(tmp_path):
    write_heat_map(tmp_path / "a.png", [1, 2], [[0, 0], [256 * 999, 256 * 99]])
    picture = np.array(Image.open(tmp_path / "a.png"))
    assert picture.shape == (204, 2048, 3) and (picture[-1, -1] == colour(1)).all()


def test_on_a_thumbnail(tmp_path):
    """Tiles are half-transparent, at their positions on the slide. The background does not change."""
    Image.new("RGB", (100, 50), (0, 200, 0)).save(tmp_path / "t.png")
    coords = np.array([[256, 0], [2048, 1024], [-1, -1]])
    write_heat_map(tmp_path / "a.png", [1, 2, 9], coords, thumbnail=tmp_path / "t.png", slide_size=(2560, 1280))
    picture = np.array(Image.open(tmp_path / "a.png"))
    drawn = (picture != [0, 200, 0]).any(-1)
    assert drawn.sum() == 2 * 100 and drawn[0:10, 10:20].all() and drawn[40:50, 80:90].all()
    want = np.round(0.6 * 255 * np.array(colormaps["inferno"](1.0)[:3]) + 0.4 * np.array([0, 200, 0]))
    assert (picture[45, 85] == want).all()


THUMBNAILS = {
    "size": ({}, ValueError, "needs the slide's size.*give slide_size"),
    "proportions": ({"slide_size": (1280, 2560)}, ValueError, "has 100 x 50 pixels, but the slide has 1280 x 2560"),
    "missing": ({"thumbnail": "none.png", "slide_size": (2560, 1280)}, FileNotFoundError, "none.png: no such file"),
    "text": ({"thumbnail": "text.png", "slide_size": (2560, 1280)}, ValueError, "cannot be read as a picture"),
    "scale": ({"scale": "log"}, ValueError, "scale must be one of rank, linear"),
}


@pytest.mark.parametrize("name", THUMBNAILS)
def test_thumbnails_that_do_not_fit(tmp_path, name):
    options, error, says = THUMBNAILS[name]
    Image.new("RGB", (100, 50)).save(tmp_path / "t.png")
    (tmp_path / "text.png").write_text("no picture")
    options = {**options, "thumbnail": tmp_path / options.get("thumbnail", "t.png")}
    with pytest.raises(error, match=says):
        write_heat_map(tmp_path / "a.png", np.ones(5), grid(5), **options)
    assert not (tmp_path / "a.png").exists()
