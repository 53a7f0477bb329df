"""What ranks have in common: the data that the ranks of a sequence read, and how many batches all of them have."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dilated.sequence.spec import SequenceSpec
from lightning_dilated.strategy.mesh import MeshSizes

#: numbers of a tensor that an error shows; of longer ones, a digest
SHOWN = 16


def loader_facts(loader: Any) -> dict[str, str]:
    """What has to be equal for the ranks of a sequence to hold parts of the same one, as far as it can be known at once.

    A dataset's own `fingerprint()` counts, where it has one: a string that differs where its samples do.
    """
    if not isinstance(loader, DataLoader):
        return {"loader": type(loader).__name__}
    data = loader.dataset
    fingerprint = getattr(data, "fingerprint", None)
    return {
        "loader": f"{type(loader).__name__} of {type(data).__name__}",
        "samples": str(len(data)) if isinstance(data, Sized) else "unknown",
        "seq_len": str(getattr(data, "seq_len", "unknown")),
        "batch_size": str(loader.batch_size),
        "fingerprint": str(fingerprint()) if callable(fingerprint) else "unknown",
    }


def batch_facts(batch: Any, spec: SequenceSpec | None) -> dict[str, str]:
    """The entries of a batch that every rank of a sequence has whole."""
    if spec is None:
        return {}
    entries = (
        batch if isinstance(batch, Mapping) else dict(enumerate(batch)) if isinstance(batch, (tuple, list)) else {}
    )
    return {str(name): _words(entries[name]) for name in spec.whole if name in entries}


def _words(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    if value.numel() <= SHOWN:
        return str(value.tolist())
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{tuple(value.shape)} {value.dtype} {hashlib.blake2b(raw, digest_size=8).hexdigest()}"


def compare_batches(loader: Any, stage: str, limit: Any, sizes: MeshSizes, deals_parameters: bool) -> str | None:
    """Why losses cannot be added over all ranks in each step of a stage, as some have fewer batches; None if they can.

    Args:
        loader: this rank's.
        stage: "train", "val", "test" or "predict".
        limit: the Trainer's of the stage.
        sizes: the ranks.
        deals_parameters: whether all ranks meet in each step of every stage.

    Raises:
        ValueError: on every rank, where all of them meet in each step.
    """
    found = _batches_of_all(loader, limit, sizes.world)
    if len(set(found)) == 1:
        return None
    text = f"the ranks have {found} batches of the stage {stage!r}"
    multiple = f"Let the number of samples be a multiple of batch_size x {sizes.data} data ranks"
    if deals_parameters:
        raise ValueError(f"{text}, but with sharded parameters all need as many. {multiple}, or use 'ring_dilated'.")
    if stage == "train":
        raise ValueError(f"{text}, but each step takes all ranks. {multiple}, or drop the last batch.")
    return (
        f"{text}, so losses cannot be added over all ranks in each step. {multiple}; or keep sums and counts of this rank "
        "in a torchmetrics metric, which adds them up at the end of the epoch."
    )


def _batches_of_all(loader: Any, limit: Any, world: int) -> list[int]:
    """How many batches each rank has, `limit` at most; -1 where nobody knows."""
    try:
        mine = len(loader)
    except TypeError:
        mine = -1
    if mine >= 0 and isinstance(limit, int) and not isinstance(limit, bool):
        mine = min(mine, limit)
    found: list[Any] = [None] * world
    dist.all_gather_object(found, mine)
    return found
