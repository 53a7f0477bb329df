"""Sampling from a causal model, one token at a time, with a cache that makes each step equal to the full sequence.

Shape letters: B batch, N tokens, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from lightning_dilated.attention.decode import KVCache
from lightning_dilated.pattern.branch import integer


class CausalModel(Protocol):
    """What `generate` needs: logits from tokens and caches, and the stack that makes the caches."""

    transformer: torch.nn.Module
    training: bool

    def __call__(self, tokens: Tensor, *, caches: list[KVCache] | None = None) -> Tensor: ...


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise for sampling options that make no distribution."""
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be 0 (the likeliest token) or a positive number, got {temperature!r}.")
    if top_k is not None:
        integer(top_k, "top_k", 1)
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], got {top_p!r}.")


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


@torch.no_grad()
def generate(
    model: CausalModel,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """(B, N + max_new_tokens) tokens: the prompt (B, N >= 1) and what the model draws after it, without dropout.

    Raises:
        ValueError, TypeError: for an empty prompt or options that make no distribution.
    """
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise ValueError(f"the prompt must be (B, N) with at least one token, got {tuple(tokens.shape)}.")
    if tokens.is_floating_point():
        raise TypeError(f"the prompt must hold integer tokens, got {tokens.dtype}.")
    integer(max_new_tokens, "max_new_tokens", 0)
    check_sampling(temperature, top_k, top_p)
    was_training = model.training
    model.eval()
    try:
        model.configure_model()
        caches = model.transformer.new_caches()
        step, out = tokens, [tokens]
        for _ in range(max_new_tokens):
            logits = model(step, caches=caches)[:, -1]
            step = sample(logits, temperature, top_k, top_p, generator)[:, None]
            out.append(step)
        return torch.cat(out, 1)
    finally:
        model.train(was_training)
