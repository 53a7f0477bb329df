"""Arguments before they are parsed: recipes by name, and the settings of a checkpoint's model."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from pathlib import Path
from typing import Any

import yaml

from lightning_dilated.cli.errors import fail
from lightning_dilated.cli.load_model import model_config, read_checkpoint
from lightning_dilated.models.file_classes import check_classes, without_training

#: keywords that Lightning itself understands in place of a path
CKPT_WORDS = ("best", "last", "hpc", "registry")


def with_checkpoint(argv: list[str]) -> list[str]:
    """The arguments in the order recipe, settings of the model in --ckpt_path, everything else: the later one wins."""
    if any(word in ("-h", "--help") or word.startswith("--print_config") for word in argv):
        return argv
    configs, rest = split_configs(argv[1:])
    named = model_class(configs, rest)
    path = option(argv, "--ckpt_path") or next(
        reversed([c["ckpt_path"] for c in read(configs) if c.get("ckpt_path")]), None
    )
    if path is None or path in CKPT_WORDS or Path(path).is_dir():
        if path is not None and Path(path).is_dir() and not (Path(path) / ".metadata").exists():
            fail(f"--ckpt_path {path} is a folder, but not a sharded checkpoint. Pass a .ckpt file inside it.")
        if not named:
            fail(f"{argv[0]} needs a model: give --config RECIPE.yaml, --ckpt_path FILE.ckpt, or --model CLASS.")
        return argv
    if argv[0] == "fit" and not named:
        fail(f"fit needs --config beside --ckpt_path {path}: a checkpoint does not say how its optimizer was made. "
             "The config.yaml in its run folder does.")  # fmt: skip
    model = model_config(read_checkpoint(path))
    there, here = model["class_path"], named or model["class_path"]
    if there.rpartition(".")[2] != here.rpartition(".")[2]:
        fail(f"--ckpt_path {path} holds a {there}, but the recipe or --model names {here}. Use one class for both.")
    settings = [] if named else [f"--model={model['class_path']}"]
    hparams = without_training(model["init_args"])  # how to train is the recipe's to say
    try:
        check_classes({**hparams, **({} if named else {"class_path": there})}, path, known=named_modules(configs, rest))
    except ValueError as error:
        fail(error)
    for key, value in hparams.items():
        settings.append(f"--model.{key}={value if isinstance(value, str) else json.dumps(value)}")
    return [argv[0], *configs, *settings, *rest]


def model_class(configs: list[str], rest: list[str]) -> str | None:
    """The class that the recipes and arguments name for the model, the last one; None where none does."""
    found = "LongNetLM" if configs else None
    for config in read(configs):
        model = config.get("model")
        found = (model.get("class_path") if isinstance(model, dict) else model) or found
    for name in ("--model", "--model.class_path"):
        given = option(rest, name)
        if given is not None:
            found = given
    return found


def names_data(words: list[str]) -> bool:
    """Whether the recipes or arguments name a class of the data."""
    configs, rest = split_configs(words)
    sections = [config.get("data") for config in read(configs)]
    named = any(data.get("class_path") if isinstance(data, dict) else data for data in sections)
    return named or any(option(rest, name) is not None for name in ("--data", "--data.class_path"))


def named_modules(configs: list[str], rest: list[str]) -> set[str]:
    """The modules of all classes that the recipes and arguments name."""
    words = re.findall(r"[\w.]+\.\w+", " ".join([json.dumps(read(configs), default=str), *rest]))
    return {word.rpartition(".")[0] for word in words}


def read(configs: list[str]) -> list[dict[str, Any]]:
    """The mappings in config files; a file that is none is left to the parser, which says what is wrong with it."""
    found = []
    for word in configs:
        path = Path(word.partition("=")[2] or word)
        if path.is_file():
            with contextlib.suppress(yaml.YAMLError, UnicodeDecodeError):
                values = yaml.safe_load(path.read_text())
                found += [values] if isinstance(values, dict) else []
    return found


def split_configs(words: list[str]) -> tuple[list[str], list[str]]:
    """(the --config arguments with their values, all others)."""
    configs, rest, following = [], [], False
    for word in words:
        is_config = following or word in ("--config", "-c") or word.startswith(("--config=", "-c="))
        (configs if is_config else rest).append(word)
        following = word in ("--config", "-c")
    return configs, rest


def option(argv: list[str], name: str) -> str | None:
    """The last value of an option, in either spelling."""
    found = None
    for word, following in itertools.zip_longest(argv, argv[1:]):
        if word == name:
            found = following
        elif word.startswith(name + "="):
            found = word.removeprefix(name + "=")
    return found


def recipe_folders() -> list[Path]:
    """Where recipes of the package lie: inside the wheel, or beside the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return [f for f in (package / "recipes", package.parent / "recipes") if f.is_dir()]


def find_recipe(name: str) -> str:
    """The path of a config: as given, else the package's recipe of that file name."""
    if Path(name).is_file():
        return name
    ours = Path(name).parent in (Path("."), Path("recipes"))  # any other folder was meant as it stands
    for folder in recipe_folders():
        if ours and (folder / Path(name).name).is_file():
            return str(folder / Path(name).name)
    known = sorted({f.name for folder in recipe_folders() for f in folder.glob("*.yaml")})
    fail(f"--config {name}: no such file, and no recipe of that name. Recipes: {', '.join(known)}.")


def with_recipes(argv: list[str]) -> list[str]:
    """The arguments, each --config replaced by the file it means."""
    out = list(argv)
    for i, word in enumerate(out):
        if word in ("--config", "-c") and i + 1 < len(out):
            out[i + 1] = find_recipe(out[i + 1])
        elif word.startswith(("--config=", "-c=")):
            out[i] = "--config=" + find_recipe(word.partition("=")[2])
    return out
