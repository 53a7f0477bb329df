"""Count the memory of a real model's training step under fake tensors, which have sizes but no memory."""

from lightning_dilated.ext.planning.counting.memory_tracker import Meter

__all__ = ["Meter"]
