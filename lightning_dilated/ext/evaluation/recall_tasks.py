"""Synthetic tasks without files: recall over a distance.

Shape letters: B batch, N tokens of a sequence (`seq_len`). Sample i of a split depends on (seed, split, i) alone.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_dilated._validation import integer, one_of
from lightning_dilated.data.module import SPLITS, SplitDataModule


def sample_generator(seed: int, split: str, index: int) -> np.random.Generator:
    """Return the generator of sample `index` of a split."""
    return np.random.default_rng([seed, SPLITS.index(split), index])


class RuleSamples(Dataset):
    """Samples that a DataModule's `make(rng, split)` draws. They are mappings; entries in `along` have N positions.

    Args:
        task: the DataModule.
        split: "train", "val" or "test".
    """

    def __init__(self, task: RuleDataModule, split: str) -> None:
        self.make, self.along, self.rule = task.make, task.along, task.rule
        self.seq_len, self.seed, self.split, self.count = task.seq_len, task.seed, split, task.sizes[split]

    def __len__(self) -> int:
        return self.count

    def fingerprint(self) -> str:
        return f"{self.rule()}, seed {self.seed}, {self.count} of {self.split}"

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the whole sample `index`. Raises IndexError if there is no such sample."""
        return {**self.make(self.generator(index), self.split), "index": index}

    def generator(self, index: int) -> np.random.Generator:
        """Return the generator of sample `index`. Raises IndexError if there is no such sample."""
        if not 0 <= index < self.count:
            raise IndexError(f"sample {index} was asked for, but the {self.split} split has {self.count}")
        return sample_generator(self.seed, self.split, index)

    def read_ranges(self, index: int, ranges: tuple[range, ...]) -> dict[str, Any]:
        """Return the sample, but only the positions `ranges` of its sequences."""
        sample = self[index]
        positions = torch.tensor([position for x in ranges for position in x], dtype=torch.int64)
        return {name: value[positions] if name in self.along else value for name, value in sample.items()}


class RuleDataModule(SplitDataModule):
    """Base of the synthetic tasks; a subclass defines `make` and `rule`.

    Args:
        seq_len: N, number of tokens of a sequence.
        batch_size: B, number of sequences of a batch on each device.
        train_size, val_size, test_size: number of samples of each split; validation and test may be 0.
        seed, num_workers, pin_memory: see `SplitDataModule`; `seed` also determines the samples.

    Raises: TypeError or ValueError for values outside these ranges.
    """

    #: entries of a sample with one value per position
    along: tuple[str, ...] = ("tokens",)

    def __init__(
        self,
        seq_len: int,
        batch_size: int,
        train_size: int,
        val_size: int,
        test_size: int,
        seed: int,
        num_workers: int,
        pin_memory: bool | None,
    ) -> None:
        super().__init__(batch_size, seed, num_workers, pin_memory)
        self.seq_len = integer(seq_len, "data.seq_len", 1)
        self.sizes = {
            split: integer(size, f"data.{split}_size", 1 if split == "train" else 0)
            for split, size in zip(SPLITS, (train_size, val_size, test_size), strict=True)
        }

    def make(self, rng: np.random.Generator, split: str) -> dict[str, Any]:
        """Draw one sample of a split, with random numbers from `rng` only."""
        raise TypeError(f"{type(self).__name__} must define make(rng, split).")

    def rule(self) -> str:
        raise TypeError(f"{type(self).__name__} must define rule().")

    def check(self) -> None:
        """Check that there are enough samples for a batch; there are no files. Raises ValueError."""
        self.check_batch(self.sizes["train"], 1)

    def dataset(self, split: str) -> RuleSamples:
        one_of(split, "split", SPLITS)
        return RuleSamples(self, split)

    def describe(self) -> str:
        return f"{self.rule()}: {', '.join(f'{size:,} {split}' for split, size in self.sizes.items())}"

    def wanted(self, split: str) -> str | None:
        """Return None if a split was requested, else a message with the setting that leaves it out."""
        return None if self.sizes[split] else f"data.{split}_size is 0; set it above 0"


