"""Private interfaces of torch, each behind a function that says why it is used and for which versions it holds.

`tests/test_compat.py` has a test for each, which names what breaks where one changes.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.forward_ad import unpack_dual
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules import batchnorm, conv, instancenorm, pooling
from torch.nn.utils.stateless import _reparametrize_module
from torch.serialization import _get_layout
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.data import DataLoader

# -- meshes, modules and loaders; all of it holds for torch 2.11 to 2.13 -------------------------------------------------

#: base classes that have no public name: of modules that take statistics over tokens, pool neighbours, pool all tokens
TOKEN_NORMS = (batchnorm._BatchNorm, instancenorm._InstanceNorm, nn.GroupNorm)
POOLS = (pooling._MaxPoolNd, pooling._AvgPoolNd, pooling._LPPoolNd)
ADAPTIVE_POOLS = (pooling._AdaptiveAvgPoolNd, pooling._AdaptiveMaxPoolNd)
#: the base class of all convolutions
CONVOLUTION: Any = conv._ConvNd
#: operators that begin and end a range of `record_function`
RANGE = torch.ops.profiler._record_function_enter_new.default, torch.ops.profiler._record_function_exit._RecordFunction


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

    Autograd runs the backward of a GPU in threads of its own. Torch stores the caller's `contextvars` for them under
    "context" (`torch._C._get_obj_in_tls`). `values` serves torch.compile, which cannot read a ContextVar. Holds for torch
    2.11 to 2.13.

    Args:
        copy: holds the same values as `values`.
    """

    def __init__(self, copy: ContextVar[tuple[Any, ...]]) -> None:  # called in each thread
        self.values: tuple[Any, ...] = ()
        self._copy = copy

    @contextlib.contextmanager
    def with_top(self, value: Any) -> Iterator[None]:
        """Put a value on top of this thread's stack for the time of the context."""
        before = self.values
        self._set((*before, value))
        try:
            yield
        finally:
            self._set(before)

    def _set(self, values: tuple[Any, ...]) -> None:
        self.values = values
        self._copy.set(values)

    def of_backward(self) -> tuple[Any, ...]:
        """The stack of the thread that called the backward which this thread runs; outside of one, this thread's."""
        if self.values or not in_backward() or not torch._C._is_key_in_tls("context"):
            return self.values
        context = torch._C._get_obj_in_tls("context")
        return () if context is None else context.get(self._copy, ())


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


def modules_of(module: nn.Module) -> list[nn.Module]:
    """The module and all below it, each once, as `modules()` has them, but in another order and in a third of the time; uses
    `Module._modules`. Known to hold for torch 2.11 to 2.13."""
    met, modules = {module}, [module]
    for each in modules:  # which grows meanwhile
        for child in each._modules.values():
            if child is not None and child not in met:
                met.add(child)
                modules.append(child)
    return modules


def tensors_of(modules: Sequence[nn.Module]) -> tuple[list[nn.Parameter], list[Tensor]]:
    """The parameters and buffers that these modules hold themselves, each once; uses `Module._parameters` and `_buffers`.

    Known to hold for torch 2.11 to 2.13.
    """
    parameters = {id(x): x for m in modules for x in m._parameters.values() if x is not None}
    buffers = {id(x): x for m in modules for x in m._buffers.values() if x is not None}
    return list(parameters.values()), list(buffers.values())


def has_hooks(module: nn.Module) -> bool:
    """Whether a hook runs around the module's forward or backward; uses its four dicts of hooks. Known for 2.11 to 2.13."""
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward) or has_backward_hooks(module)


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a hook runs around the module's backward. Known to hold for torch 2.11 to 2.13."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def packs_saved_tensors() -> bool:
    """Whether hooks pack what autograd saves: `torch._C._autograd._top_saved_tensors_default_hooks`; 2.11 to 2.13."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def memory_users(x: Tensor) -> int:
    """How many tensors lie in a tensor's memory, x among them: `torch._C._storage_Use_Count`. Known for 2.11 to 2.13."""
    storage = x.untyped_storage()  # an object that counts as well
    return torch._C._storage_Use_Count(storage._cdata) - 1


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


