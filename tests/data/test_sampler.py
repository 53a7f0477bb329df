"""The sampler's order, the samples of each rank, and the loader's position outside of a Trainer."""

import itertools

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_dilated._compat.lightning import batches_finished, epoch_batches_finished, set_batches_finished
from lightning_dilated.data import ResumableLoader, ResumableSampler


class Numbers(Dataset):
    def __init__(self, count: int, seq_len: int = 1) -> None:
        self.count, self.seq_len = count, seq_len

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def loader(count: int = 11, batch_size: int = 2, replicas: int = 1, rank: int = 0, **options: int) -> ResumableLoader:
    dataset = Numbers(count, options.pop("seq_len", 1))
    sampler = ResumableSampler(dataset, replicas, rank, seed=options.pop("seed", 0), drop_last=True)
    return ResumableLoader(dataset, batch_size=batch_size, sampler=sampler, drop_last=True, **options)


def epoch(source: DataLoader) -> list[list[int]]:
    return [batch.tolist() for batch in source]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("count", "replicas"), [(10, 1), (10, 3), (12, 4), (2, 3), (0, 2)])
def test_ranks_share_the_samples(count: int, replicas: int, drop_last: bool, shuffle: bool) -> None:
    samplers = [
        ResumableSampler(Numbers(count), replicas, rank, shuffle=shuffle, seed=5, drop_last=drop_last)
        for rank in range(replicas)
    ]
    assert all(isinstance(sampler, DistributedSampler) for sampler in samplers)
    shares = [list(sampler) for sampler in samplers]
    assert [len(share) for share in shares] == [len(sampler) for sampler in samplers]
    together = [index for group in itertools.zip_longest(*shares) for index in group if index is not None]
    order = samplers[0].order().tolist()
    assert sorted(order) == list(range(count))
    assert together == order[: count - count % replicas if drop_last else count]
    if not shuffle:
        assert order == sorted(order)


def test_order_depends_on_seed_and_epoch_alone() -> None:
    orders = {}
    for seed, number in itertools.product(range(3), range(3)):
        sampler = ResumableSampler(Numbers(30), seed=seed)
        sampler.set_epoch(number)
        torch.manual_seed(seed + number)
        np.random.seed(number)
        orders[seed, number] = tuple(sampler)
        assert orders[seed, number] == tuple(sampler.order())
    assert len(set(orders.values())) == 9


def test_wrong_rank() -> None:
    with pytest.raises(ValueError, match="Invalid rank 2"):
        ResumableSampler(Numbers(3), num_replicas=2, rank=2)


def test_epochs_advance_by_themselves_or_by_set_epoch() -> None:
    by_itself, with_epochs = loader(), loader()
    first, second, third = epoch(by_itself), epoch(by_itself), epoch(by_itself)
    assert first != second != third
    for number, expected in enumerate([first, second, third]):
        with_epochs.sampler.set_epoch(number)
        assert epoch(with_epochs) == expected
    with_epochs.sampler.set_epoch(1)
    assert epoch(with_epochs) == second


def test_a_pass_that_is_dropped_before_its_first_batch_uses_nothing() -> None:
    source = loader()
    iter(source)
    assert source.state_dict()["samples"] == 0
    reference = epoch(loader())
    assert epoch(source) == reference


def test_a_pass_that_fails_at_its_first_batch_uses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    source = loader()
    reference = epoch(loader())
    with monkeypatch.context() as patch:
        patch.setattr(Numbers, "__getitem__", lambda self, index: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            epoch(source)
    assert epoch(source) == reference


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [0, 1, 3, 4, 5])
def test_the_rest_of_the_epoch_and_then_whole_ones(stop: int, workers: int) -> None:
    reference = loader()
    epochs = [epoch(reference) for _ in range(3)]
    source = loader(num_workers=workers)
    list(source)
    taken = list(itertools.islice(iter(source), stop))  # by now the workers have fetched more batches than this
    state = source.state_dict()
    expected_place = (2, 0) if stop == 5 else (1, 2 * stop) if stop else (1, 0)
    assert (state["epoch"], state["samples"]) == expected_place
    assert len(taken) == stop

    resumed = loader(num_workers=workers)
    resumed.load_state_dict(state)
    resumed.sampler.set_epoch(7)  # the Trainer's epoch count may be off
    remaining = epoch(resumed) if stop < 5 else []
    assert remaining == epochs[1][stop:]
    assert len(resumed) == 5
    assert epoch(resumed) == epochs[2]


@pytest.mark.parametrize(("before", "after"), [((2, 2), (1, 4)), ((1, 4), (2, 1)), ((4, 1), (4, 3)), ((3, 1), (2, 4))])
def test_ranks_and_batch_size_may_change(before: tuple[int, int], after: tuple[int, int]) -> None:
    count, used = 50, 0
    ranks = [loader(count, before[0], before[1], rank) for rank in range(before[1])]
    order = ranks[0].sampler.order().tolist()
    for source in ranks:
        list(itertools.islice(iter(source), 3))
        used = source.state_dict()["samples"]
        assert used == 3 * before[0] * before[1]
    resumed = [loader(count, after[0], after[1], rank) for rank in range(after[1])]
    for source in resumed:
        source.load_state_dict(ranks[0].state_dict())
    served = [epoch(source) for source in resumed]
    step = after[0] * after[1]
    assert {len(batches) for batches in served} == {(count - used) // step}
    together = [index for group in zip(*served, strict=True) for index in zip(*group, strict=True)]
    assert [index for pair in together for index in pair] == order[used : used + (count - used) // step * step]


@pytest.mark.parametrize(
    ("options", "named"),
    [({"count": 12}, "num_samples = 11"), ({"seed": 1}, "seed = 0"), ({"seq_len": 2}, "seq_len = 1")],
)
def test_other_data_is_refused(options: dict, named: str) -> None:
    state = loader().state_dict()
    with pytest.raises(ValueError, match=f"written with {named} .*resume with the same data"):
        loader(**options).load_state_dict(state)
    with pytest.raises(ValueError, match="lacks epoch, samples"):
        loader().load_state_dict({"seed": 0, "num_samples": 11, "seq_len": 1, "shuffle": True})


def test_the_state_is_plain_values() -> None:
    """The state has plain values only, so a checkpoint loads with weights_only=True."""
    source = loader()
    next(iter(source))
    assert {type(value) for value in source.state_dict().values()} <= {int, bool, type(None)}


def test_another_sampler_is_served_without_a_position() -> None:
    source = ResumableLoader(Numbers(4), batch_size=2)
    assert epoch(source) == epoch(source) == [[0, 1], [2, 3]]
    assert source.state_dict() == {}
    source.load_state_dict({})
    assert epoch(source) == [[0, 1], [2, 3]]


def test_lightnings_batch_counters():
    """`_compat.lightning` reads and sets these counters. If this test fails, Lightning counts batches differently."""
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    progress = trainer.fit_loop.epoch_loop.batch_progress
    for _ in range(3):
        progress.increment_ready()
        progress.increment_started()
        progress.increment_processed()
        progress.increment_completed()
    progress.increment_ready()
    assert (batches_finished(trainer), epoch_batches_finished(trainer)) == (3, 3)
    set_batches_finished(trainer, 7)
    current = progress.current
    assert (current.ready, current.started, current.processed, current.completed) == (8, 7, 7, 7)
