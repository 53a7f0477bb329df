"""Recurrent attention: a memory of constant size, exact in chunks, on many ranks, in streams and token by token."""

from lightning_dilated.ext.recurrence.functional import recurrent_attention
from lightning_dilated.recurrence.description import Recurrence
from lightning_dilated.recurrence.state import RecurrentState

__all__ = ["Recurrence", "RecurrentState", "recurrent_attention"]
