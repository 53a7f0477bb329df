"""The labels csv of slides: rows, splits, and labels as numbers; every fault is reported with its line.

A row has a slide's id, and optional columns for its label, its split and its group (such as a patient).
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from lightning_dilated._validation import one_of
from lightning_dilated.data.module import SPLITS
from lightning_dilated.data.opener import FileOpener, is_url
from lightning_dilated.ext.slides.files import slide_name

#: maximum number of characters of a line
LONGEST = 1 << 22


@dataclass(frozen=True)
class Columns:
    """Names of columns, or None for no column. `split` "auto" is the column "split" if the csv has it.

    `time` and `event` are the columns of survival.
    """

    slide: str = "slide_id"
    label: str | None = "label"
    split: str | None = "auto"
    group: str | None = None
    time: str | None = None
    event: str | None = None

    @property
    def named(self) -> dict[str, str | None]:
        """Return {option: column} for all columns but the split's, which may be "auto"."""
        return {f"{name}_column": column for name, column in vars(self).items() if name != "split"}


@dataclass(frozen=True)
class Row:
    line: int
    slide: str
    label: str | None
    split: str | None
    group: str | None
    time: str | None = None
    event: str | None = None


def read_rows(path: str, columns: Columns, opener: FileOpener | None = None) -> list[Row]:
    """Return all rows, in the file's order; `opener` reads a URL.

    Raises:
        FileNotFoundError, PermissionError: with the path.
        ValueError: for a missing column (with the existing ones), a ragged line, an empty value, an unknown split word,
            a slide named twice; with the line.
    """
    try:
        with io.TextIOWrapper((opener or FileOpener()).open(path), encoding="utf-8-sig", newline="") as file:
            return _rows(path, csv.reader(_lines(path, file), strict=True), columns)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}): save it as csv, not as a spreadsheet") from error
    except OSError as error:
        if is_url(path) and not isinstance(error, FileNotFoundError):
            raise
        raise _unopened(path, error) from error


def _unopened(path: str, error: OSError) -> OSError:
    if is_url(path):
        return FileNotFoundError(f"data.labels_csv: {error}")
    if isinstance(error, (FileNotFoundError, IsADirectoryError)):
        return FileNotFoundError(f"data.labels_csv {path} is not a file: pass the path of a csv file")
    if isinstance(error, PermissionError):
        return PermissionError(f"data.labels_csv {path} cannot be read by this user: change its permissions")
    # for example a link to itself
    return OSError(f"data.labels_csv {path} cannot be read ({error}): pass the path of a csv file")


def _lines(path: str, file: TextIO) -> Iterator[str]:
    number = 0
    while line := file.readline(LONGEST + 1):
        number += 1
        if len(line) > LONGEST:
            raise ValueError(f"{path}, line {number:,} has more than {LONGEST:,} characters: is it the right file?")
        yield line


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
    repeated = sorted(name for name, count in Counter(names).items() if count > 1 and name)
    if repeated:
        raise ValueError(f"{path} has more than one column {repeated[0]!r}: rename all but one")
    options = {**columns.named, "split_column": None if columns.split == "auto" else columns.split}
    for option, name in options.items():
        if name is not None and name not in names:
            raise ValueError(
                f"{path} has no column {name!r}; its columns are {_shown(names)}: set data.{option}, and "
                "separate columns by commas"
            )
    return {name: i for i, name in enumerate(names)}


def _shown(values: list[str], most: int = 40) -> str:
    return ", ".join(map(repr, values[:most])) + (f" and {len(values) - most:,} more" if len(values) > most else "")


def _row(where: str, line: int, values: list[str], header: dict[str, int], columns: Columns) -> Row:
    if len(values) != len(header):
        raise ValueError(
            f"{where} has {len(values)} values, but there are {len(header)} columns: {_shown(values)}. Put values that hold "
            "a comma into quotes"
        )
    column = ("split" if "split" in header else None) if columns.split == "auto" else columns.split
    value_of = lambda name: None if name is None else values[header[name]]  # noqa: E731
    for name in (*columns.named.values(), column):
        is_label = name in (columns.label, columns.time, columns.event)
        if value_of(name) == "" or (is_label and str(value_of(name)).lower() == "nan"):
            raise ValueError(
                f"{where}: the value of {name!r} is empty ({_shown(values)}): fill it in, or remove the line"
            )
    split = value_of(column)
    if split is not None and split not in SPLITS:
        one_of(split, f"{where}: the split", SPLITS)
    label, group, time, event = map(value_of, (columns.label, columns.group, columns.time, columns.event))
    return Row(line, slide_name(values[header[columns.slide]]), label, split, group, time, event)


