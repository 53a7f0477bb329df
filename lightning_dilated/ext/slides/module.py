"""SlideDataModule: whole slides as sequences of unequal length; each rank reads only its own tiles.

Shape letters: B batch, N positions, T tiles, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_dilated._validation import flag, integer, one_of, real
from lightning_dilated.data.module import SPLITS, SplitDataModule
from lightning_dilated.data.opener import CACHE_GIB, FileOpener, is_url
from lightning_dilated.ext.files.files import collect_files, path_list
from lightning_dilated.ext.slides.coordinates import (
    Inventory,
    by_name,
    check_sizes,
    comparable,
    coordinate_faults,
    each,
    grid_fault,
    inspected,
    matched,
    one_tile_size,
    overlap_fault,
    tile_step,
)
from lightning_dilated.ext.slides.files import BLOCK, H5, PT, Slide, SlideReader
from lightning_dilated.ext.slides.labels import Columns, Row, class_numbers, numbers_of, read_rows, survival_of
from lightning_dilated.ext.slides.sequences import SlideSequences, collate_slides, side_by_side
from lightning_dilated.ext.slides.splits import (
    check_agreement,
    check_groups,
    split_folds,
    split_groups,
    warn_of_one_class,
    warn_of_untrained,
)
from lightning_dilated.sequence.shard import SequenceSpec

_HINT = "pass existing .h5 or .pt files, directories or globs in data.paths"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

#: an array for the shifts of zero slides
_EMPTY = np.empty((0, 2), np.int64)


class SlideDataModule(SplitDataModule):
    """Slides as .h5 files with `features` (N, F) and `coords` (N, 2), as CLAM and TRIDENT write them, or .pt files.

    Batches are {"features": (B, Nmax, F), "coords": (B, Nmax, 2) int64, "lengths": (B,) int64, "label", "index": (B,),
    "slide_id": list of B names}, padded on the right with features 0 and coords -1. Labels are (B,) int64 classes, (B,)
    float32 numbers, or (B, 2) float32 times and events. A slide's name is its file name without the suffix. With
    `class_token` each slide begins with a blank row, with the values of padding but counted by `lengths`: a slide of T
    tiles has T + 1 positions, with tile t at position t + 1. With strategy "ring_dilated" a rank reads only the tiles
    at its positions (for B > 1, its positions in the longest slide).

    Args:
        paths: slide files, directories (read recursively) or globs, or URLs of them. A .pt file by URL is read whole,
            an .h5 file only in part. A .pt file holds a tensor (N, F), or a dict of tensors; features may be (1, N, F).
        labels_csv: a csv (or its URL) with a line for each slide; null for none, as in pretraining.
        labels: "classes" (whole numbers or words; see `classes`), "numbers" (regression), "survival" (`time_column` and
            `event_column`) or "none"; null is "classes" with a csv and "none" without.
        slide_column: column of the slide's id, which is the file's name, with or without a suffix.
        label_column: column of the label.
        split_column: column of train, val or test; "auto" uses a column called `split` if there is one; null splits by
            fractions.
        group_column: slides with the same value in this column, such as a patient, stay in one split; a split column
            that puts them into several splits is an error.
        classes: the labels in the order of their numbers; null takes the classes of the tested model, or sorts the
            labels of the csv.
        val_fraction, test_fraction: shares of the slides (or groups) for validation and test, from 0 to below 1, chosen
            by `seed`; each split gets its share of every class (see `splits.split_groups`). With test_fraction 1 and
            val_fraction 0, or a split column with test in every line, all slides are tested or predicted.
        unmatched: "error" raises if a slide has no line or a line has no slide; "leave_out" drops such slides and lines
            with a warning, and also slides without a tile.
        batch_size: B, number of slides of a batch on each device.
        class_token: put a blank row first.
        max_tiles: maximum number of tiles of a slide; null for no limit.
        over: action for slides with more tiles: "error" raises; "sample" takes a new random subset in each epoch.
        order: order of a slide's tiles in the sequence, which changes what a dilated branch sees: "raster", by rows of
            the slide from top to bottom and left to right, or "file", as in the file. null takes the order that the
            model was trained with, and for a new model "raster" (without coordinates "file").
        features_name, coords_name: the arrays' names in a file; coords_name null reads slides without coordinates.
        feature_dtype: "float32", "float16" or "bfloat16".
        tile_size: side of a tile minus the overlap of tiles, in pixels of the coordinates, which are checked against
            it; null takes the size in the file (patch_size_level0 from TRIDENT, patch_size from CLAM), or else the
            model's. CLAM does not write its step_size: if that is below the patch_size, set it here, in level-0 pixels.
        check_values: check the features of the "first" slide of each split, or of "all" slides, before training.
            Features are checked again on every read. The coordinates of all slides are always checked.
        seed: fixes the training order, the splits and the subsets.
        num_workers: processes that load batches; 0 loads in the main process.
        pin_memory: copy batches to page-locked memory, so that copies to a GPU are asynchronous (null: if there is a
            GPU). Slides are large, and page-locked memory is not freed.
        pack_tokens: maximum number of positions of a batch on each device: slides are packed into one row, in place of
            `batch_size` padded ones; null does not pack. A larger slide gets its own batch. Batches are then
            {"features": (1, N, F), "coords": (1, N, 2), "cu_seqlens": (D + 1,) int32 on the CPU, bounds of the D slides
            with their blank rows, "label", "index": (D,), "slide_id": list of D names}.
        sampling: "all" takes each training slide once an epoch; "balanced" draws all classes equally often: an epoch
            has the same length and repeats slides of rare classes (`ResumableSampler`).
        folds: number of folds of a cross-validation, in place of `test_fraction`: slides (or groups) are assigned to folds
            with equal shares of every class. One fold is tested; `val_fraction` of the other slides is for validation.
        fold: number of the tested fold, from 0 to folds - 1.
        time_column, event_column: columns of survival: time to the event or to the last visit, in any unit, and 1 if
            the event happened at that time, else 0.
        merge_groups: make one sample of all slides of a group, such as a patient: one class token, then the tiles of
            each slide; coordinates are shifted so that slides are side by side. The sample is named after the group,
            and the labels of its slides must agree.
        cache_dir, cache_gib: for URLs, the folder of downloaded blocks (null: `remote` in the package's cache folder)
            and its maximum size in GiB, see `FileOpener`.

    Raises: TypeError or ValueError for values outside these ranges. The data on disk is checked later, by `check`.
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
        order: str | None = None,
        features_name: str = "features",
        coords_name: str | None = "coords",
        feature_dtype: str = "float32",
        tile_size: int | None = None,
        check_values: str = "first",
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool | None = False,
        pack_tokens: int | None = None,
        sampling: str = "all",
        folds: int | None = None,
        fold: int = 0,
        time_column: str = "time",
        event_column: str = "event",
        merge_groups: bool = False,
        cache_dir: str | None = None,
        cache_gib: float = CACHE_GIB,
    ) -> None:
        super().__init__(batch_size, seed, num_workers, pin_memory, pack_tokens)
        self.opener = FileOpener(cache_dir, cache_gib)
        self.paths = path_list([] if paths is None else paths, hint=_HINT)
        self.labels_csv = labels_csv
        kinds = ("classes", "numbers", "survival", "none")
        self.labels = one_of(labels or ("none" if labels_csv is None else "classes"), "data.labels", kinds)
        if labels_csv is None and (self.labels != "none" or group_column):
            raise ValueError("data.labels and data.group_column need data.labels_csv, a csv with a line for each slide")
        label = label_column if self.labels in ("classes", "numbers") else None
        survival = (time_column, event_column) if self.labels == "survival" else (None, None)
        self.columns = Columns(slide_column, label, split_column, group_column, *survival)
        self.merge_groups = flag(merge_groups, "data.merge_groups")
        if merge_groups and group_column is None:
            raise ValueError(
                "data.merge_groups makes one sample of the slides of a group: set data.group_column to the column of groups"
            )
        self.sampling = one_of(sampling, "data.sampling", ("all", "balanced"))
        if sampling == "balanced" and self.labels != "classes":
            raise ValueError(
                f"data.sampling 'balanced' draws classes equally often, but data.labels is {self.labels!r}: set "
                "data.sampling to 'all', or data.labels to 'classes' (with data.labels_csv)"
            )
        self.folds = None if folds is None else integer(folds, "data.folds", 2)
        self.fold = integer(fold, "data.fold", 0)
        if fold >= (folds or 1):
            raise ValueError(
                f"data.fold is {fold}, but data.folds is {folds}: folds are counted from 0 to data.folds - 1"
            )
        self.requested_classes = None if classes is None else [str(x) for x in classes]
        self.val_fraction = real(val_fraction, "data.val_fraction", least=0, below=1)
        self.test_fraction = real(test_fraction, "data.test_fraction", least=0, most=1)
        if self.val_fraction + self.test_fraction > 1:
            raise ValueError(
                f"data.val_fraction {val_fraction} and data.test_fraction {test_fraction} add up to more than 1: lower one "
                "(to test or predict all slides, set data.val_fraction to 0 and data.test_fraction to 1)"
            )
        self.unmatched = one_of(unmatched, "data.unmatched", ("error", "leave_out"))
        self.class_token = flag(class_token, "data.class_token")
        self.max_tiles = None if max_tiles is None else integer(max_tiles, "data.max_tiles", 1)
        self.over = one_of(over, "data.over", ("error", "sample"))
        self._order = None if order is None else one_of(order, "data.order", ("file", "raster"))
        if coords_name is None and order == "raster":
            raise ValueError(
                "data.order 'raster' needs coordinates, but data.coords_name is null: set data.order to 'file', or a name"
            )
        dtype = DTYPES[one_of(feature_dtype, "data.feature_dtype", tuple(DTYPES))]
        self.reader = SlideReader(features_name, coords_name, dtype, self.opener)
        self.tile_size = None if tile_size is None else integer(tile_size, "data.tile_size", 1)
        self.check_values = one_of(check_values, "data.check_values", ("first", "all"))
        self._inventory: Inventory | None = None
        self._logged_unchecked = False
        #: set by the model that runs: the classes and the order of tiles of its training, and its (tile_size, grid)
        self._trained_classes: list[str] | None = None
        self._trained_order: str | None = None
        self._places: tuple[int | None, int | None] = None, None

    # -- settings of a trained model -----------------------------------------------------------------------------------
    @property
    def order(self) -> str:
        """Order of a slide's tiles, "file" or "raster"."""
        return self._order or self._trained_order or ("file" if self.reader.coords is None else "raster")

    def follow_order(self, trained: str) -> None:
        """Take the order of tiles of the model's training; if the option `order` differs, keep the option and warn."""
        self._trained_order = one_of(trained, "the model's order of tiles", ("file", "raster"))
        if self.order != trained:
            rank_zero_warn(
                f"the model was trained with data.order {trained!r}, but data.order is {self.order!r} now, which changes "
                f"the model's outputs: set data.order to {trained!r}, or to null."
            )
        dataset: Any = None if self._train_loader is None else self._train_loader.dataset
        while dataset is not None and not isinstance(dataset, SlideSequences):
            dataset = getattr(dataset, "dataset", None)
        if dataset is not None:
            dataset.order = self.order

    def follow_classes(self, trained: list[str] | None) -> None:
        """Number the classes as in the model's training, unless `classes` is set."""
        if trained != self._trained_classes and self.requested_classes is None:
            self._inventory = None
        self._trained_classes = trained

    def setup(self, stage: str | None = None) -> None:
        """Set up as SplitDataModule does; outside of `fit`, use the classes of the trained model."""
        self._trained_order = None
        if self.trainer is not None and stage != "fit":
            self.follow_classes(getattr(self.trainer.lightning_module, "classes", None) or self._trained_classes)
        elif stage == "fit":
            self.follow_classes(None)
        super().setup(stage)

    def state_dict(self) -> dict[str, Any]:
        """Return SplitDataModule's state with the order of tiles."""
        state = super().state_dict()
        return {**state, "order": self.order} if state else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load SplitDataModule's state and the order of tiles ("file" in old checkpoints), unless `order` is set."""
        if "train" in state_dict:
            self.follow_order(state_dict.get("order", "file"))
        super().load_state_dict(state_dict)

    # -- the slides -------------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Check every file's header, the csv, splits and labels, and the values that `check_values` selects.

        Raises: FileNotFoundError, PermissionError, ImportError or ValueError, with file, row or line, and the remedy.
        """
        if self._inventory is not None:
            return
        files = collect_files(self.paths, [*H5, *PT], _HINT, self.opener)
        rows = None if self.labels_csv is None else read_rows(self.labels_csv, self.columns, self.opener)
        files, rows = matched(by_name(files), rows, str(self.labels_csv), self.unmatched == "leave_out")
        self.opener.look_up(files)
        if urls := [x for x in files if is_url(x) and x.lower().endswith(H5)]:
            self.opener.remote.prefetch(urls)
        slides, rows = inspected(self.reader.inspect, files, rows, self.unmatched == "leave_out")
        check_sizes(slides, self.max_tiles if self.over == "error" else None)
        self.tile_size = one_tile_size(slides, self.tile_size)
        labels, classes = self._numbers(rows)
        group = None if rows is None else self.columns.group
        groups = [slide.name for slide in slides] if group is None else [str(row.group) for row in rows or ()]
        if self.merge_groups and rows is not None:
            check_agreement(str(self.labels_csv), rows, labels, str(group))
        splits, by_column = self._splits(rows, groups, self._strata(labels))
        inventory = Inventory(slides, splits, by_column, labels, classes, groups)
        self._check_splits(inventory)
        first = [slides[splits.index(split)] for split in SPLITS if split in splits]
        read = slides if self.check_values == "all" else first
        each("slides hold values that cannot be used", self._check_values, read)
        if self.reader.coords is not None:
            inventory.largest = each("slides have coordinates that cannot be used", self._largest, slides)
        if "train" in splits:
            self.check_batch(len(self._samples("train", inventory)), 1)
        self._inventory = inventory

    @property
    def inventory(self) -> Inventory:
        """The slides with their splits and labels; looks them up on first use."""
        self.check()
        assert self._inventory is not None
        return self._inventory

    @property
    def feature_dim(self) -> int:
        """F, the number of features of a tile."""
        return self.inventory.slides[0].width

    @property
    def classes(self) -> list[str] | None:
        """The classes in the order of their numbers, or None."""
        return self.inventory.classes

    @property
    def longest(self) -> int:
        """Maximum number of positions of a sample."""
        return max(data.length_of(i) for data in map(self.dataset, SPLITS) for i in range(len(data)))

    def dataset(self, split: str) -> SlideSequences:
        one_of(split, "split", SPLITS)
        inventory, samples = self.inventory, self._samples(split)
        self._log_unchecked(None)
        indices = [i for members in samples.values() for i in members]
        slides = [inventory.slides[i] for i in indices]
        options: dict[str, Any] = {}
        if self.merge_groups:
            place = {i: at for at, i in enumerate(indices)}
            options["groups"] = {name: [place[i] for i in members] for name, members in samples.items()}
            if self.reader.coords is not None:
                options["shifts"] = np.concatenate([self._shifts(members) for members in samples.values()] or [_EMPTY])
        settings = self.class_token, self.max_tiles, self.order, self.seed
        return SlideSequences(self.reader, slides, self._labels(split), *settings, **options)

    def _labels(self, split: str) -> list[Any] | None:
        labels = self.inventory.labels
        return None if labels is None else [labels[members[0]] for members in self._samples(split).values()]

    def _samples(self, split: str, inventory: Inventory | None = None) -> dict[str, list[int]]:
        """Return {name: slides} of each sample of a split: one slide, or the slides of a group."""
        inventory = inventory or self.inventory
        out: dict[str, list[int]] = {}
        for i, (slide, group) in enumerate(zip(inventory.slides, inventory.groups, strict=True)):
            if inventory.splits[i] == split:
                out.setdefault(group if self.merge_groups else slide.name, []).append(i)
        return out

    def _shifts(self, members: list[int]) -> np.ndarray:
        """Return shifts (slides, 2) of a sample's slides, in pixels; they are multiples of the model's cells."""
        tile_size, grid = self._places
        cell = self.tile_size or tile_size or 1
        sizes = np.array([self.inventory.largest[i] for i in members], np.int64) // cell + 1
        return side_by_side(sizes, grid) * cell

    def groups(self, split: str) -> list[str]:
        """Return the group of each sample of a split, such as its patient; without groups, the sample's name."""
        return [self.inventory.groups[members[0]] for members in self._samples(split).values()]

    @property
    def class_counts(self) -> list[int] | None:
        """Number of training samples of each class, or None without classes."""
        if self.classes is None:
            return None
        numbers = self._labels("train") or []
        return [numbers.count(c) for c in range(len(self.classes))]

    @property
    def training_survival(self) -> list[tuple[float, float]] | None:
        """Pairs (time, event) of the training samples, or None for other labels."""
        return self._labels("train") if self.labels == "survival" else None

    def balanced_classes(self) -> list[int] | None:
        """Return the class of each training sample if all classes are drawn equally often, else None."""
        return self._labels("train") if self.sampling == "balanced" else None

    def describe(self) -> str:
        """Return one line: slides, tiles, features, slides of each split, and the classes with their numbers."""
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
        if split == "train":  # training is requested, unless all slides are for testing
            only = set(inventory.splits) == {"test"} and (inventory.by_column or self.test_fraction == 1)
            return "all slides are in the test split; see data.test_fraction and data.split_column" if only else None
        if inventory.by_column:
            return f"no line of {self.labels_csv} has the split {split!r}"
        if self.folds is not None and split == "test":
            return None
        return None if getattr(self, f"{split}_fraction") > 0 else f"data.{split}_fraction is 0; set it above 0"

    def check_places(self, tile_size: int, grid: int | None = None) -> None:
        """Compare the coordinates of all slides with the cells of a model, and log in one line what cannot be compared.

        A `SlideEncoder` calls this method before it uses the data. If neither the files nor `data.tile_size` state a
        tile size, all coordinates are read and compared; a stated size must equal the model's.

        Args:
            tile_size: side of a cell, in pixels of the coordinates.
            grid: cells along an axis; None for no limit.

        Raises: ValueError with the file, the fault and the remedy.
        """
        inventory = self.inventory
        if self.reader.coords is None:
            raise ValueError(
                "the model places tiles by their coordinates, but data.coords_name is null: set it to the array of x and y "
                "in the slides, or train a LongNetClassifier, which needs none"
            )
        self._places = tile_size, grid
        if self.tile_size not in (None, tile_size):
            raise ValueError(
                f"the model has tile_size={tile_size}, but the data's is {self.tile_size}: set the model's tile_size to "
                f"{self.tile_size}."
            )
        what, few = "slides do not fit the model", 0
        if self.tile_size is None:
            note = f" (the model has tile_size={tile_size}; neither the file nor data.tile_size states one)"
            faults = partial(coordinate_faults, tile_size=tile_size, grid=grid)
            few = each(what, lambda s: comparable(self._coords(s, faults, note)), inventory.slides).count(False)
        elif grid is not None:
            beyond = [
                s for s, most in zip(inventory.slides, inventory.largest, strict=True) if max(most) // tile_size >= grid
            ]
            each(what, lambda s: self._coords(s, lambda coords: [grid_fault(coords, tile_size, grid)]), beyond)
        if self.merge_groups and grid is not None:
            self._check_merged(tile_size, grid)
        self._log_unchecked(tile_size, few)

    def _check_merged(self, tile_size: int, grid: int) -> None:
        """Raise ValueError for a group with slides that do not fit the grid side by side."""
        for split in SPLITS:
            for name, members in self._samples(split).items():
                ends = self._shifts(members) + np.array([self.inventory.largest[i] for i in members])
                most = int(ends.max()) // tile_size
                if most >= grid:
                    raise ValueError(
                        f"the {len(members)} slides of {self.columns.group} {name!r} take {most + 1:,} cells of {tile_size} "
                        f"pixels side by side, but the model has positions for {grid:,}: set a grid (model.grid) of at "
                        f"least {most + 1}, or data.merge_groups to false"
                    )

    # -- the parts of check --------------------------------------------------------------------------------------------
    def _splits(self, rows: list[Row] | None, groups: list[str], strata: list[int] | None) -> tuple[list[str], bool]:
        """Return the split of each slide, and whether the splits are from the csv."""
        if rows is not None and rows[0].split is not None:
            column = "split" if self.columns.split == "auto" else str(self.columns.split)
            if self.folds is not None:
                raise ValueError(
                    f"data.folds deals the slides to folds, but the column {column!r} of {self.labels_csv} gives them "
                    "splits already: set data.split_column to null, or leave data.folds out"
                )
            if self.columns.group is not None:
                check_groups(str(self.labels_csv), rows, column, self.columns.group)
            return [str(row.split) for row in rows], True
        if self.folds is not None:
            return split_folds(groups, strata, self.folds, self.fold, self.val_fraction, self.seed), False
        return split_groups(groups, strata, self.val_fraction, self.test_fraction, self.seed), False

    def _strata(self, labels: list[Any] | None) -> list[int] | None:
        """Return the labels that splits are balanced by: classes, or for survival whether a slide has an event."""
        if self.labels == "survival":
            return [int(event) for _, event in labels or ()]
        return labels if self.labels == "classes" else None

    def _numbers(self, rows: list[Row] | None) -> tuple[Any, list[str] | None]:
        if rows is None or self.labels == "none":
            return None, None
        if self.labels == "numbers":
            return numbers_of(str(self.labels_csv), rows), None
        if self.labels == "survival":
            return survival_of(str(self.labels_csv), rows, self.columns), None
        known = self.requested_classes or self._trained_classes
        classes, numbers = class_numbers(str(self.labels_csv), rows, known, trained=self.requested_classes is None)
        return numbers, classes

    def _check_splits(self, inventory: Inventory) -> None:
        """Raise ValueError for a requested split without slides; warn about classes that a split lacks."""
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

    def _coords(self, slide: Slide, faults_of: Callable[[np.ndarray], Sequence[str]], note: str = "") -> np.ndarray:
        """Return all coordinates of a slide; raise ValueError with its faults, followed by `note`."""
        coords = self.reader.read_coords(slide.path)
        faults = [fault for fault in faults_of(coords) if fault]
        if faults:
            raise ValueError(f"{slide.path}: {' '.join(faults)}{note}")
        return coords

    def _largest(self, slide: Slide) -> tuple[int, int]:
        """Return the largest coordinates (x, y) of a slide, after a check of all of them."""

        def faults(coords: np.ndarray) -> list[str]:
            size = self.tile_size or tile_step(coords) or 1
            return coordinate_faults(coords, size, extent=slide.extent) or [overlap_fault(coords, size, slide)]

        x, y = self._coords(slide, faults, " (data.tile_size)").max(0).tolist()
        return x, y

    def _log_unchecked(self, tile_size: int | None, few: int = 0) -> None:
        """Log once which checks of coordinates were not possible; `few`: slides with too few neighbouring tiles."""
        if self._logged_unchecked or self.reader.coords is None:
            return
        self._logged_unchecked = True
        slides, parts = self.inventory.slides, []
        if self.tile_size is None and tile_size is None:
            parts.append("whether they fit a tile size, because neither the files nor data.tile_size state one")
        if few:
            parts.append(
                f"whether {few:,} of {len(slides):,} slides were cut at a larger tile_size than the model's {tile_size}: "
                "they have few neighbouring tiles and state no size"
            )
        without = sum(slide.extent is None for slide in slides)
        if without:
            parts.append(
                f"whether x and y are swapped in {without:,} of {len(slides):,} slides, which do not state the slide's size"
            )
        if parts:
            rank_zero_info(f"data: not checked for the coordinates: {'; '.join(parts)}")
