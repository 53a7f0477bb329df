"""The index of 32-mers: their numbers, which are kept, which occur once, and where a window has room."""

from pathlib import Path

import numpy as np

from lightning_dilated.ext.genomes import strain_pairs
from lightning_dilated.ext.genomes.files import Genome
from lightning_dilated.ext.genomes.strain_pairs import LENGTH, SAMPLED, Anchors, anchors, numbers

from .strains import made, reverse_complement, write_strain


def indexed(folder: Path, *records: str, lead: int = 0, span: int = LENGTH, name: str = "a.fa") -> Anchors:
    return anchors(Genome([write_strain(folder, name, *records)], str(folder / "cache")), lead, span)


def number(bases: str) -> int:
    return sum("ACGT".index(base) * 4 ** (len(bases) - 1 - i) for i, base in enumerate(bases))


def placed(found: Anchors) -> dict[int, tuple[int, int]]:
    return {int(k): (int(r), int(p)) for k, r, p in zip(found.kmers, found.record, found.place, strict=True)}


def test_numbers_are_those_of_both_strands() -> None:
    bases = made(100)
    forward, backward = numbers(np.array(["ACGT".index(x) for x in bases], dtype=np.uint8))
    assert forward.dtype == backward.dtype == np.uint64
    windows = [bases[i : i + LENGTH] for i in range(100 - LENGTH + 1)]
    assert forward.tolist() == [number(x) for x in windows]
    assert backward.tolist() == [number(reverse_complement(x)) for x in windows]


def test_both_strands_have_one_index(tmp_path: Path) -> None:
    """The other strand of a genome has the same 32-mers at the mirrored places, and about one in SAMPLED is kept."""
    bases = made(64_000)
    one = indexed(tmp_path, bases)
    other = indexed(tmp_path, reverse_complement(bases), name="b.fa")
    assert abs(len(one) - 64_000 / SAMPLED) < 5 * (64_000 / SAMPLED) ** 0.5
    assert np.array_equal(one.kmers, other.kmers) and np.array_equal(one.flipped, ~other.flipped)
    assert np.array_equal(one.place, 64_000 - LENGTH - other.place)
    for kmer, (_, place) in placed(one).items():
        window = bases[place : place + LENGTH]
        assert kmer == min(number(window), number(reverse_complement(window)))
    assert one.room.all()


def test_what_occurs_twice_is_left_out_in_either_direction(tmp_path: Path) -> None:
    unique, twice, turned = made(8000, 1), made(8000, 2), made(8000, 3)
    found = placed(indexed(tmp_path, unique + twice + turned, twice + reverse_complement(turned)))
    whole = placed(indexed(tmp_path, unique, name="b.fa"))
    assert len(whole) > 60 and whole.items() <= found.items()
    assert len(found) - len(whole) <= 3  # what lies across a seam


def test_what_holds_an_unknown_base_is_left_out(tmp_path: Path) -> None:
    """N at every 30th base leaves none; before them all are as in the genome without."""
    bases = made(8000, 4)
    spoiled = "".join("N" if i % 30 == 0 else base for i, base in enumerate(made(8000, 5)))
    whole, found = placed(indexed(tmp_path, bases)), placed(indexed(tmp_path, bases + spoiled, name="b.fa"))
    assert whole == found and len(whole) > 60


def test_a_chunk_more_or_less_changes_nothing(tmp_path: Path, monkeypatch) -> None:
    records = made(5000), made(31, 1), made(32, 2), made(3000, 3)
    whole = indexed(tmp_path, *records)
    for chunk in (1, 37, 1000):
        if chunk == 1:
            records = records[1:3]
        monkeypatch.setattr(strain_pairs, "_CHUNK", chunk)
        assert placed(indexed(tmp_path, *records, name="b.fa")).keys() <= placed(whole).keys()
        if chunk > 1:
            assert placed(indexed(tmp_path, *records, name="b.fa")) == placed(whole)
        records = made(5000), made(31, 1), made(32, 2), made(3000, 3)


def test_room_is_known_bases_of_one_record_in_each_direction(tmp_path: Path) -> None:
    lead, span, size, gap = 50, 700, 8000, (5000, 5010)
    bases = made(size)
    bases = bases[: gap[0]] + "N" * 10 + bases[gap[1] :]
    found = indexed(tmp_path, bases, lead=lead, span=span)
    assert not any(gap[0] - LENGTH < place < gap[1] for place in found.place)
    for place, room in zip(found.place.tolist(), found.room.tolist(), strict=True):
        windows = (place - lead, place + span), (place + LENGTH - span, place + LENGTH + lead)
        want = [a >= 0 and b <= size and (b <= gap[0] or a >= gap[1]) for a, b in windows]
        assert room == want
    assert {tuple(x) for x in found.room.tolist()} == {(a, b) for a in (True, False) for b in (True, False)}


def test_find(tmp_path: Path) -> None:
    found = indexed(tmp_path, made(8000))
    asked = np.concatenate([found.kmers[::-1], found.kmers + np.uint64(1), np.array([2**64 - 1, 0], np.uint64)])
    at, known = found.find(asked)
    assert at[: len(found)].tolist() == list(range(len(found)))[::-1]
    assert known.tolist() == np.isin(asked, found.kmers).tolist()
    nothing = indexed(tmp_path, "A" * 100, name="b.fa")
    assert len(nothing) == 0 and not nothing.find(found.kmers)[1].any()
