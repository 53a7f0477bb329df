"""RangedSamples: samples that are read by ranges of positions. Documents: the documents of a stream as samples."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from lightning_dilated.data.sampler import MARK
from lightning_dilated.ext.files.files import ByteStream

if TYPE_CHECKING:
    from lightning_dilated.ext.text.tokens import TokenStream


class RangedSamples(Dataset):
    """A dataset of samples with different lengths, each with n tokens and n labels; a subclass defines `piece`."""

    #: number of tokens of each sample, (samples,) int64
    lengths: np.ndarray
    #: the word that error messages use for a sample
    what: str

    def piece(self, index: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and labels, int64, at positions [start, stop) of a sample; also read the token after them."""
        raise TypeError(f"{type(self).__name__} must define piece(index, start, stop).")

    def __len__(self) -> int:
        return len(self.lengths)

    def length_of(self, index: int) -> int:
        """Return the number of tokens of a sample without reading it. Raises: IndexError if there is no such sample."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.what} {index} was asked for, but there are {len(self)}")
        return int(self.lengths[index])

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return {"tokens": (n,) int64, "labels": (n,) int64 the next token or -100, "index": the sample's number}."""
        return self.read_ranges(index, (range(self.length_of(index)),))

    def read_ranges(self, index: int, ranges: tuple[range, ...]) -> dict[str, Any]:
        """Return the sample at the positions in `ranges`; each range reads one more token for the last label."""
        length = self.length_of(index)
        tokens, labels = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
        for x in filter(None, ranges):
            if not 0 <= x[0] <= x[-1] < length:
                raise IndexError(f"positions {x} were asked for, but {self.what} {index} has 0 to {length - 1}")
            for parts, values in zip((tokens, labels), self.piece(index, x[0], x[-1] + 1), strict=True):
                parts.append(values[:: x.step])
        return {"tokens": torch.cat(tokens), "labels": torch.cat(labels), "index": index}


class Documents(RangedSamples):
    """The documents of a stream as samples; documents of more than `seq_len` tokens are cut into pieces.

    A piece's last label is the next token of its document; a document's last token has the label -100. Documents of one
    token, and last pieces of one token, are left out, because they have no label.

    Args:
        stream: the stream of bytes or tokens.
        bounds: (documents + 1,) bounds of documents in the stream, increasing.
        seq_len: maximum number of tokens of a sample.
        limit: maximum number of samples.
    """

    what = "document"

    def __init__(
        self, stream: ByteStream | TokenStream, bounds: np.ndarray, seq_len: int, limit: int | None = None
    ) -> None:
        self.stream, self.seq_len = stream, seq_len
        starts, ends = bounds[:-1].astype(np.int64), bounds[1:].astype(np.int64)
        pieces = np.maximum(0, -(-(ends - starts - 1) // seq_len))
        number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        self.begins = (np.repeat(starts, pieces) + number * seq_len)[:limit]
        self.ends = np.repeat(ends, pieces)[:limit]  # end of each sample's document
        self.lengths = np.minimum(seq_len, self.ends - self.begins)

    def fingerprint(self) -> str:
        """Return a digest of the bounds of samples, and of the files' names, sizes and some of their blocks."""
        places = hashlib.blake2b(self.begins.tobytes() + self.lengths.tobytes(), digest_size=8).hexdigest()
        return f"{self.stream.fingerprint()}, {len(self)} documents {places}{MARK}{self.stream.content()}"

    def place_of(self, index: int) -> tuple[str, int]:
        """Return the file of a sample's first token, and the token's position in this file."""
        return self.stream.where(int(self.begins[index]))

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Read tokens [start, stop) of the stream, int64."""
        return torch.from_numpy(self.stream.read(start, stop)).long()

    def piece(self, index: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin = int(self.begins[index])
        values = self.read(begin + start, min(begin + stop + 1, int(self.ends[index])))
        labels = torch.full((stop - start,), -100, dtype=torch.int64)
        labels[: len(values) - 1] = values[1:]
        return values[: stop - start], labels