class FarRecallDataModule(RuleDataModule):
    """Pairs of a key and a value anywhere in the first half; the second half repeats each key and asks for its value.

    Batches are {"tokens": (B, N), "labels": (B, N), "index": (B,)}, all int64. The second half contains each key at
    least once, at random places and in random order, followed by its value. The label at such a key is its value; all
    other labels are -100. Token 0 is the filler, 1 to V are keys, V + 1 to 2 V are values. The keys of a sample differ.
    Values are drawn uniformly, so guessing costs ln V nats and is right with probability 1 / V. On average a key's
    first query is half a sequence after its pair, so a model with no path between the halves can only guess.

    With more queries than pairs, keys are repeated, and a repeated query can be answered from an earlier query. Such
    queries teach a model to look up values at a short distance, and have labels in training only. Validation and test
    have labels only at each key's first query, so that their loss measures recall over the distance to the pair.
    `callbacks.RecallByDistance` reports the share of right answers by that distance.

    With `pair_tokens` 1 a pair is one token, 1 + V + V k + v for the key k and value v counted from 0. The label of a
    query is then the whole pair, and no answer follows a query. The model need not associate two tokens, and every
    query is distant, so the task measures only whether information crosses the distance.

    Args:
        seq_len: N.
        num_pairs: number of pairs in a sequence.
        vocabulary: V, number of different keys and also of values.
        num_queries: number of queries in a sequence, at least one of each key; null is `num_pairs`.
        pair_tokens: number of tokens of a pair, and of a query together with its answer: 2 or 1.
        batch_size, train_size, val_size, test_size, seed, num_workers, pin_memory: see `RuleDataModule`.

    Raises: TypeError or ValueError for values outside these ranges, or a half without room for its pairs or queries.
    """

    along = ("tokens", "labels")

    def __init__(
        self,
        seq_len: int = 128,
        num_pairs: int = 4,
        vocabulary: int = 8,
        num_queries: int | None = None,
        pair_tokens: Literal[1, 2] = 2,
        batch_size: int = 32,
        train_size: int = 100_000,
        val_size: int = 512,
        test_size: int = 512,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool | None = None,
    ) -> None:
        super().__init__(seq_len, batch_size, train_size, val_size, test_size, seed, num_workers, pin_memory)
        self.num_pairs = integer(num_pairs, "data.num_pairs", 1)
        self.vocabulary = integer(vocabulary, "data.vocabulary", 2)
        self.num_queries = num_pairs if num_queries is None else integer(num_queries, "data.num_queries", num_pairs)
        if self.num_pairs > self.vocabulary:
            raise ValueError(
                f"data.num_pairs is {num_pairs}, but the keys of a sequence differ and data.vocabulary has {vocabulary}: "
                "raise data.vocabulary or lower data.num_pairs"
            )
        if pair_tokens not in (1, 2):
            raise ValueError(f"data.pair_tokens must be 1 or 2, got {pair_tokens!r}.")
        self.pair_tokens = pair_tokens
        if pair_tokens * self.num_queries > self.seq_len // 2:
            raise ValueError(
                f"data.seq_len is {seq_len}, but {self.num_queries} pairs or queries of {pair_tokens} tokens in each half "
                f"need {2 * pair_tokens * self.num_queries}: raise data.seq_len or lower data.num_pairs or data.num_queries"
            )
        #: number of tokens of the task: filler, keys, and values or pairs
        self.vocab_size = 1 + self.vocabulary * (2 if pair_tokens == 2 else 1 + self.vocabulary)

    def rule(self) -> str:
        """Return a description of the samples, to compare the data with a checkpoint's."""
        return (
            f"far recall of {self.num_pairs} pairs out of {self.vocabulary} over {self.seq_len:,} tokens, "
            f"{self.num_queries} queries" + (", a token a pair" if self.pair_tokens == 1 else "")
        )

    def make(self, rng: np.random.Generator, split: str) -> dict[str, Any]:
        """Make one sample: {"tokens": (N,), "labels": (N,)} int64."""
        keys, values, pairs, queried, queries = self._draw(rng)
        tokens, labels = np.zeros(self.seq_len, np.int64), np.full(self.seq_len, -100, np.int64)
        if self.pair_tokens == 1:
            values = values + self.vocabulary * (keys - 1)
            tokens[pairs], tokens[queries], labels[queries] = values, keys[queried], values[queried]
        else:
            tokens[pairs], tokens[pairs + 1] = keys, values
            tokens[queries], tokens[queries + 1] = keys[queried], values[queried]
            first = np.unique(queried, return_index=True)[1]
            counted = slice(None) if split == "train" else first
            labels[queries[counted]] = values[queried[counted]]
        return {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}

    def distances(self, split: str, index: int) -> Tensor:
        """Return (N,) int64: at each query of a sample the distance back to the first token of its key's pair, else 0.

        Raises:
            ValueError: for a split other than "train", "val" and "test".
            IndexError: if there is no such sample.
        """
        _, _, pairs, queried, queries = self._draw(self.dataset(split).generator(index))
        distances = np.zeros(self.seq_len, np.int64)
        distances[queries] = queries - pairs[queried]
        return torch.from_numpy(distances)

    def _draw(self, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        """Return keys, values and first positions of the pairs, then each query's pair and the queries' positions."""
        count, half, size = self.num_pairs, self.seq_len // 2, self.pair_tokens
        keys = 1 + rng.permutation(self.vocabulary)[:count]
        values = 1 + self.vocabulary + rng.integers(0, self.vocabulary, count)
        repeated = rng.integers(0, count, self.num_queries - count)
        queried = rng.permutation(np.concatenate([np.arange(count), repeated]))
        pairs = _places(rng, half, count, size)
        queries = half + _places(rng, self.seq_len - half, len(queried), size)
        return keys, values, pairs, queried, queries


def _places(rng: np.random.Generator, room: int, count: int, size: int) -> np.ndarray:
    """Draw sorted starts of `count` runs of `size` adjacent places in `room` places, uniformly and without overlap."""
    return np.sort(rng.choice(room - count * (size - 1), count, replace=False)) + np.arange(count) * (size - 1)
