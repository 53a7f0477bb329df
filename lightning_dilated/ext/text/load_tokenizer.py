"""TextTokenizer: one interface to a tokenizer.json and to tokenizers of transformers (an optional extra)."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Generic, TypeVar

from lightning_dilated.data.opener import refuse_url
from lightning_dilated.data.tokenizer_files import MAIN, is_known
from lightning_dilated.ext.text.tokenizer import (
    encode,
    end_token,
    load_tokenizer,
    panics_named,
    special_tokens,
    vocabulary_size,
    whole_text,
)

Loaded = TypeVar("Loaded", bound="TextTokenizer")


class LoadsTokenizer(ABC, Generic[Loaded]):
    """A DataModule's tokenizer, loaded on first use."""

    tokenizer_source: str

    @abstractmethod
    def _load_tokenizer(self) -> Loaded: ...

    @functools.cached_property
    def tokenizer(self) -> Loaded:
        """The tokenizer, loaded on first use."""
        return self._load_tokenizer()

    @property
    def vocab_size(self) -> int:
        """V, the tokenizer's vocabulary size; models compare it with their own."""
        return self.tokenizer.vocab_size

    def tokenizer_files(self) -> dict[str, str]:
        """Return {file name: text} of the tokenizer's files, for checkpoints."""
        return self.tokenizer.files()


class TextTokenizer(ABC):
    """Converts texts to tokens."""

    source: str
    #: V: tokens are 0 to V - 1
    vocab_size: int
    #: special tokens; the tokenizer first splits a text at them
    special: frozenset[int]

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without tokens that the tokenizer would add around it."""

    @abstractmethod
    def decode(self, ids: list[int]) -> str:
        """Decode tokens to a text, which includes special tokens."""

    @abstractmethod
    def end_token(self, name: str | None = None) -> int:
        """Return the id of the end token `name`, or of the default if None. Raises ValueError if it is missing."""

    @abstractmethod
    def files(self) -> dict[str, str]:
        """Return {file name: text} of files from which the tokenizer can be loaded."""

    def digest(self) -> str:
        """Return a digest of the tokenizer's files, which determine the tokens."""
        return hashlib.blake2b(json.dumps(sorted(self.files().items())).encode(), digest_size=16).hexdigest()


class JsonText(TextTokenizer):
    """A tokenizer.json, without transformers."""

    def __init__(self, path: str) -> None:
        self.source, self.tokenizer = path, load_tokenizer(path)
        self.vocab_size = vocabulary_size(self.tokenizer)
        self.special = frozenset(special_tokens(self.tokenizer).values())

    def encode(self, text: str) -> list[int]:
        return encode(self.tokenizer, text, self.source)

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def end_token(self, name: str | None = None) -> int:
        return end_token(self.tokenizer, self.source, name, "set data.eos_token")

    def files(self) -> dict[str, str]:
        return {MAIN: self.tokenizer.to_str()}


class TransformersText(TextTokenizer):
    """A tokenizer of transformers."""

    def __init__(self, source: str) -> None:
        self.source, self.tokenizer = source, load_transformers(source)
        self.vocab_size = max(self.tokenizer.get_vocab().values()) + 1
        added = {i for i, x in self.tokenizer.added_tokens_decoder.items() if x.special}
        self.special = frozenset(self.tokenizer.all_special_ids) | added

    def encode(self, text: str) -> list[int]:
        with panics_named(self.source):
            return self.tokenizer(whole_text(text), add_special_tokens=False, verbose=False)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def end_token(self, name: str | None = None) -> int:
        token = self.tokenizer.eos_token_id if name is None else self.tokenizer.get_vocab().get(name)
        if token is None:
            missing = "no eos_token" if name is None else f"no token {name!r}"
            raise ValueError(
                f"data.tokenizer {self.source} has {missing}: set data.eos_token to one of its tokens, such as "
                f"{', '.join(self.tokenizer.all_special_tokens) or 'a special one'}"
            )
        return int(token)

    def files(self) -> dict[str, str]:
        return transformers_files(self.tokenizer)


def load_text_tokenizer(source: str) -> TextTokenizer:
    """Load a tokenizer.json file, or a tokenizer that transformers loads from a folder or a hub repository.

    Raises: ModuleNotFoundError without the library; OSError or ValueError with the remedy.
    """
    return JsonText(source) if is_json(source) else TransformersText(source)


def is_json(source: str) -> bool:
    """Return whether `source` names a tokenizer.json file and not a folder or a repository."""
    return Path(source).suffix == ".json" or Path(source).is_file()


def checked_source(source: object) -> str:
    """Return `data.tokenizer` after a check. Raises TypeError if it is not a non-empty string, ValueError for a URL."""
    if not isinstance(source, str) or not source:
        raise TypeError(
            "data.tokenizer must be a folder of transformers, the name of a repository, or a tokenizer.json; got "
            f"{source!r}"
        )
    refuse_url(source, "data.tokenizer")
    return source


def load_transformers(source: str) -> Any:
    """Load a tokenizer from a folder or a hub repository.

    Raises: ModuleNotFoundError without transformers; FileNotFoundError if there is no such folder or repository;
        ValueError for a folder without a tokenizer.
    """
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ModuleNotFoundError(
            f"data.tokenizer {source} is read with transformers: pip install 'lightning-dilated[transformers]', or pass a "
            "tokenizer.json.",
            name="transformers",
        ) from None
    is_folder = Path(source).is_dir()
    if not is_folder and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source):
        raise FileNotFoundError(
            f"data.tokenizer {source}: no such folder or file, and not the name of a repository (owner/name)"
        )
    try:
        with panics_named(source):
            return AutoTokenizer.from_pretrained(source)
    except Exception as error:  # transformers and the hub raise several kinds of errors
        lines = str(error).strip().splitlines() or [type(error).__name__]
        where = (
            "has no tokenizer that transformers can read" if is_folder else "is no folder here, and cannot be fetched"
        )
        kind = ValueError if is_folder else FileNotFoundError
        raise kind(f"data.tokenizer {source} {where} ({lines[0][:160]})") from error


def transformers_files(tokenizer: Any) -> dict[str, str]:
    """Return {name: text} of the text files that the tokenizer's `save_pretrained` writes.

    Raises: ValueError for a tokenizer without tokenizer.json.
    """
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        paths = sorted(x for x in Path(folder).rglob("*") if x.is_file())
        names = [x.relative_to(folder).as_posix() for x in paths]
        if MAIN not in names:
            raise ValueError(f"the tokenizer's files are {', '.join(names)}, without {MAIN}: convert it first")
        return {name: x.read_text() for name, x in zip(names, paths, strict=True) if is_known(name)}
