"""Private interfaces of torch, each behind a function that names it and the versions it is known to hold for."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


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
