"""Positions of tiles: sin-cos rows equal the release's table, and coordinates that would read a wrong row raise."""

import math

import pytest
import torch

from lightning_dilated.ext.slides.backbone import GridPositions, cells_of, check_coords


@pytest.mark.parametrize("x, y", [(0, 0), (3, 0), (0, 5), (999, 998)])
def test_is_its_formula(x, y):
    """A row starts with y, because y varies fastest in the release's table, which calls that axis w."""
    got = GridPositions(16, 1000)(torch.tensor([[[x, y]]]))[0, 0]
    rates = [10000 ** (-i / 4) for i in range(4)]
    want = [f(p * w) for p in (y, x) for f in (math.sin, math.cos) for w in rates]
    torch.testing.assert_close(got, torch.tensor(want), rtol=0, atol=1e-7)


def test_cells():
    coords = torch.tensor([[[255, 256], [1023, 0], [-1, -1]]])
    counted = torch.tensor([[True, True, False]])
    for values in (coords, coords.double(), coords.int()):
        assert cells_of(values, counted, 256).tolist() == [[[0, 1], [3, 0], [0, 0]]]
    assert not GridPositions(16, 4).state_dict()


def checked(values, counted=None, tile_size=256, grid=8):
    coords = torch.as_tensor(values)
    check_coords(
        coords, torch.ones(coords.shape[:2], dtype=torch.bool) if counted is None else counted, tile_size, grid
    )


BAD = {
    "half precision": (torch.zeros(1, 2, 2).half(), TypeError, "torch.float16, which rounds pixels above 2,048"),
    "bool": (torch.zeros(1, 2, 2).bool(), TypeError, "must be integers"),
    "fractions": (torch.tensor([[[0.5, 1.0]]]), ValueError, "hold fractions"),
    "a NaN": (torch.tensor([[[0.0, torch.nan]]]), ValueError, "hold fractions, NaN"),
    "too large for float32": (torch.tensor([[[0.0, 2.0**24]]]), ValueError, "too large for torch.float32"),
    "negative": (torch.tensor([[[0, -256]]]), ValueError, "must not be negative for a tile, got -256"),
    "outside the grid": (
        torch.tensor([[[0, 4096]]]),
        ValueError,
        "cell 16 of 256 .*8 cells.*grid to at least 17.*least 513",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_would_read_a_wrong_row(name):
    coords, error, says = BAD[name]
    with pytest.raises(error, match=says):
        checked(coords)
    if name not in ("half precision", "bool"):
        checked(coords, torch.zeros(coords.shape[:2], dtype=torch.bool))  # coordinates of padding are not read


def test_the_advised_tile_size_is_enough():
    checked(torch.tensor([[[0, 4096]]]), tile_size=513)
    with pytest.raises(ValueError, match="at least 513"):
        checked(torch.tensor([[[0, 4096]]]), tile_size=512)
    checked(torch.zeros(1, 0, 2).long())
