"""Sampling from a causal model, one token at a time, with a cache that makes each step equal to the full sequence.

Shape letters: B batch, N tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from lightning_dilated.attention.kv_cache import KVCache
from lightning_dilated.pattern.branch import integer

if TYPE_CHECKING:
    from lightning_dilated.models.transformer import DilatedTransformer

#: tokens of a prompt that are read at once
PROMPT_CHUNK = 1 << 16


class CausalModel(Protocol):
    """What `generate` needs: logits from tokens and caches, and the stack that makes the caches."""

    transformer: DilatedTransformer
    training: bool
    vocab_size: int

    def configure_model(self) -> None:
        """Make the layers, unless they are there."""

    def __call__(self, tokens: Tensor, *, caches: list[KVCache], last_only: bool) -> Tensor: ...


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise for sampling options that make no distribution."""
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be 0 (the likeliest token) or a positive number, got {temperature!r}.")
    if top_k is not None:
        integer(top_k, "top_k", 1)
    number = isinstance(top_p, (int, float)) and not isinstance(top_p, bool)
    if top_p is not None and not (number and 0 < top_p <= 1):
        raise ValueError(f"top_p must lie in (0, 1], got {top_p!r}.")


def check_prompt(tokens: Tensor, vocab_size: int) -> None:
    """Raise unless these are (B, N >= 1) integers from 0 to V - 1."""
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise ValueError(f"the prompt must be (B, N) with at least one token, got {tuple(tokens.shape)}.")
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise TypeError(f"the prompt must hold integer tokens, got {tokens.dtype}.")
    wrong = ((tokens < 0) | (tokens >= vocab_size)).nonzero()
    if len(wrong):
        row, at = wrong[0].tolist()
        raise ValueError(
            f"the prompt holds token {int(tokens[row, at])} at position {at} of row {row}, but vocab_size={vocab_size} "
            f"allows 0 to {vocab_size - 1}. Encode it with the tokenizer that the model was trained with."
        )


def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """(B,) tokens drawn from logits (B, V)."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float()
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # the largest is 0, so no temperature overflows
    if top_k is not None:
        floor = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if top_p is not None:
        values, order = logits.sort(descending=True)
        probability = values.softmax(-1)
        beyond = probability.cumsum(-1) - probability >= top_p  # the likeliest token always stays
        logits = logits.scatter(-1, order, values.masked_fill(beyond, -torch.inf))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def stop_tokens(stop: int | Sequence[int] | None, vocab_size: int) -> list[int]:
    """The tokens that end a continuation, as a list; an error for one that can never be drawn."""
    if stop is None:
        return []
    if isinstance(stop, (str, bytes)) or not isinstance(stop, (int, Sequence)):
        raise TypeError(f"stop must be a token, a list of tokens or None, got {stop!r}.")
    found = [integer(x, "stop", 0) for x in ([stop] if isinstance(stop, int) else stop)]
    if found and max(found) >= vocab_size:
        raise ValueError(f"stop must lie below vocab_size={vocab_size}, got {max(found)}: it would never be drawn.")
    return found


def generate_stream(
    model: CausalModel,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    stop: int | Sequence[int] | None = None,
    prompt_chunk: int = PROMPT_CHUNK,
) -> Iterator[Tensor]:
    """Draw what follows the prompt (B, N >= 1), and yield each step's (B,) tokens as soon as they are drawn.

    The model is in eval mode while it computes, not between tokens.

    Args:
        temperature, top_k, top_p: of the draws; 0 takes the likeliest token.
        generator: of the draws, on the prompt's device; torch's own if None.
        stop: token or tokens that end a row. A row that has ended repeats its last token; when all have, the stream ends.
        prompt_chunk: tokens of the prompt that are read at once, which bounds the memory that a long one takes.

    Raises:
        ValueError, TypeError: at the call, for an empty prompt, tokens that the model does not have, or options that make
            no distribution.
    """
    check_prompt(tokens, model.vocab_size)
    integer(max_new_tokens, "max_new_tokens", 0)
    integer(prompt_chunk, "prompt_chunk", 1)
    check_sampling(temperature, top_k, top_p)
    ends = torch.tensor(stop_tokens(stop, model.vocab_size), device=tokens.device, dtype=torch.int64)
    draw = lambda logits: sample(logits, temperature, top_k, top_p, generator)  # noqa: E731
    return _stream(model, tokens, max_new_tokens, draw, ends, prompt_chunk)


@torch.no_grad()
def _stream(
    model: CausalModel,
    tokens: Tensor,
    max_new_tokens: int,
    draw: Callable[[Tensor], Tensor],
    ends: Tensor,
    prompt_chunk: int,
) -> Iterator[Tensor]:
    with _evaluating(model):
        model.configure_model()
        caches = model.transformer.new_caches()
    ended, step = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device), tokens
    for _ in range(max_new_tokens):
        with _evaluating(model):
            for part in step.split(prompt_chunk, 1):
                logits = model(part, caches=caches, last_only=True)
            drawn = draw(logits[:, -1])
        drawn = torch.where(ended, step[:, -1], drawn)
        step = drawn[:, None]
        if len(ends):
            ended = ended | torch.isin(drawn, ends)
        yield drawn
        if len(ends) and bool(ended.all()):
            return


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """The model in eval mode; afterwards in the mode it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        if was_training:
            model.train()


def generate(model: CausalModel, tokens: Tensor, max_new_tokens: int, **options: Any) -> Tensor:
    """(B, N + new) tokens: the prompt (B, N >= 1) and what the model draws after it, `max_new_tokens` or up to a stop.

    Args and errors: those of `generate_stream`.
    """
    drawn = list(generate_stream(model, tokens, max_new_tokens, **options))
    return torch.cat([tokens, *(x[:, None] for x in drawn)], 1)
