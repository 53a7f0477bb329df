"""What one rank measures for `bench links`: seconds of the exchanges' own all-to-all, over few bytes and many, near and far.

Shape letters: R ranks, P peers that a rank sends to.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dilated.planning.measure import on_gpu
from lightning_dilated.sequence.exchange.transport import Wire

#: bytes of a message that is all latency
FEW = 8
#: the most peers that a rank sends to: buffers hold as many messages
MOST = 8
#: seconds that a sample fills with calls one after another, and the most calls
FILL, CALLS = 0.02, 1000


@dataclass(frozen=True)
class Sample:
    """Seconds of an all-to-all in which each rank sends `size` bytes to each of P peers and receives as many.

    `kind` is "few" (a few bytes, peers anywhere), "near" (peers of the rank's node) or "far" (of other nodes).
    """

    kind: str
    peers: int
    size: int
    seconds: float

    @property
    def received(self) -> int:
        """Bytes that a rank receives."""
        return self.peers * self.size


def samples(rank: int, device: str, per_node: int, sizes: Sequence[int], repeats: int) -> Iterator[Sample]:
    """Every sample, equal on all ranks of the world, each of which has to call.

    Args:
        rank, device: this rank, and "cpu" or "cuda" (its current GPU).
        per_node: ranks of a node, neighbours in the world.
        sizes: bytes to a peer.
        repeats: samples of a median.
    """
    ranks = dist.get_world_size()
    wire = Wire(dist.group.WORLD, tuple(range(ranks)), rank)
    for kind, (length, at) in _rings(rank, ranks, per_node).items():
        most = min(length - 1, MOST)
        cases = [(p, FEW) for p in sorted({1, most})] if kind == "few" else [(most, size) for size in sorted(sizes)]
        for peers, size in cases if most else ():
            sends, receives = (dict.fromkeys(sorted(at(s * x) for x in range(1, peers + 1)), 1) for s in (1, -1))
            rows = torch.zeros(peers, size, dtype=torch.uint8, device=device)
            call = functools.partial(_exchange, wire, rows, sends, receives, torch.empty_like(rows))
            yield Sample(kind, peers, size, _seconds(call, device, repeats))


def _rings(rank: int, ranks: int, per_node: int) -> dict[str, tuple[int, Callable[[int], int]]]:
    """Of each kind, how many ranks stand in a ring with this one, and which is so many places on.

    Latencies come last: a GPU that has just begun takes nearly twice as long (2 H200: 82 us for 8 bytes, 48 for 65,536).
    """
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
    """Median seconds of one of many calls, one after another, on the slowest rank; all ranks make equally many."""
    call()  # the first connects, and makes what the library needs
    calls = max(1, min(CALLS, round(FILL / _slowest(_timed(call, device, 1), device))))
    _timed(call, device, calls)
    return _slowest(statistics.median(_timed(call, device, calls) for _ in range(repeats)), device)


def _timed(call: Callable[[], None], device: str, calls: int) -> float:
    _slowest(0.0, device)  # all begin together
    if device == "cpu":
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - begin) / calls
    return on_gpu(call, calls)


def _slowest(seconds: float, device: str) -> float:
    """The largest of all ranks'; they meet here."""
    found = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()
