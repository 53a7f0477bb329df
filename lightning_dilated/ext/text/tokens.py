"""TokenDataModule: files of token ids (.npy or raw) as one stream that is cut into sequences or documents.

Shape letters: B batch, N tokens of a sequence (`seq_len`), D documents of a sequence.
"""

from __future__ import annotations

import os
import struct
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

import numpy as np
import torch

from lightning_dilated._extensions import hook
from lightning_dilated._validation import flag, integer, one_of
from lightning_dilated.data.module import SPLITS, SequenceDataModule, split_bounds, split_fractions
from lightning_dilated.data.opener import CACHE_GIB, FileOpener
from lightning_dilated.data.sampler import MARK
from lightning_dilated.ext.files.files import ByteStream, files_of, required_paths
from lightning_dilated.ext.text.bytes import ByteSequences
from lightning_dilated.ext.text.documents import Documents

#: dtypes of tokens in .npy files
DTYPES = ("uint16", "uint32", "int32", "int64")
#: dtypes of tokens in raw files
RAW_DTYPES = ("uint8", *DTYPES)
SUFFIXES = [".npy", ".bin"]
#: {first bytes: fault and remedy} of files that contain something other than raw tokens
_FOREIGN = {
    b"\x93NUMPY": "is a .npy file by its content: rename it to end in .npy",
    b"PK\x03\x04": "is a zip archive by its content (torch.save and .npz make such files): save the tokens by numpy.save",
    b"\x1f\x8b\x08\x00": "is compressed by gzip: decompress it first",
    b"\x1f\x8b\x08\x08": "is compressed by gzip: decompress it first",
    b"LITPKDS": "begins with the 24-byte header of lit-gpt's packed data: set data.header to 24 and data.dtype to its dtype",
}
#: {magic number: (dtype, bytes)} of llm.c; its 1024-byte header begins with magic number, version and token count
_LLMC = {20240520: ("uint16", 2), 20240801: ("uint32", 4)}


@dataclass(frozen=True)
class TokenFile:
    """A file that contains `count` tokens of `dtype`, beginning at byte `offset`."""

    path: str
    dtype: str
    offset: int
    count: int


def token_file(path: str, size: int, dtype: str | None, header: int, opener: FileOpener | None = None) -> TokenFile:
    """Read the beginning of a file of `size` bytes, and locate its tokens.

    Args:
        path: a path, or a URL for `opener`.
        dtype, header: for raw (.bin) files: dtype of the tokens (None: uint16), and bytes before the first token.

    Raises: ValueError naming the file and a remedy.
    """
    if size == 0:
        raise ValueError(f"{path} is empty: write it again or leave it out of the paths")
    if path.endswith(".npy"):
        return _npy_file(path, size, opener or FileOpener())
    if not path.endswith(".bin"):
        raise ValueError(
            f"{path} ends neither in .npy nor in .bin: tokens are read from numpy arrays (.npy) or raw numbers (.bin); "
            "text and other files are served byte by byte by lightning_dilated.data.ByteDataModule"
        )
    return _raw_file(path, size, dtype, header, opener or FileOpener())


def _npy_file(path: str, size: int, opener: FileOpener) -> TokenFile:
    with opener.open(path) as file:
        try:
            version = np.lib.format.read_magic(file)
            _check_header_length(file, version, size)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
        except (ValueError, SyntaxError, RecursionError, MemoryError, tokenize.TokenError) as error:
            raise ValueError(
                f"{path} has no readable .npy header ({error}): write it again by numpy.save, or rename it to .bin if it "
                "holds raw numbers"
            ) from error
        offset = file.tell()
    if len(shape) != 1:
        raise ValueError(
            f"{path} holds an array of shape {shape}; tokens are one row: save array.reshape(-1), with an end-of-text token "
            "between documents"
        )
    if dtype.newbyteorder("=").name not in DTYPES or dtype.hasobject:
        raise ValueError(f"{path} holds {dtype}; tokens are one of {', '.join(DTYPES)}: save array.astype('uint32')")
    count = (size - offset) // dtype.itemsize
    if size - offset != shape[0] * dtype.itemsize:
        what = "was cut off" if count < shape[0] else "goes on after its array"
        raise ValueError(
            f"{path} {what}: its header states {shape[0]:,} tokens, but it has {count:,} (and "
            f"{(size - offset) % dtype.itemsize} bytes): copy or write it again"
        )
    if shape[0] == 0:
        raise ValueError(f"{path} is empty (an array of 0 tokens): write it again or leave it out of the paths")
    return TokenFile(path, dtype.str, offset, shape[0])


