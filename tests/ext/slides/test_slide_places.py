"""Coordinates are compared with the model's cells, and with the attributes that CLAM and TRIDENT write."""

import logging
from pathlib import Path

import h5py
import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from lightning_dilated import SlideEncoder
from lightning_dilated.data import SlideDataModule, check_coordinates
from lightning_dilated.ext.slides.coordinates import tile_cells
from lightning_dilated.ext.slides.files import extent_of, tile_size_of

from .test_slides import write

SIZES = {"feature_dim": 4, "dim": 8, "depth": 1, "num_heads": 2, "segment_lengths": [16, 64], "dilation_rates": [1, 2]}


def cells(columns: int = 10, rows: int = 6) -> np.ndarray:
    x, y = np.meshgrid(np.arange(columns), np.arange(rows))
    return np.stack([x.ravel(), y.ravel()], 1)


def slides(folder: Path, sides: list[int], coords: np.ndarray | None = None, **attributes) -> str:
    """Write one slide for each side length of tiles, with these attributes."""
    coords = cells() if coords is None else coords
    for i, side in enumerate(sides):
        features = np.random.default_rng(i).standard_normal((len(coords), 4)).astype(np.float32)
        write(folder / f"s{i}.h5", features, coords * side, **attributes)
    return str(folder)


def fit(folder: str, of_model: int, grid: int = 1000, **options) -> None:
    model = SlideEncoder(**SIZES, tile_size=of_model, grid=grid, task="regression")
    data = SlideDataModule(folder, val_fraction=0, test_fraction=0, **options)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=0, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(model, data)


BARE = {
    "tile numbers": ([1] * 4, r"(?s)4 slides do not fit.*s0\.h5: .*look like tile numbers, not pixels: multiply them"),
    "smaller tiles": ([256] * 4, r"s0\.h5: .*256 apart, 0\.5 of the tile_size.*set tile_size=256"),
    "larger tiles": ([1024] * 4, r"s0\.h5: .*closer than 1024, with tile_size=512.*stretched by 2.*set tile_size=1024"),
    "one of another size": (
        [512, 512, 256, 512],
        r"s2\.h5: .*256 apart.*the model has tile_size=512; neither the file",
    ),
}


@pytest.mark.parametrize("name", BARE)
def test_files_that_say_nothing_are_compared_with_the_model(tmp_path, name):
    sides, message = BARE[name]
    with pytest.raises(ValueError, match=message):
        fit(slides(tmp_path, sides), 512)


@pytest.mark.parametrize("side", [256, 512])
def test_files_that_fit_the_model(tmp_path, side, caplog):
    fit(slides(tmp_path, [side] * 3), side)


def unchecked(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if "not checked" in r.getMessage()]


def test_what_could_not_be_checked_is_said_once(tmp_path, caplog):
    folder = slides(tmp_path, [512] * 3)
    write(tmp_path / "s3.h5", np.ones((2, 4), np.float32), np.array([[0, 0], [5120, 0]]))
    with caplog.at_level(logging.INFO):
        fit(folder, 512)
    (line,) = unchecked(caplog)
    assert "1 of 4 slides were cut at a larger tile_size than the model's 512" in line
    assert "x and y are swapped in 4 of 4 slides" in line and "\n" not in line
    caplog.clear()
    with caplog.at_level(logging.INFO):
        SlideDataModule(folder, val_fraction=0, test_fraction=0).dataset("train")
    (line,) = unchecked(caplog)
    assert "neither the files nor data.tile_size state one" in line


def test_nothing_is_said_where_all_was_checked(tmp_path, caplog):
    folder = slides(tmp_path, [512] * 3, patch_size_level0=512, level0_width=6000, level0_height=4000)
    with caplog.at_level(logging.INFO):
        fit(folder, 512)
    assert not unchecked(caplog)


def test_a_grid_that_is_too_small_names_file_and_remedy(tmp_path):
    folder = slides(tmp_path, [512] * 2, patch_size_level0=512)
    write(tmp_path / "wide.h5", np.ones((60, 4), np.float32), (cells() + np.array([9, 0])) * 512, patch_size_level0=512)
    with pytest.raises(ValueError, match=r"wide\.h5: .*column 18.*10 x 10 cells.*\(model\.grid\) of at least 19\.$"):
        fit(folder, 512, grid=10)
    fit(folder, 512, grid=19)


