"""Ranks that do not read the same data, or have unlike numbers of batches, are told so before a wrong number or a wait."""

import copy
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_dilated import RingDilatedStrategy, SequenceSpec, loss_share
from lightning_dilated.data import ByteDataModule

from .runs import Run, launched, make, trainer
from .test_hooks import Numbers, Plain

pytestmark = pytest.mark.full


class Other(Numbers):
    """Samples with something that all ranks hold whole."""

    def __init__(self, size=8, first=0, fingerprint=None):
        self.size, self.first = size, first
        if fingerprint:
            self.fingerprint = lambda: fingerprint

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {**super().__getitem__(index), "index": index + self.first, "many": torch.full((20,), self.first)}


class Whole(Plain):
    sequence_spec = SequenceSpec({"x": 1, "noise": 1}, whole=["index", "many"])


UNLIKE = {
    "samples": ({"size": 7}, {}, "samples: rank 0 has 8, rank 1 has 7"),
    "files": ({"fingerprint": "b"}, {"fingerprint": "a"}, "fingerprint: rank 0 has a, rank 1 has b"),
    "entries": ({"first": 3}, {}, "index: rank 0 has [0], rank 1 has [3]"),
}


def unlike(rank, group, name):
    other, usual, _ = UNLIKE[name]
    built = trainer(RingDilatedStrategy(), launched(rank), max_steps=1, use_distributed_sampler=False)
    try:
        built.fit(Whole(), DataLoader(Other(**(other if rank else usual))))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("name", UNLIKE)
def test_other_data_on_a_rank(pools, name):
    for error in pools(2).run(2, unlike, name):
        assert error and "nothing was computed" in error and UNLIKE[name][2] in error
        assert name != "entries" or "many: rank 0 has (1, 20) torch.int64 " in error


class Broken(Numbers):
    """Its fingerprint cannot be taken on rank 1; on rank 3 it is short."""

    def __init__(self, rank, how):
        self.rank, self.how = rank, how

    def __len__(self):
        return 4 if self.how == "short" and self.rank == 3 else 8

    def fingerprint(self):
        if self.how == "error" and self.rank == 1:
            raise OSError("no such disk")
        return "same"


def broken(rank, group, how):
    built = trainer(RingDilatedStrategy(sequence_size=2), launched(rank), max_steps=1)
    try:
        built.fit(Plain(), DataLoader(Broken(rank, how)))
    except (ValueError, OSError) as error:
        return str(error)


@pytest.mark.parametrize(
    "how, words",
    [pytest.param("error", "no such disk", marks=pytest.mark.slow), ("short", "rank 2 has 8, rank 3 has 4")],
)
def test_ranks_of_other_sequences_do_not_wait(pools, how, words):
    assert all(words in error for error in pools(4).run(4, broken, how))


def two_loaders(rank, group, kind, other):
    """Batches of two training loaders, of which one differs on rank 1 with `other`."""
    loaders = [DataLoader(Other(first=100)), DataLoader(Other(first=other * rank))]
    model = Whole()
    step = model.training_step
    model.training_step = lambda batch, batch_idx: step(batch[0] if kind is list else batch["a"], batch_idx)
    built = trainer(RingDilatedStrategy(), launched(rank), max_steps=2)
    try:
        built.fit(model, loaders if kind is list else dict(zip("ab", loaders, strict=True)))
    except ValueError as error:
        return str(error)
    return built.global_step


@pytest.mark.parametrize("kind", [list, dict])
def test_several_loaders(pools, kind):
    assert pools(2).run(2, two_loaders, kind, 0) == [2, 2]
    assert all("many: rank 0 has" in error for error in pools(2).run(2, two_loaders, kind, 1))


class Odd:
    pass


