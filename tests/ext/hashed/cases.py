"""Random calls of hashed_attention, and their results by the engine and by the oracle.

Shape letters: B batch, N tokens, H query heads, K kv heads, D head dim, G groups of M codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from lightning_dilated.attention import hashed_attention
from lightning_dilated.ext.hashed.oracle import oracle

#: names of the tensors
NAMES = ("q", "k", "v", "z_q", "z_k", "null")
#: names of the losses
LOSSES = ("agree", "contrast", "balance", "spread")


@dataclass(frozen=True)
class Case:
    """One call without the values of its tensors. `documents`: number of tokens of each sample or, if packed, document.

    Attributes:
        padding: tokens after the longest sample.
        whole: whether logits are integers from 0 to 2, so that many are equal.
    """

    documents: tuple[int, ...]
    packed: bool = False
    padding: int = 0
    kv_heads: int = 1
    group: int = 2
    dim: int = 3
    groups: int = 2
    codes: int = 2
    latest: int = 4
    probes: int = 1
    scale: float | None = None
    soft: bool = False
    code_scores: bool = True
    whole: bool = False
    dtype: torch.dtype = torch.float64

    @property
    def batch(self) -> int:
        return 1 if self.packed else len(self.documents)

    @property
    def seq_len(self) -> int:
        return sum(self.documents) if self.packed else max(self.documents) + self.padding

    def tensors(self, seed: int = 0) -> tuple[Tensor, ...]:
        """Draw q, k, v, z_q, z_k and null, as leaves."""
        generator = torch.Generator().manual_seed(seed)
        random = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
        tokens, heads = (self.batch, self.seq_len), self.kv_heads * self.group
        q, k, v = (random(*tokens, n, self.dim) for n in (heads, self.kv_heads, self.kv_heads))
        z_q, z_k = (2 * random(*tokens, self.kv_heads, self.groups, self.codes) for _ in range(2))
        if self.whole:
            z_q, z_k = (z.round().clamp(0, 2) for z in (z_q, z_k))
        return tuple(x.to(self.dtype).requires_grad_() for x in (q, k, v, z_q, z_k, random(heads)))

    def settings(self) -> dict[str, Any]:
        """Return all arguments except the tensors."""
        words = ("latest", "probes", "scale", "soft", "code_scores")
        settings: dict[str, Any] = {word: getattr(self, word) for word in words}
        if self.packed:
            settings["cu_seqlens"] = [0, *accumulate(self.documents)]
        elif len(set(self.documents)) > 1 or self.padding:
            settings["lengths"] = list(self.documents)
        return settings

    def run(self, call: Callable[..., Any] = hashed_attention, device: str = "cpu") -> dict[str, Tensor]:
        """Return out, losses, counts of rows, and the gradients of a weighted sum of results, in float64."""
        tensors = [x.detach().to(device).requires_grad_() for x in self.tensors()]
        out, losses = call(*tensors, **self.settings())
        results = {"out": out, **{name: getattr(losses, name) for name in LOSSES}}
        loss = sum((x.double().cpu() * weights(x.shape, i)).sum() for i, x in enumerate(results.values()))
        grads = torch.autograd.grad(loss, tensors)
        results |= {f"d {name}": x for name, x in zip(NAMES, grads, strict=True)}
        return {name: x.detach().double().cpu() for name, x in (results | {"rows": losses.rows}).items()}

    def by_definition(self) -> dict[str, Tensor]:
        """Return the same results computed by the oracle."""
        return self.run(oracle)


def weights(shape: torch.Size, seed: int) -> Tensor:
    """Draw the weights with which a result counts in the loss."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 + seed), dtype=torch.float64)


def compare(
    got: dict[str, Tensor], want: dict[str, Tensor], tol: float = 1e-10, summed: dict[str, float] | None = None
) -> None:
    """Assert that counts are equal, and that other results differ by at most `tol` times the largest value.

    A result in `summed` may nearly cancel. If the given size of its terms is larger than its largest value, the size counts.
    """
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert got[name].shape == x.shape, name
        size = max(1.0, x.abs().max().item() if x.numel() else 0.0, (summed or {}).get(name, 0.0))
        allowed = 0 if name == "rows" else tol * size
        torch.testing.assert_close(got[name], x, rtol=0, atol=allowed, msg=lambda text, name=name: f"{name}: {text}")


@st.composite
def cases(draw: st.DrawFn, longest: int = 10) -> Case:
    """Draw any call with several documents."""
    groups, codes = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    soft = draw(st.integers(0, 3)) == 0
    packed = draw(st.booleans())
    return Case(
        tuple(draw(st.lists(st.integers(0, longest), min_size=1, max_size=4))),
        packed,
        0 if packed else draw(st.integers(0, 2)),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        dim=draw(st.integers(1, 4)),
        groups=groups,
        codes=codes,
        latest=draw(st.integers(1, 20)),
        probes=draw(st.integers(1, groups + 1)) if codes > 1 else 1,
        scale=draw(st.sampled_from([None, 0.3, -2.0, 0.0])),
        soft=soft,
        code_scores=not soft or draw(st.booleans()),
        whole=draw(st.booleans()),
    )
