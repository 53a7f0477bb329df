"""The labels csv: splits by a column or by fractions, classes or numbers as labels, and names without a match."""

import csv
import time

import numpy as np
import pytest
import torch

from lightning_dilated.data import SlideDataModule
from lightning_dilated.data.opener import FileOpener
from lightning_dilated.ext.slides.labels import LONGEST, Columns, Row, class_numbers, read_rows

from .test_slides import grid, module, stored, table, write


def names(data: SlideDataModule) -> dict[str, list[str]]:
    return {split: [s.name for s in data.dataset(split).slides] for split in ("train", "val", "test")}


def test_fractions_follow_the_seed(folder):
    first, again, other = (names(module(folder, val_fraction=0.25, test_fraction=0.1, seed=s)) for s in (0, 0, 1))
    assert first == again != other and [len(x) for x in first.values()] == [8, 3, 1]
    assert sorted(name for split in first.values() for name in split) == [f"slide_{i:03d}" for i in range(12)]


def test_slides_of_a_patient_stay_together(folder):
    for seed in range(5):
        split_names = names(module(folder, group_column="patient", val_fraction=0.3, seed=seed))
        patients = [{int(name[-3:]) // 2 for name in split} for split in split_names.values()]
        assert all(patients) and sum(map(len, patients)) == 6


@pytest.mark.parametrize("column", ["split", "fold"])
def test_split_column(folder, tmp_path, column):
    words = ["train"] * 6 + ["val"] * 4 + ["test"] * 2
    lines = [f"slide_{i:03d}.svs,{i % 2},{word}" for i, word in enumerate(words)]
    path = table(tmp_path / "labels.csv", f"slide_id,label,{column}", *lines)
    data = module(folder, labels_csv=path, split_column="auto" if column == "split" else column)
    assert {k: len(v) for k, v in names(data).items()} == {"train": 6, "val": 4, "test": 2}
    dealt = names(module(folder, labels_csv=path, split_column=None))
    assert {k: len(v) for k, v in dealt.items()} == {"train": 10, "val": 1, "test": 1}


def test_split_column_without_a_test_split(folder, tmp_path):
    lines = [f"slide_{i:03d},{i % 2},{'val' if i > 8 else 'train'}" for i in range(12)]
    data = module(folder, labels_csv=table(tmp_path / "labels.csv", "slide_id,label,split", *lines))
    assert data.test_dataloader() == [] and "has the split 'test'" in data.wanted("test")


@pytest.mark.parametrize("by_column", [False, True], ids=["fraction", "column"])
def test_all_slides_for_testing(folder, tmp_path, by_column, recwarn):
    """Unlabelled slides are predicted in the order of files, even if they do not fill a batch. A fit raises an error."""
    options = {"batch_size": 13}
    if by_column:
        lines = [f"slide_{i:03d},{i % 3},test" for i in range(12)]
        options["labels_csv"] = table(tmp_path / "labels.csv", "slide_id,label,split", *lines)
    else:
        options |= {"val_fraction": 0, "test_fraction": 1}
    data = module(folder, **options)
    (batch,) = data.predict_dataloader()
    assert batch["slide_id"] == [f"slide_{i:03d}" for i in range(12)] and batch["index"].tolist() == list(range(12))
    assert not recwarn.list  # for example, that no class can be learned
    with pytest.raises(ValueError, match=r"no train split to fit on: all slides are in the test split.*test_fraction"):
        data.train_dataloader()


def test_one_slide_is_for_testing_only_where_that_was_asked(tmp_path):
    write(tmp_path / "a.h5", np.ones((3, 2), np.float32), grid(3))
    with pytest.raises(ValueError, match="the train split has none of the 1 slides"):
        SlideDataModule(str(tmp_path), val_fraction=0, test_fraction=0.9).check()
    data = SlideDataModule(str(tmp_path), val_fraction=0, test_fraction=1)
    assert names(data) == {"train": [], "val": [], "test": ["a"]} and data.val_dataloader() == []


LABELS = {
    "whole numbers": ("2 10 2 7", {}, ["2", "7", "10"], [0, 2, 0, 1]),
    "written as floats": ("0.0 1.0 0.0 10.0", {}, ["0", "1", "10"], [0, 1, 0, 2]),
    "words": ("luad lusc luad luad", {}, ["luad", "lusc"], [0, 1, 0, 0]),
    "in a given order": ("low high mid low", {"classes": ["low", "mid", "high"]}, ["low", "mid", "high"], [0, 2, 1, 0]),
    "negative": ("-1 1 1 -1", {}, ["-1", "1"], [0, 1, 1, 0]),
    "numbers": ("0.5 1 -2e3 7", {"labels": "numbers"}, None, [0.5, 1.0, -2000.0, 7.0]),
}


@pytest.mark.parametrize("name", LABELS)
def test_labels(tmp_path, name):
    words, options, classes, want = LABELS[name]
    for i in range(4):
        write(tmp_path / f"{i}.h5", np.ones((3, 2), np.float32), grid(3))
    path = table(tmp_path / "l.csv", "slide_id,label", *(f"{i},{word}" for i, word in enumerate(words.split())))
    data = SlideDataModule(str(tmp_path), path, val_fraction=0, test_fraction=0, batch_size=4, **options)
    assert data.classes == classes and [data.dataset("train")[i]["label"] for i in range(4)] == want
    batch = next(iter(data.train_dataloader()))
    assert batch["label"].dtype == (torch.float32 if classes is None else torch.int64)
    assert batch["label"].tolist() == [want[i] for i in batch["index"].tolist()]


def test_without_labels(folder):
    for data in (SlideDataModule(folder), module(folder, labels="none", group_column="patient")):
        assert "label" not in data.dataset("train")[0] and "label" not in next(iter(data.train_dataloader()))
        assert data.classes is None


def test_description(folder):
    data = module(folder)
    tiles = [len(stored(folder, f"slide_{i:03d}")[0]) for i in range(12)]
    assert data.describe() == (
        f"12 slides of {min(tiles)} to {max(tiles)} tiles, 4 features: 10 train, 1 val, 1 test; "
        "classes 0 = 0 (4), 1 = 1 (4), 2 = 2 (4)"
    )
    assert (data.feature_dim, data.longest) == (4, max(tiles) + 1)


def test_left_out_slides_are_told(folder, tmp_path):
    with open(f"{folder}/labels.csv") as file:
        lines = list(csv.reader(file))
    path = table(tmp_path / "labels.csv", *(",".join(x) for x in lines[:9]), "gone,1,0,patient_999")
    data = module(folder, labels_csv=path, unmatched="leave_out")
    with pytest.warns(
        UserWarning, match=r"5 slides are left out:\n.*line 10: no file is called gone\n.*slide_008.h5 has no"
    ):
        data.check()
    assert sum(len(data.dataset(split)) for split in ("train", "val", "test")) == 8


def test_padded_numbers_are_classes_of_their_own():
    rows = [Row(i + 2, f"s{i}", label, None, None) for i, label in enumerate(["01", "1", "10", "1"])]
    assert class_numbers("x.csv", rows, None)[1] == [class_numbers("x.csv", rows, None)[0].index(x.label) for x in rows]
    assert len(class_numbers("x.csv", rows, None)[0]) == 3


def test_underscores_are_no_digits():
    rows = [Row(i + 2, f"s{i}", label, None, None) for i, label in enumerate(["1_0", "10"])]
    assert sorted(class_numbers("x.csv", rows, None)[0]) == ["10", "1_0"]


def test_a_class_named_twice_is_refused():
    rows = [Row(2, "s", "0", None, None), Row(3, "t", "1", None, None)]
    with pytest.raises(ValueError, match=r"data\.classes names '1' more than once"):
        class_numbers("x.csv", rows, ["0", "1", "1"])


@pytest.mark.parametrize("remote", [False, True])
def test_a_line_has_a_bound(tmp_path, remote):
    path = tmp_path / "labels.csv"
    path.write_text("slide_id,label\na,0\n" + "," * LONGEST + "\n")
    address = f"file://{path}" if remote else str(path)
    with pytest.raises(ValueError, match=rf"labels\.csv, line 3 has more than {LONGEST:,} characters"):
        read_rows(address, Columns(), FileOpener(str(tmp_path / "cache")))


def test_a_header_of_many_columns_is_read_at_once(tmp_path):
    path = tmp_path / "labels.csv"
    header = ["slide_id", "label", *(f"c{i}" for i in range(200_000))]
    path.write_text("\n".join(",".join(x) for x in (header, ["a", "0", *["x"] * 200_000])))
    begin = time.perf_counter()
    assert len(read_rows(str(path), Columns())) == 1
    path.write_text(",".join([*header, "label"]) + "\n")
    with pytest.raises(ValueError, match="more than one column 'label'"):
        read_rows(str(path), Columns())
    path.write_text(",".join(header) + "\n")
    with pytest.raises(ValueError, match=r"has no column 'other'; its columns are .* and 199,962 more"):
        read_rows(str(path), Columns(label="other"))
    assert time.perf_counter() - begin < 10  # a count for each name would take 10 minutes
    rows = [Row(i, str(i), f"c{i}", None, None) for i in range(50_000)]
    begin = time.perf_counter()
    assert class_numbers("it", rows, [x.label for x in rows])[1] == list(range(50_000))
    assert time.perf_counter() - begin < 10
