"""StrainPairsDataModule for pairs_distance.py: two strains of a species, the second half similar to the first.

Two strains correspond where a 32-mer occurs once in each of them. A 32-mer and its reverse complement count as one: its
number is the smaller of the two, read in base 4. One in SAMPLED numbers is kept, by a hash of the number alone.
Therefore two strains keep the same ones of their common 32-mers, and a kept 32-mer occurs equally often in the genome
and among the kept ones. An index takes about 23 bytes per SAMPLED bases.

Shape letters: K 32-mers of an index, M of a query, B batch, N bases of a sample (`seq_len`).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_dilated._validation import flag, integer, real
from lightning_dilated.data.module import SPLITS
from lightning_dilated.data.opener import CACHE_GIB, FileOpener
from lightning_dilated.ext.evaluation.recall_tasks import RuleDataModule, RuleSamples, sample_generator
from lightning_dilated.ext.files.files import files_of, name_list, required_paths
from lightning_dilated.ext.genomes.bases import N_CODE
from lightning_dilated.ext.genomes.fasta import SUFFIXES
from lightning_dilated.ext.genomes.files import Genome

LENGTH = 32
#: one in this number of 32-mers is kept; a power of two
SAMPLED = 64
_CHUNK = 1 << 20
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Anchors:
    """The kept 32-mers that occur once in a genome, sorted by number.

    `kmers` (K,) uint64; `record` (K,) int32 and `place` (K,) int64: number of the record, and first base in it;
    `flipped` (K,) bool: whether the number is from the other strand; `room` (K, 2) bool: whether a window fits from
    here on, in the direction of the file and on the other strand.
    """

    kmers: np.ndarray
    record: np.ndarray
    place: np.ndarray
    flipped: np.ndarray
    room: np.ndarray

    def __len__(self) -> int:
        return len(self.kmers)

    def find(self, kmers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of these numbers, (M,) int64, and whether each exists in the index, (M,) bool."""
        indices = np.minimum(np.searchsorted(self.kmers, kmers), max(len(self) - 1, 0))
        return indices, self.kmers[indices] == kmers if len(self) else np.zeros(len(kmers), dtype=bool)


def anchors(genome: Genome, lead: int, span: int) -> Anchors:
    """Index a genome in chunks.

    Args:
        genome: the records of one strain.
        lead, span: a window fits if the record has `lead` bases before the 32-mer and `span` bases from its first base
            on, all of them known, in the direction of reading.
    """
    records = [_of_record(genome, number) for number in range(len(genome.records))]
    kmers, record, place, flipped = (np.concatenate(x) for x in zip(*records, strict=True))
    _, first, counts = np.unique(kmers, return_index=True, return_counts=True)
    once = first[counts == 1]  # sorted by number, as `unique` returns them
    record, place = record[once], place[once]
    return Anchors(kmers[once], record, place, flipped[once], _room(genome, record, place, lead, span))


def _of_record(genome: Genome, number: int) -> tuple[np.ndarray, ...]:
    """Return the kept 32-mers of a record: numbers, record number, places, and whether they are on the other strand."""
    parts = [(np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, bool))]
    length = genome.records[number].length
    for begin in range(0, length - LENGTH + 1, _CHUNK):
        codes = genome.read(number, begin, min(begin + _CHUNK + LENGTH - 1, length))
        forward, backward = numbers(codes)
        kmers = np.minimum(forward, backward)
        unknown = np.concatenate([[0], np.cumsum(codes == N_CODE)])
        # a 32-mer equal to its reverse complement has no direction
        good = (unknown[LENGTH:] == unknown[:-LENGTH]) & (forward != backward) & _kept(kmers)
        indices = np.flatnonzero(good)
        parts.append((kmers[indices], indices + begin, (backward < forward)[indices]))
    kmers, place, flipped = (np.concatenate(x) for x in zip(*parts, strict=True))
    return kmers, np.full(len(kmers), number, np.int32), place, flipped


