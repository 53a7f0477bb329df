"""CallSpec: the non-tensor arguments of a call. The op takes them as one string, the code."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from lightning_dilated.pattern import DilatedPattern


@dataclass(frozen=True)
class CallSpec:
    """Checked non-tensor arguments of one call.

    Attributes:
        pattern: the pattern of attention.
        causal: whether a query sees no later keys.
        scale: scale of the scores.
        dropout: probability with which a (query, key) pair of a branch is dropped.
        engine: the user's choice: an engine, a family of engines or "auto".
        sequence: the name of the `SequenceGroup` that shares the sequence; "" for one rank.
        needs_grad: whether a backward will follow.
        window: () if q has all heads. (first, H, K) if q has only heads first, first + 1, ... of the H query heads, and
            k and v only the matching ones of the K kv heads.
        context: the name of the `Context` that has the earlier rows; "" for a whole sequence.
    """

    pattern: DilatedPattern
    causal: bool
    scale: float
    dropout: float = 0.0
    engine: str = "auto"
    sequence: str = ""
    needs_grad: bool = False
    window: tuple[int, ...] = ()
    context: str = ""

    @property
    def code(self) -> str:
        """Return the string that `decode` reads."""
        p = self
        return encode(p.pattern, p.causal, p.scale, p.dropout, p.engine, p.sequence, p.needs_grad, p.window, p.context)


def encode(
    pattern: DilatedPattern,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
    engine: str = "auto",
    sequence: str = "",
    needs_grad: bool = False,
    window: tuple[int, ...] = (),
    context: str = "",
) -> str:
    """Return the code of a `CallSpec` with these fields; torch.compile can trace it, and no object is constructed."""
    heads = ",".join([str(x) for x in window])
    options = f"{int(causal)}|{float(scale)!r}|{float(dropout)!r}|{engine}|{sequence}|{int(needs_grad)}|{heads}"
    return f"{options}|{context}|{pattern.code}"


@functools.lru_cache(maxsize=4096)
def decode(code: str) -> CallSpec:
    """Return the `CallSpec` of a code."""
    causal, scale, dropout, engine, sequence, needs_grad, window, context, pattern = code.split("|", 8)
    return CallSpec(
        pattern=DilatedPattern.decode(pattern),
        causal=causal == "1",
        scale=float(scale),
        dropout=float(dropout),
        engine=engine,
        sequence=sequence,
        needs_grad=needs_grad == "1",
        window=tuple(map(int, window.split(","))) if window else (),
        context=context,
    )
