"""Recurrence: the description of a layer's memory. `ext/recurrence` computes it and keeps its state between calls."""

from typing import TYPE_CHECKING

from lightning_dilated._extensions import lazy_names
from lightning_dilated.recurrence.description import Recurrence

if TYPE_CHECKING:
    from lightning_dilated.ext.recurrence.functional import recurrent_attention
    from lightning_dilated.ext.recurrence.state import RecurrentState

__getattr__, __dir__ = lazy_names(__name__)

__all__ = ["Recurrence", "RecurrentState", "recurrent_attention"]
