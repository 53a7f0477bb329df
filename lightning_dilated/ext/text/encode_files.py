"""encode_files: text files to a file of tokens, in bounded memory.

A long text is encoded in pieces that overlap, which are joined at a run of tokens on which both agree, far from the ends of
either. The result is that of the whole text for every tokenizer whose tokens depend on at most OVERLAP // 2 = 2,048
characters before and after their beginning, as those that cut at words do, unless a word is longer.
Pieces that disagree are encoded together, or refused. A dependence on text farther away is NOT detected while the pieces
agree, such as of a pre-tokenizer that pairs quotes ('"[^"]*"') thousands of characters apart.
"""

from __future__ import annotations

import codecs
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_dilated.data.files import collect_files, path_list
from lightning_dilated.ext.text.tokenizer import (
    end_token,
    load_tokenizer,
    panics_named,
    unknown_token,
    vocabulary_size,
)

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

#: characters of a piece, and of what it shares with the next one
PIECE, OVERLAP = 1 << 17, 1 << 12
#: pieces that are encoded at once, on as many cores
_AT_ONCE = 8
#: a piece that cannot be joined to its next one is encoded together with it, up to so many characters
LONGEST = 1 << 23
#: two pieces agree if they do so on this many tokens at least
_AGREE = 4
#: (file, begin, text, whether it is the last one) of a piece
_Text = tuple[str, int, str, bool]


@dataclass(frozen=True)
class EncodedFiles:
    """What `encode_files` wrote, and the settings of TokenDataModule and of the model that fit it.

    Attributes:
        path: of the file of tokens.
        files: texts that were read.
        documents: ends of documents, also those that a text spells out.
        tokens: in the file.
        text_bytes: of the texts.
        unknown: tokens that stand for what the vocabulary does not have.
        dtype: "uint16" or "uint32".
        vocab_size: of the tokenizer.
        eos_token: the number of the token that ends documents; None where no document ends.
    """

    path: str
    files: int
    documents: int
    tokens: int
    text_bytes: int
    unknown: int
    dtype: str
    vocab_size: int
    eos_token: int | None

    @property
    def bytes_per_token(self) -> float:
        """Mean bytes of text a token, ends of documents counted as tokens: `bytes_per_token` of a LongNetLM."""
        return self.text_bytes / self.tokens


def encode_files(
    tokenizer: str | Path,
    inputs: str | Path | Sequence[str | Path],
    out: str | Path,
    eos_token: str | None = None,
    documents: bool = True,
) -> EncodedFiles:
    """Encode UTF-8 text files, each one document, into a .bin of uint16 (a vocabulary of up to 65,536) or uint32.

    The tokens are those of each whole text if the tokenizer looks at most 2,048 characters around (see above); one that
    looks farther, as for pairs of quotes, may cut a text of more than 131,072 characters otherwise, without an error.
    Special tokens that a text spells out become those tokens, as in the library. No tokens of a template are added. `out`
    appears only once all is written.

    Args:
        tokenizer: a tokenizer.json of Hugging Face's `tokenizers` (extra `tokenizers`).
        inputs: files, directories (read recursively, all files) or globs; within a directory they are sorted.
        out: the file to write, in .bin.
        eos_token: the text of the token after each document; None takes the tokenizer's special token if it has one only.
        documents: False writes no ends: one text after another.

    Raises:
        ModuleNotFoundError: without `tokenizers`.
        OSError, ValueError: before anything is written: for files that are missing, empty or not UTF-8 (with the offset of
            the byte), an `out` that is there already or not in .bin, a tokenizer that cannot be read, has no such token, or
            would silently drop characters.
    """
    loaded = load_tokenizer(tokenizer)
    how = "name it by eos_token, or write no ends by documents=False (--no_documents)"
    end = end_token(loaded, str(tokenizer), eos_token, how) if documents else None
    if not documents and eos_token is not None:
        raise ValueError(f"eos_token is {eos_token!r}, but documents are off: leave one of them out.")
    target = _checked_target(Path(out))
    files = _text_files(inputs)
    sizes = [check_text(file) for file in files]
    _refuse_dropped(loaded, files)
    size, unknown = vocabulary_size(loaded), unknown_token(loaded)
    kind = np.dtype("uint16" if size <= 1 << 16 else "uint32")
    part, counts = target.with_name(target.name + ".part"), np.zeros(3, dtype=np.int64)
    try:
        with open(part, "wb") as file:
            for ids in _documents(loaded, files, end):
                ids.astype(kind).tofile(file)
                counts += len(ids), np.count_nonzero(ids == end), np.count_nonzero(ids == unknown)
        if counts[0] == 0:
            raise ValueError(f"tokenizer {tokenizer} makes no token of these texts: is it the right one?")
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    tokens, ends, strange = map(int, counts)
    return EncodedFiles(str(out), len(files), ends, tokens, sum(sizes), strange, kind.name, size, end)


