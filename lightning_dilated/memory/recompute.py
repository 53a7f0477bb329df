"""Activation recomputation: the backward runs a block again on its saved input, with the same autocast and RNG states.

Shape letters: B batch, N tokens, E embedding dim.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
    get_device_states,
    set_device_states,
)

from lightning_dilated._compat.torch import backward_is_retained, saved_by_op
from lightning_dilated._validation import one_of
from lightning_dilated.attention.op import ATTENTION
from lightning_dilated.memory.offload import Host
from lightning_dilated.sequence.group import present_sequence


def forget_casts() -> None:
    """Clear autocast's cache of cast weights, as casts made without gradients must not be used with gradients."""
    if torch.is_autocast_cache_enabled():
        torch.clear_autocast_cache()


class ForwardContext:
    """The autocast settings, active sequence and optionally random states of a forward, to run parts of it again.

    Args:
        like: a tensor on the device of the computation.
        random: whether to store random states, because the parts draw random numbers.
    """

    def __init__(self, like: Tensor, random: bool = False) -> None:
        self._device = like.device.type
        kind = self._device
        self._autocast = None
        if torch.amp.is_autocast_available(kind):
            self._autocast = {
                "enabled": torch.is_autocast_enabled(kind),
                "dtype": torch.get_autocast_dtype(kind),
                "cache_enabled": torch.is_autocast_cache_enabled(),  # graphs of compiled parts depend on this
            }
        self._states = (torch.get_rng_state(), *get_device_states(like)) if random else None
        self._in_sequence = present_sequence()

    @contextlib.contextmanager
    def again(self, grad: bool = True) -> Iterator[None]:
        """Run the body in the forward's context, with gradients enabled if `grad`; then restore the random states."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(self._in_sequence())
            if self._autocast is not None:
                stack.enter_context(torch.autocast(self._device, **self._autocast))
                forget_casts()
            if self._states is not None:
                cpu, devices, states = self._states
                kind = self._device if devices else "cuda"
                stack.enter_context(torch.random.fork_rng(devices=devices, device_type=kind))
                torch.set_rng_state(cpu)
                set_device_states(devices, states, device_type=kind)
            yield


def _in_its_sequence(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function that calls `run`, in any thread, with the sequence that is active now."""
    if torch.compiler.is_compiling():  # a graph contains the sequence's name
        return run
    in_sequence = present_sequence()

    def run_in_sequence(x: Tensor) -> Tensor:
        with in_sequence():
            return run(x)

    return run_in_sequence


#: the ops with results that "attention-kept" saves; extensions add their own ops
KEPT: list[Any] = [ATTENTION]

#: "none" saves all tensors that the backward needs; "block" saves only the block's input; "attention-kept" also saves
#: the op's results (output, log-sum-exp, rows received from other ranks), so that attention and its exchange run once
POLICIES = ("none", "attention-kept", "block")

_running = threading.local()  # a value for each thread, because a GPU's backward runs in its own thread


def check_policy(name: str) -> str:
    """Return `name`, or raise an error that lists the policies."""
    return one_of(name, "the recompute policy", POLICIES)


def result_is_unused() -> bool:
    """Return True in the second run of a checkpointed function, which only has to save intermediate results."""
    return getattr(_running, "unused", False)


class _Anew(AbstractContextManager):
    """Enters a new context from `make` each time: torch enters this object in each backward of a retained graph."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make, self._entered = make, []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *about: Any) -> None:
        self._entered.pop().__exit__(*about)


@contextlib.contextmanager
def _result_unused(unused: bool) -> Iterator[None]:
    before, _running.unused = result_is_unused(), unused
    try:
        yield
    finally:
        _running.unused = before


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype within the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _retained(mode: Any) -> Iterator[None]:
    """Enter `mode`, torch's context of the second run; for a retained graph, restore results that `mode` removes."""
    saved = saved_by_op(mode).items() if backward_is_retained() else ()
    before = {op: copy.copy(results) for op, results in saved}
    try:
        with mode:
            yield
    finally:
        saved_by_op(mode).update(before)


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts for the run in the forward and for the second run in the backward."""
    return _Anew(partial(_result_unused, False)), _Anew(partial(_result_unused, True))


def recomputed(run: Callable[[Tensor], Tensor], x: Tensor, policy: str, marked: bool = False) -> Tensor:
    """Return run(x) (B, N, E); the backward recomputes its intermediate results (torch's checkpoint, arXiv 1604.06174).

    Args:
        policy: "block" or "attention-kept".
        marked: with "block", make `result_is_unused` True in the second run. Then torch.compile cannot compile the call.
    """
    run = _in_its_sequence(run)
    if policy == "block":
        options = {"context_fn": _contexts} if marked else {}
        return checkpoint(run, x, use_reentrant=False, **options)
    # torch.compile accepts only torch's own contexts, and handles retained graphs itself
    selective = partial(create_selective_checkpoint_contexts, KEPT)
    context_fn = selective if torch.compiler.is_compiling() else partial(_retained_contexts, selective)
    return checkpoint(run, x, use_reentrant=False, context_fn=context_fn)


def _retained_contexts(
    contexts: Callable[[], tuple[Any, Any]],
) -> tuple[AbstractContextManager, AbstractContextManager]:
    first, second = contexts()
    return first, _Anew(partial(_retained, second))


def in_groups(layers: list[Callable[[Tensor], Tensor]], x: Tensor, every: int, host: Host) -> Tensor:
    """Run the layers one after another, but save only the input of each group of layers, on the GPU or in `host`.

    The backward runs a group again to get the inputs of its layers; then each layer recomputes its activations.

    Args:
        layers: functions from (B, N, E) to (B, N, E).
        every: number of layers in a group.
    """
    starts = range(0, len(layers), every)
    for number, first in enumerate(starts):
        group = layers[first : first + every]
        grouped = len(group) > 1 and not torch.compiler.is_compiling()  # hooks do not compile
        with host.offloading(x, number, len(starts), grouped):
            # `fetch` copies the earlier group's input back while the backward of this group's first layer runs, and not
            # already when the group is recomputed
            fetch = partial(_on_gradient, partial(host.prefetch, number)) if grouped else None
            x = _group(group, x, fetch) if len(group) > 1 else group[0](x)
    return x


def _on_gradient(run: Callable[[], None], x: Tensor) -> None:
    """Run a function when the gradient of x has been computed."""
    if x.requires_grad:
        x.register_hook(lambda grad: run())


def _group(layers: list[Callable[[Tensor], Tensor]], x: Tensor, after_first: Callable[[Tensor], None] | None) -> Tensor:
    # Before torch 2.13 a layer's checkpoint saves a tensor of the default dtype. Trainer(precision="bf16-true") sets
    # this dtype in the forward only, so the second run would save a tensor of a different dtype.
    options = {"context_fn": partial(_contexts_of_dtype, torch.get_default_dtype())}
    options = {} if torch.compiler.is_compiling() else options
    return checkpoint(_in_its_sequence(partial(_run, layers, after_first)), x, use_reentrant=False, **options)


def _contexts_of_dtype(dtype: torch.dtype) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return _Anew(partial(default_dtype, dtype)), _Anew(partial(default_dtype, dtype))


def _run(layers: list[Callable[[Tensor], Tensor]], after_first: Callable[[Tensor], None] | None, x: Tensor) -> Tensor:
    for number, layer in enumerate(layers):
        x = layer(x)
        if number == 0 and after_first is not None:
            after_first(x)
    return x
