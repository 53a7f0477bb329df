"""Follow the phases of a training step (the forward or backward of a block, the optimizer), and count bytes by kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_dilated._compat.torch import in_backward, set_compiled_call, uncompiled
from lightning_dilated.ext._compat import torch as compat
from lightning_dilated.ext.planning.counting.memory_tracker import (
    ACTIVATIONS,
    BATCH,
    EXCHANGE,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARY,
    parts,
)
from lightning_dilated.models.blocks import TransformerBlock

#: index, among the results of `lightning_dilated::attention`, of other ranks' rows that are saved for the backward
RECEIVED = 2


def weights(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def states(optimizers: Iterable[Any]) -> list[Tensor]:
    """List the state tensors of optimizers."""
    all_states = (getattr(x, "state", {}) for x in optimizers)
    return [t for state in all_states for t in compat.leaves(list(dict(state).values())) if isinstance(t, Tensor)]


def tensors_of(batch: Any) -> list[Tensor]:
    return [t for t in compat.leaves(batch) if isinstance(t, Tensor)]


def bytes_of(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Return the bytes of tensors on a device; each storage counts once."""
    sizes: dict[int, int] = {}
    for t in tensors:
        for part in parts(t):
            if part.device == device:
                storage = part.untyped_storage()
                sizes[compat.storage_key(storage)] = storage.nbytes()
    return sum(sizes.values())


def exchanged(func: Any, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> Iterator[tuple[Tensor, str]]:
    """Yield (tensor, EXCHANGE) for tensors of a collective, and for received rows that attention saves."""
    if func.namespace == "c10d":
        yield from ((t, EXCHANGE) for t in (*inputs, *results))
    elif func.name() == "lightning_dilated::attention" and results[RECEIVED].numel():
        yield results[RECEIVED], EXCHANGE


def shares(total: int, known: Mapping[str, int]) -> dict[str, int]:
    """Split `total` bytes by kind: known kinds in order, until they add up to `total`; the rest is temporary."""
    sizes, left = {}, total
    for kind in (PARAMETERS, OPTIMIZER, GRADIENTS, BATCH, EXCHANGE, ACTIVATIONS):
        sizes[kind] = max(0, min(known.get(kind, 0), left))
        left -= sizes[kind]
    return {**sizes, TEMPORARY: left}


FORWARD, BACKWARD, OPTIMIZING, REST = "forward", "backward", "optimizer", "rest"


class Phase(NamedTuple):
    """A part of a step; `block`: index of a block, or None for work outside blocks."""

    stage: str
    block: int | None = None

    def in_words(self, blocks: int) -> str:
        """Describe the phase; the text numbers blocks from 1."""
        if self.stage not in (FORWARD, BACKWARD):
            return {OPTIMIZING: "optimizer", REST: "rest of the step"}[self.stage]
        if self.block is None:
            return f"{self.stage}, other" if blocks else self.stage
        return f"{self.stage} of block {self.block + 1} of {blocks}"


def phases(blocks: int) -> list[Phase]:
    """List all possible phases, in the order of a step."""
    order = range(blocks)
    forward = [Phase(FORWARD), *(Phase(FORWARD, i) for i in order)]
    backward = [*(Phase(BACKWARD, i) for i in reversed(order)), Phase(BACKWARD)]
    return [*forward, *backward, Phase(OPTIMIZING), Phase(REST)]


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the module's TransformerBlocks; if it has none, return the children of its outermost ModuleLists."""
    blocks = [m for m in module.modules() if isinstance(m, TransformerBlock)]
    return blocks or list(dict.fromkeys(_listed(module)))


def _listed(module: nn.Module, inside: bool = False) -> Iterator[nn.Module]:
    """Yield the children of ModuleLists, and of ModuleLists and ModuleDicts inside them."""
    for child in module.children():
        if isinstance(child, nn.ModuleList) or (inside and isinstance(child, nn.ModuleDict)):
            yield from _listed(child, True)
        elif inside:
            yield child
        else:
            yield from _listed(child)


class Watch:
    """Follow a module's blocks through forward and backward; the caller marks other phases with `enter`.

    Calls are followed outside compiled code, so that nothing is compiled again. A block's backward begins when the
    gradient of a result is computed. It ends when the gradient of an input is computed or another backward begins.

    Attributes:
        phase: the present phase.
        on: whether a training batch is being computed; phases change only then.
        border: called with each phase that ends.
    """

    def __init__(self, module: nn.Module) -> None:
        self.blocks = find_blocks(module)
        self.phase, self.on = Phase(REST), False
        self.border: Callable[[Phase], None] | None = None
        self._hooks: list[Any] = []

    def attach(self) -> None:
        for i, block in enumerate(self.blocks):
            set_compiled_call(block, _Call(self, i, block, compat.compiled_call(block)))

    def detach(self) -> None:
        self.stop()
        for block in self.blocks:
            call = compat.compiled_call(block)
            if isinstance(call, _Call):
                set_compiled_call(block, call.before)

    def start(self) -> None:
        self.phase, self.on = Phase(FORWARD), True

    def stop(self) -> None:
        self.on, self.border = False, None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def enter(self, stage: str, block: int | None = None) -> None:
        phase = Phase(stage, block)
        if not self.on or phase == self.phase:
            return
        ended, self.phase = self.phase, phase
        if self.border is not None:
            self.border(ended)

    def hook(self, tensors: Any, then: Callable[[Tensor], None]) -> None:
        """Call `then` with the gradient of each tensor as soon as it is computed."""
        for t in compat.leaves(tensors):
            if isinstance(t, Tensor) and t.requires_grad:
                self._hooks.append(t.register_hook(then))

    def begin_backward(self, block: int, grad: Tensor) -> None:
        """Enter a block's backward; called with the gradient of one of its results."""
        if self.phase.stage == BACKWARD:
            self.enter(BACKWARD, block)

    def end_backward(self, block: int, grad: Tensor) -> None:
        """Leave a block's backward, unless another one has begun; called with the gradient of one of its inputs."""
        if self.phase == Phase(BACKWARD, block):
            self.enter(BACKWARD)


class _Call:
    """Follow a block's calls: replace `before`, the function that `nn.Module.__call__` calls for compiled modules."""

    def __init__(self, watch: Watch, index: int, block: nn.Module, before: Callable[..., Any] | None) -> None:
        self.watch, self.index, self.block, self.before = watch, index, block, before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = uncompiled(self.block) if self.before is None else self.before
        if torch.compiler.is_compiling() or not self.watch.on:
            return run(*args, **kwargs)
        return self._followed(run, args, kwargs)

    def _followed(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        watch, i = self.watch, self.index
        if in_backward():  # activation checkpointing recomputes the block
            watch.enter(BACKWARD, i)
            return run(*args, **kwargs)
        watch.enter(FORWARD, i)
        if torch.is_grad_enabled():
            watch.hook((args, kwargs), partial(watch.end_backward, i))
        out = run(*args, **kwargs)
        watch.hook(out, partial(watch.begin_backward, i))
        watch.enter(FORWARD)
        return out
