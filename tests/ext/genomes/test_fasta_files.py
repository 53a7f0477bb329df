"""FASTA files on disk: index and cache. For a file without a genome, the error names the file and a remedy."""

import gzip
import os
import shutil
from pathlib import Path

import pytest

from lightning_dilated.data import GenomeDataModule
from lightning_dilated.ext.genomes import files as fasta_files
from lightning_dilated.ext.genomes.files import default_cache, plain_file, read_index

HERE = Path(__file__).parents[2] / "data"
PACKED = str(HERE / "lambda_virus.fa.gz")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")


def test_an_index_is_made_beside_the_file_once(lambda_virus: str, tmp_path: Path) -> None:
    (record,) = read_index(lambda_virus, "given", tmp_path / "cache")
    assert record == ("gi|9626243|ref|NC_001416.1|", 48502, 74, 70, 71)
    beside = Path(lambda_virus + ".fai")
    assert names(tmp_path) == ["lambda_virus.fa", "lambda_virus.fa.fai"]
    before = beside.stat().st_mtime_ns
    assert read_index(lambda_virus, "given", tmp_path / "cache") == [record]
    assert beside.stat().st_mtime_ns == before
    os.utime(beside, (0, 0))  # an index older than its file is written again
    assert read_index(lambda_virus, "given", tmp_path / "cache") == [record]
    assert beside.stat().st_mtime_ns > 0


