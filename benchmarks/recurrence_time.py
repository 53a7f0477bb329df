"""The time of recurrent attention by the gated delta rule on a GPU: ours in torch, and fla-core's kernels.

    python benchmarks/recurrence_time.py --seq-len 65536 262144

bf16 rows, fp32 states. Milliseconds of a forward, and of a forward and backward, beside those of the op of five branches
over as many tokens; the largest differences of the output and of the gradients of q, k and v between the two ways. What is
not installed is left out, with the reason.
Shape letters: B batch, N tokens, H heads, D head dim.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import lightning_dilated as ld
from lightning_dilated.planning import seconds_of

Rows = tuple[Tensor, ...]
FIVE = ld.DilatedPattern.longnet([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])


def ours(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """In torch, chunk by chunk."""
    return ld.recurrent_attention(q, k, v, log_decay, beta)


def fla(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """The kernels of fla-core."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(q, k, v, log_decay, beta, scale=1.0, use_qk_l2norm_in_kernel=True)[0]


def dilated(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Attention by five branches."""
    return ld.dilated_attention(q, k, v, FIVE, causal=True)


def inputs(a: argparse.Namespace, seq_len: int) -> tuple[Rows, Tensor]:
    """q, k, v, log_decay and beta, and a gradient of the output."""
    torch.manual_seed(0)
    rows = [torch.randn(1, seq_len, a.heads, a.head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    gates = [torch.rand(1, seq_len, a.heads, device="cuda") for _ in range(2)]
    tensors = *rows[:3], -0.1 * gates[0], gates[1]
    return tuple(x.requires_grad_() for x in tensors), rows[3]


def measured(way: Callable[..., Tensor], tensors: Rows, grad: Tensor) -> tuple[float, float, Rows]:
    """(milliseconds forward, forward and backward, the output and the gradients)."""

    def forward() -> None:
        with torch.no_grad():
            way(*tensors)

    def both() -> Rows:
        out = way(*tensors)
        return out, *torch.autograd.grad(out, tensors, grad, allow_unused=True)

    results = both()
    cuda = torch.device("cuda")
    return 1e3 * seconds_of(forward, cuda, 5), 1e3 * seconds_of(both, cuda, 5), tuple(x.detach() for x in results[:4])


def rows_of(a: argparse.Namespace, seq_len: int) -> Iterator[str]:
    """A table's rows."""
    tensors, grad = inputs(a, seq_len)
    first = None
    for way in (ours, fla, dilated):
        try:
            forward, both, results = measured(way, tensors, grad)
        except (ImportError, RuntimeError) as error:
            yield f"| {seq_len:,} | {way.__name__} | {type(error).__name__}: {str(error)[:90]} | | |"
            continue
        first = first or results
        apart = (f"{float((x - y).abs().max()):.1e}" for x, y in zip(first, results, strict=True))
        yield f"| {seq_len:,} | {way.__name__} | {forward:.2f} | {both:.2f} | {'' if way is dilated else ' '.join(apart)} |"


def main() -> None:
    """Print a table."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seq-len", type=int, nargs="+", default=[65536, 262144])
    p.add_argument("--heads", type=int, default=12)
    p.add_argument("--head-dim", type=int, default=64)
    a = p.parse_args()
    print("| tokens | way | forward ms | forward+backward ms | largest difference, out and dq, dk, dv |")
    print("| --- | --- | --- | --- | --- |")
    for seq_len in a.seq_len:
        for row in rows_of(a, seq_len):
            print(row, flush=True)


if __name__ == "__main__":
    main()
