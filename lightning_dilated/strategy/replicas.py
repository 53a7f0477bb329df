"""Replicas: ranks compare the bits of the parameters that all of them hold."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dilated._compat.torch import own_parameters
from lightning_dilated.checkpoint.state import bits, plain_tensors, unlike_replicas


class Replicas:
    """Compares the bits of parameters of which every rank holds the whole; the host waits for no GPU.

    Ranks that train alike hold the same bits. They no longer do where something differs between them that no setting says:
    a callback that changes a learning rate, a package's version, memory that fails. Sharded parameters and buffers, of which
    each rank may have its own, are not compared.

    Args:
        module: with the parameters.
        every: optimizer steps between two comparisons; None: only where a checkpoint is made.
        group: the ranks that hold the same parameters.
    """

    def __init__(self, module: nn.Module, every: int | None, group: dist.ProcessGroup) -> None:
        self.module, self.every, self.group = module, every, group
        self._steps = 0
        #: names, this rank's bits, the largest and smallest of all ranks, and what a GPU signals once these are there
        self._posted: tuple[list[str], Tensor, Tensor, torch.cuda.Event | None] | None = None

    def step(self) -> None:
        """After each optimizer step, on every rank.

        Raises:
            RuntimeError: on every rank, for what was sent `every` steps before; on CPUs for what is sent now.
        """
        self._steps += 1
        if self.every is not None and self._steps % self.every == 0:
            self.settle()
            self._post()
            if self._posted is not None and self._posted[3] is None:
                self.settle()

    def compare(self) -> None:
        """Compare at once, on every rank, as before a checkpoint; raises as `step`."""
        self.settle()
        self._post()
        self.settle()

    def settle(self) -> None:
        """Read what was sent last, on every rank; raises as `step`."""
        if self._posted is None:
            return
        (names, own, both, event), self._posted = self._posted, None
        if event is not None:
            event.synchronize()
        largest, smallest = both.chunk(2)
        if not torch.equal(largest, ~smallest):
            raise RuntimeError(self._difference(dict(zip(names, own.tolist(), strict=True))))

    def _named(self) -> dict[str, Tensor]:
        ignored = own_parameters(self.module)
        return plain_tensors((name, p) for name, p in self.module.named_parameters() if name not in ignored)

    def _post(self) -> None:
        """Send the bits of all parameters: the largest and the smallest of a parameter are those of equal ranks."""
        named = self._named()
        if not named:
            return
        own = torch.stack([bits(p) for p in named.values()])
        both = torch.cat([own, ~own])
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self.group)  # on a GPU its stream waits, and not the host
        if both.device.type != "cuda":
            self._posted = [*named], own, both, None
            return
        host = torch.empty(both.shape, dtype=both.dtype, pin_memory=True).copy_(both, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._posted = [*named], own, host, event

    def _difference(self, own: dict[str, int]) -> str:
        """Which ranks held other values of which parameters, in words; a collective call.

        Args:
            own: this rank's bits as they were sent: later steps may have changed the parameters.
        """
        every: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(every, own, group=self.group)
        return unlike_replicas(every, dist.get_process_group_ranks(self.group))