def class_numbers(
    path: str, rows: Iterable[Row], classes: list[str] | None, trained: bool = False
) -> tuple[list[str], list[int]]:
    """Return the classes and each row's class number. If `classes` is None, all labels are classes, in sorted order.

    Args:
        path, rows: path of the csv, for errors, and its rows.
        classes: all classes; None: the classes of the rows.
        trained: whether `classes` come from a trained model, rather than from data.classes.

    Raises: ValueError for a label that `classes` lacks, for fractions, or for fewer than two classes.
    """
    rows = list(rows)
    repeated = sorted(name for name, count in Counter(classes or ()).items() if count > 1)
    if repeated:
        raise ValueError(f"data.classes names {', '.join(map(repr, repeated))} more than once; name each class once")
    words = [str(row.label) for row in rows]
    numbers = [_number(word) for word in words]
    if classes is None and all(x is not None for x in numbers):
        broken = [row for row, x in zip(rows, numbers, strict=True) if x != int(x)]
        if broken:
            raise ValueError(
                f"{path}, line {broken[0].line}: the label {broken[0].label} is not a class, because it is a fraction: "
                "set data.labels to 'numbers' for regression"
            )
        if not any(_padded(word) for word in words):  # 01 and 1 may be two classes, so padded numbers stay words
            words = [str(int(x)) for x in numbers]  # programs write 1 as 1.0 if the column has gaps
    names = (
        sorted(set(words), key=lambda x: (0, int(x), "") if _whole(x) else (1, 0, x)) if classes is None else classes
    )
    numbered = {name: i for i, name in enumerate(names)}
    if classes is not None:
        words = [word if word in numbered else _written_whole(word) for word in words]
    for row, word in zip(rows, words, strict=True):
        if word not in numbered and trained:
            raise ValueError(
                f"{path}, line {row.line}: the label {row.label!r} is none of the classes that the model was trained on, "
                f"{names}: correct its spelling in the csv, leave the slide out, or leave the labels out "
                "(data.labels: none) to predict only"
            )
        if word not in numbered:
            raise ValueError(
                f"{path}, line {row.line}: the label {word!r} is not in data.classes {names}: add it, or correct the line"
            )
    if len(names) < 2:
        raise ValueError(
            f"{path}: all labels are {names[0]!r}; a classifier needs two classes: see data.label_column. To test slides of "
            f"one class, name all the classes that the model was trained on, in their order, such as --data.classes "
            f"'[{names[0]},other]'"
        )
    return names, [numbered[word] for word in words]


def _written_whole(word: str) -> str:
    """Write a whole number without a point, 1 for 1.0; return other words unchanged."""
    value = _number(word)
    return word if value is None or value != int(value) or _padded(word) else str(int(value))


def survival_of(path: str, rows: Iterable[Row], columns: Columns) -> list[tuple[float, float]]:
    """Return (time, event) of each row; `event` is 1 if it happened at `time`, 0 if it had not by then (censored).

    Raises:
        ValueError: with the line, for a time that is negative or not finite, or an event other than 0 and 1; and if no
            slide has an event.
    """
    out = []
    for row in rows:
        time, event = _number(str(row.time)), _number(str(row.event))
        if time is None or time < 0:
            raise ValueError(
                f"{path}, line {row.line}: {columns.time!r} is {row.time!r}, but a time must be a finite number of at least "
                "0: correct it, or remove the line"
            )
        if event not in (0, 1):
            raise ValueError(
                f"{path}, line {row.line}: {columns.event!r} is {row.event!r}, but it must be 1 (the event happened at this "
                "time) or 0 (it had not by then): correct it, or set data.event_column. If the table has 1 for censored, "
                "write 1 minus that value"
            )
        out.append((time, float(event)))
    if not any(event for _, event in out):
        raise ValueError(
            f"{path}: {columns.event!r} is 0 everywhere, but training needs events: does the column mean censored?"
        )
    return out


def numbers_of(path: str, rows: Iterable[Row]) -> list[float]:
    """Return the rows' labels for regression. Raises ValueError with the line for a label that is no finite number."""
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
