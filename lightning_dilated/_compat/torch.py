"""Private interfaces of torch, each behind a function that says why it is used and for which versions it holds.

`tests/test_compat.py` has a test for each, which names what breaks where one changes.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.forward_ad import unpack_dual
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules import batchnorm, conv, instancenorm, pooling
from torch.serialization import _get_layout
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader

# -- meshes, modules and loaders; all of it holds for torch 2.11 to 2.13 -------------------------------------------------

#: base classes that have no public name: of modules that take statistics over tokens, pool neighbours, pool all tokens
TOKEN_NORMS = (batchnorm._BatchNorm, instancenorm._InstanceNorm, nn.GroupNorm)
POOLS = (pooling._MaxPoolNd, pooling._AvgPoolNd, pooling._LPPoolNd)
ADAPTIVE_POOLS = (pooling._AdaptiveAvgPoolNd, pooling._AdaptiveMaxPoolNd)
#: the base class of all convolutions
CONVOLUTION: Any = conv._ConvNd


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """All axes of a mesh as one, by `DeviceMesh._flatten`, the only way to a group over several axes."""
    return mesh._flatten(name)


def default_store() -> dist.Store:
    """The store that the default process group was made with, by `distributed_c10d._get_default_store`."""
    return dist.distributed_c10d._get_default_store()


def use_autograd_cache(enabled: bool) -> AbstractContextManager[None]:
    """Within, torch.compile reads and writes its on-disk cache of graphs or not: `torch._functorch.config`."""
    from torch._functorch import config  # with it comes the compiler

    return config.patch(enable_autograd_cache=enabled)


def uses_autograd_cache() -> bool:
    """Whether torch.compile uses its on-disk cache of graphs: `torch._functorch.config.enable_autograd_cache`."""
    from torch._functorch import config

    return config.enable_autograd_cache


def whole_graphs_in_ddp() -> AbstractContextManager[None]:
    """Within, torch.compile does not cut graphs at DDP's buckets: `torch._dynamo.config.optimize_ddp`."""
    return torch._dynamo.config.patch(optimize_ddp=False)


