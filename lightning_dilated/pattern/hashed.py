"""Hashed: the description of heads that read the rows with the query's learned code. `ext/hashed` computes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_dilated._validation import integer, real
from lightning_dilated.pattern.branch import Described
from lightning_dilated.pattern.pattern import DilatedPattern

#: maximum M ** G, because a cache for decoding has a place for each combination of codes
CODES = 1 << 20


@dataclass(frozen=True)
class Hashed(Described):
    """Heads that read the latest rows with the query's learned code, at a cost almost linear in the sequence length.

    The last `heads` kv heads of a layer, with their query heads, read rows by `hashed_attention` instead of by the
    layer's pattern. They have no rotary positions. The layer must be causal. The model's loss also trains the codes.

    Args:
        groups, codes: G groups of M codes; M ** G is at most 2 ** 20.
        latest: maximum number of rows that a query reads for each code.
        probes: number of codes that a query looks up, at most G + 1.
        heads: number of hashed kv heads in a layer.
        layers: numbers of the model's layers with hashed heads, from 0; None means all layers.
        soft_until: in training, heads read all rows of sequences of at most this many tokens, and only the losses below
            train the codes. 0 means never. Heads never read all rows of endless sequences (`LongNetLM.stream`).
        agree, contrast, balance, spread: weights of the losses, see `HashedLosses`. `training_step` and `token_mean`
            add the gradients of these losses to the gradient of the mean loss, but return the mean loss without them.

    Raises:
        TypeError, ValueError: if an argument is invalid. The message states its value and the allowed values.
    """

    groups: int = 4
    codes: int = 16
    latest: int = 64
    probes: int = 2
    heads: int = 1
    layers: tuple[int, ...] | None = None
    soft_until: int = 4096
    agree: float = 0.1
    contrast: float = 1.0
    balance: float = 0.1
    spread: float = 0.1

    def __post_init__(self) -> None:
        fix = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731 - frozen dataclass
        for name, least in (("groups", 1), ("codes", 2), ("latest", 1), ("probes", 1), ("heads", 1), ("soft_until", 0)):
            fix(name, integer(getattr(self, name), f"hashed {name}", least))
        for name in ("agree", "contrast", "balance", "spread"):
            fix(name, real(getattr(self, name), f"hashed {name}", least=0))
        if self.codes**self.groups > CODES:
            raise ValueError(f"hashed codes ** groups must be at most {CODES:,}; got {self.codes} ** {self.groups}.")
        integer(self.probes, "hashed probes", most=self.groups + 1, hint=f" There are {self.groups} groups.")
        if self.layers is not None:
            if isinstance(self.layers, (str, bytes)) or not isinstance(self.layers, Sequence) or not self.layers:
                raise TypeError(f"hashed layers must be a list of layer numbers, or None; got {self.layers!r}.")
            fix("layers", tuple(sorted({integer(x, "hashed layers", 0) for x in self.layers})))

    @property
    def read_rows(self) -> tuple[int, ...]:
        """The values that decide which rows a layer's heads read."""
        return self.groups, self.codes, self.latest, self.probes, self.heads

    def in_layers(self, depth: int, causal: bool = True) -> tuple[Hashed | None, ...]:
        """Return the description, or None, for each of `depth` layers; raise ValueError for layers that cannot have it."""
        if not causal:
            raise ValueError("hashed heads read earlier rows only, and this model is not causal: leave hashed out.")
        chosen = range(depth) if self.layers is None else self.layers
        if chosen[-1] >= depth:
            raise ValueError(f"hashed layers={list(chosen)} must be below the model's depth, {depth}.")
        return tuple(self if i in chosen else None for i in range(depth))

    def without_heads(self, pattern: DilatedPattern, num_heads: int, num_kv_heads: int) -> DilatedPattern:
        """Return the pattern of the layer's other heads; raise ValueError if there are none."""
        if self.heads >= num_kv_heads:
            raise ValueError(
                f"hashed heads={self.heads} leaves no other head: the layer has {num_kv_heads} kv heads, and at least one "
                "must follow the pattern."
            )
        others = range(num_heads - self.heads * num_heads // num_kv_heads)
        served = [tuple(h for h in (others if b.heads is None else b.heads) if h in others) for b in pattern.branches]
        left = [replace(b, heads=heads) for b, heads in zip(pattern.branches, served, strict=True) if heads]
        if not left:
            raise ValueError(f"hashed heads={self.heads} leaves {pattern} without heads: take fewer hashed heads.")
        return replace(pattern, branches=tuple(left))
