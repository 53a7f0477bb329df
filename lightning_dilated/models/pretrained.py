"""Models in folders of config.json and model.safetensors, on disk or the Hugging Face hub (extra `hub`).

All loaders use the same checks of the classes that a file names, and of the weights' names, layers, shapes and values.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import re
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import yaml
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_dilated._extensions import NAMES, place
from lightning_dilated._removed import removed_name
from lightning_dilated.data.tokenizer_files import PATTERNS
from lightning_dilated.pattern import Branch, DilatedPattern, Global, Hashed, Window
from lightning_dilated.recurrence import Recurrence

if TYPE_CHECKING:
    from typing import Self


#: hyperparameters of training; they are not part of a model and are not read from a file
TRAINING = ("optimizer", "lr_scheduler")
#: the classes that a file may name in a model's arguments; their arguments are plain values
VALUES: dict[str, Any] = {cls.__name__: cls for cls in (Branch, DilatedPattern, Global, Hashed, Recurrence, Window)}
_CLASS = ("class_path", "_class_path")
#: size limit, in bytes, of a file that a parser may read an argument from
_LARGEST_TEXT = 1 << 20
#: reserved words of the parser, which cannot be names of arguments
_RESERVED = ("class_path", "init_args", "dict_kwargs")


def file_arguments(hparams: Any, where: str | Path, but: Collection[str] = ()) -> dict[str, Any]:
    """Return a model's arguments from a file as plain values, without optimizer, scheduler and Lightning's additions.

    A `class_path` may name only a class in `VALUES`, and becomes its public name. `make_values` makes the objects.

    Args:
        hparams: nested mappings and lists, as in a recipe.
        where: the file, for messages.
        but: names of arguments that the caller sets; they are left out.

    Raises:
        ValueError: for any other class, naming the file, the class and a remedy; for names that no parser accepts.
    """
    if not isinstance(hparams, Mapping):
        raise ValueError(f"{where} has {type(hparams).__name__} instead of a mapping of hyperparameters.")
    for name in hparams:
        if not isinstance(name, str) or not name.isidentifier() or name in _RESERVED:
            raise ValueError(f"{where}: {name!r:.60} in hyperparameters is not the name of a hyperparameter.")
    left_out = {*TRAINING, *but}
    arguments = {k: v for k, v in hparams.items() if k not in left_out and not k.startswith("_")}
    checked = _Checked(where)
    return {name: checked.value(value, name) for name, value in arguments.items()}


class _Checked:
    """Checks a file's values and limits their number, because references in YAML can repeat one value very often."""

    def __init__(self, where: str | Path) -> None:
        self.where, self.left = where, 100_000

    def value(self, value: Any, name: str, depth: int = 0) -> Any:
        """Return the value, with public names for classes in `VALUES`; raise ValueError for any other class."""
        self.left -= 1
        if self.left < 0 or depth > 100:
            raise ValueError(f"{self.where} has endlessly nested hyperparameters.")
        if isinstance(value, Mapping):
            return self._mapping(value, name, depth + 1)
        if isinstance(value, (list, tuple)):
            values = [self.value(inner, name, depth + 1) for inner in value]
            return tuple(values) if type(value) is tuple else values if type(value) is list else value
        if isinstance(value, str):
            try:
                texts = _inside(value)
            except (yaml.constructor.ConstructorError, RecursionError):
                raise ValueError(
                    f"{self.where} names {value!r:.80} ({name}), and a file does not decide which class is made: "
                    f"this YAML has values that are not plain. {_remedy(name)}"
                ) from None
            for inner in texts:
                self.value(inner, name, depth + 1)
        return value

    def _mapping(self, value: Mapping[Any, Any], name: str, depth: int) -> Any:
        for key in value:
            if not isinstance(key, (str, int, float)):
                raise ValueError(f"{self.where}: {key!r:.60} in {name} is not the name of a hyperparameter.")
            if isinstance(key, str):
                self.value(key, name, depth)
        named = [key for key in value if isinstance(key, str) and key.strip().rpartition(".")[2] in _CLASS]
        values = {key: self.value(inner, name, depth) for key, inner in value.items() if key not in named}
        if not named:
            return values if type(value) is dict else value
        path = value[named[0]]
        if named != ["class_path"] or not _is_value(path) or not values.keys() <= {"init_args"}:
            raise ValueError(
                f"{self.where} names {path!s:.80} ({name}), and a file does not decide which class is made. {_remedy(name)}"
            )
        return {"class_path": current_class_path(path), **values}


def _is_value(path: Any) -> bool:
    """Return True if a class_path names a class in `VALUES`."""
    package, _, name = path.partition(".") if isinstance(path, str) else ("", "", "")
    return package == PACKAGE and name.rpartition(".")[2] in VALUES


