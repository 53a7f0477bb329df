"""Random calls of recurrent_attention that continue earlier tokens, and their results by the definition.

Shape letters: B batch, N tokens, H query heads, K kv heads, D head dim, E value dim, S documents (or samples).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from lightning_dilated import RecurrentState, recurrent_attention
from lightning_dilated.ext.recurrence.rules import oracle
from lightning_dilated.recurrence.description import KINDS

#: names of the inputs in gradients
NAMES = ("q", "k", "v", "log_decay", "beta")
#: log_decay of a token after which little or nothing of the state is left; two times the last exceeds fp32's range
RESETS = (-1.0, -80.0, -1e4, -1e6, -1e9, -3e38)


@dataclass(frozen=True)
class Case:
    """All arguments of a call except the tensors' values. `documents`: tokens of each sample or, if `packed`, document.

    Attributes:
        earlier: tokens of each document in an earlier call; None: the call gets no state.
        padding: number of tokens after the longest sample.
        chunk: chunk length of gated_delta.
        reset: log_decay of every third token; None: all values are random.
    """

    kind: str
    documents: tuple[int, ...]
    packed: bool = False
    earlier: tuple[int, ...] | None = None
    padding: int = 0
    segment: int = 4
    causal: bool = True
    kv_heads: int = 2
    group: int = 2
    dim: int = 3
    values: int = 2
    chunk: int = 64
    dtype: torch.dtype = torch.float64
    reset: float | None = None

    @property
    def batch(self) -> int:
        return 1 if self.packed else len(self.documents)

    @property
    def seq_len(self) -> int:
        return sum(self.documents) if self.packed else max(self.documents) + self.padding

    def bounds(self, document: int) -> tuple[int, int, int]:
        """Return (sample, first, stop) of a document within (B, N)."""
        if not self.packed:
            return document, 0, self.documents[document]
        start = sum(self.documents[:document])
        return 0, start, start + self.documents[document]

    def tensors(self, seq_len: int | None = None, batch: int | None = None, seed: int = 0) -> tuple[Tensor, ...]:
        """Draw (q, k, v) and, for gated_delta, also (log_decay, beta), as leaves."""
        b, n = batch or self.batch, self.seq_len if seq_len is None else seq_len
        g = torch.Generator().manual_seed(seed)
        random = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64)  # noqa: E731
        k, d, e = self.kv_heads, self.dim, self.values
        tensors = [random(b, n, k * self.group, d), random(b, n, k, d), random(b, n, k, e)]
        if self.kind == "gated_delta":
            tensors += [-random(b, n, k).square(), random(b, n, k).sigmoid()]
            if self.reset is not None:
                tensors[3][:, ::3] = self.reset
        return tuple(x.to(self.dtype).requires_grad_() for x in tensors)

    def settings(self) -> dict[str, Any]:
        segment = None if self.kind == "gated_delta" else self.segment
        return {"kind": self.kind, "segment": segment, "causal": self.causal}

    def limits(self) -> dict[str, Any]:
        """Return the argument `lengths` or `cu_seqlens` of this call."""
        if self.packed:
            return {"cu_seqlens": torch.tensor([0, *accumulate(self.documents)], dtype=torch.int32)}
        equal = len(set(self.documents)) == 1 and not self.padding
        return {} if equal else {"lengths": list(self.documents)}

    def past(self) -> tuple[Tensor, ...]:
        """Draw the earlier tokens, with documents packed one after the other."""
        return self.tensors(sum(self.earlier or ()), 1, seed=1)

    def state(self, past: tuple[Tensor, ...]) -> RecurrentState | None:
        """Return the state after the earlier tokens."""
        if self.earlier is None:
            return None
        bounds = [0, *accumulate(self.earlier)]
        return recurrent_attention(*past, **self.settings(), cu_seqlens=bounds, return_state=True)[1]

    def weights(self, *shape: int, seed: int = 2) -> Tensor:
        """Draw the weights with which a result counts in the loss."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def loss(self, out: Tensor, states: tuple[Tensor, ...]) -> Tensor:
        """Return the loss of the output (B, N, H, E) and of the state's matrix and normalizer, each (S, ...)."""
        return sum((x * self.weights(*x.shape, seed=2 + i)).sum() for i, x in enumerate((out, *states)))

    def run(self) -> dict[str, Tensor]:
        """Run recurrent_attention. Return its results, and gradients for current and earlier tokens."""
        tensors, past = self.tensors(), self.past()
        settings = {**self.settings(), **self.limits()}
        if not self.causal:
            return self.results(recurrent_attention(*tensors, **settings), (), tensors, past)
        out, state = recurrent_attention(*tensors, **settings, state=self.state(past), return_state=True)
        assert state.tokens.tolist() == [sum(x) for x in zip(self.documents, self.all_earlier(), strict=True)]
        return self.results(out, self.summary(state), tensors, past)

    def summary(self, state: RecurrentState) -> tuple[Tensor, ...]:
        return state.floating()[:2]

    def all_earlier(self) -> tuple[int, ...]:
        return self.earlier or (0,) * len(self.documents)

    def results(
        self, out: Tensor, states: tuple[Tensor, ...], tensors: tuple[Tensor, ...], past: tuple[Tensor, ...]
    ) -> dict[str, Tensor]:
        """Return results and gradients by name."""
        every = (*tensors, *past)
        loss = self.loss(out, states) + 0 * sum(x.sum() for x in every)  # gives all inputs a gradient
        grads = torch.autograd.grad(loss, every)
        names = [*NAMES[: len(tensors)], *(f"earlier {name}" for name in NAMES[: len(past)])]
        named = {"out": out.detach(), **{f"state {i}": x.detach() for i, x in enumerate(states)}}
        return named | {f"d {name}": x for name, x in zip(names, grads, strict=True)}

    def by_definition(self) -> dict[str, Tensor]:
        """Compute the same results with the oracle, document by document."""
        tensors, past = self.tensors(), self.past()
        out = torch.zeros(self.batch, self.seq_len, self.kv_heads * self.group, self.values, dtype=torch.float64)
        states = []
        before = [0, *accumulate(self.all_earlier())]
        for number, (start, stop) in enumerate(pairwise(before)):
            sample, first, last = self.bounds(number)
            rows = [torch.cat([p[0, start:stop], x[sample, first:last]]) for p, x in zip(past, tensors, strict=True)]
            settings = {**self.settings(), "segment": self.segment}
            result = oracle(*rows, **settings)
            out = out.index_put((torch.tensor(sample), torch.arange(first, last)), result.out[stop - start :])
            states.append((result.matrix, result.normalizer))
        matrix, normalizer = (torch.stack(x) for x in zip(*states, strict=True))
        every = () if not self.causal else (matrix,) if self.kind == "gated_delta" else (matrix, normalizer)
        return self.results(out, every, tensors, past)


