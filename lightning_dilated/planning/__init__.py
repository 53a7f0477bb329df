"""Measure the speed of a machine; estimate the memory and time of a step on one device or many."""

from typing import TYPE_CHECKING

from lightning_dilated._extensions import lazy_names

if TYPE_CHECKING:
    from lightning_dilated.ext.planning import (
        Machine,
        Meter,
        Step,
        dense_yardstick,
        peak_memory,
        seconds_of,
        step_on_ranks,
    )

__getattr__, __dir__ = lazy_names(__name__)

__all__ = ["Machine", "Meter", "Step", "dense_yardstick", "peak_memory", "seconds_of", "step_on_ranks"]
