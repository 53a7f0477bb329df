"""Time hashed attention on the ranks of torchrun, and on rank 0 alone with the same sequence and fewer tokens.

    torchrun --nproc-per-node 2 benchmarks/hashed_ranks.py --tokens 524288

q, k, v and logits are bf16, with one head of 64 and two probes by default. A row has the milliseconds of a forward and
its backward, with sorts and losses, as the median of `--repeats` calls on the slowest rank, and the MB that a rank receives.
With `--profile`, the first rank then prints where a call's time is, on the host and on the GPU.
Shape letters: R ranks, N = R L tokens, L tokens of a rank.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time

import torch
import torch.distributed as dist
from exchange import meet, most

from lightning_dilated.attention import hashed_attention
from lightning_dilated.sequence import SequenceGroup


def options() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tokens", type=int, nargs="+", default=[524288], help="tokens of a rank")
    for name, value in {"heads": 1, "head-dim": 64, "groups": 4, "codes": 16, "latest": 64, "probes": 2}.items():
        p.add_argument(f"--{name}", type=int, default=value)
    p.add_argument("--layouts", nargs="+", default=["contiguous", "zigzag"])
    p.add_argument("--repeats", type=int, default=7)
    p.add_argument("--profile", action="store_true")
    return p.parse_args()


def step(a: argparse.Namespace, tokens: int, device: torch.device, group: SequenceGroup | None):
    """Return a function that runs a forward and its backward."""
    draw = lambda *shape: torch.randn(shape, device=device, dtype=torch.bfloat16)  # noqa: E731
    q, k, v, grad = (draw(1, tokens, a.heads, a.head_dim) for _ in range(4))
    z_q, z_k = (2 * draw(1, tokens, a.heads, a.groups, a.codes) for _ in range(2))
    tensors = [x.requires_grad_() for x in (q, k, v, z_q, z_k, torch.zeros(a.heads, device=device))]

    def run() -> None:
        with contextlib.nullcontext() if group is None else group.trusting():
            out, losses = hashed_attention(*tensors, latest=a.latest, probes=a.probes, sequence=group)
            loss = losses.agree.mean() + losses.contrast.mean() + losses.balance.sum() + losses.spread.sum()
            torch.autograd.grad((out, loss), tensors, (grad, torch.ones_like(loss)))

    return run


def milliseconds(run, device: torch.device, repeats: int, settle=lambda: None) -> float:
    """Return the median milliseconds of a call after two warm-up calls."""
    times = []
    for _ in range(repeats + 2):
        begin = time.perf_counter()
        run()
        settle()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[2:])


def profile(run, device: torch.device) -> str:
    """Return tables of the operations of a call: by time on the host, and on a GPU by time on the GPU."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    keys = ["self_cpu_time_total"]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
        keys.append("self_cuda_time_total")
    with torch.profiler.profile(activities=kinds) as recorded:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
    return "\n".join(recorded.key_averages().table(key, row_limit=25, max_name_column_width=50) for key in keys)


def main() -> None:
    a, rank, ranks = options(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    say = lambda line: print(line, flush=True) if rank == 0 else None  # noqa: E731
    say("| GPUs | tokens of each | layout | ms | received MB |\n| --- | --- | --- | --- | --- |")
    for local in a.tokens:
        for layout in a.layouts:
            torch.manual_seed(rank)
            group = SequenceGroup(layout=layout)
            run = step(a, local, device, group)
            took = milliseconds(run, device, a.repeats, group.settle)
            group.forward_traffic.clear(), group.backward_traffic.clear()
            run(), group.settle()
            received = group.forward_traffic.received + group.backward_traffic.received
            took, received = most(device, took, received)
            say(f"| {ranks} | {local:,} | {layout} | {took:.2f} | {received / 1e6:.1f} |")
            if a.profile:
                say(profile(run, device))
                group.settle()
            group.close()
        for tokens in (local, local * ranks):
            if rank == 0:
                took = milliseconds(step(a, tokens, device, None), device, a.repeats)
                say(f"| 1 | {tokens:,} | | {took:.2f} | |")
            meet(device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
