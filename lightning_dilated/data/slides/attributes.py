"""What the writer of a slide file left beside the coordinates: the side of a tile, and the size of the slide.

TRIDENT writes `patch_size_level0`, `level0_width` and `level0_height`, and `overlap` in the pixels of `patch_size`. CLAM
writes `patch_size` and `downsampled_level_dim`, which count pixels of the level `patch_level`, and `downsample`, the level-0
pixels of one of those. Coordinates of both count level-0 pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

#: pixels that no slide reaches: above, an attribute is not a size
_LARGEST = 1 << 31


def tile_size_of(path: str, attributes: Mapping[str, Any]) -> int | None:
    """Side of a tile in level-0 pixels, less what it shares with the next one; None where the attributes do not say it.

    Raises:
        ValueError: for an attribute that is no such number, naming file and attribute.
    """
    if "patch_size_level0" in attributes:  # TRIDENT
        side = _whole(path, attributes, "patch_size_level0")
        if "overlap" not in attributes or "patch_size" not in attributes:
            return side
        size, overlap = _whole(path, attributes, "patch_size"), _numbers(path, attributes, "overlap", 1, least=0)[0]
        if overlap >= size:
            raise _wrong(path, attributes, "overlap", f"below the patch_size {size}")
        return side - round(overlap * side / size)
    if "patch_size" not in attributes or "patch_level" not in attributes:
        return None
    size = _whole(path, attributes, "patch_size")
    if _numbers(path, attributes, "patch_level", 1, least=0)[0] == 0:  # CLAM
        return size
    if "downsample" not in attributes:
        return None
    # CLAM steps from tile to tile by whole downsamples
    return size * int(_numbers(path, attributes, "downsample", 1, least=1)[0])


def extent_of(path: str, attributes: Mapping[str, Any]) -> tuple[int, int] | None:
    """(width, height) of the slide in level-0 pixels, at least; None where the attributes do not say it.

    Raises:
        ValueError: as `tile_size_of`.
    """
    if "level0_width" in attributes and "level0_height" in attributes:  # TRIDENT
        return _whole(path, attributes, "level0_width"), _whole(path, attributes, "level0_height")
    if "downsampled_level_dim" not in attributes or "downsample" not in attributes:
        return None
    size = _numbers(path, attributes, "downsampled_level_dim", 2)  # CLAM
    factor = _numbers(path, attributes, "downsample", 1)[0]
    width, height = (
        math.ceil((x + 1) * factor) if factor > 1 else math.ceil(x) for x in size
    )  # levels are rounded down
    return width, height


def _whole(path: str, attributes: Mapping[str, Any], name: str) -> int:
    (value,) = _numbers(path, attributes, name, 1)
    if value != round(value):
        raise _wrong(path, attributes, name, "a whole number of pixels")
    return int(value)


def _numbers(path: str, attributes: Mapping[str, Any], name: str, count: int, least: float = 1e-6) -> list[float]:
    """The first `count` numbers of an attribute, each of at least `least`."""
    what = "a number of pixels" if count == 1 else f"{count} numbers of pixels"
    try:
        values = np.asarray(attributes[name])
        found = [float(x) for x in values.reshape(-1)[:count]]
    except (TypeError, ValueError, OSError) as error:
        raise _wrong(path, attributes, name, what) from error
    if len(found) < count or values.size > 4 or not all(math.isfinite(x) and least <= x < _LARGEST for x in found):
        raise _wrong(path, attributes, name, what)
    return found


def _wrong(path: str, attributes: Mapping[str, Any], name: str, what: str) -> ValueError:
    try:
        found = " ".join(repr(attributes[name]).split())[:80]
    except (TypeError, ValueError, OSError):
        found = "unreadable"
    return ValueError(
        f"{path}: the attribute {name!r} of the coordinates is {found}, but it must be {what}: correct it, or delete it "
        "from the file and set data.tile_size"
    )
