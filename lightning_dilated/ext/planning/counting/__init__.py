"""Count the memory of a real step of a real model under fake tensors, which have sizes but no memory."""

from lightning_dilated.ext.planning.counting.memory_tracker import Meter

__all__ = ["Meter"]