def compare(got: dict[str, Tensor], want: dict[str, Tensor], tol: float = 1e-10) -> None:
    """Assert that results and gradients are equal, up to `tol` times the largest value or 1."""
    assert got.keys() == want.keys()
    for name, x in want.items():
        scale = max(1.0, float(x.abs().max()) if x.numel() else 0.0)
        torch.testing.assert_close(
            got[name], x, rtol=0, atol=tol * scale, msg=lambda text, name=name: f"{name}: {text}"
        )


@st.composite
def cases(draw: st.DrawFn, longest: int = 30) -> Case:
    """Draw any call with one to three documents."""
    kind = draw(st.sampled_from(KINDS))
    documents = tuple(draw(st.lists(st.integers(0, longest), min_size=1, max_size=3)))
    packed, causal = draw(st.booleans()), kind != "linear" or draw(st.booleans())
    earlier = None
    if causal and draw(st.booleans()):
        earlier = tuple(draw(st.integers(0, 12)) for _ in documents)
    return Case(
        kind,
        documents,
        packed,
        earlier,
        0 if packed else draw(st.integers(0, 3)),
        segment=draw(st.integers(1, 12)),
        causal=causal,
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        dim=draw(st.integers(1, 5)),
        values=draw(st.integers(1, 4)),
        chunk=draw(st.integers(1, 12)),
        reset=draw(st.sampled_from([None, *RESETS])),
    )
