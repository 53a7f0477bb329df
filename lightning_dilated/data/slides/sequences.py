"""Slides as a dataset of sequences of unequal length, of which a rank reads its tiles only.

A slide of T tiles is a sequence of N positions: T + 1 with a class token, whose blank row (features 0, coords -1) comes
first, so that tile t lies at position t + 1; T without. Shape letters: B batch, N positions, T tiles, F features.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from lightning_dilated.data.content import MARK
from lightning_dilated.data.slides.files import Slide, SlideReader

#: coordinates of a position without a tile: the class token's, and padding
NOWHERE = -1


class SlideSequences(Dataset):
    """Slides in a fixed order; a sample is {"features": (N, F), "coords": (N, 2) int64, "length": N, "label", "index",
    "slide_id": the slide's name}.

    "label" is there where labels are, "coords" where the reader has a name for them.

    Args:
        reader: reads the files.
        slides: what they hold.
        labels: one number a slide; None for none.
        class_token: whether a blank row comes first.
        max_tiles: take at most this many tiles, a random subset that depends on (seed, epoch, index) alone; None for all.
        order: "file", or "raster": by rows of the slide from its top, from left to right.
        seed: of the subsets.
    """

    def __init__(
        self,
        reader: SlideReader,
        slides: list[Slide],
        labels: list[int] | list[float] | None = None,
        class_token: bool = True,
        max_tiles: int | None = None,
        order: str = "file",
        seed: int = 0,
    ) -> None:
        self.reader, self.slides, self.labels = reader, slides, labels
        self.class_token, self.max_tiles, self.order, self.seed = class_token, max_tiles, order, seed
        self.epoch = 0
        self._content: str | None = None

    def __len__(self) -> int:
        return len(self.slides)

    def set_epoch(self, epoch: int) -> None:
        """Called by the loader before each epoch: random subsets change with it."""
        self.epoch = epoch

    def fingerprint(self) -> str:
        """Differs where the samples do, as far as names and sizes tell, and some tiles of each slide (`SlideReader.digest`),
        as they were when it was first asked for."""
        values = [(s.name, s.tiles, s.width) for s in self.slides], self.labels, self.reader
        settings = self.class_token, self.max_tiles, self.order, self.seed
        named = hashlib.blake2b(repr((values, settings)).encode(), digest_size=8).hexdigest()
        if self._content is None:
            digest = hashlib.blake2b(digest_size=8)
            for slide in self.slides:
                digest.update(self.reader.digest(slide.path))
            self._content = digest.hexdigest()
        return f"{named}{MARK}{self._content}"

    def tiles_of(self, index: int) -> int:
        """T, the tiles that a sample takes."""
        tiles = self.slides[self._known(index)].tiles
        return tiles if self.max_tiles is None else min(tiles, self.max_tiles)

    def length_of(self, index: int) -> int:
        """N, the positions of a sample; no file is read."""
        return self.tiles_of(index) + self.class_token

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.read_ranges(index, (range(self.length_of(index)),))

    def read_ranges(self, index: int, ranges: tuple[range, ...]) -> dict[str, Any]:
        """The sample at some positions only, in this order; "length" stays N. Positions from N on are padding.

        Of the file only the tiles at these positions are read (and rows between tiles a
        few rows apart, as in the strided layout; with order="raster" all coordinates).

        Raises:
            IndexError: if there is no such slide or a position is negative.
            ValueError: for a file that cannot be read or has features that are not finite.
        """
        tiles = self.tiles_of(index)
        if any(r and min(r[0], r[-1]) < 0 for r in ranges):
            raise IndexError(f"positions {ranges} were asked for, but they begin at 0")
        at = np.concatenate([np.arange(r.start, r.stop, r.step) for r in ranges] or [np.empty(0, np.int64)])
        at = at - self.class_token
        slide, real = self.slides[index], np.flatnonzero((at >= 0) & (at < tiles))
        features, coords = self.reader.read(slide.path, self._rows(index)[at[real]])
        sample = {"features": _placed(features, real, len(at), 0)}
        if coords is not None:
            sample["coords"] = _placed(coords, real, len(at), NOWHERE)
        sample |= {"length": self.length_of(index), "index": index, "slide_id": slide.name}
        return sample if self.labels is None else {**sample, "label": self.labels[index]}

    def _rows(self, index: int) -> np.ndarray:
        """(T,) the file's row of each tile of the sequence."""
        slide, tiles = self.slides[index], self.tiles_of(index)
        rows = np.arange(slide.tiles)
        if tiles < slide.tiles:
            rng = np.random.default_rng([self.seed, self.epoch, index])
            rows = np.sort(rng.choice(slide.tiles, tiles, replace=False))
        if self.order == "raster":
            x, y = self.reader.read_coords(slide.path)[rows].T
            rows = rows[np.lexsort((x, y))]
        return rows

    def _known(self, index: int) -> int:
        if not 0 <= index < len(self.slides):
            raise IndexError(f"slide {index} was asked for, but there are {len(self.slides)}")
        return index


def _placed(values: torch.Tensor, at: np.ndarray, count: int, blank: int) -> torch.Tensor:
    """(count, W) with `values` at some rows and `blank` at the others."""
    if len(at) == count:
        return values
    out = values.new_full((count, values.shape[1]), blank)
    out[torch.from_numpy(at)] = values
    return out


def collate_slides(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch of samples, padded on the right with features 0 and coords -1.

    Returns:
        {"features": (B, Nmax, F), "coords": (B, Nmax, 2), "lengths": (B,) int64, "label": (B,) int64 of classes or float32,
        "index": (B,), "slide_id": list of B str}; "coords" and "label" where the samples have them.
    """
    batch = {"features": _padded([s["features"] for s in samples], 0)}
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
        return parts[0][None]  # a slide may be large: no copy
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=blank)
