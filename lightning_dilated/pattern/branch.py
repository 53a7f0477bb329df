"""Branch, Window and Global: validated, immutable descriptions of the keys that a query head sees in one branch.

Shape letters: w segment length, r dilation rate, t shift, o offset.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self, TypeAlias

from lightning_dilated._validation import integer, known_keys

#: limits that keep sums of positions, and products of rates and strides, within 64 bits
LARGEST = {"segment_length": 1 << 62, "dilation_rate": 1 << 40}
#: the largest rate of a window, because a window of rate r becomes r branches
MOST_RESIDUES = 1024
#: fields that `repr` writes without their names
UNNAMED = ("segment_length", "dilation_rate", "width", "tokens")


class Described:
    """Base class of dataclasses that files store as plain values, without fields at their defaults."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def _changed_fields(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {f.name: values[f.name] for f in fields(self) if values[f.name] != f.default}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for YAML and JSON, without fields at their defaults."""
        return {name: list(x) if isinstance(x, tuple) else x for name, x in self._changed_fields().items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | Self) -> Self:
        """Make an object from a mapping of its arguments, as `to_dict` returns it; return an object unchanged.

        Raises:
            TypeError: if `values` is neither a mapping nor an object of this class.
        """
        if isinstance(values, cls):
            return values
        name = cls.__name__
        if not isinstance(values, Mapping):
            raise TypeError(f"{name.lower()} is given as a {name} or a mapping of its arguments; got {values!r}.")
        known_keys(values, name.lower(), [f.name for f in fields(cls)])
        return cls(**values)


class _Branch(Described):
    """Base class of the kinds of branches; each kind is a dataclass."""

    heads: tuple[int, ...] | None

    def residues(self) -> tuple[Self, ...]:
        """Return the branch itself; a `Window`, which may use several residues, overrides this."""
        return (self,)

    def serves(self, head: int) -> bool:
        """Return whether a query head uses this branch."""
        return self.heads is None or head in self.heads

    def __repr__(self) -> str:
        texts = {name: _ranges(x) if isinstance(x, tuple) else str(x) for name, x in self._changed_fields().items()}
        parts = [text if name in UNNAMED else f"{name}={text}" for name, text in texts.items()]
        return f"{type(self).__name__}({', '.join(parts)})"


@dataclass(frozen=True, repr=False)
class Branch(_Branch):
    """A dilated branch: a head sees every r-th position of each segment.

    Position p has index (p + shift) % segment_length in segment (p + shift) // segment_length. Head h uses the
    positions with index % dilation_rate equal to the head's offset.

    Args:
        segment_length: w, in tokens; None means one segment for the whole sequence.
        dilation_rate: r >= 1. It need not divide w.
        shift: t with 0 <= t < w. The first segment contains only w - t tokens.
        heads: the query heads that use this branch; None means all heads.
        offset: the offset of all heads of the branch, in [0, r); None means that the pattern's rule sets it.

    Raises:
        TypeError, ValueError: if an argument is invalid. The message states the argument and the allowed values.
    """

    segment_length: int | None
    dilation_rate: int
    shift: int = 0
    heads: tuple[int, ...] | None = None
    offset: int | None = None
    width: ClassVar[None] = None
    tokens: ClassVar[None] = None

    def __post_init__(self) -> None:
        fix = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731 - frozen dataclass
        if self.segment_length is not None:
            fix("segment_length", integer(self.segment_length, "segment_length", 1))
        fix("dilation_rate", integer(self.dilation_rate, "dilation_rate", 1, " Use 1 for no dilation."))
        for name, largest in LARGEST.items():
            if (getattr(self, name) or 0) > largest:
                raise ValueError(f"{name} must be at most 2^{largest.bit_length() - 1}, got {getattr(self, name)}.")
        fix("shift", integer(self.shift, "shift", 0))
        if self.segment_length is None and self.shift:
            raise ValueError(f"shift={self.shift} has no meaning without segments: give segment_length, or shift=0.")
        if self.segment_length is not None and self.shift >= self.segment_length:
            raise ValueError(
                f"shift must be below segment_length={self.segment_length}, got {self.shift}; "
                f"a shift acts modulo the segment, so shift={self.shift % self.segment_length} is the same cut."
            )
        _fix_heads_and_offset(self)

    @classmethod
    def of(cls, value: Any, name: str = "branch") -> AnyBranch:
        """Make a branch of any kind from `value`; see `read_branch`."""
        return read_branch(value, name)


@dataclass(frozen=True, repr=False)
class Window(_Branch):
    """A sliding window: query p sees key j of its document if r divides p - j and |p - j| < width * r (causal: j <= p).

    With rate 1, a causal query sees the `width` latest tokens. Without an `offset`, every position sees itself. A
    window with a width of 2 or more has no walls (positions that no information crosses).

    Args:
        width: keys that a causal query sees, itself included; without causal attention a query sees 2 width - 1 keys.
        dilation_rate: r >= 1, the distance between these keys.
        heads: the query heads that use this window; None means all heads.
        offset: the residue (position mod r) that uses the window; None means all residues.

    Raises:
        TypeError, ValueError: if an argument is invalid. The message states the argument and the allowed values.
    """

    width: int
    dilation_rate: int = 1
    heads: tuple[int, ...] | None = None
    offset: int | None = None
    #: the whole document is one segment
    segment_length: ClassVar[None] = None
    shift: ClassVar[int] = 0
    tokens: ClassVar[None] = None

    def __post_init__(self) -> None:
        fix = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731 - frozen dataclass
        fix("width", integer(self.width, "width", 1))
        fix("dilation_rate", integer(self.dilation_rate, "dilation_rate", 1, " Use 1 for no dilation."))
        if self.dilation_rate > MOST_RESIDUES:
            raise ValueError(f"dilation_rate of a Window must be at most {MOST_RESIDUES}, got {self.dilation_rate}.")
        if self.width * self.dilation_rate > LARGEST["segment_length"]:
            raise ValueError(f"width * dilation_rate must be at most 2^62, got {self.width * self.dilation_rate}.")
        _fix_heads_and_offset(self)

    def residues(self) -> tuple[Window, ...]:
        """Return a window for each residue, because a head may use only one residue of each branch."""
        if self.offset is not None or self.dilation_rate == 1:
            return (self,)
        return tuple(replace(self, offset=o) for o in range(self.dilation_rate))


