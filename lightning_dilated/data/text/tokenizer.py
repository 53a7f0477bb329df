"""Tokenizers of Hugging Face's `tokenizers` (an optional extra): text to token ids, and ids to text as they come."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: tokens of a prompt that the text after it is decoded with
_CONTEXT = 16
#: what stands for bytes that are no text (yet), and for tokens that a tokenizer does not have
_BROKEN = "\ufffd"


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json, without the truncation and padding that the file may ask for.

    Raises:
        ModuleNotFoundError: without the library.
        FileNotFoundError, ValueError: for a file that is not there, or none of a tokenizer.
    """
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        if error.name != "tokenizers":
            raise
        raise ModuleNotFoundError(
            f"{path} is read with tokenizers: pip install 'lightning-dilated[tokenizers]'.", name="tokenizers"
        ) from None
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"tokenizer {path}: no such file. Pass a tokenizer.json, as tokenizers and transformers save it."
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no other kind
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
    """V such that every token lies in 0 to V - 1; more than there are tokens, where ids have gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """The special tokens by their text, such as {"<|endoftext|>": 50256}."""
    return {token.content: at for at, token in sorted(tokenizer.get_added_tokens_decoder().items()) if token.special}


def unknown_token(tokenizer: Tokenizer) -> int | None:
    """The token that stands for what the vocabulary does not have; None for a tokenizer without."""
    model = json.loads(tokenizer.to_str())["model"]  # the library's classes do not tell it of Unigram
    if model["type"] == "Unigram":
        return model["unk_id"]
    name = model.get("unk_token")
    return None if name is None else tokenizer.token_to_id(name)


def marking_dropped(tokenizer: Tokenizer) -> tuple[Tokenizer, int] | None:
    """A tokenizer that puts the token M where `tokenizer` leaves out a character or a part of it, and M.

    BPE without unknown token leaves out, in silence, what its vocabulary does not have. What that is depends on the word
    (a suffix at its end, a prefix inside) and on the normaliser, so it is not told of characters alone. The other tokens
    are not those of `tokenizer`. None where nothing can be left out.
    """
    state = json.loads(tokenizer.to_str())
    model = state["model"]
    if model["type"] != "BPE" or model["unk_token"] is not None or _has_all_bytes(state):
        return None
    name = max(model["vocab"], key=len) + "\0"  # longer than any token, so it is none
    # loading counts the added tokens on from the size of the vocabulary: above all of them
    mark = vocabulary_size(tokenizer) + len(state["added_tokens"]) + 1
    model["vocab"][name], model["unk_token"], state["post_processor"] = mark, name, None
    return type(tokenizer).from_str(json.dumps(state)), mark


def _has_all_bytes(state: dict[str, Any]) -> bool:
    """Whether a BPE has a token for each of the 256 bytes, and its words are made of bytes or fall back to them."""
    from tokenizers.pre_tokenizers import ByteLevel

    model, last = state["model"], state["pre_tokenizer"] or {"type": None}
    if model["byte_fallback"] and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256)):
        return True
    if last["type"] == "Sequence":
        last = (last["pretokenizers"] or [{"type": None}])[-1]
    if last["type"] != "ByteLevel" or model["end_of_word_suffix"] or model["continuing_subword_prefix"]:
        return False
    return all(letter in model["vocab"] for letter in ByteLevel.alphabet())


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text, without tokens that a template would put around it."""
    return tokenizer.encode(text, add_special_tokens=False).ids


def decoded(tokenizer: Tokenizer, prompt: list[int], tokens: Iterable[int]) -> Iterator[str]:
    """The text that `tokens` add to a prompt, as they come: "" where a character waits for its other bytes.

    Special tokens are shown; a token that the tokenizer does not have (models pad their vocabulary) is one U+FFFD.
    """
    ids, shown = prompt[-_CONTEXT:], len(prompt[-_CONTEXT:])  # all ids of the window, and those whose text is out
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
    """What ids[shown:] add to the text of those before: a token may read otherwise alone (a leading space)."""
    before = tokenizer.decode(ids[:shown], skip_special_tokens=False)
    return tokenizer.decode(ids, skip_special_tokens=False)[len(before) :]
