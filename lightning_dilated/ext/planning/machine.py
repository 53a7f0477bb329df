"""Store measured times of one device: parts of a training step (`Machine`), and rules of recurrences (`RuleTimes`).

Shape letters: L tokens of a rank.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_dilated._validation import integer, one_of, real
from lightning_dilated.recurrence import Recurrence

#: for each precision of the Trainer, the bytes of an element of q, k and v
ELEMENT_SIZES = {"bf16-mixed": 2, "bf16-true": 2, "16-mixed": 2, "16-true": 2, "32-true": 4, "64-true": 8}


@dataclass(frozen=True)
class Line:
    """A linear model of a call's seconds: `fixed` + `each` * (number of pairs or bytes)."""

    fixed: float
    each: float

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            real(value, f"Line.{name}", least=0)

    def of(self, size: Any, calls: Any = 1) -> Any:
        """Return the seconds of `calls` calls with `size` pairs or bytes in total; elementwise for arrays."""
        return self.fixed * calls + self.each * size


@dataclass(frozen=True)
class Parts:
    """Seconds of the parts of a step of `tokens` tokens on one device.

    Attributes:
        attention_forward, attention_backward: local attention of a rank with the pattern geometric(first, tokens).
        wide_forward, wide_backward: time that one more branch, with segments longer than the rank's tokens, adds for
            pairs of these tokens.
        rest_forward, rest_backward: a block without the attention op.
        edge_forward, edge_backward: embedding, last norm, output projection and loss.
    """

    tokens: int
    attention_forward: float
    attention_backward: float
    wide_forward: float
    wide_backward: float
    rest_forward: float
    rest_backward: float
    edge_forward: float
    edge_backward: float

    def __post_init__(self) -> None:
        integer(self.tokens, "Parts.tokens", 1)
        for name, value in dataclasses.asdict(self).items():
            real(value, f"Parts.{name}", least=0)


