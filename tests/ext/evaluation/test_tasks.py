"""Generated tasks: samples obey the rule and depend only on (seed, split, index). Wrong values are refused."""

import itertools

import numpy as np
import pytest
import torch

from lightning_dilated.data import FarRecallDataModule
from lightning_dilated.sequence.shard import Place
from lightning_dilated.strategy.loader import RankDataset

SIZES = {"train_size": 40, "val_size": 8, "test_size": 6, "batch_size": 4}


def task(**options) -> FarRecallDataModule:
    return FarRecallDataModule(**{"seq_len": 64, **SIZES, **options})


def flat(sample: dict) -> tuple:
    return tuple(tuple(value.tolist()) if torch.is_tensor(value) else value for value in sample.values())


def test_a_sample_is_a_function_of_seed_split_and_index() -> None:
    samples = {}
    for seed, split in itertools.product((0, 1), ("train", "val", "test")):
        data = task(seed=seed).dataset(split)
        torch.manual_seed(seed)
        np.random.seed(seed + 5)
        for index in (5, 0, 5):
            values = flat({name: value for name, value in data[index].items() if name != "index"})
            assert samples.setdefault((seed, split, index), values) == values
    assert len(set(samples.values())) == len(samples) == 12


def test_splits_and_batches() -> None:
    data = task()
    data.check()
    assert data.describe().endswith(": 40 train, 8 val, 6 test")
    assert [len(loader) for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader())] == [
        10,
        2,
        2,
    ]
    assert sorted(int(i) for batch in data.train_dataloader() for i in batch["index"]) == list(range(40))
    batch = next(iter(data.val_dataloader()))
    assert batch["index"].tolist() == [0, 1, 2, 3] and batch["tokens"].shape == (4, 64)
    assert {value.dtype for value in batch.values()} == {torch.int64}
    assert batch["tokens"].min() >= 0 and batch["tokens"].max() < data.vocab_size
    assert task(test_size=0).test_dataloader() == []
    assert task(seed=1).dataset("val").fingerprint() != task().dataset("val").fingerprint()


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_rank_gets_its_slice(layout: str) -> None:
    data = task().dataset("train")
    whole, places = data[7], [Place(4, rank, layout) for rank in range(4)]
    parts = [RankDataset(data, place)[7] for place in places]
    at = [p for place in places for r in place.ranges(64) for p in r]
    for name, value in whole.items():
        if name in ("tokens", "labels"):
            assert torch.equal(torch.cat([part[name] for part in parts]), value[at])
        else:
            assert all(part[name] == value for part in parts)
    assert data.read_ranges(7, ())["tokens"].tolist() == []
    with pytest.raises(IndexError, match="sample 40 was asked for, but the train split has 40"):
        data[40]


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize(
    ("seq_len", "pairs", "vocabulary", "queries"),
    [(64, 4, 8, None), (16, 4, 4, None), (17, 4, 9, None), (9, 1, 2, 2), (64, 4, 8, 16), (300, 1, 30, 60)],
)
def test_far_recall_obeys_its_rule(seq_len: int, pairs: int, vocabulary: int, queries: int | None, split: str) -> None:
    data = FarRecallDataModule(seq_len, pairs, vocabulary, queries, val_size=200)
    half, places, values = seq_len // 2, set(), []
    for sample in (data.dataset(split)[i] for i in range(200)):
        tokens, labels = sample["tokens"].tolist(), sample["labels"].tolist()
        keys = [p for p, token in enumerate(tokens) if 1 <= token <= vocabulary]
        known = {tokens[p]: tokens[p + 1] for p in keys if p < half}
        asks = [p for p in keys if p >= half]
        assert len(known) == pairs and len(asks) == (queries or pairs) and {tokens[p] for p in asks} == set(known)
        assert all(p + 1 < half for p in keys if p < half)  # no pair crosses the middle of the sequence
        expected = [-100] * seq_len
        for p in asks:
            assert tokens[p + 1] == known[tokens[p]] > vocabulary
            if split == "train" or tokens[p] not in tokens[half:p]:
                expected[p] = tokens[p + 1]
        assert labels == expected
        assert sum(token == 0 for token in tokens) == seq_len - 2 * pairs - 2 * (queries or pairs)
        places |= set(keys)
        values += list(known.values())
    if (seq_len, queries) == (64, None):  # with this size, pairs occur at all positions
        assert places == {p for p in range(seq_len) if p not in (half - 1, seq_len - 1)}
    share = np.bincount(values, minlength=data.vocab_size)[1 + vocabulary :] / len(values)
    assert np.abs(share - 1 / vocabulary).max() < 5 * np.sqrt(1 / vocabulary / len(values))


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize(("seq_len", "pairs", "vocabulary", "queries"), [(64, 4, 8, 32), (9, 1, 2, None), (8, 4, 4, 4)])
def test_far_recall_of_pairs_in_one_token(seq_len, pairs, vocabulary, queries, split) -> None:
    data = FarRecallDataModule(seq_len, pairs, vocabulary, queries, pair_tokens=1, val_size=200)
    assert data.vocab_size == 1 + vocabulary + vocabulary**2 and data.rule().endswith("a token a pair")
    half, places, drawn = seq_len // 2, set(), []
    for sample in (data.dataset(split)[i] for i in range(200)):
        tokens, labels = sample["tokens"].tolist(), sample["labels"].tolist()
        known = {1 + (token - 1 - vocabulary) // vocabulary: token for token in tokens[:half] if token}
        asks = [p for p in range(half, seq_len) if tokens[p]]
        assert len(known) == pairs and len(asks) == (queries or pairs) and {tokens[p] for p in asks} == set(known)
        assert labels == [known[tokens[p]] if p in asks else -100 for p in range(seq_len)]
        places |= {p for p in range(seq_len) if tokens[p]}
        drawn += list(known.values())
    assert places == set(range(seq_len))
    share = np.bincount(drawn, minlength=data.vocab_size)[1 + vocabulary :] / len(drawn)
    assert np.abs(share - vocabulary**-2).max() < 6 * np.sqrt(vocabulary**-2 / len(drawn))


@pytest.mark.parametrize("split", ["train", "val", "test"])
@pytest.mark.parametrize("pair_tokens", [1, 2])
def test_distances_are_those_from_each_query_to_its_pair(pair_tokens, split) -> None:
    data = FarRecallDataModule(65, 3, 5, 9, pair_tokens, train_size=20, val_size=20, test_size=20)
    for sample in (data.dataset(split)[i] for i in range(20)):
        tokens = sample["tokens"].tolist()
        expected = [0] * 65
        # the first token of each pair, or the key that the pair's single token encodes
        keys = [token if pair_tokens == 2 else (token - 6) // 5 + 1 if token else 0 for token in tokens[:32]]
        for p in (p for p in range(32, 65) if 1 <= tokens[p] <= 5):
            expected[p] = p - keys.index(tokens[p])
        distances = data.distances(split, sample["index"])
        assert distances.dtype == torch.int64 and distances.tolist() == expected
        assert bool((distances[sample["labels"] != -100] > 0).all())


def test_distances_of_no_sample() -> None:
    data = FarRecallDataModule(64, val_size=3)
    with pytest.raises(IndexError, match="sample 3 was asked for, but the val split has 3"):
        data.distances("val", 3)
    with pytest.raises(ValueError, match=r"split must be one of .*; got 'dev'"):
        data.distances("dev", 0)


WRONG = [
    ({"num_queries": 33}, ValueError, "data.seq_len is 128, but 33 pairs or queries .* need 132: raise"),
    ({"num_queries": 3}, ValueError, "data.num_queries must be at least 4, got 3"),
    ({"num_pairs": 0}, ValueError, "data.num_pairs must be .*got .*0"),
    ({"pair_tokens": 3}, ValueError, "data.pair_tokens must be 1 or 2, got 3"),
    ({"num_pairs": 9}, ValueError, "data.num_pairs is 9, .* data.vocabulary has 8: raise data.voc"),
    ({"seq_len": 15}, ValueError, "data.seq_len is 15, but 4 pairs .* need 16: raise data.seq_len"),
    ({"vocabulary": 1}, ValueError, "data.vocabulary must be .*got .*1"),
    ({"train_size": 0}, ValueError, "data.train_size must be .*got .*0"),
    ({"val_size": "9"}, TypeError, "data.val_size must be .*got .*'9'"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG)
def test_wrong_values(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FarRecallDataModule(**options)


def test_too_few() -> None:
    with pytest.raises(ValueError, match="train split has 40 samples, but one batch takes 41"):
        task(batch_size=41).check()
    with pytest.raises(ValueError, match=r"split must be one of .*; got 'dev'"):
        task().dataset("dev")
