"""A Trainer's state in a folder, written and read with torch.distributed.checkpoint.

The folder has the layout of Lightning's ModelParallelStrategy: `.metadata` and `.distcp` files contain "state_dict" and
"optimizer_0", ... (states with parameter names as keys); `meta.pt` contains everything else. So strategies with and
without sharded parameters can read each other's folders.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from typing_extensions import override

from lightning_dilated._validation import check_input
from lightning_dilated.checkpoint import manifest
from lightning_dilated.checkpoint.ranks import RankGroup, failure, known_to_all, reason
from lightning_dilated.checkpoint.reader import METADATA, load_file, load_into, read_metadata
from lightning_dilated.checkpoint.state import are_finite, nbytes, read_to_host, renamed, to_numbers, unflatten_low_bit


class BackgroundJob:
    """Runs one job at a time in a daemon thread, so that a job that waits for dead ranks does not block the exit."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """True from the start of a job until `wait` returns True or raises an error."""
        return self._thread is not None

    @property
    def running(self) -> bool:
        """True while a job runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], None], device: torch.device) -> None:
        """Start `job` in a new thread, on `device` if it is a GPU; the caller must first `wait` for the last job."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._run, args=(job, device), name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self, job: Callable[[], None], device: torch.device) -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # a new thread uses the first GPU
            job()
        except BaseException as error:
            self._error = error

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the job, if any, and raise its error if it failed; return False if it still runs after `seconds`."""
        if self._thread is None:
            return True
        self._thread.join(seconds)
        if self._thread.is_alive():
            return False
        error, self._thread, self._error = self._error, None, None
        if error is not None:
            raise error
        return True


META = "meta.pt"


def write(
    tensors: dict[str, Any],
    meta: bytes,
    path: Path,
    step: int,
    keep: int,
    peers: RankGroup,
    parameters: Iterable[str] = (),
) -> None:
    """Write a checkpoint, rename it to `path` when it is complete, and remove older ones; every rank must call this.

    Args:
        tensors: this rank's tensors, nested, on the CPU; a tensor that several ranks pass by one name is written once.
        meta: the bytes of `meta.pt`, which rank 0 writes.
        parameters: names in the state dict; the checkpoint counts towards `keep` only if these tensors are finite.

    Raises:
        OSError: on every rank, with the reason; files that were already written are removed.
    """
    what, folder = f"the checkpoint {path} could not be written", manifest.unfinished(path)
    try:
        peers.watched(what, _write, what, tensors, meta, path, step, keep, peers, parameters)
    except OSError as error:
        full = None
        if known_to_all(error):
            full = _full_disk(str(error), path.parent, sum(peers.gather(nbytes(tensors) + len(meta))), peers)
        if peers.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        if full is None:
            raise
        raise OSError(f"{error}. {full}") from error


def _write(
    what: str,
    tensors: dict[str, Any],
    meta: bytes,
    path: Path,
    step: int,
    keep: int,
    peers: RankGroup,
    names: Iterable[str],
) -> None:
    """Do what `write` does, except for the cleaning up after a failure."""
    folder, entries = manifest.unfinished(path), {}
    peers.together(what, _clear, folder, peers)
    try:
        local_entries = _write_files(tensors, meta, folder, peers, what)
    except (Exception, CheckpointException) as error:
        if known_to_all(error) or (peers.size > 1 and not isinstance(error, CheckpointException)):
            raise
        raise failure(f"{what}: {reason(error)}") from error  # a CheckpointException is raised on all ranks
    for rank_entries in peers.gather(local_entries):
        entries.update(rank_entries)
    finite = all(peers.gather(peers.together(what, are_finite, tensors["state_dict"], names)))
    peers.together(what, _commit, path, step, entries, keep, peers, finite)


def _clear(folder: Path, peers: RankGroup) -> None:
    """Remove any file, folder or link at a new checkpoint's path; writing through a link would change its target."""
    if peers.rank == 0 and os.path.lexists(folder):
        manifest.remove(folder)


def _full_disk(error: str, folder: Path, needed: int, peers: RankGroup) -> str | None:
    """Return a message, the same on all ranks, if the disk was too full to write `needed` bytes, else None."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        free = needed
    free = min(peers.gather(free))
    # torch's archive writer does not report a full disk, only an unexpected position in the file
    if os.strerror(errno.ENOSPC) not in error and not ("inline_container" in error and free < needed):
        return None
    return (
        f"{os.strerror(errno.ENOSPC)}: {folder} has {free / 2**20:,.1f} MiB left, and a checkpoint takes "
        f"{needed / 2**20:,.1f} MiB. Earlier checkpoints are complete. Make room, lower `keep`, or take another folder"
    )


def _write_files(
    tensors: dict[str, Any], meta: bytes, folder: Path, peers: RankGroup, what: str
) -> dict[str, dict[str, Any]]:
    """Write this rank's files, and return their manifest entries."""
    writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)  # larger values need a GPU
    planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)  # if ranks differ, keep the lowest rank's values
    dcp.save(tensors, storage_writer=writer, planner=planner, process_group=peers.group, no_dist=peers.size == 1)
    return peers.together(what, _write_meta, meta, folder, peers)


