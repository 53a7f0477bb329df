"""Time other attention over the same q, k, v: torchscale's own code from a local checkout, and dense cuDNN.

    python benchmarks/peers.py --torchscale path/to/torchscale --seq-len 1048576      # ours and torchscale's op
    python benchmarks/peers.py --dense --seq-len 131072 --causal 0                    # ours and dense attention

This package contains no code of torchscale. The script imports the checkout, and replaces its flash-attn by the dense
kernel of our op.
Shape letters: B batch, N tokens, H heads, D head dim.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_dilated import DilatedPattern, dilated_attention
from lightning_dilated.planning import peak_memory, seconds_of


class Dense(nn.Module):
    """Dense attention, by cuDNN on a GPU."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **unused: Any) -> Tensor:
        """Compute attention of q, k, v, all (B, N, H, D)."""
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def _with_lse(q: Tensor, k: Tensor, v: Tensor, dropout: float, bias: Any, scale: Any, causal: bool) -> tuple:
    """Return what flash-attn's function returns, computed by cuDNN: (out (B, N, H, D), lse (B, H, N))."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if q.device.type == "cuda":
        results = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
        return results[0].transpose(1, 2), results[1].squeeze(-1)
    results = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return results[0].transpose(1, 2), results[1]


class Torchscale(nn.Module):
    """The op of torchscale's DilatedAttention: torchscale's code without the projections.

    Args:
        checkout: folder of https://github.com/microsoft/torchscale, commit 4d1e0e8.
        pattern: pattern in which every branch has all heads and no shift.
        heads, head_dim: H, D.
    """

    def __init__(self, checkout: str, pattern: DilatedPattern, heads: int, head_dim: int) -> None:
        super().__init__()
        if checkout not in sys.path:
            sys.path.insert(0, checkout)
        theirs = importlib.import_module("torchscale.component.dilated_attention")
        importlib.import_module("torchscale.component.multihead_attention").flash_attn_func = _with_lse
        args = SimpleNamespace(
            flash_attention=True, multiway=False, xpos_rel_pos=False, seq_parallel=False, layernorm_eps=1e-5,
            segment_length=[b.segment_length for b in pattern.branches],
            dilated_ratio=[b.dilation_rate for b in pattern.branches],
        )  # fmt: skip
        self.op = theirs.DilatedAttention(args, heads * head_dim, heads, self_attention=True)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(self.op, name, nn.Identity())

    @torch.compiler.disable
    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **unused: Any) -> Tensor:
        """Compute attention of q, k, v, all (B, N, H, D)."""
        out, _ = self.op(q.flatten(2), k.flatten(2), v.flatten(2), is_causal=causal)
        return out.unflatten(-1, q.shape[2:])


def options() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--seq-len", type=int, default=1048576)
    p.add_argument("--heads", type=int, default=12)
    p.add_argument("--head-dim", type=int, default=64)
    p.add_argument("--segments", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768])
    p.add_argument("--dilations", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    p.add_argument("--torchscale", help="folder of a checkout")
    p.add_argument("--dense", action="store_true")
    p.add_argument("--causal", type=int, nargs="+", default=[0, 1])
    p.add_argument("--repeats", type=int, default=5)
    return p.parse_args()


def main() -> None:
    """Print a row per case: milliseconds of forward and backward, GiB besides q, k, v, dO, and the ratio to our op."""
    args = options()
    device = torch.device(args.device)
    pattern = DilatedPattern.longnet(args.segments, args.dilations)
    shape = 1, args.seq_len, args.heads, args.head_dim
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    grad = torch.randn_like(q)
    calls = {"ours": lambda causal: dilated_attention(q, k, v, pattern, causal=causal)}
    if args.torchscale:
        theirs = Torchscale(args.torchscale, pattern, args.heads, args.head_dim)
        calls["torchscale"] = lambda causal: theirs(q, k, v, causal=causal)
    if args.dense:
        calls["dense"] = lambda causal: Dense()(q, k, v, causal=causal)
    print(f"{pattern}, (1, {args.seq_len}, {args.heads}, {args.head_dim}), {dtype}, {device}\n")
    print(
        "| op | causal | forward+backward ms | GiB beyond q, k, v, dO | times ours |\n| --- | --- | --- | --- | --- |"
    )
    for causal in map(bool, args.causal):
        ours = None
        for name, call in calls.items():

            def run(call: Any = call, causal: bool = causal) -> None:
                torch.autograd.grad(call(causal), (q, k, v), grad)

            seconds = seconds_of(run, device, args.repeats)
            ours = ours or seconds
            memory = peak_memory(run, device)
            row = f"{seconds * 1000:.2f} | {memory:.2f} | {seconds / ours:.2f}"
            print(f"| {name} | {'yes' if causal else 'no'} | {row} |", flush=True)


if __name__ == "__main__":
    main()
