"""Branches, patterns and their geometry, in integers only."""

from typing import TYPE_CHECKING

from lightning_dilated._extensions import lazy_names
from lightning_dilated.pattern.branch import Branch, Global, Window
from lightning_dilated.pattern.hashed import Hashed
from lightning_dilated.pattern.pattern import DilatedPattern

if TYPE_CHECKING:
    from lightning_dilated.ext.explain.explanation import Explanation

__getattr__, __dir__ = lazy_names(__name__)

__all__ = ["Branch", "DilatedPattern", "Explanation", "Global", "Hashed", "Window"]
