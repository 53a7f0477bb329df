"""Models as folders of config.json and model.safetensors, on disk and on the Hugging Face hub (extra `hub`)."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_dilated.models.file_classes import TRAINING, check_classes, without_training
from lightning_dilated.models.released import check_finite
from lightning_dilated.pattern import DilatedPattern

if TYPE_CHECKING:
    from typing import Self

CONFIG, WEIGHTS = "config.json", "model.safetensors"
PACKAGE = __name__.partition(".")[0]


class Pretrained:
    """What every DilatedModule has: `save_pretrained`, `from_pretrained` and `push_to_hub`.

    config.json holds {"class_path", "init_args"}, plain values as in a recipe, and the names of a classifier's classes;
    model.safetensors holds every tensor of the state dict, a shared one once. The hub's libraries are imported when they are
    used.
    """

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write config.json and model.safetensors into `folder`, which is made; the optimizer is left out.

        On several ranks, one of them calls it.

        Raises:
            TypeError: for a hyperparameter that JSON cannot hold.
            ValueError: for parameters of which this rank holds a part.
        """
        return write_folder(Path(folder), config_of(self), tensors_of(self))

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo: str | Path,
        *,
        revision: str | None = None,
        token: str | None = None,
        cache_dir: str | Path | None = None,
        **changes: Any,
    ) -> Self:
        """The model of a folder that `save_pretrained` wrote, or of a hub repository ("owner/name").

        It is on the CPU, in the weights' dtype, and in training mode as a new model is.

        Args:
            revision, token, cache_dir: as huggingface_hub takes them; a folder needs none.
            changes: arguments of the class that shall differ from config.json: optimizer, dropout, engine, ...

        Raises:
            FileNotFoundError: no such folder or repository, or one without the two files.
            ValueError: a broken file, another class, or weights that do not fit.
        """
        folder = _folder(path_or_repo, revision=revision, token=token, cache_dir=cache_dir)
        config = _read_config(folder)
        which = _class(cls, config["class_path"], folder)
        return made_of(which, config, _read_tensors(folder / WEIGHTS), f"{folder / WEIGHTS} does not fit", changes)

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, token: str | None = None, commit_message: str | None = None
    ) -> Any:
        """Upload what `save_pretrained` writes to a repository of the hub, made if need be; huggingface_hub's CommitInfo.

        Args:
            repo_id: "owner/name"; private, token, commit_message: as huggingface_hub takes them.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            api = library_of("huggingface_hub").HfApi(token=token)
            api.create_repo(repo_id, private=private, exist_ok=True)
            message = commit_message or f"Upload {type(self).__name__}"
            return api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message)


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write a config and tensors as the two files, into a folder that is made."""
    library = library_of("safetensors.torch")
    folder.mkdir(parents=True, exist_ok=True)
    library.save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return folder


def made_of(
    which: type, config: dict[str, Any], tensors: dict[str, Tensor], wrong: str, changes: dict[str, Any]
) -> Any:
    """The model of a class by a config's arguments and `changes`, with these weights; `wrong` begins the error's words."""
    names = inspect.signature(which.__init__).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in names.values())
    kept = {k: v for k, v in without_training(config["init_args"]).items() if open_ended or k in names}
    model = which(**{**kept, **changes})
    _load(model, tensors, wrong)
    if config.get("classes") is not None:
        model.classes = [str(x) for x in config["classes"]]
    return model


def class_path(model: Any) -> str:
    """The name of a model's class; `fully_shard` gives a model a class of its own, which nobody could import.

    The package's own models go by their public name, so that files do not depend on where a class stands.
    """
    cls = next(c for c in type(model).__mro__ if not issubclass(c, FSDPModule))
    return current_class_path(f"{cls.__module__}.{cls.__qualname__}")


def current_class_path(path: str) -> str:
    """A class's name in a file; for the package's own models, wherever they stood, the public one."""
    package, _, rest = path.partition(".")
    name = rest.rpartition(".")[2]
    if package == PACKAGE and isinstance(getattr(sys.modules[PACKAGE], name, None), type):
        return f"{PACKAGE}.{name}"
    return path


def config_of(model: Any) -> dict[str, Any]:
    """What config.json holds of a model."""
    config = {"class_path": class_path(model), "init_args": plain_hparams(model)}
    if getattr(model, "classes", None) is not None:
        config["classes"] = model.classes
    return config


def plain_hparams(model: Any) -> dict[str, Any]:
    """The arguments that make the model anew, as JSON holds them; patterns as mappings, without the optimizer."""
    return plain_arguments(model.hparams, type(model).__name__)


