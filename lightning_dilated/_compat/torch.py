"""Private interfaces of torch, each behind a function that says why it is used and for which versions it holds.

`tests/test_compat.py` has a test for each, which names what breaks where one changes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules import batchnorm, conv, instancenorm, pooling
from torch.serialization import _get_layout
from torch.utils.data import DataLoader

# -- meshes, modules and loaders; all of it holds for torch 2.11 to 2.13 -------------------------------------------------

#: base classes that have no public name: of modules that take statistics over tokens, pool neighbours, pool all tokens
TOKEN_NORMS = (batchnorm._BatchNorm, instancenorm._InstanceNorm, nn.GroupNorm)
POOLS = (pooling._MaxPoolNd, pooling._AvgPoolNd, pooling._LPPoolNd)
ADAPTIVE_POOLS = (pooling._AdaptiveAvgPoolNd, pooling._AdaptiveMaxPoolNd)
#: the base class of all convolutions
CONVOLUTION: Any = conv._ConvNd


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """All axes of a mesh as one, by `DeviceMesh._flatten`, the only way to a group over several axes."""
    return mesh._flatten(name)


def default_store() -> dist.Store:
    """The store that the default process group was made with, by `distributed_c10d._get_default_store`."""
    return dist.distributed_c10d._get_default_store()


def use_autograd_cache(enabled: bool) -> AbstractContextManager[None]:
    """Within, torch.compile reads and writes its on-disk cache of graphs or not: `torch._functorch.config`."""
    from torch._functorch import config  # with it comes the compiler

    return config.patch(enable_autograd_cache=enabled)


def uses_autograd_cache() -> bool:
    """Whether torch.compile uses its on-disk cache of graphs: `torch._functorch.config.enable_autograd_cache`."""
    from torch._functorch import config

    return config.enable_autograd_cache


def whole_graphs_in_ddp() -> AbstractContextManager[None]:
    """Within, torch.compile does not cut graphs at DDP's buckets: `torch._dynamo.config.optimize_ddp`."""
    return torch._dynamo.config.patch(optimize_ddp=False)


def map_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace parameters, buffers and metric states by a function of each, by `nn.Module._apply`, as `Module.to` does."""
    module._apply(function)


def set_dataset(loader: DataLoader, dataset: Any) -> None:
    """Give a loader that was made another dataset of the same length: `DataLoader.__setattr__` forbids it for its sampler's
    sake, so the attribute is set past it."""
    vars(loader)["dataset"] = dataset


# -- files of torch.distributed.checkpoint -------------------------------------------------------------------------------
#: where an entry lies in a file, in `.metadata`: `filesystem._StorageInfo(relative_path, offset, length)`
StorageInfo = _StorageInfo
#: the memory format of a tensor as `.metadata` names it
MemoryFormatEncoding = metadata._MEM_FORMAT_ENCODING


def stored_layout(name: str) -> torch.layout:
    """The layout of that name; `.metadata` files pickle a layout as a call of `torch.serialization._get_layout`."""
    return _get_layout(name)


def set_nested(state: Any, path: tuple[str | int, ...], value: Any) -> None:
    """Set a value below nested mappings and lists, as the DefaultLoadPlanner does, by `_nested_dict.set_element`."""
    set_element(state, path, value)


# -- process groups ----------------------------------------------------------------------------------------------------
def gloo_backend(group: dist.ProcessGroup, name: str, timeout: timedelta | None) -> dist.ProcessGroupGloo:
    """A gloo backend of a group's ranks, over a connection of its own that `name` tells apart.

    `dist.new_group` does not serve: all ranks of the job would have to call it, or (with local synchronization) to have
    created equally many groups before. Uses `dist.distributed_c10d._get_default_store` and the constructor of
    `dist.ProcessGroupGloo`, which torch does not document. Holds for torch 2.11 to 2.13.
    """
    prefix = f"lightning-dilated/{group.group_name}/{timeout}/{name}"
    store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
    options = {} if timeout is None else {"timeout": timeout}
    return dist.ProcessGroupGloo(store, dist.get_rank(group), dist.get_world_size(group), **options)


# -- autograd ----------------------------------------------------------------------------------------------------------
def in_backward() -> bool:
    """Whether this thread runs a backward.

    torch has no public question for it. Uses `torch._C._current_graph_task_id`, -1 outside of a backward. Holds for torch
    2.11 to 2.13.
    """
    return torch._C._current_graph_task_id() != -1
