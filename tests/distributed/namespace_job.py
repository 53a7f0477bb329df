"""A rank in a call on two nodes: namespace_job.py EXCHANGE CALLS. It checks its results and writes byte counts."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import lightning_dilated as ld
from lightning_dilated.sequence import SequenceGroup

N, HEADS, DIM = 4096, 4, 32
PATTERN = ld.DilatedPattern.geometric(256, 4096)


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, N, HEADS, DIM, generator=generator, dtype=torch.float64) for _ in range(3)]


def attend(qkv, **options) -> list[torch.Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in qkv)
    out = ld.dilated_attention(q, k, v, PATTERN, **options)
    out.square().sum().backward()
    return [x.detach() for x in (out, q.grad, k.grad, v.grad)]


def main() -> None:
    exchange, calls = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo")
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    group = SequenceGroup(exchange=exchange, ranks_per_node=per_node)
    (at,) = group.shard(N).ranges(group.rank)
    shards = [x[:, at.start : at.stop] for x in tensors()]
    with ld.sequence.group.no_sequence():
        alone = attend(tensors())
    together = attend(shards, sequence=group)
    for x, whole in zip(together, alone, strict=True):
        torch.testing.assert_close(x, whole[:, at.start : at.stop], rtol=1e-10, atol=1e-10)
    dist.barrier()
    interface = Path("/sys/class/net", os.environ["GLOO_SOCKET_IFNAME"], "statistics/tx_bytes")
    before, begin = int(interface.read_text()), time.perf_counter()
    for traffic in (group.forward_traffic, group.backward_traffic):
        traffic.clear()
    for _ in range(calls):
        attend(shards, sequence=group)
    dist.barrier()
    seconds, wire = time.perf_counter() - begin, int(interface.read_text()) - before
    outside = lambda side: sum(n for peer, n in side.items() if peer // per_node != group.rank // per_node)  # noqa: E731
    runs = group.forward_traffic, group.backward_traffic
    counted = {"sent": sum(outside(t.sent_to) for t in runs), "received": sum(outside(t.received_from) for t in runs)}
    Path(f"{exchange}_{group.rank}.json").write_text(json.dumps({**counted, "wire": wire, "seconds": seconds}))
    group.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