def check_text(path: str) -> int:
    """Bytes of a file of UTF-8 text. Raises: ValueError for an empty one, or naming the first byte that is not UTF-8."""
    size = os.path.getsize(path)
    if size == 0:
        raise ValueError(f"{path} is empty: an empty document has nothing to learn from; leave it out.")
    for _ in _decoded(path):
        pass
    return size


def _refuse_dropped(tokenizer: Tokenizer, files: list[str]) -> None:
    """Raise if the tokenizer would silently leave out anything but white space; encodes all texts to see it."""
    if (marking := marking_dropped(tokenizer)) is None:
        return
    marker, mark = marking
    half = OVERLAP // 2  # nearer to a cut a word may be cut, too; the neighbour has it whole
    for (file, begin, text, last), encoding in _encodings(marker, itertools.chain.from_iterable(map(_pieces, files))):
        if mark not in encoding.ids:
            continue
        start, stop = half if begin else 0, len(text) if last else len(text) - half
        places = [x for x, token in zip(encoding.offsets, encoding.ids, strict=True) if token == mark]
        dropped = sorted({text[a:b] for a, b in places if start <= a < stop and not text[a:b].isspace()})
        if dropped:
            shown = ", ".join(f"{x!r} ({' '.join(f'U+{ord(y):04X}' for y in x)})" for x in dropped[:5])
            raise ValueError(
                f"{file} holds {shown}{' and others' if len(dropped) > 5 else ''}, for which, normalised and where they are "
                "in a word, the tokenizer has neither a token nor an unknown token, so they would be silently left out: "
                "change the text (such as to upper case), give the tokenizer an unk_token, or take one of bytes."
            )


