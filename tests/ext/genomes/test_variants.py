"""Variants in VCF files: accepted records, refused lines, and windows that have exactly the alleles."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated.data import Genome, Variant, allele_windows, decode_bases, encode_bases, read_variants
from lightning_dilated.ext.genomes.regions import read_bed
from lightning_dilated.ext.genomes.variants import check_references

from ...examples import examples
from .test_fasta import made, write

HEADER = "##fileformat=VCFv4.2\n#CHROM\tPOS\tID\tREF\tALT\tQUAL\tFILTER\tINFO\n"


def vcf(folder: Path, *lines: str, name: str = "v.vcf", end: str = "\n") -> Path:
    path = folder / name
    text = (HEADER + "".join("\t".join(line.split()) + "\n" for line in lines)).replace("\n", end).encode()
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return path


@pytest.mark.parametrize("name", ["v.vcf", "v.vcf.gz"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_alleles(tmp_path: Path, name: str, end: str) -> None:
    path = vcf(tmp_path, "a 3 x A C,GT . .", "b 10 . ACG <DEL>,*,. . .", "b 0 y N N[a:3[ . .", name=name, end=end)
    got = [(v.line, v.record, v.start, v.name, v.ref, v.alt, v.note) for v in read_variants(path)]
    assert got == [
        (3, "a", 2, "x", "A", "C", ""),
        (3, "a", 2, "x", "A", "GT", ""),
        (4, "b", 9, ".", "ACG", "<DEL>", "symbolic allele"),
        (4, "b", 9, ".", "ACG", "*", "deleted with another variant"),
        (4, "b", 9, ".", "ACG", ".", "no alternative allele"),
        (5, "b", -1, "y", "N", "N[a:3[", "symbolic allele"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a 3 x A", "line 3 has 4 columns, but a variant has at least 5"),
        ("a -3 x A C", "line 3: POS is '-3'"),
        ("a 3 x A,C C", "line 3: REF is 'A,C'"),
        ("a 3 x A CQ", "line 3: ALT holds 'CQ'"),
        ("a 3 x A C,", "line 3: ALT holds ''"),
    ],
)
def test_wrong_lines(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_variants(vcf(tmp_path, line))


def test_wrong_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no variant"):
        read_variants(vcf(tmp_path))
    path = vcf(tmp_path, "a 3 x A C", name="v.vcf.gz")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="cannot be decompressed"):
        read_variants(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not text"):
        read_variants(path)
    with pytest.raises(FileNotFoundError):
        read_variants(tmp_path / "none.vcf")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["a 1 . T C"], r"v.vcf, line 3: REF is 'T' at a:1, and .*a.fa has 'A' there. Pass the FASTA"),
        (
            ["a 1 . A C", "a 2 . CGA C", "a 2 . A C"],
            r"line 4: REF is 'CGA' at a:2, .* 'CGT' there. 1 more do not fit either",
        ),
        (["chra 1 . A C"], r"line 3: CHROM is 'chra', and .*a.fa has no such record. It has: a, b"),
        (["a 0 . A C"], r"line 3: REF is 'A' at a:0, and the record has the bases 1 to 8"),
        (["a 8 . TT C"], r"line 3: REF is 'TT' at a:8, and the record has the bases 1 to 8"),
    ],
)
def test_references(tmp_path: Path, lines: list[str], message: str) -> None:
    genome = Genome([write(tmp_path, a="ACGTacgt", b="NNRA")])
    good = vcf(tmp_path, "a 5 . Acg T", "b 1 . nNYa T", "a 8 . t <DEL>")
    assert check_references(read_variants(good), genome, good) == {"a": 0, "b": 1}
    path = vcf(tmp_path, *lines)
    with pytest.raises(ValueError, match=message):
        check_references(read_variants(path), genome, path)


def test_a_window_in_the_middle(tmp_path: Path) -> None:
    genome = Genome([write(tmp_path, one="AAAAACCCCCGGGGGTTTTT")])

    def shown(start: int, ref: str, alt: str, length: int) -> tuple[str, str, int, int, bool]:
        x = allele_windows(genome, 0, start, ref, alt, length)
        assert x is not None
        return decode_bases(x.reference), decode_bases(x.alternative), x.start, x.stop, x.substitution

    assert shown(9, "C", "T", 5) == ("CCCGG", "CCTGG", 2, 3, True)
    assert shown(7, "CCC", "CCT", 5) == ("CCCGG", "CCTGG", 2, 3, True)  # the same variant, written with more bases
    assert shown(9, "C", "CTT", 6) == ("CCGGGG", "CCTTGG", 2, 4, False)
    assert shown(7, "CCCG", "c", 6) == ("CCCGGG", "CGGGGT", 1, 4, False)
    assert shown(0, "A", "T", 5) == ("AAAAA", "TAAAA", 0, 1, True)
    assert shown(19, "T", "A", 5) == ("TTTTT", "TTTTA", 4, 5, True)
    assert shown(19, "T", "TG", 5) == ("TTTTT", "TTTTG", 4, 5, False)
    assert allele_windows(genome, 0, 2, "A" * 3 + "C" * 5, "A", 5) is None
    whole = allele_windows(genome, 0, 9, "C", "T", 99)
    assert whole is not None and decode_bases(whole.alternative) == "AAAAACCCCTGGGGGTTTTT"


@settings(max_examples=examples(300), deadline=None)
@given(
    st.text("ACGT", min_size=1, max_size=14),
    st.integers(0, 13),
    st.integers(1, 6),
    st.text("ACGT", min_size=1, max_size=6),
    st.integers(2, 18),
)
def test_windows_are_parts_of_the_two_genomes(bases: str, start: int, size: int, alt: str, length: int) -> None:
    """Windows are parts of the record with either allele. They are equal before `start`, after `stop`, or both."""
    ref = bases[start : start + size]
    if not ref or ref == alt:
        return
    got = allele_windows(FakeGenome(bases), 0, start, ref, alt, length)  # type: ignore[arg-type]
    changed = bases[:start] + alt + bases[start + len(ref) :]
    if got is None:
        sides, growth = (start, len(bases) - start - len(ref)), abs(len(ref) - len(alt))
        assert min(len(bases), len(changed), length) < max(len(ref), len(alt)) or max(sides) < growth
        return
    reference, alternative = decode_bases(got.reference), decode_bases(got.alternative)
    assert len(reference) == len(alternative) == min(length, len(bases), len(changed))
    assert reference in bases and alternative in changed
    assert 0 <= got.start < got.stop <= len(reference) and got.substitution == (len(ref) == len(alt))
    before = reference[: got.start] == alternative[: got.start]
    behind = reference[got.stop :] == alternative[got.stop :]
    assert before and behind if got.substitution else before or behind


class FakeGenome:
    """A genome with one record, in memory."""

    def __init__(self, bases: str) -> None:
        self.bases = bases
        self.records = [type("Record", (), {"length": len(bases)})()]

    def read(self, number: int, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= len(self.bases)
        return encode_bases(self.bases[start:stop]).numpy().astype("uint8")


def test_an_end_of_the_record(tmp_path: Path) -> None:
    bases = made(60)
    genome = Genome([write(tmp_path, one=bases)])
    deletion = allele_windows(genome, 0, 50, bases[50:60], bases[50], 20)  # the record ends after the deletion
    assert deletion is not None
    assert decode_bases(deletion.reference) == bases[40:] and decode_bases(deletion.alternative) == bases[31:51]


# -- files that the format allows, and files without bounds -------------------------------------------------------------
HEAD = b"##fileformat=VCFv4.3\n#CHROM\tPOS\tID\tREF\tALT\tQUAL\tFILTER\tINFO\n"


def row(position: int, ref: str, alt: str = "G", info: bytes = b".") -> bytes:
    return f"a\t{position}\t.\t{ref}\t{alt}\t.\t.\t".encode() + info + b"\n"


def lenient(folder: Path, content: bytes, bases: str = "ACGTRACGTA") -> list[Variant]:
    """Return the variants of a VCF file, which are checked against a record `a`."""
    (folder / "ref.fa").write_text(f">a\n{bases}\n")
    (folder / "v.vcf").write_bytes(content)
    variants = read_variants(folder / "v.vcf")
    check_references(variants, Genome([str(folder / "ref.fa")], str(folder / "cache")), folder / "v.vcf")
    return variants


@pytest.mark.parametrize(("letter", "base"), zip("RYSWKMBDHVN", "ACCAGACAAAN", strict=True))
def test_a_reference_letter_of_several_bases_is_reduced(tmp_path: Path, letter: str, base: str) -> None:
    for fasta in (letter, letter.lower()):
        for ref in {base, letter, base.lower()}:
            assert len(lenient(tmp_path, HEAD + row(3, f"G{ref}C"), f"ACG{fasta}CGT")) == 1
    wrong = next(x for x in "TGCA" if x != base)
    with pytest.raises(ValueError, match=r"line 3: REF is .* and .* there"):
        lenient(tmp_path, HEAD + row(3, f"G{wrong}C"), f"ACG{letter}CGT")


@pytest.mark.parametrize("position", [0, 11])
@pytest.mark.parametrize("alt", ["<DEL>", ".[b:5[", "]b:5].", "*", ".", "A"])
def test_positions_of_telomeres(tmp_path: Path, position: int, alt: str) -> None:
    variants = lenient(tmp_path, HEAD + row(1, "A") + row(position, "N", alt))
    assert [x.start for x in variants] == [0, position - 1]
    genome = Genome([str(tmp_path / "ref.fa")], str(tmp_path / "cache"))
    assert allele_windows(genome, 0, position - 1, "N", "A", 4) is None
    for other in (12, 13):
        with pytest.raises(ValueError, match="the record has the bases 1 to 10"):
            lenient(tmp_path, HEAD + row(other, "N", alt))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_marks_and_line_ends(tmp_path: Path, packed: bool, end: bytes, mark: bytes) -> None:
    pack = gzip.compress if packed else bytes
    lines = mark + (HEAD + row(1, "A") + row(5, "R")).replace(b"\n", end)
    assert [x.start for x in lenient(tmp_path, pack(lines))] == [0, 4]
    fasta = mark + b">a\nACGTRACG\nTA\n>b x\nAC\n".replace(b"\n", end)
    (tmp_path / "in.fa").write_bytes(pack(fasta))
    genome = Genome([str(tmp_path / "in.fa")], str(tmp_path / "cache"))
    assert [(x.name, x.length) for x in genome.records] == [("a", 10), ("b", 2)]
    assert decode_bases(genome.read(0, 0, 10).astype(np.int64)) == "ACGTNACGTA"
    (tmp_path / "in.bed").write_bytes(pack(mark + b"a\t1\t5\tx\t0\t+\nb 0 2\n".replace(b"\n", end)))
    assert [x[:4] for x in read_bed(tmp_path / "in.bed", genome.records)] == [(0, 1, 5, 1), (1, 0, 2, 0)]


def test_a_line_end_between_two_blocks(tmp_path: Path) -> None:
    line = b"A" * 61
    for first in (b">abc", b">abcd", b">abcde"):
        plain = first + b"\r\n" + (line + b"\r\n") * 20_000
        (tmp_path / "in.fa").write_bytes(b"\xef\xbb\xbf" + plain)
        genome = Genome([str(tmp_path / "in.fa")], str(tmp_path / "cache"))
        assert genome.records[0].length == 61 * 20_000


def test_text_that_is_not_read_may_be_of_another_encoding(tmp_path: Path) -> None:
    content = b"##contact=Ren\xe9\n" + HEAD + row(1, "A", info=b"NOTE=caf\xe9")
    assert len(lenient(tmp_path, content)) == 1
    with pytest.raises(ValueError, match=r"line 3 is not UTF-8\): name a VCF file"):
        lenient(tmp_path, HEAD + row(1, "A").replace(b"\t.\tA", b"\tcaf\xe9\tA"))
    genome = Genome([str(tmp_path / "ref.fa")], str(tmp_path / "cache"))
    (tmp_path / "in.bed").write_bytes(b"# caf\xe9\na\t1\t5\tx\t0\t+\t1\t5\tcaf\xe9\n")
    assert len(read_bed(tmp_path / "in.bed", genome.records)) == 1


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("begin", [b"##x=", b"a\t1\t.\tA\tG\t.\t.\t", b"a\t1\t.\tA", b"\n\n"])
def test_a_line_has_a_bound(tmp_path: Path, packed: bool, begin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_dilated.ext.genomes.files.LONGEST", 1000)
    path = tmp_path / "in.vcf"
    path.write_bytes((gzip.compress if packed else bytes)(begin + b"A" * 1001))
    number = 3 if begin == b"\n\n" else 1
    with pytest.raises(ValueError, match=rf"in\.vcf, line {number} has more than 1,000 characters.* VCF"):
        read_variants(path)
    with pytest.raises(ValueError, match=rf"in\.vcf, line {number} has more than 1,000 characters.* BED"):
        read_bed(path, [])


def test_fields_of_a_packed_file_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_dilated.ext.genomes.files.SMALL", 1000)
    (tmp_path / "in.vcf.gz").write_bytes(gzip.compress(row(1, "A") * 100_000))
    with pytest.raises(ValueError, match=r"in\.vcf\.gz unpacks to more than 100 times its size"):
        read_variants(tmp_path / "in.vcf.gz")
    samples = b"0|0\t" * 1000  # columns that are not read do not count toward the limit
    (tmp_path / "in.vcf.gz").write_bytes(gzip.compress(b"".join(row(i + 1, "A", info=samples) for i in range(200))))
    assert len(read_variants(tmp_path / "in.vcf.gz")) == 200
