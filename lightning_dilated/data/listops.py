"""Nested list operations: expressions grown to a number of tokens by chance, written as tokens, with their value."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

#: padding, digits 0 to 9, four opened operations, the closing bracket
VOCABULARY = 16
OPERATIONS = ("MIN", "MAX", "MED", "SM")
_DIGIT, _OPEN, _CLOSE = 1, 11, 15
#: how often an expression grows in depth, by two digits in place of one, rather than by one more digit
_DEEPER = 0.25


@dataclass
class _Node:
    """An operation on digits and other operations."""

    operation: int
    depth: int
    arguments: list[int | _Node] = field(default_factory=list)


def expression(rng: Random, aim: int, max_depth: int, max_arguments: int) -> tuple[list[int], int]:
    """(tokens, value from 0 to 9) of a random expression of `aim` tokens, or up to 2 fewer where nothing shorter fits.

    It grows from one operation on two digits: an operation that has room gets one more digit (1 token), or a digit becomes
    an operation on two digits (3 tokens).
    """
    root = _Node(_below(rng, 4), 1, _digits(rng))
    room = [root] if max_arguments > 2 else []  # operations that take another argument
    leaves = [(root, 0), (root, 1)] if max_depth > 1 else []  # digits that may become an operation
    size = 4
    while size < aim and (room or (leaves and size + 3 <= aim)):
        if leaves and size + 3 <= aim and (not room or rng.random() < _DEEPER):
            _deepen(rng, room, leaves, max_depth, max_arguments)
            size += 3
        else:
            _widen(rng, room, leaves, max_depth, max_arguments)
            size += 1
    tokens: list[int] = []
    return tokens, _write(root, tokens)


def _below(rng: Random, bound: int) -> int:
    """A number from 0 to bound - 1, each as likely; by `random`, whose numbers no version of Python may change."""
    return int(rng.random() * bound)


def _digits(rng: Random) -> list[int | _Node]:
    return [_below(rng, 10), _below(rng, 10)]


def _take(rng: Random, entries: list[Any]) -> Any:
    """Remove and return one entry by chance."""
    at = _below(rng, len(entries))
    entries[at], entries[-1] = entries[-1], entries[at]
    return entries.pop()


def _deepen(rng: Random, room: list[Any], leaves: list[Any], max_depth: int, max_arguments: int) -> None:
    above, place = _take(rng, leaves)
    node = _Node(_below(rng, 4), above.depth + 1, _digits(rng))
    above.arguments[place] = node
    if max_arguments > 2:
        room.append(node)
    if node.depth < max_depth:
        leaves += [(node, 0), (node, 1)]


def _widen(rng: Random, room: list[Any], leaves: list[Any], max_depth: int, max_arguments: int) -> None:
    node = _take(rng, room)
    node.arguments.append(_below(rng, 10))
    if len(node.arguments) < max_arguments:
        room.append(node)
    if node.depth < max_depth:
        leaves.append((node, len(node.arguments) - 1))


def _write(node: _Node, tokens: list[int]) -> int:
    """Append the tokens of an operation and return its value."""
    tokens.append(_OPEN + node.operation)
    values = []
    for argument in node.arguments:
        if isinstance(argument, _Node):
            values.append(_write(argument, tokens))
        else:
            tokens.append(_DIGIT + argument)
            values.append(argument)
    tokens.append(_CLOSE)
    return evaluate(OPERATIONS[node.operation], values)


def evaluate(operation: str, values: list[int]) -> int:
    """The value of an operation on digits, a digit. Raises: KeyError for an unknown operation."""
    ranked, count = sorted(values), len(values)
    median = (ranked[(count - 1) // 2] + ranked[count // 2]) // 2
    return {"MIN": ranked[0], "MAX": ranked[-1], "MED": median, "SM": sum(values) % 10}[operation]


def most_tokens(max_depth: int, max_arguments: int, enough: int) -> int:
    """Tokens of the largest expression of this depth and width, or `enough` if there are at least as many."""
    size = 1
    for _ in range(max_depth):
        size = min(enough, 2 + max_arguments * size)
    return size


def text(tokens: list[int]) -> str:
    """Tokens as one would read them, without the padding. Raises: ValueError for a token outside the vocabulary."""
    words = []
    for token in tokens:
        if not 0 <= token < VOCABULARY:
            raise ValueError(f"token {token} is outside the vocabulary of {VOCABULARY}")
        if token >= _DIGIT:
            opened = _OPEN <= token < _CLOSE
            words.append("]" if token == _CLOSE else f"[{OPERATIONS[token - _OPEN]}" if opened else str(token - _DIGIT))
    return " ".join(words)
