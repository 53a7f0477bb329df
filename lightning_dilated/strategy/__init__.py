"""Lightning strategies that shard sequences over ranks. Importing this package registers their names with Lightning."""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

from lightning_dilated.strategy.ddp import RingDilatedStrategy
from lightning_dilated.strategy.elastic import launched_nodes
from lightning_dilated.strategy.fsdp import RingDilatedFSDPStrategy
from lightning_dilated.strategy.outer import OuterSteps

__all__ = ["OuterSteps", "RingDilatedFSDPStrategy", "RingDilatedStrategy", "launched_nodes"]


def register() -> None:
    """Register the names for `lightning.pytorch.Trainer`."""
    about = "one sequence on many ranks, dilated attention"
    StrategyRegistry.register("ring_dilated", RingDilatedStrategy, description=about, override=True)
    StrategyRegistry.register(
        "ring_dilated_fsdp", RingDilatedFSDPStrategy, description=f"{about}, sharded parameters", override=True
    )
    StrategyRegistry.register(
        "ring_dilated_notebook",
        RingDilatedStrategy,
        description=f"{about}, in Jupyter",
        override=True,
        start_method="fork",
    )


register()
