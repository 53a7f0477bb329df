"""Synthetic slides in the shape of real ones, for tests, recipes and a first run.

Real slide features come from patients and cannot be distributed with a package. Synthetic slides share only their
shape: ragged numbers of tiles on a grid of pixels, a mask of tissue-like blobs, and noise that depends on the label.

Shape letters: T tiles of a slide, F features of a tile.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import torch

from lightning_dilated._validation import integer, one_of
from lightning_dilated.ext.slides.files import import_h5py


def write_synthetic_slides(
    folder: str | Path,
    slides: int = 12,
    tiles: tuple[int, int] = (40, 120),
    features: int = 16,
    classes: int = 2,
    tile_size: int = 256,
    signal: float = 1.0,
    seed: int = 0,
    kind: str = "h5",
) -> str:
    """Write slides slide_000, slide_001, ... and labels.csv (slide_id, label, score, patient) to a folder.

    Features are standard normal noise; tiles within a round spot (0.2 to 0.6 of the tissue) add `signal` times a
    direction of the slide's class. `score`, for regression, is the label plus the spot's share; each patient has two
    slides. The same arguments write the same values.

    Args:
        folder: created if missing; files of the same names are replaced.
        slides: number of slides.
        tiles: minimum and maximum number of tiles of a slide; T is drawn between them.
        features: F.
        classes: slides take labels 0 to classes - 1 in rotation.
        tile_size: side of a tile in level-0 pixels; coordinates are multiples of it.
        signal: length of the class direction that spots add, in standard deviations of the noise.
        seed: seed of all random values.
        kind: "h5" (as TRIDENT writes: `features`, `coords` with sizes of tile and slide) or "pt" (a dict of tensors).

    Returns:
        The path of labels.csv.

    Raises:
        TypeError, ValueError: for values outside these ranges.
        ImportError: if h5py is needed and missing.
    """
    for name, value in (("slides", slides), ("features", features), ("classes", classes), ("tile_size", tile_size)):
        integer(value, name, 1)
    least, most = (integer(x, "tiles", 1) for x in tiles)
    if least > most:
        raise ValueError(f"tiles must be (least, most), got {tiles}.")
    one_of(kind, "kind", ("h5", "pt"))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    directions = np.random.default_rng([seed]).standard_normal((classes, features))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    lines = []
    for i in range(slides):
        rng, label = np.random.default_rng([seed, i]), i % classes
        cells = _tissue(rng, int(rng.integers(least, most + 1)))
        spot = _spot(rng, cells)
        values = rng.standard_normal((len(cells), features))
        values[spot] += signal * directions[label]
        _write(folder / f"slide_{i:03d}.{kind}", values.astype(np.float32), cells * tile_size, tile_size)
        lines.append((f"slide_{i:03d}", label, f"{label + spot.mean():.4f}", f"patient_{i // 2:03d}"))
    path = folder / "labels.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("slide_id", "label", "score", "patient"), *lines])
    return str(path)


def _tissue(rng: np.random.Generator, tiles: int) -> np.ndarray:
    """Return the T cells (T, 2) int64 with the highest values of a smooth random field, in raster order."""
    side = int(np.ceil(np.sqrt(3 * tiles))) + 2
    y, x = np.mgrid[:side, :side] / side
    field = np.zeros((side, side))
    for _ in range(6):
        fx, fy, phase = rng.uniform(-3, 3), rng.uniform(-3, 3), rng.uniform(0, 2 * np.pi)
        field += np.cos(2 * np.pi * (fx * x + fy * y) + phase)
    field -= 6 * ((x - 0.5) ** 2 + (y - 0.5) ** 2)
    chosen = np.sort(np.argsort(-field, axis=None, kind="stable")[:tiles])
    corner = rng.integers(0, 8, 2)  # a margin of glass before the tissue
    return np.stack([chosen % side, chosen // side], 1) + corner


def _spot(rng: np.random.Generator, cells: np.ndarray) -> np.ndarray:
    """Return a mask (T,) bool of the tiles nearest to a random tile, 0.2 to 0.6 of all."""
    centre = cells[rng.integers(len(cells))]
    order = np.argsort(((cells - centre) ** 2).sum(1), kind="stable")
    spot = np.zeros(len(cells), dtype=bool)
    spot[order[: int(np.ceil(rng.uniform(0.2, 0.6) * len(cells)))]] = True
    return spot


def _write(path: Path, features: np.ndarray, coords: np.ndarray, tile_size: int) -> None:
    if path.suffix == ".pt":
        torch.save({"features": torch.from_numpy(features), "coords": torch.from_numpy(coords)}, path)
        return
    with import_h5py().File(path, "w") as file:
        file.create_dataset("features", data=features)
        width, height = (int(x) for x in coords.max(0) + tile_size)
        attributes = {"patch_size_level0": tile_size, "level0_width": width, "level0_height": height}
        file.create_dataset("coords", data=coords).attrs.update(attributes)
