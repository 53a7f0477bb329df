"""SlideDataModule: whole slides as sequences of unequal length, of which a rank reads its tiles only.

A slide of T tiles is a sequence of N positions: T + 1 with a class token, whose blank row (features 0, coords -1) comes
first, so that tile t lies at position t + 1; T without.

Shape letters: B batch, N positions, T tiles, F features.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import Dataset

from lightning_dilated._validation import flag, integer, one_of, real
from lightning_dilated.data.files import MARK, collect_files, path_list
from lightning_dilated.data.module import SPLITS, SplitDataModule
from lightning_dilated.data.sampler import ResumableLoader
from lightning_dilated.data.slides.coordinates import (
    Inventory,
    by_name,
    check_sizes,
    comparable,
    coordinate_faults,
    each,
    grid_faults,
    inspected,
    matched,
    one_tile_size,
    overlap_faults,
    tile_step,
)
from lightning_dilated.data.slides.files import BLOCK, H5, PT, Slide, SlideReader
from lightning_dilated.data.slides.labels import (
    Columns,
    Row,
    check_groups,
    class_numbers,
    numbers_of,
    read_rows,
    split_groups,
    warn_of_one_class,
    warn_of_untrained,
)
from lightning_dilated.sequence.shard import SequenceSpec

_HINT = "pass existing .h5 or .pt files, directories or globs in data.paths"
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
        """Depends on names, sizes, settings and some tiles of each slide (`SlideReader.digest`); computed once."""
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
        tiles_at = np.concatenate([np.arange(r.start, r.stop, r.step) for r in ranges] or [np.empty(0, np.int64)])
        tiles_at = tiles_at - self.class_token
        slide, on_slide = self.slides[index], np.flatnonzero((tiles_at >= 0) & (tiles_at < tiles))
        features, coords = self.reader.read(slide.path, self._rows(index)[tiles_at[on_slide]])
        sample: dict[str, Any] = {"features": _placed(features, on_slide, len(tiles_at), 0)}
        if coords is not None:
            sample["coords"] = _placed(coords, on_slide, len(tiles_at), NOWHERE)
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


def _placed(values: torch.Tensor, rows: np.ndarray, count: int, blank: int) -> torch.Tensor:
    """(count, W) with `values` at some rows and `blank` at the others."""
    if len(rows) == count:
        return values
    out = values.new_full((count, values.shape[1]), blank)
    out[torch.from_numpy(rows)] = values
    return out


def collate_slides(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch of samples, padded on the right with features 0 and coords -1.

    Returns:
        {"features": (B, Nmax, F), "coords": (B, Nmax, 2), "lengths": (B,) int64, "label": (B,) int64 of classes or float32,
        "index": (B,), "slide_id": list of B str}; "coords" and "label" where the samples have them.
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
        return parts[0][None]  # a slide may be large: no copy
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=blank)


DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class SlideDataModule(SplitDataModule):
    """Slides as .h5 files with `features` (N, F) and `coords` (N, 2), as CLAM and TRIDENT write them, or .pt files.

    Batches are {"features": (B, Nmax, F), "coords": (B, Nmax, 2) int64, "lengths": (B,) int64, "label": (B,) int64 of
    classes or float32, "index": (B,), "slide_id": list of B names}, padded on the right with features 0 and coords -1.
    A slide's name is that of its file without the ending. With `class_token` a blank row of the same kind comes first,
    which `lengths` counts: a slide of T tiles has T + 1 positions, tile t at position t + 1. Under "ring_dilated" a rank
    reads the tiles of its part only (for B > 1, of its part of the positions of the longest slide).

    Args:
        paths: slide files, directories (read recursively) or globs. A .pt file holds a tensor (N, F), or a dict of tensors;
            features may be (1, N, F).
        labels_csv: a csv with a line for each slide; null for none, as in pretraining.
        labels: "classes" (whole numbers or words; see `classes`), "numbers" (regression) or "none"; null is "classes" with
            a csv and "none" without.
        slide_column: column of the slide's id, which is the file's name; the ending of a file may follow.
        label_column: column of the label.
        split_column: column of train, val or test; "auto" is one called `split` where there is one; null splits by
            fractions.
        group_column: slides with the same value here, such as a patient's, stay in one split; a split column that puts them
            into several is an error.
        classes: the labels in the order of their numbers; null sorts those there are.
        val_fraction, test_fraction: shares of the slides (or groups) for validation and test, from 0 to below 1. Which ones
            depends on `seed`; each split has its share of every class (see `labels.split_groups`). With
            test_fraction 1 and val_fraction 0, or a split column that says test everywhere, all slides are
            tested or predicted, and none is trained on.
        unmatched: "error" where a slide has no line or a line no slide; "leave_out" leaves those out with a warning, and
            slides without a tile too.
        batch_size: B, slides of a batch on each device.
        class_token: put a blank row first.
        max_tiles: the most tiles of a slide; null for no limit.
        over: what to do with longer slides: "error", or "sample", a random subset, new in each epoch of training.
        order: "file", or "raster", by rows of the slide from its top, from left to right.
        features_name, coords_name: the arrays' names in a file; coords_name null reads slides without coordinates.
        feature_dtype: "float32", "float16" or "bfloat16".
        tile_size: side of a tile (less what tiles overlap) in pixels of the coordinates, which are compared with it; null
            takes the file's (TRIDENT's patch_size_level0, CLAM's patch_size), or the model's if the file has none. CLAM
            does not write its step_size: where that is below the patch_size, set it here, in level-0 pixels.
        check_values: whose features are read before training: "first", one slide of each split, or "all"; they are checked
            again whenever they are read. Coordinates of all slides are.
        seed: fixes the training order, the splits and the subsets.
        num_workers: processes that load batches; 0 loads in the main process.
        pin_memory: copy batches to page-locked memory, so that copies to a GPU are asynchronous (null: if there is a
            GPU). Slides are large, and page-locked memory is not freed.
        pack_tokens: the most positions of a batch on each device: slides are filled into one row up to here, in place of
            `batch_size` padded ones; null does not pack. A larger slide is a batch by itself. Batches are then {"features":
            (1, N, F), "coords": (1, N, 2), "cu_seqlens": (D + 1,) int32 on the CPU, where the D slides begin and end, each
            with its blank row, "label", "index": (D,), "slide_id": list of D names}.

    Raises: TypeError or ValueError for values outside these ranges; data on disk is looked at by `check`.
    """

    collate = staticmethod(collate_slides)
    sequence_spec = SequenceSpec(
        {"features": 1, "coords": 1}, whole=["lengths", "cu_seqlens", "label", "index", "slide_id"]
    )

    def __init__(
        self,
        paths: str | list[str],
        labels_csv: str | None = None,
        labels: str | None = None,
        slide_column: str = "slide_id",
        label_column: str = "label",
        split_column: str | None = "auto",
        group_column: str | None = None,
        classes: list[str] | None = None,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        unmatched: str = "error",
        batch_size: int = 1,
        class_token: bool = True,
        max_tiles: int | None = None,
        over: str = "error",
        order: str = "file",
        features_name: str = "features",
        coords_name: str | None = "coords",
        feature_dtype: str = "float32",
        tile_size: int | None = None,
        check_values: str = "first",
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool | None = False,
        pack_tokens: int | None = None,
    ) -> None:
        super().__init__(batch_size, seed, num_workers, pin_memory, pack_tokens)
        self.paths = path_list([] if paths is None else paths, hint=_HINT)
        self.labels_csv = labels_csv
        kinds = ("classes", "numbers", "none")
        self.labels = one_of(labels or ("none" if labels_csv is None else "classes"), "data.labels", kinds)
        if labels_csv is None and (self.labels != "none" or group_column):
            raise ValueError("data.labels and data.group_column need data.labels_csv, a csv with a line for each slide")
        label = None if self.labels == "none" else label_column
        self.columns = Columns(slide_column, label, split_column, group_column)
        self.classes_wanted = None if classes is None else [str(x) for x in classes]
        self.val_fraction = real(val_fraction, "data.val_fraction", least=0, below=1)
        self.test_fraction = real(test_fraction, "data.test_fraction", least=0, most=1)
        if self.val_fraction + self.test_fraction > 1:
            raise ValueError(
                f"data.val_fraction {val_fraction} and data.test_fraction {test_fraction} are above 1 together: lower one "
                "(to test or predict all slides, set data.val_fraction to 0 and data.test_fraction to 1)"
            )
        self.unmatched = one_of(unmatched, "data.unmatched", ("error", "leave_out"))
        self.class_token = flag(class_token, "data.class_token")
        self.max_tiles = None if max_tiles is None else integer(max_tiles, "data.max_tiles", 1)
        self.over = one_of(over, "data.over", ("error", "sample"))
        self.order = one_of(order, "data.order", ("file", "raster"))
        if coords_name is None and order == "raster":
            raise ValueError(
                "data.order 'raster' needs coordinates, but data.coords_name is null: set one or the other"
            )
        dtype = DTYPES[one_of(feature_dtype, "data.feature_dtype", tuple(DTYPES))]
        self.reader = SlideReader(features_name, coords_name, dtype)
        self.tile_size = None if tile_size is None else integer(tile_size, "data.tile_size", 1)
        self.check_values = one_of(check_values, "data.check_values", ("first", "all"))
        self._inventory: Inventory | None = None
        self._logged_unchecked = False

    # -- the slides -------------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Check every file's head, the csv, splits and labels, and the values of the slides that `check_values` selects.

        Raises: FileNotFoundError, PermissionError, ImportError or ValueError, with file, row or line, and what to change.
        """
        if self._inventory is not None:
            return
        files = collect_files(self.paths, [*H5, *PT], _HINT)
        rows = None if self.labels_csv is None else read_rows(self.labels_csv, self.columns)
        files, rows = matched(by_name(files), rows, str(self.labels_csv), self.unmatched == "leave_out")
        slides, rows = inspected(self.reader.inspect, files, rows, self.unmatched == "leave_out")
        check_sizes(slides, self.max_tiles if self.over == "error" else None)
        self.tile_size = one_tile_size(slides, self.tile_size)
        labels, classes = self._numbers(rows)
        splits, by_column = self._splits(slides, rows, None if classes is None else labels)
        inventory = Inventory(slides, splits, by_column, labels, classes)
        self._check_splits(inventory)
        first = [slides[splits.index(split)] for split in SPLITS if split in splits]
        read = slides if self.check_values == "all" else first
        each("slides hold values that cannot be used", self._check_values, read)
        if self.reader.coords is not None:
            inventory.largest = each("slides have coordinates that cannot be used", self._check_coords, slides)
        if "train" in splits:
            self.check_batch(splits.count("train"), 1)
        self._inventory = inventory

    @property
    def inventory(self) -> Inventory:
        """The slides with their splits and labels; looks them up on first use."""
        self.check()
        assert self._inventory is not None
        return self._inventory

    @property
    def feature_dim(self) -> int:
        """F, the features of a tile."""
        return self.inventory.slides[0].width

    @property
    def classes(self) -> list[str] | None:
        """The classes in the order of their numbers; None without classes."""
        return self.inventory.classes

    @property
    def longest(self) -> int:
        """The most positions of a slide."""
        return max(data.length_of(i) for data in map(self.dataset, SPLITS) for i in range(len(data)))

    def dataset(self, split: str) -> SlideSequences:
        one_of(split, "split", SPLITS)
        inventory = self.inventory
        self._log_unchecked(None)
        indices = [i for i, name in enumerate(inventory.splits) if name == split]
        labels = None if inventory.labels is None else [inventory.labels[i] for i in indices]
        slides, sample = (
            [inventory.slides[i] for i in indices],
            (self.class_token, self.max_tiles, self.order, self.seed),
        )
        return SlideSequences(self.reader, slides, labels, *sample)

    def describe(self) -> str:
        """One line: slides, tiles, features, slides of each split, and the classes with their numbers."""
        inventory = self.inventory
        tiles = [s.tiles for s in inventory.slides]
        counts = ", ".join(f"{inventory.splits.count(split):,} {split}" for split in SPLITS)
        text = f"{len(tiles):,} slides of {min(tiles):,} to {max(tiles):,} tiles, {self.feature_dim} features: {counts}"
        if inventory.classes is not None:
            text += "; classes " + ", ".join(
                f"{i} = {name} ({(inventory.labels or []).count(i):,})" for i, name in enumerate(inventory.classes)
            )
        return text

    def wanted(self, split: str, inventory: Inventory | None = None) -> str | None:
        inventory = inventory or self.inventory
        if split in inventory.splits:
            return None
        if split == "train":  # requested, unless every slide is for testing
            only = set(inventory.splits) == {"test"} and (inventory.by_column or self.test_fraction == 1)
            return "all slides are in the test split; see data.test_fraction and data.split_column" if only else None
        if inventory.by_column:
            return f"no line of {self.labels_csv} has the split {split!r}"
        return None if getattr(self, f"{split}_fraction") > 0 else f"data.{split}_fraction is 0; set it above 0"

    def train_dataloader(self) -> ResumableLoader:
        """The training slides; raises ValueError if there are none."""
        missing = self.wanted("train")
        if missing is not None:
            raise ValueError(f"there is no train split to fit on: {missing}")
        return super().train_dataloader()

    def check_places(self, tile_size: int, grid: int | None = None) -> None:
        """Compare the coordinates of all slides with the cells of a model, and log in one line what could not be compared.

        A `SlideEncoder` that is trained or run with this module calls it. Files are read where neither they nor
        `data.tile_size` state a tile size; where one is stated, it must be the model's.

        Args:
            tile_size: side of a cell, in pixels of the coordinates.
            grid: cells along an axis; None for no limit.

        Raises:
            ValueError: naming the file, what was found and what to set.
        """
        inventory = self.inventory
        if self.reader.coords is None:
            raise ValueError(
                "the model places tiles by their coordinates, but data.coords_name is null: set it to the array of x and y "
                "in the slides, or train a LongNetClassifier, which needs none"
            )
        if self.tile_size not in (None, tile_size):
            raise ValueError(
                f"the model has tile_size={tile_size}, but the data's is {self.tile_size}: set the model's tile_size to "
                f"{self.tile_size}."
            )
        what, few = "slides do not fit the model", 0
        if self.tile_size is None:
            enough = each(what, lambda slide: self._compared(slide, tile_size, grid), inventory.slides)
            few = enough.count(False)
        elif grid is not None:
            beyond = [
                s for s, most in zip(inventory.slides, inventory.largest, strict=True) if most // tile_size >= grid
            ]
            each(what, lambda slide: self._check_grid(slide, tile_size, grid), beyond)
        self._log_unchecked(tile_size, few)

    # -- the parts of check --------------------------------------------------------------------------------------------
    def _splits(self, slides: list[Slide], rows: list[Row] | None, labels: list[int] | None) -> tuple[list[str], bool]:
        """(split of each slide, whether the csv has them)."""
        group = None if rows is None else self.columns.group
        if rows is not None and rows[0].split is not None:
            if group is not None:
                column = "split" if self.columns.split == "auto" else str(self.columns.split)
                check_groups(str(self.labels_csv), rows, column, group)
            return [str(row.split) for row in rows], True
        groups = [slide.name for slide in slides] if group is None else [str(row.group) for row in rows or ()]
        return split_groups(groups, labels, self.val_fraction, self.test_fraction, self.seed), False

    def _numbers(self, rows: list[Row] | None) -> tuple[Any, list[str] | None]:
        if rows is None or self.labels == "none":
            return None, None
        if self.labels == "numbers":
            return numbers_of(str(self.labels_csv), rows), None
        classes, numbers = class_numbers(str(self.labels_csv), rows, self.classes_wanted)
        return numbers, classes

    def _check_splits(self, inventory: Inventory) -> None:
        """Raise ValueError for a requested split without slides; warn of classes that a split lacks."""
        for split in SPLITS:
            if split not in inventory.splits and self.wanted(split, inventory) is None:
                raise ValueError(
                    f"the {split} split has none of the {len(inventory.slides)} slides: change data.val_fraction and "
                    "data.test_fraction, or add slides (or groups)"
                )
        if inventory.classes is None:
            return
        if "train" in inventory.splits:
            warn_of_untrained(inventory.classes, inventory.labels or [], inventory.splits)
        warn_of_one_class(inventory.classes, inventory.labels or [], inventory.splits, inventory.by_column)

    def _check_values(self, slide: Slide) -> None:
        """Read a slide; raise ValueError for values that are not finite."""
        for start in range(0, slide.tiles, BLOCK):
            self.reader.read(slide.path, np.arange(start, min(start + BLOCK, slide.tiles)))

    def _check_coords(self, slide: Slide) -> int:
        """The largest coordinate of a slide; raise ValueError where they look wrong."""
        coords = self.reader.read_coords(slide.path)
        size = self.tile_size or tile_step(coords) or 1
        faults = coordinate_faults(coords, size, extent=slide.extent) or overlap_faults(coords, size, slide)
        if faults:
            raise ValueError(f"{slide.path}: {' '.join(faults)} (data.tile_size)")
        return int(coords.max())

    def _check_grid(self, slide: Slide, tile_size: int, grid: int) -> None:
        """Raise ValueError for a slide that reaches beyond the grid."""
        faults = grid_faults(self.reader.read_coords(slide.path), tile_size, grid)
        if faults:
            raise ValueError(f"{slide.path}: {' '.join(faults)}")

    def _log_unchecked(self, tile_size: int | None, few: int = 0) -> None:
        """One line for all slides, once, about what the coordinates could not be compared with."""
        if self._logged_unchecked or self.reader.coords is None:
            return
        self._logged_unchecked = True
        slides, parts = self.inventory.slides, []
        if self.tile_size is None and tile_size is None:
            parts.append("whether they fit a tile size, as neither the files nor data.tile_size state one")
        if few:
            parts.append(
                f"whether {few:,} of {len(slides):,} slides were cut at a larger tile_size than the model's {tile_size}, as "
                "they have few neighbouring tiles and state no size"
            )
        without = sum(slide.extent is None for slide in slides)
        if without:
            parts.append(
                f"whether x and y are swapped in {without:,} of {len(slides):,} slides, which do not state the slide's size"
            )
        if parts:
            rank_zero_info(f"data: not checked of the coordinates: {'; '.join(parts)}")

    def _compared(self, slide: Slide, tile_size: int, grid: int | None) -> bool:
        """Whether the tiles' distances could show that the model's tile_size is too small; ValueError where they do."""
        coords = self.reader.read_coords(slide.path)
        faults = coordinate_faults(coords, tile_size, grid)
        if faults:
            raise ValueError(
                f"{slide.path}: {' '.join(faults)} (the model has tile_size={tile_size}; neither the file nor "
                "data.tile_size states one)"
            )
        return comparable(coords)