def map_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace parameters, buffers and metric states by a function of each, by `nn.Module._apply`, as `Module.to` does."""
    module._apply(function)


def set_dataset(loader: DataLoader, dataset: Any) -> None:
    """Give a loader that was made another dataset of the same length: `DataLoader.__setattr__` forbids it for its sampler's
    sake, so the attribute is set past it."""
    vars(loader)["dataset"] = dataset


# -- files of torch.distributed.checkpoint -------------------------------------------------------------------------------
#: where an entry lies in a file, in `.metadata`: `filesystem._StorageInfo(relative_path, offset, length)`
StorageInfo = _StorageInfo
#: the memory format of a tensor as `.metadata` names it
MemoryFormatEncoding = metadata._MEM_FORMAT_ENCODING


def stored_layout(name: str) -> torch.layout:
    """The layout of that name; `.metadata` files pickle a layout as a call of `torch.serialization._get_layout`."""
    return _get_layout(name)


def set_nested(state: Any, path: tuple[str | int, ...], value: Any) -> None:
    """Set a value below nested mappings and lists, as the DefaultLoadPlanner does, by `_nested_dict.set_element`."""
    set_element(state, path, value)


# -- process groups ----------------------------------------------------------------------------------------------------
def process_groups() -> list[dist.ProcessGroup]:
    """All process groups of this process: the keys of `distributed_c10d._world.pg_map`. Holds for torch 2.11 to 2.13."""
    return list(dist.distributed_c10d._world.pg_map)


def collectives_begun(group: dist.ProcessGroup | dist.ProcessGroupGloo) -> int:
    """How many calls a group has begun on this rank: `_get_sequence_number_for_group`. Holds for torch 2.11 to 2.13."""
    return group._get_sequence_number_for_group()


def gloo_backend(group: dist.ProcessGroup, name: str, timeout: timedelta | None) -> dist.ProcessGroupGloo:
    """A gloo backend of a group's ranks, over a connection of its own that `name` tells apart.

    `dist.new_group` does not serve: all ranks of the job would have to call it, or (with local synchronization) to have
    created equally many groups before. Uses `dist.distributed_c10d._get_default_store` and the constructor of
    `dist.ProcessGroupGloo`, which torch does not document. Holds for torch 2.11 to 2.13.
    """
    prefix = f"lightning-dilated/{group.group_name}/{timeout}/{name}"
    store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
    options = {} if timeout is None else {"timeout": timeout}
    return dist.ProcessGroupGloo(store, dist.get_rank(group), dist.get_world_size(group), **options)


# -- autograd ----------------------------------------------------------------------------------------------------------
def in_backward() -> bool:
    """Whether this thread runs a backward.

    torch has no public question for it. Uses `torch._C._current_graph_task_id`, -1 outside of a backward. Holds for torch
    2.11 to 2.13.
    """
    return torch._C._current_graph_task_id() != -1


class ThreadStack(threading.local):
    """A stack of values; each thread has its own. A backward sees the stack of the thread that called it.

    Autograd runs the backward of a GPU in threads of its own. It gives them the object that the caller's thread stored by
    `torch._C._stash_obj_in_tls`: here a list with the stack, which does not change while that thread waits for the backward.
    `values` serves torch.compile, which cannot read that. Holds for torch 2.11 to 2.13.

    Args:
        name: of the stack, in torch's thread-local state.
    """

    def __init__(self, name: str) -> None:  # called in each thread
        self.values: tuple[Any, ...] = ()
        self._key, self._box = f"lightning_dilated.{name}", [self.values]

    @contextlib.contextmanager
    def with_top(self, value: Any) -> Iterator[None]:
        """Put a value on top of this thread's stack for the time of the context."""
        with self.set_to((*self.values, value)):
            yield

    @contextlib.contextmanager
    def set_to(self, values: tuple[Any, ...]) -> Iterator[None]:
        """Let this thread have another stack for the time of the context."""
        before, stored = self.values, self._stored()
        self.values = self._box[0] = values
        self._store(self._box)
        try:
            yield
        finally:
            self.values = self._box[0] = before
            if stored is not None:  # in a thread of autograd, the list of its caller
                self._store(stored)

    def _store(self, box: list[tuple[Any, ...]]) -> None:
        if self._stored() is not box:
            # torch 2.11 gives back a reference that it has not taken, when the object is replaced or the thread ends
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(box))
            torch._C._stash_obj_in_tls(self._key, box)

    def _stored(self) -> list[tuple[Any, ...]] | None:
        return torch._C._get_obj_in_tls(self._key) if torch._C._is_key_in_tls(self._key) else None

    def of_backward(self) -> tuple[Any, ...]:
        """The stack of the thread that called the backward which this thread runs; outside of one, this thread's."""
        stored = None if self.values or not in_backward() else self._stored()
        return self.values if stored is None else stored[0]


# -- models and training in less memory --------------------------------------------------------------------------------
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


def allow_any_length(x: Tensor) -> None:
    """Let graphs that are compiled for a tensor (n,) take others of any length n, also those of `dynamic=False`.

    Uses `torch._dynamo.maybe_mark_dynamic`; known to hold for torch 2.11 to 2.13.
    """
    torch._dynamo.maybe_mark_dynamic(x, 0)


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


def uncompiled(module: nn.Module) -> Callable[..., Any]:
    """A module's call with its hooks, FSDP's among them, whether `module.compile` compiled its forward or not.

    It is `Module._call_impl`. Known to hold for torch 2.11 to 2.13.
    """
    return module._call_impl


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


# -- dense attention with its log-sum-exp ------------------------------------------------------------------------------
# The public scaled_dot_product_attention returns no log-sum-exp, without which branches cannot be merged. The aten ops below
# do, and their backward takes a merged output and log-sum-exp. All known to hold for torch 2.11 to 2.13.
# q, grad and out are (G, J, n, D), k and v (G, J, m, D), with any strides, but 1 along D; lse is (G, J, n), natural logs.

