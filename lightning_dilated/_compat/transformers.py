"""Private names of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def recompute_by(layer: Any, function: Callable[..., Any] | None) -> None:
    """Let a decoder layer run itself in training by `function(run, hidden_states, ...)`; None: as usual.

    Sets `gradient_checkpointing` and `_gradient_checkpointing_func` of `GradientCheckpointingLayer`. Known to hold for
    transformers 5.24.
    """
    layer.gradient_checkpointing = function is not None
    layer._gradient_checkpointing_func = function
