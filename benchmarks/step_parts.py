"""Measure the parts of a training step on one device, and write the JSON file that `planning.Machine` reads.

    python benchmarks/step_parts.py --output h200.json
    python benchmarks/step_parts.py --output cpu.json --device cpu --precision 32-true --no-compile --tokens 1024 2048
      --dim 64 --depth 2 --heads 4 --first 256 --long 4096 --repeats 1

All parts are this package's own code: a rank's own attention, alone and with branches wider than the rank; a compiled
TransformerBlock without it; embedding, head and loss of a LongNetLM; dense attention; AdamW (fused on a GPU); batches
of received rows, with cuDNN or the first engine for them; packing rows, summing returned gradients, and work on the few
rows with parts of other ranks. Each length is compiled separately, and memory is freed in between.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_dilated import Branch, DilatedPattern, LongNetLM, dilated_attention
from lightning_dilated.attention import executors
from lightning_dilated.attention.backends import Engine, Request, choose, triton_up_to
from lightning_dilated.attention.executors import Call, HeadWindow, Layout
from lightning_dilated.attention.executors.grouped import block_flops
from lightning_dilated.attention.executors.remote import add_batch, merge_batch
from lightning_dilated.attention.spans import Span
from lightning_dilated.ext.planning.gpus import on_gpu, seconds_of
from lightning_dilated.ext.planning.machine import Line, Machine, Parts
from lightning_dilated.models.blocks import default_hidden
from lightning_dilated.sequence.exchange.row_ops import Batch, Rows, add_rows, pack_rows

#: number of wide branches in the assumed longer sequence
WIDE = 4
#: seconds that dense attention runs before it is measured, because a GPU lowers its clock during long steps
SUSTAINED = 3.0


def device_seconds_of(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Measure like `seconds_of`, but on a GPU without the host's time: kernels start after all launches."""
    if device.type != "cuda":
        return seconds_of(run, device, repeats)
    run()
    with torch.cuda.device(device):
        each = on_gpu(run, 1)
        times = min(16, max(1, round(0.01 / each)))  # at most the launches that a stream's queue holds
        return statistics.median(on_gpu(run, times, min(2 * times * each, 0.05)) for _ in range(repeats))


def fit_line(points: Iterable[tuple[float, float]]) -> Line:
    """Fit a line to (size, seconds) by least squared relative errors, with intercept and slope at least 0.

    Raises:
        ValueError: for fewer than two different sizes.
    """
    points = [(float(x), float(y)) for x, y in points]
    if len({x for x, _ in points}) < 2:
        raise ValueError(f"a line needs two different sizes, got {sorted({x for x, _ in points})}.")
    total = lambda f: sum(f(x) / y**2 for x, y in points)  # noqa: E731
    one, x1, x2 = total(lambda x: 1.0), total(lambda x: x), total(lambda x: x * x)
    y0, y1 = sum(1 / y for _, y in points), sum(x / y for x, y in points)
    each = (one * y1 - x1 * y0) / (one * x2 - x1 * x1)
    fixed = (y0 - each * x1) / one
    if fixed < 0:
        return Line(0.0, y1 / x2)
    return Line(fixed, each) if each >= 0 else Line(y0 / one, 0.0)


def options() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--output", type=Path, required=True, help="the JSON")
    p.add_argument("--tokens", type=int, nargs="+", default=[65536, 262144, 1048576], help="--first times powers of 2")
    p.add_argument("--first", type=int, default=2048, help="shortest segment of the geometric pattern")
    p.add_argument("--long", type=int, default=131072, help="tokens of dense attention, whose rows see many keys")
    p.add_argument("--dim", type=int, default=768)
    p.add_argument("--depth", type=int, default=12)
    p.add_argument("--heads", type=int, default=12)
    p.add_argument("--kv-heads", type=int)
    p.add_argument("--ffn", default="swiglu", choices=["swiglu", "gelu"])
    p.add_argument("--ffn-dim", type=int)
    p.add_argument("--vocab", type=int, default=256)
    p.add_argument("--not-causal", dest="causal", action="store_false")
    p.add_argument("--precision", default="bf16-mixed", choices=["bf16-mixed", "32-true"])
    p.add_argument("--device", default="cuda")
    p.add_argument("--engine", default="auto")
    p.add_argument("--no-compile", dest="compiled", action="store_false")
    p.add_argument("--repeats", type=int, default=3, help="samples of a median")
    return p.parse_args()