def _write_meta(meta: bytes, folder: Path, peers: RankGroup) -> dict[str, dict[str, Any]]:
    """Write `meta.pt` on rank 0; return the manifest entries of this rank's files."""
    names = [p.name for p in folder.glob(f"__{peers.rank}_*")]
    if peers.rank == 0:
        with (folder / META).open("wb") as file:
            file.write(meta)
            file.flush()
            os.fsync(file.fileno())
        names += [META, ".metadata"]
    return manifest.file_entries(folder, names)


def _commit(
    path: Path, step: int, entries: dict[str, dict[str, Any]], keep: int, peers: RankGroup, finite: bool
) -> None:
    if peers.rank == 0:
        manifest.commit(path, step, entries, peers.size, finite)
        manifest.prune(path.parent, keep)


# -- reading -----------------------------------------------------------------------------------------------------------
def checked(path: Path, peers: RankGroup) -> Path:
    """Return the checkpoint at a path, or a folder's newest valid checkpoint; warn of newer damaged ones."""
    folder, problems = manifest.find_valid(path, peers)
    warn_of_skipped(problems, folder)
    return folder


def warn_of_skipped(problems: list[str], loaded: Path) -> None:
    """Warn that checkpoints were skipped, and list their problems; do nothing without problems."""
    if problems:
        kind = (
            "checkpoints"
            if all(problem.endswith(manifest.NOT_FINITE) for problem in problems)
            else "damaged checkpoints"
        )
        rank_zero_warn(f"{kind} were skipped, and {loaded} is loaded: {'; '.join(problems)}.")


def read_tensors(folder: Path, below: str = "", select: Callable[[str], bool] = lambda key: True) -> dict[str, Any]:
    """Read to the CPU the entries of `.distcp` files with a name that begins with `below` and that `select` accepts.

    Raises:
        FileNotFoundError, ValueError: if files are missing or cannot be read.
    """
    metadata = read_metadata(folder)
    paths = metadata.planner_data or {}
    flat: dict[str, Any] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if key.startswith(below) and select(key):
            if key not in paths:
                raise ValueError(f"{folder / METADATA} does not say where {key} belongs. Use an earlier checkpoint.")
            is_tensor = isinstance(entry, TensorStorageMetadata)
            flat[key] = torch.empty(entry.size, dtype=entry.properties.dtype) if is_tensor else io.BytesIO()
    load_into(flat, folder, alone=True)
    return _nested({paths[key]: value for key, value in flat.items()})


def _nested(flat: dict[tuple[Any, ...], Any]) -> Any:
    """Turn {path: value} into nested mappings; a mapping in which all keys are numbers becomes a list."""
    if () in flat:
        return flat[()]
    groups: dict[Any, dict[tuple[Any, ...], Any]] = {}
    for path, value in flat.items():
        groups.setdefault(path[0], {})[path[1:]] = value
    nested = {key: _nested(group) for key, group in groups.items()}
    # only lists have numbers as keys, because optimizer states are stored by parameter names (`to_names`)
    return [nested[i] for i in sorted(nested)] if nested and all(isinstance(k, int) for k in nested) else nested


def read_meta(folder: Path) -> dict[str, Any]:
    """Read `meta.pt`: Lightning's checkpoint without the tensors of model and optimizers.

    Raises:
        FileNotFoundError, ValueError: if the file is missing or cannot be read.
    """
    path = folder / META
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is no sharded checkpoint: it has no {META}.")
    try:
        stored = load_file(path)
    except Exception as error:  # a file of unknown origin may raise anything
        raise ValueError(f"{path} cannot be read ({reason(error)}). Or use an earlier checkpoint.") from None
    if not isinstance(stored, dict):
        raise ValueError(f"{path} contains a {type(stored).__name__}, not a checkpoint. Use an earlier one.")
    return stored


def read_whole(folder: Path, regions: int = 1, region: int = 0) -> dict[str, Any]:
    """Read a folder as the dict that Lightning stores in one checkpoint file, with tensors on the CPU.

    Args:
        regions, region: the number of regions of this job, and the index of this process's region. If the folder has
            the same number of regions, this region's part is read; the other regions' parts are never read.

    Raises:
        FileNotFoundError, ValueError: if files are missing or cannot be read.
    """
    meta = read_meta(folder)
    outer = meta.pop("outer_steps", None)
    if outer is not None and not (isinstance(outer, dict) and isinstance(outer.get("regions"), int)):
        raise ValueError(f"{folder / META} does not state the number of its regions. Use an earlier checkpoint.")
    part = f"regions.{region}." if outer is not None and outer["regions"] == regions else None
    select = lambda key: not key.startswith("regions.") or (part is not None and key.startswith(part))  # noqa: E731
    tensors = read_tensors(folder, select=select)
    whole = {**meta, **_model_and_optimizers(tensors, folder)}
    if outer is not None:
        whole["outer_steps"] = {**outer, "tensors": tensors.get("outer_steps", {})}
        own_states = tensors.get("regions", {})
        whole["regions"] = {number: _model_and_optimizers(x, folder) for number, x in own_states.items()}
    return whole


