"""Time a short convolution on a GPU: our kernels, and torch.compile of torch's operations.

    python benchmarks/convolution_time.py
    python benchmarks/convolution_time.py --tiles

Rows of q, k and v are bf16, as in layers (q and k are slices of one tensor, v is separate), and weights are fp32. The
table has milliseconds of the forward and the backward, and of their memory traffic at 3 TB/s: two tensors in the
forward, three in the backward. With `--tiles`, there is a row for each tile size of the kernels instead.
Shape letters: N tokens, C channels, W taps.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

from lightning_dilated.ext.convolution import convolution
from lightning_dilated.ext.convolution.convolution import ShortConvolution
from lightning_dilated.planning import seconds_of

CUDA = torch.device("cuda")
#: bytes per second that the traffic column assumes
BANDWIDTH = 3e12
#: tiles in the forward: (elements, channels, warps); in the backward: (elements, channels, warps, stages, program's tokens)
FORWARD = [(n, c, w) for n in (2048, 4096, 8192) for c in (64, 128, 256) for w in (4, 8)]
BACKWARD = [
    (n, c, w, stages, tokens)
    for n, c, w in ((1024, 64, 4), (1024, 128, 4), (2048, 64, 4), (2048, 128, 4), (2048, 128, 8), (4096, 128, 8))
    for stages in (1, 2, 3)
    for tokens in (128, 256, 512)
]


def inputs(tokens: int, channels: int, documents: int) -> tuple[list[Tensor], Tensor | None]:
    """Return q, k and v, and the bounds of documents with equal lengths."""
    torch.manual_seed(0)
    each = channels // 3
    joint, v = (torch.randn(1, tokens, n, device=CUDA, dtype=torch.bfloat16) for n in (2 * each, each))
    bounds = torch.linspace(0, tokens, documents + 1).to(torch.int32).to(CUDA) if documents > 1 else None
    return [*joint.requires_grad_().split(each, -1), v.requires_grad_()], bounds


def measured(run: Callable[..., tuple[Tensor, ...]], parts: list[Tensor], weight: Tensor) -> tuple[float, float]:
    """Return (milliseconds of the forward, of the backward)."""
    grads = [torch.randn_like(x) for x in parts]
    leaves = [x.detach().requires_grad_() for x in parts]  # gradients with the same strides

    def forward() -> None:
        with torch.no_grad():
            run(*leaves)

    def passes() -> None:
        torch.autograd.grad(run(*leaves), (*leaves, weight), grads)

    first, whole = (1e3 * seconds_of(x, CUDA, 5) for x in (forward, passes))
    return first, whole - first


def rows_of(a: argparse.Namespace, channels: int) -> Iterator[str]:
    parts, bounds = inputs(a.tokens, channels, a.documents)
    module = ShortConvolution(channels, a.taps, not a.centred, device=CUDA)
    torch.nn.init.normal_(module.weight)
    run = lambda *parts: tuple(module.together(parts, None, bounds))  # noqa: E731
    bytes_of = lambda tensors: 1e3 * tensors * 2 * a.tokens * channels / BANDWIDTH  # noqa: E731
    begin = f"| {a.tokens:,} | {channels:,} |"
    yield f"{begin} memory traffic | {bytes_of(2):.2f} | {bytes_of(3):.2f} |"
    times = measured(run, parts, module.weight)
    yield f"{begin} kernels | {times[0]:.2f} | {times[1]:.2f} |"
    with mock.patch.object(convolution, "serves", lambda *_: False):
        times = measured(torch.compile(run), parts, module.weight)
        yield f"{begin} torch.compile | {times[0]:.2f} | {times[1]:.2f} |"


def tiles_of(a: argparse.Namespace, channels: int) -> Iterator[str]:
    """Yield a row for each tile size."""
    from lightning_dilated.ext.convolution import kernels as kernel

    parts, bounds = inputs(a.tokens, channels, a.documents)
    x, weight = parts[0].detach(), torch.randn(a.taps, channels // 3, device=CUDA)
    neighbours = convolution._seen(x, None, bounds).neighbours(weight, 0)
    begin = f"| {a.tokens:,} | {channels // 3:,} |"
    for tile in FORWARD:
        with mock.patch.object(kernel, "FORWARD", kernel.Tile(*tile)):
            seconds = seconds_of(lambda: kernel.forward(x, weight, neighbours), CUDA, 5)
        yield f"{begin} forward {tile} | {1e3 * seconds:.3f} |"
    grad = torch.randn(x.shape, device=CUDA, dtype=x.dtype)
    for *tile, tokens in BACKWARD:
        sums = x.new_empty((-(-a.tokens // tokens), *weight.shape), dtype=torch.float32)

        def run(sums: Tensor = sums, tokens: int = tokens) -> Tensor:
            kernel.backward(grad, x, weight, neighbours, sums, tokens)
            return sums.sum(0)

        with mock.patch.object(kernel, "BACKWARD", kernel.Tile(*tile)):
            yield f"{begin} backward {(*tile, tokens)} | {1e3 * seconds_of(run, CUDA, 5):.3f} |"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tokens", type=int, default=262144)
    p.add_argument("--channels", type=int, nargs="+", default=[2304, 1536], help="of q, k and v together")
    p.add_argument("--taps", type=int, default=4)
    p.add_argument("--documents", type=int, default=1)
    p.add_argument("--centred", action="store_true", help="neighbours on both sides")
    p.add_argument("--tiles", action="store_true", help="time sizes of tiles")
    a = p.parse_args()
    if (reason := convolution.why_not(CUDA, torch.bfloat16, a.taps)) is not None:
        p.error(f"the kernel {reason}")
    heads = ("tile", "ms") if a.tiles else ("way", "forward ms", "backward ms")
    print(f"| tokens | channels | {' | '.join(heads)} |\n|{' --- |' * (2 + len(heads))}")
    for channels in a.channels:
        for row in (tiles_of if a.tiles else rows_of)(a, channels):
            print(row, flush=True)


if __name__ == "__main__":
    main()
