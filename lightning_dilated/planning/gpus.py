"""GPUs by name: the memory that a process can have of them, and their dense products in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dilated.allocator import ROOM

GIB = 2**30
#: share of a GPU's memory that is left free, and bytes at least (see `allocator.ROOM`): fragments of the allocator, what a
#: count does not see
MARGIN, LEAST = 0.03, ROOM
#: what CUDA and its libraries hold of a GPU outside of torch's allocator, and NCCL where several ranks talk; on two H200
#: both together held 2.85 GiB when training began, and 3.02 later
CONTEXT, NCCL = GIB // 2, 5 * GIB // 2


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        memory: bytes that the driver gives out.
        flops: FLOP/s of dense products in bf16, as its maker states them.
        capability: compute capability.
    """

    name: str
    memory: int
    flops: float
    capability: tuple[int, int]

    def usable(self, ranks: int = 1) -> int:
        """Bytes that a step may take by torch's allocator."""
        return self.memory - max(LEAST, int(self.memory * MARGIN)) - CONTEXT - (NCCL if ranks > 1 else 0)


def _gpu(name: str, gib: float, tflops: float, capability: tuple[int, int]) -> Gpu:
    return Gpu(name, int(gib * GIB), tflops * 1e12, capability)


#: what drivers report of 141, 80, 40, 48 and 24 GB; H200 and H100 as seen on this project's machines
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("H200", 139.8, 989.4, (9, 0)),
        _gpu("H100", 79.1, 989.4, (9, 0)),
        _gpu("A100-80GB", 79.1, 312, (8, 0)),
        _gpu("A100-40GB", 39.4, 312, (8, 0)),
        _gpu("L40S", 44.4, 362, (8, 9)),
        _gpu("RTX4090", 23.5, 165.2, (8, 9)),
        _gpu("RTX3090", 23.5, 71, (8, 6)),
        _gpu("A10", 22.0, 125, (8, 6)),
    )
}


def find_gpu(name: str, gib: float | None = None) -> Gpu:
    """The GPU of a name (capitals and signs do not matter), with `gib` of memory if given.

    Raises:
        ValueError: for another name, with those there are; for memory that cannot be.
    """
    plain = lambda x: "".join(c for c in x.lower() if c.isalnum())  # noqa: E731
    found = {plain(x): gpu for x, gpu in GPUS.items()} | {"a100": GPUS["A100-80GB"], "h10080gb": GPUS["H100"]}
    gpu = found.get(plain(name))
    if gpu is None:
        raise ValueError(
            f"--gpu must be one of {', '.join(GPUS)}; got {name!r}. Another one: the nearest of these and --gpu-memory GIB."
        )
    if gib is None:
        return gpu
    if not 1 <= gib < 10000:
        raise ValueError(f"--gpu-memory must be GiB of one GPU, from 1 on; got {gib!r}.")
    return Gpu(f"{gpu.name} with {gib:g} GiB", int(gib * GIB), gpu.flops, gpu.capability)
