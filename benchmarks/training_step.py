"""Time a full training step of a LongNetLM on one device in a Trainer: tokens per second, memory, time by kernel.

    python benchmarks/training_step.py --seq-len 262144
    python benchmarks/training_step.py --seq-len 1048576 --recompute block
    python benchmarks/training_step.py --seq-len 131072 --attention torchscale --torchscale path/to/torchscale
    python benchmarks/training_step.py --seq-len 262144 --attention dense
    python benchmarks/training_step.py --seq-len 262144 --hybrid 4
    python benchmarks/training_step.py --seq-len 262144 --recurrence 4
    python benchmarks/training_step.py --seq-len 262144 --profile

Random bytes, AdamW (fused on a GPU). A step is forward, backward and optimizer as the Trainer runs them. As in
training, the host does not wait: it prepares the next step while the GPU computes.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from peers import Dense, Torchscale
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

import lightning_dilated as ld
from lightning_dilated.ext.profiling.throughput import PEAKS
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.models.transformer import step_flops

#: kinds of kernels by parts of their names; the first match counts
KINDS = {
    "elementwise": ("triton_",),
    "recurrence": ("_invert", "_pass", "pass_groups", "_read", "_sums", "_queries", "_gradients"),
    "attention": ("cudnn", "flash", "fmha", "sdpa", "_merge", "_sum", "_forward", "_backward_", "_delta"),
    "optimizer": ("adam", "multi_tensor"),
    "linear": ("gemm", "nvjet", "cutlass", "xmma", "splitk", "cublas"),
    "copies": ("memcpy", "memset"),
    "other": ("",),
}  # fmt: skip


def options() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seq-len", type=int, default=262144)
    p.add_argument("--dim", type=int, default=768)
    p.add_argument("--depth", type=int, default=12)
    p.add_argument("--heads", type=int, default=12)
    p.add_argument("--ffn", default="swiglu", choices=["swiglu", "gelu"])
    p.add_argument("--segments", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768])
    p.add_argument("--dilations", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    p.add_argument(
        "--hybrid", type=int, help="N: a dense head in every N-th layer, and local segments, instead of --segments"
    )
    p.add_argument("--recurrence", type=int, help="N: a memory by the gated delta rule in every N-th layer")
    p.add_argument("--attention", default="ours", choices=["ours", "torchscale", "dense"])
    p.add_argument("--torchscale", help="folder of a checkout, for --attention torchscale")
    p.add_argument("--kv-heads", type=int)
    p.add_argument("--ffn-dim", type=int)
    p.add_argument("--residual-dtype", choices=["float32", "bfloat16"])
    p.add_argument("--linear-dtype", choices=["float8"], help="of products of linear layers, by torchao")
    p.add_argument("--recompute", default="none", choices=["none", "attention-kept", "block"])
    p.add_argument("--every", type=int, default=1)
    p.add_argument("--offload", type=float, default=0.0, help="a fraction of the kept inputs, or GiB above 1")
    p.add_argument("--torch-offload", action="store_true", help="these inputs by torch's save_on_cpu instead")
    p.add_argument("--tile", type=int)
    p.add_argument("--head-chunks", type=int, default=1)
    p.add_argument("--eightbit", action="store_true", help="torchao's AdamW8bit")
    p.add_argument("--precision", default="bf16-mixed", help="the Trainer's")
    p.add_argument("--accelerator", default="auto")
    p.add_argument("--no-compile", action="store_true")
    p.add_argument("--steps", type=int, default=5, help="measured together, after two for warming up")
    p.add_argument("--profile", action="store_true", help="one more step, and its kernels by kind")
    args = p.parse_args()
    return args if args.steps > 0 else p.error("--steps must be at least 1")


class Clock(pl.Callback):
    """Records seconds per step over all but the first two steps, without waits in between; on request, a profile."""

    def __init__(self, steps: int, profiled: bool) -> None:
        self.begin, self.seconds, self.steps, self.profiled = 0.0, 0.0, steps, profiled
        self.seen: profile | None = None
        self.peak = self.wall = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *unused: Any) -> None:
        """Wait for the device before the first measured step and after the last one, then read the clock."""
        at = trainer.global_step - 2
        if at not in (0, self.steps) and self.seen is None:
            return
        on_gpu = trainer.strategy.root_device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
        took = time.perf_counter() - self.begin
        if self.seen is not None:
            self.seen.stop()
            self.wall = took
        elif at == self.steps:
            self.seconds = took / self.steps
            self.peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else float("nan")
            if self.profiled:
                kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
                self.seen = profile(activities=kinds)
                self.seen.start()
        self.begin = time.perf_counter()


def offloaded_by_torch(transformer: ld.models.transformer.DilatedTransformer) -> None:
    """Store block inputs in pinned memory with torch's own hooks, which wait for each copy and prefetch none."""
    transformer._host.offloading = lambda *unused: torch.autograd.graph.save_on_cpu(pin_memory=True)


def settings_of(args: argparse.Namespace) -> MemorySettings:
    return MemorySettings(args.recompute, args.every, args.offload, args.tile, args.head_chunks)


