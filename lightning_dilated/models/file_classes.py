"""Classes that a file names: none is imported for it, unless it belongs to this package, torch or lightning."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import yaml

#: hyperparameters that say how a model is trained, and are no part of it; those of a file are not read
TRAINING = ("optimizer", "lr_scheduler")
#: packages whose modules a file may have imported
TRUSTED = ("lightning_dilated", "torch", "lightning")
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_CLASS = ("class_path", "_class_path")


def without_training(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters without the optimizer and the scheduler."""
    return {name: value for name, value in hparams.items() if name not in TRAINING}


def check_classes(hparams: Any, where: str | Path, known: Collection[str] = ()) -> None:
    """Refuse a file whose hyperparameters name a class that would have to be imported.

    A parser that makes objects of them would import its module, and so run whatever file has that name.

    Args:
        hparams: nested mappings and lists, as in a recipe.
        where: the file, for messages.
        known: modules that the caller names too, besides those that are imported.

    Raises:
        ValueError: naming file and class, and what to do; for names of hyperparameters that no parser takes.
    """
    todo = [("hyperparameters", hparams, False)]
    for _ in range(1_000_000):
        if not todo:
            return
        name, value, is_class = todo.pop()
        if isinstance(value, Mapping):
            for key, inner in value.items():
                _check_key(key, name, where, outermost=value is hparams)
                words = str(key)
                todo.append((words, inner, words.rpartition(".")[2] in _CLASS))
                todo.append((name, words, False))
        elif isinstance(value, (list, tuple)):
            todo += [(name, inner, False) for inner in value]
        elif isinstance(value, str):
            if is_class and not (_DOTTED.fullmatch(value) or value.isidentifier()):
                raise ValueError(f"{where}: {value!r:.60} ({name}) is no name of a class.")
            if _DOTTED.fullmatch(value) and (is_class or _runs_a_file(value)) and not _allowed(value, known):
                raise ValueError(
                    f"{where} names {value} ({name}), which is not imported here, and files do not decide what is. If you "
                    f"trust it, import {value.rpartition('.')[0]} before, or name the class in your own recipe."
                )
            todo += [(name, inner, False) for inner in _inside(value)]
    raise ValueError(f"{where} has hyperparameters without end.")


def _check_key(key: Any, name: str, where: str | Path, outermost: bool) -> None:
    """Outermost names become arguments of the command line; values that are mappings may have words and numbers as keys."""
    if (outermost and (not isinstance(key, str) or not key.isidentifier())) or not isinstance(key, (str, int, float)):
        raise ValueError(f"{where}: {key!r:.60} in {name} is no name of a hyperparameter.")


def _allowed(path: str, known: Collection[str]) -> bool:
    """Whether a class is imported, or its module may be."""
    parts = path.split(".")
    if parts[0] in TRUSTED or path.rpartition(".")[0] in known:
        return True
    for i in range(len(parts) - 1, 0, -1):
        found = sys.modules.get(".".join(parts[:i]))
        for name in parts[i:] if found is not None else ():
            found = getattr(found, name, None)
        if found is not None:
            return True
    return False


def _runs_a_file(path: str) -> bool:
    """Whether to import what a dotted name may mean would run a file; many strings with a dot are no such names."""
    parts, where = path.split("."), None
    for i in range(1, len(parts)):
        name = ".".join(parts[:i])
        if name in sys.modules:
            where = getattr(sys.modules[name], "__path__", None)
            if where is None:
                return False
            continue
        found = PathFinder.find_spec(name, where)
        if found is None:
            return False
        if found.origin is not None:  # a folder without __init__.py has none
            return True
        where = found.submodule_search_locations
    return False


def _inside(value: str) -> list[Any]:
    """What a parser may read in a string: other words, a mapping or list in YAML, or a file of one."""
    texts = [value]
    try:
        if value.endswith((".yaml", ".yml", ".json")) and Path(value).is_file():
            texts.append(Path(value).read_text())
        found = [yaml.safe_load(text) for text in texts]
    except (yaml.YAMLError, OSError, ValueError, RecursionError):
        return []
    return [x for x in found if isinstance(x, (Mapping, list)) or (isinstance(x, str) and x != value)]
