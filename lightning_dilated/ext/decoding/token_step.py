"""Compute one token of each sample, from the embedding to the draw, by replaying a CUDA graph.

The graph reads and writes fixed tensors: caches, last tokens, ended samples and next positions. The host only launches
the graph, and may launch it again before the previous launch has finished.
Shape letters: B batch, V vocabulary.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_dilated import kernels
from lightning_dilated._compat.lightning import attached_trainer
from lightning_dilated._compat.torch import has_hooks
from lightning_dilated.ext._compat.torch import recording
from lightning_dilated.ext.decoding.kv_cache import KVCache
from lightning_dilated.ext.decoding.sampling import Sampling
from lightning_dilated.models.transformer import DilatedTransformer
from lightning_dilated.pattern.rows import window_reach

#: maximum number of a model's steps kept for later calls, and of bytes in their caches; the latest step is always kept
KEPT, KEPT_BYTES = 4, 1 << 31


class CausalModel(Protocol):
    """A model for `generate`: it computes logits from tokens and caches, and its stack creates the caches."""

    transformer: DilatedTransformer
    training: bool
    vocab_size: int

    def configure_model(self) -> None:
        """Create the layers if they are missing."""

    def eval(self) -> Any:
        """Switch to eval mode."""

    def train(self) -> Any:
        """Switch to training mode."""

    def __call__(self, tokens: Tensor, *, caches: list[KVCache], last_only: bool | Tensor) -> Tensor: ...


def why_not(model: CausalModel, device: torch.device) -> str | None:
    """Return None if a token step of the model can be captured, else the reason."""
    if device.type != "cuda":
        return "needs a CUDA device"
    return kernels.why_not(device) or why_not_captured(model)


def why_not_captured(model: CausalModel) -> str | None:
    """Return None if the model's Python code is the same for every token, else the reason why it may not be."""
    if not isinstance(model, nn.Module) or not getattr(type(model).forward, "decodes", False):
        return f"{type(model).__name__} redefines forward"
    if any(map(has_hooks, model.modules())):
        return "hooks would not run"
    stack = model.transformer
    if any(p.padding == "attended" for p in (block.attention_layer.attention.pattern for block in stack.blocks)):
        return "padding='attended' is checked at every length"
    if any(block.attention_layer.recurrence is not None for block in stack.blocks):
        return "the host counts the tokens of a recurrence's state"
    if any(block.attention_layer.hashed is not None for block in stack.blocks):
        return "the host counts the rows of hashed heads"
    if any(rotary is not None and rotary.xpos_scale_base is not None for rotary in stack.rotaries):
        return "xPos is checked at every position"
    tensors = [*model.parameters(), *model.buffers()]
    if len({x.device for x in tensors}) != 1:
        return "its weights are on several devices"
    if any(type(x) not in (Tensor, nn.Parameter) for x in tensors):
        return "its weights are sharded, or of a subclass of Tensor"
    return None


