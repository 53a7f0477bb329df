"""Measure what a machine can do, simulate what many machines would do, and count what fits."""

from typing import TYPE_CHECKING

from lightning_dilated._extensions import lazy_names

if TYPE_CHECKING:
    from lightning_dilated.ext.planning import Machine, Meter, Step, dense_yardstick, peak_memory, seconds_of, simulate

__getattr__, __dir__ = lazy_names(__name__)

__all__ = ["Machine", "Meter", "Step", "dense_yardstick", "peak_memory", "seconds_of", "simulate"]
