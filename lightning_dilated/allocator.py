"""How CUDA's memory is taken: in segments that grow, so that long sequences' large tensors leave no holes between them."""

from __future__ import annotations

from collections.abc import MutableMapping

#: what torch reads when the first tensor is made on a GPU, by its names so far
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def expandable_segments(env: MutableMapping[str, str]) -> None:
    """Ask torch's allocator for expandable segments, unless the user has settings of their own."""
    if not any(name in env for name in NAMES):
        env[NAMES[0]] = "expandable_segments:True"
