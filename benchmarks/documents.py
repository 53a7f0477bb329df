"""Packed documents: time each engine on one row of tokens that is split into more and more documents.

    python benchmarks/documents.py                       # 131,072 tokens as 1, 16, 128 and 1,024 documents, causal
    python benchmarks/documents.py --documents 1 16 --seq-len 32768 --causal 0

Shape letters: N tokens, H heads, D head dim.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import torch

from lightning_dilated import DilatedPattern, dilated_attention
from lightning_dilated.planning import peak_memory, seconds_of


def cut(tokens: int, documents: int) -> torch.Tensor:
    """Return cu_seqlens with random lengths for this number of documents."""
    return torch.tensor(
        [0, *sorted(random.Random(0).sample(range(1, tokens), documents - 1)), tokens], dtype=torch.int32
    )


def main() -> None:
    """Print a table with milliseconds of the forward and of both passes, and GiB besides q, k, v, dO."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seq-len", type=int, default=131072)
    p.add_argument("--documents", type=int, nargs="+", default=[1, 16, 128, 1024])
    p.add_argument("--heads", type=int, default=12)
    p.add_argument("--head-dim", type=int, default=64)
    p.add_argument("--segments", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768])
    p.add_argument("--dilations", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    p.add_argument("--engines", nargs="+", default=["cudnn", "triton", "auto"])
    p.add_argument("--causal", type=int, default=1)
    p.add_argument("--repeats", type=int, default=3)
    args = p.parse_args()
    device, dtype = (torch.device("cuda"), torch.bfloat16) if torch.cuda.is_available() else (torch.device("cpu"), None)
    pattern = DilatedPattern.longnet(args.segments, args.dilations)
    shape = 1, args.seq_len, args.heads, args.head_dim
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    grad = torch.randn_like(q)
    print(f"{pattern}, {shape}, {q.dtype}, {device}, causal={bool(args.causal)}\n")
    print("| documents | engine | forward ms | forward+backward ms | GiB |\n| --- | --- | --- | --- | --- |")
    for documents in args.documents:
        for engine in args.engines:
            options = {"causal": bool(args.causal), "engine": engine, "cu_seqlens": cut(args.seq_len, documents)}

            def forward(options: dict[str, Any] = options) -> None:
                with torch.no_grad():
                    dilated_attention(q, k, v, pattern, **options)

            def both(options: dict[str, Any] = options) -> None:
                torch.autograd.grad(dilated_attention(q, k, v, pattern, **options), (q, k, v), grad)

            times = " | ".join(f"{seconds_of(run, device, args.repeats) * 1000:.2f}" for run in (forward, both))
            print(f"| {documents:,} | {engine} | {times} | {peak_memory(both, device):.2f} |", flush=True)


if __name__ == "__main__":
    main()