@dataclass(frozen=True, repr=False)
class Global(_Branch):
    """Global tokens: query p sees key j of its document if p or j is one of the first `tokens` (causal: j <= p).

    Global tokens, such as the class token of a slide, see every token, and every token sees them. The cost is O(N).

    Args:
        tokens: g, the number of global tokens. In a shorter document, all tokens are global.
        heads: the query heads that use this branch; None means all heads.

    Raises:
        TypeError, ValueError: if an argument is invalid. The message states the argument and the allowed values.
    """

    tokens: int
    heads: tuple[int, ...] | None = None
    #: the whole document is one segment, without dilation
    segment_length: ClassVar[None] = None
    dilation_rate: ClassVar[int] = 1
    shift: ClassVar[int] = 0
    offset: ClassVar[None] = None
    width: ClassVar[None] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", integer(self.tokens, "tokens", 1))
        if self.tokens > LARGEST["segment_length"]:
            raise ValueError(f"tokens must be at most 2^62, got {self.tokens}.")
        _fix_heads(self)


AnyBranch: TypeAlias = Branch | Window | Global
#: values that a pattern accepts as a branch
BranchLike: TypeAlias = AnyBranch | tuple[int | None, int] | Mapping[str, Any]


def read_branch(value: Any, name: str = "branch") -> AnyBranch:
    """Return a branch unchanged, or make one from a mapping of its fields or a (segment_length, dilation_rate) pair."""
    if isinstance(value, AnyBranch):
        return value
    if isinstance(value, Mapping):
        kind: type[AnyBranch]
        kind, required = Branch, ["segment_length", "dilation_rate"]
        for other, name_of_first in ((Window, "width"), (Global, "tokens")):
            if name_of_first in value:
                kind, required = other, [name_of_first]
        known_keys(value, name, [f.name for f in fields(kind)])
        missing = [n for n in required if n not in value]
        if missing:
            raise ValueError(f"{name} lacks {' and '.join(missing)}: {dict(value)!r}.")
        return _named(name, kind, **value)
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return _named(name, Branch, *value)
    raise TypeError(
        f"{name} must be a Branch, Window, Global, a mapping or a (segment_length, dilation_rate) pair, got {value!r}."
    )


def join_residues(branches: Sequence[AnyBranch]) -> list[AnyBranch]:
    """Replace r consecutive windows, if they are the `residues` of one window, with that window."""
    out: list[AnyBranch] = []
    i = 0
    while i < len(branches):
        whole = branches[i]
        if isinstance(whole, Window) and whole.offset == 0 and whole.dilation_rate > 1:
            whole = replace(whole, offset=None)
        rate = whole.dilation_rate if isinstance(whole, Window) else 1
        parts = whole.residues() if i + rate <= len(branches) else ()
        matches = len(parts) > 0 and tuple(branches[i : i + len(parts)]) == parts
        out.append(whole if matches else branches[i])
        i += len(parts) if matches else 1
    return out


def _fix_heads(branch: AnyBranch) -> None:
    if branch.heads is not None:
        object.__setattr__(branch, "heads", _checked_heads(branch.heads))


def _fix_heads_and_offset(branch: Branch | Window) -> None:
    _fix_heads(branch)
    if branch.offset is not None:
        object.__setattr__(branch, "offset", integer(branch.offset, "offset", 0))
        if branch.offset >= branch.dilation_rate:
            raise ValueError(f"offset must be below dilation_rate={branch.dilation_rate}, got {branch.offset}.")


def _checked_heads(heads: Any) -> tuple[int, ...]:
    if isinstance(heads, (str, bytes, Mapping)) or not isinstance(heads, Iterable):
        raise TypeError(f"heads must be a list of query heads such as range(0, 4), or None for all; got {heads!r}.")
    numbers = tuple(sorted(integer(h, "each entry of heads", 0) for h in heads))
    if not numbers:
        raise ValueError("heads is empty, so no head would use the branch: name at least one head, or None for all.")
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"heads names a head twice: {list(numbers)}. A head sees a branch once.")
    return numbers


def _named(name: str, make: Any, *args: Any, **kwargs: Any) -> AnyBranch:
    """Call make(...), and put the branch's name in front of its error messages."""
    try:
        return make(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None


def _ranges(heads: tuple[int, ...]) -> str:
    """Return the text `range(a, b)` if the heads are consecutive, else the list."""
    if len(heads) > 2 and heads == tuple(range(heads[0], heads[-1] + 1)):
        return f"range({heads[0]}, {heads[-1] + 1})"
    return str(list(heads))