@contextlib.contextmanager
def recording(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None) -> Iterator[None]:
    """Record a CUDA graph on a stream, by `torch.cuda.graph`, with workspaces of cuBLAS of its own; torch 2.11 to 2.13.

    Torch keeps a workspace for each thread and stream. `torch._C._cuda_clearCublasWorkspaces` frees all of them, and
    Lightning's Trainer calls it at its start and end. A graph recorded with such a workspace would then write to freed
    memory. It is called before recording, so that the graph allocates its own, and after, so that nothing else uses the
    graph's. Other threads may copy to the GPU meanwhile. Graphs that were recorded without this lose their workspaces.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


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


__all__ = ["TorchDispatchMode"]

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


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within, an attribute of a module or class is another one, for every thread of the process.

    For functions of torch that no public hook reaches under fake tensors; only in processes that plan, never in one that
    trains. A function that torch renames is an AttributeError here.
    """
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def fake_tensors() -> contextlib.AbstractContextManager[Any]:
    """Within, tensors have sizes but no memory: `torch._subclasses.FakeTensorMode`. Known to hold for 2.11 to 2.13."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def real_tensors() -> contextlib.AbstractContextManager[Any]:
    """Within, tensors have values, also under `fake_tensors` and other dispatch modes.

    Uses `torch.utils._python_dispatch._disable_current_modes`. Known to hold for torch 2.11 to 2.13.
    """
    return _disable_current_modes()


def function_modes() -> int:
    """How many TorchFunctionModes are active: `torch._C._len_torch_function_stack`. Known to hold for 2.11 to 2.13."""
    return torch._C._len_torch_function_stack()


def in_dispatch_mode() -> bool:
    """Whether a TorchDispatchMode is active: `torch.utils._python_dispatch`. Known to hold for torch 2.11 to 2.13."""
    return _get_current_dispatch_mode() is not None


def is_traced() -> bool:
    """Whether a graph is being made of what runs: `torch._C._get_dispatch_mode`. Known to hold for torch 2.11 to 2.13."""
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.PROXY, keys.FUNCTIONAL))


def run_on_device(func: Any, device: str, args: Any, kwargs: Any) -> Any:
    """Run an operator's own function for a device type, so that modes see the operations within it.

    Uses `OpOverload.redispatch` and `torch._C._dispatch_key_for_device`. Known to hold for torch 2.11 to 2.13.
    """
    key = getattr(torch._C.DispatchKey, torch._C._dispatch_key_for_device(device))
    return func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)


def fused_rms_norm(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
    """RMSNorm as one op of a graph: `aten::_fused_rms_norm`. Known to hold for torch 2.11 to 2.13."""
    return torch.ops.aten._fused_rms_norm(x, shape, weight, eps)[0]


def reads_number(func: Any) -> bool:
    """Whether an op reads a number off a tensor: `aten::_local_scalar_dense`. Known to hold for torch 2.11 to 2.13."""
    return func is torch.ops.aten._local_scalar_dense.default


def changes_inputs(func: Any) -> bool:
    """Whether an op writes to an input: `OpOverload._schema`. Known to hold for torch 2.11 to 2.13."""
    return func._schema.is_mutable


def returns_view(func: Any) -> bool:
    """Whether a result is memory of an input: `OpOverload._schema`, and `aten::_unsafe_view`, whose schema does not say so.

    Known to hold for torch 2.11 to 2.13.
    """
    unsafe = func is torch.ops.aten._unsafe_view.default
    return unsafe or any(result.alias_info is not None for result in func._schema.returns)


def sparse_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values of a sparse tensor, coalesced or not: `Tensor._indices`, `Tensor._values`; 2.11 to 2.13."""
    return x._indices(), x._values()


def occupy_gpu(cycles: int) -> None:
    """Keep the current GPU's stream busy for so many cycles: `torch.cuda._sleep`. Known to hold for torch 2.11 to 2.13."""
    torch.cuda._sleep(cycles)


def storage_key(storage: torch.UntypedStorage) -> int:
    """A number that tells living storages apart: `UntypedStorage._cdata`. Known to hold for torch 2.11 to 2.13."""
    return storage._cdata


