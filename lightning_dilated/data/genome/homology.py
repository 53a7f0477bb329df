"""Where the genomes of two strains correspond: 32-mers that occur once in each.

A 32-mer and its reverse complement count as one: its number is the smaller one of both, read as digits of base 4. Of
these numbers one in SAMPLED is kept, chosen by a hash of the number alone. So two strains keep the same ones of what
they share, and a kept 32-mer occurs as often in the genome as among those kept. An index takes about 23 bytes for
SAMPLED bases.

Shape letters: K 32-mers of an index, M of a query.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_dilated.data.genome.records import N_CODE, Genome

LENGTH = 32
#: one 32-mer in so many is kept, a power of two
SAMPLED = 64
_CHUNK = 1 << 20
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Anchors:
    """The kept 32-mers that occur once in a genome, sorted by number.

    `kmers` (K,) uint64; `record` (K,) int32 and `place` (K,) int64: the record's number and the first base there;
    `flipped` (K,) bool: whether the number is that of the other strand; `room` (K, 2) bool: whether there is room for a
    window from here on in the direction of the file, and on the other strand.
    """

    kmers: np.ndarray
    record: np.ndarray
    place: np.ndarray
    flipped: np.ndarray
    room: np.ndarray

    def __len__(self) -> int:
        return len(self.kmers)

    def find(self, kmers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(M,) int64 where each of these numbers (M,) stands here, and (M,) bool whether it does."""
        at = np.minimum(np.searchsorted(self.kmers, kmers), max(len(self) - 1, 0))
        return at, self.kmers[at] == kmers if len(self) else np.zeros(len(kmers), dtype=bool)


def anchors(genome: Genome, lead: int, span: int) -> Anchors:
    """Index a genome, a chunk at a time.

    Args:
        genome: the records of one strain.
        lead, span: there is room where the record has `lead` bases before the 32-mer and `span` from its first base on,
            all of them known, in the direction of reading.
    """
    records = [_of_record(genome, number) for number in range(len(genome.records))]
    kmers, record, place, flipped = (np.concatenate(x) for x in zip(*records, strict=True))
    _, first, counts = np.unique(kmers, return_index=True, return_counts=True)
    once = first[counts == 1]  # sorted by number, as `unique` is
    record, place = record[once], place[once]
    return Anchors(kmers[once], record, place, flipped[once], _room(genome, record, place, lead, span))


def _of_record(genome: Genome, number: int) -> tuple[np.ndarray, ...]:
    """The kept 32-mers of a record: numbers, the record's number, places, and whether the other strand is meant."""
    parts = [(np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, bool))]
    length = genome.records[number].length
    for begin in range(0, length - LENGTH + 1, _CHUNK):
        codes = genome.read(number, begin, min(begin + _CHUNK + LENGTH - 1, length))
        forward, backward = numbers(codes)
        kmers = np.minimum(forward, backward)
        unknown = np.concatenate([[0], np.cumsum(codes == N_CODE)])
        # what is its own reverse complement has no direction
        good = (unknown[LENGTH:] == unknown[:-LENGTH]) & (forward != backward) & _kept(kmers)
        at = np.flatnonzero(good)
        parts.append((kmers[at], at + begin, (backward < forward)[at]))
    kmers, place, flipped = (np.concatenate(x) for x in zip(*parts, strict=True))
    return kmers, np.full(len(kmers), number, np.int32), place, flipped


def numbers(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The number of the 32-mer from each base on, and of its reverse complement: twice (bases - 31,) uint64.

    Args:
        codes: (bases,) of A 0, C 1, G 2, T 3, at least 32; only the last two bits of others count.
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
        own = np.flatnonzero(record == number)
        first = place[own]
        bounds = ((first - lead, first + span), (first + LENGTH - span, first + LENGTH + lead))
        for direction, (start, stop) in enumerate(bounds):
            inside = (start >= 0) & (stop <= known.length)
            start, stop = np.clip(start, 0, known.length), np.clip(stop, 0, known.length)
            room[own, direction] = inside & (known.unknown_before(start) == known.unknown_before(stop))
    return room
