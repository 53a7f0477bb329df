"""Continue prompts with a causal model: read the prompt in chunks, and then draw tokens one by one.

Shape letters: B batch, N tokens of a prompt, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_dilated._device import send
from lightning_dilated._removed import removed
from lightning_dilated._validation import integer
from lightning_dilated.ext.decoding.kv_cache import KVCache
from lightning_dilated.ext.decoding.sampling import Sampling, stop_tokens
from lightning_dilated.ext.decoding.token_step import CausalModel, TokenStep, Weights, refuse, token_step
from lightning_dilated.sequence import active_sequence
from lightning_dilated.sequence.group import no_sequence

#: number of prompt tokens that are processed in one call of the model
PROMPT_CHUNK = 1 << 16
#: number of further tokens that `generate` launches before it checks whether all samples have ended
AHEAD = 16


def checked_prompt(
    tokens: Tensor, lengths: Tensor | Sequence[int] | None, vocab_size: int
) -> tuple[Tensor, tuple[int, ...] | None]:
    """Return int64 tokens (B, N) in 0..V - 1, padded with 0, and the prompts' lengths (None without padding).

    Raises:
        TypeError, ValueError: for an invalid prompt.
    """
    got = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
    wrong_shape = f"the prompt must be (B, N) with at least one token, got {got}."
    if not isinstance(tokens, Tensor) or tokens.ndim != 2:
        raise ValueError(wrong_shape)
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise TypeError(f"the prompt must hold integer tokens, got {tokens.dtype}.")
    if 0 in tokens.shape:
        raise ValueError(wrong_shape)
    sizes, tokens = prompt_lengths(lengths, tokens), tokens.long()
    if sizes is not None:
        number = torch.arange(tokens.shape[1], device=tokens.device)
        tokens = tokens.masked_fill(number >= send(torch.tensor(sizes)[:, None], tokens.device), 0)
    wrong = ((tokens < 0) | (tokens >= vocab_size)).nonzero()
    if len(wrong):
        row, at = wrong[0].tolist()
        raise ValueError(
            f"the prompt holds token {int(tokens[row, at])} at position {at} of row {row}, but vocab_size={vocab_size} "
            f"allows 0 to {vocab_size - 1}. Encode it with the tokenizer that the model was trained with."
        )
    return tokens, sizes


def prompt_lengths(lengths: Tensor | Sequence[int] | None, tokens: Tensor) -> tuple[int, ...] | None:
    """Return the number of tokens of each prompt, or None if there is no padding; raise for invalid `lengths`."""
    if lengths is None:
        return None
    values = lengths.tolist() if hasattr(lengths, "tolist") else lengths
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"lengths must hold a number for each prompt, got {lengths!r}.")
    values, (batch, most) = list(values), tokens.shape
    if len(values) != batch:
        raise ValueError(f"lengths must hold a number for each of the {batch} prompts, got {len(values)}.")
    values = [integer(x, "each of lengths", 1) for x in values]
    if max(values) > most:
        raise ValueError(f"lengths holds {max(values)}, but the prompts are (B, N) = {tuple(tokens.shape)}.")
    return None if min(values) == most else tuple(values)


@dataclass(frozen=True)
class _Request:
    """Checked arguments of `generate_stream`."""

    tokens: Tensor
    count: int
    sampling: Sampling
    generator: torch.Generator | None
    ends: list[int]
    prompt_chunk: int
    lengths: tuple[int, ...] | None
    max_length: int | None

    @property
    def longest(self) -> int:
        return max(self.lengths) if self.lengths else self.tokens.shape[1]

    def last(self) -> Tensor:
        if self.lengths is None:
            return self.tokens[:, -1]
        at = send(torch.tensor(self.lengths)[:, None] - 1, self.tokens.device)
        return self.tokens.gather(1, at)[:, 0]


def generate_stream(
    model: CausalModel,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    stop: int | Collection[int] | None = None,
    prompt_chunk: int = PROMPT_CHUNK,
    lengths: Tensor | Sequence[int] | None = None,
    max_length: int | None = None,
    **unknown: Any,
) -> Continuation:
    """Continue a prompt (B, N >= 1), and yield each step's (B,) tokens as soon as they are drawn.

    The model is in eval mode while it computes, and in its former mode between tokens. On a GPU, the first call
    captures the step from one token to the next as a CUDA graph. Later calls with the same number of samples and the
    same options replay it. No graph is used if the model has hooks, its own forward, or sharded or CPU weights.

    Args:
        temperature: divisor of the logits; 0: take the likeliest token.
        top_k: draw from the k likeliest tokens.
        top_p: draw from the smallest number of likeliest tokens with a total probability of at least top_p.
        generator: random number generator on the prompt's device; None: torch's default.
        stop: a token that ends a row, or a list or set of them. An ended row repeats its last token; when all rows
            have ended, the stream ends.
        prompt_chunk: number of prompt tokens that are processed in one call of the model; this limits the memory.
        lengths: (B,) number of tokens of each prompt, if they differ; rows are padded on the right with any tokens.
        max_length: number of tokens of a row, including the prompt, for which caches have room if heads see the whole
            sequence; None: the length of this call. Later calls up to this length reuse the caches and the graph.

    Raises:
        ValueError, TypeError: at the call, for an empty prompt, tokens that the model does not have, options that
            define no distribution, and an active sequence that ranks share.
    """
    for name in unknown:
        raise TypeError(removed(name) or f"generate_stream() got an unexpected keyword argument {name!r}")
    group = active_sequence()
    if group is not None and group.ranks > 1:
        raise ValueError(
            "ranks share the active sequence, and each rank generates from whole prompts. Gather them by "
            "lightning_dilated.sequence.sequence_gather(tokens), and call generate within sequence.no_sequence()."
        )
    count, chunk = integer(max_new_tokens, "max_new_tokens", 0), integer(prompt_chunk, "prompt_chunk", 1)
    sampling = Sampling(temperature, top_k, top_p)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {generator!r}.")
    tokens, sizes = checked_prompt(tokens, lengths, model.vocab_size)
    ends = stop_tokens(stop, model.vocab_size)
    request = _Request(tokens, count, sampling, generator, ends, chunk, sizes, max_length)
    if max_length is not None and integer(max_length, "max_length", 1) < request.longest + count:
        raise ValueError(
            f"max_length={max_length} is below the prompt's {request.longest} tokens and max_new_tokens={count} together. "
            f"Set it to {request.longest + count} at least, or leave it out."
        )
    return Continuation(model, request)


class Continuation(Iterator[Tensor]):
    """An iterator over the tokens that continue prompts; the first `next` starts the computation."""

    def __init__(self, model: CausalModel, request: _Request) -> None:
        self._model, self._request = model, request
        # only greedy decoding may run ahead, because the caller may stop early or draw random numbers in between
        self._drawn = _stream(model, request, 1 if request.sampling.temperature == 0 else 0)

    def __next__(self) -> Tensor:
        return next(self._drawn)

    def close(self) -> None:
        """Stop, and free the memory for further tokens."""
        self._drawn.close()

    def joined(self) -> Tensor:
        """Return the prompts and their whole continuation, (B, N + new)."""
        request, tokens = self._request, self._request.tokens
        drawn = list(_stream(self._model, request, AHEAD))
        if request.lengths is None:
            return torch.cat([tokens, *(x[:, None] for x in drawn)], 1)
        new = torch.stack([request.last(), *drawn], 1)
        number = torch.arange(tokens.shape[1] + len(drawn), device=tokens.device)
        past = number - send(torch.tensor(request.lengths)[:, None] - 1, tokens.device)
        continued = new.gather(1, past.clamp(0, len(drawn)))
        return torch.where(past > 0, continued, torch.nn.functional.pad(tokens, (0, len(drawn))))


@torch.no_grad()
def _stream(model: CausalModel, request: _Request, ahead: int) -> Iterator[Tensor]:
    if request.count == 0:
        return
    with evaluating(model):
        model.configure_model()
    longest = request.max_length or request.longest + request.count
    with token_step(model, request.tokens, longest, request.sampling, len(request.ends)) as step:
        with evaluating(model):
            started = step is not None and _started(model, request, step)
        if started:
            yield from _replayed(request, step, Weights(model), ahead if request.ends else 0)
            return
    del step  # free its caches
    yield from _one_by_one(model, request)


def _one_by_one(model: CausalModel, request: _Request) -> Iterator[Tensor]:
    """Yield tokens without a graph, with one call of the model for each token."""
    ends = torch.tensor(request.ends, device=request.tokens.device, dtype=torch.int64)
    ended = torch.zeros(len(request.tokens), dtype=torch.bool, device=request.tokens.device)
    caches, last = model.transformer.new_caches(lengths=request.lengths), request.last()
    for i in range(request.count):
        with evaluating(model):
            logits = model(last[:, None], caches=caches, last_only=True)[:, -1] if i else _read(model, request, caches)
            drawn = request.sampling.draw(logits, request.generator)
        last = torch.where(ended, last, drawn)
        if len(ends):
            ended = ended | torch.isin(last, ends)
        yield last.clone()  # a copy, because the caller may change it
        if len(ends) and bool(ended.all()):
            return


def _started(model: CausalModel, request: _Request, step: TokenStep) -> bool:
    """Read the prompts, capture the step and draw the first token; return False if the capture fails."""
    step.begin(request.lengths, request.ends)
    logits = _read(model, request, step.caches)
    try:
        if request.count > 1:
            step.prepare(model)
    except Exception as error:  # after any error, tokens can be drawn without a graph
        refuse(model, error)
        return False
    step.start(logits, request.last(), request.generator)
    return True


def _replayed(request: _Request, step: TokenStep, weights: Weights, ahead: int) -> Iterator[Tensor]:
    """Yield the step's tokens. Launch `ahead` further tokens before the host waits for the check of ended samples.

    If all samples ended, reset the generator to its state before the tokens that were drawn in excess.
    """
    under_way: deque[tuple[Tensor, _Flag | None, Tensor | None]] = deque()
    started = 0
    for i in range(request.count):
        while started < min(request.count, i + 1 + ahead):
            if started:
                weights.check()
                step.next(request.generator)
            flag = _Flag(step.done) if request.ends else None
            under_way.append((step.token.clone(), flag, step.state(request.generator) if ahead else None))
            started += 1
        drawn, flag, state = under_way.popleft()
        over = flag is not None and flag.read()
        if over and state is not None:
            step.restore(request.generator, state)
        yield drawn
        if over:
            return


class _Flag:
    """A bool on the device, which is copied to the host asynchronously."""

    def __init__(self, value: Tensor) -> None:
        self._value, self._event = value.clone(), None
        if value.is_cuda:
            self._value = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(value, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(value.device))

    def read(self) -> bool:
        """Wait for the copy, and return the value."""
        if self._event is not None:
            self._event.synchronize()
        return bool(self._value)


def _read(model: CausalModel, request: _Request, caches: list[KVCache]) -> Tensor:
    """Read the prompts into the caches; return the next token's logits (B, V). Raise ValueError if they are NaN."""
    logits = _logits(model, request, caches)
    if bool(logits.isnan().any()):
        raise ValueError("the model's logits after the prompt are NaN, so no token can be drawn. Check its weights.")
    return logits


