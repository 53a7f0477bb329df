"""Recurrence and RecurrentState: what a layer's memory is, and what it carries from one call to the next.

`ext/recurrence` computes it.
"""

from typing import TYPE_CHECKING

from lightning_dilated._extensions import lazy_names
from lightning_dilated.recurrence.description import Recurrence
from lightning_dilated.recurrence.state import RecurrentState

if TYPE_CHECKING:
    from lightning_dilated.ext.recurrence.functional import recurrent_attention

__getattr__, __dir__ = lazy_names(__name__)

__all__ = ["Recurrence", "RecurrentState", "recurrent_attention"]
