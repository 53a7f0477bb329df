"""StreamDataModule: serve a text as parallel streams. Each stream is read step by step from beginning to end.

Shape letters: B streams of a batch, S streams of all ranks, N tokens of a step (`seq_len`), n tokens of a given step.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.utils.data import Dataset

from lightning_dilated._validation import integer, one_of
from lightning_dilated.data.module import SHARE, SPLITS, SequenceDataModule, split_bounds, split_fractions
from lightning_dilated.data.opener import CACHE_GIB, FileOpener
from lightning_dilated.data.sampler import MARK
from lightning_dilated.ext.files.files import HINT, ByteStream, collect_files, file_suffixes, files_of, required_paths
from lightning_dilated.ext.text.tokens import RAW_DTYPES, SUFFIXES, TokenStream, checked, token_file
from lightning_dilated.sequence.shard import SequenceSpec


class StreamSequences(Dataset):
    """Tokens [start, stop) of a text as S streams of the same length; sample s * S + i is step s of stream i.

    A sampler that serves samples in order, S at a time over all ranks, gives every stream its next step. If the number
    of ranks divides S, each rank serves whole streams.

    Args:
        text: the tokens.
        start, stop: the range of the text.
        seq_len: N, number of tokens of a step.
        streams: S.
        separator: the token that ends a document; None treats the text as one document.
        vocab_size: tokens must be below this number; None allows any token.
        whole: leave out the last step if it has fewer than N tokens.
    """

    def __init__(
        self,
        text: ByteStream | TokenStream,
        start: int,
        stop: int,
        seq_len: int,
        streams: int,
        separator: int | None = None,
        vocab_size: int | None = None,
        whole: bool = False,
    ) -> None:
        self.text, self.start, self.seq_len, self.streams = text, start, seq_len, streams
        self.separator, self.vocab_size = separator, vocab_size
        #: number of tokens of a stream; one more is left for the label of the last token
        self.length = max(0, stop - start - 1) // streams
        self.steps = self.length // seq_len if whole else -(-self.length // seq_len)

    def __len__(self) -> int:
        return self.steps * self.streams

    def fingerprint(self) -> str:
        """Return a string that depends on the range, the streams, and the names, sizes and some blocks of the files."""
        place = f"{self.streams} streams of {self.length} tokens from token {self.start}, separator {self.separator}"
        return f"{self.text.fingerprint()}, {place}{MARK}{self.text.content()}"

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a step of a stream: `tokens` (n,), `labels` (n,), `starts` (n,), `stream`, `position`, `index`.

        Raises: IndexError if there is no such sample, ValueError for a token outside the vocabulary.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} was asked for, but there are {len(self)}")
        step, stream = divmod(index, self.streams)
        position = step * self.seq_len
        begin = self.start + stream * self.length + position
        count, before = min(self.seq_len, self.length - position), int(position > 0)
        values = self._read(begin - before, begin + count + 1)
        tokens, labels = values[before:-1], values[before + 1 :].clone()
        starts = torch.zeros(count, dtype=torch.bool)
        if self.separator is not None:
            starts[1 - before :] = values[:-2] == self.separator
            labels[tokens == self.separator] = -100
        starts[0] |= position == 0
        place = {"stream": stream, "position": position, "index": index}
        return {"tokens": tokens, "labels": labels, "starts": starts, **place}

    def _read(self, start: int, stop: int) -> torch.Tensor:
        values = torch.from_numpy(self.text.read(start, stop)).long()
        return values if self.vocab_size is None else checked(values, self.vocab_size, self.text, start)


class StreamDataModule(SequenceDataModule):
    """Text, binary or token files as S streams, each read from beginning to end: a step continues the previous step.

    The model needs a method `stream`, such as `LongNetLM.stream`, which carries a stream's state from step to step.
    Gradients do not cross steps (truncated back-propagation). Each split is cut into S contiguous streams of equal
    length; each data-parallel rank serves S / ranks whole streams. An epoch is one pass through all streams. Steps are
    not shuffled. Checkpoints save the position, and a run may resume with a different number of ranks.

    Batches: `tokens` (B, n) int64; `labels` (B, n) int64, the next token of each token, also across steps, and -100 for
    a separator; `starts` (B, n) bool, True at the start of a stream or document; `stream` (B,) int64, the numbers of
    the streams; `position` (B,) int64, the number of tokens of the stream before this step; `index` (B,) int64. n is N,
    except in the last step of a stream, which may be shorter, and which training then leaves out.

    Args:
        paths: files, directories (read recursively) or globs, or URLs of them.
        seq_len: N, number of tokens of a step.
        streams: S, a multiple of the number of data-parallel ranks.
        separator: the byte or token that ends a document; tokens do not see earlier documents. null: no separator.
        vocab_size: null reads files as bytes (256 values); a number reads token files, as in `TokenDataModule`.
        dtype: dtype of .bin token files, see `TokenDataModule`.
        val_fraction, test_fraction: shares of the tokens for validation and test, taken from the end; below 1.
        num_workers, pin_memory: see `SplitDataModule`.
        suffixes: suffixes of files to take from a directory, such as ['.txt']; null: all, or .npy and .bin for tokens.
        cache_dir, cache_gib: for URLs, the folder of downloaded blocks (null: `remote` in the package's cache folder)
            and its maximum size in GiB, see `FileOpener`.

    Raises: TypeError or ValueError for values outside these ranges. The data on disk is checked later, by `check`.
    """

    sequence_spec = SequenceSpec({"tokens": 1, "labels": 1, "starts": 1}, whole=["stream", "position", "index"])
    shuffles = False
    unit = "steps"

    def __init__(
        self,
        paths: str | list[str],
        seq_len: int,
        streams: int,
        separator: int | None = None,
        vocab_size: int | None = None,
        dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = None,
        val_fraction: float = SHARE,
        test_fraction: float = SHARE,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        suffixes: list[str] | None = None,
        cache_dir: str | None = None,
        cache_gib: float = CACHE_GIB,
    ) -> None:
        self.streams = integer(streams, "data.streams", 1)
        super().__init__(seq_len, None, self.streams, 0, num_workers, pin_memory)
        self.opener = FileOpener(cache_dir, cache_gib)
        self.paths, self.suffixes = required_paths(paths, "paths"), file_suffixes(suffixes, "data.suffixes")
        if dtype is not None:
            one_of(dtype, "data.dtype", RAW_DTYPES, " Or null, for uint16.")
            if vocab_size is None:
                raise ValueError(f"data.dtype = {dtype} needs token files: set data.vocab_size, or omit data.dtype")
        self.reads_tokens, self.dtype = vocab_size is not None, dtype
        self.vocab_size = 256 if vocab_size is None else integer(vocab_size, "data.vocab_size", 1)
        self.separator = None if separator is None else integer(separator, "data.separator", 0)
        if separator is not None and separator >= self.vocab_size:
            raise ValueError(f"data.separator must be below {self.vocab_size}, the number of tokens; got {separator}")
        shares = {"val": val_fraction, "test": test_fraction}
        self.fractions = split_fractions(shares, {"val": False, "test": False}, "paths")
        self._text: ByteStream | TokenStream | None = None

    def setup(self, stage: str | None = None) -> None:
        """Set up as `SplitDataModule` does, and check that the model has `stream` and that ranks share no sequence.

        Raises: TypeError if the model has no method `stream`; ValueError if ranks share a sequence.
        """
        super().setup(stage)
        if self.trainer is None:
            return
        model, sizes = self.trainer.lightning_module, getattr(self.trainer.strategy, "sizes", None)
        if not callable(getattr(model, "stream", None)):
            raise TypeError(
                f"{type(model).__name__} has no method `stream`, so it would see each step of a stream alone: take "
                "LongNetLM, or a DataModule of separate sequences, such as ByteDataModule"
            )
        shared = getattr(sizes, "sequence_size", 1)
        if shared > 1:
            raise ValueError(
                f"the strategy lets {shared} ranks share a sequence, but each stream is read by one rank: set "
                "sequence_size=1, as in RingDilatedStrategy(sequence_size=1), so that every rank reads streams of its own"
            )

    def check(self) -> None:
        """Look up all files and their sizes, and check that each requested split has at least one step.

        Raises: OSError or ValueError with the sizes and the remedy.
        """
        if self._text is not None:
            return
        text = self._open()
        if len(text) == 0:
            raise ValueError(f"all files of data.paths are empty; {HINT}")
        for split, (start, stop) in split_bounds(len(text), self.fractions).items():
            if self.wanted(split) is None:
                self._check_split(split, stop - start, len(text))
        self._text = text

    def dataset(self, split: str) -> StreamSequences:
        one_of(split, "split", SPLITS)
        self.check()
        assert self._text is not None
        start, stop = split_bounds(len(self._text), self.fractions)[split]
        known = self.vocab_size if self.reads_tokens else None
        whole = split == "train"
        return StreamSequences(self._text, start, stop, self.seq_len, self.streams, self.separator, known, whole)

    def per_rank(self, replicas: int) -> int:
        """Return the number of streams of each rank. Raises ValueError if the number of ranks does not divide S."""
        if self.streams % replicas:
            raise ValueError(
                f"data.streams = {self.streams} is no multiple of the {replicas} data-parallel ranks, and each rank reads "
                f"whole streams: set data.streams to {-(-self.streams // replicas) * replicas}, or use fewer ranks"
            )
        return self.streams // replicas

    def describe(self) -> str:
        """Return one line with S and the numbers of tokens: of all files, and of a stream in each split."""
        data = {split: self.dataset(split) for split in SPLITS}
        sizes = ", ".join(f"{x.length:,} {split}" for split, x in data.items())
        return f"{len(data['train'].text):,} tokens; {self.streams:,} streams of {sizes}, {self.seq_len:,} a step"

    def wanted(self, split: str) -> str | None:
        present = split == "train" or self.fractions[split] > 0
        return None if present else f"data.{split}_fraction is 0; set it above 0"

    def _open(self) -> ByteStream | TokenStream:
        if not self.reads_tokens:
            return ByteStream(collect_files(self.paths, self.suffixes, opener=self.opener), opener=self.opener)
        files = files_of(self.paths, "paths", self.suffixes or SUFFIXES, self.opener)
        self.opener.look_up(files)
        opened = [token_file(path, self.opener.size(path), self.dtype, 0, self.opener) for path in files]
        return TokenStream(opened, self.opener)

    def _check_split(self, split: str, size: int, total: int) -> None:
        needed = self.streams * (self.seq_len if split == "train" else 1) + 1
        if size < needed:
            change = "lower data.seq_len" if split == "train" else f"raise data.{split}_fraction, or set it to 0"
            raise ValueError(
                f"the {split} split has {size} of the {total} tokens, but a step of data.streams = {self.streams} takes "
                f"{needed} (data.seq_len = {self.seq_len}): pass more data, lower data.streams, or {change}"
            )
