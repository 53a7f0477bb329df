"""torchao's optimizers, whose states of 4 or 8 bits are tensors made of others: what their checkpoints need."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Mapping
from typing import Any

from lightning.fabric.plugins.io import TorchCheckpointIO
from torch import Tensor

#: where torchao has its classes of states
KINDS = {f"OptimState{x}": f"torchao.optim.subclass_{x.lower()}" for x in ("4bit", "8bit", "Fp8")}
#: what a state is made of beside tensors
TOLD = "told"


def taken_apart(value: Any) -> Any:
    """A nested mapping with each such state in the tensors that it is made of, so that folders hold its own bits."""
    if isinstance(value, Mapping):
        return {k: taken_apart(v) for k, v in value.items()}
    if not (isinstance(value, Tensor) and type(value).__name__ in KINDS):
        return value
    names, told = value.__tensor_flatten__()
    return {type(value).__name__: {**{name: getattr(value, name) for name in names}, TOLD: told}}


def put_together(value: Any) -> Any:
    """The reverse of `taken_apart`.

    Raises:
        ImportError: without torchao.
    """
    if not isinstance(value, Mapping):
        return value
    name = next(iter(value), None)
    if len(value) != 1 or name not in KINDS:
        return {k: put_together(v) for k, v in value.items()}
    try:
        made = getattr(importlib.import_module(KINDS[name]), name)
    except ImportError as error:
        raise ImportError(f"the checkpoint holds states of torchao's ({name}): install the extra eightbit.") from error
    tensors = {k: v for k, v in value[name].items() if k != TOLD}
    return made.__tensor_unflatten__(tensors, value[name][TOLD])


def read_to_host(io: Any) -> None:
    """Let Lightning's own reader of files name the host as a device; another reader is left alone.

    Lightning names it by a function, and torch then refuses tensors that are made of others, as torchao's states are.
    """
    if type(io) is TorchCheckpointIO:
        io.load_checkpoint = functools.partial(TorchCheckpointIO.load_checkpoint, io, map_location="cpu")


def small_states(optimizer: Any) -> str | None:
    """The name of torchao's class, if the optimizer is one that keeps states of 4 or 8 bits."""
    ends = ("4bit", "8bit", "Fp8")
    known = [c.__name__ for c in type(optimizer).__mro__ if c.__module__.startswith("torchao.")]
    return next((name for name in known if name.endswith(ends)), None)


def refuse_one_file(optimizers: Iterable[Any], why: str) -> None:
    """Raise where ranks hold parts of such states: torch cannot gather them into one file, or deal them out of one.

    Args:
        why: how one file comes into it, as the sentence begins.

    Raises:
        ValueError: naming the optimizer, and what to take instead.
    """
    name = next(filter(None, map(small_states, optimizers)), None)
    if name is not None:
        raise ValueError(
            f"{why}, and the states of torchao's {name} cannot be dealt out of one. Go on from folders: those that "
            "ring_dilated_fsdp writes without save_distributed_checkpoint=False, or callbacks.ShardedCheckpoint with any "
            "strategy here (`lightning-dilated consolidate` makes one file of their weights); or take torch.optim.AdamW."
        )


def refuse_whole(names: Iterable[str], folder: Any) -> None:
    """Raise where a folder holds such states of whole parameters, which are not dealt to ranks.

    Args:
        names: of all that it holds.

    Raises:
        ValueError: naming what to do.
    """
    found = next((kind for kind in KINDS for name in names if f".{kind}." in name), None)
    if found is not None:
        raise ValueError(
            f"{folder} holds {found} of whole parameters, which cannot be dealt to ranks. Go on with a strategy that holds "
            "them whole (one GPU, or ring_dilated), or begin anew from its weights (`lightning-dilated consolidate`)."
        )