def _remedy(name: str) -> str:
    return (
        f"If you trust it, give {name} yourself: as a keyword of load_from_checkpoint or from_pretrained, or on the command "
        f"line in a recipe or as --model.{name}."
    )


def make_values(value: Any) -> Any:
    """Return a checked value in which each mapping with a class_path has become an object of that class."""
    if isinstance(value, dict) and "class_path" in value:
        cls = VALUES[value["class_path"].rpartition(".")[2]]
        return cls(**make_values(value.get("init_args") or {}))
    if isinstance(value, dict):
        return {key: make_values(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(make_values, value))
    return value


def class_in_file(cls: type, path: Any, where: str | Path, loader: str) -> Any:
    """Return the class that a file names: `cls` or an imported subclass.

    Args:
        path: the dotted name of the class in the file.
        where: the file, for messages.
        loader: the class method that was called, for messages.

    Raises:
        ValueError: if the name is neither `cls` nor an imported subclass of it.
    """
    name = str(path).rpartition(".")[2]
    if name == cls.__name__:
        return cls
    named = imported(current_class_path(str(path)))
    if isinstance(named, type) and issubclass(named, cls):
        return named
    known = f"call {name}.{loader}" if isinstance(named, type) else f"import {name} and call its {loader}"
    raise ValueError(f"{where} holds a {path!s:.200}, which is not a known {cls.__name__}: {known}.")


def imported(path: str) -> Any:
    """Return the object with a dotted name if it is public here or in a module that is already imported, else None."""
    public = path.removeprefix(f"{PACKAGE}.")
    if public != path and public in NAMES:
        return place(NAMES[public])
    module, _, name = path.rpartition(".")
    return vars(sys.modules.get(module, object)).get(name)


def _yaml(text: str) -> Any:
    """Parse YAML with jsonargparse's scanner and scalars as texts, to accept everything that other loaders accept."""
    return yaml.load(text, getattr(yaml, "CBaseLoader", yaml.BaseLoader))


def _inside(value: str) -> list[Any]:
    """List the values that a parser may read from a string, or from the file that it names, as JSON or YAML.

    Raises yaml's ConstructorError for a tag, or a mapping as a key, because other loaders may accept these.
    """
    texts, values = [value], []
    with contextlib.suppress(OSError, ValueError):
        if Path(value).is_file() and Path(value).stat().st_size <= _LARGEST_TEXT:
            texts.append(Path(value).read_text())
    for text in texts:
        with contextlib.suppress(ValueError):
            values.append(json.loads(text))
        try:
            values.append(_yaml(text))
        except yaml.constructor.ConstructorError:
            if "=" in text or "!" in text:  # a tag or a mapping as a key, which other loaders may accept
                raise
        except (yaml.YAMLError, ValueError):  # not YAML
            continue
    return [x for x in values if isinstance(x, (Mapping, list)) or (isinstance(x, str) and x != value)]


def layers_of(numbers: Iterable[str], tensors: int, where: str | Path) -> int:
    """Return the number of layers in a file, which is the largest layer number plus 1.

    Args:
        numbers: layer numbers, as digits, from the names of tensors.
        tensors: number of tensors in the file.

    Raises:
        ValueError: for more layers than tensors.
    """
    last = max(set(numbers), key=lambda x: (len(x), x), default="0")
    if len(last) > 9 or int(last) >= tensors:
        raise ValueError(
            f"{where} names layer {last[:20]}, but has {tensors} tensors: layers before that one are missing."
        )
    return 1 + int(last)


def check_finite(tensors: Mapping[str, Tensor], where: str | Path) -> None:
    """Raise ValueError if weights contain NaN or infinite values; the error names the tensors."""
    with torch.no_grad():
        bad = [name for name, x in tensors.items() if x.is_floating_point() and not _finite(x)]
    if bad:
        few = ", ".join(bad[:4]) + (f" and {len(bad) - 4} more" if len(bad) > 4 else "")
        raise ValueError(
            f"{where} holds NaN or infinite values in {len(bad)} of {len(tensors)} tensors: {few}. The training that wrote "
            "it diverged, or the file is damaged: take an earlier checkpoint, or download it again."
        )


def _finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x if x.element_size() > 1 else x.float()).all())  # isfinite does not take 8-bit types


CONFIG, WEIGHTS = "config.json", "model.safetensors"
PACKAGE = __name__.partition(".")[0]


