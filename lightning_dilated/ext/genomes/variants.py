"""Variants of a VCF file, checked against a genome, and windows of bases around each variant with either allele.

Positions are counted from 0 here, and from 1 in the file. Shape letters: N bases of a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_dilated._validation import integer
from lightning_dilated.ext.genomes.bases import CODES, ILLEGAL, decode_bases, encode_bases, reduced
from lightning_dilated.ext.genomes.files import Genome, table_rows


@dataclass(frozen=True)
class Variant:
    """One alternative allele of a line of a VCF file.

    Attributes:
        line: line of the file, counted from 1.
        record: CHROM.
        start: the first base of REF, counted from 0 (POS - 1).
        name: ID.
        ref, alt: the alleles as in the file.
        note: if the allele has no bases, as a symbolic allele, the reason; else "".
    """

    line: int
    record: str
    start: int
    name: str
    ref: str
    alt: str
    note: str = ""


def read_variants(path: str | Path) -> list[Variant]:
    """Read every alternative allele of a VCF file, plain or compressed by gzip, in file order.

    Only the columns CHROM, POS, ID, REF and ALT are read. Alleles that are no bases (`*`, `<DEL>`, breakends, the
    missing allele `.`) are included with a `note`.

    Args:
        path: path of the file.

    Raises:
        FileNotFoundError, ValueError: for a file that cannot be read, or a line that is not a variant, with the line.
    """
    variants: list[Variant] = []
    for number, fields in table_rows(path, "a VCF file", 5):
        variants += _alleles(f"{path}, line {number}", number, fields)
    if not variants:
        raise ValueError(f"{path} holds no variant: a VCF file has a line for each, after its header (lines with #).")
    return variants


def _alleles(where: str, number: int, fields: list[str]) -> list[Variant]:
    if len(fields) < 5:
        raise ValueError(
            f"{where} has {len(fields)} columns, but a variant has at least 5, divided by tabs: CHROM POS ID REF ALT."
        )
    record, position, name, ref, alternatives = fields
    if not position.isascii() or not position.isdigit():
        raise ValueError(f"{where}: POS is {position!r}, but must be a number, counted from 1.")
    if not ref or _wrong(ref):
        raise ValueError(f"{where}: REF is {ref!r}, but must be one or more bases (A C G T N).")
    out = []
    for alt in alternatives.split(","):
        note = _note(alt)
        if not note and int(position) == 0:
            note = "before the first base"
        if not note and (not alt or _wrong(alt)):
            raise ValueError(f"{where}: ALT holds {alt!r}, which is neither bases (A C G T N), a symbol, nor missing.")
        out.append(Variant(number, record, int(position) - 1, name, ref, alt, note))
    return out


def _wrong(bases: str) -> bool:
    raw = np.frombuffer(bases.encode("latin-1", errors="replace"), dtype=np.uint8)
    return bool((CODES[raw] == ILLEGAL).any())


def _note(alt: str) -> str:
    """Return why an alternative allele has no bases, or "" if it has bases."""
    if alt in (".", ""):
        return "no alternative allele" if alt else ""
    if alt == "*":
        return "deleted with another variant"
    return "symbolic allele" if any(c in alt for c in "<>[]") or alt[0] == "." or alt[-1] == "." else ""


def check_references(variants: Sequence[Variant], genome: Genome, vcf: str | Path) -> dict[str, int]:
    """Return {record name: number} of a genome, after checking that it contains every variant's REF.

    Raises:
        ValueError: for a name that the genome lacks or has twice, or a REF that differs from the genome; with the first
            such line and the number of such lines.
    """
    files = sorted({record.file for record in genome.records})
    fasta = files[0] if len(files) == 1 else f"the {len(files)} FASTA files"
    numbers = {record.name: i for i, record in enumerate(genome.records)}
    if len(numbers) < len(genome.records):
        names = [record.name for record in genome.records]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{fasta} has two records {twice!r}, so a variant's record is ambiguous: rename one of them.")
    wrong = [(variant, problem) for variant in variants if (problem := _mismatch(variant, genome, numbers))]
    if wrong:
        variant, problem = wrong[0]
        lines = len({variant.line for variant, _ in wrong})
        tail = f" {lines - 1:,} more do not fit either." if lines > 1 else ""
        raise ValueError(
            f"{vcf}, line {variant.line}: {problem.format(fasta=fasta)}{tail} Pass the FASTA that the variants were called "
            "against, with the same names of records."
        )
    return numbers


def _mismatch(variant: Variant, genome: Genome, numbers: dict[str, int]) -> str:
    """Return the mismatch of a variant, with {fasta} as a placeholder for the file's name; "" if the variant fits."""
    number = numbers.get(variant.record)
    if number is None:
        known = [record.name for record in genome.records]
        shown = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
        return f"CHROM is {variant.record!r}, and {{fasta}} has no such record. It has: {shown}."
    length, stop = genome.records[number].length, variant.start + len(variant.ref)
    place = f"{variant.record}:{variant.start + 1}"
    if variant.start in (-1, length) and variant.ref in ("N", "n"):
        return ""  # a telomere, before the first or after the last base: the genome has no bases there
    if variant.start < 0 or stop > length:
        return f"REF is {variant.ref!r} at {place}, and the record has the bases 1 to {length} in {{fasta}}."
    letters = genome.letters(number, variant.start, stop).tobytes().decode()
    bases = decode_bases(encode_bases(letters))
    # the format replaces an ambiguous letter, such as R, by its alphabetically first base, A
    if decode_bases(encode_bases(variant.ref)) not in (bases, reduced(letters)):
        return f"REF is {variant.ref!r} at {place}, and {{fasta}} has {bases!r} there."
    return ""