class Bench:
    """All measurements for one command line."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        self.dtype = torch.bfloat16 if args.precision == "bf16-mixed" else torch.float32
        self.kv_heads = args.kv_heads or args.heads
        self.head_dim = args.dim // args.heads

    def autocast(self) -> contextlib.AbstractContextManager:
        """Return the autocast context of the Trainer's precision."""
        mixed = self.args.precision == "bf16-mixed"
        return torch.autocast(self.device.type, torch.bfloat16) if mixed else contextlib.nullcontext()

    def seconds(self, run: Callable[[], object]) -> float:
        """Return median seconds of a call; on a GPU, without the host's time."""
        return device_seconds_of(run, self.device, self.args.repeats)

    def passes(self, run: Callable[[], Tensor], inputs: list[Tensor]) -> tuple[float, float]:
        """Return seconds of the forward and of the backward. Each call enters autocast to cast weights as steps do."""

        def forward() -> Tensor:
            with self.autocast():
                return run()

        grad = torch.ones_like(forward())
        first = self.seconds(forward)
        both_passes = self.seconds(lambda: torch.autograd.grad(forward(), inputs, grad))
        return first, max(0.0, both_passes - first)

    def free(self) -> None:
        """Discard compiled code, so that the next length is compiled separately, and free memory."""
        torch._dynamo.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def pattern(self, last: int) -> DilatedPattern:
        """Return geometric(first, last)."""
        return DilatedPattern.geometric(self.args.first, last)

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Draw a tensor in the dtype of q, k and v."""
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype)

    def qkv(self, tokens: int) -> list[Tensor]:
        """Return q (1, L, H, D), k and v (1, L, K, D)."""
        return [self.random(1, tokens, h, self.head_dim) for h in (self.args.heads, self.kv_heads, self.kv_heads)]

    def call(self, pattern: DilatedPattern, engine: Engine) -> Call:
        """Return the call as `attention.resolve` creates it."""
        args = self.args
        window = HeadWindow(pattern, args.heads, self.kv_heads, (0, args.heads))
        return Call(engine, window, args.causal, self.head_dim**-0.5)

    def engine(self, q: Tensor, pattern: DilatedPattern | None = None) -> Engine:
        """Return the engine of a rank that shares a sequence, or of a single rank if `pattern` is for q's own tokens."""
        flops = math.inf
        if pattern is not None and self.device.type == "cuda":
            window = HeadWindow(pattern, self.args.heads, self.kv_heads, (0, self.args.heads))
            flops = block_flops(window, self.args.causal, [Span(0, 1, 0, q.shape[1])], q.shape)
        return choose(self.args.engine, Request.of(q, 0.0, self.head_dim**-0.5, flops)).engine

    def own(self, tokens: int, ranks: int) -> tuple[float, float]:
        """Time attention among the own rows of a rank, in the middle of a sequence of `ranks` times its tokens."""
        q, k, v = self.qkv(tokens)
        engine, wide = self.engine(q, self.pattern(tokens)), self.engine(q)
        if ranks == 1 and engine is not wide:
            print(f"{tokens:,} tokens: {engine.name} on one rank, as measured; {wide.name} on a rank of a sequence")
        grad, call, offset = torch.randn_like(q), self.call(self.pattern(tokens * ranks), engine), tokens * (ranks // 2)
        spans = [Span(0, 1, 0, tokens, tokens * ranks, offset, offset)]
        executor = executors.choose(call, spans, Layout(q.shape, q.dtype, q.device))
        forward = lambda: executor.forward((q, k, v), True)  # noqa: E731
        out, lse, _ = forward()
        tensors = (grad, q, k, v, out.to(q.dtype))
        return self.seconds(forward), self.seconds(lambda: executor.backward(tensors, lse, None))

    def long(self, tokens: int) -> tuple[float, float]:
        """Return the seconds per pair in dense attention."""
        args, pattern = self.args, DilatedPattern([Branch(tokens, 1)])
        rows = [x.requires_grad_() for x in self.qkv(tokens)]
        call = lambda: dilated_attention(*rows, pattern, causal=args.causal, engine=args.engine)  # noqa: E731
        until = time.perf_counter() + SUSTAINED * (self.device.type == "cuda")
        while time.perf_counter() < until:
            self.passes(call, rows)
        forward, backward = self.passes(call, rows)
        pairs = args.heads * (tokens * (tokens + 1) // 2 if args.causal else tokens**2)
        return forward / pairs, backward / pairs

    def model(self, tokens: int) -> LongNetLM:
        """Build a LongNetLM with one block."""
        args = self.args
        sizes = (args.vocab, args.dim, 1, args.heads)
        options = {"num_kv_heads": args.kv_heads, "ffn_dim": args.ffn_dim, "ffn": args.ffn, "engine": args.engine}
        model = LongNetLM(self.pattern(tokens), *sizes, **options)
        model.causal = args.causal
        model.configure_model()
        return model.to(self.device)

    def block(self, tokens: int, recompute: str) -> tuple[float, float]:
        """Time a block, including its attention."""
        self.free()
        transformer = self.model(tokens).transformer
        block = transformer.blocks[0]
        block.recompute = recompute
        if self.args.compiled:
            block.compile(fullgraph=True, dynamic=False)
        x = self.random(1, tokens, self.args.dim, dtype=torch.float32).requires_grad_()
        with self.autocast():
            table = transformer._tables(x, None, None)[0]
        return self.passes(lambda: block(x, positions=table), [x, *block.parameters()])

    def edge(self, tokens: int) -> tuple[float, float]:
        """Time embedding, last norm, output projection and loss, which are a LongNetLM without its blocks."""
        model = self.model(tokens)
        model.transformer.blocks = nn.ModuleList()
        batch = {name: torch.randint(self.args.vocab, (1, tokens), device=self.device) for name in ("tokens", "labels")}
        return self.passes(lambda: model.loss_terms(batch)[0], list(model.parameters()))

    def parts(self, tokens: int) -> Parts:
        """Measure all parts that depend on the number of tokens."""
        alone, wider = self.own(tokens, 1), self.own(tokens, 1 << WIDE)
        wide = [max(0.0, b - a) / WIDE for a, b in zip(alone, wider, strict=True)]
        other_layers = [max(0.0, b - a) for a, b in zip(alone, self.block(tokens, "none"), strict=True)]
        self.free()
        return Parts(tokens, *alone, *wide, *other_layers, *self.edge(tokens))

    def again(self, parts: Parts) -> float:
        """Return the time of a recomputed block's forward without the op, relative to its first forward."""
        _, backward = self.block(parts.tokens, "block")
        usual = parts.rest_backward + parts.attention_backward
        twice = backward - usual - parts.attention_forward
        return max(0.0, twice) / parts.rest_forward if parts.rest_forward else 1.0

    def arrivals(self) -> tuple[Line, Line]:
        """Time batches of received rows. Each head has first/2^j queries, and the segment's other tokens as keys."""
        heads, group, points = self.args.heads, self.args.heads // self.kv_heads, ([], [])
        head = torch.arange(heads, device=self.device)[:, None]
        for j in range(1, min(7, self.args.first.bit_length() - 1)):
            n = self.args.first >> j
            m = self.args.first - n
            q, grad, values = (self.random(1, heads * n, 1, self.head_dim) for _ in range(3))
            out, lse = values.float(), self.random(1, 1, heads * n, dtype=torch.float32)
            rows = self.random(self.kv_heads * m, 2, self.head_dim)
            dq, grads = torch.zeros_like(out), torch.zeros_like(rows, dtype=torch.float32)
            queries = torch.arange(heads * n, device=self.device).view(heads, n)
            batch = Batch(0, False, 0, queries, head // group * m + torch.arange(m, device=self.device), [])
            max_triton_pairs = triton_up_to(self.args.engine, Request.of(q, 0.0, self.head_dim**-0.5))
            call = replace(self.call(self.pattern(self.args.first), self.engine(q)), max_triton_pairs=max_triton_pairs)
            runs = (
                functools.partial(merge_batch, call, batch, q, rows, out, lse),
                functools.partial(add_batch, call, batch, (grad, q, values), rows, lse, dq, grads),
            )
            for timed_points, run in zip(points, runs, strict=True):
                timed_points.append((heads * n * m, self.seconds(run)))
        return fit_line(points[0]), fit_line(points[1])

    def some(self, tokens: int, heads: int) -> list[Tensor]:
        """Return small and large sets of row indices of a tensor (1, L, heads, D), spread over the tensor."""
        counts = (self.args.first * heads // 64, self.args.first * heads // 8, self.args.first * heads)
        return [torch.randperm(tokens * heads, device=self.device)[:n].sort().values for n in counts]

    def moves(self, tokens: int) -> tuple[Line, Line]:
        """Time packing rows of K and V into a buffer and summing returned gradients, by number of bytes."""
        _, k, v = self.qkv(tokens)
        points: tuple[list, list] = ([], [])
        for rows in self.some(tokens, self.kv_heads):
            at = torch.arange(len(rows), device=self.device)
            buffer, back = (self.random(len(rows), 2, self.head_dim, dtype=x) for x in (self.dtype, torch.float32))
            sums = torch.zeros_like(back)
            runs = (
                (buffer, functools.partial(pack_rows, k, v, rows, at, buffer)),
                (back, lambda sums=sums, back=back, at=at: sums.index_add_(0, at, back[at])),
            )
            for timed_points, (moved, run) in zip(points, runs, strict=True):
                timed_points.append((moved.nbytes, self.seconds(run)))
        return fit_line(points[0]), fit_line(points[1])

    def few(self, tokens: int) -> tuple[Line, Line]:
        """Time the forward and backward of selecting rows and adding the parts of other ranks, by number of rows."""
        q, k, v = self.qkv(tokens)
        out, grad, lse = torch.randn_like(q), torch.randn_like(q), self.random(1, self.args.heads, tokens).float()
        lse, points = lse.transpose(1, 2), ([], [])
        for query_rows, theirs in zip(*(self.some(tokens, h) for h in (self.args.heads, self.kv_heads)), strict=True):
            some, keys = Rows.of(query_rows, tokens, self.args.heads), Rows.of(theirs, tokens, self.kv_heads)

            def forward(some: Rows = some) -> None:
                some.take(q)
                some.put(out, some.take(out).float())
                some.put(lse, some.take(lse))

            def backward(some: Rows = some, keys: Rows = keys, shapes: tuple = (len(query_rows), len(theirs))) -> None:
                for x in (grad, q, out, lse):
                    some.take(x)
                dq, sums = (torch.zeros(n, 2, self.head_dim, device=self.device) for n in shapes)
                add_rows(some, grad, dq[:, 0])
                add_rows(keys, k, sums[:, 0])
                add_rows(keys, v, sums[:, 1])

            for timed_points, run in zip(points, (forward, backward), strict=True):
                timed_points.append((len(query_rows), self.seconds(run)))
        return fit_line(points[0]), fit_line(points[1])

    def optimizer(self, sizes: Iterable[torch.Size]) -> float:
        """Time AdamW on parameters of these sizes."""
        parameters = [torch.zeros(size, device=self.device, requires_grad=True) for size in sizes]
        for x in parameters:
            x.grad = torch.zeros_like(x)
        return self.seconds(torch.optim.AdamW(parameters, lr=1e-4, fused=self.device.type == "cuda").step)

    def machine(self) -> Machine:
        args, begin = self.args, time.perf_counter()
        said = lambda text: print(f"{time.perf_counter() - begin:5.1f} s: {text}", flush=True)  # noqa: E731
        model = self.model(args.tokens[0])
        of_block = [p.shape for p in model.transformer.blocks[0].parameters()]
        of_all = [p.shape for p in model.parameters()]
        count = lambda sizes: sum(map(torch.Size.numel, sizes))  # noqa: E731
        del model
        parts = []
        for tokens in sorted(set(args.tokens)):
            parts.append(self.parts(tokens))
            said(parts[-1])
            self.free()
        again, optimizer = self.again(parts[0]), self.optimizer([*of_block * (args.depth - 1), *of_all])
        self.free()
        said(f"recomputed {again:.2f}, optimizer {optimizer * 1e3:.2f} ms")
        lines = [*self.arrivals(), *self.moves(parts[0].tokens), *self.few(parts[0].tokens)]
        said("rows from other ranks")
        long = self.long(args.long)
        said(f"long rows: {long[0]:.3g} and {long[1]:.3g} s a pair")
        where = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else platform.machine()
        return Machine(
            f"{where}, torch {torch.__version__}", args.dim, args.depth, args.heads, self.head_dim, self.kv_heads,
            args.ffn_dim or default_hidden(args.dim, args.ffn), args.vocab, args.precision, args.causal, args.first,
            count(of_block), count(of_all) - count(of_block), tuple(parts), optimizer, again, *lines, *long,
        )  # fmt: skip


def main() -> None:
    args = options()
    for tokens in args.tokens:
        DilatedPattern.geometric(args.first, tokens)  # raise for an impossible length before anything is measured
    args.output.parent.mkdir(parents=True, exist_ok=True)
    machine = Bench(args).machine()
    machine.save(args.output)
    print(machine)


if __name__ == "__main__":
    main()
