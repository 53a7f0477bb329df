"""Splits of slides: groups stay together, each split has its share of every class, and a one-class split warns."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated.data import SlideDataModule
from lightning_dilated.ext.slides.splits import deal_groups, split_groups

from .test_slides import grid, table, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A read-only folder with twenty slides s0 to s19."""
    path = tmp_path_factory.mktemp("splits")
    for i in range(20):
        write(path / f"s{i}.h5", np.ones((12, 3), np.float32) * i, grid(12), patch_size_level0=256)
    return path


def module(folder, path, **options) -> SlideDataModule:
    return SlideDataModule(str(folder), path, **options)


# -- groups --------------------------------------------------------------------------------------------------------------
def torn(tmp_path):
    """Return a csv with two slides per patient. The split column divides p0, p1 (train, test) and p2 (train, val)."""
    words = ["train"] * 12 + ["val"] * 4 + ["test"] * 4
    words[1] = words[3] = "test"
    words[5] = "val"
    lines = [f"s{i},{i % 2},{word},p{i // 2}" for i, word in enumerate(words)]
    return table(tmp_path / "l.csv", "slide_id,label,split,patient", *lines)


def test_a_split_column_that_cuts_groups_apart_is_refused(folder, tmp_path):
    path = torn(tmp_path)
    message = (
        r"l\.csv: the column 'split' cuts 3 of 10 groups of 'patient' apart \(2 lie in train and test, 1 lie in train and "
        r"val\).*'p0' has 1 in train, 1 in test; 'p1' has.*data\.split_column to null.*data\.group_column"
    )
    with pytest.raises(ValueError, match=message):
        module(folder, path, group_column="patient").check()
    module(folder, path).check()  # no option asks for whole patients
    module(folder, path, group_column="patient", split_column=None).check()


def test_a_split_column_that_keeps_groups_whole(folder, tmp_path):
    lines = [f"s{i},{i % 2},{'test' if i > 15 else 'train'},p{i // 2}" for i in range(20)]
    path = table(tmp_path / "l.csv", "slide_id,label,split,patient", *lines)
    assert len(module(folder, path, group_column="patient").dataset("test")) == 4


# -- fractions -----------------------------------------------------------------------------------------------------------
def shares(words: list[str], labels: list[int]) -> dict[str, Counter]:
    return {split: Counter(x for x, word in zip(labels, words, strict=True) if word == split) for split in set(words)}


@pytest.mark.parametrize("seed", range(20))
def test_each_split_has_its_share_of_every_class(seed):
    labels = [0] * 45 + [1] * 15
    split_shares = shares(split_groups([f"s{i}" for i in range(60)], labels, 0.1, 0.2, seed), labels)
    assert split_shares["test"] == {0: 9, 1: 3} and split_shares["val"] in ({0: 4, 1: 2}, {0: 5, 1: 1})


@pytest.mark.parametrize("seed", range(20))
def test_patients_of_a_rare_class_reach_every_split(seed):
    """4 of 30 patients have a positive slide besides negative slides."""
    labels = [int(i % 3 == 0 and i < 12) for i in range(90)]
    groups = [f"p{i // 3}" for i in range(90)]
    words = split_groups(groups, labels, 0.2, 0.2, seed)
    assert all(len({w for w, g in zip(words, groups, strict=True) if g == x}) == 1 for x in set(groups))
    assert all(share[1] >= 1 for share in shares(words, labels).values()) and len(set(words)) == 3


def test_the_seed_alone_decides():
    groups, labels = [f"s{i}" for i in range(40)], [i % 4 for i in range(40)]
    same = [split_groups(groups, labels, 0.2, 0.2, 3) for _ in range(2)]
    assert same[0] == same[1] != split_groups(groups, labels, 0.2, 0.2, 4)
    order = np.random.default_rng(0).permutation(40)
    mixed = split_groups([groups[i] for i in order], [labels[i] for i in order], 0.2, 0.2, 3)
    assert mixed == [same[0][i] for i in order]


