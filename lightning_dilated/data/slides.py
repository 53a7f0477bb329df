"""A DataModule of whole slides: tile features and coordinates from .h5 or .pt files, with labels from a csv.

Shape letters: B batch, N positions of a slide (its tiles, and one for the class token), F features of a tile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lightning_dilated.data.coordinates import coordinate_faults, tile_step
from lightning_dilated.data.module import SPLITS, SplitDataModule
from lightning_dilated.data.paths import collect_files, path_list
from lightning_dilated.data.sampler import ResumableLoader
from lightning_dilated.data.slide_checks import Found, about_slides, by_name, check_sizes, each, matched, one_tile_size
from lightning_dilated.data.slide_files import BLOCK, H5, PT, Slide, SlideReader
from lightning_dilated.data.slide_labels import (
    Columns,
    Row,
    class_numbers,
    deal,
    numbers_of,
    read_rows,
    warn_of_untrained,
)
from lightning_dilated.data.slide_sequences import SlideSequences, collate_slides
from lightning_dilated.data.values import flag, fraction, one_of, share, whole_number
from lightning_dilated.sequence.spec import SequenceSpec

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
        split_column: column of train, val or test; "auto" is one called `split` where there is one; null deals by fractions.
        group_column: slides with the same value here, such as a patient's, stay in one split when dealt by fractions.
        classes: the labels in the order of their numbers; null sorts those there are.
        val_fraction, test_fraction: shares of the slides (or groups) for validation and test, from 0 to below 1. With
            test_fraction 1 and val_fraction 0, or a split column that says test everywhere, all slides are there to be
            tested or predicted, and none to train on.
        unmatched: "error" where a slide has no line or a line no slide; "leave_out" leaves those out with a warning.
        batch_size: B, slides of a batch on each device.
        class_token: put a blank row first.
        max_tiles: the most tiles of a slide; null for no limit.
        over: what to do with longer slides: "error", or "sample", a random subset, new in each epoch of training.
        order: "file", or "raster", by rows of the slide from its top, from left to right.
        features_name, coords_name: the arrays' names in a file; coords_name null reads slides without coordinates.
        feature_dtype: "float32", "float16" or "bfloat16".
        tile_size: side of a tile in pixels of the coordinates, against which they are checked; null takes what the file says
            (TRIDENT's patch_size_level0), and checks less where it says nothing.
        check_values: whose features are read before training: "first", one slide of each split, or "all"; they are checked
            again whenever they are read. Coordinates of all slides are.
        seed: fixes the training order, the splits and the subsets.
        num_workers: processes that load batches; 0 loads in the main process.
        pin_memory: copy batches to page-locked memory, so that nothing waits for them (null: where there is a GPU). Slides
            are large, and what is page-locked is not given back.

    Raises: TypeError or ValueError for values outside these ranges; data on disk is looked at by `check`.
    """

    collate = staticmethod(collate_slides)
    sequence_spec = SequenceSpec({"features": 1, "coords": 1}, whole=["lengths", "label", "index", "slide_id"])

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
    ) -> None:
        super().__init__(batch_size, seed, num_workers, pin_memory)
        self.paths = about_slides(path_list, [] if paths is None else paths)
        self.labels_csv = labels_csv
        kinds = ("classes", "numbers", "none")
        self.labels = one_of("data.labels", labels or ("none" if labels_csv is None else "classes"), kinds)
        if labels_csv is None and (self.labels != "none" or group_column):
            raise ValueError("data.labels and data.group_column need data.labels_csv, a csv with a line for each slide")
        label = None if self.labels == "none" else label_column
        self.columns = Columns(slide_column, label, split_column, group_column)
        self.classes_wanted = None if classes is None else [str(x) for x in classes]
        self.val_fraction = fraction("data.val_fraction", val_fraction)
        self.test_fraction = share("data.test_fraction", test_fraction)
        if self.val_fraction + self.test_fraction > 1:
            raise ValueError(
                f"data.val_fraction {val_fraction} and data.test_fraction {test_fraction} are above 1 together: lower one "
                "(to test or predict all slides, set data.val_fraction to 0 and data.test_fraction to 1)"
            )
        self.unmatched = one_of("data.unmatched", unmatched, ("error", "leave_out"))
        self.class_token = flag("data.class_token", class_token)
        self.max_tiles = None if max_tiles is None else whole_number("data.max_tiles", max_tiles, 1)
        self.over = one_of("data.over", over, ("error", "sample"))
        self.order = one_of("data.order", order, ("file", "raster"))
        if coords_name is None and order == "raster":
            raise ValueError(
                "data.order 'raster' needs coordinates, but data.coords_name is null: set one or the other"
            )
        dtype = DTYPES[one_of("data.feature_dtype", feature_dtype, tuple(DTYPES))]
        self.reader = SlideReader(features_name, coords_name, dtype)
        self.tile_size = None if tile_size is None else whole_number("data.tile_size", tile_size, 1)
        self.check_values = one_of("data.check_values", check_values, ("first", "all"))
        self._found: Found | None = None

    # -- what was found ----------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Look at every file's head, the csv, splits and labels, and at the values of the slides that `check_values` says.

        Raises: FileNotFoundError, PermissionError, ImportError or ValueError, with file, row or line, and what to change.
        """
        if self._found is not None:
            return
        files = about_slides(collect_files, self.paths, [*H5, *PT])
        rows = None if self.labels_csv is None else read_rows(self.labels_csv, self.columns)
        files, rows = matched(by_name(files), rows, str(self.labels_csv), self.unmatched == "leave_out")
        slides = each("slides cannot be used", self.reader.inspect, files)
        check_sizes(slides, self.max_tiles if self.over == "error" else None)
        self.tile_size = one_tile_size(slides, self.tile_size)
        splits, by_column = self._splits(slides, rows)
        found = Found(slides, splits, by_column, *self._numbers(rows))
        for split in SPLITS:
            if split not in found.splits and self.wanted(split, found) is None:
                raise ValueError(
                    f"the {split} split has none of the {len(slides)} slides: change data.val_fraction and "
                    "data.test_fraction, or add slides (or groups)"
                )
        if found.classes is not None and "train" in found.splits:
            warn_of_untrained(found.classes, found.labels or [], found.splits)
        first = [slides[found.splits.index(split)] for split in SPLITS if split in found.splits]
        each(
            "slides hold values that cannot be used",
            self._check_values,
            slides if self.check_values == "all" else first,
        )
        if self.reader.coords is not None:
            each("slides have coordinates that cannot be used", self._check_coords, slides)
        if "train" in found.splits:
            self.check_batch(found.splits.count("train"), 1)
        self._found = found

    @property
    def found(self) -> Found:
        """The slides with their splits and labels; looks them up on first use."""
        self.check()
        assert self._found is not None
        return self._found

    @property
    def feature_dim(self) -> int:
        """F."""
        return self.found.slides[0].width

    @property
    def classes(self) -> list[str] | None:
        """The classes in the order of their numbers; None without classes."""
        return self.found.classes

    @property
    def longest(self) -> int:
        """The most positions of a slide."""
        return max(data.length_of(i) for data in map(self.dataset, SPLITS) for i in range(len(data)))

    def dataset(self, split: str) -> SlideSequences:
        """The slides of "train", "val" or "test". Raises ValueError for another name."""
        one_of("split", split, SPLITS)
        found = self.found
        mine = [i for i, word in enumerate(found.splits) if word == split]
        labels = None if found.labels is None else [found.labels[i] for i in mine]
        slides, sample = [found.slides[i] for i in mine], (self.class_token, self.max_tiles, self.order, self.seed)
        return SlideSequences(self.reader, slides, labels, *sample)

    def describe(self) -> str:
        """One line: slides, tiles, features, slides of each split, and the classes with their numbers."""
        found = self.found
        tiles = [s.tiles for s in found.slides]
        counts = ", ".join(f"{found.splits.count(split):,} {split}" for split in SPLITS)
        text = f"{len(tiles):,} slides of {min(tiles):,} to {max(tiles):,} tiles, {self.feature_dim} features: {counts}"
        if found.classes is not None:
            text += "; classes " + ", ".join(
                f"{i} = {name} ({(found.labels or []).count(i):,})" for i, name in enumerate(found.classes)
            )
        return text

    def wanted(self, split: str, found: Found | None = None) -> str | None:
        """None where a split was asked for, else the setting that says it was not."""
        found = found or self.found
        if split in found.splits:
            return None
        if split == "train":  # asked for, unless every slide was meant for testing
            only = set(found.splits) == {"test"} and (found.by_column or self.test_fraction == 1)
            return "all slides are in the test split; see data.test_fraction and data.split_column" if only else None
        if found.by_column:
            return f"no line of {self.labels_csv} has the split {split!r}"
        return None if getattr(self, f"{split}_fraction") > 0 else f"data.{split}_fraction is 0; set it above 0"

    def train_dataloader(self) -> ResumableLoader:
        """The training slides; raises ValueError where none was asked for."""
        missing = self.wanted("train")
        if missing is not None:
            raise ValueError(f"there is no train split to fit on: {missing}")
        return super().train_dataloader()

    # -- the parts of check --------------------------------------------------------------------------------------------
    def _splits(self, slides: list[Slide], rows: list[Row] | None) -> tuple[list[str], bool]:
        """(split of each slide, whether the csv says them)."""
        if rows is not None and rows[0].split is not None:
            return [str(row.split) for row in rows], True
        grouped = rows is not None and self.columns.group is not None
        groups = [str(row.group) for row in rows or ()] if grouped else [slide.name for slide in slides]
        return deal(groups, self.val_fraction, self.test_fraction, self.seed), False

    def _numbers(self, rows: list[Row] | None) -> tuple[Any, list[str] | None]:
        """(labels, classes)."""
        if rows is None or self.labels == "none":
            return None, None
        if self.labels == "numbers":
            return numbers_of(str(self.labels_csv), rows), None
        classes, numbers = class_numbers(str(self.labels_csv), rows, self.classes_wanted)
        return numbers, classes

    def _check_values(self, slide: Slide) -> None:
        """Read a slide; raise ValueError for values that are not finite."""
        for start in range(0, slide.tiles, BLOCK):
            self.reader.read(slide.path, np.arange(start, min(start + BLOCK, slide.tiles)))

    def _check_coords(self, slide: Slide) -> None:
        """Read the coordinates of a slide; raise ValueError where they look wrong."""
        coords = self.reader.read_coords(slide.path)
        faults = coordinate_faults(coords, self.tile_size or slide.tile_size or tile_step(coords) or 1)
        if faults:
            raise ValueError(f"{slide.path}: {' '.join(faults)} (data.tile_size)")