def model_of(args: argparse.Namespace) -> ld.LongNetLM:
    """Build the model, with the requested attention in all blocks."""
    pattern: Any = ld.DilatedPattern.longnet(args.segments, args.dilations)
    if args.hybrid:
        pattern = ld.DilatedPattern.hybrid(args.depth, args.heads, args.kv_heads, global_every=args.hybrid)
    fused = torch.cuda.is_available() and args.accelerator != "cpu"
    optimizer = partial(torch.optim.AdamW, lr=1e-4, weight_decay=0.1, fused=fused)
    if args.eightbit:
        from torchao.optim import AdamW8bit

        optimizer = partial(AdamW8bit, lr=1e-4, weight_decay=0.1)
    options = {"dim": args.dim, "depth": args.depth, "num_heads": args.heads, "num_kv_heads": args.kv_heads}
    options |= {"ffn": args.ffn, "ffn_dim": args.ffn_dim, "residual_dtype": args.residual_dtype}
    options["linear_dtype"] = args.linear_dtype
    options |= {"max_seq_len": args.seq_len} if args.hybrid else {}
    if args.recurrence:
        options["recurrence"] = [*[None] * (args.recurrence - 1), ld.Recurrence()]
    model = ld.LongNetLM(pattern, optimizer=optimizer, **options)
    model.configure_model()
    model.transformer.memory = settings_of(args)
    if args.torch_offload:
        offloaded_by_torch(model.transformer)
    for block in model.transformer.blocks:
        if args.attention == "dense":
            block.attention.attention = Dense()
        elif args.attention == "torchscale":
            block.attention.attention = Torchscale(args.torchscale, pattern, args.heads, args.dim // args.heads)
        block.attention.attention.causal = True
        if not args.no_compile:
            block.compile(fullgraph=args.attention == "ours")
    return model


def table(clock: Clock, rows: int = 30) -> None:
    """Print the kernels of the profiled step by kind, and the longest kernels."""
    times: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in clock.seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and "#" not in event.name:  # ranges have this type, too
            times[event.name][0] += event.device_time / 1000
            times[event.name][1] += 1
    kinds: dict[str, float] = defaultdict(float)
    for name, (ms, _) in times.items():
        kinds[next(kind for kind, parts in KINDS.items() if any(p in name.lower() for p in parts))] += ms
    total, wall = sum(kinds.values()), clock.wall * 1000
    print("\n| kind | ms | share of the step |\n| --- | --- | --- |")
    for kind, ms in sorted(kinds.items(), key=lambda x: -x[1]):
        print(f"| {kind} | {ms:.1f} | {100 * ms / wall:.1f} % |")
    print(f"| idle | {wall - total:.1f} | {100 * (wall - total) / wall:.1f} % |")
    print("\n| kernel | ms | calls |\n| --- | --- | --- |")
    for name, (ms, calls) in sorted(times.items(), key=lambda x: -x[1][0])[:rows]:
        print(f"| `{name[:110]}` | {ms:.2f} | {int(calls)} |")
    gaps_table(clock)


def gaps_table(clock: Clock, rows: int = 12) -> None:
    """Print the longest times without a kernel, and the kernels before and after each."""
    ran = [e for e in clock.seen.events() if e.device_type == torch.autograd.DeviceType.CUDA and "#" not in e.name]
    ran.sort(key=lambda e: e.time_range.start)
    gaps, last = [], next(iter(ran), None)
    for event in ran[1:]:
        gaps.append((event.time_range.start - last.time_range.end, last.name, event.name))
        last = max(last, event, key=lambda e: e.time_range.end)
    print("\n| idle ms | after | before |\n| --- | --- | --- |")
    for us, before, after in sorted(gaps, reverse=True)[:rows]:
        print(f"| {us / 1000:.2f} | `{before[:60]}` | `{after[:60]}` |")


def rate_of(args: argparse.Namespace, model: ld.LongNetLM, seconds: float) -> list[str]:
    """Return [TFLOP/s from the step's counted FLOPs, share of the GPU's peak]. Only our attention counts its pairs."""
    if args.attention != "ours":
        return ["", ""]
    rate = step_flops(model, args.seq_len, [args.seq_len]) / seconds
    peak = PEAKS.get(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return [f"{rate / 1e12:.1f}", f"{100 * rate / peak:.1f} %" if peak else ""]


def row(args: argparse.Namespace, model: ld.LongNetLM, optimizer: torch.optim.Optimizer, clock: Clock) -> str:
    states = {str(x.dtype).removeprefix("torch.") for s in optimizer.state.values() for x in s.values() if x.ndim}
    weights = {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
    plain = MemorySettings()
    named = [f"{k} {v}" for k, v in vars(settings_of(args)).items() if v != getattr(plain, k)]
    named += [f"hybrid, one layer of {args.hybrid}"] if args.hybrid else []
    named += [f"a recurrence in one layer of {args.recurrence}"] if args.recurrence else []
    named += ["offloaded by torch"] if args.torch_offload else []
    named += [f"residual {args.residual_dtype}"] if args.residual_dtype else []
    named += [f"linear layers {args.linear_dtype}"] if args.linear_dtype else []
    cells = [args.attention, f"{args.seq_len:,}", ", ".join(named) or "nothing", "no" if args.no_compile else "yes"]
    cells += [f"{args.precision} ({', '.join(weights)}; {', '.join(states)})", f"{clock.seconds * 1000:.1f}"]
    cells += [f"{args.seq_len / clock.seconds / 1000:.1f}", f"{clock.peak:.1f}", *rate_of(args, model, clock.seconds)]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    args = options()
    torch.manual_seed(0)
    model = model_of(args)
    text = torch.randint(0, 256, (args.seq_len + 1,))
    batch = {"tokens": text[:-1], "labels": text[1:]}
    clock, steps = Clock(args.steps, args.profile), 2 + args.steps + args.profile
    trainer = pl.Trainer(
        accelerator=args.accelerator, devices=1, precision=args.precision, max_steps=steps, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[clock],
        log_every_n_steps=10**9,
    )  # fmt: skip
    trainer.fit(model, DataLoader([batch] * steps, batch_size=1, pin_memory=torch.cuda.is_available()))
    print(row(args, model, trainer.optimizers[0], clock))
    if args.profile:
        table(clock)


if __name__ == "__main__":
    main()
