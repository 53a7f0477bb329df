"""ByteDataModule: any files as one stream of bytes that is cut into sequences, and a bigram model as a baseline.

Shape letters: B batch, N tokens of a sequence (`seq_len`).
"""

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from lightning_dilated._validation import one_of, real
from lightning_dilated.data.module import SPLITS, SequenceDataModule, split_bounds, split_fractions
from lightning_dilated.data.opener import CACHE_GIB, FileOpener
from lightning_dilated.data.sampler import MARK
from lightning_dilated.ext.files.files import HINT, ByteStream, collect_files, file_suffixes, path_list
from lightning_dilated.ext.text.documents import Documents


class ByteSequences(Dataset):
    """A dataset of sequences of N tokens from bytes [start, stop) of a stream; sequence i begins at byte start + i * N.

    Args:
        stream: the stream of bytes.
        start, stop: the range of the stream, in bytes.
        seq_len: N, number of tokens of a sequence.
        limit: maximum number of sequences.
    """

    def __init__(self, stream: ByteStream, start: int, stop: int, seq_len: int, limit: int | None = None) -> None:
        self.stream = stream
        self.start = start
        self.seq_len = seq_len
        count = max(0, stop - start - 1) // seq_len
        self.count = count if limit is None else min(count, limit)

    def __len__(self) -> int:
        return self.count

    def fingerprint(self) -> str:
        """Return a digest of the range, and of the files' names, sizes and some of their blocks."""
        return (
            f"{self.stream.fingerprint()}, {self.count} sequences from byte {self.start}{MARK}{self.stream.content()}"
        )

    def place_of(self, index: int) -> tuple[str, int]:
        """Return the file of a sequence's first token, and the token's position in this file."""
        return self.stream.where(self.start + index * self.seq_len)

    def read(self, index: int, start: int, stop: int) -> torch.Tensor:
        """Read positions [start, stop) of sequence `index`: (stop - start,) int64 byte values.

        Positions are 0 to N: the byte at position N is the label of the last token. Only these bytes are read.

        Raises: IndexError if there is no such sequence or position.
        """
        if not 0 <= index < self.count:
            raise IndexError(f"sequence {index} was asked for, but there are {self.count}")
        if not 0 <= start <= stop <= self.seq_len + 1:
            raise IndexError(f"positions [{start}, {stop}) were asked for, but a sequence has 0 to {self.seq_len}")
        begin = self.start + index * self.seq_len
        return torch.from_numpy(self.stream.read(begin + start, begin + stop)).long()

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return {"tokens": (N,) int64, "labels": (N,) int64 next bytes, "index": the sequence's number}."""
        return self.read_ranges(index, (range(self.seq_len),))

    def read_ranges(self, index: int, ranges: tuple[range, ...]) -> dict[str, Any]:
        """Return the sample at the positions in `ranges`; each range reads one more byte for the last label."""
        values = [self.read(index, x.start, x[-1] + 2) for x in ranges if x]
        parts = [(v[:-1][:: x.step], v[1:][:: x.step]) for v, x in zip(values, (x for x in ranges if x), strict=True)]
        tokens, labels = (
            (torch.cat(x) for x in zip(*parts, strict=True)) if parts else torch.empty(2, 0, dtype=torch.int64)
        )
        return {"tokens": tokens, "labels": labels, "index": index}


class ByteDataModule(SequenceDataModule):
    """Text or binary files as one byte stream: the first part for training, then validation, then test.

    Batches are {"tokens": (B, N), "labels": (B, N), "index": (B,)}, all int64; the id of a token is the value of the
    byte, so `vocab_size` is 256. Labels never come from a different split. The training order depends only on `seed`
    and the epoch, and continues exactly from a checkpoint; validation and test follow the order of the files.

    Args:
        paths: files, directories (read recursively), globs, or URLs of these; null: files of Python's standard library.
        seq_len: N, number of tokens of a sequence (each sample reads N + 1 bytes).
        batch_size: B, number of sequences of a batch on each device.
        val_fraction: share of the bytes for validation, at least 0 (none) and below 1.
        test_fraction: share of the bytes for test, at least 0 (none) and below 1.
        val_limit: maximum number of sequences of the validation split; null for all.
        seed: seed of the training order.
        num_workers: processes that load batches; 0 loads in the main process.
        pin_memory: copy batches to page-locked memory, so that copies to a GPU are asynchronous; null: with a GPU.
        suffixes: file endings to take from a directory, such as ['.txt']; null for all.
        pack_tokens: null: no packing. A number turns packing on, and is the maximum number of bytes in a batch on each
            device. A sample is then a file, or a piece of N bytes of a longer file, and never spans two files. A batch
            is one row of D packed samples, {"tokens": (1, n), "labels": (1, n), "cu_seqlens": (D + 1,) int32 bounds of
            the samples on the CPU, "index": (D,)}. A file's last byte has the label -100.
        cache_dir, cache_gib: for URLs, the folder of downloaded blocks (null: `remote` in the package's cache folder)
            and its maximum size in GiB, see `FileOpener`.

    Raises: TypeError or ValueError for values outside these ranges. The data on disk is checked later, by `check`.
    """

    vocab_size: int = 256
    #: number of bytes of text in a token
    bytes_per_token: float = 1.0

    def __init__(
        self,
        paths: str | list[str] | None = None,
        seq_len: int = 4096,
        batch_size: int = 1,
        val_fraction: float = 0.05,
        test_fraction: float = 0.05,
        val_limit: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        suffixes: list[str] | None = None,
        pack_tokens: int | None = None,
        cache_dir: str | None = None,
        cache_gib: float = CACHE_GIB,
    ) -> None:
        super().__init__(seq_len, val_limit, batch_size, seed, num_workers, pin_memory, pack_tokens)
        self.opener = FileOpener(cache_dir, cache_gib)
        self.paths = path_list(paths)
        self.val_fraction = real(val_fraction, "data.val_fraction", least=0, below=1)
        self.test_fraction = real(test_fraction, "data.test_fraction", least=0, below=1)
        split_fractions({"val": val_fraction, "test": test_fraction}, {"val": False, "test": False}, "paths")
        self.suffixes = file_suffixes(suffixes, "data.suffixes")
        self._stream: ByteStream | None = None
        self._bigram: dict[str, Any] = {}

    def check(self) -> None:
        """Look up all files and sizes, and check that each requested split has at least one sequence.

        Raises: FileNotFoundError, PermissionError or ValueError, with the problem and a remedy.
        """
        if self._stream is not None:
            return
        stream = ByteStream(collect_files(self.paths, self.suffixes, opener=self.opener), opener=self.opener)
        if len(stream) == 0:
            raise ValueError(f"all files of data.paths are empty; {HINT}")
        for split, (start, stop) in self._bounds(len(stream)).items():
            if self.wanted(split) is None:
                self.check_length(split, stop - start, len(stream), "bytes", self._sequences(stream, split))
        self.check_batch(len(self._sequences(stream, "train")), 1)
        self._stream = stream

    @property
    def stream(self) -> ByteStream:
        """The stream of all files' bytes; files are looked up on first use."""
        self.check()
        assert self._stream is not None
        return self._stream

    def dataset(self, split: str) -> ByteSequences | Documents:
        one_of(split, "split", SPLITS)
        return self._sequences(self.stream, split)

    def bigram_bits_per_byte(self, split: str = "val") -> float:
        """Train an add-one bigram model on the train split, and return its bits per byte on the byte pairs of `split`.

        Raises: ValueError for an unknown split or one without sequences.
        """
        if split not in self._bigram:
            dataset = self.dataset(split)
            if len(dataset) == 0:
                raise ValueError(f"the {split} split has no sequences: set data.{split}_fraction above 0")
            if "counts" not in self._bigram:
                self._bigram["counts"] = bigram_counts(self.stream, *self._bounds(len(self.stream))["train"])
            if isinstance(dataset, Documents):
                samples = zip(dataset.begins, np.minimum(dataset.begins + self.seq_len + 1, dataset.ends), strict=True)
                counts = (bigram_counts(self.stream, int(start), int(stop)) for start, stop in samples)
                pairs = sum(counts, np.zeros((256, 256), dtype=np.int64))
            else:  # sequences are consecutive, so their pairs are the pairs of one range
                pairs = bigram_counts(self.stream, dataset.start, dataset.start + len(dataset) * self.seq_len + 1)
            self._bigram[split] = bits_per_byte(self._bigram["counts"], pairs)
        return self._bigram[split]

    def describe(self) -> str:
        """Return a line with the numbers of files, bytes, and sequences of each split."""
        counts = ", ".join(f"{len(self.dataset(split)):,} {split}" for split in SPLITS)
        return f"{len(self.stream.files):,} files, {len(self.stream):,} bytes; {self.kind}: {counts}"

    def wanted(self, split: str) -> str | None:
        present = split == "train" or getattr(self, f"{split}_fraction") > 0
        return None if present else f"data.{split}_fraction is 0; set it above 0"

    def _bounds(self, total: int) -> dict[str, tuple[int, int]]:
        return split_bounds(total, {"val": self.val_fraction, "test": self.test_fraction})

    def _sequences(self, stream: ByteStream, split: str) -> ByteSequences | Documents:
        start, stop = self._bounds(len(stream))[split]
        if self.pack_tokens is None:
            return ByteSequences(stream, start, stop, self.seq_len, self.limit(split))
        files = np.clip(np.cumsum([0, *stream.sizes]), start, stop)
        return Documents(stream, np.unique(files), self.seq_len, self.limit(split))


# -- the bigram baseline ----------------------------------------------------------------------------------------------
_CHUNK = 1 << 22


def bigram_counts(stream: ByteStream, start: int, stop: int, chunk: int = _CHUNK) -> np.ndarray:
    """Count byte pairs in stream[start:stop), in chunks: (256, 256) int64; rows are bytes, columns the next bytes."""
    counts = np.zeros(256 * 256, dtype=np.int64)
    for piece in stream.chunks(start, stop, chunk):
        pairs = piece[:-1].astype(np.int32) * 256 + piece[1:]
        counts += np.bincount(pairs, minlength=counts.size)
    return counts.reshape(256, 256)


def bits_per_byte(train: np.ndarray, evaluated: np.ndarray) -> float:
    """Return the mean of -log2 p(next byte | byte) over the pairs in `evaluated`, with p from the counts `train` + 1.

    Args:
        train, evaluated: (256, 256) pair counts.

    Raises: ValueError if `evaluated` has no pairs.
    """
    total = int(evaluated.sum())
    if total == 0:
        raise ValueError("there are no byte pairs to evaluate: pass at least two bytes")
    smoothed = train + 1.0
    bits = np.log2(smoothed.sum(axis=1, keepdims=True)) - np.log2(smoothed)
    return float((evaluated * bits).sum() / total)