@settings(max_examples=200, deadline=None)
@given(
    groups=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4)), min_size=1, max_size=40),
    val=st.sampled_from([0, 0.01, 0.1, 0.5, 0.9]),
    test=st.sampled_from([0, 0.1, 0.3, 0.5]),
    seed=st.integers(0, 9),
)
def test_any_fractions(groups, val, test, seed):
    names, labels = [f"g{g}" for g, _ in groups], [c for _, c in groups]
    words = split_groups(names, labels, val, test, seed)
    split_of = dict(zip(names, words, strict=True))
    assert [split_of[name] for name in names] == words  # no group is in two splits
    count, sizes = len(split_of), Counter(split_of.values())
    expected = [max(1, round(f * count)) if f else 0 for f in (val, test)]
    assert sizes["val"] == min(expected[0], count) and sizes["test"] == min(expected[1], count - sizes["val"])


def test_no_classes_are_one(folder, tmp_path):
    path = table(tmp_path / "l.csv", "slide_id,label", *(f"s{i},{i / 8}" for i in range(20)))
    data = module(folder, path, labels="numbers", val_fraction=0.2, test_fraction=0.2)
    assert [len(data.dataset(split)) for split in ("train", "val", "test")] == [12, 4, 4]


# -- folds ---------------------------------------------------------------------------------------------------------------
@settings(max_examples=200, deadline=None)
@given(
    groups=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4)), min_size=1, max_size=40),
    folds=st.integers(2, 6),
    seed=st.integers(0, 9),
)
def test_any_folds(groups, folds, seed):
    names, labels = [f"g{g}" for g, _ in groups], [c for _, c in groups]
    if len(set(names)) < folds:
        with pytest.raises(ValueError, match=r"data\.folds is .*only .* groups"):
            deal_groups(names, labels, folds, seed)
        return
    fold_of = dict(zip(names, deal_groups(names, labels, folds, seed), strict=True))
    assert [fold_of[name] for name in names] == deal_groups(names, labels, folds, seed)  # no group is in two folds
    sizes = Counter(fold_of.values())
    assert set(sizes) == set(range(folds)) and max(sizes.values()) - min(sizes.values()) <= 1


