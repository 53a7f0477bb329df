"""What an engine is: dense attention with log-sum-exp over one block, and a statement of what it accepts.

Shape letters: G samples and segments, J heads, n query rows, m key rows, D head dim.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Forward = Callable[..., tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Request:
    """What a call asks of an engine.

    `block_flops`: FLOPs of forward and backward of its blocks, on the mean, where all of them fit into few launches.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    dropout: bool = False
    scale: float = 1.0
    block_flops: float = math.inf

    @classmethod
    def of(cls, q: Tensor, dropout: float = 0.0, scale: float | None = None, block_flops: float = math.inf) -> Request:
        """The request that attention over `q` (B, N, H, D) makes."""
        return cls(q.device, q.dtype, q.shape[-1], dropout > 0, 1.0 if scale is None else scale, block_flops)


@dataclass(frozen=True)
class Engine:
    """One way to compute a block.

    forward(q, k, v, causal, scale, dropout) takes strided views of q (G, J, n, D) and of k, v (G, J, m, D), m = n where
    causal, and returns out (G, J, n, D) and its natural log-sum-exp (G, J, n).
    backward(grad, q, k, v, out, lse, causal, scale, dropout) takes the *merged* out and lse of the
    block's rows and returns dq, dk, dv. Every statement below is tested.

    Attributes:
        devices: device types it runs on; empty means any.
        dtypes: dtypes it takes; empty means every floating one.
        max_head_dim, head_dim_multiple: the head dims it takes.
        dropout: whether it applies `BlockDropout` exactly, backward too.
        empty: whether a call with no rows is safe (the op never makes one).
        alignment: bytes that every row must be aligned to.
        deterministic: whether every run gives the same bits, backward too.
        any_scale: whether it is right for a scale of 0 or below, too.
        rows_in_place: whether its results lie in memory as q's rows do, where those follow each other.
        forward_into: None, or forward(..., into) that goes on, in place, from the running state into = (out (B, L, H, D),
            lse (B, H, L), the flat row of out of each query row (G, J, n), zero keys to attend besides).
        min_rows: query rows and key rows it must be given; the op hands smaller blocks to the math engine.
        available: None, or why this build of torch lacks it.
    """

    name: str
    forward: Forward
    backward: Backward
    devices: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    dropout: bool = False
    empty: bool = False
    alignment: int = 1
    deterministic: bool = True
    any_scale: bool = True
    rows_in_place: bool = False
    forward_into: Forward | None = None
    min_rows: int = 1
    available: Callable[[torch.device], str | None] = lambda device: None

    def why_not(self, request: Request) -> str | None:
        """None where the engine serves the request, else the reason."""
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
        # the kernels take the scale in float32, where a tiny one is 0
        if not self.any_scale and struct.unpack("f", struct.pack("f", request.scale))[0] <= 0:
            return f"takes a scale above 0, not {request.scale:g}"
        return self.available(request.device)

    def takes_strides(self, x: Tensor) -> bool:
        """Whether a (B, N, H, D) tensor's strides and address suit the engine as they are."""
        step = self.alignment // x.element_size() if self.alignment > 1 else 1
        aligned = all(s % max(step, 1) == 0 for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1)
        return x.stride(-1) == 1 and aligned and x.data_ptr() % self.alignment == 0


def unsupported(op: str) -> Callable[[torch.device], str | None]:
    """An `available` that looks for a torch op by name."""

    def check(device: Any) -> str | None:
        return None if hasattr(torch.ops.aten, op) else f"this torch ({torch.__version__}) has no aten::{op}"

    return check
