"""Time output projection and loss over long sequences: in tiles, in one piece, and with torch and liger-kernel.

    python benchmarks/output_loss.py
    python benchmarks/output_loss.py --seq-len 4096 --dim 64 --vocab 512 --tile 1024 --steps 1     # on a CPU

Each way takes hidden states (N, E) in bf16 and labels. It returns the mean loss and the gradients of the states and of
the weights (fp32, cast to bf16 in between, as under autocast). The error is the larger one of both gradients, relative
to fp32. Ways that are not installed are omitted.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from lightning_dilated.memory.chunked_loss import loss_tile, tiled_sum, token_nats
from lightning_dilated.memory.token_chunks import tiled

Way = Callable[[nn.Linear, Tensor, Tensor], Tensor]


def options() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seq-len", type=int, default=262144)
    p.add_argument("--dim", type=int, default=4096)
    p.add_argument("--vocab", type=int, nargs="+", default=[256, 50304, 128256])
    p.add_argument("--tile", type=int, default=8192, help="tokens at most; fewer of a wide vocabulary")
    p.add_argument("--most", type=float, default=60.0, help="GiB of logits in fp32 beyond which none are made at once")
    p.add_argument("--steps", type=int, default=3, help="measured, after one for warming up")
    return p.parse_args()


def nats(head: nn.Linear, x: Tensor, labels: Tensor, compiled: bool = True) -> Tensor:
    """Return losses (1, N)."""
    return token_nats(head(x)[0], labels[0], compiled).view(labels.shape)


def plain(head: nn.Linear, x: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss by torch's cross-entropy in fp32."""
    return nn.functional.cross_entropy(head(x)[0].float(), labels[0])


def ours(tile: int, compiled: bool = True) -> Way:
    """Return the way of LongNetLM, with gradients in the same pass as the sum."""
    run = partial(nats, compiled=compiled)
    return lambda head, x, labels: tiled_sum(partial(run, head), (head,), tile, x, labels) / labels.numel()


def again(tile: int) -> Way:
    """Return a way that recomputes the logits of each tile in the backward, as for losses by token."""
    return lambda head, x, labels: tiled(partial(nats, head), (head,), tile, x, labels).mean()


def of_torch(head: nn.Linear, x: Tensor, labels: Tensor) -> Tensor:
    """Compute the loss by torch's function, which chooses its chunks."""
    weight = head.weight.to(x.dtype)
    return nn.functional.linear_cross_entropy(x[0], weight, labels[0], options=nn.LinearCrossEntropyOptions())


def of_liger() -> Way:
    """Return the way of liger-kernel."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    return lambda head, x, labels: loss(head.weight.to(x.dtype), x[0], labels[0])


def ways(args: argparse.Namespace, vocab: int, device: str) -> dict[str, Way]:
    tile = loss_tile(args.tile, vocab)
    name = f"tiles of {tile:,}"
    available: dict[str, Way] = {name: ours(tile), f"{name}, computed again": again(tile)}
    if device == "cuda":
        available[f"{name}, not compiled"] = ours(tile, False)
    if args.seq_len * vocab * 4 <= args.most * 2**30:
        available |= {"at once": lambda head, x, labels: nats(head, x, labels).mean(), "torch, at once": plain}
    if hasattr(nn, "LinearCrossEntropyOptions"):  # from torch 2.13 on
        available["torch, chunked"] = of_torch
    if device == "cuda":  # its kernels are written in Triton
        with contextlib.suppress(ImportError):
            available["liger-kernel"] = of_liger()
    return available


def once(way: Way, head: nn.Linear, x: Tensor, labels: Tensor) -> list[Tensor]:
    """Return the gradients of the states and the weights."""
    with torch.autocast(x.device.type, torch.bfloat16):
        loss = way(head, x, labels)
    return list(torch.autograd.grad(loss, [x, head.weight]))


def exact(head: nn.Linear, x: Tensor, labels: Tensor, step: int) -> list[Tensor]:
    """Return the same gradients in fp32, by torch's cross-entropy over `step` tokens at a time."""
    wide, total = x.detach().float(), 0.0
    grad = torch.empty_like(wide)
    for cut in (slice(at, at + step) for at in range(0, x.shape[1], step)):
        some = wide[0, cut].requires_grad_()
        loss = nn.functional.cross_entropy(head(some), labels[0, cut], reduction="sum") / labels.numel()
        grad[0, cut], weight = torch.autograd.grad(loss, [some, head.weight])
        total = total + weight
    return [grad, total]


def measured(way: Way, steps: int, *inputs: nn.Linear | Tensor) -> tuple[list[Tensor], float, float]:
    """Return (gradients, ms, additional GiB)."""
    on_gpu, seconds, before = inputs[1].device.type == "cuda", [], 0
    for step in range(steps + 1):
        grads = None
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        began = time.perf_counter()
        grads = once(way, *inputs)
        if on_gpu:
            torch.cuda.synchronize()
        if step:
            seconds.append(time.perf_counter() - began)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if on_gpu else float("nan")
    return grads, 1000 * statistics.median(seconds), peak


def main() -> None:
    args = options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}: {args.seq_len:,} tokens of width {args.dim}, forward and backward\n")
    print("| vocabulary | way | ms | GiB | error |\n| --- | --- | --- | --- | --- |", flush=True)
    for vocab in args.vocab:
        torch.manual_seed(0)
        head = nn.Linear(args.dim, vocab, bias=False, device=device)
        x = torch.randn(1, args.seq_len, args.dim, device=device, dtype=torch.bfloat16).requires_grad_()
        labels = torch.randint(0, vocab, (1, args.seq_len), device=device)
        want = exact(head, x, labels, args.tile)
        for way, run in ways(args, vocab, device).items():
            grads, ms, peak = measured(run, args.steps, head, x, labels)
            errors = [
                float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(grads, want, strict=True)
            ]
            print(f"| {vocab:,} | {way} | {ms:.1f} | {peak:.2f} | {max(errors):.1e} |", flush=True)
            del grads


if __name__ == "__main__":
    main()
