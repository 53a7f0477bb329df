"""Who attends to whom: branches, patterns and their geometry, as integers only."""

from lightning_dilated.pattern.pattern import Branch, DilatedPattern

__all__ = ["Branch", "DilatedPattern"]
