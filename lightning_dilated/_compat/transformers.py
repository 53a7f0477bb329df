"""Private names of transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def recompute_by(layer: Any, function: Callable[..., Any] | None) -> None:
    """Let a decoder layer run itself in training by `function(run, hidden_states, ...)`; None: as usual.

    Sets `gradient_checkpointing` and `_gradient_checkpointing_func` of `GradientCheckpointingLayer`. Known to hold for
    transformers 5.24.
    """
    layer.gradient_checkpointing = function is not None
    layer._gradient_checkpointing_func = function


def look_for_documents_in_tokens_only() -> None:
    """Let models whose tokens are none, as on a rank of a short sequence, ask for their mask.

    Replaces `transformers.masking_utils.find_packed_sequence_indices`, which reads the last position of a row. Known to hold
    for transformers 5.24.
    """
    from transformers import masking_utils

    find = masking_utils.find_packed_sequence_indices
    if getattr(find, "takes_none", False):
        return

    @functools.wraps(find)
    def documents(position_ids: Any) -> Any:
        return find(position_ids) if position_ids.shape[-1] else None

    documents.takes_none = True  # type: ignore[attr-defined]
    masking_utils.find_packed_sequence_indices = documents
