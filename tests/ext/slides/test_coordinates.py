"""check_coordinates accepts regular grids. It names typical errors of real pipelines and their remedies."""

import numpy as np
import pytest
import torch

from lightning_dilated.ext.slides.coordinates import check_coordinates, coordinate_faults, tile_cells, tile_step


def grid(columns: int = 20, rows: int = 15, step: int = 256, seed: int = 0) -> np.ndarray:
    """Return two thirds of the cells of a grid in random order, (N, 2) int64."""
    x, y = np.meshgrid(np.arange(columns), np.arange(rows))
    coords = np.stack([x.ravel(), y.ravel()], 1) * step
    rng = np.random.default_rng(seed)
    return coords[rng.permutation(len(coords))[: len(coords) * 2 // 3]]


def contours() -> np.ndarray:
    """Return several pieces of tissue, each tiled on a grid with its own origin, as CLAM does."""
    origins = [(0, 0), (10_100, 77), (333, 8_190), (12_345, 9_001)]
    return np.concatenate([grid(seed=i) + origin for i, origin in enumerate(origins)])


GOOD = {
    "grid": (grid(), {}),
    "tensor": (torch.from_numpy(grid()), {}),
    "int32": (grid().astype(np.int32), {}),
    "unsigned": (grid().astype(np.uint16), {}),
    "lists": (grid().tolist(), {}),
    "contours": (contours(), {}),
    "one tile": ([[512, 512]], {}),
    "no tile": (np.zeros((0, 2), dtype=np.int64), {}),
    "level 0": (grid(step=512), {"tile_size": 512}),
    "two lone tiles": ([[0, 0], [51_200, 0]], {}),
    "within the grid": (grid(), {"grid": 20}),
    "a diagonal": (np.arange(50)[:, None].repeat(2, 1) * 256, {}),
}


@pytest.mark.parametrize("name", GOOD)
def test_fine(name):
    coords, options = GOOD[name]
    assert coordinate_faults(coords, **options) == []
    check_coordinates(coords, **options)


TWICE = np.concatenate([grid(), grid()])
BAD = {
    "another magnification": (grid(step=128), {}, r"200 tiles lie in only \d+ cells.*128 apart, 0\.5 of.*set tile_size=128"),
    "4 x 4 cells": (grid(step=5) + 7, {}, r"in only 1 cells.*5 apart.*set tile_size=5"),
    "tile numbers": (grid(step=1), {}, "1 apart, so these look like tile numbers.*multiply.*set tile_size=1"),
    "overlapping": (grid(step=192), {}, r"192 apart, 0\.75 of.*overlapping.*set tile_size=192"),
    "level 0 given as level 1": (grid(step=512), {}, "no two neighbours are closer than 512.*stretched by 2.*tile_size=512"),
    "listed twice": (TWICE, {}, "only 200 cells.*Only 200 of the coordinates differ: are tiles listed twice"),
    "scattered": (np.random.default_rng(0).integers(0, 997, (900, 2)), {}, "900 tiles lie in only 16 cells"),
    "micrometres": (grid() * 0.2527, {}, r"float64 with fractions, such as \(.*micrometres: divide"),
    "normalised": (grid() / 5120, {}, "from 0 to 1, as if they were normalised: multiply"),
    "whole floats": (grid().astype(np.float32), {}, "but these are float32: these are whole, so write them as int64"),
    "float16 overflow": (torch.from_numpy(grid(step=8192)).half(), {}, r"float16 and not finite at tile \d+ \(float16 ends"),
    "bfloat16": (torch.from_numpy(grid()).bfloat16() + 0.5, {}, "these are bfloat16"),
    "NaN": ([[0.0, 0.0], [256.0, float("nan")]], {}, "not finite at tile 1"),
    "bool": (np.ones((3, 2), dtype=bool), {}, "must be integers.*bool"),
    "text": (np.array([["0", "256"]]), {}, "must be integers"),
    "negative": (np.concatenate([grid(), [[-1, -1]]]), {}, r"1 of 201 tiles have a.*tile 200 at \(-1, -1\).*class token"),
    "three columns": (np.zeros((5, 3), dtype=np.int64), {}, r"must be \(N, 2\).*got shape \(5, 3\)"),
    "one row": (np.zeros(2, dtype=np.int64), {}, r"must be \(N, 2\)"),
    "beyond": (
        [[0, 0], [256, 512], [256_000, 256]],
        {"grid": 1000},
        r"\(column 1000, row 2\), but positions exist for 1000 x 1000 cells.* tile 2 at \(256000, 256\).*at least 1001",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_fault(name):
    coords, options, message = BAD[name]
    with pytest.raises(ValueError, match=f"slide 7: .*{message}"):
        check_coordinates(coords, where="slide 7", **options)
    assert len(coordinate_faults(coords, **options)) == 1


@pytest.mark.parametrize("step", [1, 128, 192, 512])
def test_the_size_that_is_named_is_right(step):
    assert tile_step(grid(step=step)) == step
    assert coordinate_faults(grid(step=step)) and not coordinate_faults(grid(step=step), step)


def test_several_faults_are_told_at_once():
    faults = coordinate_faults(grid(step=512), grid=30)
    assert [fault.split()[0] for fault in faults] == ["no", "the"]


def test_cells_and_steps():
    assert tile_cells(np.array([[0, 255], [256, 1023]]), 256).tolist() == [[0, 0], [1, 3]]
    assert tile_step(np.array([[0, 0], [5, 7]])) is None


@pytest.mark.parametrize("options", [{"tile_size": 0}, {"tile_size": 2.5}, {"grid": 0}, {"tile_size": True}])
def test_wrong_options(options):
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        coordinate_faults(grid(), **options)