def _model_and_optimizers(tensors: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the state dict and the optimizer states, in which numbers replace parameter names."""
    numbers = sorted(int(k.removeprefix("optimizer_")) for k in tensors if re.fullmatch(r"optimizer_\d{1,4}", k))
    if not isinstance(tensors.get("state_dict", {}), dict):
        raise ValueError(f"{folder} has a state_dict without names. Use an earlier checkpoint.")
    try:
        states = [to_numbers(unflatten_low_bit(tensors[f"optimizer_{i}"])) for i in numbers]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"optimizer states in {folder} are damaged ({reason(error)}). Use an earlier one.") from None
    return {"state_dict": tensors.get("state_dict", {}), "optimizer_states": states}


def load_sharded(folder: Path, module: nn.Module, optimizers: list[Any], strict: bool = True) -> dict[str, Any]:
    """Load a folder into a module with sharded parameters and its optimizers; every rank must call this.

    This replaces the loading of Lightning's strategy, which would let torch unpickle the folder.

    Returns:
        Lightning's checkpoint without the tensors of module and optimizers.

    Raises:
        FileNotFoundError, ValueError: on every rank, if files are missing or cannot be read.
    """
    state: dict[str, Any] = {"state_dict": get_model_state_dict(module)}
    load_into(state, folder)
    module.load_state_dict(state["state_dict"], strict=strict)
    for i, optimizer in enumerate(optimizers):
        name = f"optimizer_{i}"
        state = {name: get_optimizer_state_dict(module, optimizer)}
        load_into(state, folder)
        options = StateDictOptions(cpu_offload=True)
        set_optimizer_state_dict(module, optimizer, optim_state_dict=state[name], options=options)
    return read_meta(folder)


def load_whole_states(module: nn.Module, optimizers: list[Any], states: list[dict[str, Any]]) -> None:
    """Load a one-file checkpoint's optimizer states into optimizers of sharded parameters; every rank must call this.

    The states number the parameters of all groups in order, as torch's optimizers do. Lightning would interpret these
    numbers as positions in `module.parameters()`.

    Raises:
        ValueError: if the number of optimizers, or the sizes of their groups, differ.
    """
    if len(states) != len(optimizers):
        raise ValueError(f"the checkpoint holds {len(states)} optimizer states, but the module has {len(optimizers)}.")
    for optimizer, state in zip(optimizers, states, strict=True):
        saved, expected = ([len(g["params"]) for g in x] for x in (state["param_groups"], optimizer.param_groups))
        if saved != expected:
            raise ValueError(
                f"the checkpoint's {type(optimizer).__name__} has groups of {saved} parameters, the module's has "
                f"{expected}: train the same parameters, or start a new run from its weights."
            )
        names = get_optimizer_state_dict(module, optimizer)["param_groups"]
        order = [name for group in names for name in group["params"]]
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        set_optimizer_state_dict(
            module,
            optimizer,
            optim_state_dict=renamed(state, dict(zip(numbers, order, strict=True))),
            options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        )


def load_folder_with(
    strategy: ModelParallelStrategy, find: Callable[[Path], Path], checkpoint_path: Any, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Load a file as ModelParallelStrategy does, or the folder that `find` returns, which is read without unpickling."""
    check_input(checkpoint_path)
    if not Path(checkpoint_path).is_dir():
        return type(strategy).load_checkpoint(strategy, checkpoint_path, *args, **kwargs)
    module = strategy.lightning_module
    return load_sharded(find(Path(checkpoint_path)), strategy.model, strategy.optimizers, module.strict_loading)


class FolderIO(CheckpointIO):
    """A CheckpointIO that reads folders, after `find` has checked them, and passes files to `inner`."""

    def __init__(self, inner: CheckpointIO, find: Callable[[Path], Path]) -> None:
        self.inner, self.find = inner, find

    @override
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.inner.save_checkpoint(*args, **kwargs)

    @override
    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        check_input(path)
        if not Path(path).is_dir():
            read_to_host(self.inner)
            return self.inner.load_checkpoint(path, *args, **kwargs)
        return read_whole(self.find(Path(path)))

    @override
    def remove_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.inner.remove_checkpoint(*args, **kwargs)

    @override
    def teardown(self) -> None:
        self.inner.teardown()
