"""torchao's optimizers, whose states of 4 or 8 bits are subclasses of tensors: what their one-file checkpoints need."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from lightning.fabric.plugins.io import TorchCheckpointIO


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
