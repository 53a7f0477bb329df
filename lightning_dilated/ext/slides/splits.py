"""Splits of slides by group: fractions and folds that keep groups whole and spread every class, with warnings."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence

import numpy as np

from lightning_dilated.data.module import SPLITS
from lightning_dilated.ext.slides.labels import Row


def check_groups(path: str, rows: list[Row], split_column: str, group_column: str) -> None:
    """Raise ValueError if the split column puts slides of one group, such as a patient's, into several splits."""
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        counts.setdefault(str(row.group), Counter())[str(row.split)] += 1
    torn = {group: counter for group, counter in counts.items() if len(counter) > 1}
    if not torn:
        return
    combinations = Counter(tuple(split for split in SPLITS if counter[split]) for counter in torn.values())
    shown = "; ".join(
        f"{group!r} has " + ", ".join(f"{counter[split]} in {split}" for split in SPLITS if counter[split])
        for group, counter in list(torn.items())[:5]
    )
    raise ValueError(
        f"{path}: the column {split_column!r} cuts {len(torn)} of {len(counts)} groups of {group_column!r} apart ("
        + ", ".join(f"{count} lie in {' and '.join(splits)}" for splits, count in combinations.most_common())
        + f"), so a model would be tested on groups that it was trained on: {shown}{'; ...' if len(torn) > 5 else ''}. Give "
        "all slides of a group one split, set data.split_column to null to split by fractions, or leave data.group_column "
        "out if the groups may be mixed"
    )


def deal_groups(groups: list[str], labels: list[int] | None, folds: int, seed: int) -> list[int]:
    """Return the fold of each slide, from 0 to folds - 1: groups are shuffled and assigned in rotation, class by class.

    Slides of one group stay together. The numbers of groups in two folds differ by at most one, in total and for each
    class. A group counts as its rarest class: the class that the fewest groups have. The result depends only on the
    names of the groups, their classes and the seed. Arguments are the same as in `split_groups`.

    Raises: ValueError for fewer groups than folds.
    """
    names = sorted(set(groups))
    if len(names) < folds:
        raise ValueError(
            f"data.folds is {folds}, but there are only {len(names)} groups of slides (data.group_column; without it, each "
            "slide is a group): lower data.folds"
        )
    strata = _strata(groups, labels)
    order = [names[i] for i in np.random.default_rng([seed, folds]).permutation(len(names))]
    order.sort(key=lambda name: strata[name])  # a stable sort, so each class stays shuffled
    fold_of = {name: i % folds for i, name in enumerate(order)}
    return [fold_of[group] for group in groups]


def split_folds(
    groups: list[str], labels: list[int] | None, folds: int, fold: int, val_fraction: float, seed: int
) -> list[str]:
    """Return the split of each slide: "test" in fold `fold`, "val" for `val_fraction` of the others, else "train".

    Arguments are the same as in `split_groups` and `deal_groups`.
    """
    fold_of = deal_groups(groups, labels, folds, seed)
    untested = [i for i, number in enumerate(fold_of) if number != fold]
    labels_there = None if labels is None else [labels[i] for i in untested]
    words = split_groups([groups[i] for i in untested], labels_there, val_fraction, 0, seed)
    out = ["test"] * len(groups)
    for i, word in zip(untested, words, strict=True):
        out[i] = word
    return out


def split_groups(
    groups: list[str], labels: list[int] | None, val_fraction: float, test_fraction: float, seed: int
) -> list[str]:
    """Return the split of each slide: random groups in the given fractions, which apply to each class.

    Slides of one group stay together. A split with a fraction above 0 gets at least one group. If its number of groups
    is at least the number of classes, it gets one of each class; but the last group of a class is kept for training.
    A group counts as its rarest class: the class that the fewest groups have. The result depends only on the
    names of the groups, their classes and the seed.

    Args:
        groups: group of each slide.
        labels: class number of each slide; None for no classes.
    """
    names = sorted(set(groups))
    rng = np.random.default_rng([seed])
    order = [names[i] for i in rng.permutation(len(names))]
    strata = _strata(groups, labels)
    members = {c: [name for name in order if strata[name] == c] for c in dict.fromkeys(strata[name] for name in order)}
    sizes = {
        s: max(1, round(f * len(names))) if f > 0 else 0 for s, f in (("val", val_fraction), ("test", test_fraction))
    }
    split_of = dict.fromkeys(names, "train")
    keep = 1 if sum(sizes.values()) < len(names) else 0
    for split, size in sizes.items():
        unassigned = {
            c: [name for name in class_groups if split_of[name] == "train"] for c, class_groups in members.items()
        }
        for c, count in _quotas({c: len(x) for c, x in members.items()}, unassigned, size, keep).items():
            split_of |= dict.fromkeys(unassigned[c][:count], split)
    return [split_of[group] for group in groups]