def _check_header_length(file: BinaryIO, version: tuple[int, int], size: int) -> None:
    """Raise ValueError for a header that declares more bytes than the file has, because numpy would allocate them."""
    begin = file.tell()
    length = int.from_bytes(file.read(2 if version == (1, 0) else 4), "little")
    if begin + length > size:
        raise ValueError(f"{length:,} bytes of header in a file of {size:,}")
    file.seek(begin)


def _raw_file(path: str, size: int, dtype: str | None, header: int, opener: FileOpener) -> TokenFile:
    kind = np.dtype(dtype or "uint16")
    with opener.open(path) as file:
        first = file.read(4096)
    if header == 0:
        _refuse_foreign(path, size, first)
    count, extra_bytes = divmod(size - header, kind.itemsize)
    if extra_bytes or count < 1:
        raise ValueError(
            f"{path} has {size:,} bytes, which is not a whole number (at least one) of {kind} tokens of {kind.itemsize} "
            f"bytes after a header of {header}: it was cut off, or data.dtype or data.header is wrong"
        )
    if dtype is None and header == 0:
        _refuse_wider(path, np.frombuffer(first[: len(first) // 4 * 4], np.uint16))
    return TokenFile(path, kind.str, header, count)


def _refuse_foreign(path: str, size: int, first: bytes) -> None:
    for magic, remedy in _FOREIGN.items():
        if first.startswith(magic):
            raise ValueError(f"{path} {remedy}")
    if size >= 1024:
        magic, _, count = struct.unpack("<3i", first[:12])
        name, width = _LLMC.get(magic, ("", 0))
        if name and count * width + 1024 == size:
            raise ValueError(
                f"{path} begins with the 1,024-byte header of llm.c: set data.header to 1024 and data.dtype to {name}"
            )


def _refuse_wider(path: str, tokens: np.ndarray) -> None:
    """Raise ValueError if a file that is read as uint16 looks like uint32: every second number is small."""
    even, odd = tokens[0::2], tokens[1::2]
    if len(odd) >= 64 and int(odd.max()) * 64 < int(even.max()):
        raise ValueError(
            f"{path} reads as uint16 with tokens of at most {odd.max()} in every second place, as a file of uint32 would: "
            "set data.dtype to uint32 (or to uint16, if the file has this dtype)"
        )


class TokenStream:
    """The tokens of several files, concatenated in the given order; only the requested tokens are read.

    The stream reads through a `ByteStream`, and can be pickled if the `ByteStream` can.
    """

    def __init__(self, files: Sequence[TokenFile], opener: FileOpener | None = None) -> None:
        self.files = list(files)
        self._bytes = ByteStream([file.path for file in self.files], opener=opener)
        sizes = np.array(self._bytes.sizes, dtype=np.int64)
        self._begins = np.cumsum(sizes) - sizes
        self._ends = np.cumsum([file.count for file in self.files], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def opener(self) -> FileOpener:
        return self._bytes.opener

    @property
    def bytes_read(self) -> int:
        """The number of bytes that this copy of the object has read."""
        return self._bytes.bytes_read

    def fingerprint(self) -> str:
        """Return a digest of the files' names and sizes, and of the dtypes of their tokens."""
        kinds = sorted({f"{file.dtype} from byte {file.offset}" for file in self.files})
        return f"{self._bytes.fingerprint()} of {', '.join(kinds)}"

    def content(self) -> str:
        return self._bytes.content()

    def where(self, position: int) -> tuple[str, int]:
        """Return the file of a token of the stream, and the token's position in this file."""
        index = int(np.searchsorted(self._ends, position, side="right"))
        return self.files[index].path, position - int(self._ends[index]) + self.files[index].count

    def read(self, start: int, stop: int) -> np.ndarray:
        """Read tokens [start, stop) into a new int64 array (stop - start,). Raises: IndexError outside the stream."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"token range [{start}, {stop}) lies outside the stream of {len(self)} tokens")
        out, done = np.empty(stop - start, dtype=np.int64), start
        while done < stop:
            index = int(np.searchsorted(self._ends, done, side="right"))
            file, kind = self.files[index], np.dtype(self.files[index].dtype)
            upto = min(stop, int(self._ends[index]))
            skipped = done - int(self._ends[index]) + file.count
            begin = int(self._begins[index]) + file.offset + skipped * kind.itemsize
            raw = self._bytes.read(begin, begin + (upto - done) * kind.itemsize)
            out[done - start : upto - start] = raw.view(kind)
            done = upto
        return out

    def chunks(self, size: int = 1 << 22) -> Iterator[tuple[int, np.ndarray]]:
        """Yield consecutive pieces of at most `size` tokens, each as the position of its first token and its tokens."""
        for begin in range(0, len(self), size):
            yield begin, self.read(begin, min(begin + size, len(self)))


def scan(stream: TokenStream, vocab_size: int, eos_token: int | None) -> np.ndarray:
    """Check every token, and return the sorted int64 positions of `eos_token`; no positions if it is None.

    Raises: ValueError for tokens outside [0, vocab_size); it names the first one's position, and the largest token.
    """
    ends, wrong, largest = [np.empty(0, dtype=np.int64)], None, 0
    for begin, tokens in stream.chunks():
        largest = max(largest, int(tokens.max()))
        if wrong is None and (int(tokens.max()) >= vocab_size or int(tokens.min()) < 0):
            index = int(np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0])
            wrong = int(tokens[index]), *stream.where(begin + index)
        if eos_token is not None:
            ends.append(np.flatnonzero(tokens == eos_token) + begin)
    if wrong is not None:
        raise ValueError(out_of_range(*wrong, vocab_size, f"; the largest token of all is {largest}"))
    return np.concatenate(ends)


def out_of_range(token: int, path: str, position: int, vocab_size: int, note: str = "") -> str:
    """Return the error message for a token that is not in the vocabulary."""
    return (
        f"{path} holds token {token} at position {position:,} (counted from 0), but data.vocab_size = {vocab_size} allows 0 "
        f"to {vocab_size - 1}{note}: set data.vocab_size to that of the tokenizer, or data.dtype to that of the file"
    )


def checked(tokens: torch.Tensor, vocab_size: int, stream: ByteStream | TokenStream, begin: int) -> torch.Tensor:
    """Return the tokens from position `begin` of a stream; raise ValueError for a token outside the vocabulary."""
    wrong = ((tokens < 0) | (tokens >= vocab_size)).nonzero()
    if len(wrong):
        offset = int(wrong[0])
        raise ValueError(out_of_range(int(tokens[offset]), *stream.where(begin + offset), vocab_size))
    return tokens


class TokenDocuments(Documents):
    """The `Documents` of a stream of tokens; reading a token that is not below `vocab_size` raises ValueError."""

    def __init__(
        self, stream: TokenStream, bounds: np.ndarray, seq_len: int, limit: int | None, vocab_size: int
    ) -> None:
        super().__init__(stream, bounds, seq_len, limit)
        self.vocab_size = vocab_size

    def read(self, start: int, stop: int) -> torch.Tensor:
        return checked(super().read(start, stop), self.vocab_size, self.stream, start)


class TokenSequences(ByteSequences):
    """A dataset of sequences of N tokens from tokens [start, stop) of a stream; sequence i begins at start + i * N.

    Args:
        stream, start, stop, seq_len, limit: as in `ByteSequences`, counted in tokens.
        vocab_size: reading a token that is not below this number raises ValueError.
        eos_token, ends: the token that ends a document, and its sorted positions in the stream; None: no documents.
    """

    def __init__(
        self,
        stream: TokenStream,
        start: int,
        stop: int,
        seq_len: int,
        vocab_size: int,
        limit: int | None = None,
        eos_token: int | None = None,
        ends: np.ndarray | None = None,
    ) -> None:
        super().__init__(stream, start, stop, seq_len, limit)  # type: ignore[arg-type]
        self.vocab_size, self.eos_token, self.ends = vocab_size, eos_token, ends

    def fingerprint(self) -> str:
        """Return a digest of the range, of the end token, and of the files' names, sizes and some of their blocks."""
        place = f"{self.count} sequences from token {self.start}, ends {self.eos_token}"
        return f"{self.stream.fingerprint()}, {place}{MARK}{self.stream.content()}"

    def read(self, index: int, start: int, stop: int) -> torch.Tensor:
        """Read positions [start, stop) of a sequence, (stop - start,) int64; raise ValueError for an invalid token."""
        tokens, begin = super().read(index, start, stop), self.start + index * self.seq_len + start
        return checked(tokens, self.vocab_size, self.stream, begin)

    def read_ranges(self, index: int, ranges: tuple[range, ...]) -> dict[str, Any]:
        """Return the sample at the positions in `ranges`, and the bounds of documents, if any, in the whole sequence.

        The end token of a document has no next token: its label is -100.
        """
        sample = super().read_ranges(index, ranges)
        if self.eos_token is not None:
            sample["labels"][sample["tokens"] == self.eos_token] = -100
            sample["cu_seqlens"] = self.cu_seqlens(index)
        return sample

    def cu_seqlens(self, index: int) -> torch.Tensor:
        """Return the bounds (D + 1,) int32, from 0 to N, of the documents of a sequence, without reading it.

        The sequence's first and last document may be parts of longer documents.
        """
        assert self.ends is not None
        begin = self.start + index * self.seq_len
        first, last = np.searchsorted(self.ends, [begin, begin + self.seq_len])
        bounds = self.ends[first:last] + 1 - begin
        inner = bounds[bounds < self.seq_len]
        return torch.from_numpy(np.concatenate([[0], inner, [self.seq_len]]).astype(np.int32))


def collate_documents(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Make a batch of one sample; `cu_seqlens` has no batch dimension."""
    (sample,) = samples
    row = {name: value for name, value in sample.items() if name != "cu_seqlens"}
    return {**torch.utils.data.default_collate([row]), "cu_seqlens": sample["cu_seqlens"]}


@dataclass(frozen=True)
class _Part:
    """A split: tokens [start, stop) of a stream, and the positions of document ends in the stream."""

    stream: TokenStream
    start: int
    stop: int
    ends: np.ndarray


class TokenDataModule(SequenceDataModule):
    """Token ids in numpy arrays (.npy) or raw files (.bin, as nanoGPT writes) as one stream that is cut into sequences.

    Batches are {"tokens": (B, N), "labels": (B, N) next tokens, "index": (B,)}, all int64. With `eos_token`, B is
    1, and on every rank "cu_seqlens" (D + 1,) int32, on the CPU, has the bounds of the documents in the whole sequence.
    A document ends after its `eos_token`, which has the label -100. Labels never come from a different split. A rank
    reads only its slice of a sequence, but `check` reads every token once in every process, to find invalid tokens and
    the ends of documents. This takes about two core seconds per gigabyte of uint16; `scan: false` turns it off.

    Args:
        paths: files, directories (read recursively, .npy and .bin) or globs, or URLs of these. A .npy contains one row
            of uint16, uint32, int32 or int64; a .bin contains numbers of `dtype` after `header` bytes.
        seq_len: N, number of tokens of a sequence (each sample reads N + 1).
        vocab_size: number of different tokens; the data and the model are checked against it.
        batch_size: B, number of sequences of a batch on each device.
        val_paths, test_paths: files for validation and for test, instead of a share of `paths`.
        val_fraction, test_fraction: shares of the tokens of `paths`, taken from the end; null: 0.05, or 0 if
            `val_paths` or `test_paths` is set.
        dtype: dtype of .bin files: uint8 (bytes), uint16, uint32, int32 or int64; null: uint16, with an error if a file
            looks like uint32.
        header: number of bytes before the first token of .bin files (1024 in llm.c's files).
        eos_token: the token that ends a document; null: the data is one text.
        val_limit: maximum number of sequences of the validation split; null for all.
        scan: check every token before training; false: check only the tokens of batches, without finding documents.
        pack_tokens: null: no packing. A number turns packing on, and is the maximum number of tokens in a batch on each
            device. A sample is then a whole document (by `eos_token`), or a piece of N tokens of a longer document. A
            batch is one row of D packed samples, and "index" is (D,).
        seed, num_workers, pin_memory: see `SplitDataModule`.
        cache_dir, cache_gib: for URLs, the folder of downloaded blocks (null: `remote` in the package's cache folder)
            and its maximum size in GiB, see `FileOpener`. `scan` fetches all files; turn it off for large ones.
        tokenizer: the tokenizer that made the tokens: a tokenizer.json, or a folder that transformers saved.
            Checkpoints store it for `generate`. null: no tokenizer.

    Raises: TypeError or ValueError for values outside these ranges. The data on disk is checked later, by `check`.
    """

    def __init__(
        self,
        paths: str | list[str],
        seq_len: int,
        vocab_size: int,
        batch_size: int = 1,
        val_paths: str | list[str] | None = None,
        test_paths: str | list[str] | None = None,
        val_fraction: float | None = None,
        test_fraction: float | None = None,
        dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = None,
        header: int = 0,
        eos_token: int | None = None,
        val_limit: int | None = None,
        scan: bool = True,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        pack_tokens: int | None = None,
        cache_dir: str | None = None,
        cache_gib: float = CACHE_GIB,
        tokenizer: str | None = None,
    ) -> None:
        super().__init__(seq_len, val_limit, batch_size, seed, num_workers, pin_memory, pack_tokens)
        self.opener = FileOpener(cache_dir, cache_gib)
        options = {"paths": paths, "val_paths": val_paths, "test_paths": test_paths}
        self.paths = {x: required_paths(p, x) for x, p in options.items() if x == "paths" or p is not None}
        self.vocab_size = integer(vocab_size, "data.vocab_size", 1)
        separate = {split: f"{split}_paths" in self.paths for split in ("val", "test")}
        self.fractions = split_fractions({"val": val_fraction, "test": test_fraction}, separate, "paths")
        if dtype is not None:
            one_of(dtype, "data.dtype", RAW_DTYPES, " Or null, for uint16.")
        self.dtype, self.header = dtype, integer(header, "data.header", 0)
        self.scan = flag(scan, "data.scan")
        self.eos_token = None if eos_token is None else integer(eos_token, "data.eos_token", 0)
        if self.eos_token is not None:
            self._check_documents(self.eos_token)
            self.collate = collate_documents
        elif pack_tokens is not None:
            raise ValueError(
                f"data.pack_tokens = {pack_tokens} packs documents, but data.eos_token, which ends them, is not set: set it "
                "to the token that the tokenizer puts between documents, or data.batch_size for sequences of equal length"
            )
        self.tokenizer_source = None if tokenizer is None else hook("check the name of a tokenizer")(tokenizer)
        self._tokenizer: Any = None  # a TextTokenizer
        self._parts: dict[str, _Part] | None = None

    def tokenizer_files(self) -> dict[str, str] | None:
        """Return {name: text} of the files of `data.tokenizer`, for checkpoints, or None without a tokenizer.

        Raises: the errors of `load_text_tokenizer`, and ValueError for a tokenizer with more than `vocab_size` tokens.
        """
        if self.tokenizer_source is None:
            return None
        if self._tokenizer is None:
            self._tokenizer = hook("load a tokenizer")(self.tokenizer_source)
        if self._tokenizer.vocab_size > self.vocab_size:
            raise ValueError(
                f"data.tokenizer {self.tokenizer_source} has {self._tokenizer.vocab_size} tokens, more than data.vocab_size "
                f"= {self.vocab_size}: raise data.vocab_size, or set data.tokenizer to the one that made the tokens"
            )
        return self._tokenizer.files()

    def _check_documents(self, eos_token: int) -> None:
        if eos_token >= self.vocab_size:
            raise ValueError(f"data.eos_token must be below data.vocab_size = {self.vocab_size}, got {eos_token}.")
        if self.batch_size != 1:
            raise ValueError(
                f"data.batch_size is {self.batch_size}, but packed documents (data.eos_token) take 1: raise data.seq_len, "
                "accumulate gradients (trainer.accumulate_grad_batches), or leave data.eos_token out"
            )
        if not self.scan:
            raise ValueError("data.eos_token needs data.scan: true, which finds where documents end")

    def check(self) -> None:
        """Open all files, scan all tokens, and check that each requested split has at least one sequence.

        Raises: OSError or ValueError, with the file, the problem and a remedy.
        """
        if self._parts is not None:
            return
        self.tokenizer_files()
        files = {name: files_of(paths, name, SUFFIXES, self.opener) for name, paths in self.paths.items()}
        _refuse_shared(files)
        streams = {name: self._stream(paths) for name, paths in files.items()}
        ends = self._scanned(streams)
        parts = {}
        for split, (start, stop) in split_bounds(len(streams["paths"]), self.fractions).items():
            name, change = "paths", None
            if (option := f"{split}_paths") in streams:
                name, start, stop, change = option, 0, len(streams[option]), f"pass more data in data.{option}"
            parts[split] = _Part(streams[name], start, stop, ends[name])
            if self.wanted(split) is None:
                samples = self._sequences(parts[split], split)
                self.check_length(split, stop - start, len(streams[name]), "tokens", samples, change)
        self.check_batch(len(self._sequences(parts["train"], "train")), 1)
        self._parts = parts

    def dataset(self, split: str) -> TokenSequences | TokenDocuments:
        one_of(split, "split", SPLITS)
        self.check()
        assert self._parts is not None
        return self._sequences(self._parts[split], split)

    def describe(self) -> str:
        """Return a line with the numbers of files, tokens, and sequences of each split."""
        counts = ", ".join(f"{len(self.dataset(split)):,} {split}" for split in SPLITS)
        streams = {id(part.stream): part.stream for part in (self._parts or {}).values()}.values()
        files, tokens = sum(len(x.files) for x in streams), sum(len(x) for x in streams)
        return f"{files:,} files, {tokens:,} tokens; {self.kind}: {counts}"

    def wanted(self, split: str) -> str | None:
        present = split == "train" or f"{split}_paths" in self.paths or self.fractions[split] > 0
        return None if present else f"data.{split}_fraction is 0; set it above 0, or set data.{split}_paths"

    def _stream(self, files: list[str]) -> TokenStream:
        self.opener.look_up(files)
        opened = [token_file(path, self.opener.size(path), self.dtype, self.header, self.opener) for path in files]
        return TokenStream(opened, self.opener)

    def _scanned(self, streams: dict[str, TokenStream]) -> dict[str, np.ndarray]:
        if not self.scan:
            return {name: np.empty(0, dtype=np.int64) for name in streams}
        # scan separate streams, so that `bytes_read` of the streams in use counts only tokens of batches
        ends = {
            name: scan(TokenStream(x.files, x.opener), self.vocab_size, self.eos_token) for name, x in streams.items()
        }
        if self.eos_token is not None and not any(map(len, ends.values())):
            raise ValueError(
                f"data.eos_token = {self.eos_token} occurs nowhere in the data, so no document would end: set it to the "
                "token that the tokenizer puts between documents, or leave it out"
            )
        return ends

    def _sequences(self, part: _Part, split: str) -> TokenSequences | TokenDocuments:
        if self.pack_tokens is not None:
            inner = part.ends[(part.ends >= part.start) & (part.ends < part.stop)] + 1
            bounds = np.unique(np.concatenate([[part.start], inner, [part.stop]]))
            return TokenDocuments(part.stream, bounds, self.seq_len, self.limit(split), self.vocab_size)
        documents: dict[str, Any] = {} if self.eos_token is None else {"eos_token": self.eos_token, "ends": part.ends}
        return TokenSequences(
            part.stream, part.start, part.stop, self.seq_len, self.vocab_size, self.limit(split), **documents
        )


def _refuse_shared(files: dict[str, list[str]]) -> None:
    first_use: dict[str, str] = {}
    for name, paths in files.items():
        for path in paths:
            other = first_use.setdefault(os.path.realpath(path), name)
            if other != name:
                raise ValueError(
                    f"{path} is in data.{other} and in data.{name}: a file may serve one split only; leave it out of one"
                )
