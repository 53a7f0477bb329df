"""Find recipes by name, and read the model and the data of a recipe before either is made."""

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
    """Folders of the package's recipes: inside the wheel, or next to the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return [f for f in (package / "recipes", package.parent / "recipes") if f.is_dir()]


def find_recipe(name: str) -> str:
    """The path of a config: as given, else the package's recipe of that file name."""
    if Path(name).is_file():
        return name
    in_package = Path(name).parent in (Path("."), Path("recipes"))  # a path in any other folder is taken literally
    for folder in recipe_folders():
        if in_package and (folder / Path(name).name).is_file():
            return str(folder / Path(name).name)
    known = sorted({f.name for folder in recipe_folders() for f in folder.glob("*.yaml")})
    said = removed(Path(name).name) or f"no recipe of that name. Recipes: {', '.join(known)}."
    fail(f"--config {name}: no such file, and {said}")


def with_recipes(argv: list[str]) -> list[str]:
    """The arguments, each --config replaced by the file it means."""
    out = list(argv)
    for i, word in enumerate(out):
        if word in ("--config", "-c") and i + 1 < len(out):
            out[i + 1] = find_recipe(out[i + 1])
        elif word.startswith(("--config=", "-c=")):
            out[i] = "--config=" + find_recipe(word.partition("=")[2])
    return out


def class_of(path: Path, class_path: Any, package: str) -> Any:
    """The class of a class_path; names without a module are the package's."""
    name = str(class_path)
    try:
        return pkgutil.resolve_name(name if "." in name else f"{package}.{name}")
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--config {path}: class_path {class_path} cannot be imported ({error}).") from None


def with_length(cls: Any, arguments: dict[str, Any], seq_len: int | None) -> dict[str, Any]:
    """A model's arguments; without `max_seq_len`, and with no base or "length", `max_seq_len` is the data's N tokens."""
    known = isinstance(cls, type) and issubclass(cls, DilatedModule) and cls.length_from_data
    # as a recipe's `fit` sees it: of a constructor with **options, what it does not set itself
    takes = known and "max_seq_len" in ArgumentParser().add_class_arguments(cls, fail_untyped=False)
    base = arguments.get("rotary_base")
    follows = base is None or "length" in (base if isinstance(base, list) else [base])
    named = arguments.get("max_seq_len") is not None or not follows
    return arguments if not takes or named or seq_len is None else {**arguments, "max_seq_len": seq_len}


def made_model(path: Path, model: dict[str, Any], seq_len: int | None = None) -> DilatedModule:
    """Return the model of a recipe for data of N tokens, not built, without its optimizer."""
    cls = class_of(path, model.get("class_path", "LongNetLM"), "lightning_dilated")
    arguments = {k: v for k, v in (model.get("init_args") or {}).items() if k not in ("optimizer", "lr_scheduler")}
    return cls(**with_length(cls, arguments, seq_len))


def seq_len_of(path: Path, data: Any) -> int | None:
    """N of the recipe's data: its setting, else its class's default."""
    data = data if isinstance(data, dict) else {}
    cls = class_of(path, data.get("class_path", "ByteDataModule"), "lightning_dilated.data")
    default = inspect.signature(cls).parameters.get("seq_len")
    length = (data.get("init_args") or {}).get("seq_len", None if default is None else default.default)
    return length if isinstance(length, int) else None
