"""torchao's optimizers, whose states of 4 or 8 bits are tensors made of others: what their checkpoints need.

A Trainer's state as checkpoints hold it: optimizer states by the parameters' names, copies on the host, ranks' shares.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

#: where torchao has its classes of states
KINDS = {f"OptimState{x}": f"torchao.optim.subclass_{x.lower()}" for x in ("4bit", "8bit", "Fp8")}
#: what a state is made of beside tensors
TOLD = "told"


def taken_apart(value: Any) -> Any:
    """A nested mapping with each such state in the tensors that it is made of, so that folders hold its own bits."""
    if isinstance(value, Mapping):
        return {k: taken_apart(v) for k, v in value.items()}
    if not (isinstance(value, Tensor) and type(value).__name__ in KINDS):
        return value
    names, told = value.__tensor_flatten__()
    return {type(value).__name__: {**{name: getattr(value, name) for name in names}, TOLD: told}}


def put_together(value: Any) -> Any:
    """The reverse of `taken_apart`.

    Raises:
        ImportError: without torchao.
    """
    if not isinstance(value, Mapping):
        return value
    name = next(iter(value), None)
    if len(value) != 1 or name not in KINDS:
        return {k: put_together(v) for k, v in value.items()}
    try:
        made = getattr(importlib.import_module(KINDS[name]), name)
    except ImportError as error:
        raise ImportError(f"the checkpoint holds states of torchao's ({name}): install the extra eightbit.") from error
    tensors = {k: v for k, v in value[name].items() if k != TOLD}
    return made.__tensor_unflatten__(tensors, value[name][TOLD])


def read_to_host(io: Any) -> None:
    """Let Lightning's own reader of files name the host as a device; another reader is left alone.

    Lightning names it by a function, and torch then refuses tensors that are made of others, as torchao's states are.
    """
    if type(io) is TorchCheckpointIO:
        io.load_checkpoint = functools.partial(TorchCheckpointIO.load_checkpoint, io, map_location="cpu")


def small_states(optimizer: Any) -> str | None:
    """The name of torchao's class, if the optimizer is one that keeps states of 4 or 8 bits."""
    ends = ("4bit", "8bit", "Fp8")
    known = [c.__name__ for c in type(optimizer).__mro__ if c.__module__.startswith("torchao.")]
    return next((name for name in known if name.endswith(ends)), None)


def refuse_one_file(optimizers: Iterable[Any], why: str) -> None:
    """Raise where ranks hold parts of such states: torch cannot gather them into one file, or deal them out of one.

    Args:
        why: how one file comes into it, as the sentence begins.

    Raises:
        ValueError: naming the optimizer, and what to take instead.
    """
    name = next(filter(None, map(small_states, optimizers)), None)
    if name is not None:
        raise ValueError(
            f"{why}, and the states of torchao's {name} cannot be dealt out of one. Go on from folders: those that "
            "ring_dilated_fsdp writes without save_distributed_checkpoint=False, or callbacks.ShardedCheckpoint with any "
            "strategy here (`lightning-dilated consolidate` makes one file of their weights); or take torch.optim.AdamW."
        )


def refuse_whole(names: Iterable[str], folder: Any) -> None:
    """Raise where a folder holds such states of whole parameters, which are not dealt to ranks.

    Args:
        names: of all that it holds.

    Raises:
        ValueError: naming what to do.
    """
    found = next((kind for kind in KINDS for name in names if f".{kind}." in name), None)
    if found is not None:
        raise ValueError(
            f"{folder} holds {found} of whole parameters, which cannot be dealt to ranks. Go on with a strategy that holds "
            "them whole (one GPU, or ring_dilated), or begin anew from its weights (`lightning-dilated consolidate`)."
        )


# -- from a Trainer ----------------------------------------------------------------------------------------------------
def taken(trainer: pl.Trainer) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tensors, the rest) of all that Lightning's own checkpoint holds; the tensors are still those that are trained."""
    rest = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    tensors = {"state_dict": rest.pop("state_dict")}
    states = rest.pop("optimizer_states", [])
    for i, (optimizer, state) in enumerate(zip(trainer.optimizers, states, strict=True)):
        tensors[f"optimizer_{i}"] = taken_apart(by_name(state, optimizer, trainer.lightning_module))
    return tensors, rest


def by_name(state: dict[str, Any], optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, Any]:
    """An optimizer's state dict with the parameters' names in place of their numbers, where it has these."""
    given = [p for group in optimizer.param_groups for p in group["params"]]
    names = {id(p): name for name, p in module.named_parameters()}
    # one that the module does not hold keeps its number
    name_of = {i: names.get(id(p), f"parameter {i}") for i, p in enumerate(given)}
    return _renamed(state, name_of)


