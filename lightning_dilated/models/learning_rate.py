"""LearningRate, the learning rate as an attribute of the module; WarmupCosine, the usual schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_dilated._compat.lightning import attached_trainer
from lightning_dilated._validation import integer

#: learning-rate factor for gates and decays. In each step, Adam changes a parameter by about the learning
#: rate. At a usual 3e-4, a gate that starts at 0 needs 1,000 steps to reach 0.3. With this factor, it needs 100
LR_SCALE = 10.0


def fast_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the layers' trainable `fast_parameters`, which are trained at `LR_SCALE` times the learning rate."""
    layers = [m for m in module.modules() if m is not module and callable(getattr(m, "fast_parameters", None))]
    return [p for layer in layers for p in layer.fast_parameters() if p.requires_grad]  # type: ignore[operator]


class LearningRate(pl.LightningModule):
    """A mixin that adds the attribute `lr` to a module that makes its own optimizer.

    `Tuner.lr_find` and `LearningRateFinder` look for this attribute. During their sweep all groups have the same rate.
    A value that is set after the sweep is scaled by each group's `lr_scale` and by the schedule.
    """

    _make_optimizer: Callable[[Any], Optimizer]
    _lr: float | None = None
    #: the rates of each optimizer's groups, if `lr` was set during a fit; restored when training starts
    _group_rates: list[list[float]] | None = None

    @property
    def lr(self) -> float:
        """The learning rate before scaling by a group's `lr_scale` and by the schedule.

        Setting it overrides the rate of `optimizer`; None restores that rate.

        Raises:
            ValueError: if set to a value other than None or a finite number of at least 0.
        """
        if self._lr is not None:
            return self._lr
        return float(self._make_optimizer([nn.Parameter(torch.zeros(1, 1))]).param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: float | None) -> None:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 <= value < math.inf):
            raise ValueError(
                f"lr must be a finite number of at least 0, or None for the optimizer's rate; got {value!r}."
            )
        trainer, before = attached_trainer(self), self.lr
        self._lr = None if value is None else float(value)
        if trainer is not None and trainer.optimizers and before > 0:
            self._group_rates = _scale(trainer, self.lr / before)

    def with_lr(self, optimizer: Optimizer) -> Optimizer:
        """Set each group's rate in a new optimizer to `lr` times its `lr_scale`, and return the optimizer."""
        for group in optimizer.param_groups:
            lr = group["lr"] if self._lr is None else self._lr
            group["lr"] = lr * group.pop("lr_scale", 1.0)
        self._group_rates = None
        return optimizer

    def on_train_start(self) -> None:
        """Restore each group's own rate after Lightning's finder, which gives all groups the same rate."""
        rates, self._group_rates = self._group_rates, None
        for optimizer, group_rates in zip(self.trainer.optimizers, rates or [], strict=False):
            for group, rate in zip(optimizer.param_groups, group_rates, strict=True):
                group["lr"] = rate


def _scale(trainer: Any, factor: float) -> list[list[float]]:
    """Multiply the rates of a Trainer's optimizers and the peaks of its schedules; return the rates of all groups."""
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            group.update({name: group[name] * factor for name in ("lr", "initial_lr") if name in group})
    for config in trainer.lr_scheduler_configs:
        if hasattr(config.scheduler, "base_lrs"):
            config.scheduler.base_lrs = [lr * factor for lr in config.scheduler.base_lrs]
    return [[group["lr"] for group in optimizer.param_groups] for optimizer in trainer.optimizers]


class WarmupCosine(LambdaLR):
    """Linear warm-up, then half a cosine down to `final_fraction` of the peak, then constant; stepped every batch.

    Args:
        optimizer: the optimizer; its learning rates are the peak rates.
        total_steps: the step at which the cosine ends; training may continue after it. None: the Trainer's `max_steps`,
            which DilatedModule fills in.
        warmup_steps: steps of the linear rise, fewer than `total_steps`.
        final_fraction: final learning rate, as a fraction of the peak.

    Raises:
        ValueError: for numbers out of range, or a warm-up that is not shorter than `total_steps`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int | None = None,
        warmup_steps: int = 0,
        final_fraction: float = 0.1,
    ) -> None:
        self.warmup_steps = integer(warmup_steps, "warmup_steps", 0)
        if not 0 <= final_fraction <= 1:
            raise ValueError(f"final_fraction must lie in [0, 1], got {final_fraction!r}.")
        self.final_fraction = final_fraction
        self.total_steps: int | None = None
        if total_steps is not None:
            self.total_steps = integer(total_steps, "total_steps", 1)
            if self.warmup_steps >= total_steps:
                raise ValueError(f"warmup_steps={warmup_steps} must be below total_steps={total_steps}.")
        super().__init__(optimizer, self.factor)

    def end_at(self, steps: int) -> None:
        """End the cosine after `steps` steps; a run that is shorter than the warm-up ends during the warm-up.

        Raises:
            ValueError: for fewer than one step, for example if the Trainer has no `max_steps`.
        """
        if steps < 1:
            raise ValueError("WarmupCosine needs total_steps, because the Trainer has no max_steps: give one of them.")
        self.total_steps = steps

    def factor(self, step: int) -> float:
        """Return the factor of the learning rate at `step`."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.total_steps is None:
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        return self.final_fraction + (1 - self.final_fraction) * 0.5 * (1 + math.cos(math.pi * done))
