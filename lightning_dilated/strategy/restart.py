"""Process groups of a job that torchrun restarted."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist


def join_after_restart(backend: str, timeout: timedelta, device: torch.device) -> None:
    """Make the world's process group under a name of this attempt; of no effect in a first attempt.

    The agent's store outlives its workers, with the addresses of the dead: under the usual names ranks would read those of
    the attempt before, and wait for nobody.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or dist.is_initialized() or not dist.is_torchelastic_launched():
        return
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"attempt_{attempt}", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
