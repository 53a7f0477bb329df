"""The calls that `verify` makes on many ranks, the one rank's answer by definition, and the comparison of the two.

Shape letters: B batch, N tokens of the sequence, L tokens of a rank, H query heads, D head dim, R ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_dilated.attention import dilated_attention
from lightning_dilated.attention.oracle import oracle
from lightning_dilated.models import LongNetLM
from lightning_dilated.pattern import Branch, DilatedPattern
from lightning_dilated.sequence import Place, SequenceGroup, SequenceSpec, loss_sum, make_problem, plan

#: (pattern, query heads, kv heads)
PATTERNS = {
    "nested": (DilatedPattern.geometric(8, 64), 8, 4),
    "ragged": (DilatedPattern([(7, 1), Branch(30, 3, shift=9), (None, 5)]), 6, 3),
    "blocked": (DilatedPattern.longnet([12, 50], [1, 4], offsets="blocked"), 4, 4),
    "head groups": (DilatedPattern.head_groups([16, 96], [1, 3], num_heads=6), 6, 2),
    "one head": (DilatedPattern([(16, 1), (None, 3)]), 1, 1),  # ranks of larger head groups hold none
}
LENGTHS = (64, 61)
EXCHANGES = ("gather", "ring", "switch", "butterfly", "auto")
HEAD_DIM = 16
#: largest error, of the largest value, that counts as agreement; by the dtype of q, k and v
ALLOWED = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}
ATTENTION = ("out", "dq", "dk", "dv")
MODEL = ("loss", "gradients")
#: of a training step's model and batch
STEP = {
    "pattern": DilatedPattern.longnet([8, 16, 64], [1, 2, 4]),
    "vocab_size": 11,
    "dim": 16,
    "depth": 2,
    "num_heads": 4,
}


@dataclass(frozen=True)
class Check:
    """One call, or with pattern "LongNetLM" one training step's loss and gradients."""

    pattern: str
    seq_len: int
    causal: bool = True
    exchange: str = "auto"
    layout: str = "contiguous"
    head_size: int = 1
    dtype: str = "float64"

    @property
    def names(self) -> tuple[str, ...]:
        """What is compared."""
        return MODEL if self.pattern == "LongNetLM" else ATTENTION

    def settings(self) -> dict[str, Any]:
        """What `SequenceGroup` takes."""
        return {"exchange": self.exchange, "layout": self.layout, "head_size": self.head_size}

    def served(self, ranks: int) -> bool:
        """Whether the exchange serves the call on R ranks; the others refuse theirs by name."""
        if ranks % self.head_size:
            return False
        pattern, heads, kv_heads = PATTERNS[self.pattern]
        sizes = {"ranks": ranks, "layout": self.layout, "causal": self.causal, "head_size": self.head_size}
        try:
            plan(make_problem(pattern, self.seq_len, heads, kv_heads, **sizes), self.exchange, head_dim=HEAD_DIM)
        except ValueError:
            return False
        return True


@dataclass(frozen=True)
class Verdict:
    """Errors by name, relative to the largest value; `note` says what is wrong where no error can be told."""

    check: Check
    errors: dict[str, float]
    note: str = ""

    @property
    def agrees(self) -> bool:
        """Whether everything was found, and is within what the dtype allows; NaN is not."""
        within = [self.errors.get(name, torch.inf) <= ALLOWED[self.check.dtype] for name in self.check.names]
        return not self.note and all(within)


def matrix(ranks: int, dtypes: Sequence[str], quick: bool = False) -> list[Check]:
    """All checks on R ranks."""
    patterns = list(PATTERNS)[:2] if quick else list(PATTERNS)
    exchanges = ("ring", "butterfly", "auto") if quick else EXCHANGES
    ways = [("contiguous", e, h) for e, h in itertools.product(exchanges, (1, 2, 4))]
    ways += (
        [] if quick else [(layout, e, 1) for layout, e in itertools.product(("zigzag", "strided"), ("ring", "auto"))]
    )
    found = [
        Check(pattern, n, causal, exchange, layout, head_size, dtype)
        for dtype, pattern, n, causal in itertools.product(dtypes, patterns, LENGTHS[quick:], (True, False))
        for layout, exchange, head_size in ways
    ]
    steps = [Check("LongNetLM", 61, layout=layout) for layout in ("contiguous", "zigzag")[: 1 if quick else 2]]
    return [check for check in found if check.served(ranks)] + steps


