"""encode_files: encode text files into a file of tokens, in bounded memory.

A long text is encoded in overlapping pieces. Neighbouring pieces are joined at a run of tokens on which they agree, far
from the ends of both. The result equals an encoding of the whole text if the tokenizer looks at most OVERLAP // 2 =
2,048 characters before and after the start of a token. Tokenizers that cut at words do so if no word is longer than
that. Pieces that disagree are encoded together, or raise an error. A dependence on more distant text is NOT detected
while the pieces agree; a pre-tokenizer that pairs quotes ('"[^"]*"') thousands of characters apart is an example.
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

from lightning_dilated.ext.files.files import collect_files, path_list
from lightning_dilated.ext.text.tokenizer import end_token, load_tokenizer, panics_named, unknown_token, vocabulary_size

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

#: number of characters of a piece, and number of characters that it shares with the next piece
PIECE, OVERLAP = 1 << 17, 1 << 12
#: number of pieces that are encoded in one call, on several cores
_AT_ONCE = 8
#: maximum number of characters of pieces that are encoded together because they could not be joined
LONGEST = 1 << 23
#: minimum number of tokens on which two pieces must agree
_AGREE = 4
#: a piece of text: (file, start, text, whether it is the file's last piece)
_Text = tuple[str, int, str, bool]


@dataclass(frozen=True)
class EncodedFiles:
    """The report of `encode_files`, with the settings for TokenDataModule and the model.

    Attributes:
        path: path of the file of tokens.
        files: number of texts.
        documents: number of end tokens, including end tokens that a text spells out.
        tokens: number of tokens in the file.
        text_bytes: number of bytes of the texts.
        unknown: number of unknown tokens, which replace text outside the vocabulary.
        dtype: "uint16" or "uint32".
        vocab_size: vocabulary size of the tokenizer.
        eos_token: id of the token that ends documents; None if no end tokens are written.
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
        """Mean bytes of text per token, including end tokens; the argument `bytes_per_token` of `LongNetLM`."""
        return self.text_bytes / self.tokens


def encode_files(
    tokenizer: str | Path,
    inputs: str | Path | Sequence[str | Path],
    out: str | Path,
    eos_token: str | None = None,
    documents: bool = True,
) -> EncodedFiles:
    """Encode UTF-8 text files, one document each, into a .bin file of uint16 (for up to 65,536 token ids) or uint32.

    A text of more than 131,072 characters is encoded in pieces. The tokens equal an encoding of the whole text if the
    tokenizer looks at most 2,048 characters around a token. A tokenizer that looks farther, for example to
    pair quotes, may split such a text differently without an error. A special token that a text spells out is encoded
    as that token, as the library does. No special tokens are added at the ends. `out` appears only when it is complete.

    Args:
        tokenizer: a tokenizer.json of Hugging Face's `tokenizers` (extra `tokenizers`).
        inputs: files, directories (read recursively, all files) or globs; files of a directory are sorted.
        out: the .bin file to write.
        eos_token: the text of the token that ends each document; None uses the tokenizer's only special token.
        documents: False writes no end tokens.

    Raises:
        ModuleNotFoundError: without `tokenizers`.
        OSError, ValueError: before anything is written, for files that are missing, empty or not UTF-8 (with the byte's
            offset), for an `out` that exists or is not .bin, and for a tokenizer that cannot be read, lacks the token,
            or would silently drop characters.
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
    """Return the size of a UTF-8 file. Raises ValueError for an empty file, or for a byte that is not UTF-8."""
    size = os.path.getsize(path)
    if size == 0:
        raise ValueError(f"{path} is empty: an empty document has nothing to learn from; leave it out.")
    for _ in _decoded(path):
        pass
    return size


def _refuse_dropped(tokenizer: Tokenizer, files: list[str]) -> None:
    """Encode all texts, and raise ValueError if the tokenizer would silently drop anything except white space."""
    if (marking := marking_dropped(tokenizer)) is None:
        return
    marker, mark = marking
    half = OVERLAP // 2  # a cut may split words within this distance; the neighbouring piece contains them whole
    for (file, begin, text, last), encoding in _encodings(marker, itertools.chain.from_iterable(map(_pieces, files))):
        if mark not in encoding.ids:
            continue
        start, stop = half if begin else 0, len(text) if last else len(text) - half
        places = [x for x, token in zip(encoding.offsets, encoding.ids, strict=True) if token == mark]
        dropped = sorted({text[a:b] for a, b in places if start <= a < stop and not text[a:b].isspace()})
        if dropped:
            shown = ", ".join(f"{x!r} ({' '.join(f'U+{ord(y):04X}' for y in x)})" for x in dropped[:5])
            raise ValueError(
                f"{file} holds {shown}{' and others' if len(dropped) > 5 else ''}, which the tokenizer would silently "
                "drop: after normalisation, and at their place in a word, they have no token, and it has no unk_token. "
                "Change the text (such as to upper case), give the tokenizer an unk_token, or take a byte-level one."
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
    """Yield the text of a file in blocks. Raises ValueError with the first byte that is not UTF-8."""
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
    """A piece of a text from character `begin` on, with its token ids (T,) and their character ranges (T, 2).

    The tokens before `first` have already been written as tokens of an earlier piece.
    """

    file: str
    begin: int
    text: str
    last: bool
    ids: np.ndarray
    places: np.ndarray
    first: int = 0


def _pieces(file: str) -> Iterator[_Text]:
    """Yield the pieces of a file; each shares OVERLAP characters with the next one."""
    text, begin = "", 0
    for block in _decoded(file):
        text += block
        while len(text) > PIECE + OVERLAP:
            yield file, begin, text[: PIECE + OVERLAP], False
            text, begin = text[PIECE:], begin + PIECE
    yield file, begin, text, True


def _documents(tokenizer: Tokenizer, files: list[str], end: int | None) -> Iterator[np.ndarray]:
    """Yield the ids of all texts in order, in parts; each text is followed by the end token."""
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
            # wait until the length has doubled, so that all re-encoding costs at most one more encoding of the text
            if piece.last or piece.begin + len(piece.text) - left.begin >= 2 * len(left.text):
                left, waiting = _joined(tokenizer, left, waiting), []
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
        whole = begin == 0 and last  # a single piece is not joined, so it needs no character ranges
        places = [] if whole else encoding.offsets
        yield _Piece(file, begin, text, last, np.array(encoding.ids, np.int64), np.array(places).reshape(-1, 2))


def _seam(left: _Piece, right: _Piece) -> tuple[int, int] | None:
    """Return the indices, in left and in right, of the first common token in the middle half of the overlap, or None.

    None means that the pieces differ there. A token that depends on at most OVERLAP // 2 characters around it is
    correct in at least one of the pieces, so tokens on which the pieces agree are correct.
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
    return int(a), int(c)  # a >= left.first, because left.first is in the previous overlap


