"""TextStreamDataModule: a column of texts, encoded during training and packed into rows of equal length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_dilated._validation import integer
from lightning_dilated.ext.text.load_tokenizer import LoadsTokenizer, TextTokenizer, checked_source, load_text_tokenizer
from lightning_dilated.ext.text.packed_stream import Encode, StreamedDataModule, filled


@dataclass
class TextEncoder:
    """Encodes a text and appends the end-of-document token; training uses all tokens."""

    tokenizer: TextTokenizer
    column: str
    end: int

    def __call__(self, row: Any, where: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Return tokens and marks, or None for an empty text. Raises ValueError for a row without a text."""
        text = row.get(self.column) if isinstance(row, Mapping) else None
        if not isinstance(text, str):
            columns = ", ".join(map(repr, row)) if isinstance(row, Mapping) else f"a {type(row).__name__}"
            raise ValueError(
                f"{where} has no text in {self.column!r}, but {columns}: set data.column to the column with the texts"
            )
        ids = self.tokenizer.encode(text)
        tokens = np.array([*ids, self.end], dtype=np.int64)
        return (tokens, np.ones(len(tokens), dtype=bool)) if ids else None


class TextStreamDataModule(LoadsTokenizer[TextTokenizer], StreamedDataModule):
    """Texts from a `datasets` dataset or from JSON Lines, encoded during training, in rows of N tokens.

    Batches are {"tokens": (1, N), "labels": (1, N) the next token, "index": (1,)}, all int64, and "cu_seqlens" (D + 1,)
    int32 on the CPU, the bounds of documents. A document ends after `eos_token`, which has the label -100. A document
    that crosses the end of a row is continued in the next row as a separate document. Rows are the same on any number
    of ranks and loader workers, and a resumed run continues after the rows that were used. The source starts over at
    its end.

    Args:
        paths: files (.jsonl, .json, .parquet), directories or globs, folders that `datasets.save_to_disk` wrote; or the
            arguments of `datasets.load_dataset` as a mapping, {path: owner/name, split: train}, to stream that data
            set. All formats except JSON need the extra `datasets`.
        tokenizer: a folder that transformers saved, or the name of a repository; or a tokenizer.json.
        seq_len: N, number of tokens of a row.
        column: name of the column that holds the text.
        eos_token: the text of the token that ends a document; null is the tokenizer's own end token.
        readers, epoch_rows, val_paths, test_paths, val_limit, num_workers, pin_memory, cache_dir: see
            `StreamedDataModule`.

    Raises: TypeError or ValueError for values outside these ranges. The data on disk is checked later, by `check`.
    """

    pack = staticmethod(filled)

    def __init__(
        self,
        paths: str | list[str] | dict[str, Any],
        tokenizer: str,
        seq_len: int,
        column: str = "text",
        eos_token: str | None = None,
        readers: int = 8,
        epoch_rows: int = 8192,
        val_paths: str | list[str] | dict[str, Any] | None = None,
        test_paths: str | list[str] | dict[str, Any] | None = None,
        val_limit: int = 64,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        cache_dir: str | None = None,
    ) -> None:
        size = integer(seq_len, "data.seq_len", 2)
        super().__init__(
            paths, size, size, readers, epoch_rows, val_paths, test_paths, val_limit, num_workers, pin_memory, cache_dir
        )
        self.tokenizer_source, self.column, self.eos_token = checked_source(tokenizer), column, eos_token

    def _load_tokenizer(self) -> TextTokenizer:
        return load_text_tokenizer(self.tokenizer_source)

    def encoder(self) -> Encode:
        return TextEncoder(self.tokenizer, self.column, self._end())

    def settings(self) -> str:
        return f"texts in {self.column} by {self.tokenizer.digest()}, ends {self._end()}"

    def _end(self) -> int:
        return self.tokenizer.end_token(self.eos_token)
