"""Forms: problems as tokens of a small vocabulary, or as English text in bytes or the tokens of a tokenizer.

Shape letters: F tokens of filler, V symbols of a vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from lightning_dilated._validation import integer
from lightning_dilated.ext.evaluation import vocabulary
from lightning_dilated.ext.evaluation.questions import Problem, Statement
from lightning_dilated.ext.text.tokenizer import load_tokenizer, vocabulary_size

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Parts(NamedTuple):
    """Tokens of a sample, without its filler.

    Attributes:
        beginning: the start of the sample.
        statements: statements of all groups, group by group.
        question: tokens after the filler and the statements.
        answer: tokens after the question; each is a label.
    """

    beginning: list[int]
    statements: list[list[int]]
    question: list[int]
    answer: list[int]

    @property
    def size(self) -> int:
        """Total number of tokens."""
        return sum(map(len, (self.beginning, self.question, self.answer, *self.statements)))


class Form(Protocol):
    """A way to write problems.

    Attributes:
        vocab_size: number of tokens in the vocabulary.
        keys, values: numbers of different keys and values.
    """

    vocab_size: int
    keys: int
    values: int

    def parts(self, problem: Problem) -> Parts: ...

    def filler(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return F = `count` tokens, and the increasing places (0 to F) at which they may be cut, or None for all."""
        ...

    def rule(self) -> str:
        """Return a description of the form."""
        ...


class TokenForm:
    """A vocabulary of 0 for padding, 1 for the question, `fillers` tokens of filler, V symbols of keys and V of values.

    "Key k has value v" is written as the tokens of k and then the tokens of v; "key k has the value of key j" as the
    tokens of k and then the tokens of j. The question is 1 and the tokens of a key. The answer is the tokens of its
    value or values. Numbers are written in digits of base V.

    Args:
        vocabulary: V.
        fillers: number of different filler tokens.
        key_tokens, value_tokens: tokens of a key and of a value; n tokens give V ** n different keys or values.
    """

    def __init__(self, vocabulary: int, fillers: int, key_tokens: int, value_tokens: int) -> None:
        self.vocabulary = integer(vocabulary, "data.vocabulary", 2)
        self.fillers = integer(fillers, "data.fillers", 1)
        self.key_tokens = integer(key_tokens, "data.key_tokens", 1)
        self.value_tokens = integer(value_tokens, "data.value_tokens", 1)
        self.vocab_size = 2 + fillers + 2 * vocabulary
        self.keys, self.values = vocabulary**key_tokens, vocabulary**value_tokens

    def rule(self) -> str:
        return (
            f"tokens of their own, {self.vocabulary} symbols, {self.key_tokens} a key, {self.value_tokens} a value, "
            f"{self.fillers} of filler"
        )

    def _key(self, number: int) -> list[int]:
        return [2 + self.fillers + x for x in _digits(number, self.vocabulary, self.key_tokens)]

    def _value(self, number: int) -> list[int]:
        return [2 + self.fillers + self.vocabulary + x for x in _digits(number, self.vocabulary, self.value_tokens)]

    def _statement(self, x: Statement) -> list[int]:
        return self._key(x.key) + (self._value(x.value) if x.value is not None else self._key(x.other or 0))

    def parts(self, problem: Problem) -> Parts:
        answer = [token for value in problem.answers for token in self._value(value)]
        statements = [self._statement(x) for group in problem.groups for x in group]
        return Parts([], statements, [1, *self._key(problem.key)], answer)

    def filler(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, None]:
        """Draw filler tokens uniformly."""
        return rng.integers(2, 2 + self.fillers, count), None