def test_slides_without_coordinates_are_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match=r"data\.coords_name is null: set it .*or train a LongNetClassifier"):
        fit(slides(tmp_path, [512] * 2), 512, coords_name=None)


def test_another_tile_size_than_that_of_the_model(tmp_path):
    data = SlideDataModule(slides(tmp_path, [512] * 2), val_fraction=0, test_fraction=0, tile_size=512)
    with pytest.raises(ValueError, match=r"tile_size=256, but the data's is 512: set the model's tile_size to 512"):
        data.check_places(256)
    data.check_places(512)


TRIDENT = {"level0_width": 6000, "level0_height": 4000}
CLAM = {"patch_size": 256, "patch_level": 1, "downsample": [2.0, 2.0], "downsampled_level_dim": [3000, 2000]}


@pytest.mark.parametrize("attributes", [{**TRIDENT, "patch_size_level0": 512}, CLAM], ids=["TRIDENT", "CLAM"])
def test_swapped_axes(tmp_path, attributes):
    folder = slides(tmp_path, [512] * 2, **attributes)
    SlideDataModule(folder, val_fraction=0, test_fraction=0).check()
    slides(tmp_path, [512], cells()[:, ::-1], **attributes)
    with pytest.raises(
        ValueError, match=r"s0\.h5: 12 of 60 tiles begin outside.*6,00\d pixels wide.*With x and y swapped"
    ):
        SlideDataModule(folder, val_fraction=0, test_fraction=0).check()
    slides(tmp_path, [512], cells() + 20, **attributes)
    with pytest.raises(ValueError, match=r"s0\.h5: 60 of 60 tiles begin outside.*Are these coordinates of this slide"):
        SlideDataModule(folder, val_fraction=0, test_fraction=0).check()