class Pretrained:
    """The base of DilatedModule with `save_pretrained`, `from_pretrained` and `push_to_hub`.

    config.json contains {"class_path", "init_args"} in plain values, as in a recipe, and the attributes in
    `also_in_config`, such as a classifier's classes. model.safetensors contains every tensor of the state dict; shared
    tensors are stored once. The hub's libraries are imported when they are used.
    """

    def write_hub_files(self, folder: Path) -> None:
        """Write a subclass's further files into the folder of config.json and model.safetensors."""

    def read_hub_files(self, folder: Path) -> None:
        """Read a subclass's further files in the folder into a new model."""

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write config.json, model.safetensors and a language model's tokenizer into `folder`, which is created.

        The optimizer is not saved. Call this on one rank only.

        Raises:
            TypeError: for a hyperparameter that JSON cannot represent.
            ValueError: for parameters that are sharded over ranks.
        """
        path = write_folder(Path(folder), config_of(self), tensors_of(self))
        self.write_hub_files(path)
        return path

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
        """Load the model in a folder that `save_pretrained` wrote, or in a hub repository ("owner/name").

        The model is on the CPU, in the weights' dtype, and in training mode like a new model.

        Args:
            revision, token, cache_dir: as in huggingface_hub; not needed for a folder.
            changes: arguments of the class that differ from config.json: optimizer, dropout, engine, ...

        Raises:
            FileNotFoundError: if the folder or repository, or one of the two files in it, is missing.
            ValueError: for a broken file, another class, or weights that do not match the model.
        """
        folder = _folder(path_or_repo, revision=revision, token=token, cache_dir=cache_dir)
        config = _read_config(folder)
        which = class_in_file(cls, config["class_path"], folder, "from_pretrained")
        config["init_args"] = file_arguments(config["init_args"], folder / CONFIG, changes)
        model = make_from(which, config, _read_tensors(folder / WEIGHTS), f"{folder / WEIGHTS} does not fit", changes)
        model.read_hub_files(folder)
        return model

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, token: str | None = None, commit_message: str | None = None
    ) -> Any:
        """Upload the files of `save_pretrained` to a hub repository, which is created if missing; return a CommitInfo.

        Args:
            repo_id: "owner/name".
            private, token, commit_message: as in huggingface_hub.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            api = library_of("huggingface_hub").HfApi(token=token)
            api.create_repo(repo_id, private=private, exist_ok=True)
            message = commit_message or f"Upload {type(self).__name__}"
            return api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message)


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write config.json and model.safetensors into a folder, which is created."""
    library = library_of("safetensors.torch")
    folder.mkdir(parents=True, exist_ok=True)
    library.save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return folder


def make_from(
    which: type, config: dict[str, Any], tensors: dict[str, Tensor], wrong: str, changes: dict[str, Any]
) -> Any:
    """Make a model from a config's checked arguments, `changes` and weights; error messages begin with `wrong`."""
    names = inspect.signature(which.__init__).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in names.values())
    stored = {k: make_values(v) for k, v in config["init_args"].items() if open_ended or k in names}
    model = which(**{**stored, **changes})
    _load(model, tensors, wrong)
    for name in getattr(model, "also_in_config", ()):
        value = config.get(name)
        if isinstance(value, (str, list)):
            setattr(model, name, value if isinstance(value, str) else [str(x) for x in value])
    return model


def class_path(model: Any) -> str:
    """Return the dotted name of a model's class, without the subclass that `fully_shard` makes.

    For this package's models return the public name, so that files do not depend on a class's module.
    """
    cls = next(c for c in type(model).__mro__ if not issubclass(c, FSDPModule))
    return current_class_path(f"{cls.__module__}.{cls.__qualname__}")


def current_class_path(path: str) -> str:
    """Return a class's current name, in this package the public one; raise ValueError for a removed class."""
    if (message := removed_name(path)) is not None:
        raise ValueError(message)
    package, _, qualified = path.partition(".")
    name = qualified.rpartition(".")[2]
    if package == PACKAGE and isinstance(getattr(sys.modules[PACKAGE], name, None), type):
        return f"{PACKAGE}.{name}"
    return path


def config_of(model: Any) -> dict[str, Any]:
    """Return the contents of a model's config.json."""
    config = {"class_path": class_path(model), "init_args": plain_arguments(model.hparams, type(model).__name__)}
    for name in getattr(model, "also_in_config", ()):
        if getattr(model, name, None) is not None:
            config[name] = getattr(model, name)
    return config


