"""Time recurrent attention by the gated delta rule on a GPU: our kernels, torch, and fla-core's kernels.

    python benchmarks/recurrence_time.py --seq-len 65536 262144
    python benchmarks/recurrence_time.py --seq-len 65536 --parts

Inputs are bf16, states are fp32. The table has milliseconds of a forward, and of a forward and a backward. The row
`dilated` is the op with five branches over the same tokens. Other rows have the largest differences of the output and
the gradients of q, k, v, log_decay and beta from the first row, or the reason why a way does not run.
With `--parts`, there is a row for each kernel, in a call that is not split into windows.
Shape letters: B batch, N tokens, H heads, D head dim.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

import lightning_dilated as ld
from lightning_dilated.ext.recurrence import op, triton_chunks
from lightning_dilated.ext.recurrence.runs import Call, Document
from lightning_dilated.planning import seconds_of

Rows = tuple[Tensor, ...]
FIVE = ld.DilatedPattern.longnet([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])


def ours(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Compute as layers do: by the op, with kernels if they support the call, window by window."""
    return op.RECURRENCE(q, k, v, log_decay, beta, None, None, op.encode("gated_delta", None, True))


def in_torch(*tensors: Tensor) -> Tensor:
    """Compute the op by torch operations, because `measured` disables the kernels."""
    return ours(*tensors)


def fla(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(q, k, v, log_decay, beta, scale=1.0, use_qk_l2norm_in_kernel=True)[0]


def dilated(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    return ld.dilated_attention(q, k, v, FIVE, causal=True)


def inputs(a: argparse.Namespace, seq_len: int) -> tuple[Rows, Tensor]:
    """Return q, k, v, log_decay and beta, and the gradient of the output."""
    torch.manual_seed(0)
    rows = [torch.randn(1, seq_len, a.heads, a.head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    gates = [torch.rand(1, seq_len, a.heads, device="cuda") for _ in range(2)]
    tensors = *rows[:3], -0.1 * gates[0], gates[1]
    return tuple(x.requires_grad_() for x in tensors), rows[3]


def measured(way: Callable[..., Tensor], tensors: Rows, grad: Tensor) -> tuple[float, float, Rows]:
    """Return (milliseconds of the forward, of both passes, output and gradients)."""

    def forward() -> None:
        with torch.no_grad():
            way(*tensors)

    def passes() -> Rows:
        out = way(*tensors)
        return out, *torch.autograd.grad(out, tensors, grad, allow_unused=True)

    cuda, why_not = torch.device("cuda"), triton_chunks.why_not
    with mock.patch.object(triton_chunks, "why_not", why_not if way is not in_torch else lambda *_: "left out"):
        results = passes()
        return (
            1e3 * seconds_of(forward, cuda, 5),
            1e3 * seconds_of(passes, cuda, 5),
            tuple(x.detach() for x in results if x is not None),
        )


def rows_of(a: argparse.Namespace, seq_len: int) -> Iterator[str]:
    tensors, grad = inputs(a, seq_len)
    first = None
    for way in (ours, in_torch, fla, dilated):
        try:
            forward, both_passes, results = measured(way, tensors, grad)
        except (ImportError, RuntimeError) as error:
            yield f"| {seq_len:,} | {way.__name__} | {type(error).__name__}: {str(error)[:90]} | | |"
            continue
        first = first or results
        apart = (
            () if way is dilated else (f"{float((x - y).abs().max()):.1e}" for x, y in zip(first, results, strict=True))
        )
        yield f"| {seq_len:,} | {way.__name__} | {forward:.2f} | {both_passes:.2f} | {' '.join(apart)} |"


def parts_of(a: argparse.Namespace, seq_len: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield (name, launch) for each kernel of a call, first in the forward, then in the backward."""
    from lightning_dilated.ext.recurrence import gated_delta as forward
    from lightning_dilated.ext.recurrence import gated_delta_backward as back

    tensors, grad = inputs(a, seq_len)
    q, k, v, log_decay, beta = (x.detach()[0] for x in tensors)
    rows = forward.Rows(k, v, log_decay, beta)
    call = Call((Document(0, 0, seq_len),), 1, ((0, range(seq_len)),))
    chunks = triton_chunks.layout(call, 0, a.heads).on(k.device)
    begin = k.new_zeros(1, a.heads, a.head_dim, a.head_dim, dtype=torch.float32)
    inverse = forward.invert(rows, chunks)
    yield "invert", lambda: forward.invert(rows, chunks)
    yield "last states", lambda: forward.last_states(rows, chunks, inverse, begin)
    passed = forward.pass_chunks(rows, chunks, inverse, begin)
    yield "states of all chunks", lambda: forward.pass_chunks(rows, chunks, inverse, begin)
    out, reading = torch.empty_like(q), back.Reading(q, grad[0])
    yield "output", lambda: forward.output(q, rows, chunks, inverse, passed, out)
    sums = back.launch_sums(rows, chunks, inverse, reading)
    yield "sums of the outputs", lambda: back.launch_sums(rows, chunks, inverse, reading)
    yield "gradients of states", lambda: back.launch_back(rows, chunks, inverse, passed, sums, begin)
    yield "gradients of queries", lambda: back.launch_queries(rows, chunks, inverse, passed, reading, True)
    yield "the backward", lambda: back.backward(rows, chunks, inverse, passed, reading, begin, True)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seq-len", type=int, nargs="+", default=[65536, 262144])
    p.add_argument("--heads", type=int, default=12)
    p.add_argument("--head-dim", type=int, default=64)
    p.add_argument("--parts", action="store_true", help="time each kernel")
    a = p.parse_args()
    if a.parts:
        print("| tokens | kernels | ms |\n| --- | --- | --- |")
        for seq_len in a.seq_len:
            for name, launch in parts_of(a, seq_len):
                print(f"| {seq_len:,} | {name} | {1e3 * seconds_of(launch, torch.device('cuda'), 5):.3f} |", flush=True)
        return
    print("| tokens | way | forward ms | forward+backward ms | largest difference, out and gradients |")
    print("| --- | --- | --- | --- | --- |")
    for seq_len in a.seq_len:
        for row in rows_of(a, seq_len):
            print(row, flush=True)


if __name__ == "__main__":
    main()
