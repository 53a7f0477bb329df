"""GenomeDataModule on phage lambda and on generated records: windows, splits, N, short records, and early errors."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_dilated.data import GenomeDataModule

PACKED = Path(__file__).parents[2] / "data" / "lambda_virus.fa.gz"
LAMBDA = "".join(gzip.decompress(PACKED.read_bytes()).decode().split("\n")[1:])
NAME = "gi|9626243|ref|NC_001416.1|"


def codes(bases: str) -> list[int]:
    return ["ACGTN".index(base) for base in bases.upper()]


def write(folder: Path, width: int = 10, end: str = "\n", name: str = "a.fa", **records: str) -> str:
    lines = []
    for record, bases in records.items():
        lines += [f">{record} some words", *(bases[i : i + width] for i in range(0, len(bases), width))]
    (folder / name).write_bytes((end.join(lines) + end).encode())
    return str(folder / name)


def made(size: int, seed: int = 0) -> str:
    return "".join(np.random.default_rng(seed).choice(list("ACGT"), size))


def test_the_genome_of_phage_lambda(lambda_virus: str) -> None:
    """Published facts about NC_001416: its length, and the count of each base."""
    assert len(LAMBDA) == 48502 and [LAMBDA.count(base) for base in "ACGT"] == [12334, 11362, 12820, 11986]
    data = GenomeDataModule(lambda_virus, seq_len=500, val_fraction=0, test_fraction=0, reverse_complement=0)
    batches = list(data.train_dataloader())
    assert sorted(int(batch["index"]) for batch in batches) == list(range(97))
    for batch in batches:
        start = int(batch["index"]) * 500
        assert batch["tokens"].tolist() == [codes(LAMBDA[start : start + 500])]
        labels = codes(LAMBDA[start + 1 : start + 501])
        assert batch["labels"].tolist() == [labels]
        assert batch["tokens"].dtype == batch["labels"].dtype == torch.int64
    assert data.describe() == (
        "1 files, 1 records, 48,502 bases; windows of 500: 97 train, 0 val, 0 test; 2 bases lie in no whole window, and "
        "0 windows were left out for their N"
    )
    assert data.vocab_size == 5


def test_compressed_reads_alike(lambda_virus: str, tmp_path: Path) -> None:
    plain, packed = (
        GenomeDataModule(path, 2000, cache_dir=str(tmp_path / "c")) for path in (lambda_virus, str(PACKED))
    )
    for split, count in (("train", 21), ("val", 1), ("test", 1)):
        left, right = plain.dataset(split), packed.dataset(split)
        assert len(left) == len(right) == count and left.fingerprint() == right.fingerprint()
        assert all(torch.equal(left[i]["tokens"], right[i]["tokens"]) for i in range(count))
    # 43,652 bases for training, then 2,425 for validation and 2,425 for testing
    assert plain.dataset("val")[0]["tokens"].tolist() == codes(LAMBDA[43652:45652])
    assert plain.dataset("test").where(0) == (lambda_virus, NAME, 46077)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("width", [7, 10, 64, 1000])
def test_any_layout_of_lines(tmp_path: Path, width: int, end: str) -> None:
    one, two = made(100), made(43, 1)
    path = write(tmp_path, width, end, one=one, two=two)
    data = GenomeDataModule(path, 10, val_fraction=0, test_fraction=0, reverse_complement=0).dataset("train")
    assert len(data) == 14
    for index in range(14):
        bases, start = (one, index * 10) if index < 10 else (two, index * 10 - 100)
        labels = codes(bases[start + 1 : start + 11])
        assert data[index]["tokens"].tolist() == codes(bases[start : start + 10])
        assert data[index]["labels"].tolist() == labels + [-100] * (
            10 - len(labels)
        )  # the record ends here, so there is no label
        assert data.where(index) == (path, "one" if index < 10 else "two", start)


def test_letters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, one="ACGTNacgtnUuRYSWKMBDHVryswkmbdhv", two="ACGTR")
    with caplog.at_level("INFO"):
        data = GenomeDataModule(path, 4, val_fraction=0, test_fraction=0, reverse_complement=0, n_policy="token")
        tokens = torch.cat([data.dataset("train")[i]["tokens"] for i in range(8)])
    assert tokens.tolist() == [0, 1, 2, 3, 4] * 2 + [3, 3] + [4] * 20
    messages = [record.message for record in caplog.records]
    assert any(
        "21 IUPAC letters other than A C G T U N were read as N in 2 records, most in one (20)" in x for x in messages
    )


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"n_policy": "token"}, [0, 1, 2, 3, 4, 5]),
        ({"max_n_fraction": 1}, [0, 1, 2, 3, 4, 5]),
        ({"max_n_fraction": 0.9}, [0, 1, 3, 4, 5]),
        ({"max_n_fraction": 0.3}, [0, 1, 4, 5]),
        ({}, [0, 5]),
        ({"max_n_fraction": 0}, [0]),
    ],
)
def test_unknown_bases(tmp_path: Path, options: dict, kept: list[int]) -> None:
    """Windows of 10 bases have 0, 3, 10, 7, 2 and 1 unknown bases, in runs that cross their edges."""
    bases = list(made(62))
    for start, stop in ((17, 37), (42, 43), (44, 45), (59, 61)):
        bases[start:stop] = "N" * (stop - start)
    path = write(tmp_path, one="".join(bases))
    data = GenomeDataModule(path, 10, val_fraction=0, test_fraction=0, reverse_complement=0, **options)
    windows = data.dataset("train")
    assert [windows.where(i)[2] // 10 for i in range(len(windows))] == kept
    assert data.describe().endswith(f"{6 - len(kept)} windows were left out for their N")
    for index, window in enumerate(kept):
        start = window * 10
        assert windows[index]["tokens"].tolist() == codes("".join(bases[start : start + 10]))
        labels = [-100 if code == 4 else code for code in codes("".join(bases[start + 1 : start + 11]))]
        assert windows[index]["labels"].tolist() == labels


def test_n_counts_do_not_depend_on_the_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bases = "".join(np.random.default_rng(2).choice(list("ACGTN"), 300))
    path = write(tmp_path, 7, one=bases)
    counts = []
    for chunk in (1, 5, 64, 1 << 22):
        monkeypatch.setattr("lightning_dilated.ext.genomes.files._CHUNK", chunk)
        (record,) = GenomeDataModule(path, 10, n_policy="token").genome.records
        counts.append((record.checksum, record.unknown_before(np.arange(301)).tolist()))
    assert all(x == counts[0] for x in counts)
    assert counts[0][1] == [bases[:stop].count("N") for stop in range(301)]


def test_records_of_their_own_splits(tmp_path: Path) -> None:
    path = write(tmp_path, one=made(100), two=made(50, 1), three=made(30, 2))
    data = GenomeDataModule(path, 10, val_names="two", test_names=["three"])
    assert [len(data.dataset(split)) for split in ("train", "val", "test")] == [10, 5, 3]
    assert {data.dataset("val").where(i)[1] for i in range(5)} == {"two"}
    share = GenomeDataModule(path, 10, val_names="two", test_fraction=0.2)
    assert [len(share.dataset(split)) for split in ("train", "val", "test")] == [
        8 + 2,
        5,
        2,
    ]  # record "three" has parts of 24 and 6 bases
    assert GenomeDataModule(path, 10, val_names="two").test_dataloader() == []
    with pytest.raises(
        ValueError, match=r"data.val_names holds \['four'\], but no record .* There are: one, two, three"
    ):
        GenomeDataModule(path, 10, val_names=["two", "four"]).check()


def test_short_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, one=made(100), two=made(9, 1), three=made(10, 2), four=made(3, 3))
    options = {"seq_len": 10, "val_fraction": 0.1, "test_fraction": 0}
    message = (
        r"2 records \(two \(9\), four \(3\)\) are shorter than .* lower data.seq_len to at most 3, or set data.short"
    )
    with pytest.raises(ValueError, match=message):
        GenomeDataModule(path, **options).check()
    with caplog.at_level("INFO"):
        data = GenomeDataModule(path, short="skip", **options)
        data.check()
    assert [len(data.dataset(split)) for split in ("train", "val", "test")] == [9, 1, 0]
    assert "122 bases; windows of 10: 9 train, 1 val, 0 test; 22 bases lie in no whole window" in data.describe()
    assert any(
        "2 records (two (9), four (3)) are shorter than a window and left out" in r.message for r in caplog.records
    )


def test_names_may_repeat_in_other_files(tmp_path: Path) -> None:
    write(tmp_path, contig_1=made(40))
    write(tmp_path, name="b.fna", contig_1=made(40, 1), contig_2=made(30, 2))
    data = GenomeDataModule(str(tmp_path), 10, val_names="contig_1")
    assert [len(data.dataset(split)) for split in ("train", "val")] == [3, 8]
    assert [Path(data.dataset("val").where(i)[0]).name for i in (0, 3, 4)] == ["a.fa", "a.fa", "b.fna"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"paths": None}, TypeError, r"data.paths is None; pass existing files, directories or globs in data.paths$"),
        ({"seq_len": 0}, ValueError, "data.seq_len must be .*got .*0"),
        ({"reverse_complement": 1.5}, ValueError, "data.reverse_complement must be a number in .0, 1., got 1.5"),
        ({"reverse_complement": True}, TypeError, "data.reverse_complement must be .*got .*True"),
        ({"max_n_fraction": -0.1}, ValueError, "data.max_n_fraction must be .*got .*-0.1"),
        ({"n_policy": "drop"}, ValueError, "data.n_policy must be one of skip, token; got 'drop'"),
        ({"short": "pad"}, ValueError, "data.short must be one of error, skip; got 'pad'"),
        ({"val_names": 3}, TypeError, "data.val_names must be a name"),
        ({"val_names": "a", "test_names": ["b", "a"]}, ValueError, r"both hold \['a'\]: a record serves one split"),
        ({"val_names": "a", "val_fraction": 0.1}, ValueError, "data.val_fraction is 0.1 and data.val_names is set too"),
        ({"val_fraction": 0.5, "test_fraction": 0.5}, ValueError, "add up to 1 or more"),
    ],
)
def test_wrong_values(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        GenomeDataModule(**{"paths": "never looked at", **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"val_fraction": 0.05},
            "val split has no region of data.seq_len = 10 bases: lower .* raise data.val_fraction",
        ),
        ({"val_names": ["one"]}, "train split has no region .* name fewer records"),
        ({"val_fraction": 0, "batch_size": 9}, "train split has 8 windows .* one batch takes 9"),
        (
            {"test_fraction": 0.2, "max_n_fraction": 0.4},
            "all 2 windows of the test split hold more than 40% N: raise data.max_n",
        ),
    ],
)
def test_too_little_data(tmp_path: Path, options: dict, message: str) -> None:
    path = write(tmp_path, one=made(80) + "ACGTNNNNNN" * 2)
    shares = {} if "val_names" in options else {"val_fraction": 0, "test_fraction": 0}
    with pytest.raises(ValueError, match=message):
        GenomeDataModule(path, 10, **{**shares, **options}).check()
    with pytest.raises(ValueError, match=r"split must be one of .*; got 'dev'"):
        GenomeDataModule(path, 10, val_fraction=0).dataset("dev")
