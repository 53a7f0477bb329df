"""SlideSequences: slides as sequences of unequal length, which read only requested tiles; and their batches.

A slide of T tiles is a sequence of N = T positions, or N = T + 1 with a class token: its blank row (features 0, coords
-1) comes first, and tile t has position t + 1.

Shape letters: B batch, N positions, T tiles, F features.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from lightning_dilated.data.sampler import MARK
from lightning_dilated.ext.slides.files import Slide, SlideReader

#: coordinates of a position without a tile: class token and padding
NOWHERE = -1


class SlideSequences(Dataset):
    """Samples of slides in a fixed order.

    A sample is {"features": (N, F), "coords": (N, 2) int64, "length": N, "label", "index", "slide_id": its name}.

    It is one slide, or with `groups` several slides in one sequence. "label" is present if there are labels, and
    "coords" if the reader reads coordinates.

    Args:
        reader: reads the files.
        slides: headers of the files.
        labels: one per sample, a number or several; None for none.
        class_token: whether a blank row comes first.
        max_tiles: maximum number of tiles of a slide; a larger slide gives a random subset, which depends only on
            (seed, epoch, index in `slides`). None for all.
        order: order of a slide's tiles: "file", or "raster": by rows of the slide from top to bottom and left to right.
        seed: seed of the subsets.
        groups: {name: indices in `slides`} of each sample; None: each slide is a sample with its own name.
        shifts: (slides, 2) int64, added to coordinates to separate the slides of a sample; None for 0.
    """

    def __init__(
        self,
        reader: SlideReader,
        slides: list[Slide],
        labels: list[Any] | None = None,
        class_token: bool = True,
        max_tiles: int | None = None,
        order: str = "file",
        seed: int = 0,
        groups: dict[str, list[int]] | None = None,
        shifts: np.ndarray | None = None,
    ) -> None:
        self.reader, self.slides, self.labels = reader, slides, labels
        self.class_token, self.max_tiles, self.order, self.seed = class_token, max_tiles, order, seed
        self.groups, self.shifts = groups, shifts
        self.names = [slide.name for slide in slides] if groups is None else list(groups)
        self._members = [[i] for i in range(len(slides))] if groups is None else list(groups.values())
        self.epoch = 0
        self._content: str | None = None

    def __len__(self) -> int:
        return len(self._members)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which random subsets depend on; the loader calls it before each epoch."""
        self.epoch = epoch

    def fingerprint(self) -> str:
        """Return a digest of names, sizes, settings and some tiles of each slide (`SlideReader.digest`); cached."""
        values: tuple[Any, ...] = ([(s.name, s.tiles, s.width) for s in self.slides], self.labels, self.reader)
        settings: tuple[Any, ...] = (self.class_token, self.max_tiles, self.order, self.seed)
        if self.groups is not None:
            settings += (self.groups, None if self.shifts is None else self.shifts.tolist())
        named = hashlib.blake2b(repr((values, settings)).encode(), digest_size=8).hexdigest()
        if self._content is None:
            digest = hashlib.blake2b(digest_size=8)
            for slide in self.slides:
                digest.update(self.reader.digest(slide.path))
            self._content = digest.hexdigest()
        return f"{named}{MARK}{self._content}"

    def tiles_of(self, index: int) -> int:
        """Return T, the number of tiles of a sample."""
        return sum(map(self._taken, self._known(index)))

    def length_of(self, index: int) -> int:
        """Return N, the number of positions of a sample, without reading a file."""
        return self.tiles_of(index) + self.class_token

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.read_ranges(index, (range(self.length_of(index)),))

    def read_ranges(self, index: int, ranges: tuple[range, ...]) -> dict[str, Any]:
        """Return the sample at the positions `ranges`, in this order; "length" is N. Positions from N on are padding.

        Only the tiles at these positions are read, and rows between tiles that are a few rows apart, as in the strided
        layout. With order="raster", all coordinates are read.

        Raises:
            IndexError: if there is no such sample or a position is negative.
            ValueError: for a file that cannot be read or has features that are not finite.
        """
        members = self._known(index)
        if any(r and min(r[0], r[-1]) < 0 for r in ranges):
            raise IndexError(f"positions {ranges} were asked for, but positions begin at 0")
        tiles_at = np.concatenate([np.arange(r.start, r.stop, r.step) for r in ranges] or [np.empty(0, np.int64)])
        tiles_at = tiles_at - self.class_token
        ends = np.cumsum([self._taken(slide) for slide in members])
        owner = np.where(tiles_at < 0, -1, np.searchsorted(ends, tiles_at, side="right"))
        owned = [(i, np.flatnonzero(owner == i)) for i in range(len(members))]
        owned = [(i, at) for i, at in owned if len(at)] or [(0, np.empty(0, np.int64))]
        parts = [self._read(members[i], tiles_at[at] - (ends[i - 1] if i else 0)) for i, at in owned]
        at = np.concatenate([at for _, at in owned])
        sample: dict[str, Any] = {"features": _placed([x for x, _ in parts], at, len(tiles_at), 0)}
        if self.reader.coords is not None:
            sample["coords"] = _placed([x for _, x in parts], at, len(tiles_at), NOWHERE)
        sample |= {"length": self.length_of(index), "index": index, "slide_id": self.names[index]}
        return sample if self.labels is None else {**sample, "label": self.labels[index]}

    def _read(self, slide: int, tiles: np.ndarray) -> tuple[torch.Tensor, Any]:
        """Return features and shifted coords of some of a slide's selected tiles."""
        features, coords = self.reader.read(self.slides[slide].path, self._rows(slide)[tiles])
        if coords is None or self.shifts is None:
            return features, coords
        return features, coords + torch.from_numpy(self.shifts[slide])

    def _rows(self, slide: int) -> np.ndarray:
        """Return the file's row of each selected tile of a slide, (T,)."""
        stored, tiles = self.slides[slide], self._taken(slide)
        rows = np.arange(stored.tiles)
        if tiles < stored.tiles:
            rng = np.random.default_rng([self.seed, self.epoch, slide])
            rows = np.sort(rng.choice(stored.tiles, tiles, replace=False))
        if self.order == "raster":
            x, y = self.reader.read_coords(stored.path)[rows].T
            rows = rows[np.lexsort((x, y))]
        return rows

    def _taken(self, slide: int) -> int:
        tiles = self.slides[slide].tiles
        return tiles if self.max_tiles is None else min(tiles, self.max_tiles)

    def _known(self, index: int) -> list[int]:
        """Return the indices in `slides` of a sample's slides."""
        if not 0 <= index < len(self._members):
            raise IndexError(f"slide {index} was asked for, but there are {len(self._members)}")
        return self._members[index]


