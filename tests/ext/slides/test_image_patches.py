"""Patches are what a convolution over the image sees, and positions what torch's own interpolation makes."""

import pytest
import torch
from torch.nn.functional import conv2d, interpolate

from lightning_dilated.ext.slides.longvit.image_patches import image_patches, resized_table, table_positions

from .images import pixels


def test_patches_are_what_a_convolution_sees():
    images, weight = pixels(2, 3, 12, 20), pixels(5, 3, 4, 4)
    patches, grid = image_patches(images, 4)
    want = conv2d(images, weight, stride=4).flatten(2).transpose(1, 2)
    torch.testing.assert_close(patches @ weight.flatten(1).T, want)
    assert grid.tolist() == [[3, 5], [3, 5]]


@pytest.mark.parametrize("rows, columns", [(8, 8), (9, 7), (8, 5), (3, 30), (1, 1), (16, 16)])
def test_positions_are_interpolated(rows, columns):
    """Of any of the patches, in any order, with the gradient of the whole interpolation."""
    table = pixels(1, 64, 6).float().requires_grad_()
    square = table.view(1, 8, 8, 6).permute(0, 3, 1, 2)
    factors = (rows + 0.1) / 8, (columns + 0.1) / 8
    whole = interpolate(square, scale_factor=factors, mode="bicubic").permute(0, 2, 3, 1).reshape(-1, 6)
    want = table[0] if (rows, columns) == (8, 8) else whole
    n = rows * columns
    for positions in (torch.arange(n), torch.arange(n)[n // 3 :], torch.arange(n)[::3], torch.arange(0)):
        got = table_positions(table, rows, columns, positions)
        torch.testing.assert_close(got, want[positions], rtol=0, atol=1e-5)
    g = pixels(n, 6).float()
    found = torch.autograd.grad((table_positions(table, rows, columns, torch.arange(n)) * g).sum(), table)
    torch.testing.assert_close(found, torch.autograd.grad((want * g).sum(), table), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("side", [3, 8, 11])
def test_a_resized_table(side):
    table = pixels(1, 64, 6)
    square = table.view(1, 8, 8, 6).permute(0, 3, 1, 2)
    want = interpolate(square, size=(side, side), mode="bicubic").permute(0, 2, 3, 1).reshape(1, -1, 6)
    torch.testing.assert_close(resized_table(table, side), want, rtol=0, atol=1e-5)
