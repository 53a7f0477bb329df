"""Private interfaces of torch, which only the functions of this file use.

All are known to exist in torch 2.11 to 2.13, unless a docstring names other versions. `tests/test_compat.py` tests all.
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

# -- meshes, modules and loaders ---------------------------------------------------------------------------------------

#: base classes (not public) of modules that normalize over tokens, pool neighbours, pool all tokens, or convolve
TOKEN_NORMS = (batchnorm._BatchNorm, instancenorm._InstanceNorm, nn.GroupNorm)
POOLS = (pooling._MaxPoolNd, pooling._AvgPoolNd, pooling._LPPoolNd)
ADAPTIVE_POOLS = (pooling._AdaptiveAvgPoolNd, pooling._AdaptiveMaxPoolNd)
CONVOLUTION: Any = conv._ConvNd


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Join all axes of a mesh into one, via `DeviceMesh._flatten`, the only way to get a group over several axes."""
    return mesh._flatten(name)


def default_store() -> dist.Store:
    """Return the store of the default process group, via `distributed_c10d._get_default_store`."""
    return dist.distributed_c10d._get_default_store()


def use_autograd_cache(enabled: bool) -> AbstractContextManager[None]:
    """Return a context that turns torch.compile's on-disk cache of graphs on or off (`torch._functorch.config`)."""
    from torch._functorch import config  # imports the compiler

    return config.patch(enable_autograd_cache=enabled)


def uses_autograd_cache() -> bool:
    """Return True if torch.compile uses its on-disk cache (`torch._functorch.config.enable_autograd_cache`)."""
    from torch._functorch import config

    return config.enable_autograd_cache


def whole_graphs_in_ddp() -> AbstractContextManager[None]:
    """Return a context in which torch.compile does not split graphs at DDP's buckets (`config.optimize_ddp`)."""
    return torch._dynamo.config.patch(optimize_ddp=False)


def map_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Apply a function to parameters, buffers and metric states, via `nn.Module._apply`, as `Module.to` does."""
    module._apply(function)


def set_dataset(loader: DataLoader, dataset: Any) -> None:
    """Replace a loader's dataset with one of the same length. `DataLoader.__setattr__`, which is bypassed, would raise
    an error because the sampler was made for the first dataset."""
    vars(loader)["dataset"] = dataset


# -- files of torch.distributed.checkpoint -----------------------------------------------------------------------------
#: the record in `.metadata` of an entry's position in a file: `filesystem._StorageInfo(relative_path, offset, length)`
StorageInfo = _StorageInfo
#: the record in `.metadata` of a tensor's memory format
MemoryFormatEncoding = metadata._MEM_FORMAT_ENCODING


def stored_layout(name: str) -> torch.layout:
    """Return the layout named `name`: `.metadata` files pickle a layout as a call to `serialization._get_layout`."""
    return _get_layout(name)


def set_nested(state: Any, path: tuple[str | int, ...], value: Any) -> None:
    """Set a value in nested mappings and lists, as the DefaultLoadPlanner does, via `_nested_dict.set_element`."""
    set_element(state, path, value)


# -- process groups ----------------------------------------------------------------------------------------------------
def process_groups() -> list[dist.ProcessGroup]:
    """Return all process groups of this process: the keys of `distributed_c10d._world.pg_map`."""
    return list(dist.distributed_c10d._world.pg_map)


def collectives_begun(group: dist.ProcessGroup | dist.ProcessGroupGloo) -> int:
    """Return the number of collectives that a group has begun on this rank (`_get_sequence_number_for_group`)."""
    return group._get_sequence_number_for_group()


def gloo_backend(group: dist.ProcessGroup, name: str, timeout: timedelta | None) -> dist.ProcessGroupGloo:
    """Make a gloo backend for a group's ranks, with a separate connection for each `name`.

    Uses the undocumented constructor of `dist.ProcessGroupGloo`, because `dist.new_group` must be called by all ranks
    of the job, or (with local synchronization) needs the same number of earlier groups on every rank.
    """
    prefix = f"lightning-dilated/{group.group_name}/{timeout}/{name}"
    store = dist.PrefixStore(prefix, default_store())
    options = {} if timeout is None else {"timeout": timeout}
    return dist.ProcessGroupGloo(store, dist.get_rank(group), dist.get_world_size(group), **options)


# -- autograd ----------------------------------------------------------------------------------------------------------
def in_backward() -> bool:
    """Return True if this thread runs a backward. Outside of a backward `torch._C._current_graph_task_id` is -1.

    torch has no public API for this.
    """
    return torch._C._current_graph_task_id() != -1


class ThreadStack(threading.local):
    """A stack of values for each thread; a backward reads the stack of the thread that called it.

    Autograd runs a GPU's backward in other threads, and passes them the object that the calling thread has stored by
    `torch._C._stash_obj_in_tls`: here, a list that contains the stack. The stack does not change while the calling thread
    waits for the backward. torch.compile cannot read the stored list, and reads `values` instead.

    Args:
        name: name of the stack in torch's thread-local state.
    """

    def __init__(self, name: str) -> None:  # threading.local calls this in each thread
        self.values: tuple[Any, ...] = ()
        self._key, self._box = f"lightning_dilated.{name}", [self.values]

    @contextlib.contextmanager
    def with_top(self, value: Any) -> Iterator[None]:
        """Push a value onto this thread's stack within the context."""
        with self.set_to((*self.values, value)):
            yield

    @contextlib.contextmanager
    def set_to(self, values: tuple[Any, ...]) -> Iterator[None]:
        """Replace this thread's stack within the context."""
        before, stored = self.values, self._stored()
        self.values = self._box[0] = values
        self._store(self._box)
        try:
            yield
        finally:
            self.values = self._box[0] = before
            if stored is not None:  # in a thread of autograd, this is the calling thread's list
                self._store(stored)

    def _store(self, box: list[tuple[Any, ...]]) -> None:
        if self._stored() is not box:
            # when the object is replaced or the thread ends, torch 2.11 releases a reference that it has not taken
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(box))
            torch._C._stash_obj_in_tls(self._key, box)

    def _stored(self) -> list[tuple[Any, ...]] | None:
        return torch._C._get_obj_in_tls(self._key) if torch._C._is_key_in_tls(self._key) else None

    def of_backward(self) -> tuple[Any, ...]:
        """Return the stack of the thread that called the current backward; without a backward, this thread's stack."""
        stored = None if self.values or not in_backward() else self._stored()
        return self.values if stored is None else stored[0]


