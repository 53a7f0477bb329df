"""Wrap the private interfaces of torch that extensions use, each in a function that states the versions of torch.

`tests/test_compat.py` tests each function, and names the parts of the package that break if it changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten as flatten
from torch.utils._pytree import tree_leaves as leaves
from torch.utils._pytree import tree_map
from torch.utils._pytree import tree_unflatten as unflatten

__all__ = ["TorchDispatchMode", "flatten", "leaves", "unflatten"]

#: operators at the start and end of a range of `record_function`
RANGE = torch.ops.profiler._record_function_enter_new.default, torch.ops.profiler._record_function_exit._RecordFunction
#: the operator of autocast's casts
CAST = torch.ops.aten._to_copy.default


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return a module's compiled call, or None. Uses `Module._compiled_call_impl` of torch 2.11 to 2.13."""
    return module._compiled_call_impl


def modules_of(module: nn.Module) -> list[nn.Module]:
    """Return the module and all its descendants, each once. This takes a third of the time of `modules()`.

    Uses `Module._modules` of torch 2.11 to 2.13.
    """
    known, modules = {module}, [module]
    for each in modules:  # the list grows during the loop
        for child in each._modules.values():
            if child is not None and child not in known:
                known.add(child)
                modules.append(child)
    return modules


def tensors_of(modules: Sequence[nn.Module]) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Return the direct parameters and buffers of these modules, each once.

    Uses `Module._parameters` and `Module._buffers` of torch 2.11 to 2.13.
    """
    parameters = {id(x): x for m in modules for x in m._parameters.values() if x is not None}
    buffers = {id(x): x for m in modules for x in m._buffers.values() if x is not None}
    return list(parameters.values()), list(buffers.values())


def packs_saved_tensors() -> bool:
    """Return whether hooks pack tensors. Uses `_C._autograd._top_saved_tensors_default_hooks` of torch 2.11 to 2.13."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def memory_users(x: Tensor) -> int:
    """Count the users of x's memory, including x. Uses `torch._C._storage_Use_Count` of torch 2.11 to 2.13."""
    storage = x.untyped_storage()  # this reference is counted, so it is subtracted
    return torch._C._storage_Use_Count(storage._cdata) - 1


def version_of(x: Tensor) -> int:
    """Return the number of writes to a tensor. Uses `Tensor._version` of torch 2.11 to 2.13."""
    return x._version


@contextlib.contextmanager
def recording(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None) -> Iterator[None]:
    """Record a CUDA graph on a stream with `torch.cuda.graph`, with its own cuBLAS workspaces, in torch 2.11 to 2.13.

    Torch keeps a workspace for each thread and stream. `torch._C._cuda_clearCublasWorkspaces` frees all of them, and
    Lightning's Trainer calls it at its start and end, so a graph recorded with such a workspace would write to freed
    memory. This function clears all workspaces before the recording, so that the graph allocates its own, and again
    after it, so that no other code uses the graph's. Workspaces of graphs recorded without this function are freed.
    Other threads may copy to the GPU during the recording."""
    torch._C._cuda_clearCublasWorkspaces()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def fake_tensors() -> contextlib.AbstractContextManager[Any]:
    """Give new tensors no memory, inside a block. Uses `torch._subclasses.FakeTensorMode` of torch 2.11 to 2.13."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def function_modes() -> int:
    """Count the active TorchFunctionModes. Uses `torch._C._len_torch_function_stack` of torch 2.11 to 2.13."""
    return torch._C._len_torch_function_stack()


def in_dispatch_mode() -> bool:
    """Return whether a TorchDispatchMode is active. Uses `torch.utils._python_dispatch` of torch 2.11 to 2.13."""
    return _get_current_dispatch_mode() is not None


def is_traced() -> bool:
    """Return whether running code is being traced. Uses `torch._C._get_dispatch_mode` of torch 2.11 to 2.13."""
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.PROXY, keys.FUNCTIONAL))


def run_on_device(func: Any, device: str, args: Any, kwargs: Any) -> Any:
    """Run an operator's kernel for a device type, so that dispatch modes see the operations inside it.

    Uses `OpOverload.redispatch` and `torch._C._dispatch_key_for_device` of torch 2.11 to 2.13.
    """
    key = getattr(torch._C.DispatchKey, torch._C._dispatch_key_for_device(device))
    return func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)


def fused_rms_norm(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
    """Compute RMSNorm as one op of a graph. Uses `aten::_fused_rms_norm` of torch 2.11 to 2.13."""
    return torch.ops.aten._fused_rms_norm(x, shape, weight, eps)[0]


def reads_number(func: Any) -> bool:
    """Return whether an op reads a number from a tensor. Uses `aten::_local_scalar_dense` of torch 2.11 to 2.13."""
    return func is torch.ops.aten._local_scalar_dense.default


def changes_inputs(func: Any) -> bool:
    """Return whether an op writes to an input. Uses `OpOverload._schema` of torch 2.11 to 2.13."""
    return func._schema.is_mutable


def returns_view(func: Any) -> bool:
    """Return whether a result shares an input's memory. Uses `OpOverload._schema` of torch 2.11 to 2.13."""
    unsafe = func is torch.ops.aten._unsafe_view.default
    return unsafe or any(result.alias_info is not None for result in func._schema.returns)