def _joined(tokenizer: Tokenizer, left: _Piece, pieces: list[_Piece]) -> _Piece:
    """Join neighbours into one piece. Raises ValueError if it is too long, or would change written tokens."""
    text = left.text
    for piece in pieces:
        text = text[: piece.begin - left.begin] + piece.text
    new = next(_encoded(tokenizer, iter([(left.file, left.begin, text, False)]))) if len(text) <= LONGEST else None
    if new is None or not np.array_equal(new.ids[: left.first], left.ids[: left.first]):
        raise ValueError(
            f"{left.file}: the tokenizer finds no place to cut the text after character {left.begin:,} (a run of one "
            f"character, or an endless word): cut the file there, or leave that part out."
        )
    return replace(new, last=pieces[-1].last, first=left.first)


def marking_dropped(tokenizer: Tokenizer) -> tuple[Tokenizer, int] | None:
    """Return a tokenizer that emits a mark for dropped text, and this mark, or None if `tokenizer` drops nothing.

    BPE without an unknown token silently drops text that its vocabulary lacks. A character may be dropped only at the
    end of a word, only inside a word, or only after normalisation, so it is not enough to encode single characters.
    Apart from the mark, its tokens may differ from the tokens of `tokenizer`.
    """
    state = json.loads(tokenizer.to_str())
    model = state["model"]
    if model["type"] != "BPE" or model["unk_token"] is not None or _has_all_bytes(state):
        return None
    name = max(model["vocab"], key=len) + "\0"  # the mark is longer than any token, so it equals none
    # on loading, the added tokens are numbered from the vocabulary's size on; this mark is above all of them
    mark = vocabulary_size(tokenizer) + len(state["added_tokens"]) + 1
    model["vocab"][name], model["unk_token"], state["post_processor"] = mark, name, None
    return type(tokenizer).from_str(json.dumps(state)), mark


def _has_all_bytes(state: dict[str, Any]) -> bool:
    """Return whether a BPE is byte-level or falls back to bytes, and has a token for each of the 256 bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    model, last = state["model"], state["pre_tokenizer"] or {"type": None}
    if model["byte_fallback"] and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256)):
        return True
    if last["type"] == "Sequence":
        last = (last["pretokenizers"] or [{"type": None}])[-1]
    if last["type"] != "ByteLevel" or model["end_of_word_suffix"] or model["continuing_subword_prefix"]:
        return False
    return all(letter in model["vocab"] for letter in ByteLevel.alphabet())
