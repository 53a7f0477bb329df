"""CallSpec: what a call of the op asks for besides its tensors. torch carries it as one string, its code."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from lightning_dilated.pattern import DilatedPattern


@dataclass(frozen=True)
class CallSpec:
    """One call, checked, without its tensors.

    Attributes:
        pattern: who attends to whom.
        causal: whether keys after the query are left out.
        scale: of the scores.
        dropout: probability with which a (query, key) pair of a branch is dropped.
        engine: as the user named it, "auto" or a family of engines included.
        sequence: the name of the `SequenceGroup` that shares the sequence; "" is one rank.
        context: the name of the `Context` with the rows before these; "" is a whole sequence.
        needs_grad: whether a backward will follow.
        window: (first, heads, kv heads): the query heads of q are first, first + 1, ... of so many, and k and v have
            theirs; () where q has all.
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
        """The string that `decode` reads."""
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
    """The code of a `CallSpec` of these fields. torch.compile traces it, and it costs less than making the object."""
    heads = ",".join([str(x) for x in window])
    options = f"{int(causal)}|{float(scale)!r}|{float(dropout)!r}|{engine}|{sequence}|{int(needs_grad)}|{heads}"
    return f"{options}|{context}|{pattern.code}"


@functools.lru_cache(maxsize=4096)
def decode(code: str) -> CallSpec:
    """The `CallSpec` of a code."""
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
