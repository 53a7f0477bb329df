"""Define hashed attention of a layer as one torch op, for compiled blocks and recomputation. The op saves its inputs.

The backward computes the call again and differentiates it, together with the losses that train the codes. These losses
are no result of the op. `LossTerms` says which queries count and how much, and the backward adds their gradients. With
a `place`, the call is a chunk of a stream; see `chunk.py`.
Shape letters: B batch, N tokens, H query heads, K kv heads, D head dim, G groups of M codes.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_dilated._compat.torch import in_backward, is_fake
from lightning_dilated._ops import Op
from lightning_dilated.ext._compat.torch import autograd_within_op
from lightning_dilated.ext.hashed.chunk import HashedChunk
from lightning_dilated.ext.hashed.functional import BLOCK, HashedLosses, Options, Result, hashed_attention
from lightning_dilated.memory.recompute import KEPT
from lightning_dilated.sequence.group import find_sequence, no_sequence

_terms: weakref.WeakValueDictionary[int, LossTerms] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class LossTerms:
    """The losses of one layer's codes in a training step. The op finds this object by its `number`.

    A copy of a layer has a new object with another number, also in another process.

    Attributes:
        number: int64 on the CPU; a tensor, so that compiled layers share a graph. None in a plan.
        weights: weights of agree, contrast, balance and spread.
        labelled: (B, N) bool, the queries with labels; None outside of the forward and backward of a training step, also
            after a backward that raised an error.
        scale: the gradient of the step's sum of token losses; None outside of its backward.
        latest: sums over labelled queries of the latest forward: agree, contrast, rows, and the number of queries.
    """

    def __init__(self, weights: tuple[float, float, float, float]) -> None:
        index, self.weights = next(_numbers), weights
        number = torch.tensor(index, device="cpu")
        self.number = None if is_fake(number) else number  # no constant of a graph may be fake
        self.end()
        self.latest: Tensor | None = None
        _terms[index] = self

    def end(self) -> None:
        """Count no queries."""
        self._labelled: Tensor | None = None
        self.scale: Tensor | None = None

    @property
    def labelled(self) -> Tensor | None:
        if self.scale is not None and not in_backward():  # the backward with this scale raised an error
            self.end()
        return self._labelled

    @labelled.setter
    def labelled(self, labelled: Tensor | None) -> None:
        self._labelled = labelled

    def __reduce__(self) -> tuple[Any, ...]:
        return LossTerms, (self.weights,)

    def total(self, losses: HashedLosses, count: Tensor) -> Tensor:
        """Return the weighted sum over labelled queries.

        A sample's balance and spread count once for each of its labelled queries, `count` (B,).
        """
        agree, contrast, balance, spread = self.weights
        by_query = (agree * losses.agree + contrast * losses.contrast).mean(-1).sum()
        by_sample = (balance * losses.balance + spread * losses.spread).mean(-1)
        return by_query + (count * by_sample).sum()

    def statistics(self, losses: HashedLosses | Result, labelled: Tensor) -> Tensor:
        """Return the values of `latest`."""
        by_query = losses.agree.mean(-1), losses.contrast.mean(-1), losses.rows.double().mean(-1) * labelled, labelled
        return torch.stack([x.sum().double() for x in by_query])


class HashedSpec(NamedTuple):
    """Arguments of a call that are no tensors. `encode` converts them to a string, because an op takes no objects.

    Attributes:
        soft: whether queries read all rows, and scores do not depend on codes.
        sequence: name of the `SequenceGroup` that shares the sequence, or "" for one rank; or name of the stream.
    """

    latest: int
    probes: int
    scale: float
    soft: bool
    sequence: str = ""

    @classmethod
    def decode(cls, code: str) -> HashedSpec:
        """Decode a string that `encode` returned."""
        latest, probes, scale, soft, sequence = code.split("|", 4)
        return cls(int(latest), int(probes), float.fromhex(scale), soft == "1", sequence)

    def options(self) -> Options:
        """Return the `Options` of `hashed_attention`."""
        return Options(self.latest, self.probes, self.scale, self.soft, not self.soft)

    def settings(self) -> dict[str, Any]:
        """Return the keyword arguments of `hashed_attention`."""
        shared = {"sequence": find_sequence(self.sequence)} if self.sequence else {}
        return {**self.options()._asdict(), **shared}


def encode(latest: int, probes: int, scale: float, soft: bool, sequence: str = "") -> str:
    """Encode a `HashedSpec` as a string. torch.compile can trace this function."""
    return f"{latest}|{probes}|{float(scale).hex()}|{int(soft)}|{sequence}"


def run_forward(*args: Any) -> tuple[Tensor, Tensor]:
    """Return the output (B, N, H, D), and which queries the losses count, (B, N) bool; none outside of training."""
    (*tensors, lengths, cu_seqlens, place, number, code), q = args, args[0]
    spec = HashedSpec.decode(code)
    terms = None if number is None else _terms.get(int(number))
    if place is not None:
        return HashedChunk(tensors, lengths, cu_seqlens, place, spec.sequence, spec.options()).forward(terms)
    labelled = None if terms is None else terms.labelled
    counted = q.new_zeros(q.shape[:2], dtype=torch.bool) if labelled is None else labelled.clone()
    with no_sequence():
        limits = {"lengths": lengths, "cu_seqlens": cu_seqlens, "labelled": counted}
        out, losses = hashed_attention(*tensors, **limits, **spec.settings())
    if terms is not None and labelled is not None:
        terms.latest = terms.statistics(losses, counted)
    return out, counted


def run_backward(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, z_q, z_k and null."""
    *tensors, lengths, cu_seqlens, place, number, labelled, code = args
    spec = HashedSpec.decode(code)
    terms = None if number is None else _terms.get(int(number))
    if place is not None:
        chunk = HashedChunk(tensors, lengths, cu_seqlens, place, spec.sequence, spec.options())
        with autograd_within_op(), torch.enable_grad():
            return chunk.backward(grad, labelled, terms)
    with no_sequence(), autograd_within_op(), torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in tensors]
        limits = {"lengths": lengths, "cu_seqlens": cu_seqlens, "labelled": labelled}
        out, losses = hashed_attention(*inputs, **limits, **spec.settings())
        outputs, grads = [out], [grad]
        if terms is not None and terms.scale is not None:
            total = terms.total(losses, labelled.sum(1))
            outputs.append(total)
            grads.append(terms.scale.to(total.dtype))
        results = torch.autograd.grad(outputs, inputs, grads, allow_unused=True, materialize_grads=True)
    return tuple(x.contiguous() for x in results)


