"""Problems: the statements and the question of a sample. Keys and values are numbers, which forms turn into tokens.

The tasks are of RULER's kinds (arXiv 2404.06654): retrieval with one key, many keys and many values, and tracing of
variables.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

#: {task: default number of distractors}
DISTRACTORS = {"needle": 3, "multi_key": 15, "multi_value": 3, "tracing": 3}
TASKS = tuple(DISTRACTORS)


class Statement(NamedTuple):
    """The key `key` has the value `value`, or the value of the key `other` if `value` is None."""

    key: int
    value: int | None = None
    other: int | None = None


@dataclass(frozen=True)
class Problem:
    """Groups of statements, with the group of the answer first. The text keeps the order within a group.

    Attributes:
        groups: groups of statements; the first holds the statements that the answer needs.
        key: the key that is asked for.
        answers: values, in the order of the answer.
    """

    groups: list[list[Statement]]
    key: int
    answers: list[int]


@dataclass(frozen=True)
class Task:
    """A kind of task and its sizes.

    Attributes:
        name: one of TASKS.
        distractors: number of keys that are not asked for; in "tracing", number of chains.
        num_values: number of values of a key: 1, except in "multi_value".
        hops: in "tracing", number of statements between the value and the variable that is asked for; else 0.
    """

    name: str
    distractors: int
    num_values: int
    hops: int

    @property
    def keys(self) -> int:
        """Number of different keys of a sample."""
        return (1 + self.distractors) * (1 + self.hops)

    @property
    def values(self) -> int:
        """Number of different values of a sample."""
        return (1 + self.distractors) * self.num_values

    def draw(self, rng: np.random.Generator, keys: int, values: int) -> Problem:
        """Draw a problem with different keys below `keys` and different values below `values`, uniformly."""
        chains = rng.choice(keys, self.keys, replace=False).reshape(1 + self.distractors, 1 + self.hops).tolist()
        drawn = rng.choice(values, self.values, replace=False).reshape(1 + self.distractors, self.num_values).tolist()
        groups = []
        for chain, numbers in zip(chains, drawn, strict=True):
            stated = [Statement(chain[0], value) for value in numbers]
            copied = [Statement(key, other=before) for before, key in itertools.pairwise(chain)]
            groups.append(stated + copied)
        return Problem(groups, chains[0][-1], drawn[0])

    def guesses(self, values: int) -> dict[str, float]:
        """Return the probabilities of a right guess: "blind" draws from all `values` values; "unbound" draws from the
        values in the text and gives them in the order of the text."""
        return {"blind": 1 / math.perm(values, self.num_values), "unbound": 1 / math.comb(self.values, self.num_values)}


def places(rng: np.random.Generator, problem: Problem, depth: float, room: int) -> np.ndarray:
    """Return the number of filler tokens before each statement, 0 to `room`, in the order of the groups.

    The first statement of the answer has `depth` percent of the filler before it; the first statement of another group
    is anywhere. Further statements of a group are anywhere after its first statement, in order.
    """
    result = []
    for number, group in enumerate(problem.groups):
        first = round(depth / 100 * room) if number == 0 else int(rng.integers(0, room + 1))
        result += [[first], np.sort(rng.integers(first, room + 1, len(group) - 1))]
    return np.concatenate(result).astype(np.int64)