def tensors(check: Check, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, k, v, grad), random and the same everywhere: (1, N, H or K, D)."""
    made = torch.Generator().manual_seed(check.seq_len)
    _, heads, kv_heads = PATTERNS[check.pattern]
    rows = (torch.randn(1, check.seq_len, h, HEAD_DIM, generator=made) for h in (heads, kv_heads, kv_heads, heads))
    return tuple(x.to(device, getattr(torch, check.dtype)).to(dtype) for x in rows)


def _gradients(check: Check, out: Tensor, leaves: Sequence[Tensor], grad: Tensor) -> dict[str, Tensor]:
    found = (out, *torch.autograd.grad(out, leaves, grad))
    return {name: x.detach().double().cpu() for name, x in zip(check.names, found, strict=True)}


def _batch(check: Check) -> dict[str, Tensor]:
    tokens = torch.randint(STEP["vocab_size"], (2, check.seq_len + 1), generator=torch.Generator().manual_seed(1))
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "index": torch.arange(2)}


def _step(batch: dict[str, Tensor], device: str) -> dict[str, Tensor]:
    """Loss of all ranks, and this rank's part of all parameters' gradients, of a model that is the same everywhere."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = LongNetLM(**STEP)
        model.configure_model()
    model = model.double().to(device)
    share, _ = model.token_mean({name: x.to(device) for name, x in batch.items()})
    grads = torch.autograd.grad(share, list(model.parameters()))
    return {"loss": loss_sum(share).cpu(), "gradients": torch.cat([g.flatten() for g in grads]).cpu()}


def by_definition(check: Check) -> dict[str, Tensor]:
    """One rank's answer: by the oracle; of a training step, as one rank makes it."""
    if check.pattern == "LongNetLM":
        return _step(_batch(check), "cpu")
    *leaves, grad = tensors(check, torch.float64, "cpu")
    leaves = [x.requires_grad_() for x in leaves]
    out, _ = oracle(*leaves, PATTERNS[check.pattern][0], causal=check.causal)
    return _gradients(check, out, leaves, grad)


def alone(check: Check, device: str) -> dict[str, Tensor]:
    """The same call by this machine's own engine, on one rank."""
    *leaves, grad = tensors(check, getattr(torch, check.dtype), device)
    leaves = [x.requires_grad_() for x in leaves]
    return _gradients(check, dilated_attention(*leaves, PATTERNS[check.pattern][0], causal=check.causal), leaves, grad)


def parts(rank: int, device: str, checks: Sequence[Check]) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """(global positions, results) of this rank's part of every check."""
    for check in checks:
        group = SequenceGroup(**check.settings())
        try:
            held = group.shard(check.seq_len).ranges(group.rank)
            at = [p for x in held for p in x]
            with group.active():
                yield at, _part(check, at, group, device)
        finally:
            group.close()


def _part(check: Check, at: list[int], group: SequenceGroup, device: str) -> dict[str, Tensor]:
    if check.pattern == "LongNetLM":
        spec = SequenceSpec({"tokens": 1, "labels": 1}, whole=["index"])
        return _step(spec.cut(_batch(check), Place(group.ranks, group.rank, group.layout)), device)
    *leaves, grad = (x[:, at].contiguous() for x in tensors(check, getattr(torch, check.dtype), device))
    leaves = [x.requires_grad_() for x in leaves]
    out = dilated_attention(*leaves, PATTERNS[check.pattern][0], causal=check.causal)
    return _gradients(check, out, leaves, grad)


def compare(check: Check, want: dict[str, Tensor], found: Sequence[tuple[list[int], dict[str, Tensor]]]) -> Verdict:
    """All ranks' parts, put together, against one rank's answer."""
    held = [p for at, _ in found for p in at]
    if sorted(held) != list(range(check.seq_len)):
        return Verdict(check, {}, "the ranks' positions are not those of the sequence, each once")
    order = torch.tensor(held).argsort()
    whole = {}
    for name in check.names:
        each = [got[name] for _, got in found]
        if name == "loss":  # every rank says the loss of all
            whole[name] = max(each, key=lambda x: float((x - want["loss"]).abs().nan_to_num(nan=torch.inf)))
        else:
            whole[name] = sum(each) if name == "gradients" else torch.cat(each, 1)
        if whole[name].shape != want[name].shape:
            return Verdict(check, {}, f"{name} is {tuple(whole[name].shape)} and should be {tuple(want[name].shape)}")
        whole[name] = whole[name] if check.names == MODEL else whole[name][:, order]
    return Verdict(check, {name: _error(whole[name], want[name].detach()) for name in check.names})


def _error(got: Tensor, want: Tensor) -> float:
    """The largest difference, of the largest value."""
    return float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1e-2))
