"""The longest sequence that really trains on the devices that are here: true steps, each in processes of its own."""

from lightning_dilated.cli.find_max.search import Tried, longest
from lightning_dilated.cli.find_max.trials import Outcome, Trials

__all__ = ["Outcome", "Trials", "Tried", "longest"]
