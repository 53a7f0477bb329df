"""OuterSteps: how regions that train apart keep one model (DiLoCo, Streaming DiLoCo). `ext/regions` computes the steps."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dilated._validation import flag, integer, real


@dataclass(frozen=True)
class OuterSteps:
    """How regions that train apart keep one model; for `RingDilatedStrategy(regions=2, outer=OuterSteps(...))`.

    Each region trains on its own samples with its own optimizer, the inner one. After every `every` steps of it the regions
    average how far their parameters moved since the last outer step, and take that for the gradient of an outer optimizer:
    SGD with Nesterov momentum, over the parameters that all regions share. So regions send 4 bytes a parameter every `every`
    steps, where data parallel ranks do at each. It is another optimizer than that of one region, with other results.

    With `fragments` the parameters are synchronised in turn, a part of the blocks at a time, evenly spread over `every`
    steps. With `delay` training goes on for so many steps while a fragment is under way. With `warmup` regions take the mean
    of all their parameters after each of the first steps, where a model changes too fast to be trained apart.

    Args:
        every: inner steps between two outer steps of a parameter.
        lr: the outer optimizer's learning rate.
        momentum: its Nesterov momentum, in [0, 1).
        fragments: parts of the model that are synchronised in turn; blocks i, i + fragments, ... are together.
        delay: inner steps from when a fragment is sent to when its outer step is applied, fewer than `every`.
        mix: weight, in [0, 1), of the region's own parameters where an outer step is applied; the rest is the shared ones'.
        warmup: inner steps, from the first one on, after each of which regions take the mean of their parameters; `lr`,
            `momentum`, `fragments`, `delay` and `mix` count for those after them.
        offload: keep shared parameters and momentum (4 bytes each a parameter, 8 where parameters are float64) in host
            memory.

    Raises:
        TypeError, ValueError: naming the argument.

    Source:
        DiLoCo (arXiv 2311.08105), whose regions begin with a model that was trained without them; Streaming DiLoCo (arXiv
        2501.18512) for `fragments`, `delay` and `mix`.
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
        """The step, modulo `every`, after which a fragment is sent."""
        return fragment * self.every // self.fragments
