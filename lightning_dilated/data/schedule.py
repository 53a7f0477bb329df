"""A curriculum over the length of sequences: shorter ones first, with as many tokens in every step.

A sample of N tokens is cut into N / n sequences of n tokens, which take N / n rows of the batch. So neither the order of
samples, nor the tokens of a step, nor the position in the data depends on the schedule.

Shape letters: N tokens of a sample (`seq_len`), n tokens of a sequence now, K = N / n sequences of a sample.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate

from lightning_dilated._validation import integer


class SeqLenSchedule:
    """The length of training sequences by optimizer step.

    Args:
        lengths: {step: n}: from this step on (counted from 0) sequences have n tokens. It has step 0; every n divides N,
            and the last one is N.
        seq_len: N, the length of validation and test sequences.

    Raises: TypeError or ValueError for other schedules.
    """

    def __init__(self, lengths: Mapping[int, int], seq_len: int) -> None:
        name = "data.seq_len_schedule"
        if not isinstance(lengths, Mapping):
            raise TypeError(
                f"{name} must be a mapping from steps to lengths, such as {{0: {seq_len}}}; got {lengths!r}."
            )
        for entry in (*lengths, *lengths.values()):
            integer(entry, f"each step and length of {name}")
        self.steps = sorted(lengths)
        self.lengths = [lengths[step] for step in self.steps]
        if not self.steps or self.steps[0] != 0:
            raise ValueError(
                f"{name} starts at step {self.steps[0] if self.steps else None}; it must say the length from step 0 on"
            )
        wrong = [n for n in self.lengths if n < 1 or seq_len % n]
        if wrong:
            raise ValueError(
                f"{name} has sequences of {wrong[0]:,} tokens, which do not divide data.seq_len = {seq_len:,}: a sample is "
                "cut into equal sequences, so take a length that divides it"
            )
        if self.lengths[-1] != seq_len:
            raise ValueError(
                f"{name} ends with sequences of {self.lengths[-1]:,} tokens, but validation uses data.seq_len = "
                f"{seq_len:,}: end the schedule with that length, or set data.seq_len to the last one"
            )

    def at(self, step: int) -> int:
        """n, the tokens of a sequence in the batches of optimizer step `step` (counted from 0)."""
        return self.lengths[bisect_right(self.steps, step) - 1]

    def state(self) -> dict[int, int]:
        return dict(zip(self.steps, self.lengths, strict=True))


class ScheduledSequences(Dataset):
    """A dataset of sequences whose samples are cut: sample (i, n) holds sequence i as K sequences of n tokens.

    Args:
        dataset: has `seq_len` N, and `read_ranges(index, ranges)` that gives "tokens" and "labels" of (N,), and "index".
            Where it gives "cu_seqlens", which allows one row only, the sequences of n tokens become documents of that row.
        schedule: for the sampler.

    Every other attribute is that of the dataset.
    """

    def __init__(self, dataset: Any, schedule: SeqLenSchedule) -> None:
        self.dataset, self.schedule = dataset, schedule
        self._packed = getattr(dataset, "eos_token", None) is not None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int | tuple[int, int]) -> dict[str, Any]:
        """{"tokens": (K, n), "labels": (K, n), "index": (K,)}; a whole number for `index` is one sequence of N tokens."""
        return self.read_ranges(index, (range(self.length_of(index)),))

    def length_of(self, index: int | tuple[int, int]) -> int:
        """Tokens of a row of a sample."""
        return self.dataset.seq_len if self._packed else self._place(index)[1]

    def read_ranges(self, index: int | tuple[int, int], ranges: tuple[range, ...]) -> dict[str, Any]:
        """The sample at some positions of each of its rows only."""
        number, length = self._place(index)
        if self._packed:
            sample = self.dataset.read_ranges(number, ranges)
            walls = torch.arange(0, self.dataset.seq_len + 1, length, dtype=torch.int32)
            return {**sample, "cu_seqlens": torch.unique(torch.cat([sample["cu_seqlens"], walls]))}
        rows = []
        for start in range(0, self.dataset.seq_len, length):
            moved = tuple(range(start + x.start, start + x.stop, x.step) for x in ranges)
            rows.append(self.dataset.read_ranges(number, moved))
        return default_collate(rows)

    def _place(self, index: int | tuple[int, int]) -> tuple[int, int]:
        return index if isinstance(index, tuple) else (index, self.dataset.seq_len)

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "__setstate__"):  # missing while being unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


def collate_rows(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch of the rows of all samples: (B K, n), and "index" (B K,)."""
    return {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}
