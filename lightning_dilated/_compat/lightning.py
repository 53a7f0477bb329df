"""Private APIs of Lightning, each behind a name that says what it uses, why, and which versions it is known to hold for."""

from __future__ import annotations

import functools
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _load
from lightning.pytorch.utilities.model_helpers import _restricted_classmethod

# -- models ------------------------------------------------------------------------------------------------------------
#: a class method that raises where it is called on an object, as Lightning's `load_from_checkpoint`; known for 2.6.6
restricted_classmethod = _restricted_classmethod


def attached_trainer(module: pl.LightningModule) -> pl.Trainer | None:
    """The Trainer that runs the module, None outside of one, where `module.trainer` raises.

    Uses `LightningModule._trainer`. Known to hold for lightning 2.6.6.
    """
    return module._trainer


def read_remote(address: Any) -> Any:
    """A checkpoint at an address that fsspec can open, on the CPU and with `weights_only=True`.

    Uses `lightning.fabric.utilities.cloud_io._load`. Known to hold for lightning 2.6.6.
    """
    return _load(address, map_location="cpu", weights_only=True)


def load_to_cpu_by_name(strategy: Any) -> None:
    """Let the strategy's checkpoint reader name the CPU as a string.

    Lightning passes a function as `map_location`, with which torch cannot read torchao's low-bit optimizer states. Replaces
    `load_checkpoint` of a plain `TorchCheckpointIO` object; others are left alone. Known to hold for lightning 2.6.6.
    """
    io = getattr(strategy, "checkpoint_io", None)
    if type(io) is TorchCheckpointIO:
        load: Any = TorchCheckpointIO.load_checkpoint  # Lightning declares map_location as a function only
        io.load_checkpoint = functools.partial(load, io, map_location="cpu")  # type: ignore[method-assign]
