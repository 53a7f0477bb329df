"""Files of token ids, .npy or raw, as one read-only stream that is read by range."""

from __future__ import annotations

import struct
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from lightning_dilated.data.stream import ByteStream

#: what tokens may be stored as
DTYPES = ("uint16", "uint32", "int32", "int64")
#: and raw files also as bytes
RAW_DTYPES = ("uint8", *DTYPES)
SUFFIXES = [".npy", ".bin"]
#: first bytes of files that are no raw tokens, with what to do about them
_FOREIGN = {
    b"\x93NUMPY": "is a .npy file by its content: rename it to end in .npy",
    b"PK\x03\x04": "is a zip archive by its content (torch.save and .npz make such files): save the tokens by numpy.save",
    b"\x1f\x8b\x08\x00": "is compressed by gzip: decompress it first",
    b"\x1f\x8b\x08\x08": "is compressed by gzip: decompress it first",
    b"LITPKDS": "begins with the 24-byte header of lit-gpt's packed data: set data.header to 24 and data.dtype to its dtype",
}
#: int32 magic, version and token count, then zeros up to byte 1024 (token width by magic)
_LLMC = {20240520: ("uint16", 2), 20240801: ("uint32", 4)}


@dataclass(frozen=True)
class TokenFile:
    """Where the tokens of a file lie: `count` of `dtype` from byte `offset` on."""

    path: str
    dtype: str
    offset: int
    count: int


def token_file(path: str, size: int, dtype: str | None, header: int) -> TokenFile:
    """Look at the beginning of a file of `size` bytes.

    Args:
        dtype, header: of raw (.bin) files: the type, uint16 where None, and bytes before the first token.

    Raises: ValueError naming the file and what to change.
    """
    if size == 0:
        raise ValueError(f"{path} is empty: write it again or leave it out of the paths")
    if path.endswith(".npy"):
        return _npy_file(path, size)
    if not path.endswith(".bin"):
        raise ValueError(
            f"{path} ends neither in .npy nor in .bin: tokens are read from numpy arrays (.npy) or raw numbers (.bin); "
            "text and other files are served byte by byte by lightning_dilated.data.ByteDataModule"
        )
    return _raw_file(path, size, dtype, header)


def _npy_file(path: str, size: int) -> TokenFile:
    with open(path, "rb") as file:
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
    here = (size - offset) // dtype.itemsize
    if size - offset != shape[0] * dtype.itemsize:
        what = "was cut off" if here < shape[0] else "goes on after its array"
        raise ValueError(
            f"{path} {what}: its header says {shape[0]:,} tokens, but {here:,} are there (and "
            f"{(size - offset) % dtype.itemsize} bytes): copy or write it again"
        )
    if shape[0] == 0:
        raise ValueError(f"{path} is empty (an array of 0 tokens): write it again or leave it out of the paths")
    return TokenFile(path, dtype.str, offset, shape[0])


def _check_header_length(file: BinaryIO, version: tuple[int, int], size: int) -> None:
    """Raise ValueError for a header that would be longer than its file: numpy asks for that much memory first."""
    begin = file.tell()
    length = int.from_bytes(file.read(2 if version == (1, 0) else 4), "little")
    if begin + length > size:
        raise ValueError(f"{length:,} bytes of header in a file of {size:,}")
    file.seek(begin)


def _raw_file(path: str, size: int, dtype: str | None, header: int) -> TokenFile:
    kind = np.dtype(dtype or "uint16")
    with open(path, "rb") as file:
        first = file.read(4096)
    if header == 0:
        _refuse_foreign(path, size, first)
    whole, rest = divmod(size - header, kind.itemsize)
    if rest or whole < 1:
        raise ValueError(
            f"{path} has {size:,} bytes, which is not a whole number (at least one) of {kind} tokens of {kind.itemsize} "
            f"bytes after a header of {header}: it was cut off, or data.dtype or data.header is wrong"
        )
    if dtype is None and header == 0:
        _refuse_wider(path, np.frombuffer(first[: len(first) // 4 * 4], np.uint16))
    return TokenFile(path, kind.str, header, whole)


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
    """Where nobody said uint16: halves of uint32 tokens show as small numbers in every second place."""
    even, odd = tokens[0::2], tokens[1::2]
    if len(odd) >= 64 and int(odd.max()) * 64 < int(even.max()):
        raise ValueError(
            f"{path} reads as uint16 with tokens of at most {odd.max()} in every second place, as a file of uint32 would: "
            "set data.dtype to uint32 (or to uint16, if that is what it is)"
        )


class TokenStream:
    """Tokens of many files in the given order with nothing between them; only what a range touches is read.

    Can be pickled, as `ByteStream`, through which it reads.
    """

    def __init__(self, files: Sequence[TokenFile]) -> None:
        self.files = list(files)
        self._bytes = ByteStream([file.path for file in self.files])
        sizes = np.array(self._bytes.sizes, dtype=np.int64)
        self._begins = np.cumsum(sizes) - sizes
        self._ends = np.cumsum([file.count for file in self.files], dtype=np.int64)

    def __len__(self) -> int:
        """Total number of tokens."""
        return int(self._ends[-1])

    @property
    def bytes_read(self) -> int:
        """Bytes of files that this copy of the object has read for tokens."""
        return self._bytes.bytes_read

    def fingerprint(self) -> str:
        """Differs where the tokens do, as far as names, sizes and types of files tell."""
        kinds = sorted({f"{file.dtype} from byte {file.offset}" for file in self.files})
        return f"{self._bytes.fingerprint()} of {', '.join(kinds)}"

    def content(self) -> str:
        """As that of `ByteStream`."""
        return self._bytes.content()

    def where(self, position: int) -> tuple[str, int]:
        """(file, position in the file) of a token of the stream."""
        index = int(np.searchsorted(self._ends, position, side="right"))
        return self.files[index].path, position - int(self._ends[index]) + self.files[index].count

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop): a new int64 array (stop - start,). Raises: IndexError outside the stream."""
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
        """(first position, tokens) of pieces of at most `size` tokens, end to end."""
        for begin in range(0, len(self), size):
            yield begin, self.read(begin, min(begin + size, len(self)))


def scan(stream: TokenStream, vocab_size: int, eos_token: int | None) -> np.ndarray:
    """Look at every token once: the positions of `eos_token`, sorted int64 (empty for None).

    Raises: ValueError naming file and position of the first token outside [0, vocab_size), and the largest of all.
    """
    ends, wrong, largest = [np.empty(0, dtype=np.int64)], None, 0
    for begin, tokens in stream.chunks():
        largest = max(largest, int(tokens.max()))
        if wrong is None and (int(tokens.max()) >= vocab_size or int(tokens.min()) < 0):
            at = int(np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0])
            wrong = int(tokens[at]), *stream.where(begin + at)
        if eos_token is not None:
            ends.append(np.flatnonzero(tokens == eos_token) + begin)
    if wrong is not None:
        raise ValueError(out_of_range(*wrong, vocab_size, f"; the largest token of all is {largest}"))
    return np.concatenate(ends)


def out_of_range(token: int, path: str, position: int, vocab_size: int, more: str = "") -> str:
    """The message about a token that the vocabulary does not have."""
    return (
        f"{path} holds token {token} at position {position:,} (counted from 0), but data.vocab_size = {vocab_size} allows 0 "
        f"to {vocab_size - 1}{more}: set data.vocab_size to that of the tokenizer, or data.dtype to that of the file"
    )