def plain_arguments(hparams: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Hyperparameters of the class `owner` as JSON holds them, without those of training.

    Raises:
        TypeError: for one that JSON cannot hold.
    """
    given = {k: v for k, v in hparams.items() if not k.startswith("_") and k not in TRAINING}
    found = {}
    for name, value in given.items():
        try:
            found[name] = _plain(value)
        except TypeError:
            raise TypeError(
                f"hyperparameter {name}={value!r} of {owner} cannot be written to {CONFIG}, which takes "
                f"numbers, strings, lists and mappings. Leave it out by save_hyperparameters(ignore=[{name!r}])."
            ) from None
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, (DilatedPattern, Path)):
        return value.to_dict() if isinstance(value, DilatedPattern) else str(value)
    if isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError


def library_of(name: str) -> ModuleType:
    """A module of the extra `hub`, imported; ImportError names the extra where it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} is missing: pip install 'lightning-dilated[hub]'.") from error


def _aliases(model: torch.nn.Module) -> dict[str, str]:
    """Each name of a parameter or buffer -> the first name of the same tensor."""
    first: dict[int, str] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(x), name) for name, x in named}


def tensors_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """The state dict, each tensor under its first name only."""
    state, alias = model.state_dict(), _aliases(model)
    parts = [name for name, x in state.items() if isinstance(x, DTensor)]
    if parts:
        raise ValueError(
            f"{parts[0]} is sharded over ranks, so this rank cannot save it alone. Save a whole checkpoint, load it by "
            "load_from_checkpoint and call save_pretrained then."
        )
    return {name: x.detach().contiguous() for name, x in state.items() if alias.get(name, name) == name}


def _folder(path: str | Path, **options: Any) -> Path:
    """The local folder of a path, or of a snapshot of a repository."""
    if Path(path).is_dir():
        return Path(path)
    if Path(path).exists():
        raise ValueError(f"{path} is a file; pass the folder of {CONFIG} (for a .ckpt use load_from_checkpoint).")
    if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(path)):
        raise FileNotFoundError(f"{path}: no such folder, and no name of a repository (owner/name).")
    download = library_of("huggingface_hub").snapshot_download
    try:
        return Path(download(str(path), allow_patterns=[CONFIG, WEIGHTS], **options))
    except Exception as error:  # offline, no such repository, no such revision, no right to read it
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise FileNotFoundError(
            f"{path}: no such folder here, and it cannot be had from the hub ({type(error).__name__}: {lines[0][:160]})."
        ) from error


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {CONFIG}. Pass a folder that save_pretrained wrote.")
    try:
        config = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:  # the latter for values nested too deeply
        raise ValueError(f"{path} is not JSON ({error}). Write or download it again.") from None
    if not (
        isinstance(config, dict)
        and isinstance(config.get("class_path"), str)
        and isinstance(config.get("init_args"), dict)
    ):
        raise ValueError(
            f"{path} needs class_path and init_args, as save_pretrained writes them; got {str(config)[:120]}."
        )
    check_classes(without_training(config["init_args"]), path)
    return config


def _class(cls: type, class_path: str, folder: Path) -> type:
    """The class to make: `cls`, or a subclass of it that the config names and that is imported."""
    module, _, name = current_class_path(class_path).rpartition(".")
    if name == cls.__name__:
        return cls
    named = getattr(sys.modules.get(module), name, None)
    if isinstance(named, type) and issubclass(named, cls):
        return named
    known = f"call {name}.from_pretrained" if isinstance(named, type) else f"import {name} and call its from_pretrained"
    raise ValueError(f"{folder} holds a {class_path}, which is no {cls.__name__} known here: {known}.")


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {path.name}. Pass a folder that save_pretrained wrote.")
    try:
        return library_of("safetensors.torch").load_file(path)
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(f"{path} cannot be read ({error}). It may be cut short; write or download it again.") from None


def _load(model: Any, tensors: dict[str, Tensor], wrong: str) -> None:
    """Put the tensors into the model, in their dtype, or say which do not fit."""
    dtypes = {x.dtype for x in tensors.values() if x.is_floating_point()}
    if len(dtypes) == 1:
        model.to(dtypes.pop())
    alias = _aliases(model)
    weights = {name for name, _ in model.named_parameters()}  # a buffer may hold an infinity on purpose
    check_finite({name: x for name, x in tensors.items() if name in weights}, wrong.split(" does not ")[0])
    try:
        missing, more = model.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise ValueError(f"{wrong} {CONFIG}. {error}") from None
    missing = [name for name in missing if alias.get(name) not in tensors]
    if missing or more:
        told = [
            f"{what}: {', '.join(names[:5])}" for what, names in (("missing", missing), ("too many", more)) if names
        ]
        raise ValueError(f"{wrong} the {type(model).__name__} of {CONFIG}; {'; '.join(told)}.")
