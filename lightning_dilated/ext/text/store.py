"""Conversations as tokens on disk: encoded once per machine, in a folder named after a digest of their content.

Shape letters: C conversations, T tokens of all conversations.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_dilated.data.packing import IGNORE
from lightning_dilated.data.sampler import MARK
from lightning_dilated.ext.text.block_cache import cache_root, locked, opened, private_folder, read_bytes, within
from lightning_dilated.ext.text.documents import RangedSamples
from lightning_dilated.ext.text.messages import conversation
from lightning_dilated.ext.text.records import Rows
from lightning_dilated.ext.text.template import ChatTokenizer

#: version of the file format
VERSION = 2
_ARRAYS = {"tokens": "uint32", "learn": "uint8", "bounds": "int64", "first": "int64"}


class TokenStore:
    """Tokens of conversations, marks of the tokens to train on, and bounds of conversations.

    It can be pickled; arrays are memory-mapped on first use.

    Attributes:
        bounds: (C + 1,) int64, conversation i has the tokens [bounds[i], bounds[i + 1]).
        first: (C,) int64, index within a conversation of its first token to train on, at least 1.
        learned: number of tokens to train on.
        digest: digest of all tokens and marks.
    """

    bounds: np.ndarray
    first: np.ndarray

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        about = json.loads(read_bytes(folder / "about.json", folder.parent))
        self.digest, self.learned = str(about["digest"]), int(about["learned"])
        for name in ("bounds", "first"):
            with open(opened(folder / f"{name}.npy", folder.parent), "rb") as file:
                setattr(self, name, np.load(file))
        self._maps: dict[str, np.ndarray] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}

    def __len__(self) -> int:
        return len(self.first)

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return entries [start, stop) of the array `name`, which is "tokens" or "learn"."""
        if name not in self._maps:
            with open(opened(self.folder / name, self.folder.parent), "rb") as file:
                self._maps[name] = np.memmap(file, dtype=_ARRAYS[name], mode="r", shape=(int(self.bounds[-1]),))
        return self._maps[name][start:stop]


def encoded(rows: Rows, tokenizer: ChatTokenizer, learn: str, column: str, cache_dir: str | None) -> TokenStore:
    """Return the store of all rows; the first process of this machine encodes the rows, and others reuse the store.

    Args:
        learn: see `ChatTokenizer.tokens`.
        column: see `conversation`.
        cache_dir: folder of the stores; None: `chat` in the package's cache folder.

    Raises: OSError; ValueError for the first row that is not a conversation, or that `ChatTokenizer.tokens` refuses.
    """
    root = cache_root() / "chat" if cache_dir is None else Path(cache_dir).expanduser()
    private_folder(root)
    folder = within(root / _key(rows, tokenizer, learn, column), root)
    with locked(folder.with_suffix(".lock"), root):
        if not _whole(folder):
            shutil.rmtree(folder, ignore_errors=True)
            rank_zero_info(f"data: encoding {len(rows):,} conversations, once on this machine, into {folder}")
            part = Path(tempfile.mkdtemp(prefix="part-", dir=root))
            try:
                _write(part, _samples(rows, tokenizer, learn, column))
                os.replace(part, folder)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    return TokenStore(folder)


def _key(rows: Rows, tokenizer: ChatTokenizer, learn: str, column: str) -> str:
    """Return a digest of everything that determines the tokens, including the content of every row."""
    digest = hashlib.blake2b(f"{VERSION} {learn} {column} {tokenizer.digest()}".encode(), digest_size=16)
    for part in rows.content():
        digest.update(part)
    return digest.hexdigest()


def _whole(folder: Path) -> bool:
    """Return whether a store exists and all its files are complete."""
    try:
        about = json.loads(read_bytes(folder / "about.json", folder.parent))
        return all(within(folder / name, folder.parent).stat().st_size == size for name, size in about["sizes"].items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _samples(rows: Rows, tokenizer: ChatTokenizer, learn: str, column: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for number in range(len(rows)):
        yield tokenizer.tokens(conversation(rows[number], rows.where(number), column), learn)


def _write(folder: Path, samples: Iterator[tuple[np.ndarray, np.ndarray]]) -> None:
    digest, bounds, first, learned = hashlib.blake2b(digest_size=16), [0], [], 0
    with open(folder / "tokens", "wb") as tokens, open(folder / "learn", "wb") as marks:
        for ids, mask in samples:
            for file, values in ((tokens, ids.astype(np.uint32)), (marks, mask.astype(np.uint8))):
                file.write(values.tobytes())
                digest.update(values.tobytes())
            bounds.append(bounds[-1] + len(ids))
            first.append(1 + int(np.argmax(mask[1:])))
            learned += int(mask[1:].sum())
    np.save(folder / "bounds.npy", np.array(bounds, dtype=np.int64))
    np.save(folder / "first.npy", np.array(first, dtype=np.int64))
    digest.update(np.array(bounds).tobytes())
    sizes = {x.name: x.stat().st_size for x in folder.iterdir()}
    (folder / "about.json").write_text(json.dumps({"digest": digest.hexdigest(), "learned": learned, "sizes": sizes}))


class Conversations(RangedSamples):
    """Conversations of a store as samples of unequal length: tokens, and labels as in `next_tokens`.

    Args:
        store: the tokens.
        numbers: (S,) for each sample, the number of its conversation in the store.
        seq_len: maximum number of tokens of a sample; longer conversations are cut.
    """

    what = "conversation"

    def __init__(self, store: TokenStore, numbers: np.ndarray, seq_len: int) -> None:
        self.store, self.numbers, self.seq_len = store, numbers, seq_len
        self.lengths = np.minimum(np.diff(store.bounds)[numbers], seq_len)

    def fingerprint(self) -> str:
        """Return a string that depends on all tokens, and on the numbers and lengths of the samples."""
        places = hashlib.blake2b(self.numbers.tobytes() + self.lengths.tobytes(), digest_size=8).hexdigest()
        return f"{len(self)} conversations {places}{MARK}{self.store.digest}"

    def piece(self, index: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin = int(self.store.bounds[self.numbers[index]])
        span = begin + start, begin + min(stop + 1, self.length_of(index))
        values, learn = (self.store.read(name, *span) for name in ("tokens", "learn"))
        tokens, labels = next_tokens(values.astype(np.int64), learn.astype(bool), stop - start)
        return torch.from_numpy(tokens), torch.from_numpy(labels)


def next_tokens(ids: np.ndarray, learn: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and labels, (count,) each: a label is the next token, or -100 if that is missing or not learned."""
    labels = np.full(count, IGNORE, dtype=np.int64)
    labels[: len(ids) - 1] = np.where(learn[1:], ids[1:], IGNORE)[:count]
    return ids[:count], labels
