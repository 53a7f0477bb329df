"""The labels csv of slides: rows, splits, and labels as numbers; every fault is reported with its line.

A row has a slide's id and, in columns whose names are options, its label, its split and its group (a patient, say).
"""

from __future__ import annotations

import csv
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_dilated._validation import one_of
from lightning_dilated.data.files import refuse_special
from lightning_dilated.data.module import SPLITS
from lightning_dilated.data.slides.files import slide_name


@dataclass(frozen=True)
class Columns:
    """Names of columns; `split` "auto" is a column called split if there is one; None: no such column."""

    slide: str = "slide_id"
    label: str | None = "label"
    split: str | None = "auto"
    group: str | None = None


@dataclass(frozen=True)
class Row:
    line: int
    slide: str
    label: str | None
    split: str | None
    group: str | None


def read_rows(path: str, columns: Columns) -> list[Row]:
    """All rows, in the file's order.

    Raises:
        FileNotFoundError, PermissionError: naming the path.
        ValueError: for a missing column (with those there are), a ragged line, an empty value, an unknown split word, a
            slide named twice; with the line.
    """
    refuse_special(path)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            return _rows(path, csv.reader(file, strict=True), columns)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise FileNotFoundError(f"data.labels_csv {path} is not a file: pass the path of a csv file") from error
    except PermissionError as error:
        raise PermissionError(f"data.labels_csv {path} cannot be read by this user: change its permissions") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}): save it as csv, not as a spreadsheet") from error
    except OSError as error:  # such as a link to itself
        raise OSError(f"data.labels_csv {path} cannot be read ({error}): pass the path of a csv file") from error


def _rows(path: str, lines: Any, columns: Columns) -> list[Row]:
    rows: dict[str, Row] = {}
    header: dict[str, int] = {}
    try:
        for values in lines:
            values = [x.strip() for x in values]
            if not any(values):
                continue
            if not header:
                header = _header(path, values, columns)
                continue
            row = _row(f"{path}, line {lines.line_num}", lines.line_num, values, header, columns)
            first = rows.setdefault(row.slide, row)
            if first is not row:
                labels = f" with the labels {first.label!r} and {row.label!r}" if first.label != row.label else ""
                raise ValueError(
                    f"{path}, line {row.line}: slide {row.slide!r} is named a second time{labels}; the first is line "
                    f"{first.line}. Keep one of the two lines"
                )
    except csv.Error as error:
        raise ValueError(f"{path}, line {lines.line_num}: {error}; correct the quotes of this line") from error
    if not rows:
        raise ValueError(f"{path} names no slide: it needs a line of column names and a line for each slide")
    return list(rows.values())


def _header(path: str, names: list[str], columns: Columns) -> dict[str, int]:
    repeated = sorted({name for name in names if names.count(name) > 1 and name})
    if repeated:
        raise ValueError(f"{path} has more than one column {repeated[0]!r}: rename all but one")
    options = {"slide_column": columns.slide, "label_column": columns.label, "group_column": columns.group}
    options["split_column"] = None if columns.split == "auto" else columns.split
    for option, name in options.items():
        if name is not None and name not in names:
            raise ValueError(
                f"{path} has no column {name!r}; its columns are {', '.join(map(repr, names))}: set data.{option}, and "
                "separate columns by commas"
            )
    return {name: i for i, name in enumerate(names)}


def _row(where: str, line: int, values: list[str], header: dict[str, int], columns: Columns) -> Row:
    if len(values) != len(header):
        raise ValueError(
            f"{where} has {len(values)} values, but there are {len(header)} columns: {values}. Put values that hold a comma "
            "into quotes"
        )
    column = ("split" if "split" in header else None) if columns.split == "auto" else columns.split
    value_of = lambda name: None if name is None else values[header[name]]  # noqa: E731
    for name in (columns.slide, columns.label, column, columns.group):
        if value_of(name) == "" or (name == columns.label and str(value_of(name)).lower() == "nan"):
            raise ValueError(f"{where}: the value of {name!r} is empty ({values}): fill it in, or remove the line")
    split = value_of(column)
    if split is not None and split not in SPLITS:
        one_of(split, f"{where}: the split", SPLITS)
    return Row(line, slide_name(values[header[columns.slide]]), value_of(columns.label), split, value_of(columns.group))


def class_numbers(path: str, rows: Iterable[Row], classes: list[str] | None) -> tuple[list[str], list[int]]:
    """(classes, number of each row's class): in the order given, else sorted, whole numbers by size.

    Raises:
        ValueError: for a label that `classes` lacks, for fractions, or where there are fewer than two classes.
    """
    rows = list(rows)
    repeated = sorted({name for name in classes or () if (classes or []).count(name) > 1})
    if repeated:
        raise ValueError(f"data.classes names {', '.join(map(repr, repeated))} more than once; name each class once")
    words = [str(row.label) for row in rows]
    numbers = [_number(word) for word in words]
    if classes is None and all(x is not None for x in numbers):
        broken = [row for row, x in zip(rows, numbers, strict=True) if x != int(x)]
        if broken:
            raise ValueError(
                f"{path}, line {broken[0].line}: the label {broken[0].label} is not a class, as it is not a whole number: "
                "set data.labels to 'numbers' for regression"
            )
        if not any(_padded(word) for word in words):  # 01 and 1 may be two classes, so padded numbers stay words
            words = [str(int(x)) for x in numbers]  # 1.0, as tables with gaps have it, is 1
    names = (
        sorted(set(words), key=lambda x: (0, int(x), "") if _whole(x) else (1, 0, x)) if classes is None else classes
    )
    for row, word in zip(rows, words, strict=True):
        if word not in names:
            raise ValueError(
                f"{path}, line {row.line}: the label {word!r} is not in data.classes {names}: add it, or correct the line"
            )
    if len(names) < 2:
        raise ValueError(
            f"{path}: all labels are {names[0]!r}; a classifier needs two classes: see data.label_column. To test slides of "
            f"one class, name all the classes that the model was trained on, in their order, such as --data.classes "
            f"'[{names[0]},other]'"
        )
    return names, [names.index(word) for word in words]