def _strata(groups: list[str], labels: list[int] | None) -> dict[str, int]:
    """Return the class that each group counts as: the rarest class of its slides, so that splits share rare classes."""
    classes: dict[str, set[int]] = {}
    for group, label in zip(groups, labels or [0] * len(groups), strict=True):
        classes.setdefault(group, set()).add(label)
    groups_of = Counter(c for members in classes.values() for c in members)
    return {group: min(members, key=lambda c: (groups_of[c], c)) for group, members in classes.items()}


def _quotas(counts: dict[int, int], unassigned: dict[int, list[str]], size: int, keep: int) -> dict[int, int]:
    """Divide `size` groups among classes in proportion, limited to unassigned groups; the quotas sum to `size`."""
    total = sum(counts.values())
    available = {c: max(0, len(unassigned[c]) - keep) for c in counts}
    size = min(size, sum(map(len, unassigned.values())))
    if sum(available.values()) < size:  # many classes have one group each
        available = {c: len(unassigned[c]) for c in counts}
    exact = {c: size * n / total for c, n in counts.items()}
    out = {c: min(int(exact[c]), available[c]) for c in counts}
    if size >= len(counts):
        out = {c: max(out[c], min(1, available[c])) for c in counts}
    # if remainders are equal, `max` takes the first one; this is a random class, because the order of classes is random
    while (missing := size - sum(out.values())) > 0:
        c = max((c for c in counts if out[c] < available[c]), key=lambda c: exact[c] - out[c])
        out[c] += 1
    while missing < 0:
        c = max((c for c in counts if out[c] > 1), key=lambda c: out[c] - exact[c])
        out[c] -= 1
        missing += 1
    return out


def check_agreement(path: str, rows: list[Row], labels: Sequence[object] | None, group_column: str) -> None:
    """Raise ValueError if slides that become one sample have different labels."""
    first_of: dict[str, tuple[Row, object]] = {}
    for row, label in zip(rows, labels or (), strict=bool(labels)):
        first, first_label = first_of.setdefault(str(row.group), (row, label))
        if first_label != label:
            raise ValueError(
                f"{path}, lines {first.line} and {row.line}: slides {first.slide!r} and {row.slide!r} of {group_column} "
                f"{row.group!r} have different labels, but data.merge_groups makes one sample of them: give them one label, "
                "or set data.merge_groups to false"
            )


def warn_of_one_class(classes: list[str], numbers: Sequence[float], splits: list[str], by_column: bool) -> None:
    """Warn about validation and test splits with slides of only one class."""
    for split in SPLITS[1:]:
        numbers_there = [number for number, split_name in zip(numbers, splits, strict=True) if split_name == split]
        if numbers_there and len(set(numbers_there)) == 1:
            remedy = "give it slides of another class in the csv"
            if set(splits) == {split}:
                remedy = "add slides of the other classes"
            elif not by_column:
                remedy = f"raise data.{split}_fraction, or add slides of the other classes"
            only = classes[int(numbers_there[0])]
            warnings.warn(
                f"the {split} split has slides of one class only: {len(numbers_there)} of {only!r}. {split}_auroc will "
                f"be nan, and a callback that watches it cannot work: {remedy}.",
                stacklevel=3,
            )


def warn_of_untrained(classes: list[str], numbers: Sequence[float], splits: list[str]) -> None:
    """Warn about classes without a slide to train on."""
    trained = {number for number, split in zip(numbers, splits, strict=True) if split == "train"}
    missing = [name for i, name in enumerate(classes) if i not in trained]
    if missing:
        warnings.warn(
            f"no training slide has the class {', '.join(missing)}: it cannot be learned. Change the split, or "
            "data.classes.",
            stacklevel=2,
        )