def test_an_index_of_a_read_only_folder_lies_in_the_cache(
    lambda_virus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the tests may run as root, for whom permissions are not checked
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    cache = tmp_path / "cache"
    indexes = [read_index(lambda_virus, "given", cache) for _ in range(2)]
    assert indexes[0] == indexes[1] and indexes[0][0][1] == 48502
    (name,) = names(cache)
    assert name.startswith("lambda_virus.fa.") and name.endswith(".fai")
    Path(lambda_virus).write_text(">other\nACGT\n")
    assert read_index(lambda_virus, "given", cache) == [("other", 4, 7, 4, 5)]  # of the other file


def test_gzip_is_undone_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = tmp_path / "cache"
    with caplog.at_level("INFO"):
        first = plain_file(PACKED, cache)
        assert plain_file(PACKED, cache) == first
    assert Path(first).read_bytes() == gzip.decompress(Path(PACKED).read_bytes())
    assert [r.message for r in caplog.records] == [f"{PACKED} was decompressed to {first}"]
    assert names(cache) == [Path(first).name]
    copy = shutil.copy(PACKED, tmp_path / "other.gz")
    assert plain_file(copy, cache) != first


def test_default_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "lightning-dilated" / "genomes"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache() == tmp_path / "home" / ".cache" / "lightning-dilated" / "genomes"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    GenomeDataModule(PACKED, seq_len=100).check()
    assert len(names(tmp_path / "lightning-dilated" / "genomes")) == 2


def write(folder: Path, text: str | bytes, name: str = "a.fa") -> Path:
    (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return folder / name


LINES = "ACGTACGTAC\n" * 5


def index_of_another(folder: Path, fai: str | None) -> Path:
    path = write(folder, f">one\n{LINES}>two\n{LINES}")
    if fai is None:
        (folder / "a.fa.fai").mkdir()
    else:
        write(folder, fai, "a.fa.fai")
    return path


def twice(folder: Path) -> Path:
    write(folder, f">one\n{LINES}")
    write(folder, gzip.compress(f">one\n{LINES.lower()}".encode()), "a.fa.gz")
    return folder


BAD = {
    "no header": (
        lambda d: write(d, LINES),
        "a.fa is not a FASTA .* before the first .* at line 1.* begins with a line >NAME",
    ),
    "fastq": (lambda d: write(d, "@read\nACGT\n+\nIIII\n"), "a.fa is not a FASTA .*line 1"),
    "no name": (lambda d: write(d, f">\n{LINES}"), "a.fa is not a FASTA .*Bad sequence name"),
    "names twice": (
        lambda d: write(d, f">one x\n{LINES}>one y\n{LINES}"),
        'a.fa .*Two records have the name "one": rename one',
    ),
    "empty record": (lambda d: write(d, f">one\n>two\n{LINES}"), "a.fa: the record 'one' is empty: remove its header"),
    "empty last record": (lambda d: write(d, f">one\n{LINES}>two\n"), "a.fa: the record 'two' is empty"),
    "protein": (
        lambda d: write(d, ">p53\nACGTMEEPQSDPSVEPPLSQ\n"),
        "a.fa: the record 'p53' holds 'E' at base 6 .counted from 1.* is it a protein .* Take it out",
    ),
    "alignment": (lambda d: write(d, f">one\n{LINES}ACG-TAC\n"), "holds '-' at base 54 .*alignment with gaps"),
    "ragged lines": (
        lambda d: write(d, f">one\nACGTAC\n{LINES}"),
        "a.fa is not a FASTA .*not consistent.* wrap it again",
    ),
    "binary": (lambda d: write(d, b"\xff\xfe\x00\x01" * 99), "a.fa is not a FASTA .*It is not text"),
    "empty": (lambda d: write(d, ""), "a.fa is empty: fetch it again"),
    "empty gzip": (lambda d: write(d, gzip.compress(b""), "a.fa.gz"), "a.fa.gz is empty once decompressed"),
    "truncated gzip": (
        lambda d: write(d, Path(PACKED).read_bytes()[:9000], "a.fa.gz"),
        r"a.fa.gz cannot be decompressed .*, after [\d,]+ bytes of text: it was cut off or damaged; fetch it again",
    ),
    "damaged gzip": (
        lambda d: write(d, Path(PACKED).read_bytes()[:5000] + b"x" * 5000, "a.fa.gz"),
        "a.fa.gz cannot be decompressed",
    ),
    "gz by name only": (
        lambda d: write(d, f">one\n{LINES}", "a.fa.gz"),
        "a.fa.gz is not compressed by gzip, though its name",
    ),
    "missing": (lambda d: d / "a.fa", r"a.fa does not exist; pass existing .* in data.paths$"),
    "no such files": (lambda d: write(d, LINES, "a.txt").parent, "no regular files ending in .fa, .fa.gz, .fna"),
    "one record in two files": (
        twice,
        "'one' is in .*a.fa and again, base for base, in .*a.fa.gz.* leave one of the files out",
    ),
    "index of shorter records": (
        lambda d: index_of_another(d, "one\t40\t5\t10\t11\ntwo\t50\t65\t10\t11\n"),
        "the index .*a.fa does not fit the file .record 'two'.* remove the .fai",
    ),
    "index without a record": (lambda d: index_of_another(d, "one\t50\t5\t10\t11\n"), "the index .*a.fa does not fit"),
    "index of other lines": (
        lambda d: index_of_another(d, "one\t50\t5\t25\t26\ntwo\t50\t65\t10\t11\n"),
        "the index .*a.fa does not fit",
    ),
    "index with other names": (
        lambda d: index_of_another(d, "one\t50\t5\t10\t11\ntoo\t50\t65\t10\t11\n"),
        "the index .*a.fa does not fit the file .record 'too'",
    ),
    "index of a longer file": (
        lambda d: index_of_another(d, "one\t50\t5\t10\t11\ntwo\t500\t65\t10\t11\n"),
        "the index .*a.fa does not fit",
    ),
    "index that is none": (lambda d: index_of_another(d, "nothing here\n"), "the index .*a.fa does not fit"),
    "empty index": (lambda d: index_of_another(d, ""), "the index .*a.fa does not fit the file .no record"),
    **{
        f"index: {name}": (lambda d, line=line: index_of_another(d, f"one\t{line}\n"), "the index .*a.fa does not fit")
        for name, line in {
            "0 bases a line": "50\t5\t0\t0",
            "0 bytes a line": "50\t5\t10\t0",
            "fewer bytes than bases a line": "50\t5\t10\t9",
            "-1 bases": "-1\t5\t10\t11",
            "-10 bases a line": "50\t5\t-10\t-11",
            "from before the file": "50\t-5\t10\t11",
            "from behind the file": f"50\t{10**30}\t10\t11",
            "more bases than bytes": f"{10**30}\t5\t10\t11",
            "too few columns": "50",
            "words": "a\tb\tc\td",
        }.items()
    },
    "index that is a folder": (lambda d: index_of_another(d, None), "a.fa does not fit .*fai is no file"),
    "index with names twice": (
        lambda d: index_of_another(d, "one\t50\t5\t10\t11\none\t50\t65\t10\t11\n"),
        'Two records have the name "one"',
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files(tmp_path: Path, case: str) -> None:
    make, message = BAD[case]
    (tmp_path / "data").mkdir()
    data = GenomeDataModule(str(make(tmp_path / "data")), seq_len=10, cache_dir=str(tmp_path / "cache"))
    for _ in range(2):  # the error must repeat: a partly written index must not be used
        with pytest.raises((ValueError, OSError), match=message):
            data.check()
    assert not [name for name in names(tmp_path) if "part" in name]


def test_without_pyfaidx(lambda_virus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyfaidx", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-dilated\[genomes\]'"):
        GenomeDataModule(lambda_virus).check()


# -- what a file may do to this machine --------------------------------------------------------------------------------
def test_a_gzip_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fasta_files, "SMALL", 1 << 16)
    text = ">one\n" + ("A" * 99 + "\n") * 20_000  # 2 MB compressed to 2 kB
    bomb = tmp_path / "a.fa.gz"
    bomb.write_bytes(gzip.compress(text.encode()))
    cache = tmp_path / "cache"
    with pytest.raises(ValueError, match=r"a\.fa\.gz unpacks to more than 100 times its [\d,]+ bytes.*gunzip -k"):
        plain_file(str(bomb), cache)
    assert names(cache) == []
    monkeypatch.setattr(fasta_files, "SMALL", 1 << 24)
    assert Path(plain_file(str(bomb), cache)).read_text() == text


def test_folders_of_the_cache_are_of_this_user_alone(tmp_path: Path) -> None:
    old, shared = os.umask(0), tmp_path / "shared"
    shared.mkdir(mode=0o777)
    try:
        file = Path(plain_file(PACKED, shared / "a" / "b"))
    finally:
        os.umask(old)
    assert [folder.stat().st_mode & 0o777 for folder in (shared, shared / "a", shared / "a" / "b")] == [
        0o777,
        0o700,
        0o700,
    ]
    assert file.is_file() and not any(path.suffix != ".lock" for path in file.parent.iterdir() if path != file)


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    file = Path(plain_file(PACKED, tmp_path / "cache"))
    file.unlink()
    lock = Path(f"{file}.lock")
    lock.unlink()
    lock.symlink_to(precious)
    with pytest.raises(OSError, match=r"\.lock"):
        plain_file(PACKED, tmp_path / "cache")
    assert precious.read_text() == "kept"


def test_a_cache_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(FileExistsError, match=r"data\.cache_dir .*cache is not a folder; name another"):
        plain_file(PACKED, tmp_path / "cache" / "genomes")


def test_an_index_that_is_a_fifo(lambda_virus: str, tmp_path: Path) -> None:
    os.mkfifo(f"{lambda_virus}.fai")
    with pytest.raises(ValueError, match=r"\.fai is neither a regular file"):
        GenomeDataModule(lambda_virus).check()