@pytest.mark.parametrize("seed", range(10))
def test_each_fold_has_its_share_of_every_class(seed):
    labels = [int(i // 3 < 7) for i in range(60)]  # 20 patients with 3 slides each; 7 patients have class 1
    groups = [f"p{i // 3}" for i in range(60)]
    folds = deal_groups(groups, labels, 5, seed)
    counts = Counter((fold, label) for fold, label in zip(folds, labels, strict=True))
    assert sorted(counts[fold, 1] for fold in range(5)) == [3, 3, 3, 6, 6]
    assert all(counts[fold, 0] + counts[fold, 1] == 12 for fold in range(5))


def test_folds_of_a_data_module(folder, tmp_path):
    path = table(tmp_path / "l.csv", "slide_id,label,patient", *(f"s{i},{i % 4 // 2},p{i // 2}" for i in range(20)))
    tested = []
    for fold in range(5):
        data = module(folder, path, group_column="patient", folds=5, fold=fold, val_fraction=0.25)
        splits = {split: [s.name for s in data.dataset(split).slides] for split in ("train", "val", "test")}
        assert [len(x) for x in splits.values()] == [12, 4, 4] and not set.intersection(*map(set, splits.values()))
        patients = {split: {int(name[1:]) // 2 for name in names} for split, names in splits.items()}
        assert sum(map(len, patients.values())) == 10
        assert {data.dataset("test")[i]["label"] for i in range(4)} == {0, 1}
        tested += splits["test"]
    assert sorted(tested) == sorted(f"s{i}" for i in range(20))


def test_folds_that_cannot_be(folder, tmp_path):
    path = table(tmp_path / "l.csv", "slide_id,label,split", *(f"s{i},{i % 2},train" for i in range(20)))
    with pytest.raises(ValueError, match=r"the column 'split' of .* gives them splits already.*split_column to null"):
        module(folder, path, folds=5).check()
    module(folder, path, folds=5, split_column=None).check()
    with pytest.raises(ValueError, match=r"data\.fold is 5, but data\.folds is 5"):
        module(folder, path, folds=5, fold=5)
    with pytest.raises(ValueError, match=r"data\.fold is 1, but data\.folds is None"):
        module(folder, path, fold=1)


# -- one class -----------------------------------------------------------------------------------------------------------
def test_a_split_of_one_class_says_so(folder, tmp_path):
    words = ["train"] * 12 + ["val"] * 4 + ["test"] * 4
    lines = [f"s{i},{'ab'[i % 2] if word != 'val' else 'a'},{word}" for i, word in enumerate(words)]
    path = table(tmp_path / "l.csv", "slide_id,label,split", *lines)
    with pytest.warns(
        UserWarning, match="the val split has slides of one class only: 4 of 'a'. val_auroc will be nan"
    ) as raised:
        module(folder, path).check()
    assert len(raised) == 1 and "in the csv" in str(raised[0].message)


def test_one_class_by_fractions(folder, tmp_path):
    path = table(tmp_path / "l.csv", "slide_id,label", *(f"s{i},{i % 2}" for i in range(20)))
    with pytest.warns(UserWarning, match=r"the val split has .* 1 of .*: raise data\.val_fraction, or add slides"):
        module(folder, path, val_fraction=0.05, test_fraction=0.2).check()


def test_no_word_of_splits_with_all_classes(folder, tmp_path, recwarn):
    path = table(tmp_path / "l.csv", "slide_id,label", *(f"s{i},{i % 2}" for i in range(20)))
    module(folder, path).check()
    assert not recwarn.list


def test_a_cohort_of_one_class(folder, tmp_path):
    path = table(tmp_path / "l.csv", "slide_id,label", *(f"s{i},tumor" for i in range(20)))
    options = {"val_fraction": 0, "test_fraction": 1}
    with pytest.raises(ValueError, match=r"all labels are 'tumor'.*such as --data\.classes '\[tumor,other\]'"):
        module(folder, path, **options).check()
    data = module(folder, path, classes=["normal", "tumor"], **options)
    with pytest.warns(UserWarning, match="20 of 'tumor'.* cannot work: add slides of the other classes"):
        assert data.classes == ["normal", "tumor"] and set(data.inventory.labels) == {1}


# -- slides without a tile -----------------------------------------------------------------------------------------------
def test_slides_without_a_tile(tmp_path):
    for i in range(5):
        tiles = 0 if i in (1, 3) else 12
        write(tmp_path / f"s{i}.h5", np.ones((tiles, 3), np.float32), grid(tiles))
    path = table(tmp_path / "l.csv", "slide_id,label", *(f"s{i},{'ab'[i % 4 // 2]}" for i in range(5)))
    options = {"val_fraction": 0, "test_fraction": 0}
    with pytest.raises(ValueError, match=r"(?s)2 slides cannot be used.*s1\.h5: the slide is empty.*to 'leave_out'"):
        module(tmp_path, path, **options).check()
    data = module(tmp_path, path, unmatched="leave_out", **options)
    with pytest.warns(UserWarning, match=r"(?s)2 slides without a tile are left out:.*s1\.h5\n.*s3\.h5"):
        dataset = data.dataset("train")
    assert [s.name for s in dataset.slides] == ["s0", "s2", "s4"] and dataset.labels == [0, 1, 0]
    assert len(SlideDataModule(str(tmp_path), unmatched="leave_out", **options).dataset("train")) == 3


def test_no_slide_has_a_tile(tmp_path):
    write(tmp_path / "a.h5", np.ones((0, 3), np.float32), grid(0))
    with pytest.raises(ValueError, match=r"none of the 1 slides has a tile.*a\.h5"):
        SlideDataModule(str(tmp_path), unmatched="leave_out").check()