def room(model: CausalModel, length: int) -> int:
    """Return `max_length` of caches for `length` tokens, rounded up so that calls of similar length share a graph.

    If no branch covers the whole sequence, the result is at most the width of the widest segment or window.
    """
    branches = [b for block in model.transformer.blocks for b in block.attention_layer.attention.pattern.branches]
    widths = [b.tokens or b.segment_length or window_reach(b) for b in branches]
    step = max(64, 1 << max((length - 1).bit_length() - 4, 0))
    rounded = -(-length // step) * step
    return rounded if None in widths else min(rounded, max(w for w in widths if w is not None))


def capture(run: Callable[[], None], generator: torch.Generator | None, device: torch.device) -> Callable[[], None]:
    """Capture a graph of `run` on a device, with random numbers from `generator`; return a function that replays it."""
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    # torch's default capture stream belongs to the first device that captured a graph
    with recording(graph, torch.cuda.Stream(device)):
        run()
    return graph.replay


class TokenStep:
    """The step that draws the next token of each of B samples.

    Call `begin`, read the prompts into `caches`, and call `prepare`, then `start` for the first token, then `next`.

    Args:
        model: the model; no reference is kept.
        batch: B.
        max_length: maximum number of tokens in a sample, including the prompt.
        sampling: sampling options.
        ends: number of stop tokens.
        device: the model's device.
    """

    def __init__(
        self, model: CausalModel, batch: int, max_length: int, sampling: Sampling, ends: int, device: torch.device
    ) -> None:
        self.caches = model.transformer.new_caches(max_length)
        self.sampling, self.busy = sampling, False
        self.generator = None if sampling.temperature == 0 else torch.Generator(device)
        self.token = torch.zeros(batch, dtype=torch.int64, device=device)
        self.ended = torch.zeros(batch, dtype=torch.bool, device=device)
        self.ends = torch.full((ends,), -1, dtype=torch.int64, device=device)
        self.done = torch.zeros((), dtype=torch.bool, device=device)
        self._replay: Callable[[], None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the caches."""
        return sum(cache.nbytes for cache in self.caches)

    def begin(self, lengths: Sequence[int] | None, ends: Sequence[int]) -> None:
        """Reset all tensors for new prompts; `lengths`: their lengths if they differ."""
        for cache in self.caches:
            cache.reset()
        self.caches[0].clock.begin(lengths)
        self.ended.zero_()
        self.ends.copy_(torch.tensor(ends, dtype=torch.int64))

    def start(self, logits: Tensor, last: Tensor, source: torch.Generator | None) -> None:
        """Draw the first token from logits (B, V); `last`: (B,) last tokens of the prompts."""
        self.token.copy_(last)
        with self._randomness(source):
            self._take(logits)
        self._positions()

    def prepare(self, model: CausalModel) -> None:
        """Capture the step on the first call. The prompts must already be in the caches."""
        if self._replay is None:
            self._replay = self._captured(model)

    def next(self, source: torch.Generator | None) -> None:
        """Draw each sample's next token into `token` with random numbers of `source`; `done`: whether all have ended."""
        assert self._replay is not None, "prepare comes first"
        with self._randomness(source):
            self._replay()
        self._count(1)

    def _run(self, model: CausalModel) -> None:
        self._take(model(self.token[:, None], caches=self.caches, last_only=True)[:, -1])
        self._positions()

    def _take(self, logits: Tensor) -> None:
        """Draw a token of each sample; samples that have ended repeat their last token."""
        drawn = torch.where(self.ended, self.token, self.sampling.draw(logits, self.generator))
        self.token.copy_(drawn)
        if len(self.ends):
            self.ended.logical_or_((drawn[:, None] == self.ends).any(1))
            self.done.copy_(self.ended.all())

    def _positions(self) -> Tensor:
        """Return the positions of the next tokens; a call after a token was added advances the tensor by one."""
        return self.caches[0].positions(len(self.token), self.token.device)

    def _count(self, tokens: int) -> None:
        """Correct the host's token counts: a replay does not add its token, and a trial's token must be removed."""
        for cache in self.caches:
            cache.length += tokens
        self.caches[0].clock.count(tokens)

    @contextlib.contextmanager
    def _randomness(self, source: torch.Generator | None) -> Iterator[None]:
        """Copy the state of `source` (None: torch's default generator) to the graph, and copy it back at the end."""
        if self.generator is None:
            yield
            return
        source = source or default_generator(self.generator.device)
        self.generator.set_state(source.get_state())
        yield
        source.set_state(self.generator.get_state())

    def state(self, source: torch.Generator | None) -> Tensor | None:
        """Return the present state of `source`, or of torch's default generator; None for greedy decoding."""
        return None if self.generator is None else (source or default_generator(self.generator.device)).get_state()

    def restore(self, source: torch.Generator | None, state: Tensor) -> None:
        """Reset the generator to an earlier `state`, as if later tokens had not been drawn."""
        (source or default_generator(self.token.device)).set_state(state)

    def _captured(self, model: CausalModel) -> Callable[[], None]:
        """Run the step twice to compile kernels and allocate workspaces, then capture it. Return its replay.

        All changed tensors are restored, except cache rows at the next token's position, which that token overwrites.
        """
        changed = [self.token, self.ended, self.done, self._positions()]
        changed += [x for cache in self.caches for x in cache.mixer_states.values() if isinstance(x, Tensor)]
        before, state = [x.clone() for x in changed], None if self.generator is None else self.generator.get_state()
        device = self.token.device

        def run() -> None:
            kind = device.type
            with _autocast_without_cache(kind):
                self._run(model)
            self._count(-1)

        def put_back() -> None:
            for x, old in zip(changed, before, strict=True):
                x.copy_(old)
            if self.generator is not None:
                self.generator.set_state(state)

        with kernels.on(device):
            with side_stream(device):
                for _ in range(2):
                    run()
                    put_back()
            replay = capture(run, self.generator, device)
            put_back()
        return replay


def default_generator(device: torch.device) -> torch.Generator:
    """Return torch's default generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Use a separate stream, because trials before a capture need one; on a CPU, do nothing."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


@contextlib.contextmanager
def _autocast_without_cache(kind: str) -> Iterator[None]:
    """Disable autocast's cache of cast weights, because a graph would read the cached weights after they were freed."""
    if not torch.is_autocast_enabled(kind):
        yield
        return
    with torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=False):
        yield


class Weights:
    """The addresses of a model's weights; a captured graph reads weights at these addresses."""

    def __init__(self, model: CausalModel) -> None:
        # store modules and names, because a weight may be replaced
        self._named = [
            (module, name)
            for module in model.modules()
            for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        ]
        self.addresses = self._addresses()

    def _addresses(self) -> tuple[int, ...]:
        return tuple(getattr(module, name).data_ptr() for module, name in self._named)

    def check(self) -> None:
        """Raise if weights have moved or were replaced."""
        if self._addresses() != self.addresses:
            raise RuntimeError(
                "the model's weights moved (model.to, .cuda, .half, ...) or were replaced while tokens were drawn. Draw all "
                "tokens before, or start again with the tokens so far as the prompt."
            )


# -- steps that a model keeps for later calls --------------------------------------------------------------------------
_steps: weakref.WeakKeyDictionary[Any, dict[tuple, TokenStep]] = weakref.WeakKeyDictionary()
_refused: weakref.WeakSet[Any] = weakref.WeakSet()


def forget(model: CausalModel) -> None:
    """Free the graphs and caches that are kept for a model, and allow another capture after a failed one."""
    _steps.pop(model, None)
    _refused.discard(model)


@contextlib.contextmanager
def token_step(
    model: CausalModel, tokens: Tensor, longest: int, sampling: Sampling, ends: int
) -> Iterator[TokenStep | None]:
    """Yield a step for prompts (B, N) and up to `longest` tokens in total; yield None if it cannot be captured.

    A step of an earlier call is reused, unless another call is using it or the weights have moved.
    """
    step = _step_of(model, tokens, longest, sampling, ends)
    if step is None:
        yield None
        return
    step.busy = True
    try:
        yield step
    finally:
        step.busy = False


def _step_of(model: CausalModel, tokens: Tensor, longest: int, sampling: Sampling, ends: int) -> TokenStep | None:
    """Return a step of an earlier call, or else a new one; None if a step cannot be captured."""
    device = tokens.device
    if model in _refused or why_not(model, device) is not None:
        return None
    kind, weights = device.type, Weights(model).addresses
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    mode = torch.is_inference_mode_enabled()  # inference tensors can be changed only in inference mode
    key = len(tokens), room(model, longest), sampling, ends, device, cast, mode, weights
    steps = {k: step for k, step in _steps.pop(model, {}).items() if k[-1] == weights}
    step = steps.pop(key, None)
    if step is None or step.busy:
        step = TokenStep(model, len(tokens), key[1], sampling, ends, device)
    if _stays(model):
        steps[key] = step
        _steps[model] = _few(steps)
    return step


def _stays(model: CausalModel) -> bool:
    """Return whether steps are kept for later calls; to save memory, none are kept while a Trainer fits the model."""
    trainer = attached_trainer(model) if isinstance(model, pl.LightningModule) else None
    return trainer is None or trainer.state.fn != "fit" or trainer.state.status != "running"


def _few(steps: dict[tuple, TokenStep]) -> dict[tuple, TokenStep]:
    """Return the latest steps within `KEPT` and `KEPT_BYTES`, but at least the last step."""
    latest: dict[tuple, TokenStep] = {}
    for key, step in reversed(steps.items()):
        if latest and (len(latest) == KEPT or sum(x.nbytes for x in latest.values()) + step.nbytes > KEPT_BYTES):
            break
        latest[key] = step
    return dict(reversed(latest.items()))


def refuse(model: CausalModel, error: Exception) -> None:
    """Warn that a capture failed. Do not try again for this model, unless memory was the reason."""
    forget(model)
    if not isinstance(error, torch.OutOfMemoryError):
        _refused.add(model)
    warnings.warn(
        f"a token step of {type(model).__name__} could not be captured as a CUDA graph, so the host launches each "
        f"kernel of each token: {error}",
        stacklevel=2,
    )