# -- models, and training in less memory -------------------------------------------------------------------------------
def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Set the compiled call of a module; None restores the class's call."""
    module.__dict__.pop("_compiled_call_impl", None)
    if call is not None:
        module.__dict__["_compiled_call_impl"] = call


def allow_recompiles(kinds: int) -> None:
    """Increase `torch._dynamo.config.recompile_limit`: by default a function is compiled for only 8 kinds of inputs."""
    config = torch._dynamo.config
    config.recompile_limit = max(kinds, config.recompile_limit)


def allow_any_length(x: Tensor) -> None:
    """Let graphs for a tensor (n,) accept any length n, even with `dynamic=False` (`maybe_mark_dynamic`)."""
    torch._dynamo.maybe_mark_dynamic(x, 0)


def without_runtime_asserts(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled function that, before torch 2.13, omits assertions about sizes known only at run time.

    Otherwise a backward that saves received rows fails to compile, because of the assertion that their number is not
    negative. Uses `torch._dynamo.config.do_not_emit_runtime_asserts` in 2.11 and 2.12.
    """
    if torch.__version__ >= "2.13":  # a TorchVersion, which is compared by numbers
        return compiled

    def run(*args: object, **kwargs: object) -> Any:
        if torch.compiler.is_compiling():
            return compiled(*args, **kwargs)
        with torch._dynamo.config.patch(do_not_emit_runtime_asserts=True):
            return compiled(*args, **kwargs)

    return run


def backward_is_retained() -> bool:
    """Return True if the current backward was called with `retain_graph=True`."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def saved_by_op(mode: Any) -> MutableMapping[Any, Any]:
    """Return {op: results} that selective checkpointing has saved.

    `mode` is the second context of `create_selective_checkpoint_contexts`.
    """
    return mode.storage


def uncompiled(module: nn.Module) -> Callable[..., Any]:
    """Return a module's uncompiled call (`Module._call_impl`), which runs all hooks, including FSDP's."""
    return module._call_impl


def has_hooks(module: nn.Module) -> bool:
    """Return True if the module has forward or backward hooks."""
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward) or has_backward_hooks(module)


