"""Private APIs of torch, each behind a name that says what it uses, why, and for which versions that is known to hold."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode

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


def plain_call(module: nn.Module) -> Callable[..., Any]:
    """Hooks and forward, uncompiled: `Module._call_impl`. Known to hold for torch 2.11 to 2.13."""
    return module._call_impl


def in_backward() -> bool:
    """Whether this thread runs within a backward: `torch._C._current_graph_task_id`. Known to hold for 2.11 to 2.13."""
    return torch._C._current_graph_task_id() != -1


def record_memory(entries: int | None) -> None:
    """Keep a history of CUDA's allocator, or with None end it: `torch.cuda.memory._record_memory_history`.

    Known to hold for torch 2.11 to 2.13.
    """
    torch.cuda.memory._record_memory_history(**({"enabled": None} if entries is None else {"max_entries": entries}))


def dump_memory(path: str) -> None:
    """Write that history for pytorch.org/memory_viz: `torch.cuda.memory._dump_snapshot`. Known for 2.11 to 2.13."""
    torch.cuda.memory._dump_snapshot(path)


def records_memory() -> bool:
    """Whether this build of torch has both."""
    return hasattr(torch.cuda.memory, "_record_memory_history") and hasattr(torch.cuda.memory, "_dump_snapshot")
