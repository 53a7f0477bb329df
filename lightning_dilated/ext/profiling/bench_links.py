"""Implement `lightning-dilated bench links`, which measures latency and bandwidth between ranks for the planner.

It times an all-to-all like the exchanges: in parallel, all ranks send bytes to some peers and receive the same number.

Shape letters: P peers that a rank sends to.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dilated._validation import integer, real
from lightning_dilated.cli.errors import check_device
from lightning_dilated.ext.planning.gpus import on_gpu
from lightning_dilated.ext.profiling.verify import RanksFailed, run_ranks
from lightning_dilated.sequence.exchange.transport import Wire
from lightning_dilated.sequence.links import VARIABLE, Links, cached

#: bytes of a message so small that only latency matters
FEW = 8
#: maximum number of peers that a rank sends to; buffers have room for a message to each peer
MOST = 8
#: a sample consists of consecutive calls: their target time in seconds, and their maximum number
FILL, CALLS = 0.02, 1000


@dataclass(frozen=True)
class Sample:
    """Seconds of an all-to-all in which each rank sends `size` bytes to each of P peers, and receives P * `size` bytes.

    `kind` is "few" (a few bytes, to any peers), "near" (peers on the rank's node) or "far" (peers on other nodes).
    """

    kind: str
    peers: int
    size: int
    seconds: float

    @property
    def received(self) -> int:
        return self.peers * self.size


def samples(rank: int, device: str, per_node: int, sizes: Sequence[int], repeats: int) -> Iterator[Sample]:
    """Yield all samples, which are the same on all ranks. Every rank of the world has to call this function.

    Args:
        rank, device: this rank, and "cpu" or "cuda" (its current GPU).
        per_node: number of ranks on a node; they are neighbours in the world.
        sizes: bytes of a message to one peer.
        repeats: number of measurements for a median.
    """
    ranks = dist.get_world_size()
    wire = Wire(dist.group.WORLD, tuple(range(ranks)), rank)
    for kind, (length, rank_at) in _rings(rank, ranks, per_node).items():
        most = min(length - 1, MOST)
        cases = [(p, FEW) for p in sorted({1, most})] if kind == "few" else [(most, size) for size in sorted(sizes)]
        for peers, size in cases if most else ():
            sends, receives = (dict.fromkeys(sorted(rank_at(s * x) for x in range(1, peers + 1)), 1) for s in (1, -1))
            rows = torch.zeros(peers, size, dtype=torch.uint8, device=device)
            call = functools.partial(_exchange, wire, rows, sends, receives, torch.empty_like(rows))
            yield Sample(kind, peers, size, _seconds(call, device, repeats))


def _rings(rank: int, ranks: int, per_node: int) -> dict[str, tuple[int, Callable[[int], int]]]:
    """Return, for each kind, the length of this rank's ring and a function that maps n to the n-th next rank in it.
    Latencies come last, because a GPU is slower at first: two H200 took 82 us for 8 bytes and then 48 us for 65,536."""
    node, local = divmod(rank, per_node)
    nodes = ranks // per_node
    return {
        "near": (per_node, lambda step: node * per_node + (local + step) % per_node),
        "far": (nodes, lambda step: (node + step) % nodes * per_node + local),
        "few": (ranks, lambda step: (rank + step) % ranks),
    }


def _exchange(wire: Wire, rows: Tensor, sends: Mapping[int, int], receives: Mapping[int, int], into: Tensor) -> None:
    wire.post(rows, sends, receives, into).wait()


def _seconds(call: Callable[[], None], device: str, repeats: int) -> float:
    """Return the median seconds per call, over samples of many consecutive calls, on the slowest rank."""
    call()  # the first call opens connections and initializes the library
    calls = max(1, min(CALLS, round(FILL / _slowest(_timed(call, device, 1), device))))
    _timed(call, device, calls)
    return _slowest(statistics.median(_timed(call, device, calls) for _ in range(repeats)), device)


def _timed(call: Callable[[], None], device: str, calls: int) -> float:
    _slowest(0.0, device)  # synchronizes the ranks
    if device == "cpu":
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - begin) / calls
    return on_gpu(call, calls)


def _slowest(seconds: float, device: str) -> float:
    """Return the largest value of all ranks; this also synchronizes the ranks."""
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


# -- the command -------------------------------------------------------------------------------------------------------
SIZES = tuple(1 << n for n in range(16, 27, 2))
#: lower bound, in seconds, for estimated latencies
LEAST = 1e-7
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--ranks", type=int, help="(default: all GPUs, or 2 CPU processes; under torchrun, its ranks)")
    per_node_help = "(default: all ranks of a host; a lower number simulates several nodes)"
    p.add_argument("--ranks_per_node", "--ranks-per-node", type=int, help=per_node_help)
    p.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes to a peer (default: 64 KiB to 64 MiB)")
    p.add_argument("--repeats", type=int, default=10, help="measurements for a median (default %(default)s)")
    p.add_argument(
        "--timeout", type=float, default=300.0, help="stop the ranks after this many seconds (default %(default)g)"
    )
    p.add_argument("--output", type=Path, help='file for the links (default: the file that exchange="auto" reads)')
    p.add_argument("--record", type=Path, help="append the table to this file")


def launched() -> tuple[int, int, int] | None:
    """Return torchrun's (rank, number of ranks, ranks per node); None if this process has to start the ranks.

    Raises:
        ValueError: if only some of torchrun's variables are set, or if they are not numbers.
    """
    values = [os.environ.get(name) for name in LAUNCHED]
    if not any(values):
        return None
    if not all(x and x.isdigit() for x in values):
        settings = ", ".join(f"{name}={x}" for name, x in zip(LAUNCHED, values, strict=True))
        raise ValueError(f"{settings}: set all of {', '.join(LAUNCHED)} to numbers, as torchrun does, or set none.")
    return tuple(map(int, values))


def checked(args: argparse.Namespace, launcher: tuple[int, int, int] | None) -> argparse.Namespace:
    """Fill in defaults of the options; raise ValueError if links cannot be measured or files cannot be written."""
    check_device(args.device)
    gpus = torch.cuda.device_count() if args.device == "cuda" else 0
    if launcher is not None and args.ranks not in (None, launcher[1]):
        raise ValueError(f"--ranks {args.ranks}: the launcher started {launcher[1]} ranks; leave --ranks out.")
    args.ranks = launcher[1] if launcher else (gpus or 2) if args.ranks is None else args.ranks
    local_ranks = launcher[2] if launcher else args.ranks
    args.ranks_per_node = local_ranks if args.ranks_per_node is None else args.ranks_per_node
    if args.ranks < 2:
        raise ValueError(f"links need at least 2 ranks, got {args.ranks}. Raise --ranks, or use torchrun.")
    if gpus and local_ranks > gpus:
        raise ValueError(f"{local_ranks} ranks, but this machine has {gpus} GPUs. Lower --ranks, or use --device cpu.")
    if args.ranks_per_node < 1 or args.ranks % args.ranks_per_node:
        raise ValueError(f"--ranks_per_node {args.ranks_per_node} must divide the {args.ranks} ranks.")
    integer(min(args.sizes), "--sizes", 1)
    integer(args.repeats, "--repeats", 1)
    real(args.timeout, "--timeout", above=0, hint=" It is in seconds.")
    args.output = _writable(args.output or _default(args.device), "output")
    args.record = args.record and _writable(args.record, "record")
    return args


def _default(device: str) -> Path:
    if device == "cpu" and torch.cuda.is_available():
        raise ValueError("--device cpu would overwrite the links for runs on GPUs; name a file with --output.")
    return cached()


def _writable(path: Path, option: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"--{option} {path}: cannot be written. Name another file.")
    return path


def estimate_links(samples: list[Sample], source: str) -> Links:
    """Estimate the planner's numbers from samples. Numbers without samples keep their defaults; `source` lists them.

    An all-to-all of a few bytes to one peer takes the time of a round and a message. Each further peer adds the time of
    a message. Bandwidths are a least-squares fit of seconds = constant + bytes / bandwidth; large sizes dominate it.

    Raises:
        ValueError: if the sizes are too small to measure a bandwidth.
    """
    few, links = [x for x in samples if x.kind == "few"], Links(source=source)
    if len(few) > 1:
        added = (few[-1].seconds - few[0].seconds) / (few[-1].peers - few[0].peers)
        links = replace(links, message=max(LEAST, added))
    links = replace(links, round=max(LEAST, few[0].seconds - links.message))
    defaults = [] if len(few) > 1 else ["message"]
    for kind in ("near", "far"):
        rows = [x for x in samples if x.kind == kind]
        if not rows:
            defaults.append(kind)
            continue
        size, took = (statistics.mean(x) for x in ([x.received for x in rows], [x.seconds for x in rows]))
        if len(rows) == 1:  # a single size gives no slope, so the latency is subtracted
            size, took = 0.0, links.round + rows[0].peers * links.message
        above = sum((x.seconds - took) * (x.received - size) for x in rows)
        if above <= 0:
            sizes = ", ".join(str(x.size) for x in rows)
            raise ValueError(f"--sizes {sizes}: messages took no longer than a few bytes do; give larger sizes.")
        links = replace(links, **{kind: sum((x.received - size) ** 2 for x in rows) / above})
    return replace(links, source=f"{source}; {', '.join(defaults)}: defaults") if defaults else links


def table(samples: list[Sample], links: Links) -> list[str]:
    lines = [
        "| links | peers | bytes to each | ms | GB/s a rank | estimated ms |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for x in samples:
        latency = links.round + x.peers * links.message
        name, speed, estimate = "any", "", latency
        if x.kind != "few":
            name, speed = x.kind, f"{x.received / x.seconds / 1e9:.4g}"
            estimate += x.received / getattr(links, x.kind)
        lines.append(f"| {name} | {x.peers} | {x.size:,} | {x.seconds * 1e3:.4f} | {speed} | {estimate * 1e3:.4f} |")
    return lines


def report(args: argparse.Namespace, samples: list[Sample], command: str) -> tuple[Links, str]:
    """Return the links, and the text for the console and the record."""
    today, on_gpu = datetime.date.today(), args.device == "cuda"
    where = f"{args.ranks} x {torch.cuda.get_device_name()}" if on_gpu else f"{args.ranks} processes of the CPU"
    nodes = f", nodes of {args.ranks_per_node} ranks" if args.ranks_per_node < args.ranks else ""
    links = estimate_links(samples, f"measured on {where}{nodes}, {today}")
    library = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if on_gpu else "gloo"
    lines = [
        f"{today}, {where}{nodes}, {library}, Python {platform.python_version()}, torch {torch.__version__}",
        f"`{command}`",
        f"all-to-all of bytes, all ranks at once; median of {args.repeats} on the slowest rank; GB/s of received bytes",
        "",
        *table(samples, links),
        "",
        str(links),
        "near and far: least squares of ms = a constant + bytes / bandwidth",
    ]
    if args.ranks_per_node == args.ranks:
        lines.append("far keeps its default: all ranks are of one node")
    return links, "\n".join([*lines, ""])


def write(args: argparse.Namespace, links: Links, text: str, prints: bool = True) -> None:
    links.save(args.output)
    if not prints:
        return
    print(text)
    read = args.output == cached()
    use = 'exchange="auto" reads it from now on' if read else f"to use it, give links={args.output} or set {VARIABLE}"
    if read and os.environ.get(VARIABLE):
        use = f"not read while {VARIABLE}={os.environ[VARIABLE]} is set"
    print(f"written: {args.output} ({use})")
    if args.record:
        with args.record.open("a") as file:
            file.write("\n" + text)


def run(argv: list[str]) -> None:
    """Run the command: parse options, measure, print the table and write the file."""
    p = argparse.ArgumentParser("lightning-dilated bench", description="Measure this machine.")
    parts = p.add_subparsers(dest="what", required=True)
    about = 'latency and bandwidth between ranks, for exchange="auto"'
    options(parts.add_parser("links", help=about, description=f"Measure {about}."))
    measure(p.parse_args(argv), " ".join(["lightning-dilated bench", *argv]))


def measure(args: argparse.Namespace, command: str) -> None:
    """Measure on new ranks or on a launcher's ranks, print the table and write the file."""
    launcher = launched()
    args = checked(args, launcher)
    options = args.ranks_per_node, tuple(args.sizes), args.repeats
    if launcher is not None:
        _among_launched(args, launcher, options, command)
        return
    try:
        measured = run_ranks(args.ranks, samples, *options, device=args.device, timeout=args.timeout)[0]
    except RanksFailed as error:
        print(f"{error}. Nothing was written.", file=sys.stderr)
        raise SystemExit(1) from None
    write(args, *report(args, measured, command))


def _among_launched(args: argparse.Namespace, launcher: tuple[int, int, int], options: tuple, command: str) -> None:
    """Measure as one of a launcher's ranks. The first rank of each node writes, because nodes may not share folders."""
    rank, _, local_ranks = launcher
    local = int(os.environ.get("LOCAL_RANK", rank % local_ranks))
    if args.device == "cuda":
        torch.cuda.set_device(local)
    backend, patience = "nccl" if args.device == "cuda" else "gloo", datetime.timedelta(seconds=args.timeout)
    dist.init_process_group(backend, timeout=patience)
    try:
        measured = list(samples(rank, args.device, *options))
        summary = report(args, measured, command)
        if local == 0:
            write(args, *summary, prints=rank == 0)
    finally:
        dist.destroy_process_group()
