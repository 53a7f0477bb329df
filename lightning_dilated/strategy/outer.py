"""OuterSteps: settings of the outer optimizer steps (DiLoCo, Streaming DiLoCo) that `ext/regions` computes."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dilated._validation import flag, integer, real


@dataclass(frozen=True)
class OuterSteps:
    """Settings of the outer steps that synchronize regions: `RingDilatedStrategy(regions=2, outer=OuterSteps(...))`.

    Each region trains on its own samples with its own inner optimizer. After every `every` inner steps the regions
    average the changes of their parameters since the last outer step. The mean is the gradient for an outer optimizer,
    SGD with Nesterov momentum, which updates the shared parameters. So regions send 4 bytes a parameter once in `every`
    steps, whereas data parallel ranks send them in each step. Results differ from training as one region.

    With several `fragments`, groups of blocks are synchronized one after another within `every` steps. With `delay`,
    training continues for `delay` steps while a fragment is sent. With `warmup`, regions average all parameters after
    each of the first steps, because at first a model changes too fast to be trained in separate regions.

    Args:
        every: inner steps between two outer steps of a parameter.
        lr: the outer optimizer's learning rate.
        momentum: the outer optimizer's Nesterov momentum, in [0, 1).
        fragments: number of groups that are synchronized one after another; blocks i, i + fragments, ... form a group.
        delay: inner steps between sending a fragment and applying its outer step, fewer than `every`.
        mix: weight, in [0, 1), of the region's own parameters when an outer step is applied; the shared parameters have
            weight 1 - mix.
        warmup: number of inner steps at the start of training; regions average their parameters after each of them. The
            other arguments apply to later steps.
        offload: keep shared parameters and momentum in host memory: 4 bytes a parameter for each, 8 in float64.

    Raises:
        TypeError, ValueError: naming the argument.

    Source:
        DiLoCo (arXiv 2311.08105), where regions start from a model that was pretrained without regions; Streaming
        DiLoCo (arXiv 2501.18512) for `fragments`, `delay` and `mix`.
    """

    every: int = 100
    lr: float = 0.7
    momentum: float = 0.9
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    warmup: int = 0
    offload: bool = False

    def __post_init__(self) -> None:
        integer(self.every, "every", 1)
        real(self.lr, "lr", above=0)
        real(self.momentum, "momentum", least=0, below=1)
        integer(self.fragments, "fragments", 1)
        integer(self.delay, "delay", 0)
        real(self.mix, "mix", least=0, below=1)
        integer(self.warmup, "warmup", 0)
        flag(self.offload, "offload")
        if self.fragments > self.every:
            raise ValueError(
                f"fragments={self.fragments} must be at most every={self.every}: one fragment is sent at a step."
            )
        if self.delay >= self.every:
            raise ValueError(
                f"delay={self.delay} must be below every={self.every}: a fragment is applied before it is sent again."
            )

    def start(self, fragment: int) -> int:
        """Return the step, modulo `every`, after which a fragment is sent."""
        return fragment * self.every // self.fragments