def _checked_target(path: Path) -> Path:
    if path.suffix != ".bin":
        raise ValueError(f"out is {path}; tokens are written as raw numbers, so let its name end in .bin.")
    if path.exists():
        raise FileExistsError(f"out {path} exists already: remove it, or choose another name.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"out {path}: the folder {path.parent} does not exist; make it first.")
    return path


def _text_files(inputs: str | Path | Sequence[str | Path]) -> list[str]:
    hint = "pass existing text files, directories or globs"
    return collect_files(path_list([] if inputs is None else inputs, "inputs", hint), hint=hint)


def _decoded(path: str, size: int = 1 << 20) -> Iterator[str]:
    """The text of a file block by block. Raises: ValueError naming the first byte that is not UTF-8."""
    decoder, done = codecs.getincrementaldecoder("utf-8")(), 0
    with open(path, "rb") as file:
        try:
            while block := file.read(size):
                done += len(block)
                yield decoder.decode(block)
            yield decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            offset = done - len(error.object) + error.start
            raise ValueError(
                f"{path} is not UTF-8 text: byte {offset:,} (counted from 0) is 0x{error.object[error.start]:02x} "
                f"({error.reason}). Convert it first, as by iconv -t UTF-8, or leave it out."
            ) from None


@dataclass(frozen=True)
class _Piece:
    """Characters of a text from `begin` on, and of its tokens the ids (T,) and their places in the text (T, 2).

    Tokens before `first` have been written as those of an earlier piece.
    """

    file: str
    begin: int
    text: str
    last: bool
    ids: np.ndarray
    places: np.ndarray
    first: int = 0


def _pieces(file: str) -> Iterator[_Text]:
    """Pieces that share OVERLAP characters with the next."""
    text, begin = "", 0
    for block in _decoded(file):
        text += block
        while len(text) > PIECE + OVERLAP:
            yield file, begin, text[: PIECE + OVERLAP], False
            text, begin = text[PIECE:], begin + PIECE
    yield file, begin, text, True


def _documents(tokenizer: Tokenizer, files: list[str], end: int | None) -> Iterator[np.ndarray]:
    """The ids of all texts in order, a part at a time, each text with its end."""
    left: _Piece | None = None
    waiting: list[_Piece] = []
    for piece in _encoded(tokenizer, itertools.chain.from_iterable(map(_pieces, files))):
        seam = None if left is None or waiting else _seam(left, piece)
        if left is None:
            left = piece
        elif seam is not None:
            yield left.ids[left.first : seam[0]]
            left = replace(piece, first=seam[1])
        else:
            waiting.append(piece)
            # twice as much each time, so that encoding again costs at most as much as once more
            if piece.last or piece.begin + len(piece.text) - left.begin >= 2 * len(left.text):
                left, waiting = _together(tokenizer, left, waiting), []
        if piece.last:
            yield left.ids[left.first :]
            left = None
            if end is not None:
                yield np.array([end])


def _encodings(tokenizer: Tokenizer, pieces: Iterator[_Text]) -> Iterator[tuple[_Text, Encoding]]:
    while batch := list(itertools.islice(pieces, _AT_ONCE)):
        try:
            with panics_named("of these files"):
                encodings = tokenizer.encode_batch([text for _, _, text, _ in batch], add_special_tokens=False)
        except Exception as error:
            files = ", ".join(dict.fromkeys(file for file, _, _, _ in batch))
            raise ValueError(f"the tokenizer cannot encode the text of {files} ({error}).") from None
        yield from zip(batch, encodings, strict=True)


def _encoded(tokenizer: Tokenizer, pieces: Iterator[_Text]) -> Iterator[_Piece]:
    for (file, begin, text, last), encoding in _encodings(tokenizer, pieces):
        whole = begin == 0 and last  # needs no places
        places = [] if whole else encoding.offsets
        yield _Piece(file, begin, text, last, np.array(encoding.ids, np.int64), np.array(places).reshape(-1, 2))


def _seam(left: _Piece, right: _Piece) -> tuple[int, int] | None:
    """(index in left, index in right) of the first token of the middle half of what both share; None unless all agree there.

    A token that depends on OVERLAP // 2 characters around is right in one of both wherever it is, so all that agree are.
    """
    quarter = OVERLAP // 4
    runs = []
    for piece in (left, right):
        starts = piece.places[:, 0] + piece.begin
        runs.append(np.searchsorted(starts, [right.begin + quarter, right.begin + 3 * quarter]))
    (a, b), (c, d) = runs
    alike = b - a == d - c >= _AGREE and np.array_equal(left.ids[a:b], right.ids[c:d])
    if not alike or not np.array_equal(left.places[a:b] + left.begin, right.places[c:d] + right.begin):
        return None
    return int(a), int(c)  # not before left.first, which is of the same place in the overlap before


def _together(tokenizer: Tokenizer, left: _Piece, others: list[_Piece]) -> _Piece:
    """One piece of several neighbours. Raises: ValueError where it is too long, or what is written would change."""
    text = left.text
    for piece in others:
        text = text[: piece.begin - left.begin] + piece.text
    new = next(_encoded(tokenizer, iter([(left.file, left.begin, text, False)]))) if len(text) <= LONGEST else None
    if new is None or not np.array_equal(new.ids[: left.first], left.ids[: left.first]):
        raise ValueError(
            f"{left.file}: the tokenizer finds no place to cut the text after character {left.begin:,} (a run of one "
            f"character, or a word without end): cut the file there, or leave that part out."
        )
    return replace(new, last=others[-1].last, first=left.first)


def marking_dropped(tokenizer: Tokenizer) -> tuple[Tokenizer, int] | None:
    """A tokenizer that puts the token M where `tokenizer` leaves out a character or a part of it, and M.

    BPE without unknown token silently leaves out what its vocabulary does not have. What that is depends on the word (a
    suffix at its end, a prefix inside) and on the normaliser, so characters alone do not show it. The other tokens are not
    those of `tokenizer`. None if nothing can be left out.
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
