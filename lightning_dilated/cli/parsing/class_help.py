"""Help pages with the keys of a class of models or data, for `--help` and `--model.help`."""

from __future__ import annotations

import argparse
import difflib
import pkgutil
import re
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from jsonargparse import ArgumentParser
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import lightning_dilated
from lightning_dilated import data, models
from lightning_dilated.cli.errors import PROG
from lightning_dilated.cli.parsing.settings import chosen_classes, options
from lightning_dilated.models import DilatedModule

#: {section of a recipe: (base class of its classes, modules of the classes that need no dotted path)}
SECTIONS: dict[str, tuple[type, tuple[Any, ...]]] = {
    "model": (DilatedModule, (lightning_dilated, models)),
    "data": (pl.LightningDataModule, (data,)),
}


def names(section: str) -> list[str]:
    """Return the names of a section's classes that need no dotted path."""
    base, modules = SECTIONS[section]
    listed = modules[0]
    public = [name for name in getattr(listed, "__all__", dir(listed)) if not name.startswith("_")]
    return sorted(name for name in public if is_class(getattr(listed, name, None), base) and name != base.__name__)


def is_class(value: Any, base: type) -> bool:
    """Return True if a value is a subclass of `base`."""
    return isinstance(value, type) and issubclass(value, base)


def subclass(base: type, name: str) -> type | None:
    """Return the imported subclass of `base` with this name, or None."""
    todo = [base]
    while todo:
        cls = todo.pop()
        if cls.__name__ == name:
            return cls
        todo += cls.__subclasses__()
    return None


def resolve(section: str, name: str) -> type:
    """Return the class of a name or dotted path.

    Raises:
        ValueError: if the class does not exist or has a different base; the error lists the section's classes.
    """
    base, modules = SECTIONS[section]
    value = next((getattr(module, name) for module in modules if hasattr(module, name)), None)
    if value is None and "." in name:
        try:
            value = pkgutil.resolve_name(name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"--{section}.help {name}: cannot be imported ({error}).") from None
    if not is_class(value, base):
        known = names(section)
        close = difflib.get_close_matches(name.rpartition(".")[2], known, 1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise ValueError(
            f"--{section}.help {name}: no {base.__name__} of that name.{hint} Classes: {', '.join(known)}; for others "
            "give the dotted path."
        )
    return value


def keys(cls: type) -> list[str]:
    """Return the names of a class's arguments, including arguments that it passes to its bases."""
    built = {"params"} if issubclass(cls, Optimizer) else {"optimizer"} if issubclass(cls, LRScheduler) else set()
    added = ArgumentParser().add_class_arguments(cls, "of", skip=built, fail_untyped=False)
    return [key.partition(".")[2] for key in added]


def help_of(section: str, cls: type) -> str:
    """Return a help page that lists the keys of a class with their meanings, types and defaults."""
    parser = ArgumentParser(usage=argparse.SUPPRESS, add_help=False)
    parser.add_class_arguments(cls, section, fail_untyped=False)
    lines, shown = parser.format_help().strip("\n").split("\n"), True
    page = [f"keys of {cls.__name__}, in a recipe under {section}.init_args:", ""]
    for line in lines:
        if not line.startswith("   "):  # an option begins in this line
            # leave out the options that only this parser has: nested help, and a file of arguments
            shown = not re.match(rf"  (--[\w.]+\.help |--{section} CONFIG)", line)
        page += [line] if shown else []
    return "\n".join(page)


def pages(argv: Sequence[str]) -> list[str]:
    """Return the help pages that --model.help and --data.help request, for the class that they or other options name.

    Raises:
        ValueError: if there is neither a value nor a chosen class, or if no class has the given name.
    """
    texts = []
    for option in options(argv):
        section = option.key[0]
        if section not in SECTIONS or option.key[1:] != ("help",):
            continue
        name = next(iter(option.values), None) or chosen_classes(argv)[section]
        if name is None:
            raise ValueError(
                f"--{section}.help needs a class: one of {', '.join(names(section))}, the dotted path of another, or "
                "--config."
            )
        texts.append(help_of(section, resolve(section, name)))
    return texts


def footer(argv: Sequence[str]) -> str:
    """Return the end of `--help`: the keys of the chosen classes, and how to list the keys of other classes."""
    texts = [help_of(section, resolve(section, name)) for section, name in chosen_classes(argv).items() if name]
    for section in SECTIONS:
        texts.append(
            f"`{PROG} {argv[0]} --{section}.help CLASS` lists the keys of another class for {section}: "
            f"{', '.join(names(section))}."
        )
    return "\n\n".join(texts)
