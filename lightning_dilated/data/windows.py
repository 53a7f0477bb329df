"""Windows of bases of a genome, read from either strand: the samples of `GenomeDataModule`.

Shape letters: N bases of a window (`seq_len`).
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from lightning_dilated.data.genome.records import N_CODE, Genome


class GenomeWindows(Dataset):
    """Windows of N bases that lie end to end in stretches of records.

    Args:
        genome: the records.
        stretches: (record's number, start, stop) of each stretch; labels do not leave it.
        seq_len: N.
        max_n: leave out windows with more N than this; None keeps all.
        reverse_complement: share of the windows that are read from the other strand, drawn anew in each epoch.
        seed: decides with the epoch and the window's number whether it is reversed.
        limit: use at most this many windows.
    """

    def __init__(
        self,
        genome: Genome,
        stretches: list[tuple[int, int, int]],
        seq_len: int,
        max_n: float | None = None,
        reverse_complement: float = 0.0,
        seed: int = 0,
        limit: int | None = None,
    ) -> None:
        self.genome, self.seq_len, self.reverse_complement, self.seed = genome, seq_len, reverse_complement, seed
        self.epoch = 0
        self._stretches = np.array(stretches, dtype=np.int64).reshape(-1, 3)
        self._ends = np.cumsum((self._stretches[:, 2] - self._stretches[:, 1]) // seq_len)
        self.windows = int(self._ends[-1]) if stretches else 0
        self._kept = None if max_n is None else self._with_few_n(max_n)
        kept = self.windows if self._kept is None else len(self._kept)
        self.left_out = self.windows - kept  # for their N
        self.count = kept if limit is None else min(kept, limit)

    def _with_few_n(self, max_n: float) -> np.ndarray:
        """Numbers of the windows that hold at most `max_n` N."""
        kept = [np.empty(0, dtype=bool)]
        for number, start, stop in self._stretches:
            edges = np.arange(start, stop + 1, self.seq_len)
            kept.append(np.diff(self.genome.records[number].unknown_before(edges)) <= max_n)
        return np.flatnonzero(np.concatenate(kept))

    def __len__(self) -> int:
        return self.count

    def fingerprint(self) -> str:
        """Differs where the bases or their windows do."""
        cut = hashlib.blake2b(self._stretches.tobytes(), digest_size=8).hexdigest()
        strands = f"{self.reverse_complement} reversed by {self.seed}"
        return f"{self.genome.fingerprint()}, {self.count} of {self.windows} windows {cut}, {strands}"

    def set_epoch(self, epoch: int) -> None:
        """Called by `ResumableLoader` before each pass: another epoch reverses other windows."""
        self.epoch = epoch

    def where(self, index: int) -> tuple[str, str, int]:
        """(file, record's name, first base counted from 0) of a window, as it lies in the file. Raises: IndexError."""
        number, start, _, _ = self._place(index)
        return self.genome.records[number].file, self.genome.records[number].name, start

    def reversed(self, index: int) -> bool:
        """Whether this epoch reads a window from the other strand: the same in every process and on every rank."""
        if self.reverse_complement == 0:
            return False
        words = repr((self.seed, self.epoch, index)).encode()
        drawn = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "big") / 2**64
        return drawn < self.reverse_complement

    def __getitem__(self, index: int) -> dict[str, Any]:
        """{"tokens": (N,) int64, "labels": (N,) int64 the next base of the same strand, "index": the window's number}."""
        return self.read_ranges(index, (range(self.seq_len),))

    def read_ranges(self, index: int, ranges: tuple[range, ...]) -> dict[str, Any]:
        """The window at some positions only: of each range its bases are read, and one more for the last label."""
        flip = self.reversed(index)
        tokens, labels = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
        for x in ranges:
            if x:
                values = torch.from_numpy(self._read(index, x.start, x[-1] + 2, flip))
                tokens.append(values[:-1][:: x.step])
                labels.append(values[1:][:: x.step])
        target = torch.cat(labels)
        target[target == N_CODE] = -100  # nobody knows the base, so none is right
        return {"tokens": torch.cat(tokens), "labels": target, "index": index}

    def _place(self, index: int) -> tuple[int, int, int, int]:
        """(record's number, first base, start and stop of the stretch) of a window."""
        if not 0 <= index < self.count:
            raise IndexError(f"window {index} was asked for, but there are {self.count}")
        window = index if self._kept is None else int(self._kept[index])
        at = int(np.searchsorted(self._ends, window, side="right"))
        number, start, stop = map(int, self._stretches[at])
        before = int(self._ends[at - 1]) if at else 0
        return number, start + (window - before) * self.seq_len, start, stop

    def _read(self, index: int, begin: int, end: int, flip: bool) -> np.ndarray:
        """Positions [begin, end) of a window, at most to N (one behind it): int64 codes, -100 beyond the stretch."""
        number, first, low, high = self._place(index)
        start, stop = first + begin, first + end
        if flip:
            start, stop = first + self.seq_len - end, first + self.seq_len - begin
        codes = self.genome.read(number, max(start, low), min(stop, high)).astype(np.int64)
        if flip:
            codes = codes[::-1]
            codes = np.where(codes == N_CODE, N_CODE, 3 - codes)
        missing = end - begin - len(codes)  # one at most, behind the window's end
        return np.concatenate([codes, np.full(missing, -100, dtype=np.int64)])