ATTRIBUTES = {
    "TRIDENT": ({"patch_size_level0": 512, **TRIDENT, "patch_size": 256}, 512, (6000, 4000)),
    "TRIDENT, no overlap": ({"patch_size_level0": 1024, "patch_size": 512, "overlap": 0}, 1024, None),
    "TRIDENT, overlap": ({"patch_size_level0": 1024, "patch_size": 512, "overlap": 128}, 768, None),
    "CLAM, level 1": (CLAM, 512, (6002, 4002)),  # sizes at this level are rounded down
    "CLAM, level 0": ({**CLAM, "patch_level": 0, "downsample": [1.0, 1.0]}, 256, (3000, 2000)),
    "CLAM, downsample above": ({**CLAM, "patch_level": 2, "downsample": [16.0041, 16.0041]}, 4096, (48029, 32025)),
    "CLAM, downsample below": ({**CLAM, "downsample": [3.9998, 3.9998]}, 768, (12004, 8004)),
    "CLAM, no downsample": ({"patch_size": 256, "patch_level": 1}, None, None),
    "a float": ({"patch_size_level0": np.float64(512)}, 512, None),
    "an array": ({"patch_size_level0": np.array([512])}, 512, None),
    "a text of digits": ({"patch_size_level0": "512"}, 512, None),
    "nothing": ({}, None, None),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes(name):
    attributes, side, extent = ATTRIBUTES[name]
    assert (tile_size_of("a.h5", attributes), extent_of("a.h5", attributes)) == (side, extent)


EVIL = ["evil", float("nan"), float("inf"), -3, 0, np.zeros((0,)), np.ones(1000), 1e300, b"x", 512.5, None, [[[]]]]


@pytest.mark.parametrize(
    "name", ["patch_size_level0", "level0_width", "patch_size", "downsample", "downsampled_level_dim"]
)
@pytest.mark.parametrize("value", EVIL, ids=[str(i) for i in range(len(EVIL))])
def test_attributes_that_are_no_sizes(name, value):
    if isinstance(value, float) and value == 512.5 and name.startswith("downsample"):
        pytest.skip("a level may be 512.5 times smaller")
    good = {"level0_width": 5, "level0_height": 5} if name.startswith("level0") else CLAM
    attributes = {**good, name: value}
    with pytest.raises(ValueError, match=rf"^a\.h5: the attribute '{name}' .*must be .*correct it, or delete it"):
        tile_size_of("a.h5", attributes)
        extent_of("a.h5", attributes)


def test_tiles_that_overlap(tmp_path):
    """Tiles of 512 pixels overlap by a quarter, so their step and the model's tile_size must be 384."""
    folder = slides(tmp_path, [384] * 2, patch_size_level0=512, patch_size=256, overlap=64)
    fit(folder, 384)
    with pytest.raises(ValueError, match="set the model's tile_size to 384"):
        fit(folder, 512)
    with pytest.raises(ValueError, match=r"'overlap' .* is 256.*must be below the patch_size 256"):
        tile_size_of("a.h5", {"patch_size_level0": 512, "patch_size": 256, "overlap": 256})


@pytest.mark.parametrize(
    "attributes, step",
    [
        ({"patch_size": 256, "patch_level": 0, "downsample": [1.0, 1.0]}, 128),
        ({"patch_size": 256, "patch_level": 0, "downsample": [1.0, 1.0]}, 240),
        ({"patch_size": 256, "patch_level": 1, "downsample": [4.0, 4.0]}, 512),
        ({"patch_size_level0": 512}, 256),
    ],
    ids=["half", "a little", "level 1", "TRIDENT without overlap"],
)
def test_overlapping_tiles_of_a_file_that_does_not_state_the_step(tmp_path, attributes, step):
    """CLAM writes patch_size but no step_size. The error names a tile_size, which is accepted when it is set."""
    folder = slides(tmp_path, [step] * 3, **attributes)
    with pytest.raises(ValueError, match=f"(?s)s0\\.h5: .*{step} apart.*tile_size( to |=){step}\\b.*data.tile_size"):
        fit(folder, step)
    fit(folder, step, tile_size=step)
    for wrong in (step - 7, step + 7):
        with pytest.raises(ValueError, match=f"(?s)s0\\.h5: .*{step} apart.*tile_size( to |=){step}\\b"):
            fit(folder, wrong, tile_size=wrong)
    with pytest.raises(ValueError, match=r"tiles are .* wide, but data.tile_size is 4096"):
        fit(folder, 4096, tile_size=4096)
    with pytest.raises(ValueError, match=f"the model has tile_size=1024, but the data's is {step}"):
        fit(folder, 1024, tile_size=step)


def test_overlapping_tiles_of_clam_lie_at_cells_of_the_step(tmp_path):
    attributes = {"patch_size": 256, "patch_level": 0, "downsample": [1.0, 1.0]}
    data = SlideDataModule(slides(tmp_path, [128], **attributes), val_fraction=0, test_fraction=0, tile_size=128)
    data.check()
    coords = data.dataset("train")[0]["coords"][1:].numpy()
    assert data.tile_size == 128 and np.array_equal(tile_cells(coords, data.tile_size), cells())


def test_an_evil_attribute_in_a_file(tmp_path):
    folder = slides(tmp_path, [512] * 2)
    with h5py.File(tmp_path / "s1.h5", "r+") as file:
        file["coords"].attrs["patch_size_level0"] = "evil"
    with pytest.raises(ValueError, match=r"s1\.h5: the attribute 'patch_size_level0' .* 'evil', but it must be"):
        SlideDataModule(folder).check()


def test_two_tiles_in_one_place(tmp_path):
    coords = np.concatenate([cells(), cells()[7:8]]) * 512
    with pytest.raises(
        ValueError, match=r"tiles 7 and 60 both lie at \(3584, 0\), and 1 of 61 tiles lie where another"
    ):
        check_coordinates(coords, 512)
    folder = slides(tmp_path, [512] * 2)
    write(tmp_path / "s1.h5", np.ones((61, 4), np.float32), coords)
    with pytest.raises(ValueError, match=r"s1\.h5: tiles 7 and 60 both lie"):
        SlideDataModule(folder, val_fraction=0, test_fraction=0).check()


def test_pt_slides_are_compared_too(tmp_path):
    for i in range(2):
        values = {"features": torch.randn(60, 4), "coords": torch.from_numpy(cells())}
        torch.save(values, tmp_path / f"s{i}.pt")
    with pytest.raises(ValueError, match=r"s0\.pt: .*look like tile numbers"):
        fit(str(tmp_path), 512)
