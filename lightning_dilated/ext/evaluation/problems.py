"""What is stated and asked in a sample, as numbers of keys and values; forms turn them into tokens.

The kinds of tasks are those of RULER (arXiv 2404.06654): retrieval with one key, many keys and many values, and tracing of
variables.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

#: task -> distractors by default
DISTRACTORS = {"needle": 3, "multi_key": 15, "multi_value": 3, "tracing": 3}
TASKS = tuple(DISTRACTORS)


class Statement(NamedTuple):
    """A key has a value, or with `value` None the value of another key."""

    key: int
    value: int | None = None
    other: int | None = None


@dataclass(frozen=True)
class Problem:
    """Statements in groups, the asked one first; within a group they stand in this order in the text.

    Attributes:
        groups: of statements; the first holds what the answer takes.
        key: which is asked for.
        answers: values, in the order in which they are to be given.
    """

    groups: list[list[Statement]]
    key: int
    answers: list[int]


@dataclass(frozen=True)
class Task:
    """A kind of task and its sizes.

    Attributes:
        name: one of TASKS.
        distractors: keys that are not asked for; in "tracing" chains.
        num_values: values of a key in "multi_value"; 1 elsewhere.
        hops: in "tracing" statements between the value and the variable that is asked for; 0 elsewhere.
    """

    name: str
    distractors: int
    num_values: int
    hops: int

    @property
    def keys(self) -> int:
        """Different keys of a sample."""
        return (1 + self.distractors) * (1 + self.hops)

    @property
    def values(self) -> int:
        """Different values of a sample."""
        return (1 + self.distractors) * self.num_values

    def draw(self, rng: np.random.Generator, keys: int, values: int) -> Problem:
        """A problem with keys out of 0 to `keys` - 1 and values out of 0 to `values` - 1, all different, evenly drawn."""
        chains = rng.choice(keys, self.keys, replace=False).reshape(1 + self.distractors, 1 + self.hops).tolist()
        drawn = rng.choice(values, self.values, replace=False).reshape(1 + self.distractors, self.num_values).tolist()
        groups = []
        for chain, numbers in zip(chains, drawn, strict=True):
            stated = [Statement(chain[0], value) for value in numbers]
            copied = [Statement(key, other=before) for before, key in itertools.pairwise(chain)]
            groups.append(stated + copied)
        return Problem(groups, chains[0][-1], drawn[0])

    def guesses(self, values: int) -> dict[str, float]:
        """Chance of a right answer: "blind", drawn out of all `values` values; "unbound", out of those in the text, in the
        order of the text."""
        return {"blind": 1 / math.perm(values, self.num_values), "unbound": 1 / math.comb(self.values, self.num_values)}


def places(rng: np.random.Generator, problem: Problem, depth: float, room: int) -> np.ndarray:
    """Tokens of filler in front of each statement, groups one after another, 0 to `room`.

    The first asked statement has `depth` percent of the filler before it, the first of each other group anywhere; the
    others of a group stand anywhere behind its first, in order.
    """
    result = []
    for number, group in enumerate(problem.groups):
        first = round(depth / 100 * room) if number == 0 else int(rng.integers(0, room + 1))
        result += [[first], np.sort(rng.integers(first, room + 1, len(group) - 1))]
    return np.concatenate(result).astype(np.int64)
