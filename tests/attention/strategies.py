"""Random calls of dilated_attention: a random pattern with random shapes, strides, documents and options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from lightning_dilated.attention import dilated_attention
from lightning_dilated.attention.oracle import oracle
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import counts, pads

from ..pattern.strategies import documents, head_counts, patterns

LAYOUTS = ("contiguous", "fused", "transposed", "expanded kv", "D strided")


@dataclass(frozen=True)
class Case:
    """All arguments of one call except the tensors' values. A failing test prints the repr."""

    pattern: DilatedPattern
    batch: int
    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = False
    lengths: tuple[int, ...] | None = None
    documents: tuple[int, ...] | None = None
    scale: float | None = None
    layout: str = "contiguous"

    def tensors(self, dtype: torch.dtype = torch.float64, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw (q, k, v, grad); q, k, v are leaves with the strides of `layout`."""
        g = torch.Generator().manual_seed(self.seq_len * 31 + self.heads)
        b, n, h, kv, d = self.batch, self.seq_len, self.heads, self.kv_heads, self.head_dim
        random = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64).to(device, dtype)  # noqa: E731
        if self.layout == "fused":
            q, k, v = random(b, n, h + 2 * kv, d).split([h, kv, kv], dim=2)
        elif self.layout == "transposed":
            q, k, v = (random(b, heads, n, d).transpose(1, 2) for heads in (h, kv, kv))
        elif self.layout == "expanded kv":
            q, k, v = random(b, n, h, d), random(b, n, 1, d).expand(b, n, kv, d), random(b, n, 1, d).expand(b, n, kv, d)
        elif self.layout == "D strided":
            q, k, v = (random(b, n, d, heads).transpose(2, 3) for heads in (h, kv, kv))
        else:
            q, k, v = (random(b, n, heads, d) for heads in (h, kv, kv))
        # in models, the gradient is an expanded tensor after a sum, and a transposed one after a projection
        grad = random(b, n, 1, 1).expand(b, n, h, d) if self.layout == "fused" else random(b, h, n, d).transpose(1, 2)
        return *(x.detach().requires_grad_() for x in (q, k, v)), grad

    def options(self) -> dict[str, Any]:
        """Return the options that dilated_attention and the oracle share."""
        return {
            "causal": self.causal,
            "scale": self.scale,
            "lengths": None if self.lengths is None else torch.tensor(self.lengths, dtype=torch.int64),
            "cu_seqlens": None if self.documents is None else torch.tensor(self.documents, dtype=torch.int32),
        }

    def run(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return dilated_attention(q, k, v, self.pattern, **{**self.options(), **options})

    def oracle(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return (out, lse) as the oracle computes them."""
        return oracle(q, k, v, self.pattern, **self.options())

    def spans(self) -> list[tuple[int, int, int]]:
        """Return (sample, start, stop) of every document."""
        if self.documents is not None:
            return [(0, a, b) for a, b in pairwise(self.documents)]
        return [(i, 0, n) for i, n in enumerate(self.lengths or [self.seq_len] * self.batch)]

    def counts(self) -> tuple[Tensor, Tensor]:
        """Return the pair counts c (B, H, N, N) and the numbers of pads n_pad (B, H, N), in float64."""
        c = torch.zeros(self.batch, self.heads, self.seq_len, self.seq_len, dtype=torch.float64)
        n_pad = torch.zeros(self.batch, self.heads, self.seq_len, dtype=torch.float64)
        for i, a, b in self.spans():
            c[i, :, a:b, a:b] = counts(self.pattern, b - a, self.heads, self.causal, self.kv_heads).double()
            n_pad[i, :, a:b] = pads(self.pattern, b - a, self.heads, self.causal, self.kv_heads).double()
        return c, n_pad

    def refused(self) -> bool:
        """Return whether padding="attended" is undefined: w' mod r != 0 in a document of several segments."""
        return self.pattern.padding == "attended" and any(
            n > w and w % branch.dilation_rate
            for n in (b - a for _, a, b in self.spans())
            for branch in self.pattern.branches
            for w in [n if branch.segment_length is None else min(branch.segment_length, n)]
        )

    def but(self, **changes: Any) -> Case:
        """Return a copy of the case with some fields replaced."""
        return replace(self, **changes)


@st.composite
def cases(draw, padding: str = "masked", longest: int = 64):
    """Draw any allowed call. With padding="attended", the call may also be one for which `Case.refused` is true."""
    heads, kv = draw(head_counts())
    n = draw(st.integers(0, longest))
    kind = draw(st.sampled_from(["whole", "lengths", "documents"]))
    batch = 1 if kind == "documents" else draw(st.sampled_from([1, 2, 3, 0]))
    return Case(
        pattern=draw(patterns(heads, kv, padding=padding)),
        batch=batch,
        seq_len=n,
        heads=heads,
        kv_heads=kv,
        head_dim=draw(st.sampled_from([8, 1, 5, 16])),
        causal=draw(st.booleans()),
        lengths=tuple(draw(st.integers(0, n)) for _ in range(batch)) if kind == "lengths" else None,
        documents=draw(documents(n)) if kind == "documents" else None,
        scale=draw(st.sampled_from([None, 0.3, 1])),
        layout=draw(st.sampled_from(LAYOUTS)),
    )
