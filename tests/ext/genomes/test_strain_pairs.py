"""Two strains side by side: windows that correspond, what is drawn anew in each sample, and errors before any work."""

import copy
import gzip
import itertools
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_dilated.data import StrainPairsDataModule
from lightning_dilated.sequence.shard import Place
from lightning_dilated.strategy.loader import RankDataset

from .strains import made, mutated, reverse_complement, write_strain

N = 512
SIZES = {"seq_len": N, "train_size": 60, "val_size": 20, "test_size": 10}


def letters(tokens: torch.Tensor) -> str:
    return "".join("ACGT"[token] for token in tokens.tolist())


@pytest.fixture
def genomes() -> dict[str, str]:
    """Strains of two species by file name; they differ in single bases only, so that places correspond one to one."""
    one, two = made(12_000, 1), made(9_000, 2)
    return {
        "one0.fa": one,
        "one1.fa": mutated(one, 0.02, 3, indels=False),
        "one2.fa": mutated(one, 0.01, 4, indels=False),
        "two0.fa": two,
        "two1.fa": mutated(two, 0.02, 5, indels=False),
    }


@pytest.fixture
def species(tmp_path: Path, genomes: dict[str, str]) -> dict[str, list[str]]:
    files = {name: write_strain(tmp_path, name, bases) for name, bases in genomes.items()}
    return {kind: [file for name, file in files.items() if name.startswith(kind)] for kind in ("one", "two")}


Spot = tuple[str, bool, int]


def places(part: str, genomes: dict[str, str]) -> list[Spot]:
    """(file, whether on the other strand, first position there in the order of reading) of all windows that read so."""
    strands = [(x, r, b if not r else reverse_complement(b)) for x, b in genomes.items() for r in (False, True)]
    found = [(name, reverse, strand.find(part)) for name, reverse, strand in strands]
    return [place for place in found if place[2] >= 0]


def alike(sample: dict, boundary: int, genomes: dict[str, str]) -> list[tuple[Spot, Spot]]:
    """The pairs of places, on one strand of two strains and at most 63 bases apart, that a sample may be of."""
    tokens = torch.cat([sample["tokens"], sample["labels"][-1:]])
    first, second = (places(letters(x), genomes) for x in (tokens[:boundary], tokens[boundary:]))
    pairs = itertools.product(first, second)
    return [(a, b) for a, b in pairs if a[0] != b[0] and a[1] == b[1] and 0 <= b[2] - a[2] <= 63]


def test_windows_correspond(species: dict[str, list[str]], genomes: dict[str, str]) -> None:
    """Both windows are of two strains of one species, at the same place but for what was dropped, on one strand."""
    data = StrainPairsDataModule(species, val="two", **SIZES, rename_bases=False)
    drawn, boundaries = [], []
    for split, kind in (("train", "one"), ("val", "two")):
        samples = data.dataset(split)
        for index in range(len(samples)):
            sample, boundary = samples[index], data.boundary(split, index)
            assert sample["tokens"].shape == (N,) and sample["tokens"].dtype == sample["labels"].dtype == torch.int64
            assert torch.equal(sample["labels"][:-1], sample["tokens"][1:])
            found = alike(sample, boundary, genomes)
            assert found and all(name.startswith(kind) for pair in found for name, _, _ in pair)
            drawn += found if len(found) == 1 else []  # a window in which two strains are equal says less
            boundaries.append(boundary)
    assert len(drawn) > 60
    assert len({(a[0], b[0]) for a, b in drawn}) == 6 + 2  # each order of each two strains
    assert {a[1] for a, _ in drawn} == {False, True}
    assert len({b[2] - a[2] for a, b in drawn}) > 30 and len({a[2] for a, _ in drawn}) > 55
    assert min(boundaries) >= 0.9 * N / 2 and max(boundaries) <= 1.1 * N / 2
    assert min(boundaries) < 0.92 * N / 2 and max(boundaries) > 1.08 * N / 2 and len(set(boundaries)) > 25


def test_windows_begin_anywhere_before_their_32_mer(tmp_path: Path) -> None:
    """A genome with few 32-mers to begin at has many more places where windows begin."""
    bases = made(2000, 1)
    files = [write_strain(tmp_path, f"{i}.fa", mutated(bases, 0.01 * i, 2, indels=False)) for i in range(2)]
    options = {"rename_bases": False, "reverse_complement": 0, "max_dropped": 0}
    data = StrainPairsDataModule({"x": files}, seq_len=256, train_size=150, **options)
    first = data.dataset("train")
    genomes = {str(i): _records(tmp_path / f"{i}.fa")[0] for i in range(2)}
    begins = {alike(first[i], data.boundary("train", i), genomes)[0][0][2] for i in range(150)}
    assert data._strains is not None
    assert len(begins) > 80 > 2 * max(len(strain.anchors) for strain in data._strains["x"])


