"""Measure what a machine can do, and count what fits and what time a step takes, on one device and on many."""

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
