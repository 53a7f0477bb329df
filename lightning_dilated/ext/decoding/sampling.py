"""Choose the next token: check sampling options, and draw from logits without waiting for the device.

Shape letters: B batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dilated._validation import integer, real

#: lower temperatures count as 0, because a division of logits by them would overflow
TINY = torch.finfo(torch.float32).tiny


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise ValueError for sampling options that define no distribution."""
    real(temperature, "temperature", least=0, hint=" 0 takes the likeliest token.")
    if top_k is not None:
        integer(top_k, "top_k", 1)
    if top_p is not None:
        real(top_p, "top_p", above=0, most=1)


@dataclass(frozen=True)
class Sampling:
    """Sampling options, checked by the constructor; see `generate_stream`."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_k, self.top_p)

    def draw(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw tokens (B,) from logits (B, V)."""
        return sample(logits, self.temperature, self.top_k, self.top_p, generator)


def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw tokens (B,) from logits (B, V); see `generate_stream` for the options.

    The drawn token is the argmax of probability / exponential noise. `torch.multinomial` would draw the same token, but
    it checks its input, which waits for the device.
    """
    if temperature < TINY:
        return logits.argmax(-1)
    logits = logits.float()
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # the maximum is 0: no overflow
    if top_k is not None:
        floor = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if top_p is not None:
        values, order = logits.sort(descending=True)
        probability = values.softmax(-1)
        beyond = probability.cumsum(-1) - probability >= top_p  # False for the likeliest token
        logits = logits.scatter(-1, order, values.masked_fill(beyond, -torch.inf))
    clocks = torch.empty_like(logits).exponential_(generator=generator)
    return (logits.softmax(-1) / clocks).argmax(-1)


def stop_tokens(stop: int | Collection[int] | None, vocab_size: int) -> list[int]:
    """Return the list of tokens that end a continuation; raise if a token can never be drawn."""
    if stop is None:
        return []
    stop = stop.tolist() if hasattr(stop, "tolist") else stop
    if isinstance(stop, (str, bytes, Mapping)) or not isinstance(stop, (int, Collection)):
        raise TypeError(f"stop must be a token, a list or set of tokens, or None, got {stop!r}.")
    ends = [integer(x, "stop", 0) for x in ([stop] if isinstance(stop, int) else stop)]
    if ends and max(ends) >= vocab_size:
        raise ValueError(f"stop must lie below vocab_size={vocab_size}, got {max(ends)}: it would never be drawn.")
    return ends
