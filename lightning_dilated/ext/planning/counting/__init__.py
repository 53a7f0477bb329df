"""Bytes: a real step of a real model under fake tensors, which have sizes but no memory, counted piece by piece."""

from lightning_dilated.ext.planning.counting.memory_tracker import Meter

__all__ = ["Meter"]
