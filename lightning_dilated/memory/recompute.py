"""Running a piece of the forward again in the backward as it ran first: the same autocast, the same random numbers.

Activation recomputation: a block's input is kept, the rest is computed again when the backward comes.

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
from lightning_dilated.attention import op as _op  # noqa: F401 - registers the op
from lightning_dilated.memory.offload import Host


def forget_casts() -> None:
    """Before torch 2.11 autocast hands a cast of a weight that was made without gradients out where these are needed."""
    if torch.is_autocast_cache_enabled():
        torch.clear_autocast_cache()


class Replay:
    """What a forward ran under, taken when this is made.

    Args:
        like: a tensor on the device that is computed on.
        random: whether the piece draws random numbers, whose state is then kept, too.
    """

    def __init__(self, like: Tensor, random: bool = False) -> None:
        self._device = like.device.type
        kind = self._device
        self._autocast = None
        if torch.amp.is_autocast_available(kind):
            self._autocast = {
                "enabled": torch.is_autocast_enabled(kind),
                "dtype": torch.get_autocast_dtype(kind),
                "cache_enabled": torch.is_autocast_cache_enabled(),  # compiled pieces look at that, too
            }
        self._states = (torch.get_rng_state(), *get_device_states(like)) if random else None

    @contextlib.contextmanager
    def again(self, grad: bool = True) -> Iterator[None]:
        """The forward's surroundings, with gradients enabled or not; random states are as they were afterwards."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(grad))
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


#: "none" keeps all that the backward needs; "block" the block's input only; "attention-kept" also what the op gave (output,
#: log-sum-exp and the rows received from other ranks), so that neither attention nor exchange is done twice
POLICIES = ("none", "attention-kept", "block")

_running = threading.local()  # a backward on a GPU runs in a thread of its own


def check_policy(name: str) -> str:
    """`name`, or an error that lists the policies."""
    if name not in POLICIES:
        raise ValueError(f"the recompute policy must be one of {', '.join(POLICIES)}; got {name!r}.")
    return name


def result_is_unused() -> bool:
    """Whether a checkpointed piece now runs again for what it saves on its way: nothing reads what it returns."""
    return getattr(_running, "unused", False)


class _ResultUnused(AbstractContextManager):
    """Tells `result_is_unused`; may be entered again, as torch does in each backward of a graph that is retained."""

    def __init__(self, unused: bool) -> None:
        self._unused, self._before = unused, []

    def __enter__(self) -> None:
        self._before.append(result_is_unused())
        _running.unused = self._unused

    def __exit__(self, *about: object) -> None:
        _running.unused = self._before.pop()


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around a piece's first run, and around the one in the backward."""
    return _ResultUnused(False), _ResultUnused(True)


def recomputed(run: Callable[[Tensor], Tensor], x: Tensor, policy: str, marked: bool = False) -> Tensor:
    """run(x) of (B, N, E), by torch's checkpoint (arXiv 1604.06174), also where torch.compile traces it.

    `marked`: `result_is_unused` tells of the second run; not to be compiled then. For policy "block".
    """
    if policy == "block":
        more = {"context_fn": _contexts} if marked else {}
        return checkpoint(run, x, use_reentrant=False, **more)
    # torch.compile takes nothing but torch's own contexts, and keeps for each backward by itself
    kept = partial(create_selective_checkpoint_contexts, [torch.ops.lightning_dilated.attention.default])
    context_fn = kept if torch.compiler.is_compiling() else partial(_keeping, kept)
    return checkpoint(run, x, use_reentrant=False, context_fn=context_fn)


def _keeping(contexts: Callable[[], tuple[Any, Any]]) -> tuple[AbstractContextManager, AbstractContextManager]:
    first, second = contexts()
    return first, _Retained(second)


class _Retained(AbstractContextManager):
    """torch's mode of the second run, which takes out what was kept; of a graph that is retained it is put back, for the
    backwards still to come."""

    def __init__(self, mode: Any) -> None:
        self._mode, self._before = mode, []

    def __enter__(self) -> None:
        saved = saved_by_op(self._mode).items() if backward_is_retained() else ()
        self._before.append({op: copy.copy(results) for op, results in saved})
        self._mode.__enter__()

    def __exit__(self, *about: object) -> None:
        self._mode.__exit__(*about)
        saved_by_op(self._mode).update(self._before.pop())


def in_groups(layers: list[Callable[[Tensor], Tensor]], x: Tensor, every: int, host: Host) -> Tensor:
    """The layers one after another; only the input of every `every`-th is kept, and some of these by the host.

    Each layer recomputes itself; a group of them is computed again, too, before its layers are, one at a time.

    Args:
        layers: (B, N, E) to (B, N, E) each.
        every: layers of a group.
    """
    starts = range(0, len(layers), every)
    for number, first in enumerate(starts):
        group = layers[first : first + every]
        later = len(group) > 1 and not torch.compiler.is_compiling()  # which knows no such hooks
        with host.keeping(x, number, len(starts), later):
            # by its last layer's gradient a group is all there again: what the next one needs comes beside its first layer's
            ahead = partial(_beside_gradient, partial(host.ahead, number)) if later else None
            x = _group(group, x, ahead) if len(group) > 1 else group[0](x)
    return x


def _beside_gradient(then: Callable[[], None], x: Tensor) -> None:
    """Run `then` when the gradient of x is there."""
    if x.requires_grad:
        x.register_hook(lambda grad: then())


def _group(layers: list[Callable[[Tensor], Tensor]], x: Tensor, made_first: Callable[[Tensor], None] | None) -> Tensor:
    # torch before 2.13 gives each layer's own checkpoint a tensor of the default dtype, which Trainer(precision="bf16-true")
    # changes for the forward only, and then finds another dtype in the second run
    more = {"context_fn": partial(_contexts_of_dtype, torch.get_default_dtype())}
    more = {} if torch.compiler.is_compiling() else more
    return checkpoint(partial(_run, layers, made_first), x, use_reentrant=False, **more)


def _contexts_of_dtype(dtype: torch.dtype) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return _DefaultDtype(dtype), _DefaultDtype(dtype)


class _DefaultDtype(AbstractContextManager):
    """torch's default dtype; may be entered again, as in each backward of a graph that is retained."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self._before = dtype, []

    def __enter__(self) -> None:
        self._before.append(torch.get_default_dtype())
        torch.set_default_dtype(self._dtype)

    def __exit__(self, *about: object) -> None:
        torch.set_default_dtype(self._before.pop())


def _run(layers: list[Callable[[Tensor], Tensor]], made_first: Callable[[Tensor], None] | None, x: Tensor) -> Tensor:
    for number, layer in enumerate(layers):
        x = layer(x)
        if number == 0 and made_first is not None:
            made_first(x)
    return x