def has_backward_hooks(module: nn.Module) -> bool:
    """Return True if the module has backward hooks."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


@contextlib.contextmanager
def hooks_paused(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Disable the hooks of these leaf tensors within the context, via `Tensor._backward_hooks`."""
    hooked = [(x, x._backward_hooks) for x in tensors if x._backward_hooks]
    try:
        for x, _ in hooked:
            x._backward_hooks = None
        yield
    finally:
        for x, hooks in hooked:
            x._backward_hooks = hooks


# -- dense attention with its log-sum-exp ------------------------------------------------------------------------------
# Merging branches needs the log-sum-exp, which the public scaled_dot_product_attention does not return. The aten ops
# below return it, and their backward takes a merged output and a merged log-sum-exp.
# q, grad and out are (G, J, n, D); k and v are (G, J, m, D), with stride 1 along D; lse is (G, J, n), a natural log.

CUDNN_ATTENTION = "_scaled_dot_product_cudnn_attention"
FLASH_ATTENTION = "_scaled_dot_product_flash_attention"
CPU_FLASH_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def missing_op(name: str) -> str | None:
    """Return None if torch has an aten op of this name, else an error message."""
    return None if hasattr(torch.ops.aten, name) else f"this torch ({torch.__version__}) has no aten::{name}"


def cudnn_attention_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return (out, lse) by calling `aten::_scaled_dot_product_cudnn_attention`."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse.view(q.shape[:-1])  # some versions return (G, J, n, 1)


def cudnn_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) by calling `aten::_scaled_dot_product_cudnn_attention_backward`.

    torch caches a cuDNN graph by the shapes and strides of q, k and v and by the bits of the dropout rate. The key does
    not contain the strides of grad and out, so the graph reads them with the strides of its first call. The rate -0.0
    separates these graphs from the graphs of torch's attention, which may have other strides. The caller must use the
    same strides in all calls (`attention.backends.sdpa`).
    """
    none = torch.empty(0, dtype=torch.int64, device=q.device)
    lse = lse.contiguous()[..., None]
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse, none, none, None, None, None, q.shape[2], k.shape[2], -0.0, causal, scale=scale
    )


def flash_attention_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return (out, lse) by calling `aten::_scaled_dot_product_flash_attention`."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) by calling `aten::_scaled_dot_product_flash_attention_backward`."""
    none = torch.empty(0, dtype=torch.int64, device=q.device)
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, none, none, scale=scale
    )


def cpu_flash_attention_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return (out, lse) by calling `aten::_scaled_dot_product_flash_attention_for_cpu`."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def cpu_flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) by calling `aten::_scaled_dot_product_flash_attention_for_cpu_backward`."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, scale=scale
    )


# -- planning and the memory profiler ----------------------------------------------------------------------------------
Module = TypeVar("Module", bound=nn.Module)


def bare_copy(module: Module) -> Module:
    """Return a shallow copy of a module, without its parameters, buffers, hooks and children with parameters.

    Attributes that `nn.Module.__init__` sets are taken from a new module, because a shallow copy would share them.
    """
    bare = copy.copy(module)
    children = {n: m for n, m in module._modules.items() if m is None or next(m.parameters(), None) is None}
    bare.__dict__.update({**nn.Module().__dict__, "_modules": children})
    return bare


def real_tensors() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which new tensors have values, even under `fake_tensors` and other dispatch modes."""
    return _disable_current_modes()


# -- traced tensors ----------------------------------------------------------------------------------------------------
def below_autograd(op: Any, *args: Any) -> Any:
    """Call an op below autograd, from its own autograd kernel (see `torch.library.Library.impl`); torch 2.4 to 2.13."""
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def transformed() -> bool:
    """Return True within a transform of torch.func (`torch._C._functorch.peek_interpreter_stack`)."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def refuse_transforms(name: str, *args: Any) -> None:
    """Raise RuntimeError for derivatives that the op `name` does not implement, because some would silently be 0."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    recorded = transformed() and torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if recorded or any(unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError(
            f"{name} has no derivative by torch.func (grad, vjp, jvp, jacrev, vmap of a gradient) and none in forward mode. "
            "Take the gradient by loss.backward() or torch.autograd.grad, outside of torch.func."
        )


def is_fake(x: object) -> bool:
    """Return True if x is a tensor without data, as in tracing (`torch._subclasses.fake_tensor.FakeTensor`)."""
    return isinstance(x, FakeTensor)


def own_parameters(module: nn.Module) -> set[str]:
    """Return the names of parameters and buffers that a module tells DDP not to synchronize."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