def with_parameters(module: nn.Module, tensors: Mapping[str, Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Within, the module has these parameters: `torch.nn.utils.stateless`, as `functional_call` does it for one call.

    Known to hold for torch 2.11 to 2.13.
    """
    return _reparametrize_module(module, dict(tensors))


def ahead_of_time(
    function: Callable[..., Any], compiler: Callable[..., Any], partition: Callable[..., Any], parameters: int
) -> Callable[..., Any]:
    """The function by its forward and backward graphs, as `torch.compile` with Inductor makes them.

    Uses AOTAutograd's `aot_function` and Inductor's table of decompositions. Known to hold for torch 2.11 to 2.13.

    Args:
        compiler: of a graph and its inputs, to a function.
        partition: cuts the joint graph in two.
        parameters: how many of the function's first arguments are parameters.
    """
    from torch._functorch.aot_autograd import aot_function
    from torch._inductor.decomposition import select_decomp_table

    return aot_function(function, compiler, compiler, partition, select_decomp_table(), num_params_buffers=parameters)


def min_cut(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
    """(forward, backward) graphs as Inductor cuts them: `min_cut_rematerialization_partition`. Known for 2.11 to 2.13."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **options)


def plain_call(module: nn.Module) -> Callable[..., Any]:
    """Hooks and forward, uncompiled: `Module._call_impl`. Known to hold for torch 2.11 to 2.13."""
    return module._call_impl


def record_memory(entries: int | None) -> None:
    """Keep a history of CUDA's allocator, or with None end it: `torch.cuda.memory._record_memory_history`.

    Known to hold for torch 2.11 to 2.13.
    """
    torch.cuda.memory._record_memory_history(**({"enabled": None} if entries is None else {"max_entries": entries}))


def dump_memory(path: str) -> None:
    """Write that history for pytorch.org/memory_viz: `torch.cuda.memory._dump_snapshot`. Known for 2.11 to 2.13."""
    torch.cuda.memory._dump_snapshot(path)


# -- traced tensors ----------------------------------------------------------------------------------------------------
def copy_all(to: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy each value to its place in a few launches: `torch._foreach_copy_`. Known to hold for torch 2.11 to 2.13."""
    torch._foreach_copy_(to, values)


def below_autograd(op: Any, *args: Any) -> Any:
    """op(*args) by its backends, for the kernel that an op has for autograd, see `torch.library.Library.impl`.

    `torch._C._AutoDispatchBelowAutograd`, which has no public name; 2.4 to 2.13.
    """
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


@contextlib.contextmanager
def autograd_within_op() -> Iterator[None]:
    """Within, autograd records again inside of an op's kernel, which torch runs below it; gradients have to be enabled, too.

    Uses `torch._C._PreserveDispatchKeyGuard` and `torch._C._dispatch_tls_set_dispatch_key_excluded`. Known to hold for torch
    2.11 to 2.13.
    """
    with torch._C._PreserveDispatchKeyGuard():
        for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        yield


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


def map_tree(function: Callable[[Any], Any], tree: Any, leaf: type | None = None) -> Any:
    """A tree of containers with a function of each leaf: `torch.utils._pytree.tree_map`; 2.11 to 2.13.

    `leaf`: a type whose objects are leaves, though they are containers.
    """
    return tree_map(function, tree, is_leaf=None if leaf is None else lambda x: isinstance(x, leaf))


def leaves(tree: Any) -> list[Any]:
    """The leaves of a tree of containers: `torch.utils._pytree.tree_leaves`; 2.11 to 2.13."""
    return tree_leaves(tree)


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """(leaves, what `unflatten` takes to put them together): `torch.utils._pytree.tree_flatten`; 2.11 to 2.13."""
    return tree_flatten(tree)


def unflatten(flat: list[Any], spec: Any) -> Any:
    """The tree that `flatten` took apart, with these leaves: `torch.utils._pytree.tree_unflatten`; 2.11 to 2.13."""
    return tree_unflatten(flat, spec)


def namespace_of(target: object) -> str | None:
    """The library of an op in a graph, such as "aten"; None for a Python function: `torch._ops.OpOverload`; 2.11 to 2.13."""
    return target.namespace if isinstance(target, torch._ops.OpOverload) else None


def options_of_inductor(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that this Inductor has: `torch._inductor.config`. Known to hold for torch 2.11 to 2.13."""
    import torch._inductor.config as config

    return {name: value for name, value in wanted.items() if hasattr(config, name)}


def compile_package(graph: Any, path: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Compile an ExportedProgram ahead of time to a .pt2 file, and load that: `torch._inductor.aoti_compile_and_package` and
    `aoti_load_package`, documented under these names. Known to hold for torch 2.11 to 2.13."""
    import torch._inductor

    torch._inductor.aoti_compile_and_package(graph, package_path=path, inductor_configs=options_of_inductor(options))
    return torch._inductor.aoti_load_package(path)


def is_op(target: object) -> bool:
    """Whether a node of a graph calls an op of torch's dispatcher: `torch._ops.OpOverload`; 2.11 to 2.13."""
    return isinstance(target, torch._ops.OpOverload)


def own_parameters(module: nn.Module) -> set[str]:
    """Names of parameters and buffers that DDP leaves to each rank: a module names them. Holds for torch 2.11 to 2.13."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
