"""What a machine can do, measured; and what many would do, simulated."""

from lightning_dilated.planning.machine import Machine
from lightning_dilated.planning.measure import dense_yardstick, peak_memory, seconds_of
from lightning_dilated.planning.simulation import Step, simulate

__all__ = ["Machine", "Step", "dense_yardstick", "peak_memory", "seconds_of", "simulate"]
