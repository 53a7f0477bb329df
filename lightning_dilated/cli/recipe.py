"""Find recipes by name, and read a recipe's model and data settings."""

from __future__ import annotations

import inspect
import pkgutil
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from lightning_dilated._removed import removed
from lightning_dilated.cli.errors import fail
from lightning_dilated.models import DilatedModule


def recipe_folders() -> list[Path]:
    """Return the folders with the package's recipes: inside the wheel, or next to the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return [f for f in (package / "recipes", package.parent / "recipes") if f.is_dir()]


def find_recipe(name: str) -> str:
    """Return the path of a config, which is the file `name` if it exists, else the package's recipe of this name."""
    if Path(name).is_file():
        return name
    in_package = Path(name).parent in (Path("."), Path("recipes"))  # a path in any other folder is taken literally
    for folder in recipe_folders():
        if in_package and (folder / Path(name).name).is_file():
            return str(folder / Path(name).name)
    known = sorted({f.name for folder in recipe_folders() for f in folder.glob("*.yaml")})
    advice = removed(Path(name).name) or f"no recipe of that name. Recipes: {', '.join(known)}."
    fail(f"--config {name}: no such file, and {advice}")


def with_recipes(argv: list[str]) -> list[str]:
    """Replace the recipe's name after each --config with the path of the recipe."""
    words = list(argv)
    for i, word in enumerate(words):
        if word in ("--config", "-c") and i + 1 < len(words):
            words[i + 1] = find_recipe(words[i + 1])
        elif word.startswith(("--config=", "-c=")):
            words[i] = "--config=" + find_recipe(word.partition("=")[2])
    return words


def class_of(path: Path, class_path: Any, package: str) -> Any:
    """Import the class of a class_path; a class_path without a module is a name in `package`."""
    name = str(class_path)
    try:
        return pkgutil.resolve_name(name if "." in name else f"{package}.{name}")
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--config {path}: class_path {class_path} cannot be imported ({error}).") from None


def with_length(cls: Any, arguments: dict[str, Any], seq_len: int | None) -> dict[str, Any]:
    """Set `max_seq_len` in a model's arguments to the data's N, if it is unset and the rotary bases depend on it."""
    known = isinstance(cls, type) and issubclass(cls, DilatedModule) and cls.length_from_data
    # the parser, which `fit` also uses, follows **options and leaves out arguments that the class sets itself
    takes = known and "max_seq_len" in ArgumentParser().add_class_arguments(cls, fail_untyped=False)
    base = arguments.get("rotary_base")
    follows = base is None or "length" in (base if isinstance(base, list) else [base])
    fixed = arguments.get("max_seq_len") is not None or not follows
    return arguments if not takes or fixed or seq_len is None else {**arguments, "max_seq_len": seq_len}


def make_model(path: Path, model: dict[str, Any], seq_len: int | None = None) -> DilatedModule:
    """Return a recipe's model for data of N tokens, without its layers and its optimizer."""
    cls = class_of(path, model.get("class_path", "LongNetLM"), "lightning_dilated")
    arguments = {k: v for k, v in (model.get("init_args") or {}).items() if k not in ("optimizer", "lr_scheduler")}
    return cls(**with_length(cls, arguments, seq_len))


def seq_len_of(path: Path, data: Any) -> int | None:
    """Return N of a recipe's data: the setting `seq_len`, else the class's default."""
    data = data if isinstance(data, dict) else {}
    cls = class_of(path, data.get("class_path", "ByteDataModule"), "lightning_dilated.data")
    default = inspect.signature(cls).parameters.get("seq_len")
    length = (data.get("init_args") or {}).get("seq_len", None if default is None else default.default)
    return length if isinstance(length, int) else None
