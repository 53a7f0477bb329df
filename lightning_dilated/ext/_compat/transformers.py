"""Wrap private names of transformers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from lightning_dilated.ext._compat.torch import replaced


def recompute_by(layer: Any, function: Callable[..., Any] | None) -> None:
    """Make a decoder layer call `function(run, hidden_states, ...)` in training; None: run the layer as usual.

    Sets `gradient_checkpointing` and `_gradient_checkpointing_func` of `GradientCheckpointingLayer`. Known to hold for
    transformers 5.24.
    """
    layer.gradient_checkpointing = function is not None
    layer._gradient_checkpointing_func = function


@contextlib.contextmanager
def templates_compiled_in(environment: type[Any]) -> Iterator[None]:
    """Compile chat templates in a subclass of Jinja's ImmutableSandboxedEnvironment, inside this context.

    Replaces `_compile_jinja_template` and `ImmutableSandboxedEnvironment` of `transformers.utils.chat_template_utils`.
    Known to hold for transformers 5.24.
    """
    from transformers.utils import chat_template_utils

    with replaced(chat_template_utils, "_compile_jinja_template", functools.partial(_compiled_in, environment)):
        yield


@functools.lru_cache
def _compiled_in(environment: type[Any], template: str) -> Any:
    from transformers.utils import chat_template_utils

    with replaced(chat_template_utils, "ImmutableSandboxedEnvironment", environment):
        return chat_template_utils._cached_compile_jinja_template(template)


def skip_documents_without_tokens() -> None:
    """Let models create a mask for 0 tokens, which a rank of a short sequence may have.

    Replaces `transformers.masking_utils.find_packed_sequence_indices`, which reads the last position of a row. Known to
    hold for transformers 5.24.
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
