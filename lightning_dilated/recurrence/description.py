"""Recurrence: the frozen description of a layer's memory beyond its pattern, for one layer and for a model's layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from lightning_dilated._extensions import hook
from lightning_dilated._validation import integer, one_of, real
from lightning_dilated.pattern.branch import Described
from lightning_dilated.pattern.rows import cycle_to, shortest_cycle

KINDS = ("gated_delta", "linear", "delta")
#: kinds that update their state at the end of each memory segment instead of at each token
SEGMENTED = ("linear", "delta")


@dataclass(frozen=True)
class Recurrence(Described):
    """A memory of constant size besides dilated attention: D x D numbers per kv head, which every later token reads.

    The heads' outputs are A + scale sigmoid(W_g x) RMSNorm(M), where A is dilated attention, M is `recurrent_attention`
    of the same q, k and v before rotation, x is the layer's input and `scale` is learned per head. The memory is not a
    branch of the softmax. It reaches across a pattern's walls and to positions that no head uses, but is lossy.

    Args:
        kind: "gated_delta" (Gated DeltaNet, arXiv 2412.06464), with decay and write strength computed from x; "linear"
            or "delta" (Infini-attention, arXiv 2404.07143). If attention is not causal, only "linear" is allowed.
        segment: number of tokens per memory segment; only "linear" and "delta" need and allow it.
        conv: taps of a short convolution over q, k and v for the memory, initially the identity; 0 means none.
        gate_init: initial `scale`. With 0, the memory does not change the layer's output until `scale` is trained.

    Raises:
        TypeError, ValueError: if an argument is invalid. The message states its value and the allowed values.
    """

    kind: str = "gated_delta"
    segment: int | None = None
    conv: int = 4
    gate_init: float = 0.0

    def __post_init__(self) -> None:
        one_of(self.kind, "recurrence kind", KINDS)
        fix = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731 - frozen dataclass
        if self.kind in SEGMENTED:
            if self.segment is None:
                raise ValueError(
                    f"recurrence kind {self.kind!r} needs segment, the tokens of a memory segment: segment=2048, say."
                )
            fix("segment", integer(self.segment, "recurrence segment", 1))
        elif self.segment is not None:
            raise ValueError(
                f"recurrence segment={self.segment!r} belongs to kinds {', '.join(SEGMENTED)}, not to {self.kind!r}: leave "
                "it out."
            )
        fix("conv", integer(self.conv, "recurrence conv", 0, " It counts taps; 0 is no convolution."))
        if self.conv == 1:
            raise ValueError("recurrence conv must be 0 (none) or at least 2 taps, got 1.")
        fix("gate_init", real(self.gate_init, "recurrence gate_init"))

    def check_causal(self, causal: bool) -> None:
        """Raise ValueError if the layer is not causal and this memory needs a causal layer."""
        if not causal and self.kind != "linear":
            raise ValueError(
                f"recurrence kind {self.kind!r} overwrites its state in the order of the tokens, and this layer is not "
                "causal. Take kind='linear' with a segment, or a causal layer."
            )

    def flops(self, heads: int, kv_heads: int, head_dim: int) -> int:
        """Return the memory's forward FLOPs per token: writes to each kv head's matrix, reads for each query head."""
        written = 2 if self.kind == "linear" else 4
        return (written * kv_heads + 2 * heads) * head_dim**2

    def exchanged_bytes(self, ranks: int, kv_heads: int, head_dim: int) -> int:
        """Return the most bytes of state maps that a rank receives in the forward of one contiguously sharded sequence.

        A backward moves twice as much: the forward's maps again, and gradients. If ranks cut memory segments, a rank
        also receives keys and values of less than one segment; with `conv` it also receives the rows for its taps.
        """
        columns = {"gated_delta": 2 * head_dim, "linear": head_dim + 2, "delta": 2 * head_dim + 2}[self.kind]
        return hook("maps of a recurrence")(ranks) * kv_heads * head_dim * columns * 4

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for YAML, JSON and checkpoints: `kind`, and fields that are not at their defaults."""
        return {"kind": self.kind} | super().to_dict()


#: a model's `recurrence`: one for all layers, None, or a list for layers 0, 1, ... that repeats
RecurrencesLike: TypeAlias = Recurrence | Mapping[str, Any] | Sequence[Recurrence | Mapping[str, Any] | None] | None


def layer_recurrences(value: RecurrencesLike, depth: int, causal: bool) -> tuple[Recurrence | None, ...]:
    """Return the recurrence of each of `depth` layers; None for a layer without recurrence.

    Raises:
        TypeError, ValueError: for any other value, an empty list, a list longer than `depth`, or a kind that needs
            causal layers if the layers are not causal.
    """
    members: Iterable[Any]
    if value is None or isinstance(value, (Recurrence, Mapping)):
        members = [value]
    elif isinstance(value, Iterable) and not isinstance(value, (str, bytes, Set)):
        members = value
    else:
        raise TypeError(
            f"recurrence must be a Recurrence, a mapping, None, or a list of them, one a layer; got {value!r}."
        )
    layers = [None if x is None else Recurrence.from_dict(x) for x in members]
    if not 1 <= len(layers) <= depth:
        raise ValueError(
            f"recurrence lists {len(layers)} entries for a model of {depth} layers: it takes 1 to {depth}, and a shorter "
            "list repeats."
        )
    for layer in layers:
        if layer is not None:
            layer.check_causal(causal)
    return cycle_to(layers, depth)


def plain_recurrences(layers: Sequence[Recurrence | None]) -> Any:
    """Return plain values for checkpoints; `layer_recurrences` reads them."""
    cycle = [None if x is None else x.to_dict() for x in shortest_cycle(layers)]
    return cycle[0] if len(cycle) == 1 else cycle


def without_starts(layers: Sequence[Recurrence | None]) -> tuple[Recurrence | None, ...]:
    """Return the recurrences with `gate_init` at 0, because initial values have no effect once weights are loaded."""
    return tuple(None if x is None else replace(x, gate_init=0.0) for x in layers)
