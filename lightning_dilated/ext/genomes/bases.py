"""Bases as codes: A 0, C 1, G 2, T 3 (and U), N 4 (and every other IUPAC letter), in either case.

Shape letters: N bases.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

LETTERS = "ACGTN"
N_CODE = 4
#: code in `CODES` of an IUPAC letter that means several bases, and code of a character that is no nucleotide
OTHER, ILLEGAL = 5, 255
#: COMPLEMENTS[code] is the code of the base on the other strand
COMPLEMENTS = (3, 2, 1, 0, N_CODE)


def _table() -> np.ndarray:
    table = np.full(256, ILLEGAL, dtype=np.uint8)
    for letters, first in (("ACGTN", 0), ("U", 3)):
        for code, letter in enumerate(letters, first):
            table[[ord(letter), ord(letter.lower())]] = code
    table[[ord(x) for x in "RYSWKMBDHVryswkmbdhv"]] = OTHER
    return table


#: (256,) uint8: code of each character, or `OTHER` or `ILLEGAL`
CODES = _table()


def encode_bases(sequence: str) -> Tensor:
    """Return tokens of a genome model, (N,) int64: A 0, C 1, G 2, T and U 3, N and other IUPAC letters 4; either case.

    Args:
        sequence: N letters.

    Raises:
        TypeError: for anything but a string.
        ValueError: for a character that is no nucleotide; the message has its position, counted from 1.
    """
    if not isinstance(sequence, str):
        raise TypeError(f'a sequence of bases is a string such as "ACGT", got a {type(sequence).__name__}.')
    raw = np.frombuffer(sequence.encode("latin-1", errors="replace"), dtype=np.uint8)
    codes = CODES[raw]
    if codes.max(initial=0) == ILLEGAL:
        at = int(np.argmax(codes == ILLEGAL))
        raise ValueError(
            f"{sequence[at]!r} at base {at + 1:,} (counted from 1) is not a nucleotide (A C G T U N or another IUPAC "
            "letter)."
        )
    return torch.from_numpy(np.minimum(codes, N_CODE).astype(np.int64))


def decode_bases(tokens: Any) -> str:
    """Return the letters A C G T N of tokens (N,), the inverse of `encode_bases` for these letters.

    Args:
        tokens: integers from 0 to 4: a tensor, array or list.

    Raises: ValueError for another shape, or a token that is no base.
    """
    codes = torch.as_tensor(tokens)
    if codes.ndim != 1 or (codes.numel() and (codes.is_floating_point() or codes.dtype == torch.bool)):
        raise ValueError(f"tokens must be integers (N,), got {codes.dtype} of shape {tuple(codes.shape)}.")
    wrong = codes[(codes < 0) | (codes > N_CODE)]
    if len(wrong):
        raise ValueError(f"token {int(wrong[0])} is no base: they are 0 to {N_CODE}, for {' '.join(LETTERS)}.")
    return "".join(LETTERS[code] for code in codes.tolist())


#: the alphabetically first base of each ambiguous IUPAC letter
_FIRST = str.maketrans("RYSWKMBDHVU", "ACCAGACAAAT")


def reduced(sequence: str) -> str:
    """Return upper-case letters; each ambiguous IUPAC letter becomes its alphabetically first base, as in a VCF's REF.

    N stays N, and U becomes T.
    """
    return sequence.upper().translate(_FIRST)


def reverse_complement(tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Return the reverse complement of tokens (..., N): reverse the tokens, swap A with T, and swap C with G.

    Args:
        tokens: (..., N) integers; 4 (N) and above, such as a mask token, are not changed.
        lengths: (B,), for tokens (B, N) that are padded on the right: the padding stays in place.
    """
    other = complement(tokens)
    if lengths is None:
        return other.flip(-1)
    return other.gather(1, backward_places(other.shape[1], lengths.to(tokens.device)))


def complement(tokens: Tensor) -> Tensor:
    """Return each base's complement, such as A for T and C for G, in any shape; 4 (N) and above are kept."""
    return torch.where((tokens >= 0) & (tokens < N_CODE), N_CODE - 1 - tokens, tokens)


def backward_places(tokens: int, lengths: Tensor) -> Tensor:
    """Return source positions (B, N) that reverse the first `lengths` (B,) tokens of each row and keep the others."""
    at = torch.arange(tokens, device=lengths.device).expand(len(lengths), -1)
    return torch.where(at < lengths[:, None], lengths[:, None] - 1 - at, at)
