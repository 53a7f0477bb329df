"""ChatDataModule: conversations packed into rows, with labels on the assistant's tokens."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from lightning.pytorch.utilities import rank_zero_info

from lightning_dilated._validation import integer, one_of
from lightning_dilated.data.module import SPLITS, SplitDataModule, split_bounds, split_fractions
from lightning_dilated.ext.text.load_tokenizer import LoadsTokenizer, checked_source
from lightning_dilated.ext.text.records import checked_sources, open_rows
from lightning_dilated.ext.text.store import Conversations, TokenStore, encoded
from lightning_dilated.ext.text.template import ChatTokenizer, load_chat_tokenizer


class ReadsConversations(LoadsTokenizer[ChatTokenizer]):
    """Options of a DataModule that control how conversations become tokens."""

    def _take_conversations(
        self, tokenizer: str, template: str | None, train_on: str, too_long: str, column: str
    ) -> None:
        self.tokenizer_source, self.template, self.column = checked_source(tokenizer), template, column
        self.train_on = one_of(train_on, "data.train_on", ("assistant", "all"))
        self.too_long = one_of(too_long, "data.too_long", ("error", "skip", "cut"))

    def _load_tokenizer(self) -> ChatTokenizer:
        return load_chat_tokenizer(self.tokenizer_source, self.template)


class ChatDataModule(ReadsConversations, SplitDataModule):
    """Conversations packed into rows: batches of {"tokens", "labels", "index", "cu_seqlens"} for causal models.

    tokens and labels are (1, N). Labels are the next token if the assistant writes it, and -100 elsewhere. cu_seqlens
    (D + 1,) int32 on the CPU holds the bounds of the D conversations of the row, and index (D,) holds their numbers.
    Packing does not change losses or gradients. Each machine encodes the data once, into the package's cache folder;
    each rank then reads only its part of a row.

    Args:
        paths: files (.jsonl, .json, .parquet), directories or globs, folders that `datasets.save_to_disk` wrote; or the
            arguments of `datasets.load_dataset` as a mapping: {path: owner/name, split: train}. All formats except JSON
            need the extra `datasets`. A row has `messages`, a list of {"role", "content"}, or `prompt` + `completion`.
        tokenizer: a folder that transformers saved, or a repository's name, with a chat template; or a tokenizer.json.
        seq_len: maximum number of tokens of a conversation.
        template: a Jinja chat template, or a file that holds one, in place of the tokenizer's own.
        train_on: "assistant" trains on tokens that the assistant writes, "all" on every token.
        too_long: action for conversations of more than `seq_len` tokens: "error" raises, "skip" omits, "cut" cuts them.
        pack_tokens: maximum number of tokens of a row, see `SplitDataModule`; null is `seq_len`. 1 puts each
            conversation into its own row.
        val_paths, test_paths: conversations for validation and for test, instead of a share of `paths`.
        val_fraction, test_fraction: shares of the conversations of `paths`, taken from the end; null is 0.05, or 0 if
            `val_paths` or `test_paths` is set.
        val_limit: maximum number of conversations of the validation split; null for all.
        column: name of the column that holds the messages.
        seed, num_workers, pin_memory: see `SplitDataModule`.
        cache_dir: folder of the encoded conversations; null is `chat` in the package's cache folder.

    Raises: TypeError or ValueError for values outside these ranges. The data on disk is checked later, by `check`.
    """

    def __init__(
        self,
        paths: str | list[str] | dict[str, Any],
        tokenizer: str,
        seq_len: int,
        template: str | None = None,
        train_on: Literal["assistant", "all"] = "assistant",
        too_long: Literal["error", "skip", "cut"] = "error",
        pack_tokens: int | None = None,
        val_paths: str | list[str] | dict[str, Any] | None = None,
        test_paths: str | list[str] | dict[str, Any] | None = None,
        val_fraction: float | None = None,
        test_fraction: float | None = None,
        val_limit: int | None = None,
        column: str = "messages",
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        cache_dir: str | None = None,
    ) -> None:
        self.seq_len = integer(seq_len, "data.seq_len", 2)
        super().__init__(1, seed, num_workers, pin_memory, self.seq_len if pack_tokens is None else pack_tokens)
        options = {"paths": paths, "val_paths": val_paths, "test_paths": test_paths}
        self.paths = {x: checked_sources(p, x) for x, p in options.items() if x == "paths" or p is not None}
        self._take_conversations(tokenizer, template, train_on, too_long, column)
        separate = {split: f"{split}_paths" in self.paths for split in ("val", "test")}
        self.fractions = split_fractions({"val": val_fraction, "test": test_fraction}, separate, "paths")
        self.val_limit = None if val_limit is None else integer(val_limit, "data.val_limit", 1)
        self.cache_dir = cache_dir
        self._samples: dict[str, Conversations] | None = None
        self._about = ""

    def check(self) -> None:
        """Encode conversations that this machine has not encoded yet; check that each requested split has at least one.

        Raises: OSError, ValueError or ModuleNotFoundError with the row, the problem and the remedy.
        """
        if self._samples is not None:
            return
        stores = {name: self._store(name) for name in self.paths}
        parts = {}
        for split, (start, stop) in split_bounds(len(stores["paths"]), self.fractions).items():
            name = f"{split}_paths" if f"{split}_paths" in stores else "paths"
            numbers = np.arange(len(stores[name])) if name != "paths" else np.arange(start, stop)
            parts[split] = self._fitting(stores[name], numbers, split)
            if self.wanted(split) is None and not len(parts[split]):
                change = f"raise data.{split}_fraction, or set it to 0 to do without"
                if name != "paths" or split == "train":
                    change = "pass more data, or raise data.seq_len"
                raise ValueError(
                    f"the {split} split has no conversation of the {len(stores[name]):,} in data.{name}: {change}"
                )
        learned, total = sum(x.learned for x in stores.values()), sum(int(x.bounds[-1]) for x in stores.values())
        self._about = f"{total:,} tokens, {learned / total:.0%} of them to learn"
        self._samples = parts

    def dataset(self, split: str) -> Conversations:
        one_of(split, "split", SPLITS)
        self.check()
        assert self._samples is not None
        return self._samples[split]

    def describe(self) -> str:
        """Return one line with the number of conversations of each split and the number of tokens."""
        counts = ", ".join(f"{len(self.dataset(split)):,} {split}" for split in SPLITS)
        return f"conversations of up to {self.seq_len:,} tokens: {counts}; {self._about}"

    def wanted(self, split: str) -> str | None:
        present = split == "train" or f"{split}_paths" in self.paths or self.fractions[split] > 0
        return None if present else f"data.{split}_fraction is 0; set it above 0, or set data.{split}_paths"

    def too_few(self, count: int, needed: int, replicas: int) -> str:
        return (
            f"the train split has {count} conversations, but {replicas} data-parallel ranks take one each: use fewer ranks, "
            "or pass more data in data.paths"
        )

    def _store(self, name: str) -> TokenStore:
        rows = open_rows(self.paths[name], name)
        return encoded(rows, self.tokenizer, self.train_on, self.column, self.cache_dir)

    def _fitting(self, store: TokenStore, numbers: np.ndarray, split: str) -> Conversations:
        """Return the split's conversations. If one is longer than `seq_len`, `too_long` skips it, cuts it or raises."""
        lengths = np.diff(store.bounds)[numbers]
        longer = lengths > self.seq_len
        if not longer.any():
            return Conversations(store, self._limited(numbers, split), self.seq_len)
        longest = int(lengths.max())
        about = f"{int(longer.sum()):,} of the {len(numbers):,} conversations of the {split} split have more than "
        about += f"data.seq_len = {self.seq_len:,} tokens, up to {longest:,}"
        if self.too_long == "error":
            first = int(numbers[int(np.argmax(longer))])
            raise ValueError(
                f"{about} (the first is row {first:,}, counted from 0): raise data.seq_len, or set data.too_long to skip, "
                "which leaves them out, or to cut, which cuts them at that length"
            )
        unlearned = longer & (store.first[numbers] >= self.seq_len)
        dropped = longer if self.too_long == "skip" else unlearned
        cut = int(longer.sum() - dropped.sum())
        rank_zero_info(
            f"data: {about}: {int(dropped.sum()):,} are left out"
            + (f" (nothing to learn is left before the cut), {cut:,} end there" if self.too_long == "cut" else "")
        )
        return Conversations(store, self._limited(numbers[~dropped], split), self.seq_len)

    def _limited(self, numbers: np.ndarray, split: str) -> np.ndarray:
        return numbers[: self.val_limit] if split == "val" else numbers
