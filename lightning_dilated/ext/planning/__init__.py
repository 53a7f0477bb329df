"""Measure a machine, and plan the memory and time of a training step on one or several devices."""

from lightning_dilated.ext.planning.counting import Meter
from lightning_dilated.ext.planning.gpus import dense_yardstick, peak_memory, seconds_of
from lightning_dilated.ext.planning.machine import Machine
from lightning_dilated.ext.planning.ranks import Step, step_on_ranks

__all__ = ["Machine", "Meter", "Step", "dense_yardstick", "peak_memory", "seconds_of", "step_on_ranks"]