# -- functions that torch needs to register an op ----------------------------------------------------------------------
def fake_forward(q, *others):
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:2], dtype=torch.bool)


def fake_backward(grad, *args):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in args[:6])


def flops(q: Tensor, k: Tensor, v: Tensor, z_q: Tensor, *others: Any) -> int:
    """Return the FLOPs of a forward, including padding; the last argument is the encoded spec."""
    spec = HashedSpec.decode(others[-1])
    sizes = q.shape[2], k.shape[2], q.shape[3], z_q.shape[3] * z_q.shape[4]
    rows = q.shape[1] if spec.soft else spec.latest
    return q.shape[0] * q.shape[1] * token_flops(rows, 1 if spec.soft else spec.probes, *sizes)


def token_flops(rows: int, lookups: int, heads: int, kv_heads: int, head_dim: int, codes: int) -> int:
    """Return the FLOPs that a token needs if a block of sorted entries computes all rows that it may read."""
    return (1 + lookups) * (BLOCK + rows) * (4 * heads * head_dim + 2 * kv_heads * codes)


def twice_flops(grad: Tensor, *args: Any) -> int:
    return 2 * flops(*args)


ROWS = "Tensor q, Tensor k, Tensor v, Tensor z_q, Tensor z_k, Tensor null"
ROWS += ", Tensor? lengths, Tensor? cu_seqlens, Tensor? place, Tensor? terms"
GRADIENTS = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"

_OP = Op(
    "hashed",
    schemas=(
        f"({ROWS}, str spec) -> (Tensor, Tensor)",
        f"(Tensor grad, {ROWS}, Tensor labelled, str spec) -> {GRADIENTS}",
    ),
    caller="hashed attention of a layer",
    remedy="Leave out create_graph=True.",
    run=(run_forward, run_backward),
    fake=(fake_forward, fake_backward),
    saves=lambda args, results: ((*args[:-1], results[1]), args[-1]),
    arguments=lambda grad, saved, spec: (grad, *saved, spec),
    flops=(flops, twice_flops),
)
HASHED, HASHED_BACKWARD = _OP.forward, _OP.backward
KEPT.append(HASHED)
