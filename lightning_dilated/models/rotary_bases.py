"""The rotary base of each layer: how far apart a query and a key may stand and still match by content.

Shape letters: N tokens, w segment length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.branch import integer
from lightning_dilated.pattern.layers import in_turns, shortest_cycle

#: what a model takes as `rotary_base`
BasesLike: TypeAlias = float | str | Sequence[float | str] | None

#: the base where nothing says how long sequences are
USUAL = 10_000.0
#: "Base of RoPE Bounds Context Length" (arXiv 2405.14591), equation 13: the smallest base for N tokens is 0.0424 N^1.628
FACTOR, POWER = 0.0424, 1.628
#: the fit has three digits: segments of 2,048 tokens are served by 1e4, whose bound is 1,996
TOLERANCE = 1.05


def base_of_length(seq_len: int) -> float:
    """The rotary base for sequences of N tokens: max(1e4, 0.0424 N^1.628), rounded up to a power of ten."""
    least = FACTOR * integer(seq_len, "max_seq_len", 1) ** POWER
    return max(USUAL, 10.0 ** math.ceil(math.log10(least)))


def served_length(base: float) -> int:
    """The most tokens between a query and a key that a rotary base serves, by the same bound."""
    return int((base / FACTOR) ** (1 / POWER))


def layer_bases(
    rotary_base: BasesLike, max_seq_len: int | None, depth: int, position_encoding: str = "rotary"
) -> tuple[float | None, ...]:
    """The rotary base of each of `depth` layers; None for a layer without positions.

    Args:
        rotary_base: a number; "length", `base_of_length` of `max_seq_len`; "none", no positions; a list of those for layers
            0, 1, ..., which repeats; or None: "length" where `max_seq_len` is given, else 10,000.
        max_seq_len: the longest sequence that the model is made for.
        depth: layers.
        position_encoding: of the model; with "none" no layer has positions.

    Raises:
        TypeError, ValueError: for another value, a list that is empty or longer than `depth`, and "length" without a length.
    """
    if max_seq_len is not None:
        max_seq_len = integer(max_seq_len, "max_seq_len", 1)
    if rotary_base is None:  # xPos decays with the distance whatever the base
        rotary_base = USUAL if max_seq_len is None or position_encoding == "xpos" else "length"
    values = list(rotary_base) if isinstance(rotary_base, (list, tuple)) else [rotary_base]
    if not 1 <= len(values) <= depth:
        raise ValueError(
            f"rotary_base lists {len(values)} bases for {depth} layers: it takes 1 to {depth}, and repeats."
        )
    bases = [_base(value, max_seq_len) for value in values]
    return (None,) * depth if position_encoding == "none" else in_turns(bases, depth)


def _base(value: float | str, max_seq_len: int | None) -> float | None:
    if value == "none":
        return None
    if value == "length":
        if max_seq_len is None:
            raise ValueError(
                'rotary_base="length" needs max_seq_len, the most tokens of a sequence that the model is made for. Set it, '
                "or give rotary_base as a number."
            )
        return base_of_length(max_seq_len)
    if isinstance(value, (bool, str)) or not isinstance(value, (int, float)):
        raise TypeError(f'rotary_base must be a number, "length", "none", or a list of those; got {value!r}.')
    if not 1 < value < math.inf:
        raise ValueError(f"rotary base must be above 1 and finite, got {value!r}; 10000 is usual.")
    return float(value)


def stored_bases(bases: Sequence[float | None]) -> float | str | list[float | str]:
    """The bases of all layers as `rotary_base` takes them, in numbers: what a checkpoint keeps."""
    cycle = ["none" if base is None else base for base in shortest_cycle(bases)]
    return cycle[0] if len(cycle) == 1 else cycle


def rotary_hint(
    bases: Sequence[float | None],
    patterns: Sequence[DilatedPattern],
    seq_len: int | None,
    max_seq_len: int | None = None,
) -> str | None:
    """What to change where keys of a layer may stand further away than its rotary base serves; None where none do.

    Args:
        bases, patterns: of each layer.
        seq_len: N of the sequences; None: those of the model's `max_seq_len`, or any length.
        max_seq_len: the model's.
    """
    longest = seq_len or max_seq_len or math.inf
    for layer, (base, pattern) in enumerate(zip(bases, patterns, strict=True)):
        if base is None:
            continue
        width = min(max(b.segment_length or math.inf for b in pattern.branches), longest)
        if width > TOLERANCE * served_length(base):
            wide = "the whole sequence" if width == math.inf else f"{width:,} tokens"
            if longest <= (max_seq_len or 0):
                remedy = f'Set rotary_base to "length", which is {base_of_length(max_seq_len or 1):g} here'
            else:
                remedy = f"Set max_seq_len to the longest sequence{'' if longest == math.inf else f', {longest:,},'}"
                remedy += ' and rotary_base to "length"'
            return (
                f"rotary_base={base:g} serves {served_length(base):,} tokens between a query and a key (arXiv 2405.14591), "
                f"and layer {layer} attends over {wide}: equal tokens further apart score no better than others. {remedy}."
            )
    return None