def numbers(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the 32-mer at each base and of its reverse complement, both (bases - 31,) uint64.

    Args:
        codes: (bases,) with A 0, C 1, G 2, T 3, at least 32 bases; of other values only the last two bits count.
    """
    forward = (codes & 3).astype(np.uint64)
    backward = np.uint64(3) - forward
    for width in (1, 2, 4, 8, 16):
        bits = np.uint64(2 * width)
        forward = (forward[:-width] << bits) | forward[width:]
        backward = backward[:-width] | (backward[width:] << bits)
    return forward, backward


def _kept(kmers: np.ndarray) -> np.ndarray:
    mixed = (kmers ^ (kmers >> np.uint64(32))) * _MIX
    return (mixed ^ (mixed >> np.uint64(29))) * _MIX >> np.uint64(64 - SAMPLED.bit_length() + 1) == 0


def _room(genome: Genome, record: np.ndarray, place: np.ndarray, lead: int, span: int) -> np.ndarray:
    room = np.zeros((len(place), 2), dtype=bool)
    for number, known in enumerate(genome.records):
        rows = np.flatnonzero(record == number)
        first = place[rows]
        bounds = ((first - lead, first + span), (first + LENGTH - span, first + LENGTH + lead))
        for direction, (start, stop) in enumerate(bounds):
            inside = (start >= 0) & (stop <= known.length)
            start, stop = np.clip(start, 0, known.length), np.clip(stop, 0, known.length)
            room[rows, direction] = inside & (known.unknown_before(start) == known.unknown_before(stop))
    return room


#: largest number of bases in a window before its 32-mer, so that the window may begin anywhere
LEAD = 255
#: number of 32-mers in a draw, and number of draws before all 32-mers are tried
_DRAWN, _TRIES = 64, 16


@dataclass(frozen=True)
class Strain:
    """A FASTA file: its records, and the 32-mers for comparisons."""

    file: str
    genome: Genome
    anchors: Anchors

    @property
    def bases(self) -> int:
        return sum(record.length for record in self.genome.records)

    def identity(self) -> list[tuple[int, int]]:
        """Return the sorted (length, checksum) of its records, which are equal for the same bases under other names."""
        return sorted((record.length, record.checksum) for record in self.genome.records)

    def read(self, anchor: int, reverse: bool, start: int, stop: int) -> np.ndarray:
        """Return bases [start, stop), relative to a 32-mer, on the strand of the file or on the other strand."""
        number, place = int(self.anchors.record[anchor]), int(self.anchors.place[anchor])
        if not reverse:
            return self.genome.read(number, place + start, place + stop)
        end = place + LENGTH
        return 3 - self.genome.read(number, end - stop, end - start)[::-1]


class StrainPairsDataModule(RuleDataModule):
    """Windows of two strains of a species one after the other: `[window of A][the homologous window of B]`.

    Batches are {"tokens": (B, N), "labels": (B, N), "index": (B,)}, all int64. Tokens are A 0, C 1, G 2, T 3
    (`vocab_size` 4); a label is the next base. The base of A that predicts B's next base is about N/2 tokens back: a
    model that cannot look there predicts B no better than A. `callbacks.LossByPosition` shows the difference.

    A FASTA file is a strain. Windows correspond by a 32-mer that occurs once in each of the two genomes, on either
    strand. Each sample draws the strains and their order, the place, the strand, the boundary, how many of B's first
    bases are left out, and a renaming of the four bases, so that statistics of a species do not help. A sample depends
    on (seed, split, index) alone: workers, ranks and resumed runs get the same samples. Species of `val` and `test` are
    not trained on. Windows with a letter other than A C G T (U is T), such as N, are not drawn.

    `check` reads every base twice, in every process (about 6 seconds of a core for 100 million bases), and compares
    every two strains of a species. It keeps about 0.4 bytes a base in memory.

    Args:
        species: {species: its strains}: FASTA files (.fa, .fna, .fasta, plain or .gz), directories (all FASTA files in
            them) or globs, at least two files.
        val, test: names of species that are validation (or test) data.
        train: names of species to train on; null is all others.
        seq_len: N, bases of a sample.
        batch_size: B, samples of a batch on each device.
        boundary_range: the boundary is drawn evenly from N/2 * (1 - boundary_range) to N/2 * (1 + boundary_range); from
            0, which fixes it, to below 1.
        max_dropped: maximum number of B's first bases to leave out; the number is drawn evenly from 0 on.
        rename_bases: rename the four bases at random in each sample.
        reverse_complement: share of the samples that are read on the other strand, from 0 to 1.
        train_size, val_size, test_size: samples of each split; ignored for splits without species.
        cache_dir, cache_gib: see `GenomeDataModule`.
        seed, num_workers, pin_memory: see `RuleDataModule`.

    Raises: TypeError or ValueError for values outside these ranges and for names that `species` does not have. `check`
    reads data on disk.
    """

    vocab_size: int = 4
    along = ("tokens", "labels")

    def __init__(
        self,
        species: dict[str, str | list[str]],
        val: str | list[str] | None = None,
        test: str | list[str] | None = None,
        train: str | list[str] | None = None,
        seq_len: int = 4096,
        batch_size: int = 1,
        boundary_range: float = 0.1,
        max_dropped: int = 63,
        rename_bases: bool = True,
        reverse_complement: float = 0.5,
        train_size: int = 100_000,
        val_size: int = 256,
        test_size: int = 256,
        cache_dir: str | None = None,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        cache_gib: float = CACHE_GIB,
    ) -> None:
        self.paths = _paths(species)
        self.names = _names(list(self.paths), {"train": train, "val": val, "test": test})
        sizes = [train_size, val_size if self.names["val"] else 0, test_size if self.names["test"] else 0]
        super().__init__(seq_len, batch_size, *sizes, seed, num_workers, pin_memory)
        self.opener = FileOpener(cache_dir, cache_gib)
        integer(seq_len, "data.seq_len", 2 * LENGTH)
        self.boundary_range = real(boundary_range, "data.boundary_range", least=0, below=1)
        self.max_dropped = integer(max_dropped, "data.max_dropped", 0)
        self.rename_bases = flag(rename_bases, "data.rename_bases")
        self.reverse_complement = real(reverse_complement, "data.reverse_complement", least=0, most=1)
        self.cache_dir = cache_dir
        self._strains: dict[str, list[Strain]] | None = None
        self._shared: list[tuple[float, str, str]] = []

    # -- what a sample takes -----------------------------------------------------------------------------------------
    @property
    def boundaries(self) -> tuple[int, int]:
        """Return the first and the last position where the second strain may begin."""
        half = self.seq_len // 2
        move = int(half * self.boundary_range)
        return half - move, half + move

    @property
    def lead(self) -> int:
        """Return the largest number of bases in a window before its 32-mer."""
        return min(LEAD, self.seq_len // 4)

    @property
    def span(self) -> int:
        """Return the largest number of bases that a sample reads from its 32-mer on, with the last label."""
        low, high = self.boundaries
        return max(high, self.seq_len - low + 1 + self.max_dropped)

    # -- reading ------------------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Read all genomes and check that every two strains of a species share a 32-mer with room for a sample.

        Raises: OSError or ValueError with the strain, the problem and the remedy; ImportError without pyfaidx.
        """
        if self._strains is not None:
            return
        super().check()
        used = [name for split in SPLITS for name in self.names[split]]
        files = {name: files_of(self.paths[name], f"species.{name}", SUFFIXES, self.opener) for name in used}
        _refuse_shared(files)
        strains = {name: [self._strain(name, file) for file in strains_of] for name, strains_of in files.items()}
        _refuse_equal(strains, {name: split for split in SPLITS for name in self.names[split]})
        shared = [
            self._compared(*pair) for strains_of in strains.values() for pair in itertools.combinations(strains_of, 2)
        ]
        self._strains, self._shared = strains, shared
        rank_zero_info(f"data: {self.describe()}")

    def _strain(self, name: str, file: str) -> Strain:
        try:
            genome = Genome([file], self.cache_dir, self.opener)
        except (OSError, ValueError) as error:  # the messages would contain the option of another DataModule
            kind = ValueError if isinstance(error, ValueError) else type(error)
            raise kind(str(error).replace("data.paths", f"data.species.{name}")) from error
        needed, longest = self.lead + self.span, max(record.length for record in genome.records)
        if longest < needed:
            raise ValueError(
                f"{file} has no record longer than {longest:,} bases, but a sample takes up to {needed:,} of a strain "
                f"(data.seq_len = {self.seq_len}, data.boundary_range = {self.boundary_range}, data.max_dropped = "
                f"{self.max_dropped}): {_shorter(longest, self.boundary_range, self.max_dropped)}leave the file out of "
                f"data.species.{name}"
            )
        return Strain(file, genome, anchors(genome, self.lead, self.span))

    def _compared(self, first: Strain, second: Strain) -> tuple[float, str, str]:
        """Return (share of the shorter index that both have, both files). Raises: ValueError without any sample."""
        known = len(second.anchors.find(first.anchors.kmers)[1].nonzero()[0])
        pair = f"{first.file} and {second.file}"
        if not known:
            raise ValueError(
                f"{pair} share no {LENGTH}-mer that occurs once in each (of those looked at, 1 in {SAMPLED}): are they "
                "strains of one species? Leave one of the two out of data.species"
            )
        if not len(self._usable(first, second, np.arange(len(first.anchors)))[0]):
            raise ValueError(
                f"{pair} share {known:,} {LENGTH}-mers, but none with {self.lead} known bases (A C G T) before it and "
                f"{self.span:,} from there on in both: lower data.seq_len = {self.seq_len}, or leave one of the two out of "
                "data.species"
            )
        return known / max(1, min(len(first.anchors), len(second.anchors))), first.file, second.file

    # -- samples ------------------------------------------------------------------------------------------------------
    def dataset(self, split: str) -> RuleSamples:
        self.check()
        return super().dataset(split)

    def make(self, rng: np.random.Generator, split: str) -> dict[str, Any]:
        """Return a sample: {"tokens": (N,), "labels": (N,)} int64."""
        boundary = self._boundary(rng)
        first, second = self._pair(rng, split)
        dropped = int(rng.integers(0, self.max_dropped + 1))
        i, j, reverse = self._anchor(rng, first, second)
        turned = bool(first.anchors.flipped[i] != second.anchors.flipped[j])
        begin = -int(rng.integers(0, self.lead + 1))
        begin_second = begin + dropped
        parts = (
            first.read(i, reverse, begin, begin + boundary),
            second.read(j, reverse != turned, begin_second, begin_second + self.seq_len - boundary + 1),
        )
        values = np.concatenate(parts).astype(np.int64)
        if self.rename_bases:
            values = rng.permutation(4)[values]
        tokens = torch.from_numpy(values)
        return {"tokens": tokens[:-1].clone(), "labels": tokens[1:].clone()}

    def boundary(self, split: str, index: int) -> int:
        """Return the position in a sample where the second strain begins."""
        return self._boundary(sample_generator(self.seed, split, index))

    def _boundary(self, rng: np.random.Generator) -> int:
        low, high = self.boundaries
        return int(rng.integers(low, high + 1))

    def _pair(self, rng: np.random.Generator, split: str) -> tuple[Strain, Strain]:
        """Draw a strain with probability proportional to its bases, and another strain of its species."""
        assert self._strains is not None
        species = [self._strains[name] for name in self.names[split]]
        all_strains = [(strains, number) for strains in species for number in range(len(strains))]
        ends = np.cumsum([strains[number].bases for strains, number in all_strains])
        strains, number = all_strains[int(np.searchsorted(ends, rng.integers(ends[-1]), side="right"))]
        other = (number + 1 + int(rng.integers(len(strains) - 1))) % len(strains)
        return strains[number], strains[other]

    def _anchor(self, rng: np.random.Generator, first: Strain, second: Strain) -> tuple[int, int, bool]:
        """Draw (32-mer of the first strain, the same in the second, whether the first is read on the other strand)."""
        for _ in range(_TRIES):
            candidates = rng.integers(0, len(first.anchors), _DRAWN)
            at_first, at_second, reverse = self._usable(
                first, second, candidates, rng.random(_DRAWN) < self.reverse_complement
            )
            if len(at_first):
                return int(at_first[0]), int(at_second[0]), bool(reverse[0])
        at_first, at_second, reverse = self._usable(first, second, np.arange(len(first.anchors)))
        drawn = int(rng.integers(len(at_first)))
        return int(at_first[drawn]), int(at_second[drawn]), bool(reverse[drawn])

    def _usable(
        self, first: Strain, second: Strain, kmers: np.ndarray, reverse: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Select 32-mers (M,) for which both strains have room. Return indices in both `Anchors`, and strands.

        Args:
            reverse: (M,) bool, the strand to read each 32-mer on; None tries all that `reverse_complement` allows.
        """
        if reverse is None:
            strands = [
                strand
                for strand, share in ((False, 1 - self.reverse_complement), (True, self.reverse_complement))
                if share
            ]
            reverse, kmers = np.repeat(strands, len(kmers)), np.tile(kmers, len(strands))
        at_second, known = second.anchors.find(first.anchors.kmers[kmers])
        kmers, at_second, reverse = kmers[known], at_second[known], reverse[known]
        turned = first.anchors.flipped[kmers] != second.anchors.flipped[at_second]
        good = (
            first.anchors.room[kmers, reverse.astype(int)]
            & second.anchors.room[at_second, (reverse != turned).astype(int)]
        )
        return kmers[good], at_second[good], reverse[good]

    # -- text --------------------------------------------------------------------------------------------------------
    def rule(self) -> str:
        """Return a text of all settings that determine the samples."""
        self.check()
        assert self._strains is not None
        genomes = {
            split: {name: [strain.genome.fingerprint() for strain in self._strains[name]] for name in self.names[split]}
            for split in SPLITS
        }
        return (
            f"strain pairs of {self.seq_len:,} bases of {genomes}, boundary {self.boundaries}, dropped {self.max_dropped}, "
            f"renamed {self.rename_bases}, reversed {self.reverse_complement}"
        )

    def describe(self) -> str:
        """Return one line with strains, bases and samples of each split, and the share of common 32-mers."""
        self.check()
        assert self._strains is not None
        strains = [strain for group in self._strains.values() for strain in group]
        parts = []
        for split in (split for split in SPLITS if self.names[split]):
            names = ", ".join(f"{name} ({len(self._strains[name])} strains)" for name in self.names[split])
            parts.append(f"{split} {names}: {self.sizes[split]:,} samples")
        least, first, second = min(self._shared)
        return (
            f"{len(strains):,} strains of {len(self._strains)} species, {sum(x.bases for x in strains):,} bases; "
            f"{'; '.join(parts)}; two strains share {least:.0%} to {max(self._shared)[0]:.0%} of their {LENGTH}-mers "
            f"(least: {Path(first).name} and {Path(second).name})"
        )

    def wanted(self, split: str) -> str | None:
        if self.names[split]:
            return super().wanted(split)
        return f"data.{split} names no species; name some of data.species"


def _paths(species: object) -> dict[str, list[str]]:
    if not isinstance(species, Mapping) or not species or not all(isinstance(name, str) for name in species):
        raise TypeError(
            "data.species must be a mapping of species to their FASTA files, such as {aureus: [a.fa, b.fa], pylori: "
            f"genomes/pylori}}; got {species!r}."
        )
    return {name: required_paths(paths, f"species.{name}") for name, paths in species.items()}


def _names(known: list[str], settings: dict[str, Any]) -> dict[str, list[str]]:
    names = {split: name_list(value, split) for split, value in settings.items()}
    for split, chosen in names.items():
        unknown = [name for name in chosen if name not in known]
        if unknown:
            raise ValueError(f"data.{split} holds {unknown}, but data.species has: {', '.join(known)}")
    held_out = {*names["val"], *names["test"]}
    if settings["train"] is None:
        names["train"] = [name for name in known if name not in held_out]
    for first, second in itertools.combinations(SPLITS, 2):
        shared = sorted({*names[first]} & {*names[second]})
        if shared:
            raise ValueError(
                f"data.{first} and data.{second} both hold {shared}: a species serves one split; leave it out of one"
            )
    if not names["train"]:
        raise ValueError(
            f"data.train, data.val and data.test leave none of data.species ({', '.join(known)}) to train on: add a "
            "species, or take one out of data.val or data.test"
        )
    return {split: list(dict.fromkeys(chosen)) for split, chosen in names.items()}


def _refuse_shared(files: dict[str, list[str]]) -> None:
    """Check that a species has at least two strains, and that no file is in two species."""
    species_of: dict[str, str] = {}
    for name, strains in files.items():
        if len(strains) < 2:
            raise ValueError(
                f"data.species.{name} has one strain ({strains[0]}), and a pair takes two: add a FASTA file, or take {name} "
                "out of data.species"
            )
        for file in strains:
            other = species_of.setdefault(os.path.realpath(file), name)
            if other != name:
                raise ValueError(f"{file} is in data.species.{other} and in data.species.{name}: leave it out of one")


def _refuse_equal(strains: dict[str, list[Strain]], split_of: dict[str, str]) -> None:
    """Check that no strain occurs twice, and that no record is in two splits."""
    for name, group in strains.items():
        for first, second in itertools.combinations(group, 2):
            if first.identity() == second.identity():
                raise ValueError(
                    f"{first.file} and {second.file} hold the same bases, so one would be copied from the other: leave one "
                    f"out of data.species.{name}"
                )
    first_use: dict[tuple[int, int], tuple[str, str]] = {}
    for name, group in strains.items():
        for strain in group:
            for record in strain.identity():
                split, other = first_use.setdefault(record, (split_of[name], strain.file))
                if split != split_of[name]:
                    raise ValueError(
                        f"{other} and {strain.file} hold the same record of {record[0]:,} bases, one for data.{split} and "
                        f"one for data.{split_of[name]}: leave one of the two out of data.species"
                    )


def _shorter(longest: int, boundary_range: float, max_dropped: int) -> str:
    """Suggest a `seq_len` that would fit, if any."""
    fits = int(2 * (longest - LEAD - max_dropped - 2) / (1 + boundary_range)) - 2
    return f"lower data.seq_len to at most {fits}, or " if fits >= 2 * LENGTH else "lower data.seq_len, or "
