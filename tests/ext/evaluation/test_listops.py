"""List operations: lengths, depths and widths within bounds, and values by a reader of its own."""

import statistics
from collections import Counter
from random import Random

import pytest

from lightning_dilated.data import ListOpsDataModule
from lightning_dilated.ext.evaluation.tasks import evaluate, expression, most_tokens, text


def read(words: list[str]) -> tuple[int, int, int]:
    """(value, deepest operation, widest operation) of an expression, whose words are used up."""
    word = words.pop(0)
    if not word.startswith("["):
        return int(word), 0, 0
    parts = []
    while words[0] != "]":
        parts.append(read(words))
    words.pop(0)
    values = [value for value, _, _ in parts]
    value = {
        "[MIN": min(values),
        "[MAX": max(values),
        "[MED": int(statistics.median(values)),
        "[SM": sum(values) % 10,
    }[word]
    return value, 1 + max(depth for _, depth, _ in parts), max(len(parts), *(width for _, _, width in parts))


@pytest.mark.parametrize(
    ("seq_len", "options"),
    [
        (4, {}),
        (60, {}),
        (60, {"min_length": 60}),
        (22, {"max_depth": 2, "max_arguments": 4, "min_length": 22}),
        (40, {"max_depth": 6, "max_arguments": 2, "min_length": 30}),
        (500, {"max_depth": 4}),
    ],
)
def test_samples_are_expressions_with_their_value(seq_len: int, options: dict) -> None:
    data = ListOpsDataModule(seq_len, **options)
    lengths, deepest, widest = [], 0, 0
    for sample in (data.dataset("train")[i] for i in range(150)):
        tokens, length = sample["tokens"].tolist(), sample["lengths"]
        assert all(token > 0 for token in tokens[:length]) and not any(tokens[length:])
        words = text(tokens).split()
        assert len(words) == length
        value, depth, width = read(words)
        assert not words and value == sample["label"] and 2 <= width <= data.max_arguments and depth <= data.max_depth
        lengths.append(length)
        deepest, widest = max(deepest, depth), max(widest, width)
    # where all operations are full, only 3 tokens more fit or none
    assert data.min_length - 2 <= min(lengths) and max(lengths) <= seq_len
    if seq_len == 500:
        assert (deepest, widest) == (4, 10) and len(set(lengths)) > 100


def test_every_class_occurs() -> None:
    data = ListOpsDataModule(64).dataset("train")
    found = Counter(data[i]["label"] for i in range(1000))
    assert set(found) == set(range(10)) and max(found.values()) < 350


@pytest.mark.parametrize(
    ("operation", "values", "value"),
    [("MIN", [3, 1, 2], 1), ("MAX", [3, 9, 2], 9), ("MED", [5, 1, 9], 5), ("MED", [1, 4], 2), ("SM", [9, 9, 4], 2)],
)
def test_operations(operation: str, values: list[int], value: int) -> None:
    assert evaluate(operation, values) == value


def test_text() -> None:
    assert text([12, 3, 11, 5, 1, 15, 10, 15, 0, 0]) == "[MAX 2 [MIN 4 0 ] 9 ]"
    with pytest.raises(ValueError, match="token 16 is outside the vocabulary of 16"):
        text([16])


def test_largest_expression() -> None:
    assert most_tokens(1, 10, 10**9) == 12 and most_tokens(3, 2, 10**9) == 22 and most_tokens(100, 10, 5000) == 5000
    tokens, _ = expression(Random(0), 22, 3, 2)
    assert len(tokens) == 22