def _placed(parts: list[torch.Tensor], rows: np.ndarray, count: int, blank: int) -> torch.Tensor:
    """Return a tensor (count, W) with the rows of `parts` at the indices `rows`, and `blank` in all other rows."""
    if len(parts) == 1 and len(rows) == count:
        return parts[0]  # make no copy, because a slide may be large
    out = parts[0].new_full((count, parts[0].shape[1]), blank)
    start = 0
    for part in parts:
        out[torch.from_numpy(rows[start : start + len(part)])] = part
        start += len(part)
    return out


def side_by_side(sizes: np.ndarray, grid: int | None) -> np.ndarray:
    """Place S slides of (columns, rows) cells without overlap, and return the first cell of each, (S, 2) int64.

    They are placed from left to right in rows that are as wide as `grid`; None places them in one row.
    """
    out, x, y, height = np.zeros_like(sizes), 0, 0, 0
    for i, (columns, rows) in enumerate(sizes):
        if grid is not None and x and x + columns > grid:
            x, y, height = 0, y + height, 0
        out[i] = x, y
        x, height = x + columns, max(height, rows)
    return out


def collate_slides(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a batch of samples, padded on the right with features 0 and coords -1.

    Returns:
        {"features": (B, Nmax, F), "coords": (B, Nmax, 2), "lengths": (B,) int64, "label", "index": (B,), "slide_id":
        list of B str}, with "coords" and "label" only if the samples have them. Labels are (B,) int64 classes, (B,)
        float32 numbers, or (B, 2) float32 times and events.
    """
    batch: dict[str, Any] = {"features": _padded([s["features"] for s in samples], 0)}
    if "coords" in samples[0]:
        batch["coords"] = _padded([s["coords"] for s in samples], NOWHERE)
    batch["lengths"] = torch.tensor([s["length"] for s in samples], dtype=torch.int64)
    if "label" in samples[0]:
        labels = [s["label"] for s in samples]
        whole = all(isinstance(x, int) for x in labels)
        batch["label"] = torch.tensor(labels, dtype=torch.int64 if whole else torch.float32)
    batch["index"] = torch.tensor([s["index"] for s in samples], dtype=torch.int64)
    batch["slide_id"] = [s["slide_id"] for s in samples]
    return batch


def _padded(parts: list[torch.Tensor], blank: int) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0][None]  # make no copy, because a slide may be large
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=blank)