def _digits(number: int, base: int, count: int) -> list[int]:
    return [number // base**place % base for place in reversed(range(count))]


class TextForm:
    """Lines of English: keys are pairs of words, values are numbers, and filler sentences mention neither.

    Each line is encoded separately, but the question is encoded together with its answer.

    Args:
        task: one of TASKS; each task has its own sentences.
        value_digits: number of digits of a value; the first digit is not 0.
        tokenizer: a tokenizer.json, or a folder with one; None for bytes.
    """

    def __init__(self, task: str, value_digits: int, tokenizer: str | Path | None) -> None:
        self.task, self.tokenizer = task, None if tokenizer is None else str(tokenizer)
        self.digits = integer(value_digits, "data.value_digits", 1)
        self.keys, self.values = vocabulary.KEYS, 9 * 10 ** (value_digits - 1)
        self._encode: Callable[[list[str]], list[list[int]]]
        if tokenizer is None:
            self.vocab_size, self._tokenizer, self._encode, start = 256, None, _bytes, []
        else:
            self._tokenizer = load_tokenizer(_file(tokenizer))
            self.vocab_size, self._encode = vocabulary_size(self._tokenizer), self._encoded
            start = _start(self._tokenizer)
        self._beginning = start + self._encode([vocabulary.BEGINNING[task]])[0]
        lines = [np.array(x, np.int64) for x in self._encode(vocabulary.filler_lines())]
        self._lines, self._sizes = lines, np.array([len(x) for x in lines])

    def rule(self) -> str:
        kind = "bytes" if self.tokenizer is None else f"tokens of {Path(self.tokenizer).name}"
        return f"text in {kind}, values of {self.digits} digits"

    def _encoded(self, lines: list[str]) -> list[list[int]]:
        assert self._tokenizer is not None
        return [x.ids for x in self._tokenizer.encode_batch(lines, add_special_tokens=False)]

    def parts(self, problem: Problem) -> Parts:
        number = 10 ** (self.digits - 1)
        lines = [
            vocabulary.statement(self.task, x.key, None if x.value is None else number + x.value, x.other)
            for group in problem.groups
            for x in group
        ]
        question = vocabulary.question(self.task, problem.key, len(problem.answers))
        answer = vocabulary.answer([number + value for value in problem.answers])
        return Parts(self._beginning, self._encode(lines), *self._split(question, answer))

    def _split(self, question: str, answer: str) -> tuple[list[int], list[int]]:
        """Encode question and answer together; return the tokens of each. A token across both counts as answer."""
        if self._tokenizer is None:
            return list(question.encode()), list(answer.encode())
        encoding = self._tokenizer.encode(question + answer, add_special_tokens=False)
        first = sum(stop <= len(question) for _, stop in encoding.offsets)
        return encoding.ids[:first], encoding.ids[first:]

    def filler(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw lines uniformly, and cut off their beginning, so that `count` tokens remain."""
        if not count:
            return np.zeros(0, np.int64), np.zeros(1, np.int64)
        drawn = np.zeros(0, np.int64)
        while (total := int(self._sizes[drawn].sum())) < count:
            lines = 1 + (count - total) // int(self._sizes.max())
            drawn = np.concatenate([drawn, rng.integers(0, len(self._lines), lines)])
        ends = np.cumsum(self._sizes[drawn])
        needed = int(np.searchsorted(ends, count)) + 1
        drawn, ends = drawn[:needed], ends[:needed]
        surplus = int(ends[-1]) - count
        tokens = np.concatenate([self._lines[x] for x in drawn.tolist()])[surplus:]
        return tokens, np.concatenate([[0], (ends - surplus).clip(min=0)])


def _bytes(lines: Iterable[str]) -> list[list[int]]:
    return [list(line.encode()) for line in lines]


def _file(path: str | Path) -> Path:
    """Return the tokenizer.json of a path. Raises FileNotFoundError for a folder without one."""
    path = Path(path)
    if not path.is_dir():
        return path
    if not (path / "tokenizer.json").is_file():
        raise FileNotFoundError(
            f"data.tokenizer {path} is a folder without tokenizer.json. Pass a tokenizer.json, or save the tokenizer there: "
            "transformers.AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)."
        )
    return path / "tokenizer.json"


def _start(tokenizer: Tokenizer) -> list[int]:
    """Return the special tokens that the tokenizer adds before a text, such as a beginning-of-text token."""
    around: Any = tokenizer.encode("a")
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    special = [bool(x) for x in around.special_tokens_mask]
    count = special.index(False) if False in special else 0
    return around.ids[:count] if around.ids[count : count + len(plain)] == plain else []
