"""TokenDataModule: sequences, documents and splits match the plain array, and a rank reads its slice only."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dilated.data import TokenDataModule
from lightning_dilated.sequence.shard import Place
from lightning_dilated.strategy.loader import RankDataset

EOS, N = 0, 50
TOKENS = np.random.default_rng(0).integers(0, 30, 1000)


def module(folder: Path, tokens: np.ndarray = TOKENS, **options) -> TokenDataModule:
    """Return a module that reads two token files, one in each format."""
    np.save(folder / "a.npy", tokens[:333].astype(np.int32))
    (folder / "b.bin").write_bytes(tokens[333:].astype(np.uint16).tobytes())
    return TokenDataModule(
        str(folder), **{"seq_len": N, "vocab_size": 30, "val_fraction": 0.1, "test_fraction": 0, **options}
    )


@pytest.mark.parametrize("eos", [None, EOS])
def test_sequences_lie_end_to_end_within_their_split(tmp_path: Path, eos: int | None) -> None:
    data = module(tmp_path, eos_token=eos, val_fraction=0.2, test_fraction=0.1)
    assert data.describe() == "2 files, 1,000 tokens; sequences of 50: 13 train, 3 val, 1 test"
    for split, start, count in (("train", 0, 13), ("val", 700, 3), ("test", 900, 1)):
        loader = getattr(data, f"{split}_dataloader")()
        batches = sorted(loader, key=lambda batch: int(batch["index"]))
        assert [int(batch["index"]) for batch in batches] == list(range(count))
        for number, batch in enumerate(batches):
            begin = start + number * N
            labels = TOKENS[begin + 1 : begin + N + 1].copy()
            if eos is not None:
                labels[TOKENS[begin : begin + N] == eos] = -100
            assert batch["tokens"].tolist() == [TOKENS[begin : begin + N].tolist()]
            assert batch["labels"].tolist() == [labels.tolist()]
            assert batch["tokens"].dtype == batch["labels"].dtype == torch.int64
            assert ("cu_seqlens" in batch) == (eos is not None)


def documents(tokens: list[int]) -> list[int]:
    """Return the bounds of documents, computed by a plain loop."""
    bounds = [0]
    for at, token in enumerate(tokens, 1):
        if token == EOS or at == len(tokens):
            bounds.append(at)
    return bounds


@given(st.lists(st.integers(0, 2), min_size=12, max_size=40).filter(lambda x: EOS in x), st.integers(1, 8))
def test_documents(tmp_path_factory: pytest.TempPathFactory, tokens: list[int], seq_len: int) -> None:
    path = tmp_path_factory.mktemp("tokens") / "a.npy"
    np.save(path, np.array(tokens, dtype=np.uint16))
    data = TokenDataModule(str(path), seq_len, 3, eos_token=EOS, val_fraction=0, test_fraction=0).dataset("train")
    for i, sample in enumerate(data[i] for i in range(len(data))):
        bounds = sample["cu_seqlens"]
        assert bounds.dtype == torch.int32 and bounds.device.type == "cpu"
        assert bounds.tolist() == documents(tokens[i * seq_len : (i + 1) * seq_len])
        ends = bounds[1:].long() - 1
        inner = ends[ends < seq_len - 1]
        assert (sample["labels"][inner] == -100).all()
        # the label of the last token is in the next sequence, unless the token ends a document
        assert sample["labels"][-1] == (-100 if tokens[(i + 1) * seq_len - 1] == EOS else tokens[(i + 1) * seq_len])
        assert (sample["labels"] == -100).sum() == tokens[i * seq_len : (i + 1) * seq_len].count(EOS)


RANGES = [(range(0, 30),), (range(20, 30), range(40, 50)), (range(1, 50, 4),), (range(49, 50),), ()]


@pytest.mark.parametrize("ranges", RANGES)
def test_range_reads_equal_whole_ones(tmp_path: Path, ranges: tuple[range, ...]) -> None:
    data = module(tmp_path, eos_token=EOS).dataset("train")
    full, at = data[6], [p for r in ranges for p in r]  # the 50 tokens of this sample span both files
    got = data.read_ranges(6, ranges)
    assert got.keys() == full.keys() and got["index"] == 6
    assert torch.equal(got["tokens"], full["tokens"][at]) and torch.equal(got["labels"], full["labels"][at])
    assert torch.equal(got["cu_seqlens"], full["cu_seqlens"])  # bounds of the whole sequence


@pytest.mark.parametrize("eos", [None, EOS])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_rank_reads_its_slice(tmp_path: Path, touched, ranks: int, eos: int | None) -> None:
    data = module(tmp_path, eos_token=eos, val_fraction=0.102)
    val = data.dataset("val")
    assert touched.count() == 333 * 4 + 667 * 2  # the check reads every token once
    parts = []
    for rank in range(ranks):
        parts.append(RankDataset(val, Place(ranks, rank))[1])
        # 2 bytes per token of the slice and of the last label; the slice begins at token 948, which is 615 in b.bin
        begin = 2 * (615 + rank * N // ranks)
        assert touched.take() == [("b.bin", begin, begin + 2 * (N // ranks + 1))]
    assert val.stream.bytes_read == 2 * (N + ranks)
    for name in ("tokens", "labels"):
        assert torch.equal(torch.cat([part[name] for part in parts]), val[1][name])


@pytest.mark.parametrize("ranks", [2, 5])
def test_zigzag_reads_two_stretches(tmp_path: Path, touched, ranks: int) -> None:
    data = module(tmp_path).dataset("train")
    touched.take()
    for rank in range(ranks):
        RankDataset(data, Place(ranks, rank, "zigzag"))[0]
        stretches = touched.take()
        assert sum(stop - start for _, start, stop in stretches) <= 4 * (N // ranks + 4)
        assert all(name == "a.npy" for name, _, _ in stretches)


@pytest.mark.parametrize("fractions", [{}, {"val_fraction": 0}, {"test_fraction": 0.25}])
def test_splits_of_their_own(tmp_path: Path, fractions: dict) -> None:
    module(tmp_path)
    paths = {"paths": str(tmp_path / "a.npy"), "val_paths": [str(tmp_path / "b.bin")]}
    data = TokenDataModule(**paths, seq_len=10, vocab_size=30, **fractions)
    test = 83 if "test_fraction" in fractions else 0
    assert [len(data.dataset(split)) for split in ("train", "val", "test")] == [
        (332 - test) // 10,
        66,
        max(0, test - 1) // 10,
    ]
    assert data.dataset("val")[0]["tokens"].tolist() == TOKENS[333:343].tolist()
    assert (data.test_dataloader() == []) == (test == 0)
    with pytest.raises(
        ValueError, match=r"a\.npy is in data\.paths and in data\.test_paths: a file may serve one split only"
    ):
        TokenDataModule(**paths, test_paths=str(tmp_path / "*.npy"), seq_len=10, vocab_size=30).check()


def test_unscanned_tokens_are_checked_when_served(tmp_path: Path, touched) -> None:
    tokens = TOKENS.copy()
    tokens[400] = 31
    data = module(tmp_path, tokens, scan=False)
    train = data.dataset("train")
    assert touched.take() == []
    assert train[6]["tokens"].tolist() == TOKENS[300:350].tolist()
    with pytest.raises(ValueError, match=r"b\.bin holds token 31 at position 67 .* data.vocab_size = 30"):
        train[7]  # token 31 is the last label
    with pytest.raises(ValueError, match=r"b\.bin holds token 31 at position 67"):
        module(tmp_path, tokens).check()


def test_files_that_change_are_noticed(tmp_path: Path) -> None:
    train = module(tmp_path).dataset("train")
    first = np.load(tmp_path / "a.npy")
    first[3] = 77
    np.save(tmp_path / "a.npy", first)
    with pytest.raises(ValueError, match=r"a\.npy holds token 77 at position 3"):
        train[0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"paths": None}, TypeError, r"data.paths is None; pass existing files, directories or globs in data.paths$"),
        ({"paths": []}, ValueError, "data.paths is an empty list"),
        ({"val_paths": ""}, ValueError, "data.val_paths holds an empty string; .* in data.val_paths$"),
        ({"seq_len": 0}, ValueError, "data.seq_len must be .*got .*0"),
        ({"vocab_size": "3"}, TypeError, "data.vocab_size must be .*got .*'3'"),
        ({"dtype": "float32"}, ValueError, "data.dtype must be one of uint8, .*; got 'float32'"),
        ({"header": -1}, ValueError, "data.header must be .*got .*-1"),
        ({"scan": 1}, TypeError, "data.scan must be .*got .*1"),
        ({"val_fraction": 0.6, "test_fraction": 0.4}, ValueError, "add up to 1 or more"),
        ({"val_fraction": 0.1, "val_paths": "b"}, ValueError, "data.val_fraction is 0.1 and data.val_paths is set too"),
        ({"eos_token": 30}, ValueError, "data.eos_token must be below data.vocab_size = 30, got 30"),
        ({"eos_token": 1, "batch_size": 2}, ValueError, r"data.batch_size is 2, .* take 1: .*accumulate_grad_batches"),
        ({"eos_token": 1, "scan": False}, ValueError, "data.eos_token needs data.scan: true"),
    ],
)
def test_wrong_values(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TokenDataModule(**{"paths": "never looked at", "seq_len": 8, "vocab_size": 30, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"seq_len": 1000},
            "train split has 900 of the 1000 tokens.* needs 1001: pass more data, lower data.seq_len to at most 899",
        ),
        (
            {"seq_len": 50, "test_fraction": 0.01},
            "test split has 10 of the 1000 tokens.* needs 51.* or raise data.test_fraction",
        ),
        ({"batch_size": 18}, "train split has 17 sequences .* one batch takes 18"),
        ({"vocab_size": 31, "eos_token": 30}, "data.eos_token = 30 occurs nowhere in the data"),
    ],
)
def test_too_little_data(tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module(tmp_path, **options).check()
    with pytest.raises(ValueError, match=r"split must be one of .*; got 'dev'"):
        module(tmp_path).dataset("dev")
