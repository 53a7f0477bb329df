"""Tokenizers of Hugging Face's `tokenizers` (an optional extra): load them, encode, and decode token by token."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer


#: number of prompt tokens that are decoded as context before new tokens
_CONTEXT = 16
#: replaces bytes that are not (yet) text, and ids that the tokenizer does not have
_BROKEN = "\ufffd"
#: a surrogate: half of a character beyond U+FFFF
_HALF = re.compile("[\ud800-\udfff]")


@contextlib.contextmanager
def panics_named(path: str | Path) -> Iterator[None]:
    """Turn a panic of the library, which is not an Exception, into a ValueError that names the tokenizer."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(
            f"tokenizer {path} does not work ({str(error)[:120]}): it is damaged, or of another version of the library. "
            "Make it again, or install another version of `tokenizers`."
        ) from None


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer.json, with truncation and padding turned off.

    Raises:
        ModuleNotFoundError: without the library.
        FileNotFoundError, ValueError: for a missing file, or a file that holds no tokenizer.
    """
    library = _tokenizer_class(path)
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"tokenizer {path}: no such file. Pass a tokenizer.json, as tokenizers and transformers save it."
        )
    return _checked(lambda: library.from_file(str(path)), path)


def tokenizer_of(text: str, where: str) -> Tokenizer:
    """Load a tokenizer from the text of a tokenizer.json. Raises the errors of `load_tokenizer`; they name `where`."""
    library = _tokenizer_class(where)
    return _checked(lambda: library.from_str(text), where)


def _tokenizer_class(path: str | Path) -> type[Tokenizer]:
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        if error.name != "tokenizers":
            raise
        raise ModuleNotFoundError(
            f"{path} is read with tokenizers: pip install 'lightning-dilated[tokenizers]'.", name="tokenizers"
        ) from None
    return Tokenizer


def _checked(load: Callable[[], Tokenizer], path: str | Path) -> Tokenizer:
    try:
        with panics_named(path):
            tokenizer = load()
            tokenizer.encode("a", add_special_tokens=False)  # test that the tokenizer works
    except Exception as error:
        raise ValueError(
            f"tokenizer {path} cannot be read ({str(error)[:120]}). Pass a tokenizer.json, as tokenizers and transformers "
            "save it; models of sentencepiece and vocabularies alone have to be converted first."
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if not tokenizer.get_vocab_size():
        raise ValueError(f"tokenizer {path} has no tokens: train it before it is saved.")
    return tokenizer


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Return V, the largest token id plus 1; it exceeds the number of tokens if ids have gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the special tokens by their text, such as {"<|endoftext|>": 50256}."""
    return {token.content: id_ for id_, token in sorted(tokenizer.get_added_tokens_decoder().items()) if token.special}


def unknown_token(tokenizer: Tokenizer) -> int | None:
    """Return the token for text that the vocabulary lacks, or None if the tokenizer has no such token."""
    model = json.loads(tokenizer.to_str())["model"]  # the library's class for Unigram does not expose the token
    if model["type"] == "Unigram":
        return model["unk_id"]
    name = model.get("unk_token")
    return None if name is None else tokenizer.token_to_id(name)


def whole_text(text: str) -> str:
    r"""Replace each lone surrogate with U+FFFD, because no tokenizer accepts one.

    JSON contains a lone surrogate, such as "\ud83d", if a program has cut an emoji's escape in two.
    """
    if _HALF.search(text) is None:
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def whole_texts(value: Any) -> Any:
    """Apply `whole_text` to a text, or to all texts in mappings and lists at any depth."""
    if isinstance(value, str):
        return whole_text(value)
    if isinstance(value, dict):
        return {whole_texts(key): whole_texts(x) for key, x in value.items()}
    return [whole_texts(x) for x in value] if isinstance(value, list) else value


def encode(tokenizer: Tokenizer, text: str, path: str | Path = "of the model") -> list[int]:
    """Return the ids of `whole_text(text)`, without added special tokens. `path` names the tokenizer in errors."""
    with panics_named(path):
        return tokenizer.encode(whole_text(text), add_special_tokens=False).ids


def decoded(tokenizer: Tokenizer, prompt: list[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text that each token adds to a prompt; "" while a character is incomplete.

    Special tokens are shown. An id that the tokenizer does not have (models pad their vocabulary) yields one U+FFFD.
    """
    ids, shown = prompt[-_CONTEXT:], len(prompt[-_CONTEXT:])  # ids to decode, and how many of them have been yielded
    for token in tokens:
        if tokenizer.id_to_token(token) is None:
            yield _added(tokenizer, ids, shown) + _BROKEN
            ids, shown = [], 0
            continue
        ids.append(token)
        text = _added(tokenizer, ids, shown)
        if text and not text.endswith(_BROKEN):
            yield text
            ids, shown = ids[shown:], len(ids) - shown
        else:
            yield ""
    yield _added(tokenizer, ids, shown)


def _added(tokenizer: Tokenizer, ids: list[int], shown: int) -> str:
    """Return the text that ids[shown:] add to ids[:shown]; decoded alone, they may lose a leading space."""
    with panics_named("of the model"):
        before = tokenizer.decode(ids[:shown], skip_special_tokens=False)
        return tokenizer.decode(ids, skip_special_tokens=False)[len(before) :]


def end_token(tokenizer: Tokenizer, path: str, name: str | None, how: str) -> int:
    """Return the id of the end-of-document token `name`, or of the only special token if None. Errors end with `how`.

    Raises: ValueError for an unknown name, or for None if the tokenizer does not have exactly one special token.
    """
    special = special_tokens(tokenizer)
    known = f"its special tokens are {', '.join(special)}" if special else "it has no special tokens"
    if name is None:
        if len(special) == 1:
            return next(iter(special.values()))
        raise ValueError(f"which token of {path} ends a document? {how[0].upper()}{how[1:]} ({known}).")
    token = tokenizer.token_to_id(name)
    if token is None:
        raise ValueError(f"tokenizer {path} has no token {name!r} for eos_token; {known}.")
    return token
