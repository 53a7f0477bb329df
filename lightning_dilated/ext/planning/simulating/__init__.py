"""Seconds: a step on many ranks, event by event, from what one device was measured to need."""

from lightning_dilated.ext.planning.simulating.machine import Machine
from lightning_dilated.ext.planning.simulating.simulation import Step, simulate

__all__ = ["Machine", "Step", "simulate"]