def sparse_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices and values of a sparse tensor. Uses `_indices` and `_values` of torch 2.11 to 2.13."""
    return x._indices(), x._values()


def occupy_gpu(cycles: int) -> None:
    """Keep the current GPU's stream busy for a number of cycles. Uses `torch.cuda._sleep` of torch 2.11 to 2.13."""
    torch.cuda._sleep(cycles)


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies a live storage. Uses `UntypedStorage._cdata` of torch 2.11 to 2.13."""
    return storage._cdata


def with_parameters(module: nn.Module, tensors: Mapping[str, Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Replace a module's parameters in a context. Uses `nn.utils.stateless` of torch 2.11 to 2.13."""
    return _reparametrize_module(module, dict(tensors))


def ahead_of_time(
    function: Callable[..., Any], compiler: Callable[..., Any], partition: Callable[..., Any], parameters: int
) -> Callable[..., Any]:
    """Compile a function into a forward and a backward graph, as `torch.compile` with Inductor does.

    Uses AOTAutograd's `aot_function` and Inductor's table of decompositions in torch 2.11 to 2.13.

    Args:
        compiler: returns a function from a graph and its inputs.
        partition: divides the joint graph into forward and backward.
        parameters: number of leading arguments that are parameters.
    """
    from torch._functorch.aot_autograd import aot_function
    from torch._inductor.decomposition import select_decomp_table

    return aot_function(function, compiler, compiler, partition, select_decomp_table(), num_params_buffers=parameters)


def min_cut(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
    """Return a joint graph's forward and backward. Uses `min_cut_rematerialization_partition` of torch 2.11 to 2.13."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **options)


def record_memory(entries: int | None) -> None:
    """Record CUDA's allocator; None stops it. Uses `torch.cuda.memory._record_memory_history` of torch 2.11 to 2.13."""
    torch.cuda.memory._record_memory_history(**({"enabled": None} if entries is None else {"max_entries": entries}))


def dump_memory(path: str) -> None:
    """Write the history for pytorch.org/memory_viz. Uses `torch.cuda.memory._dump_snapshot` of torch 2.11 to 2.13."""
    torch.cuda.memory._dump_snapshot(path)


def copy_all(to: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy `values` to the tensors of `to`, in few launches. Uses `torch._foreach_copy_` of torch 2.11 to 2.13."""
    torch._foreach_copy_(to, values)


@contextlib.contextmanager
def autograd_within_op() -> Iterator[None]:
    """Let autograd record inside an op's kernel, which torch runs below autograd; gradients must also be enabled.

    Uses `torch._C._PreserveDispatchKeyGuard` and `_dispatch_tls_set_dispatch_key_excluded` of torch 2.11 to 2.13.
    """
    with torch._C._PreserveDispatchKeyGuard():
        for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        yield


def after_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the backward that now runs. Uses `_execution_engine.queue_callback`, as DDP does."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def map_tree(function: Callable[[Any], Any], tree: Any, leaf: type | None = None) -> Any:
    """Apply a function to each leaf of a tree of containers. Uses `torch.utils._pytree.tree_map` of torch 2.11 to 2.13.

    `leaf`: a container type that counts as a leaf.
    """
    return tree_map(function, tree, is_leaf=None if leaf is None else lambda x: isinstance(x, leaf))


def namespace_of(target: object) -> str | None:
    """Return an op's library, such as "aten", or None. Uses `torch._ops.OpOverload` of torch 2.11 to 2.13."""
    return target.namespace if isinstance(target, torch._ops.OpOverload) else None


def options_of_inductor(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that the installed Inductor has. Uses `torch._inductor.config` of torch 2.11 to 2.13."""
    import torch._inductor.config as config

    return {name: value for name, value in options.items() if hasattr(config, name)}


def compile_package(graph: Any, path: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Compile an ExportedProgram ahead of time to a .pt2 file, and load the file. Holds for torch 2.11 to 2.13.

    Uses `torch._inductor.aoti_compile_and_package` and `aoti_load_package`, documented under these names.
    """
    import torch._inductor

    torch._inductor.aoti_compile_and_package(graph, package_path=path, inductor_configs=options_of_inductor(options))
    return torch._inductor.aoti_load_package(path)


def is_op(target: object) -> bool:
    """Return whether a graph's node calls a dispatched op. Uses `torch._ops.OpOverload` of torch 2.11 to 2.13."""
    return isinstance(target, torch._ops.OpOverload)


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module or class in a context, for every thread of the process.

    Some functions of torch have no public hook under fake tensors. Use this only in a planning process, never in one
    that trains. If torch has renamed the attribute, this raises AttributeError.
    """
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
