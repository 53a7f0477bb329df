"""Balanced draws use each class, and each sample of a class, equally often, for any ranks and any position."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated.data import ResumableLoader, ResumableSampler, SlideDataModule
from lightning_dilated.data.packing import PackedSamples, PackingSampler

from ..examples import examples
from ..ext.slides.test_slides import grid, table, write
from .test_sampler import Numbers


def sampler(classes, replicas=1, rank=0, **options) -> ResumableSampler:
    return ResumableSampler(Numbers(len(classes)), replicas, rank, classes=classes, **options)


def epochs(source: ResumableSampler, count: int) -> list[list[int]]:
    out = []
    for epoch in range(count):
        source.set_epoch(epoch)
        out.append(source.order().tolist())
    return out


@settings(max_examples=examples(100), deadline=None)
@given(classes=st.lists(st.integers(0, 4), min_size=1, max_size=40), count=st.integers(1, 9), seed=st.integers(0, 3))
def test_draws_are_equal(classes, count, seed):
    drawn = list(itertools.chain(*epochs(sampler(classes, seed=seed), count)))
    assert len(drawn) == count * len(classes)
    by_class = Counter(classes[i] for i in drawn)
    assert set(by_class) <= set(classes)
    times = [by_class[c] for c in set(classes)]
    assert max(times) - min(times) <= 1
    by_sample = Counter(drawn)
    for c in set(classes):
        times = [by_sample[i] for i, x in enumerate(classes) if x == c]
        assert max(times) - min(times) <= 1


def test_no_place_tells_its_class():
    """The position does not determine the class: each round orders its classes at random, and reorders the samples."""
    order = epochs(sampler([0] * 30 + [1] * 10), 1)[0]
    first = [int(i >= 30) for i in order[::2]]
    assert 3 < sum(first) < 17
    rare = [i for i in order if i >= 30]
    assert sorted(rare[:10]) == sorted(rare[10:]) == list(range(30, 40)) and rare[:10] != rare[10:]


def test_seeds_and_epochs_differ():
    orders = [tuple(x) for seed in range(3) for x in epochs(sampler([0, 0, 0, 1, 1, 2] * 5, seed=seed), 3)]
    assert len(set(orders)) == 9


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_ranks_share_one_order(replicas):
    classes = [0] * 20 + [1] * 4
    shares = [list(sampler(classes, replicas, rank, drop_last=True)) for rank in range(replicas)]
    together = [i for step in zip(*shares, strict=True) for i in step]
    assert together == epochs(sampler(classes), 1)[0][: len(together)] and len(together) == 24 // replicas * replicas


def loader(classes, replicas=1, rank=0, batch_size=2) -> ResumableLoader:
    source = sampler(classes, replicas, rank, drop_last=True, seed=3)
    return ResumableLoader(source.dataset, batch_size=batch_size, sampler=source, drop_last=True)


def batches(source: ResumableLoader) -> list[list[int]]:
    return [x.tolist() for x in source]


@pytest.mark.parametrize("stop", [1, 3])
def test_resumed_on_another_number_of_ranks(stop):
    classes = [0] * 9 + [1] * 3
    whole = [batches(x) for x in [loader(classes)] * 2]
    source = loader(classes)
    list(itertools.islice(iter(source), stop))
    state = source.state_dict()
    ranks = [loader(classes, 2, rank, batch_size=1) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
    remaining = [sorted(a + b) for a, b in zip(*map(batches, ranks), strict=True)]
    assert remaining == [sorted(x) for x in whole[0][stop:]]


def test_a_state_of_the_other_sampling_is_refused():
    classes = [0] * 9 + [1] * 3
    plain = ResumableLoader(
        Numbers(12), batch_size=2, drop_last=True, sampler=ResumableSampler(Numbers(12), seed=3, drop_last=True)
    )
    with pytest.raises(ValueError, match="balanced = False of the training data, but it is True now"):
        loader(classes).load_state_dict(plain.state_dict())
    old = plain.state_dict()
    del old["balanced"]
    with pytest.raises(ValueError, match="balanced = False"):
        loader(classes).load_state_dict(old)
    plain.load_state_dict(old)


def test_packs_of_balanced_draws():
    class Lengths(Numbers):
        lengths = np.arange(12) % 3 + 1

    dataset = PackedSamples(Lengths(12), 5)
    source = PackingSampler(dataset, classes=[0] * 9 + [1] * 3, drop_last=True)
    packs = list(source)
    assert [i for pack in packs for i in pack] == source.order().tolist()
    assert sum(i >= 9 for pack in packs for i in pack) == 6


@pytest.mark.parametrize("options", [{"classes": [0, 1]}, {"classes": [0, 1, 1], "shuffle": False}])
def test_refused(options):
    with pytest.raises(ValueError, match="one number for each of the 3 samples, and needs shuffle=True"):
        ResumableSampler(Numbers(3), **options)


# -- slides ------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twelve slides, three of them positive."""
    path = tmp_path_factory.mktemp("balanced")
    for i in range(12):
        write(path / f"s{i:02}.h5", np.full((6, 3), i, np.float32), grid(6), patch_size_level0=256)
    table(path / "labels.csv", "slide_id,label", *(f"s{i:02},{'pos' if i < 3 else 'neg'}" for i in range(12)))
    return str(path)


def test_slides(folder):
    data = SlideDataModule(folder, f"{folder}/labels.csv", val_fraction=0, test_fraction=0, sampling="balanced")
    labels = [int(batch["label"]) for batch in data.train_dataloader()]
    assert sorted(labels) == [0] * 6 + [1] * 6 and data.class_counts == [9, 3]
    plain = SlideDataModule(folder, f"{folder}/labels.csv", val_fraction=0, test_fraction=0)
    assert sum(int(batch["label"]) for batch in plain.train_dataloader()) == 3


def test_needs_classes(folder):
    with pytest.raises(ValueError, match=r"draws classes equally often, but data\.labels is 'none'"):
        SlideDataModule(folder, sampling="balanced")
