"""Time the exchange that `auto` chooses and every exchange by name, forward and backward of the op, in alternation.

    python benchmarks/choice.py --local 8192 65536 262144 1048576 --record benchmarks/results/....md       # all GPUs
    python benchmarks/choice.py --device cpu --ranks 2 --local 4096 --heads 2 --head-dim 16 --dtype float32

The host limits short calls, and its speed drifts by more than exchanges differ. Therefore each of many rounds times
every exchange once, in four consecutive calls (as in layers), and each round has a different order. Times are the slowest
rank's. "of the best" is the median over rounds of the ratio to the exchange by name with the shortest median. Two columns
come from separate calls after the rounds: "exposed" is the time in which computation waits for rows, and "received" is
the bytes of both passes, each on the rank with the largest number.
Shape letters: R ranks, N = R L tokens, L tokens of a rank.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from exchange import awaited, joined, meet, most, report_lines, start, step

from lightning_dilated import DilatedPattern
from lightning_dilated.sequence import SequenceGroup
from lightning_dilated.sequence.exchange import EXCHANGES

CALLS = 4
#: number of calls from which the median "exposed" is computed
WATCHED = 5
COLUMNS = (
    *("tokens a rank", "causal", "exchange", "head_size", "ms", "quarter below", "quarter above", "of the best"),
    *("exposed ms", "received MB"),
)


def options() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", default="cuda")
    p.add_argument("--ranks", type=int, help="default: all GPUs")
    p.add_argument("--local", type=int, nargs="+", default=[8192, 65536, 262144], help="tokens a rank")
    p.add_argument("--first", type=int, default=2048, help="shortest segment of the geometric pattern")
    p.add_argument("--heads", type=int, default=12)
    p.add_argument("--head-dim", type=int, default=64)
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--causal", nargs="+", type=int, default=[1])
    p.add_argument("--exchanges", nargs="+", default=list(EXCHANGES))
    p.add_argument("--head-sizes", nargs="+", type=int, default=[1])
    p.add_argument("--rounds", type=int, default=21, help="at least 2")
    p.add_argument("--record", type=Path, help="append the table to this file")
    args = p.parse_args()
    if args.rounds < 2:
        p.error("--rounds must be at least 2")
    return args


def groups(tensors, pattern, causal: bool, args: argparse.Namespace) -> dict[tuple[str, int], SequenceGroup]:
    """Return groups by exchange and head_size, for settings that support the call, `auto` first."""
    serving = {}
    for size, name in itertools.product(args.head_sizes, ["auto", *args.exchanges]):
        group = SequenceGroup(exchange=name, head_size=size)
        try:
            step(tensors, pattern, causal, group)[0]()
        except ValueError as error:
            group.close()
            print(f"{name}, head_size {size}: {error}", flush=True) if dist.get_rank() == 0 else None
            continue
        serving[name, size] = group
    return serving


def timed(run, group: SequenceGroup, device: torch.device) -> float:
    """Return the seconds per call of CALLS calls, on the slowest rank."""
    meet(device)
    begin = time.perf_counter()
    for _ in range(CALLS):
        run()
    group.settle()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return most(device, (time.perf_counter() - begin) / CALLS)[0]


def rounds(ways: dict, tensors, pattern, causal: bool, args: argparse.Namespace) -> dict[tuple[str, int], list[float]]:
    """Return the seconds of each exchange in each round."""
    device, times = tensors[0].device, {key: [] for key in ways}
    runs = {key: step(tensors, pattern, causal, group)[1] for key, group in ways.items()}
    for number in range(args.rounds + 2):  # two warm-up rounds
        for key in random.Random(number).sample(list(ways), len(ways)):  # the same order on all ranks
            seconds = timed(runs[key], ways[key], device)
            times[key] += [seconds] if number > 1 else []
    return times


def lines(args: argparse.Namespace, device: torch.device):
    """Yield the lines of the table, which are equal on all ranks."""
    for local, causal in itertools.product(args.local, map(bool, args.causal)):
        pattern = DilatedPattern.geometric(args.first, local * dist.get_world_size())
        shape = (1, local, args.heads, args.head_dim)
        make = lambda shape=shape: torch.randn(shape, device=device, dtype=getattr(torch, args.dtype))  # noqa: E731
        tensors = [make().requires_grad_() for _ in "qkv"] + [make()]
        ways = groups(tensors, pattern, causal, args)
        times = rounds(ways, tensors, pattern, causal, args)
        best = min((key for key in ways if key[0] != "auto"), key=lambda key: statistics.median(times[key]))
        for (name, size), group in ways.items():
            low, middle, high = statistics.quantiles(times[name, size], n=4)
            against = statistics.median(
                a / b for a, b in zip(times[name, size], times[best], strict=True)
            )  # ratios within the same rounds
            chosen = f"auto ({group.plan.exchange or 'nothing'})" if name == "auto" else name
            cells = [local, causal, chosen, size, *(f"{x * 1e3:.2f}" for x in (middle, low, high)), f"{against:.3f}"]
            cells += awaited(step(tensors, pattern, causal, group)[1], group, device, WATCHED)
            yield f"| {' | '.join(map(str, cells))} |\n"
        for group in ways.values():
            group.close()


def work(rank: int, ranks: int, port: int, args: argparse.Namespace) -> None:
    device = joined(rank, ranks, port, args)
    gc.disable()
    head = f"\n{ranks} ranks, {args.rounds} rounds, torch {torch.__version__}\n\n"
    head += f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"
    report_lines(rank, head, lines(args, device), args.record)


if __name__ == "__main__":
    start(work, options())
