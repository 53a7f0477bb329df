"""Regions of a BED file as data, the positions of windows in predictions, and data for testing only."""

import csv
import gzip
from pathlib import Path

import pytest
import torch

from lightning_dilated import LongNetLM, LongNetMLM
from lightning_dilated.callbacks import PredictionWriter
from lightning_dilated.data import GenomeDataModule

from ...models import PATTERN, trainer
from .test_fasta import codes, made, write
from .test_windows import other_strand

ONE, TWO = made(100), made(60, 1)
NOTHING = {"val_fraction": 0, "test_fraction": 0, "reverse_complement": 0}
LINES = [
    "# made by hand",
    "track name=x",
    "one\t5\t32\tfirst\t0\t+",
    "two\t3\t27\tsecond\t0\t-",
    "one 60 80",
    "",
    "two\t40\t60\tlast\t0\t.",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, one=ONE, two=TWO)
    (tmp_path / "r.bed").write_text("\n".join(LINES) + "\n")
    return tmp_path


def data(folder: Path, seq_len: int = 10, bed: str | None = "r.bed", **options) -> GenomeDataModule:
    bed = None if bed is None else str(folder / bed)
    return GenomeDataModule(str(folder / "a.fa"), seq_len, bed=bed, **{**NOTHING, **options})


#: windows of 10 bases; on strand -, they start at the region's last base
PLACES = [
    *(("one", 5, 1), ("one", 15, 1), ("two", 17, -1), ("two", 7, -1)),
    *(("one", 60, 0), ("one", 70, 0), ("two", 40, 0), ("two", 50, 0)),
]


@pytest.mark.parametrize("packed", [False, True])
def test_windows_of_regions_only(folder: Path, packed: bool) -> None:
    if packed:
        (folder / "r.bed.gz").write_bytes(gzip.compress((folder / "r.bed").read_bytes()))
    module = data(folder, bed="r.bed.gz" if packed else "r.bed")
    windows = module.dataset("train")
    assert [(windows.where(i)[1], windows.where(i)[2], windows.region_of(i).strand) for i in range(8)] == PLACES
    assert [windows.region_of(i).name for i in (0, 2, 4, 7)] == ["first", "second", "", "last"]
    ends = {"one": {1: 32, 0: 80}, "two": {-1: 3, 0: 60}}  # labels stay inside the region
    for i, (record, start, strand) in enumerate(PLACES):
        text = {"one": ONE, "two": TWO}[record]
        edge = ends[record][strand]
        bases = (
            other_strand(text[max(start - 1, edge) : start + 10]) if strand < 0 else text[start : min(start + 11, edge)]
        )
        want = codes(bases)
        assert windows[i]["tokens"].tolist() == want[:10]
        assert windows[i]["labels"].tolist() == [*want[1:], -100][:10]
        parts = [windows.read_ranges(i, (range(j, j + 5),)) for j in (0, 5)]
        assert torch.equal(torch.cat([x["labels"] for x in parts]), windows[i]["labels"])
    assert "2 records, 160 bases; 4 regions of 91 bases; windows of 10: 8 train" in module.describe()
    assert "11 bases lie in no whole window" in module.describe()
    plain, other = data(folder, bed=None).dataset("train"), data(folder).dataset("train")
    assert windows.fingerprint() == other.fingerprint() != plain.fingerprint()


def test_a_strand_of_its_own_is_not_drawn(folder: Path) -> None:
    windows = data(folder, reverse_complement=1.0).dataset("train")
    assert [windows.reversed(i) for i in range(8)] == [False, False, True, True, True, True, True, True]


def test_what_is_left_is_packed(folder: Path) -> None:
    windows = data(folder, pack_tokens=40).dataset("train")
    assert windows.lengths.tolist() == [10, 10, 7, 10, 10, 4, 10, 10, 10, 10]
    assert windows.region_of(5)[:4] == (1, 3, 7, -1) and windows[5]["tokens"].tolist() == codes(other_strand(TWO[3:7]))


def test_regions_lie_in_the_splits_of_their_bases(folder: Path) -> None:
    module = data(folder, seq_len=5, val_fraction=0.25, test_fraction=0.25)
    starts = {
        split: [(dataset.where(i)[1], dataset.where(i)[2]) for i in range(len(dataset))]
        for split in ("train", "val", "test")
        for dataset in [module.dataset(split)]
    }
    assert starts["train"] == [("one", x) for x in range(5, 30, 5)] + [("two", x) for x in (22, 17, 12, 7)]
    assert starts["val"] == [("one", 60), ("one", 65), ("one", 70), ("two", 40)]
    assert starts["test"] == [("one", 75), ("two", 45), ("two", 50), ("two", 55)]


def test_unknown_bases_of_a_minus_region(tmp_path: Path) -> None:
    write(tmp_path, one=ONE[:40] + "N" * 10 + ONE[50:])
    (tmp_path / "r.bed").write_text("one\t22\t62\tx\t0\t-\n")
    windows = data(tmp_path).dataset("train")
    assert [windows.where(i)[2] for i in range(len(windows))] == [52, 22] and windows.left_out == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("one 3", "line 1 has 2 columns, but a region has at least 3"),
        ("one 3 x", "line 1: start and stop are '3' and 'x'"),
        ("one 3 3", "line 1: start and stop are '3' and '3'"),
        ("one -3 3", "line 1: start and stop are '-3' and '3'"),
        ("one 3 9 x 0 *", r"line 1: the strand is '\*'"),
        ("three 3 9", "line 1: there is no record called 'three' .* There are: one, two"),
        ("two 3 61", "line 1: stop is 61, but two has 60 bases"),
        ("# nothing", "holds no region"),
        ("one 3 9\ntwo 3 60 long", r"1 region \(one:3-9 \(6\)\) is shorter than a window .* leave such regions out"),
    ],
)
def test_wrong_regions(folder: Path, line: str, message: str) -> None:
    (folder / "r.bed").write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        data(folder).check()


