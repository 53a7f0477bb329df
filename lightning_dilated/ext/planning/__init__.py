"""Measure what a machine can do, simulate what many machines would do, and count what fits."""

from lightning_dilated.ext.planning.counting import Meter
from lightning_dilated.ext.planning.gpus import dense_yardstick, peak_memory, seconds_of
from lightning_dilated.ext.planning.simulating import Machine, Step, simulate

__all__ = ["Machine", "Meter", "Step", "dense_yardstick", "peak_memory", "seconds_of", "simulate"]