CUDNN_ATTENTION = "_scaled_dot_product_cudnn_attention"
FLASH_ATTENTION = "_scaled_dot_product_flash_attention"
CPU_FLASH_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def missing_op(name: str) -> str | None:
    """Why an aten op of this name cannot be called, None where torch has it."""
    return None if hasattr(torch.ops.aten, name) else f"this torch ({torch.__version__}) has no aten::{name}"


def cudnn_attention_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) by `aten::_scaled_dot_product_cudnn_attention`."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse.view(q.shape[:-1])  # some versions return (G, J, n, 1)


def cudnn_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) by `aten::_scaled_dot_product_cudnn_attention_backward`.

    torch caches one cuDNN graph for each set of parameters: shapes and strides of q, k and v, and the bits of the dropout
    rate, but not the strides of grad and out, which the graph reads as they were in its first call. The rate -0.0 gives
    these calls graphs of their own, apart from those of torch's attention, whose strides are not known here; the caller
    keeps the strides of its own calls equal (`attention.backends.sdpa`).
    """
    none = torch.empty(0, dtype=torch.int64, device=q.device)
    lse = lse.contiguous()[..., None]
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse, none, none, None, None, None, q.shape[2], k.shape[2], -0.0, causal, scale=scale
    )


def flash_attention_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) by `aten::_scaled_dot_product_flash_attention`."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) by `aten::_scaled_dot_product_flash_attention_backward`."""
    none = torch.empty(0, dtype=torch.int64, device=q.device)
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, none, none, scale=scale
    )


def cpu_flash_attention_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) by `aten::_scaled_dot_product_flash_attention_for_cpu`."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def cpu_flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) by `aten::_scaled_dot_product_flash_attention_for_cpu_backward`."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, scale=scale
    )


# -- planning and the memory profiler ----------------------------------------------------------------------------------
Module = TypeVar("Module", bound=nn.Module)


def bare_copy(module: Module) -> Module:
    """A shallow copy without parameters, buffers and hooks, and without the children that have parameters.

    Takes what `nn.Module.__init__` sets from a new module (a shallow copy would share it), and `Module._modules` without
    some. Known to hold for torch 2.11 to 2.13.
    """
    made = copy.copy(module)
    children = {n: m for n, m in module._modules.items() if m is None or next(m.parameters(), None) is None}
    made.__dict__.update({**nn.Module().__dict__, "_modules": children})
    return made


def real_tensors() -> contextlib.AbstractContextManager[Any]:
    """Within, tensors have values, also under `fake_tensors` and other dispatch modes.

    Uses `torch.utils._python_dispatch._disable_current_modes`. Known to hold for torch 2.11 to 2.13.
    """
    return _disable_current_modes()


# -- traced tensors ----------------------------------------------------------------------------------------------------
def below_autograd(op: Any, *args: Any) -> Any:
    """op(*args) by its backends, for the kernel that an op has for autograd, see `torch.library.Library.impl`.

    `torch._C._AutoDispatchBelowAutograd`, which has no public name; 2.4 to 2.13.
    """
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def transformed() -> bool:
    """Return whether a transform of torch.func runs: `torch._C._functorch.peek_interpreter_stack`; 2.11 to 2.13."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def refuse_transforms(name: str, *args: Any) -> None:
    """Raise for derivatives that an op of ours, called `name`, has no formula for; some would silently be zero."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    recorded = transformed() and torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if recorded or any(unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError(
            f"{name} has no derivative by torch.func (grad, vjp, jvp, jacrev, vmap of a gradient) and none in forward mode. "
            "Take the gradient by loss.backward() or torch.autograd.grad, outside of torch.func."
        )


def is_fake(x: object) -> bool:
    """Whether a tensor has no data, as in tracing: `torch._subclasses.fake_tensor.FakeTensor`; 2.11 to 2.13."""
    return isinstance(x, FakeTensor)


def own_parameters(module: nn.Module) -> set[str]:
    """Names of parameters and buffers that DDP leaves to each rank: a module names them. Holds for torch 2.11 to 2.13."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
