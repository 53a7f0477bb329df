"""A Trainer's state in checkpoints: optimizer states by name, low-bit states as tensors, and the rank that writes each."""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_dilated._compat.lightning import dump_checkpoint
from lightning_dilated._compat.torch import own_parameters
from lightning_dilated._validation import check_input


def trainer_state(trainer: pl.Trainer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two parts of Lightning's checkpoint, the tensors and everything else, without copying the tensors.

    A strategy with outer steps adds their state and, under "regions", this region's own parameters and optimizers.
    """
    meta = dump_checkpoint(trainer)
    tensors, optimizers = {"state_dict": meta.pop("state_dict")}, {}
    states = meta.pop("optimizer_states", [])
    for i, (optimizer, state) in enumerate(zip(trainer.optimizers, states, strict=True)):
        optimizers[f"optimizer_{i}"] = flatten_low_bit(to_names(state, optimizer, trainer.lightning_module))
    strategy: Any = trainer.strategy
    outer = strategy.outer_state() if hasattr(strategy, "outer_state") else None
    if outer is not None:
        tensors["outer_steps"], meta["outer_steps"] = outer.pop("tensors"), outer
        if outer["regions"] > 1:
            tensors["regions"] = {str(strategy.region): {"state_dict": strategy.local_state_dict(), **optimizers}}
    return {**tensors, **optimizers}, meta


# -- optimizer states --------------------------------------------------------------------------------------------------
# torch's get_optimizer_state_dict, which `load_sharded` uses, also returns names. It is not used here, because it would
# take an optimizer step if there is no state yet, and raise an error for parameters that the module does not have.
def to_names(state: dict[str, Any], optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, Any]:
    """Return an optimizer's state dict in which names of parameters replace their numbers; existing names stay."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    names = {id(p): name for name, p in module.named_parameters()}
    return renamed(state, {i: names.get(id(p), f"parameter {i}") for i, p in enumerate(parameters)})


def to_numbers(state: dict[str, Any]) -> dict[str, Any]:
    """Undo `to_names`: replace names of parameters with numbers, which count the parameters of all groups in order."""
    order = [name for group in state["param_groups"] for name in group["params"]]
    return renamed({"state": {}, **state}, {name: i for i, name in enumerate(order)})


def renamed(state: dict[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    """Rename the parameters in an optimizer's state dict; parameters that are not in `names` keep their keys."""
    if "param_groups" not in state:  # this rank has no state
        return state
    groups = [{**g, "params": [names.get(x, x) for x in g["params"]]} for g in state["param_groups"]]
    return {**state, "state": {names.get(k, k): v for k, v in state["state"].items()}, "param_groups": groups}


# -- torchao's optimizer states of 4 or 8 bits, tensors made of other tensors ------------------------------------------
#: {class of torchao's low-bit states: its module}
LOW_BIT = {f"OptimState{x}": f"torchao.optim.subclass_{x.lower()}" for x in ("4bit", "8bit", "Fp8")}
#: the key in files for a state's attributes other than tensors; files of 0.2.0 and earlier use the old key
_ATTRIBUTES, _OLD_ATTRIBUTES = "attributes", "told"


def flatten_low_bit(value: Any) -> Any:
    """Replace each low-bit state in a nested mapping with {class: {its tensors}}, so that files store its bits."""
    if isinstance(value, Mapping):
        return {k: flatten_low_bit(v) for k, v in value.items()}
    if not (isinstance(value, Tensor) and type(value).__name__ in LOW_BIT):
        return value
    names, attributes = value.__tensor_flatten__()
    return {type(value).__name__: {**{name: getattr(value, name) for name in names}, _ATTRIBUTES: attributes}}


def unflatten_low_bit(value: Any) -> Any:
    """Undo `flatten_low_bit`; raise ModuleNotFoundError if torchao is missing."""
    if not isinstance(value, Mapping):
        return value
    name = next(iter(value), None)
    if len(value) != 1 or name not in LOW_BIT:
        return {k: unflatten_low_bit(v) for k, v in value.items()}
    try:
        kind = getattr(importlib.import_module(LOW_BIT[name]), name)
    except ImportError as error:
        message = f"the checkpoint holds states of torchao's ({name}): install the extra eightbit."
        raise ModuleNotFoundError(message) from error
    tensors = dict(value[name])
    attributes = tensors.pop(_ATTRIBUTES if _ATTRIBUTES in tensors else _OLD_ATTRIBUTES)
    return kind.__tensor_unflatten__(tensors, attributes)


def read_to_host(io: Any) -> None:
    """Make Lightning's own CheckpointIO load to the host and run no code of a file; leave other classes as they are.

    Lightning passes a function as map_location, with which torch cannot read low-bit states. By default, Lightning
    reads a checkpoint from a URL with weights_only=False.
    """
    if type(io) is TorchCheckpointIO:
        io.load_checkpoint = functools.partial(_read_safely, io)


def _read_safely(io: Any, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
    """Call `TorchCheckpointIO.load_checkpoint` to load to the host; weights_only is True unless the caller sets False.

    Raises: ValueError for a fifo or device, which would block, and for a URL of a store that is not in `STORES`.
    """
    check_input(path)
    return TorchCheckpointIO.load_checkpoint(io, path, map_location="cpu", weights_only=weights_only is not False)


def low_bit_name(optimizer: Any) -> str | None:
    """Return the name of the optimizer's class in torchao if its states have 4 or 8 bits, else None."""
    names = [c.__name__ for c in type(optimizer).__mro__ if c.__module__.startswith("torchao.")]
    return next((name for name in names if name.endswith(("4bit", "8bit", "Fp8"))), None)


def refuse_one_file(optimizers: Iterable[Any], why: str) -> None:
    """Raise ValueError for sharded low-bit states, as torch cannot gather them into one file or shard them from one.

    The message begins with `why`, the reason why the states would be in one file.
    """
    name = next(filter(None, map(low_bit_name, optimizers)), None)
    if name is not None:
        raise ValueError(
            f"{why}, and the states of torchao's {name} cannot be sharded from one. Continue from a folder that "
            "callbacks.ShardedCheckpoint or ring_dilated_fsdp (without save_distributed_checkpoint=False) writes; "
            "`lightning-dilated consolidate` makes one file of its weights. Or take torch.optim.AdamW."
        )


def refuse_replicated_low_bit(names: Iterable[str], folder: Any) -> None:
    """Raise ValueError if names in a folder show low-bit states of unsharded parameters, which cannot be sharded."""
    kind = next((kind for kind in LOW_BIT for name in names if f".{kind}." in name), None)
    if kind is not None:
        raise ValueError(
            f"{folder} holds {kind} of whole parameters, which cannot be sharded. Continue on one GPU or "
            "with ring_dilated, which do not shard, or begin anew from its weights (`lightning-dilated consolidate`)."
        )


# -- staging -----------------------------------------------------------------------------------------------------------
class HostStager:
    """Copies state to host buffers, which later checkpoints use again; buffers for tensors of a GPU are pinned.

    torch.distributed.checkpoint's DefaultStager and async_save (torch 2.13) are not used. DefaultStager raises an error
    for torchao's low-bit states, and copies the whole storage of a view. At exit Python waits for async_save's thread,
    so a rank with dead peers would not end. That thread also ends after dcp.save, before ranks have written checksums
    and the manifest, and have renamed the folder.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def stage(self, value: Any, skip: set[str] = frozenset(), name: str = "") -> Any:  # type: ignore[assignment]
        """Return a copy of a nested value without replicated tensors with a name in `skip` (see `replicated_sizes`)."""
        if isinstance(value, Mapping):
            named = {k: (f"{name}.{k}", v) for k, v in value.items()}
            return {k: self.stage(v, skip, n) for k, (n, v) in named.items() if not (is_replicated(v) and n in skip)}
        if isinstance(value, (list, tuple)):
            return type(value)([self.stage(v, skip, f"{name}.{i}") for i, v in enumerate(value)])
        if isinstance(value, DTensor):
            return value.detach().to("cpu", copy=True)  # low-bit states have `to` but no `clone`
        return self._copy(name, value) if isinstance(value, Tensor) else copy.deepcopy(value)

    def _copy(self, name: str, value: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
            buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            self._buffers[name] = buffer
        return buffer.copy_(value.detach(), non_blocking=True)


# -- which rank writes which tensor ------------------------------------------------------------------------------------
def is_replicated(value: Any) -> bool:
    """Return True for a tensor that is not sharded."""
    return isinstance(value, Tensor) and not isinstance(value, DTensor)


def is_sharded(state: Any) -> bool:
    """Return True if a nested mapping contains tensors that are sharded over ranks."""
    if isinstance(state, Mapping):
        return any(map(is_sharded, state.values()))
    return isinstance(state, DTensor)


def replicated_sizes(value: Any, name: str = "") -> dict[str, int]:
    """Return {name: bytes} of the tensors in nested mappings that are not sharded."""
    if isinstance(value, Mapping):
        return {k: v for key, x in value.items() for k, v in replicated_sizes(x, f"{name}.{key}").items()}
    return {name: value.nbytes} if is_replicated(value) else {}


def replication_digest(sizes: dict[str, int], state: Any) -> str | None:
    """Return a digest of the names and sizes of a rank's unsharded tensors; None on a rank with sharded tensors."""
    return None if is_sharded(state) else hashlib.blake2b(repr(sorted(sizes.items())).encode()).hexdigest()


def bits(x: Tensor) -> Tensor:
    """Return the sum of a tensor's bits, read as integers: an int64 scalar on its device, without waiting for it."""
    x = x.detach()
    if x.is_contiguous() and x.nbytes % 8 == 0 and x.data_ptr() % 8 == 0:
        return x.view(-1).view(torch.int64).sum()
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.view(INTEGER_DTYPES[x.element_size()]).sum(dtype=torch.int64)


#: {number of bytes: integer dtype}
INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def plain_tensors(named: Iterable[tuple[str, Any]]) -> dict[str, Tensor]:
    """Return {name: tensor} of the unsharded tensors that `bits` can read."""
    plain = (Tensor, nn.Parameter)
    return {name: x for name, x in named if type(x) in plain and x.layout == torch.strided and not x.is_meta}


def bits_by_name(state: Any, names: set[str]) -> dict[str, int]:
    """Return {name: `bits`} of the tensors with these `names` in nested mappings; names are as in `replicated_sizes`."""
    chosen = plain_tensors((name, x) for name, x in _flat(state) if name in names)
    sums = [bits(x) for x in chosen.values()]
    device = max((x.device for x in sums), key=lambda device: device.type != "cpu", default=None)
    values = torch.stack([x.to(device) for x in sums]).tolist() if sums else []  # waits for a GPU only once
    return dict(zip(chosen, values, strict=True))


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of all values in nested mappings."""
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, x in value.items():
        yield from _flat(x, f"{name}.{key}")


def unlike_replicas(every: Sequence[Mapping[str, int]], ranks: Sequence[int]) -> str:
    """Return an error message that names the tensors and ranks that differ; `every` is each rank's `bits_by_name`."""
    names = [name for name in every[0] if len({x.get(name) for x in every}) > 1]
    usual = max(every, key=every.count)
    odd = [rank for rank, x in zip(ranks, every, strict=True) if x != usual]
    most = 2 * (len(every) - len(odd)) > len(every)
    who = (
        f"ranks {odd if most else list(ranks)} of the job hold {'other values than most' if most else 'unlike values'}"
    )
    shown = f"{', '.join(name.removeprefix('.') for name in names[:3])}{' and others' if len(names) > 3 else ''}"
    return (
        f"{who} of {len(names)} tensors ({shown}), though all train one model: a checkpoint would be a mixture. Something "
        "differs between the ranks: a learning rate that a callback sets, gradients that a hook changes, versions of "
        "packages, or a GPU that computes wrongly. Continue from a checkpoint of an earlier step. If parameters differ "
        "by intent, name them to DDP, too (_set_params_and_buffers_to_ignore_for_model)."
    )


def equal_names(sizes: dict[str, int], module: nn.Module) -> set[str]:
    """Return the names of parameters and optimizer states that must be equal on all ranks that train one model."""
    ignored, named = own_parameters(module), list(module.named_parameters(remove_duplicate=False))
    ignored_ids = {id(p) for name, p in named if name in ignored}  # shared parameters have several names
    equal = {f".state_dict.{name}" for name, p in named if id(p) not in ignored_ids}
    parts = tuple(f".{name}." for name in ignored)
    states = {x for x in sizes if x.startswith(".optimizer_") and not any(part in x for part in parts)}
    return states | (equal & sizes.keys())


def assign_writers(sizes: dict[str, int], ranks: int, module: nn.Module) -> list[set[str]]:
    """Return the names of the tensors that each rank writes.

    Tensors that are equal on all ranks (`equal_names`), the largest first, go to the rank with the fewest bytes so far.
    Rank 0 also writes all other tensors, such as statistics.
    """
    equal = equal_names(sizes, module)
    names, loads = [set() for _ in range(ranks)], [0] * ranks
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        rank = loads.index(min(loads)) if name in equal else 0
        names[rank].add(name)
        loads[rank] += sizes[name]
    return names


def others_write(sizes: dict[str, int], strategy: Any) -> set[str]:
    """Return the names that this rank must not write. If there are several regions, the first rank of a region writes
    the region's own tensors, and the first rank of the first region also writes everything else."""
    ranks = getattr(strategy, "sizes", None)
    if ranks is None or ranks.regions == 1:
        return set()
    if strategy.global_rank % ranks.region_size:
        return {*sizes}
    return {name for name in sizes if strategy.region and not name.startswith(".regions.")}


# -- staged copies -----------------------------------------------------------------------------------------------------
def nbytes(value: Any) -> int:
    """Return the number of bytes of all tensors in a nested value on this rank."""
    if isinstance(value, Mapping):
        return sum(map(nbytes, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(nbytes, value))
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.nbytes if isinstance(local, Tensor) else 0


def are_finite(state: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Return True if this rank's parts of these tensors have no NaN or infinity; a missing tensor counts as finite."""
    values = (state.get(name) for name in names)
    local = (value.to_local() if isinstance(value, DTensor) else value for value in values)
    numbers = (x for x in local if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()))
    # in chunks, because the result of isfinite also needs memory
    return all(bool(chunk.isfinite().all()) for x in numbers for chunk in x.detach().flatten().split(1 << 22))