@dataclass(frozen=True)
class AlleleWindows:
    """A variant with the bases around it: N bases with the reference allele, and N with the alternative allele.

    Attributes:
        reference, alternative: (N,) int64 tokens each.
        start, stop: positions [start, stop) of the alleles in both windows, without shared bases at their ends. The
            range has the length of the longer allele; in the other window it also contains neighbouring bases.
        substitution: whether the alleles have equal lengths.
    """

    reference: Tensor
    alternative: Tensor
    start: int
    stop: int
    substitution: bool


def allele_windows(genome: Genome, number: int, start: int, ref: str, alt: str, length: int) -> AlleleWindows | None:
    """Return windows of `length` bases around a variant, or None if the alleles do not fit into them.

    The variant is in the middle of the windows, unless they reach an end of the record. Both windows have the same
    length. They are equal before the alleles, and the window of the shorter allele has more bases of the record after
    it; if the record ends too soon, they are equal after the alleles. A shorter record shortens both windows.

    Args:
        genome: source of the record.
        number: number of the record.
        start: the first base of `ref` in the record, counted from 0.
        ref, alt: the alleles.
        length: N, at least 2.
    """
    integer(length, "length", 2)
    size = genome.records[number].length
    shared = _common(ref[::-1].upper(), alt[::-1].upper())
    ref, alt = ref[: len(ref) - shared], alt[: len(alt) - shared]
    shared = _common(ref.upper(), alt.upper())
    ref, alt, start = ref[shared:], alt[shared:], start + shared
    stop, (shorter, longer) = start + len(ref), sorted((len(ref), len(alt)))
    if start < 0 or stop > size:  # at a telomere
        return None
    length = min(length, size + min(0, len(alt) - len(ref)))
    added = longer - shorter  # bases after the shorter allele
    at_left = size - stop >= added
    if longer > length or not (at_left or start >= added):
        return None
    # bases of the record on the side where both windows are equal, and on the other side
    near, far = (start, size - stop) if at_left else (size - stop, start)
    same = min(max((length - longer) // 2, length - shorter - far), near, length - longer)
    windows = []
    for allele in (ref, alt):
        different, middle = length - same - len(allele), encode_bases(allele).numpy()
        before, behind = (same, different) if at_left else (different, same)
        codes = [genome.read(number, start - before, start), middle, genome.read(number, stop, stop + behind)]
        windows.append(torch.from_numpy(np.concatenate(codes).astype(np.int64)))
    first = same if at_left else length - same - longer
    return AlleleWindows(windows[0], windows[1], first, first + longer, added == 0)


def _common(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
