"""Replicas: ranks compare the bits of the parameters that they all hold."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dilated._compat.torch import own_parameters
from lightning_dilated.checkpoint.state import bits, plain_tensors, unlike_replicas


class Replicas:
    """Compares the bits of unsharded parameters over ranks, without making the host wait for the GPU between steps.

    Ranks with equal settings have the same bits, unless they differ in something that the settings do not show: a
    callback that changes a learning rate, the version of a package, faulty memory. Sharded parameters are not compared.
    Buffers are not compared either, because each rank may have its own.

    Args:
        module: the module with the parameters.
        every: number of optimizer steps between two comparisons; None: compare only before a checkpoint.
        group: the ranks that hold the same parameters.
    """

    def __init__(self, module: nn.Module, every: int | None, group: dist.ProcessGroup) -> None:
        self.module, self.every, self.group = module, every, group
        self._steps = 0
        #: parameter names; bits on this rank; maximum over ranks of bits and of inverted bits; event of the copy to host
        self._posted: tuple[list[str], Tensor, Tensor, torch.cuda.Event | None] | None = None

    def step(self) -> None:
        """Count an optimizer step, and compare every `every` steps; every rank must call this.

        Raises:
            RuntimeError: on every rank, if parameters differ; on a GPU, the error is raised at the next comparison.
        """
        self._steps += 1
        if self.every is not None and self._steps % self.every == 0:
            self.settle()
            self._post()
            if self._posted is not None and self._posted[3] is None:
                self.settle()

    def compare(self) -> None:
        """Compare without delay, before a checkpoint; every rank must call this. Raise RuntimeError as in `step`."""
        self.settle()
        self._post()
        self.settle()

    def settle(self) -> None:
        """Read the last comparison's result; every rank must call this. Raise RuntimeError as in `step`."""
        if self._posted is None:
            return
        (names, local, extremes, event), self._posted = self._posted, None
        if event is not None:
            event.synchronize()
        largest, inverted_smallest = extremes.chunk(2)
        if not torch.equal(largest, ~inverted_smallest):
            raise RuntimeError(self._difference(dict(zip(names, local.tolist(), strict=True))))

    def _named(self) -> dict[str, Tensor]:
        ignored = own_parameters(self.module)
        return plain_tensors((name, p) for name, p in self.module.named_parameters() if name not in ignored)

    def _post(self) -> None:
        """Start to find the largest and smallest bits of each parameter over ranks; they are equal if ranks agree."""
        named = self._named()
        if not named:
            return
        local = torch.stack([bits(p) for p in named.values()])
        extremes = torch.cat([local, ~local])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self.group)  # on a GPU only the stream waits
        if extremes.device.type != "cuda":
            self._posted = [*named], local, extremes, None
            return
        host = torch.empty(extremes.shape, dtype=extremes.dtype, pin_memory=True).copy_(extremes, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._posted = [*named], local, host, event

    def _difference(self, local: dict[str, int]) -> str:
        """Describe the ranks and parameters that differed in the comparison; every rank must call this."""
        gathered: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(gathered, local, group=self.group)
        return unlike_replicas(gathered, dist.get_process_group_ranks(self.group))