@dataclass(frozen=True)
class Machine:
    """One device and one shape of model, measured by `benchmarks/step_parts.py`.

    Attributes:
        name: the device, and the versions of software that were measured.
        dim, depth, heads, head_dim, kv_heads, hidden, vocab, precision, causal: the model and the Trainer's precision.
        first: shortest segment of the measured geometric pattern.
        block_parameters, edge_parameters: parameters of a block, and parameters outside blocks.
        parts: seconds at increasing numbers of tokens.
        optimizer: seconds of the optimizer's step over all parameters.
        again: the time to recompute a block's forward without the op, divided by the first time (`Parts.rest_forward`).
        arrive_forward, arrive_backward: seconds to compute arrived rows, for a number of (query, key) pairs over heads.
        pack: seconds to gather rows of K and V into a buffer, for a number of bytes of the buffer.
        add: seconds to sum returned gradients, for a number of their bytes.
        few_forward, few_backward: seconds to select the query rows that attend to other ranks' keys, and to add
            results to these rows and to the keys, for a number of query rows over heads.
        long_forward, long_backward: seconds of a (query, key) pair in rows with many keys. The remaining time of the
            attention in `parts` is divided by query rows. 0: not measured, so all of it is divided by pairs.

    Raises:
        ValueError, TypeError: for an invalid argument of the constructor.
    """

    name: str
    dim: int
    depth: int
    heads: int
    head_dim: int
    kv_heads: int
    hidden: int
    vocab: int
    precision: str
    causal: bool
    first: int
    block_parameters: int
    edge_parameters: int
    parts: tuple[Parts, ...]
    optimizer: float
    again: float
    arrive_forward: Line
    arrive_backward: Line
    pack: Line
    add: Line
    few_forward: Line
    few_backward: Line
    long_forward: float = 0.0
    long_backward: float = 0.0

    def __post_init__(self) -> None:
        for name in ("dim", "depth", "heads", "head_dim", "kv_heads", "hidden", "vocab", "first"):
            integer(getattr(self, name), name, 1)
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} must divide heads={self.heads}.")
        one_of(self.precision, "precision", ELEMENT_SIZES)
        for name in ("block_parameters", "edge_parameters", "optimizer", "again", "long_forward", "long_backward"):
            real(getattr(self, name), name, least=0)
        tokens = [p.tokens for p in self.parts]
        if not tokens or tokens != sorted(set(tokens)):
            raise ValueError(f"parts must be a non-empty list with rising tokens, got tokens {tokens}.")

    @property
    def element_size(self) -> int:
        """Bytes of an element of q, k and v."""
        return ELEMENT_SIZES[self.precision]

    @property
    def parameter_size(self) -> int:
        """Bytes of a parameter and of its gradient."""
        return 4 if self.precision.endswith("mixed") else self.element_size

    def at(self, tokens: int) -> Parts:
        """Return the parts at L tokens: interpolated between measured lengths, and proportional to L outside them."""
        integer(tokens, "tokens", 1)
        for low, high in itertools.pairwise(self.parts):
            if low.tokens <= tokens <= high.tokens:
                share = (tokens - low.tokens) / (high.tokens - low.tokens)
                return _sum(tokens, (low, 1 - share), (high, share))
        nearest = self.parts[0] if tokens < self.parts[0].tokens else self.parts[-1]
        return _sum(tokens, (nearest, tokens / nearest.tokens))

    def require(self, **sizes: Any) -> Machine:
        """Return this machine, or raise if the measured model has other sizes.

        Args:
            sizes: fields of the model by name, such as dim=768, causal=True.

        Raises:
            TypeError: for an unknown name.
            ValueError: if fields differ; the message lists them.
        """
        known = [f.name for f in dataclasses.fields(self)][1:11]
        unknown = sorted(set(sizes) - set(known))
        if unknown:
            raise TypeError(f"{unknown[0]!r} is no size of a measured model; its sizes are {', '.join(known)}.")
        wrong = [
            f"{name}={x!r} (measured: {getattr(self, name)!r})" for name, x in sizes.items() if x != getattr(self, name)
        ]
        if wrong:
            raise ValueError(
                f"{self.name} was measured for another model: {', '.join(wrong)}. Measure this one: "
                "python benchmarks/step_parts.py, with its sizes and --output."
            )
        return self

    def save(self, path: str | Path) -> None:
        """Write this machine to a JSON file, which `load` reads."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        """Read a machine from a file that `save` wrote.

        Raises:
            FileNotFoundError: if the file does not exist.
            TypeError, ValueError: if the file has other content; the message names missing or unknown fields.
        """
        try:
            fields = json.loads(Path(path).read_text())
        except (ValueError, RecursionError) as error:  # RecursionError for values nested too deeply
            raise ValueError(
                f"{path} is no JSON: {error}. It should be what benchmarks/step_parts.py --output wrote."
            ) from None
        fields = _checked(path, cls, fields)
        fields["parts"] = tuple(Parts(**_checked(path, Parts, x)) for x in fields["parts"])
        for name in ("arrive_forward", "arrive_backward", "pack", "add", "few_forward", "few_backward"):
            fields[name] = Line(**_checked(path, Line, fields[name]))
        return cls(**fields)


#: times measured on one H100 by benchmarks/recurrence_time.py
RULES = Path(__file__).with_name("h100_recurrence.json")


@dataclass(frozen=True)
class RuleTimes:
    """Measured seconds of the rules of recurrences.

    Attributes:
        name: the device, and the measured versions of software. gpu: the device's name in `gpus.GPUS`.
        tokens, heads, kv_heads, head_dim: sizes of the measured calls; their rows were bf16.
        rules: seconds by kind, then by "forward" or "backward"; "backward" includes a second forward.
    """

    name: str
    gpu: str
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    rules: Mapping[str, Mapping[str, float]]

    def of(self, kind: str, flops: float) -> tuple[float, float]:
        """Return the (forward, backward) seconds of a rule, proportional to its FLOPs (`Recurrence.flops`)."""
        measured = self.tokens * Recurrence(kind).flops(self.heads, self.kv_heads, self.head_dim)
        times = self.rules[kind]
        return times["forward"] * flops / measured, times["backward"] * flops / measured


@functools.cache
def measured_rules() -> RuleTimes:
    """Load the rule times that plans use."""
    return RuleTimes(**_checked(RULES, RuleTimes, json.loads(RULES.read_text())))


def _sum(tokens: int, *shares: tuple[Parts, float]) -> Parts:
    names = [f.name for f in dataclasses.fields(Parts)][1:]
    return Parts(tokens, *(sum(share * getattr(part, name) for part, share in shares) for name in names))


def _checked(path: str | Path, kind: type, fields: Any) -> dict[str, Any]:
    """Return the fields as a dict; raise if their names do not match the dataclass `kind`."""
    every = {f.name for f in dataclasses.fields(kind)}
    required = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING}
    names = set(fields) if isinstance(fields, dict) else set()
    if not required <= names <= every:
        parts = [
            f"{word} {', '.join(sorted(x))}"
            for word, x in (("lacks", required - names), ("has unknown", names - every))
            if x
        ]
        raise ValueError(
            f"{path}: a {kind.__name__} {' and '.join(parts)}. Measure again by benchmarks/step_parts.py --output."
        )
    return dict(fields)