def by_number(state: dict[str, Any]) -> dict[str, Any]:
    """The reverse of `by_name`: numbers count the parameters of all groups in their order."""
    order = [name for group in state["param_groups"] for name in group["params"]]
    return _renamed({"state": {}, **state}, {name: i for i, name in enumerate(order)})


def _renamed(state: dict[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    if "param_groups" not in state:  # a rank that keeps nothing
        return state
    groups = [{**g, "params": [names.get(x, x) for x in g["params"]]} for g in state["param_groups"]]
    return {**state, "state": {names.get(k, k): v for k, v in state["state"].items()}, "param_groups": groups}


# -- to the host -------------------------------------------------------------------------------------------------------
class HostCopies:
    """Copies in memory of the host that is kept from one checkpoint to the next, page-locked for tensors of a GPU."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def of(self, value: Any, keep: Callable[[str], bool], name: str = "") -> Any:
        """The nested value with all in it copied; plain tensors whose name `keep` refuses are left out of mappings."""
        if isinstance(value, Mapping):
            parts = {k: (f"{name}.{k}", v) for k, v in value.items()}
            mine = {k: (n, v) for k, (n, v) in parts.items() if not is_plain(v) or keep(n)}
            return {k: self.of(v, keep, n) for k, (n, v) in mine.items()}
        if isinstance(value, (list, tuple)):
            return type(value)([self.of(v, keep, f"{name}.{i}") for i, v in enumerate(value)])
        if isinstance(value, DTensor):
            return value.detach().to("cpu", copy=True)  # which torchao's states know, and no clone
        return self._copy(name, value) if isinstance(value, Tensor) else copy.deepcopy(value)

    def _copy(self, name: str, value: Tensor) -> Tensor:
        held = self._held.get(name)
        if held is None or (held.shape, held.dtype) != (value.shape, value.dtype):
            held = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            self._held[name] = held
        return held.copy_(value.detach(), non_blocking=True)


def is_plain(value: Any) -> bool:
    """Whether it is a tensor of which a rank holds the whole."""
    return isinstance(value, Tensor) and not isinstance(value, DTensor)


def plain_sizes(value: Any, name: str = "") -> dict[str, int]:
    """{name: bytes} of the tensors in nested mappings of which a rank holds the whole, by the names of `HostCopies.of`."""
    if isinstance(value, Mapping):
        return {k: v for key, x in value.items() for k, v in plain_sizes(x, f"{name}.{key}").items()}
    return {name: value.nbytes} if is_plain(value) else {}


def shares(sizes: dict[str, int], ranks: int, module: nn.Module) -> list[set[str]]:
    """Names dealt to ranks so that each has about as many bytes: the largest first, to the rank that has least.

    Only parameters and states of optimizers are dealt, which are the same on all ranks: of the rest, such as statistics in
    buffers, rank 0's values are the checkpoint's.
    """
    alike = {f".state_dict.{name}" for name, _ in module.named_parameters(remove_duplicate=False)}
    dealt, held = [set() for _ in range(ranks)], [0] * ranks
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        least = held.index(min(held)) if name in alike or name.startswith(".optimizer_") else 0
        dealt[least].add(name)
        held[least] += sizes[name]
    return dealt


def alike(sizes: dict[str, int], state: Any) -> str | None:
    """A digest that ranks can compare: equal where they hold the same tensors, whole; None where they hold parts."""
    return None if is_dealt(state) else hashlib.blake2b(repr(sorted(sizes.items())).encode()).hexdigest()


def is_dealt(state: Any) -> bool:
    """Whether a nested mapping holds tensors of which ranks hold parts."""
    if isinstance(state, Mapping):
        return any(map(is_dealt, state.values()))
    return isinstance(state, DTensor)


# -- of copies on the host ---------------------------------------------------------------------------------------------
def nbytes(value: Any) -> int:
    """Bytes of the tensors in a nested value, of those that ranks hold parts of this rank's."""
    if isinstance(value, Mapping):
        return sum(map(nbytes, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(nbytes, value))
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.nbytes if isinstance(local, Tensor) else 0


def are_finite(state: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether this rank's parts of these tensors hold neither NaN nor infinity; what is not there counts as finite."""
    values = (state.get(name) for name in names)
    parts = (value.to_local() if isinstance(value, DTensor) else value for value in values)
    numbers = (x for x in parts if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()))
    # a piece at a time, as the answer for each number takes memory, too
    return all(bool(piece.isfinite().all()) for x in numbers for piece in x.detach().flatten().split(1 << 22))
