"""What a machine can do, measured."""

from lightning_dilated.planning.measure import dense_yardstick, peak_memory, seconds_of

__all__ = ["dense_yardstick", "peak_memory", "seconds_of"]