def plain_arguments(hparams: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Return the hyperparameters of the class `owner` as values for JSON, without training hyperparameters.

    Raises:
        TypeError: for a value that JSON cannot represent.
    """
    arguments = {k: v for k, v in hparams.items() if not k.startswith("_") and k not in TRAINING}
    plain = {}
    for name, value in arguments.items():
        try:
            plain[name] = _plain(value)
        except TypeError:
            raise TypeError(
                f"hyperparameter {name}={value!r} of {owner} cannot be written to {CONFIG}, which takes "
                f"numbers, strings, lists and mappings. Leave it out by save_hyperparameters(ignore=[{name!r}])."
            ) from None
    return plain


#: mappings in a transformers config whose keys may be numbers; JSON stores these as strings, which transformers reads
_NUMBERED = {"id2label", "pruned_heads"}


def _plain(value: Any, name: str = "") -> Any:
    if isinstance(value, DilatedPattern):
        return value.to_dict()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping) and all(type(k) is str or (type(k) is int and name in _NUMBERED) for k in value):
        plain = {str(k): _plain(v, str(k)) for k, v in value.items()}
        if len(plain) == len(value):
            return plain
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError


def names_in_fp32(module: torch.nn.Module) -> set[str]:
    """Return the names of the parameters of layers with `keeps_fp32`, which stay in fp32 in a 16-bit module."""
    wide = [(name, m) for name, m in module.named_modules() if getattr(m, "keeps_fp32", False)]
    return {f"{name}.{each}" for name, m in wide for each, _ in m.named_parameters()}


def library_of(name: str) -> ModuleType:
    """Import a module of the extra `hub`; if it is missing, raise ModuleNotFoundError that names the extra."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ModuleNotFoundError(f"{name} is missing: pip install 'lightning-dilated[hub]'.") from error


def _aliases(model: torch.nn.Module) -> dict[str, str]:
    """Map each name of a parameter or buffer to the first name of the same tensor."""
    first: dict[int, str] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(x), name) for name, x in named}


def tensors_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the state dict with each tensor under its first name only; raise ValueError if ranks have shards."""
    state, alias = model.state_dict(), _aliases(model)
    parts = [name for name, x in state.items() if isinstance(x, DTensor)]
    if parts:
        raise ValueError(
            f"{parts[0]} is sharded over ranks, so this rank cannot save it alone. Save one checkpoint file, load it "
            "by load_from_checkpoint, and then call save_pretrained."
        )
    return {name: x.detach().contiguous() for name, x in state.items() if alias.get(name, name) == name}


def _folder(path: str | Path, **options: Any) -> Path:
    if Path(path).is_dir():
        return Path(path)
    if Path(path).exists():
        raise ValueError(f"{path} is a file; pass the folder of {CONFIG} (for a .ckpt use load_from_checkpoint).")
    if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(path)):
        raise FileNotFoundError(f"{path}: no such folder, and not the name of a repository (owner/name).")
    download = library_of("huggingface_hub").snapshot_download
    try:
        return Path(download(str(path), allow_patterns=[CONFIG, WEIGHTS, *PATTERNS], **options))
    except Exception as error:  # such as no connection, no access, or a missing repository or revision
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise FileNotFoundError(
            f"{path}: no such folder here, and it cannot be downloaded ({type(error).__name__}: {lines[0][:160]})."
        ) from error


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {CONFIG}. Pass a folder that save_pretrained wrote.")
    try:
        config = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:  # RecursionError: values are nested too deeply
        raise ValueError(f"{path} is not JSON ({error}). Write or download it again.") from None
    if not (
        isinstance(config, dict)
        and isinstance(config.get("class_path"), str)
        and isinstance(config.get("init_args"), dict)
    ):
        raise ValueError(
            f"{path} needs class_path and init_args, as save_pretrained writes them; got {str(config)[:120]}."
        )
    return config


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
    try:
        blank = model.load_without_values(tensors)
    except RuntimeError as error:
        raise ValueError(f"{wrong} {CONFIG}. {error}") from None
    except ValueError as error:
        raise ValueError(f"{wrong} {CONFIG}: {error}") from None
    if blank is not None:
        _check_complete(blank, tensors, wrong)
    model.state_dict()  # builds the layers
    if blank is None:
        _check_complete(model, tensors, wrong)
    wide = names_in_fp32(model)  # these are in fp32 in every model
    dtypes = {x.dtype for name, x in tensors.items() if x.is_floating_point() and name not in wide}
    if len(dtypes) == 1:
        model.to(dtypes.pop())
    weights = {name for name, _ in model.named_parameters()}  # a buffer may contain infinities on purpose
    check_finite({name: x for name, x in tensors.items() if name in weights}, wrong.split(" does not ")[0])
    try:
        model.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise ValueError(f"{wrong} {CONFIG}. {error}") from None


def _check_complete(model: Any, tensors: dict[str, Tensor], wrong: str) -> None:
    alias, names = _aliases(model), model.state_dict().keys()
    missing = [name for name in names if alias.get(name, name) not in tensors and name not in tensors]
    unknown = [name for name in tensors if name not in names]
    if missing or unknown:
        lists = (("missing", missing), ("too many", unknown))
        parts = [f"{what}: {', '.join(names[:5])}" for what, names in lists if names]
        raise ValueError(f"{wrong} the {type(model).__name__} of {CONFIG}; {'; '.join(parts)}.")
