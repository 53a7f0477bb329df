"""Who attends to whom: branches, patterns and their geometry, as integers only."""

from lightning_dilated.pattern.branch import Branch, Global, Window
from lightning_dilated.pattern.pattern import DilatedPattern

__all__ = ["Branch", "DilatedPattern", "Global", "Window"]