def test_what_is_drawn_can_be_fixed(species: dict[str, list[str]], genomes: dict[str, str]) -> None:
    options = {"boundary_range": 0, "max_dropped": 0, "rename_bases": False, "reverse_complement": 0}
    for reverse in (0, 1):
        data = StrainPairsDataModule(species, val="two", **SIZES, **{**options, "reverse_complement": reverse})
        for index in range(20):
            assert data.boundary("train", index) == N // 2
            found = alike(data.dataset("train")[index], N // 2, genomes)
            assert any(a[1:] == b[1:] and a[1] == reverse for a, b in found)


def test_bases_are_renamed_in_each_sample(species: dict[str, list[str]]) -> None:
    """A renaming maps the sample onto the one that is not renamed; there are 24, and labels are renamed alike."""
    plain = StrainPairsDataModule(species, **SIZES, rename_bases=False).dataset("train")
    renamed = StrainPairsDataModule(species, **SIZES).dataset("train")
    names = set()
    for index in range(len(plain)):
        pairs = {(int(a), int(b)) for a, b in zip(plain[index]["tokens"], renamed[index]["tokens"], strict=True)}
        assert len(pairs) == 4 and {b for _, b in pairs} == {0, 1, 2, 3}
        assert torch.equal(renamed[index]["labels"][:-1], renamed[index]["tokens"][1:])
        names.add(tuple(sorted(pairs)))
    assert len(names) > 15


def test_an_inverted_stretch_is_read_on_the_other_strand(tmp_path: Path) -> None:
    """The middle of the second strain is turned round: windows there correspond on opposite strands."""
    bases = made(12_000, 7)
    turned = bases[:4000] + reverse_complement(bases[4000:8000]) + bases[8000:]
    species = {"x": [write_strain(tmp_path, "a.fa", bases), write_strain(tmp_path, "b.fa", turned)]}
    data = StrainPairsDataModule(species, seq_len=128, train_size=200, rename_bases=False)
    inside = 0
    for index in range(200):
        boundary, tokens = data.boundary("train", index), data.dataset("train")[index]["tokens"]
        found = [places(letters(x), {"a.fa": bases}) for x in (tokens[:boundary], tokens[boundary:])]
        if not all(found):
            continue  # across an end of the inversion
        ((_, one, first),), ((_, two, second),) = found
        assert one == two and 0 <= second - first <= 63
        inside += min(first, second) >= 4000 and max(first, second) < 8000 - 128
    assert inside > 30


def test_a_sample_is_a_function_of_seed_split_and_index(species: dict[str, list[str]]) -> None:
    def flat(sample: dict) -> tuple:
        return tuple(sample["tokens"].tolist()), tuple(sample["labels"].tolist())

    found = {}
    for seed in (0, 1):
        data = StrainPairsDataModule(species, val="two", **SIZES, seed=seed)
        for split in ("train", "val"):
            samples = data.dataset(split)
            again = pickle.loads(pickle.dumps(samples))  # as a worker gets it
            torch.manual_seed(seed)
            np.random.seed(seed)
            for index in (5, 0, 5):
                sample = flat(samples[index])
                assert found.setdefault((seed, split, index), sample) == sample == flat(again[index])
    assert len(set(found.values())) == len(found) == 8
    other = StrainPairsDataModule(species, val="two", **{**SIZES, "train_size": 30})
    assert flat(other.dataset("train")[5]) == found[0, "train", 5]


def test_workers_and_ranks_serve_the_same_samples(species: dict[str, list[str]]) -> None:
    batches = [
        list(StrainPairsDataModule(species, val="two", **SIZES, batch_size=5, num_workers=workers).val_dataloader())
        for workers in (0, 2)
    ]
    assert len(batches[0]) == 4 and set(batches[0][0]) == {"tokens", "labels", "index"}
    for left, right in zip(*batches, strict=True):
        assert left["tokens"].shape == (5, N)
        assert all(torch.equal(left[name], right[name]) for name in left)
    samples = StrainPairsDataModule(species, **SIZES).dataset("train")
    for layout in ("contiguous", "zigzag"):
        places = [Place(2, rank, layout) for rank in range(2)]
        at = [p for place in places for r in place.ranges(N) for p in r]
        parts = [RankDataset(samples, place)[3] for place in places]
        for name in ("tokens", "labels"):
            assert torch.equal(torch.cat([part[name] for part in parts]), samples[3][name][at])


def test_windows_hold_known_bases_only(tmp_path: Path) -> None:
    """Runs of N, other letters and small letters: every window is one of A C G T in its genome."""
    bases = list(made(20_000, 8))
    other = list(mutated("".join(bases), 0.01, 9, indels=False))
    for text, first in ((bases, 3000), (other, 9000)):
        for start in range(first, 20_000, 4000):
            text[start : start + 5] = "NRNYN"
    small = "".join(other).lower()
    genomes = {"a.fa": "".join(bases), "b.fa": "".join(other)}
    species = {"x": [write_strain(tmp_path, "a.fa", genomes["a.fa"]), write_strain(tmp_path, "b.fa", small)]}
    data = StrainPairsDataModule(species, **{**SIZES, "train_size": 100}, rename_bases=False)
    seen = set()
    for index in range(100):
        found = alike(data.dataset("train")[index], data.boundary("train", index), genomes)
        assert found
        seen |= {place // 1000 for pair in found for _, _, place in pair}
    assert len(seen) > 12 and data.vocab_size == 4


def test_strains_of_many_records(tmp_path: Path) -> None:
    """Drafts of contigs: both windows lie in one record each, and what is too short for a sample is not read."""
    parts = [made(size, seed) for seed, size in enumerate((3000, 200, 2500, 40))]
    left = write_strain(tmp_path, "a.fa", *parts)
    right = write_strain(tmp_path, "b.fa", *[mutated(x, 0.01, 7, indels=False) for x in parts[::-1]])
    data = StrainPairsDataModule({"x": [left, right]}, seq_len=256, train_size=80, rename_bases=False)
    genomes = {f"{name}{i}": text for name in "ab" for i, text in enumerate(_records(tmp_path / f"{name}.fa"))}
    seen = set()
    for index in range(80):
        found = alike(data.dataset("train")[index], data.boundary("train", index), genomes)
        seen |= {(a[0], b[0]) for a, b in found}
    assert seen == {("a0", "b3"), ("b3", "a0"), ("a2", "b1"), ("b1", "a2")}


def _records(path: Path) -> list[str]:
    return ["".join(part.split("\n")[1:]) for part in path.read_text().split(">")[1:]]


def test_anchors_that_few_have_are_found(tmp_path: Path) -> None:
    """Only one stretch of two long genomes is common, so that draws of some 32-mers miss it."""
    shared = made(1200, 1)
    files = [write_strain(tmp_path, f"{i}.fa", made(150_000, 2 + i) + shared + made(150_000, 4 + i)) for i in range(2)]
    data = StrainPairsDataModule({"x": files}, seq_len=256, train_size=20, rename_bases=False)
    for index in range(20):
        first = letters(data.dataset("train")[index]["tokens"][: data.boundary("train", index)])
        # the 32-mer lies in the shared stretch, and at most 64 bases before it the window begins
        assert any(first[at : at + 32] in x for x in (shared, reverse_complement(shared)) for at in range(65))


def test_species_and_splits(species: dict[str, list[str]], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        data = StrainPairsDataModule(species, val=["two"], **SIZES)
        data.check()
    want = (
        "5 strains of 2 species, 54,000 bases; train one (3 strains): 60 samples; val two (2 strains): 20 samples; "
        "two strains share "
    )
    assert data.describe().startswith(want) and data.describe().count("\n") == 0
    lines = [record.message for record in caplog.records if record.message.startswith("data: 5 strains")]
    assert lines == [f"data: {data.describe()}"]
    least = min(data._shared)[0]
    assert 0.2 < least < 0.6 and f"share {least:.0%} to" in data.describe()
    assert [len(data.dataset(split)) for split in ("train", "val", "test")] == [60, 20, 0]
    assert (
        data.test_dataloader() == [] and data.wanted("test") == "data.test names no species; name some of data.species"
    )
    # what is named nowhere is not read
    named = StrainPairsDataModule({**species, "gone": "no such folder"}, train="one", test="two", **SIZES)
    assert [len(named.dataset(split)) for split in ("train", "val", "test")] == [60, 0, 10]
    assert (
        data.dataset("val").fingerprint()
        != StrainPairsDataModule(species, val="two", **SIZES, seed=1).dataset("val").fingerprint()
    )
    assert data.dataset("train").fingerprint() != named.dataset("train").fingerprint()


def test_directories_globs_and_compressed_files(species: dict[str, list[str]], tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    folder.mkdir()
    for file in species["one"]:
        (folder / f"{Path(file).name}.gz").write_bytes(gzip.compress(Path(file).read_bytes()))
    given = [species["one"], str(tmp_path / "one*.fa"), str(folder)]
    options = {**SIZES, "cache_dir": str(tmp_path / "cache")}
    found = [StrainPairsDataModule({"one": x, "two": species["two"]}, **options).dataset("train") for x in given]
    for samples in found[1:]:
        assert samples.fingerprint() == found[0].fingerprint()
        assert torch.equal(samples[4]["tokens"], found[0][4]["tokens"])


# -- what is refused ---------------------------------------------------------------------------------------------------
VALUES = [
    ({"species": {}}, TypeError, "data.species must be a mapping of species to their FASTA files.*got {}"),
    ({"species": ["a.fa"]}, TypeError, r"data.species must be a mapping .*got \['a.fa'\]"),
    ({"species": {"one": []}}, ValueError, r"data.species.one is an empty list; pass existing files"),
    ({"val": "three"}, ValueError, r"data.val holds \['three'\], but data.species has: one, two"),
    ({"train": ["one", "three"]}, ValueError, r"data.train holds \['three'\], but data.species has"),
    (
        {"val": "two", "test": "two"},
        ValueError,
        r"data.val and data.test both hold \['two'\]: a species serves one split",
    ),
    ({"train": "one", "val": "one"}, ValueError, r"data.train and data.val both hold \['one'\]"),
    ({"val": ["one", "two"]}, ValueError, r"leave none of data.species \(one, two\) to train on: add a species"),
    ({"seq_len": 63}, ValueError, "data.seq_len must be at least 64, got 63"),
    ({"boundary_range": 1.0}, ValueError, "data.boundary_range must be .*got .*1.0"),
    ({"max_dropped": -1}, ValueError, "data.max_dropped must be .*got .*-1"),
    ({"rename_bases": 1}, TypeError, "data.rename_bases must be .*got .*1"),
    ({"reverse_complement": 2}, ValueError, "data.reverse_complement must be a number in .0, 1., got 2"),
    ({"train_size": 0}, ValueError, "data.train_size must be .*got .*0"),
]


@pytest.mark.parametrize(("options", "error", "message"), VALUES)
def test_wrong_values(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        StrainPairsDataModule(**{"species": {"one": "never", "two": "looked at"}, **options})


def test_wrong_data(species: dict[str, list[str]], tmp_path: Path) -> None:
    """Each error names the file, and comes with `check`, which runs before training."""
    one, stranger = species["one"], write_strain(tmp_path, "stranger.fa", made(12_000, 99))
    short = write_strain(tmp_path, "short.fa", made(12_000, 1)[:400])
    twin = write_strain(tmp_path, "twin.fa", made(12_000, 1))
    (tmp_path / "protein.fa").write_text(">p\n" + "MEL" * 5000 + "\n")
    pieces = [write_strain(tmp_path, f"pieces{i}.fa", *_pieces(i)) for i in range(2)]
    cases = [
        (
            {"one": one[:1]},
            {},
            r"data.species.one has one strain \(.*one0.fa\), and a pair takes two: add a FASTA file",
        ),
        (
            {"one": [*one, stranger]},
            {},
            "stranger.fa share no 32-mer that occurs once in each .* are they strains of one",
        ),
        (
            {"one": [*one, short]},
            {},
            r"short.fa has no record longer than 400 bases, but .* up to 473 .* at most 143, or",
        ),
        ({"one": [*one, twin]}, {}, "one0.fa and .*twin.fa hold the same bases, so one would be copied from the other"),
        ({"one": one, "two": one}, {}, "one0.fa is in data.species.one and in data.species.two: leave it out of one"),
        (
            {"one": one, "two": [twin, stranger]},
            {"val": "two"},
            "hold the same record of 12,000 bases, one for data.train",
        ),
        ({"one": [*one, str(tmp_path / "gone.fa")]}, {}, "gone.fa does not exist; .* in data.species.one"),
        ({"one": [*one, str(tmp_path / "protein.fa")]}, {}, "is it a protein .* Take it out of data.species.one"),
        ({"x": pieces}, {}, r"share [\d,]+ 32-mers, but none with 128 known bases .* lower data.seq_len = 512"),
        (species, {"batch_size": 61}, "train split has 60 samples, but one batch takes 61"),
    ]
    for given, options, message in cases:
        with pytest.raises((ValueError, OSError), match=message):
            StrainPairsDataModule(copy.deepcopy(given), **{**SIZES, **options}).check()
    with pytest.raises(ValueError, match=r"split must be one of .*; got 'dev'"):
        StrainPairsDataModule(species, **SIZES).dataset("dev")


def _pieces(strain: int) -> list[str]:
    """Records of which one is long enough, but shares nothing; what is shared lies in short ones."""
    return [made(2000, 50 + strain), *(mutated(made(300, 60 + i), 0.003 * strain, 1) for i in range(20))]
