"""ChatStreamDataModule: conversations that are encoded during training, for data too large to encode in advance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from lightning.pytorch.utilities import rank_zero_info

from lightning_dilated._validation import integer
from lightning_dilated.ext.text.chat import ReadsConversations
from lightning_dilated.ext.text.messages import conversation
from lightning_dilated.ext.text.packed_stream import Encode, StreamedDataModule, packed
from lightning_dilated.ext.text.store import VERSION
from lightning_dilated.ext.text.template import ChatTokenizer


@dataclass
class ChatEncoder:
    """Encodes a conversation and marks the tokens to train on; counts conversations that are too long."""

    tokenizer: ChatTokenizer
    column: str
    train_on: str
    seq_len: int
    too_long: str
    longer: int = 0

    def __call__(self, row: Any, where: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Return tokens and marks, or None to skip the row. Raises ValueError if the row is too long to be used."""
        ids, learn = self.tokenizer.tokens(conversation(row, where, self.column), self.train_on)
        if len(ids) <= self.seq_len:
            return ids, learn
        if self.too_long == "error":
            raise ValueError(
                f"{where} has {len(ids):,} tokens, more than data.seq_len = {self.seq_len:,}: raise data.seq_len, or "
                "set data.too_long to skip (leave such conversations out) or to cut (cut them at that length)"
            )
        self.longer += 1
        if self.longer & (self.longer - 1) == 0:  # log at 1, 2, 4, 8, ... such conversations
            rank_zero_info(
                f"data: {self.longer:,} conversations of more than data.seq_len = {self.seq_len:,} tokens so far "
                f"(data.too_long: {self.too_long})"
            )
        ids, learn = ids[: self.seq_len], learn[: self.seq_len]
        return (ids, learn) if self.too_long == "cut" and learn[1:].any() else None


class ChatStreamDataModule(ReadsConversations, StreamedDataModule):
    """Conversations as in `ChatDataModule`, but encoded during training: no cache is written, and lengths are unknown.

    Each reader packs its own conversations into rows, in order. Rows are the same on any number of ranks and loader
    workers, and a resumed run continues after the rows that were used. The source starts over at its end.

    Args:
        paths, tokenizer, seq_len, template, train_on, too_long, column: see `ChatDataModule`. A repository is streamed.
        pack_tokens: maximum number of tokens of a row; null is `seq_len`.
        readers, epoch_rows, val_paths, test_paths, val_limit, num_workers, pin_memory, cache_dir: see
            `StreamedDataModule`.

    Raises: TypeError or ValueError for values outside these ranges. The data on disk is checked later, by `check`.
    """

    pack = staticmethod(packed)

    def __init__(
        self,
        paths: str | list[str] | dict[str, Any],
        tokenizer: str,
        seq_len: int,
        template: str | None = None,
        train_on: Literal["assistant", "all"] = "assistant",
        too_long: Literal["error", "skip", "cut"] = "error",
        pack_tokens: int | None = None,
        column: str = "messages",
        readers: int = 8,
        epoch_rows: int = 8192,
        val_paths: str | list[str] | dict[str, Any] | None = None,
        test_paths: str | list[str] | dict[str, Any] | None = None,
        val_limit: int = 64,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        cache_dir: str | None = None,
    ) -> None:
        row = integer(seq_len if pack_tokens is None else pack_tokens, "data.pack_tokens", 1)
        super().__init__(
            paths,
            seq_len,
            row,
            readers,
            epoch_rows,
            val_paths,
            test_paths,
            val_limit,
            num_workers,
            pin_memory,
            cache_dir,
        )
        self._take_conversations(tokenizer, template, train_on, too_long, column)

    def encoder(self) -> Encode:
        return ChatEncoder(self.tokenizer, self.column, self.train_on, self.seq_len, self.too_long)

    def settings(self) -> str:
        limits = f"up to {self.seq_len}, longer {self.too_long}"
        return f"conversations ({VERSION}) in {self.column} by {self.tokenizer.digest()}, {self.train_on}, {limits}"