def _logits(model: CausalModel, request: _Request, caches: list[KVCache]) -> Tensor:
    tokens, chunk = request.tokens[:, : request.longest], request.prompt_chunk
    if request.lengths is None:
        for part in tokens.split(chunk, 1):
            logits = model(part, caches=caches, last_only=True)
        return logits[:, -1]
    at, start, last = send(torch.tensor(request.lengths) - 1, tokens.device), 0, None
    for part in tokens.split(chunk, 1):
        logits = model(part, caches=caches, last_only=(at - start).clamp(0, part.shape[1] - 1))[:, -1]
        last = logits if last is None else torch.where((at >= start)[:, None], logits, last)
        start += part.shape[1]
    return last


@contextmanager
def evaluating(model: CausalModel) -> Iterator[None]:
    """Set the model to eval mode, without an active sequence; then restore all modes (new modules get the model's mode)."""
    modules: Callable[[], Iterator[Any]] = getattr(model, "modules", lambda: iter([model]))
    before, mode = {id(m): m.training for m in modules()}, model.training
    trains = any(before.values())
    if trains:
        model.eval()
    try:
        with no_sequence():
            yield
    finally:
        if trains:
            model.train(mode)
            for module in modules():
                module.training = before.get(id(module), module.training)


def generate(model: CausalModel, tokens: Tensor, max_new_tokens: int, **options: Any) -> Tensor:
    """Return the prompt (B, N >= 1) and up to `max_new_tokens` further tokens, (B, N + new); stop tokens end rows.

    With `lengths`, each row contains its prompt, its continuation, and repetitions of its last token.
    For arguments and errors see `generate_stream`.
    """
    return generate_stream(model, tokens, max_new_tokens, **options).joined()
