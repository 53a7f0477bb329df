"""Engine: dense attention with log-sum-exp over one block, its requirements, and the merge of two results.

Shape letters: G samples and segments, J heads, n query rows, m key rows, D head dim.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_dilated.attention.dropout import PairDropout

Forward = Callable[..., tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


class Band(NamedTuple):
    """The pairs of a block that are computed: query row i and key row j with lower <= j - i <= upper."""

    lower: int
    upper: int


class Terms(NamedTuple):
    """Arguments of an engine besides rows.

    Attributes:
        causal: whether query row i sees only key rows up to i; ignored if there is a band.
        scale: the factor of q.k.
        dropout: the dropout of pairs; None means no dropout.
        band: the pairs that are computed; None means all pairs. Only engines with `bands` support a band.
    """

    causal: bool
    scale: float
    dropout: PairDropout | None = None
    band: Band | None = None


@dataclass(frozen=True)
class Request:
    """The requirements of a call.

    Attributes:
        dropout: whether attention weights are dropped.
        scale: the factor of q.k.
        block_flops: mean FLOPs of a block, see `grouped.block_flops`; infinite if the blocks cannot share a few launches.
        capability: compute capability of a GPU that this machine may not have; None means the device's capability.
        changing: whether shapes of blocks change from call to call, as with documents of different lengths.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    dropout: bool = False
    scale: float = 1.0
    block_flops: float = math.inf
    capability: tuple[int, int] | None = None
    changing: bool = False

    @classmethod
    def of(cls, q: Tensor, dropout: float = 0.0, scale: float | None = None) -> Request:
        """Return the request of attention over `q` (B, N, H, D)."""
        return cls(q.device, q.dtype, q.shape[-1], dropout > 0, 1.0 if scale is None else scale)


@dataclass(frozen=True)
class Engine:
    """One way to compute a block.

    forward(q, k, v, terms) takes strided views of q (G, J, n, D) and of k, v (G, J, m, D), m = n if causal, and returns
    out (G, J, n, D) and its natural log-sum-exp (G, J, n).
    backward(grad, q, k, v, out, lse, terms) takes the *merged* out and lse of the block's rows and returns dq, dk, dv.
    `terms` are `Terms`. If they have a band, every query row must see a key. Tests check every attribute.

    Attributes:
        devices: supported device types; () means any.
        dtypes: supported dtypes; () means all floating dtypes.
        max_head_dim, head_dim_multiple: limits of the head dim.
        dropout: whether it applies `PairDropout` exactly, in both passes.
        bands: whether it supports a `Band`.
        empty: whether a call without rows is safe (the op never makes such a call).
        alignment: the alignment that every row needs, in bytes.
        deterministic: whether every run gives the same bits, in both passes.
        any_scale: whether a scale of 0 or below gives correct results.
        rows_in_place: whether the results have the layout of q if q's rows are adjacent.
        forward_into: None, or forward(..., into), which updates a running state in place: into = (out (B, L, H, D),
            lse (B, H, L), flat rows of out for the query rows (G, J, n), number of additional zero keys).
        min_rows: minimum number of query rows and key rows; the math engine computes smaller blocks.
        available: a function that returns None for a device that can run the engine, else the reason why it cannot.
    """

    name: str
    forward: Forward
    backward: Backward
    devices: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    dropout: bool = False
    bands: bool = False
    empty: bool = False
    alignment: int = 1
    deterministic: bool = True
    any_scale: bool = True
    rows_in_place: bool = False
    forward_into: Callable[..., None] | None = None
    min_rows: int = 1
    available: Callable[[torch.device], str | None] = lambda device: None

    def why_not(self, request: Request) -> str | None:
        """Return the reason why the engine cannot serve the request; None if it can."""
        if self.devices and request.device.type not in self.devices:
            return f"runs on {', '.join(self.devices)}, not on {request.device.type}"
        if self.dtypes and request.dtype not in self.dtypes:
            names = ", ".join(str(d).removeprefix("torch.") for d in self.dtypes)
            return f"takes {names}, not {str(request.dtype).removeprefix('torch.')}"
        if self.max_head_dim is not None and request.head_dim > self.max_head_dim:
            return f"takes a head dim up to {self.max_head_dim}, not {request.head_dim}"
        if request.head_dim % self.head_dim_multiple:
            return f"takes a head dim that is a multiple of {self.head_dim_multiple}, not {request.head_dim}"
        if request.dropout and not self.dropout:
            return "has no attention dropout that is exact in the backward and independent of tiles"
        if not self.deterministic and torch.are_deterministic_algorithms_enabled():
            return "differs in the last bits from run to run, and torch.use_deterministic_algorithms is on"
        # kernels receive the scale in float32, in which a tiny scale becomes 0
        if not self.any_scale and struct.unpack("f", struct.pack("f", request.scale))[0] <= 0:
            return f"takes a scale above 0, not {request.scale:g}"
        return self.available(request.device) if request.capability is None else None

    def takes_strides(self, x: Tensor) -> bool:
        """Return whether the engine supports the strides and the address of a (B, N, H, D) tensor."""
        step = self.alignment // x.element_size() if self.alignment > 1 else 1
        aligned = all(s % max(step, 1) == 0 for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1)
        return x.stride(-1) == 1 and aligned and x.data_ptr() % self.alignment == 0


def merge(lse: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Merge two results over different keys: return (log-sum-exp, weight of the result so far, weight of the part).

    All tensors have one shape (...). out * weight[..., None] + part * part_weight[..., None] is one softmax over all
    keys. Both weights are 0 for rows without a key (-inf).
    """
    part_lse = part_lse.to(lse.dtype)
    total = torch.logaddexp(lse, part_lse)
    finite = total.clamp(min=torch.finfo(total.dtype).min)  # -inf minus -inf would be NaN
    return total, torch.exp(lse - finite), torch.exp(part_lse - finite)
