"""Lightning strategies that shard every sequence over ranks; importing the package registers them by name."""

from lightning_dilated.strategy.strategies import RingDilatedFSDPStrategy, RingDilatedStrategy

__all__ = ["RingDilatedFSDPStrategy", "RingDilatedStrategy"]