def test_two_records_of_one_name(folder: Path) -> None:
    write(folder, name="b.fa", one=made(50, 2))
    module = GenomeDataModule(str(folder), 10, bed=str(folder / "r.bed"), **NOTHING)
    with pytest.raises(ValueError, match="there are 2 records called 'one'"):
        module.check()


# -- predict -----------------------------------------------------------------------------------------------------------
def model(kind, **options):
    torch.manual_seed(0)
    return kind(PATTERN, vocab_size=5, dim=16, depth=1, num_heads=4, **options)


def predicted(folder: Path, module: GenomeDataModule, kind=LongNetLM, **options) -> list[dict[str, str]]:
    path = folder / "p.csv"
    trainer(callbacks=[PredictionWriter(str(path))]).predict(model(kind, **options), module)
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_predictions_say_where_windows_lie(folder: Path) -> None:
    rows = predicted(folder, data(folder, bed=None, test_fraction=1, batch_size=4))
    assert list(rows[0]) == ["index", "record", "start", "stop", "strand", "tokens", "bits_per_byte"]
    assert [(r["record"], r["start"], r["stop"], r["strand"]) for r in rows] == [
        ("one", str(x), str(x + 10), "+") for x in range(0, 100, 10)
    ] + [("two", str(x), str(x + 10), "+") for x in range(0, 60, 10)]


@pytest.mark.parametrize("kind", [LongNetLM, LongNetMLM])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packs"])
def test_predictions_of_both_strands(folder: Path, kind, packed: bool) -> None:
    """Each strand has a row, with the window's score on that strand. The strand of the region, if any, comes first."""
    options = {"pack_tokens": 30} if packed else {"batch_size": 3}
    rows = predicted(folder, data(folder, test_fraction=1, predict_strands="both", **options), kind)
    assert [row["index"] for row in rows] == [str(i) for i in range(len(rows))]
    assert [row["strand"] for row in rows[:2]] == ["+", "-"] and [row["region"] for row in rows[:2]] == ["first"] * 2
    minus = [row for row in rows if row["region"] == "second"]
    assert [row["strand"] for row in minus][:2] == ["-", "+"] and len(rows) == (20 if packed else 16)
    if kind is LongNetMLM:
        return
    for row in rows:
        text = {"one": ONE, "two": TWO}[row["record"]][int(row["start"]) : int(row["stop"])]
        window = text if row["strand"] == "+" else other_strand(text)
        score = model(kind).score([window])
        inner = -score.log_likelihood[0] / torch.log(torch.tensor(2.0))
        if int(row["tokens"]) == len(window) - 1:  # the last window of a region has no next base
            assert float(row["bits_per_byte"]) == pytest.approx(float(inner / score.bases[0]), rel=1e-5)
    assert any(int(row["tokens"]) < int(row["stop"]) - int(row["start"]) for row in rows)


def test_equal_windows_have_equal_masks(tmp_path: Path) -> None:
    """Windows with equal bases have equal predictions, at any position in the file."""
    write(tmp_path, one=ONE[:40], two=ONE[20:40] + ONE[:20])
    rows = predicted(tmp_path, GenomeDataModule(str(tmp_path), 20, test_fraction=1, batch_size=3), LongNetMLM)
    values = [(row["masked"], float(row["bits_per_token"])) for row in rows]
    assert values[0][0] == values[3][0]
    assert values[0][1] == pytest.approx(values[3][1], rel=1e-6) and values[1][1] == pytest.approx(
        values[2][1], rel=1e-6
    )


# -- everything is test data -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{"test_fraction": 1}, {"test_names": ["one", "two"]}], ids=["share", "names"])
def test_nothing_to_train_on(folder: Path, options: dict) -> None:
    module = GenomeDataModule(str(folder / "a.fa"), 10, **options)
    module.check()
    assert [len(module.dataset(split)) for split in ("train", "val", "test")] == [0, 0, 16]
    run = trainer(max_steps=1)
    (first, *_) = run.predict(model(LongNetLM), module)
    assert first["record"] == ["one"]
    run.test(model(LongNetLM), module, verbose=False)
    said = "test_fraction is 1" if "test_fraction" in options else "test_names holds all records"
    with pytest.raises(ValueError, match=f"there is no train split to fit on: data.{said}, so everything is test data"):
        run.fit(model(LongNetLM), module)
    with pytest.raises(ValueError, match="there is no train split to fit"):
        module.train_dataloader()
    with pytest.raises(ValueError, match="there is no val split to run on"):
        run.validate(model(LongNetLM), module, verbose=False)


def test_a_share_of_one_and_another(folder: Path) -> None:
    with pytest.raises(ValueError, match="test_fraction"):
        GenomeDataModule(str(folder / "a.fa"), 10, val_fraction=0.1, test_fraction=1)
    with pytest.raises(ValueError, match=r"or do without a val split: data.val_fraction 0, and no data.val_names"):
        GenomeDataModule(str(folder / "a.fa"), 10, val_fraction=0.05, test_fraction=0.5).check()
