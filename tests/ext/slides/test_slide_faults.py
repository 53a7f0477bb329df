"""Wrong slides, csv files and options: each error names the file, the row or line, and the remedy."""

import os
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from lightning_dilated.data import SlideDataModule

from .test_slides import grid, table, write

TILES, WIDTH = 12, 3


def features(tiles: int = TILES, width: int = WIDTH) -> np.ndarray:
    return np.random.default_rng(tiles).standard_normal((tiles, width)).astype(np.float32)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Six valid slides s0 to s5, and labels.csv."""
    for i in range(6):
        write(tmp_path / f"s{i}.h5", features(), grid(TILES), patch_size_level0=256)
    table(tmp_path / "labels.csv", "slide_id,label", *(f"s{i},{'ab'[i % 2]}" for i in range(6)))
    return tmp_path


def module(folder: Path, **options) -> SlideDataModule:
    return SlideDataModule(str(folder), **{"labels_csv": str(folder / "labels.csv"), "check_values": "all", **options})


def replaced(value: float, row: int) -> np.ndarray:
    out = features().astype(np.float64)
    out[row, 1] = value
    return out


def truncate(path: Path, keep: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])


def damaged(path: Path) -> None:
    """Overwrite compressed rows, and leave the header of the file intact."""
    with h5py.File(path, "w") as file:
        file.create_dataset("features", data=features(4000), chunks=(1000, WIDTH), compression="gzip")
        file["coords"] = grid(4000)
        offset, size = file["features"].id.get_chunk_info(1).byte_offset, file["features"].id.get_chunk_info(1).size
    data = bytearray(path.read_bytes())
    data[offset : offset + size] = bytes(size)
    path.write_bytes(data)


def groups(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_group("features")
        file["coords"] = grid(3)


def tiny(path: Path) -> None:
    torch.save({"features": torch.ones(3, WIDTH).numpy().tolist(), "coords": torch.zeros(3, 2)}, path)


F, C = features(), grid(TILES)
#: change to s3.h5 -> part of the error after the path
SLIDES = {
    "no HDF5": (lambda p: p.write_text("features,coords\n"), "not an HDF5 file.*write it again"),
    "no bytes": (lambda p: p.write_bytes(b""), "cannot be read"),
    "truncated": (lambda p: truncate(p, 0.5), "truncated, as by a copy.*copy or write it again"),
    "damaged": (damaged, "damaged or cut short"),
    "no features": (lambda p: write_as(p, feats=F, coords=C), "no 'features'; it holds coords, feats: set data.features_n"),
    "no coords": (lambda p: write(p, F), "no 'coords'; it holds features: set data.coords_name to .*without positions"),
    "nothing": (lambda p: write_as(p), "no 'features'; it holds nothing"),
    "a group": (groups, "'features' is a Group, not an array"),
    "lengths": (lambda p: write(p, F, C[:-1]), "'features' has 12 tiles and 'coords' has 11"),
    "width": (lambda p: write(p, features(TILES, 5), C), "has 5: all slides must come from one tile encoder"),
    "NaN": (lambda p: write(p, replaced(np.nan, 7), C), "tile 7 has a feature that is NaN in 'features'.*remove the tile"),
    "inf": (lambda p: write(p, replaced(-np.inf, 11), C), "tile 11 has a feature that is infinite"),
    "NaN and both inf": (lambda p: write(p, replaced(np.inf, 2) + replaced(-np.inf, 3), C), "tile 2 has .* infinite"),
    "overflow": (lambda p: write(p, replaced(1e300, 4), C), "tile 4 is 1e.300, too large for float32"),
    "empty": (lambda p: write(p, F[:0], C[:0]), r"the slide is empty, 'features' has shape \(0, 3\)"),
    "no width": (lambda p: write(p, F[:, :0], C), r"the slide is empty, 'features' has shape \(12, 0\)"),
    "one-dimensional": (lambda p: write(p, F[0], C), r"has shape \(3,\), but it must be \(tiles, features\)"),
    "several boxes": (lambda p: write(p, np.stack([F, F]), C), r"has shape \(2, 12, 3\)"),
    "integer features": (lambda p: write(p, F.astype(int), C), "'features' holds int64, but features must be floating"),
    "float coords": (lambda p: write(p, F, C * 0.25), "'coords' holds float64, but coordinates must be int.*micrometres"),
    "coords of three": (lambda p: write(p, F, np.zeros((TILES, 3), int)), r"'coords' has shape \(12, 3\), but it must be"),
    "coords of one": (lambda p: write(p, F, np.zeros(TILES, int)), r"'coords' has shape \(12,\), but it must be"),
    "negative coords": (lambda p: write(p, F, C - 300), "12 of 12 tiles have a negative coordinate"),
    "shared cells": (lambda p: write(p, F, C // 2, patch_size_level0=256), "128 apart.*set tile_size=128.*data.tile_size"),
    "listed twice": (lambda p: write(p, F, C // 1000), "12 tiles lie in only .* of the coordinates differ"),
}  # fmt: skip


def write_as(path: Path, **arrays) -> None:
    with h5py.File(path, "w") as file:
        for name, value in arrays.items():
            file[name] = value


@pytest.mark.parametrize("name", SLIDES)
def test_bad_h5(folder, name):
    spoil, message = SLIDES[name]
    spoil(folder / "s3.h5")
    with pytest.raises(ValueError, match=rf"(?s)s3\.h5.*{message}"):
        module(folder).check()


@pytest.mark.parametrize("name", ["NaN", "inf", "overflow", "damaged"])
def test_values_are_checked_whenever_they_are_read(folder, name):
    SLIDES[name][0](folder / "s3.h5")
    data = module(folder, check_values="first", split_column=None, val_fraction=0, test_fraction=0)
    data.check()
    dataset = data.dataset("train")
    with pytest.raises(ValueError, match=rf"(?s)s3\.h5.*{SLIDES[name][1]}"):
        dataset[3]
    assert dataset[2]["length"] == TILES + 1


ONES = torch.ones(3, 3)
PT = {
    "no torch file": (lambda p: p.write_text("1"), "not a file of plain tensors"),
    "no bytes": (lambda p: p.write_bytes(b""), "not a torch file, or cut short"),
    "truncated": (lambda p: (torch.save(torch.ones(99, 3), p), truncate(p, 0.5)), "not a torch file, or cut short"),
    "code": (lambda p: torch.save(module, p), "not a file of plain tensors; nothing else is loaded .weights_only."),
    "a list": (lambda p: torch.save([1], p), "holds a list, but it must be a tensor or a dict of tensors"),
    "other names": (lambda p: torch.save({"x": torch.ones(3, 3)}, p), "no 'features'; it holds x"),
    "lists": (tiny, "'features' is a list, not an array"),
    "no coords": (lambda p: torch.save(torch.ones(3, 3), p), "no 'coords'; it holds features: set data.coords_name"),
    "bool coords": (lambda p: torch.save({"features": ONES, "coords": ONES[:, :2] > 0}, p), "holds torch.bool"),
    "NaN": (lambda p: torch.save({"features": ONES * torch.nan, "coords": ONES[:, :2].int()}, p), "tile 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", PT)
def test_bad_pt(tmp_path, name):
    PT[name][0](tmp_path / "a.pt")
    with pytest.raises(ValueError, match=rf"(?s)a\.pt.*{PT[name][1]}"):
        SlideDataModule(str(tmp_path), val_fraction=0, test_fraction=0).check()


GOOD = [f"s{i},{'ab'[i % 2]}" for i in range(6)]
CSV = {
    "no label column": ("slide_id,grade", GOOD, {}, "no column 'label'; its columns are 'slide_id', 'grade': set data.l"),
    "no slide column": ("slide,label", GOOD, {}, "no column 'slide_id'.*set data.slide_column"),
    "semicolons": ("slide_id;label", [], {}, "no column 'slide_id'; its columns are 'slide_id;label'.*commas"),
    "no split column": ("slide_id,label", GOOD, {"split_column": "fold"}, "no column 'fold'.*set data.split_column"),
    "no group column": ("slide_id,label", GOOD, {"group_column": "case"}, "no column 'case'.*set data.group_column"),
    "column twice": ("slide_id,label,label", [], {}, "more than one column 'label'"),
    "long row": ("slide_id,label", [*GOOD[:2], "s2,a,b"], {}, r"line 4 has 3 values, but there are 2 columns.*quotes"),
    "short row": ("slide_id,label", [*GOOD[:2], "s2"], {}, "line 4 has 1 values"),
    "open quote": ("slide_id,label", ['s0,"a'], {}, "line 2: .*correct the quotes"),
    "two labels": ("slide_id,label", [*GOOD, "s1,a"], {}, "line 8: slide 's1' .* labels 'b' and 'a'; the first is line 3"),
    "named twice": ("slide_id,label", [*GOOD, "s1.h5,b"], {}, "line 8: slide 's1' is named a second time; the first"),
    "no label": ("slide_id,label", [*GOOD[:5], "s5,"], {}, "line 7: the value of 'label' is empty"),
    "nan label": ("slide_id,label", [*GOOD[:5], "s5,NaN"], {}, "line 7: the value of 'label' is empty"),
    "no slide": ("slide_id,label", [*GOOD, ",a"], {}, "line 8: the value of 'slide_id' is empty"),
    "split word": ("slide_id,label,split", ["s0,a,dev"], {}, "line 2: the split must be one of .*; got 'dev'"),
    "no split": ("slide_id,label,split", ["s0,a,"], {}, "line 2: the value of 'split' is empty"),
    "no row": ("slide_id,label", [], {}, "names no slide"),
    "missing file": ("slide_id,label", [*GOOD, "gone,a"], {}, "1 slides lack.*line 8: no file is called gone.*'leave_out'"),
    "missing row": ("slide_id,label", GOOD[:5], {}, "1 slides lack a file or a label.*s5.h5 has no line"),
    "nothing fits": ("slide_id,label", ["x,a", "y,b"], {"unmatched": "leave_out"}, "no file of data.paths is named in"),
    "fraction": ("slide_id,label", [f"s{i},{i / 2}" for i in range(6)], {}, "line 3: the label 0.5 is not a class"),
    "word": ("slide_id,label", GOOD, {"labels": "numbers"}, "line 2: the label 'a' is not a finite number"),
    "infinite": ("slide_id,label", [f"s{i},inf" for i in range(6)], {"labels": "numbers"}, "not a finite number"),
    "one class": ("slide_id,label", [f"s{i},a" for i in range(6)], {}, "all labels are 'a'; a classifier needs two"),
    "unknown class": ("slide_id,label", GOOD, {"classes": ["a", "c"]}, r"line 3: the label 'b' is not in data.classes"),
    "no training": ("slide_id,label,split", [f"{x},val" for x in GOOD], {}, "the train split has none of the 6 slides"),
}  # fmt: skip


@pytest.mark.parametrize("name", CSV)
def test_bad_csv(folder, name):
    header, lines, options, message = CSV[name]
    table(folder / "labels.csv", header, *lines)
    with pytest.raises(ValueError, match=rf"(?s)labels\.csv.*{message}|^{message}"):
        module(folder, **options).check()


def test_no_csv(folder):
    with pytest.raises(FileNotFoundError, match=r"none\.csv is not a file: pass the path of a csv"):
        module(folder, labels_csv=str(folder / "none.csv")).check()
    os.mkfifo(folder / "fifo.csv")
    with pytest.raises(ValueError, match=r"fifo\.csv is neither a regular file"):
        module(folder, labels_csv=str(folder / "fifo.csv")).check()
    (folder / "loop.csv").symlink_to("loop.csv")
    with pytest.raises(OSError, match=r"data\.labels_csv .*loop\.csv cannot be read .*pass the path of a csv"):
        module(folder, labels_csv=str(folder / "loop.csv")).check()
    (folder / "labels.csv").write_bytes(b"PK\x03\x04\xff\xfe")
    with pytest.raises(ValueError, match=r"not UTF-8 text.*not as a spreadsheet"):
        module(folder).check()


def test_class_without_a_training_slide(folder):
    lines = [f"s{i},{'abc'[i // 2]},{'val' if i > 3 else 'train'}" for i in range(6)]
    table(folder / "labels.csv", "slide_id,label,split", *lines)
    with pytest.warns(UserWarning, match="no training slide has the class c"):
        module(folder).check()


def test_all_bad_slides_are_told_at_once(folder):
    for i in range(6):
        (folder / f"s{i}.h5").write_text("x")
    with pytest.raises(ValueError, match=r"(?s)6 slides cannot be used:\n.*s0\.h5.*s4\.h5.*\nand 1 more$"):
        module(folder).check()


PATHS = {
    "nothing": (lambda f: str(f / "none"), FileNotFoundError, "does not exist; pass existing .h5 or .pt files"),
    "no slides": (lambda f: str(f / "empty"), FileNotFoundError, "no regular files ending in .h5"),
    "other files": (lambda f: [str(f / "labels.csv")], ValueError, "labels.csv is not a slide file"),
    "two of a name": (lambda f: [str(f / "s0.h5"), str(f / "empty" / "s0.pt")], ValueError, "are both slide 's0'"),
}


@pytest.mark.parametrize("name", PATHS)
def test_bad_paths(folder, name):
    (folder / "empty").mkdir()
    if name == "two of a name":
        torch.save(torch.ones(3, 3), folder / "empty" / "s0.pt")
    make, error, message = PATHS[name]
    with pytest.raises(error, match=message) as raised:
        SlideDataModule(make(folder)).check()
    assert "standard library" not in str(raised.value)


OPTIONS = {
    "no paths": ({"paths": None}, ValueError, "data.paths is an empty list; pass existing .h5"),
    "labels without a csv": ({"labels": "classes", "labels_csv": None}, ValueError, "need data.labels_csv"),
    "labels": (
        {"labels": "words"},
        ValueError,
        "data.labels must be one of classes, numbers, survival, none; got 'words'",
    ),
    "over": ({"over": "cut"}, ValueError, "data.over must be .*got .*'cut'"),
    "order": ({"order": "hilbert"}, ValueError, "data.order must be .*got .*'hilbert'"),
    "raster": ({"order": "raster", "coords_name": None}, ValueError, "'raster' needs coordinates"),
    "dtype": ({"feature_dtype": "int8"}, ValueError, "data.feature_dtype must be .*got .*'int8'"),
    "values": ({"check_values": "none"}, ValueError, "data.check_values"),
    "unmatched": ({"unmatched": True}, ValueError, "data.unmatched"),
    "max_tiles": ({"max_tiles": 0}, ValueError, "data.max_tiles must be .*got .*0"),
    "tile_size": ({"tile_size": 2.5}, TypeError, "data.tile_size must be .*got .*2.5"),
    "class_token": ({"class_token": 1}, TypeError, "data.class_token must be .*got .*1"),
    "fraction": ({"val_fraction": 1.0}, ValueError, "data.val_fraction must be .*got .*1"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_wrong_options(name):
    options, error, message = OPTIONS[name]
    with pytest.raises(error, match=message):
        SlideDataModule(**{"paths": "never looked at", "labels_csv": "nor this", **options})


CHECKS = {
    "too long": (
        {"max_tiles": 11},
        "6 of 6 slides have more than data.max_tiles = 11 tiles.*or set data.over to 'sample'",
    ),
    "tile size": ({"tile_size": 512}, "states that its tiles are 256 level-0 pixels wide, but data.tile_size is 512"),
    "batch": ({"batch_size": 9}, "has 4 samples, but one batch takes 9"),
    "fractions": ({"val_fraction": 0.6, "test_fraction": 0.4}, "the train split has none of the 6 slides"),
    "too much": (
        {"test_fraction": 1},
        "val_fraction 0.1 and data.test_fraction 1 add up to more than 1.*set data.val_fraction to 0",
    ),
    "split": ({}, "split must be one of train, val, test; got 'dev'"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_options_that_do_not_fit(folder, name):
    options, message = CHECKS[name]
    with pytest.raises(ValueError, match=message):
        module(folder, **options).dataset("dev" if name == "split" else "train")


def test_float16_overflow_names_the_remedy(folder):
    write(folder / "s3.h5", replaced(1e5, 4), C)
    with pytest.raises(ValueError, match=r"tile 4 is 1e\+05, too large for float16: set data.feature_dtype to"):
        module(folder, feature_dtype="float16").check()


def test_without_h5py(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match=r'pip install "lightning-dilated\[slides\]"'):
        module(folder).check()


def test_slides_of_two_magnifications(folder):
    write(folder / "s4.h5", features(), grid(TILES) * 2, patch_size_level0=512)
    with pytest.raises(ValueError, match=r"different level-0 widths .*states 256.*s4\.h5 states 512"):
        SlideDataModule(str(folder), str(folder / "labels.csv")).check()


def test_coordinates_of_every_slide_are_looked_at(folder):
    for i in range(6):
        write(folder / f"s{i}.h5", features(), grid(TILES) // (256 if i == 3 else 1), patch_size_level0=256)
    with pytest.raises(ValueError, match=r"s3\.h5.*look like tile numbers"):
        SlideDataModule(str(folder), str(folder / "labels.csv")).check()


def test_endings_in_capitals_count(folder):
    (folder / "s5.h5").rename(folder / "s5.H5")
    assert len(SlideDataModule(str(folder), str(folder / "labels.csv")).inventory.slides) == 6
