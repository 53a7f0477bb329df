"""Calls of attention chunk by chunk, where workers share every chunk: results and transferred bytes of a rank."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_dilated.ext.profiling.planned import moved
from lightning_dilated.sequence.exchange.transport import TrafficLog

from ..ext.streams.chunks import Chunks
from .calls import SEED, Result, positions, sequence

NAMES = ("out", "dq", "dk", "dv")


def attend(rank, group, case, chunk, dropout=0.0, windows=((0, None),), dtype=torch.float64):
    """Return (Result, planned bytes, FLOPs) of this rank's pieces, both passes. Random states differ on purpose."""
    torch.manual_seed(SEED + 1000 * rank)
    with sequence(group, layout="chunked", stream=chunk) as ours, ours.active():
        ours.watch(log := TrafficLog())
        chunks = Chunks(case, chunk, dropout, windows, ours)
        with FlopCounterMode(display=False) as counter:
            outputs = chunks.run(*case.tensors(dtype))
        tensors = {name: x.detach() for name, x in zip(NAMES, outputs, strict=True)}
        shares = ours.forward_traffic, ours.backward_traffic
        result = Result(
            tensors, positions(ours, case.seq_len), *zip(*((t.sent, t.received) for t in shares), strict=True)
        )
        planned = [0, 0, 0, 0]
        for x in log.planned:
            backward = x.run == "backward"
            want = moved(x.problem, x.exchange, x.rank, x.per_node, x.head_dim, x.element_size)[backward]
            planned[backward] += want.sent
            planned[2 + backward] += want.received
        return result, (tuple(planned[:2]), tuple(planned[2:])), counter.get_total_flops()
