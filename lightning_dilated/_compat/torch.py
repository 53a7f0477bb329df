"""Private APIs of torch, each behind a name that says what it uses, why, and which versions it is known to hold for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# -- models and training in less memory --------------------------------------------------------------------------------


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What a call of the module runs in place of its hooks and forward: `Module._compiled_call_impl`, set by `compile()`.

    Known to hold for torch 2.11 to 2.13.
    """
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Set it, or with None let the class's own come through. Known to hold for torch 2.11 to 2.13."""
    module.__dict__.pop("_compiled_call_impl", None)
    if call is not None:
        module.__dict__["_compiled_call_impl"] = call


def allow_recompiles(kinds: int) -> None:
    """Let a function be compiled for so many kinds of inputs (8 by default) before torch runs it uncompiled.

    Uses `torch._dynamo.config.recompile_limit`, never lowered. Known to hold for torch 2.11 to 2.13.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(kinds, config.recompile_limit)


def without_runtime_asserts(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled function, compiled without assertions on sizes that are known at run time only.

    Before torch 2.13 the assertion that the number of rows received from other ranks is not negative stops the compilation
    of a backward that saves them. Uses `torch._dynamo.config.do_not_emit_runtime_asserts`; known to hold for 2.11 and 2.12.
    """
    if torch.__version__ >= "2.13":  # a TorchVersion, which compares by numbers
        return compiled

    def run(*args: object, **kwargs: object) -> Any:
        if torch.compiler.is_compiling():
            return compiled(*args, **kwargs)
        with torch._dynamo.config.patch(do_not_emit_runtime_asserts=True):
            return compiled(*args, **kwargs)

    return run


def backward_is_retained() -> bool:
    """Whether the backward that runs now was called with `retain_graph=True`.

    Uses `torch._C._autograd._get_current_graph_task_keep_graph`. Known to hold for torch 2.11 to 2.13.
    """
    return torch._C._autograd._get_current_graph_task_keep_graph()


def saved_by_op(mode: Any) -> MutableMapping[Any, Any]:
    """What selective checkpointing saved, by op: `storage` of the second context of `create_selective_checkpoint_contexts`.

    Known to hold for torch 2.11 to 2.13.
    """
    return mode.storage


def has_hooks(module: nn.Module) -> bool:
    """Whether a hook runs around the module's forward or backward; uses its four dicts of hooks. Known for 2.11 to 2.13."""
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward) or has_backward_hooks(module)


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a hook runs around the module's backward. Known to hold for torch 2.11 to 2.13."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


@contextlib.contextmanager
def hooks_paused(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Within, hooks of these leaves do not run; uses `Tensor._backward_hooks`. Known to hold for torch 2.11 to 2.13."""
    hooked = [(x, x._backward_hooks) for x in tensors if x._backward_hooks]
    try:
        for x, _ in hooked:
            x._backward_hooks = None
        yield
    finally:
        for x, hooks in hooked:
            x._backward_hooks = hooks


def version_of(x: Tensor) -> int:
    """How often a tensor was written to: `Tensor._version`. Known to hold for torch 2.11 to 2.13."""
    return x._version
