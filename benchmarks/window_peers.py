"""Time other sliding windows over the same q, k, v: cuDNN's (nvidia-cudnn-frontend) and torch's FlexAttention.

    python benchmarks/window_peers.py --width 2048 --seq-len 131072 1048576

Causal, bf16. The table has milliseconds of a forward, and of a forward and backward, and the ratio to dense attention
with equal FLOPs. It also has the largest difference from our result, which would reveal a window of another width. Ways
that are not installed are omitted, with the reason.
Shape letters: B batch, N tokens, H heads, D head dim.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import lightning_dilated as ld
from lightning_dilated.planning import dense_yardstick, seconds_of

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
#: runs a forward, or both passes with a given gradient of out
Pass = Callable[[], tuple[Tensor, ...]]


class CudnnWindow(torch.autograd.Function):
    """cuDNN's attention with a band, by graphs of the frontend. q, k, v are (B, N, H, D)."""

    @staticmethod
    @functools.cache
    def graphs(shape: tuple[int, ...], width: int) -> tuple:
        """Return (graph, its tensors, bytes of its workspace) for the forward and for the backward."""
        import cudnn

        kinds = cudnn.data_type
        options = {
            "attn_scale": shape[3] ** -0.5,
            "diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT,
            "diagonal_band_left_bound": width,
            "diagonal_band_right_bound": 0,
        }
        batch, n, heads, dim = shape
        rows = {"dim": (batch, heads, n, dim), "stride": (n * heads * dim, dim, heads * dim, 1)}
        column = {"dim": (batch, heads, n, 1), "stride": (heads * n, n, 1, 1)}
        out = []
        for backward in (False, True):
            graph = cudnn.pygraph(
                io_data_type=kinds.BFLOAT16, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT
            )
            named = {name: graph.tensor(**rows, data_type=kinds.BFLOAT16, name=name) for name in ("q", "k", "v")}
            if backward:
                named |= {x: graph.tensor(**rows, data_type=kinds.BFLOAT16, name=x) for x in ("o", "dO")}
                named["stats"] = graph.tensor(**column, data_type=kinds.FLOAT, name="stats")
                results = dict(zip(("dq", "dk", "dv"), graph.sdpa_backward(**named, **options), strict=True))
            else:
                results = dict(zip(("o", "stats"), graph.sdpa(**named, generate_stats=True, **options), strict=True))
            for name, x in results.items():
                shape_of = column if name == "stats" else rows
                x.set_output(True).set_dim(shape_of["dim"]).set_stride(shape_of["stride"])
                x.set_data_type(kinds.FLOAT if name == "stats" else kinds.BFLOAT16)
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A])
            graph.check_support()
            graph.build_plans()
            out.append((graph, named | results, graph.get_workspace_size()))
        return tuple(out)

    @staticmethod
    def run(graph: tuple, tensors: dict[str, Tensor]) -> None:
        plan, named, size = graph
        space = torch.empty(max(1, size), dtype=torch.uint8, device="cuda")
        plan.execute({named[name]: x for name, x in tensors.items()}, space)

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, width: int) -> Tensor:
        graphs = CudnnWindow.graphs(tuple(q.shape), width)
        out, stats = torch.empty_like(q), torch.empty(q.shape[0], q.shape[2], q.shape[1], 1, device=q.device)
        CudnnWindow.run(graphs[0], {"q": q, "k": k, "v": v, "o": out, "stats": stats})
        ctx.save_for_backward(q, k, v, out, stats)
        ctx.graph = graphs[1]
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        q, k, v, out, stats = ctx.saved_tensors
        parts = {name: torch.empty_like(q) for name in ("dq", "dk", "dv")}
        tensors = {"q": q, "k": k, "v": v, "o": out, "dO": grad.contiguous(), "stats": stats}
        CudnnWindow.run(ctx.graph, tensors | parts)
        return *parts.values(), None


def ways(width: int, seq_len: int) -> Iterator[tuple[str, Attend]]:
    """Yield (name, function) for each way."""
    pattern = ld.DilatedPattern([ld.Window(width)])
    yield "ours", lambda q, k, v: ld.dilated_attention(q, k, v, pattern, causal=True)
    yield "cudnn frontend", lambda q, k, v: CudnnWindow.apply(q, k, v, width)
    yield "flex_attention", flex(width, seq_len)


def flex(width: int, seq_len: int) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    visible = lambda b, h, p, j: (j <= p) & (p - j < width)  # noqa: E731
    mask = create_block_mask(visible, None, None, seq_len, seq_len, device="cuda", _compile=True)
    compiled = torch.compile(flex_attention)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(q, k, v, block_mask=mask).transpose(1, 2)

    return attend


def passes(attend: Attend, inputs: tuple[Tensor, ...], grad: Tensor) -> tuple[Pass, Pass]:
    """Return functions: the forward, and the forward and backward."""

    def forward_and_backward() -> tuple[Tensor, ...]:
        out = attend(*inputs)
        return out, *torch.autograd.grad(out, inputs, grad)

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (attend(*inputs),)

    return forward, forward_and_backward


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--width", type=int, default=2048)
    p.add_argument("--seq-len", type=int, nargs="+", default=[131072, 1048576])
    p.add_argument("--heads", type=int, default=12)
    p.add_argument("--head-dim", type=int, default=64)
    a = p.parse_args()
    print("| tokens | way | forward ms | forward+backward ms | times dense | largest difference, out and dq, dk, dv |")
    print("| --- | --- | --- | --- | --- | --- |")
    seconds = functools.partial(seconds_of, device=torch.device("cuda"), repeats=5)
    for n in a.seq_len:
        shape = 1, n, a.heads, a.head_dim
        *inputs, grad = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        inputs = tuple(x.requires_grad_() for x in inputs)
        pattern = ld.DilatedPattern([ld.Window(a.width)])
        dense = seconds(dense_yardstick(pattern, n, a.heads, a.head_dim, True, torch.bfloat16, grad.device))
        first = None
        for name, attend in ways(a.width, n):
            try:
                forward, both_passes = passes(attend, inputs, grad)
                results = both_passes()
                first = results if first is None else first
                apart = " ".join(f"{(x - y).abs().max().item():.1e}" for x, y in zip(results, first, strict=True))
                times = seconds(forward), seconds(both_passes)
            except Exception as error:  # failures of other packages are part of the table
                print(
                    f"| {n:,} | {name} | {type(error).__name__}: {str(error).splitlines()[0][:160]} | | | |", flush=True
                )
                continue
            row = f"{times[0] * 1e3:.2f} | {times[1] * 1e3:.2f} | {times[1] / dense:.2f} | {apart}"
            print(f"| {n:,} | {name} | {row} |", flush=True)


if __name__ == "__main__":
    main()
