"""The order of training samples: that of the loader, where Lightning puts in a sampler for several ranks.

Lightning's sampler shuffles the training data of every strategy for several processes, also where the loader was made with
shuffle=False or a sampler of its own. A run would then see other batches than on one device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, RandomSampler


def keep_order(trainer: pl.Trainer) -> None:
    """Have the samplers that Lightning puts into training loaders shuffle only where the loader did."""
    connector = trainer._data_connector
    usual = getattr(connector, "_resolve_sampler", None)
    if usual is None:
        rank_zero_warn(
            "this version of lightning shuffles training data although a loader has shuffle=False. If the order matters, "
            "pass Trainer(use_distributed_sampler=False), and samplers that deal samples to the data ranks themselves."
        )
    elif not isinstance(usual, functools.partial):
        connector._resolve_sampler = functools.partial(_resolve, usual)


def _resolve(usual: Callable[..., Any], dataloader: DataLoader, shuffle: bool, mode: RunningStage | None = None) -> Any:
    """Lightning's sampler; its `shuffle` is True for every training loader."""
    asked = shuffles(dataloader) if mode == RunningStage.TRAINING else shuffle
    return usual(dataloader, shuffle=asked, mode=mode)


def shuffles(dataloader: DataLoader) -> bool:
    """Whether a loader was made with shuffle=True, or an equal sampler.

    Samplers of other kinds have an order of their own, which is kept. A batch sampler that shows no sampler is not known to
    have one: it counts as shuffling.
    """
    if dataloader.batch_sampler is None:
        return isinstance(dataloader.sampler, RandomSampler)
    return isinstance(getattr(dataloader.batch_sampler, "sampler", RandomSampler([0])), RandomSampler)