def numbers_of(path: str, rows: Iterable[Row]) -> list[float]:
    """The rows' labels for regression. Raises ValueError for a label that is no finite number, with its line."""
    numbers = []
    for row in rows:
        value = _number(str(row.label))
        if value is None:
            raise ValueError(
                f"{path}, line {row.line}: the label {row.label!r} is not a finite number: correct it, or set data.labels "
                "to 'classes'"
            )
        numbers.append(value)
    return numbers


def _number(word: str) -> float | None:
    if "_" in word:  # Python reads 1_0 as 10
        return None
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _padded(word: str) -> bool:
    digits = word.lstrip("+-")
    return len(digits) > 1 and digits[0] == "0" and digits[1].isdecimal()


def _whole(word: str) -> bool:
    return word[word[:1] in ("+", "-") :].isdecimal()


def check_groups(path: str, rows: list[Row], split_column: str, group_column: str) -> None:
    """Raise ValueError where the split column puts slides of one group, such as a patient's, into several splits."""
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


def split_groups(
    groups: list[str], labels: list[int] | None, val_fraction: float, test_fraction: float, seed: int
) -> list[str]:
    """A split for each slide: random groups, as many as the fractions say, with each class in its share.

    Slides of one group stay together. A fraction above 0 gives at least one group, and a group of each class where it gives
    as many groups as there are classes and the class has one to spare: one stays for training. A group counts as the class
    among its slides that fewest groups have. Depends on the names of the groups, their classes and the seed alone.

    Args:
        groups: of each slide.
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
    """The class that each group counts as: the rarest of its slides', so that rare ones are spread over the splits."""
    classes: dict[str, set[int]] = {}
    for group, label in zip(groups, labels or [0] * len(groups), strict=True):
        classes.setdefault(group, set()).add(label)
    groups_of = Counter(c for members in classes.values() for c in members)
    return {group: min(members, key=lambda c: (groups_of[c], c)) for group, members in classes.items()}


def _quotas(counts: dict[int, int], unassigned: dict[int, list[str]], size: int, keep: int) -> dict[int, int]:
    """How many of `size` groups each class gives: its share, rounded so that the sum is right, of those still to be had."""
    total = sum(counts.values())
    available = {c: max(0, len(unassigned[c]) - keep) for c in counts}
    size = min(size, sum(map(len, unassigned.values())))
    if sum(available.values()) < size:  # many classes of one group each
        available = {c: len(unassigned[c]) for c in counts}
    exact = {c: size * n / total for c, n in counts.items()}
    out = {c: min(int(exact[c]), available[c]) for c in counts}
    if size >= len(counts):
        out = {c: max(out[c], min(1, available[c])) for c in counts}
    # classes are in a random order, which decides between equal remainders
    while (missing := size - sum(out.values())) > 0:
        c = max((c for c in counts if out[c] < available[c]), key=lambda c: exact[c] - out[c])
        out[c] += 1
    while missing < 0:
        c = max((c for c in counts if out[c] > 1), key=lambda c: out[c] - exact[c])
        out[c] -= 1
        missing += 1
    return out


def warn_of_one_class(classes: list[str], numbers: Sequence[float], splits: list[str], by_column: bool) -> None:
    """Warn of validation and test splits whose slides are all of one class."""
    for split in SPLITS[1:]:
        numbers_there = [number for number, split_name in zip(numbers, splits, strict=True) if split_name == split]
        if numbers_there and len(set(numbers_there)) == 1:
            remedy = "give it slides of another class in the csv"
            if not by_column:
                remedy = f"raise data.{split}_fraction, or add slides of the other classes"
            only = classes[int(numbers_there[0])]
            warnings.warn(
                f"the {split} split has slides of one class only: {len(numbers_there)} of {only!r}. {split}_auroc will "
                f"be nan, and a callback that watches it cannot work: {remedy}.",
                stacklevel=3,
            )


def warn_of_untrained(classes: list[str], numbers: Sequence[float], splits: list[str]) -> None:
    """Warn of classes without a slide to train on."""
    trained = {number for number, split in zip(numbers, splits, strict=True) if split == "train"}
    missing = [name for i, name in enumerate(classes) if i not in trained]
    if missing:
        warnings.warn(
            f"no training slide has the class {', '.join(missing)}: it cannot be learned. Change the split, or "
            "data.classes.",
            stacklevel=2,
        )