def test_words():
    from lightning_dilated.strategy.checks import _described

    equal = ["a", None, [1, 2.0], {"a": {1}}, torch.zeros(3), torch.zeros(40, dtype=torch.bfloat16), torch.zeros(0)]
    equal += [
        Odd(),
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(30, dtype=torch.bool),
        torch.zeros(20, dtype=torch.complex64),
    ]
    for x in equal:
        assert _described(x) == _described(copy.deepcopy(x))
    differ = [
        "a",
        "b",
        1,
        True,
        None,
        [1],
        [1, 2],
        {"a": 1},
        torch.zeros(2),
        torch.ones(2),
        torch.zeros(20),
        torch.ones(20),
    ]
    assert len({_described(x) for x in differ}) == len(differ)


def other_files(rank, group, folder):
    built, model, _, _ = make(Run(steps=1, model={"vocab_size": 256}), launched(rank))
    try:
        built.fit(model, ByteDataModule(f"{folder}/{rank}", seq_len=64, val_fraction=0, test_fraction=0))
    except ValueError as error:
        return str(error)


def test_other_files_on_a_rank(pools, tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / f"text{rank}").write_bytes(bytes(range(256)) * 2)
    assert all("fingerprint: rank 0 has" in error for error in pools(2).run(2, other_files, str(tmp_path)))


class Validated(Plain):
    """Logs a loss of all ranks in validation."""

    def validation_step(self, batch, batch_idx):
        self.log("val", loss_share(batch["x"].sum(), batch["x"].numel()), sync_dist=True)


def validated(rank, group, size, batches):
    built = trainer(RingDilatedStrategy(sequence_size=1), launched(rank), limit_val_batches=batches)
    loader = DataLoader(Numbers(), sampler=range(size if rank else 4))
    with mock.patch.object(built._data_connector, "_requires_distributed_sampler", lambda loader: False):
        try:
            built.validate(Validated(), loader, verbose=False)
        except (RuntimeError, ValueError) as error:
            return str(error)
    return "val" in built.callback_metrics


def test_losses_of_unlike_numbers_of_batches(pools):
    """Without a word, the rank with more batches would wait for the other until the timeout."""
    for error in pools(2).run(2, validated, 3, None):
        assert "the ranks have [4, 3] batches of the stage 'val'" in error and "torchmetrics" in error
    assert pools(2).run(2, validated, 3, 3) == [True, True]
    assert pools(2).run(2, validated, 4, None) == [True, True]


def test_a_rank_without_any_validation_batch(pools):
    """Lightning skips its loop, with the metric that the others then wait to add up."""
    for error in pools(2).run(2, validated, 0, None):
        assert "the ranks have [4, 0] batches of the stage 'val'" in error and "limit_val_batches=0" in error
    assert pools(2).run(2, validated, 0, 0) == [False, False]


def trained(rank, group, options):
    built = trainer(RingDilatedStrategy(sequence_size=1), launched(rank), **options)
    loader = DataLoader(Numbers(), sampler=range(4 - rank))
    with mock.patch.object(built._data_connector, "_requires_distributed_sampler", lambda loader: False):
        try:
            built.fit(Plain(), loader)
        except ValueError as error:
            return str(error)
    return built.global_step


def test_training_on_unlike_numbers_of_batches(pools):
    for error in pools(2).run(2, trained, {"max_epochs": 1}):
        assert "the ranks have [4, 3] batches of the stage 'train'" in error
    assert pools(2).run(2, trained, {"max_epochs": 2, "limit_train_batches": 3}) == [6, 6]
    assert pools(2).run(2, trained, {"max_steps": 3}) == [3, 3]


def test_a_stream_of_unknown_length(pools):
    assert pools(2).run(2, streamed) == [2, 2]


def streamed(rank, group):
    built = trainer(RingDilatedStrategy(), launched(rank), max_steps=2)
    loader = DataLoader(list(Numbers()[i] for i in range(4)))
    built.fit(Plain(), Stream(loader))
    return built.global_step


class Stream:
    """Batches without a length."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)
