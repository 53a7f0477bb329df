"""Time steps of a LongNetLM in `Trainer(strategy="ring_dilated")` with a fixed number of tokens on each rank.

    torchrun --nproc-per-node 4 benchmarks/weak_scaling.py --tokens 65536 262144
    torchrun --nproc-per-node 4 benchmarks/weak_scaling.py --tokens 1048576 --recompute attention-kept
    torchrun --nproc-per-node 1 benchmarks/weak_scaling.py --tokens 65536 262144 --of 4     # the reference
    torchrun --nproc-per-node 2 benchmarks/weak_scaling.py --tokens 262144 --hybrid 6 --layout contiguous
    torchrun --nproc-per-node 2 benchmarks/weak_scaling.py --tokens 65536 --decoder 1.3B --recompute block \
        --strategy ring_dilated_fsdp --layout zigzag --steps 2 --warm 1
    torchrun --nproc-per-node 2 benchmarks/weak_scaling.py --tokens 512 --accelerator cpu --dim 32 --depth 2 --heads 4 \
        --precision 32-true --no-compile --first 64 --warm 2

The pattern is geometric(first, N), where N is the whole sequence, so the widest segment spans all ranks. `--of 4` gives
one rank the pattern of four ranks with equal tokens: the same number of branches, with the widest one cut at the rank's
N. With `--hybrid K`, one head of every K-th layer is dense, and all others have local segments. The model then declares
N, so that `--layout auto` can choose. `--decoder` takes a Llama-shaped decoder of transformers, dense, or with `--hybrid`
as `decoder_step.py` has it. Random bytes, fused AdamW. A step is forward, backward and optimizer as the Trainer
runs them; its time is the median between the ends of steps on the GPU of the slowest rank. As in training, the host does
not wait for the GPU between steps. `--wait` makes it wait, which adds the host's time until the first kernels of a step
(used for rows before 2026-11-23, and for rows of several ranks on that day). "exposed" is the time in which the kernels
of a further step, on an idle GPU, wait for rows, on the rank that waits most. `--profile FOLDER` then writes a trace of
`PROFILED` more steps for each row and rank. `--memory FOLDER` writes a snapshot of the allocator in the first measured
step, for `peak_of.py`; times are longer then, and the row's peak is of the steps after the profiler's last reset.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import lightning_dilated as ld
from lightning_dilated.sequence.exchange.transport import TrafficLog, mark, seconds

#: number of tokens that a rank trains before the clock starts
WARM = 2**22
#: number of steps of a trace
PROFILED = 3
#: the rank that prints rows
PRINTS = 0


def options(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tokens", type=int, nargs="+", default=[262144], help="of a rank")
    p.add_argument("--of", type=int, help="ranks whose pattern is taken (default: those that run)")
    p.add_argument("--first", type=int, default=2048, help="shortest segment")
    p.add_argument("--hybrid", type=int, help="N: a dense head in every N-th layer, and local segments")
    p.add_argument("--dim", type=int, default=768)
    p.add_argument("--depth", type=int, default=12)
    p.add_argument("--heads", type=int, default=12)
    p.add_argument("--decoder", help="a size of decoder_step.py, in place of a LongNetLM")
    p.add_argument("--exchange", default="auto")
    p.add_argument("--head-size", type=int, default=1)
    p.add_argument("--layout", default="auto", choices=["auto", "contiguous", "zigzag"])
    p.add_argument("--strategy", default="ring_dilated", choices=["ring_dilated", "ring_dilated_fsdp"])
    p.add_argument("--check-replicas", type=int, default=100, help="steps between comparisons of replicas; 0: none")
    p.add_argument("--recompute", default="none", choices=["none", "attention-kept", "block"])
    p.add_argument("--precision", default="bf16-mixed", help="the Trainer's")
    p.add_argument("--accelerator", default="auto")
    p.add_argument("--no-compile", action="store_true")
    p.add_argument("--steps", type=int, default=5, help="measured")
    p.add_argument("--wait", action="store_true", help="for the GPU after every step")
    p.add_argument("--warm", type=int, help="steps before (default: 4M tokens, but at least 2)")
    p.add_argument("--profile", type=Path, help="folder of traces")
    p.add_argument("--memory", type=Path, help="folder of snapshots of the allocator")
    args = p.parse_args(argv)
    if args.warm is not None and args.warm < 1:
        p.error(f"--warm must be at least 1, got {args.warm}: the clock starts at the end of a step.")
    return args


class RandomBytes(Dataset):
    """The same sequence of N bytes in every step. A rank reads only its part."""

    def __init__(self, seq_len: int, steps: int) -> None:
        self.seq_len, self.steps = seq_len, steps
        self.text = torch.randint(0, 256, (seq_len + 1,), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.read_ranges(index, [range(self.seq_len)])

    def read_ranges(self, index: int, ranges: list[range]) -> dict[str, torch.Tensor]:
        """Return tokens and labels at these ranges of positions."""
        shifted = lambda shift: torch.cat([self.text[r.start + shift : r.stop + shift] for r in ranges])  # noqa: E731
        return {"tokens": shifted(0), "labels": shifted(1)}


class Watch(pl.Callback):
    """Records seconds of the steps after the first `warm`, then a step's received bytes and waiting time, then a trace.

    Args:
        trace: the trace's path without its end, or None.
    """

    def __init__(self, warm: int, steps: int, wait: bool, trace: Path | None = None) -> None:
        self.ends, self.loss, self.received, self.exposed = [], torch.tensor(float("nan")), (0, 0), 0.0
        self.warm, self.steps, self.wait, self.clock, self.trace = warm, steps, wait, TrafficLog(), trace
        kinds = torch.profiler.ProfilerActivity
        self.profile = torch.profiler.profile(activities=[kinds.CUDA if torch.cuda.is_available() else kinds.CPU])

    def on_train_batch_start(self, trainer: pl.Trainer, *unused: Any) -> None:
        """Reset the counts, so that they have the bytes of this step only."""
        group = trainer.strategy.sequence
        group.forward_traffic.clear(), group.backward_traffic.clear()
        if trainer.global_step == self.warm + self.steps:
            group.watch(self.clock)
        if self.trace and trainer.global_step == self.warm + self.steps + 1:
            self.profile.start()

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *unused: Any) -> None:
        """Read the clock. The host waits for the device only before and after the measured steps."""
        device, done = trainer.strategy.root_device, trainer.global_step - self.warm
        if device.type == "cuda" and (self.wait or done in (0, self.steps, self.steps + 1)):
            torch.cuda.synchronize()
        if 0 <= done <= self.steps:
            self.ends.append(mark(device))
        if done == self.steps + 1:
            self.exposed = sum(seconds(wait.begin, wait.end) for wait in self.clock.waits)
        if self.trace and done == self.steps + 1 + PROFILED:
            if device.type == "cuda":
                torch.cuda.synchronize()
            self.profile.stop()
            self.profile.export_chrome_trace(f"{self.trace}-{trainer.global_rank}.json.gz")
        group, self.loss = trainer.strategy.sequence, outputs["loss"].detach()
        self.received = group.forward_traffic.received, group.backward_traffic.received

    def step(self) -> float:
        """Return the median seconds of a step."""
        return statistics.median(itertools.starmap(seconds, itertools.pairwise(self.ends)))


def model_of(args: argparse.Namespace, tokens: int, ranks: int, on_gpu: bool) -> ld.DilatedModule:
    optimizer = partial(torch.optim.AdamW, lr=1e-4, weight_decay=0.1, fused=on_gpu)
    if args.decoder:
        import decoder_step

        sizes = argparse.Namespace(size=args.decoder, seq_len=[tokens * ranks], lora=None, compile=not args.no_compile)
        return decoder_step.ours(sizes, "hybrid" if args.hybrid else "dense", optimizer=optimizer)
    pattern, length = ld.DilatedPattern.geometric(args.first, tokens * (args.of or ranks)), None
    if args.hybrid:
        pattern, length = ld.DilatedPattern.hybrid(args.depth, args.heads, global_every=args.hybrid), tokens * ranks
    sizes = {"dim": args.dim, "depth": args.depth, "num_heads": args.heads, "max_seq_len": length}
    return ld.LongNetLM(pattern, optimizer=optimizer, compile_blocks=not args.no_compile, **sizes)


def measure(args: argparse.Namespace, tokens: int) -> None:
    torch._dynamo.reset()
    pl.seed_everything(0, verbose=False)
    # compilation started a process per core, which take seconds to start and slow down the ranks
    warm = max(2, WARM // tokens) if args.warm is None else args.warm
    name = f"{tokens}-{dist_ranks()}-{args.of or dist_ranks()}"
    if args.profile:
        args.profile.mkdir(parents=True, exist_ok=True)
    clock = Watch(warm, args.steps, args.wait, args.profile and args.profile / name)
    steps = warm + args.steps + 1 + (PROFILED if args.profile else 0)
    kind = ld.RingDilatedStrategy if args.strategy == "ring_dilated" else ld.RingDilatedFSDPStrategy
    checks = {"check_replicas": args.check_replicas or None} if args.strategy == "ring_dilated" else {}
    callbacks = [clock] if args.recompute == "none" else [clock, ld.callbacks.ActivationRecompute(args.recompute)]
    if args.memory:
        callbacks.append(
            ld.callbacks.MemoryProfiler(folder=args.memory / name, timeline=False, snapshot_steps=(warm, warm + 1))
        )
    trainer = pl.Trainer(
        accelerator=args.accelerator, devices=dist_ranks(), precision=args.precision, max_steps=steps, logger=False,
        strategy=kind(exchange=args.exchange, head_size=args.head_size, layout=args.layout, **checks),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
        log_every_n_steps=10**9,
    )  # fmt: skip
    on_gpu = trainer.strategy.root_device.type == "cuda"
    model = model_of(args, tokens, trainer.world_size, on_gpu)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer.fit(model, DataLoader(RandomBytes(tokens * trainer.world_size, steps), batch_size=1, pin_memory=on_gpu))
    numbers = [clock.step(), torch.cuda.max_memory_allocated() / 2**30 if on_gpu else float("nan")]
    slowest = torch.tensor(
        [*numbers, *clock.received, clock.exposed], dtype=torch.float64, device=trainer.strategy.root_device
    )
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    took, peak, forward, backward, exposed = slowest.tolist()
    loss = clock.loss.clone()  # the shares of the ranks sum to the loss
    dist.all_reduce(loss)
    if trainer.global_rank == PRINTS:
        plan, layout = trainer.strategy.sequence.plan, trainer.strategy.sequence.layout
        widest = (
            f"dense in 1 of {args.hybrid}, {layout}" if args.hybrid else f"{tokens * (args.of or trainer.world_size):,}"
        )
        if args.decoder:
            widest = f"{args.decoder}, {'hybrid' if args.hybrid else 'dense'}, {layout}"
        print(
            f"| {trainer.world_size} | {tokens:,} | {widest} | {args.strategy} "
            f"| {plan.exchange if plan else None} {args.head_size} | {args.recompute} | {took * 1000:.1f} "
            f"| {tokens / took / 1000:.1f} | {trainer.world_size * tokens / took / 1000:.1f} | {exposed * 1000:.2f} "
            f"| {forward / 1e6:.1f} | {backward / 1e6:.1f} | {peak:.1f} | {loss.item():.4f} |",
            flush=True,
        )


def dist_ranks() -> int:
    """Return the number of processes that torchrun started on this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def main() -> None:
    """Print a row for each number of tokens."""
    args = options()
    if int(os.environ.get("RANK", 0)) == PRINTS:
        print(
            "| GPUs | tokens of each | widest segment | strategy | exchange, head_size | recompute | ms | thousand tokens/s "
            "of each | of all | exposed ms | received MB forward | backward | peak GiB | loss |\n" + "|---" * 14 + "|"
        )
    for tokens in args.tokens:
        measure(args, tokens)
    # gloo's threads outlive the group in DDP; if such a thread still frees the last call at exit, the process aborts
    time.sleep(0.2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
