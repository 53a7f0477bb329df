"""Errors of out, dq, dk, dv relative to float64, next to the errors of plain torch in the same dtype.

    python benchmarks/errors.py                                  # on a GPU: bf16, every engine that serves
    python benchmarks/errors.py --dtype float16 --head-dim 128

The plain reference is attention by torch's matmul and softmax over the full score matrix, to which the logarithm of the
counts is added. All operations are in the dtype.
Shape letters: N tokens, H heads, D head dim.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from lightning_dilated import DilatedPattern, dilated_attention
from lightning_dilated.attention.backends import ENGINES, Request


def plain(q: Tensor, k: Tensor, v: Tensor, counts: Tensor) -> Tensor:
    """Return attention (1, N, H, D) by the definition, in the dtype of the inputs. counts: (H, N, N)."""
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * q.shape[-1] ** -0.5 + counts.to(q.dtype).log()
    return torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), v)


def errors(out: Tensor, inputs: tuple[Tensor, ...], grad: Tensor, exact: list[Tensor]) -> list[float]:
    """Return the largest absolute error of out and of each gradient."""
    got = [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))]
    return [float((a.detach().double() - b).abs().max()) for a, b in zip(got, exact, strict=True)]


def main() -> None:
    """Print a table of errors, with their ratio to plain torch's in brackets."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--seq-len", type=int, default=4096)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--head-dim", type=int, default=64)
    p.add_argument("--segments", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    p.add_argument("--dilations", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    args = p.parse_args()
    pattern, dtype, device = (
        DilatedPattern.longnet(args.segments, args.dilations),
        getattr(torch, args.dtype),
        torch.device(args.device),
    )
    torch.manual_seed(0)
    shape = 1, args.seq_len, args.heads, args.head_dim
    *inputs, grad = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    print(f"{pattern}, {shape}, {args.dtype}, {device}\n\n| engine | causal | out | dq | dk | dv |")
    print("| --- | --- | --- | --- | --- | --- |")
    for causal in (False, True):
        counts = pattern.counts(args.seq_len, args.heads, causal).to(device)
        leaves = lambda wide=dtype: tuple(x.to(wide).requires_grad_() for x in inputs)  # noqa: E731
        x = leaves(torch.float64)
        want = plain(*x, counts)
        exact = [want.detach(), *torch.autograd.grad(want, x, grad.double())]
        del want
        x = leaves()
        base = errors(plain(*x, counts), x, grad, exact)
        print(f"| plain torch | {'yes' if causal else 'no'} | {' | '.join(f'{e:.1e}' for e in base)} |")
        for name in [n for n, e in ENGINES.items() if e.why_not(Request.of(inputs[0])) is None and ":" not in n]:
            x = leaves()
            measured = errors(dilated_attention(*x, pattern, causal=causal, engine=name), x, grad, exact)
            cells = " | ".join(f"{e:.1e} ({e / b:.2f})" for e, b in zip(measured, base, strict=True))
            print(f"| {name} | {'yes' if causal else 'no'} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
