"""A parser with short errors: the problem, a suggestion, and the command that lists the keys."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin, get_type_hints, is_typeddict

import lightning.pytorch as pl
from lightning.pytorch.cli import LightningArgumentParser, Namespace
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_dilated._extensions import public_path
from lightning_dilated._removed import removed, removed_name
from lightning_dilated.cli.errors import PROG, fail, summarize_error, wants_traceback
from lightning_dilated.cli.parsing.class_help import SECTIONS, keys, names, subclass
from lightning_dilated.cli.parsing.settings import Key, chosen_classes, options, settings
from lightning_dilated.data import ByteDataModule
from lightning_dilated.models import DilatedModule
from lightning_dilated.models.pretrained import VALUES

#: the options that all of Lightning's commands have, without `trainer`
OPTIONS = ("config", "ckpt_path", "seed_everything", "print_config", "model", "data")
#: errors list all keys of a class with at most this number of keys
FEW = 12
#: base classes of the classes that a command line may name
BASES = (DilatedModule, pl.LightningDataModule, Optimizer, LRScheduler)


#: types that a parser reads without importing anything or reading files, like subclasses of Enum and PurePath
PLAIN = {
    *(Any, str, int, float, bool, complex, type(None), list, tuple, set, frozenset, dict, Mapping, Sequence, Iterable)
}


def check_texts(arguments: Mapping[str, Any], types: Mapping[str, list[Any]], where: str) -> None:
    """Refuse texts in a file that a parser would interpret as classes, functions or other files.

    Args:
        arguments: checked values of the file (`file_arguments`).
        types: the annotations of each argument (`argument_types`).
        where: the file, for messages.

    Raises:
        ValueError: if there is such a text, naming the argument, the text and a remedy.
    """
    for name, value in arguments.items():
        leaves = {leaf for hint in types.get(name, ()) for leaf in _leaves(hint)}
        classes = {x for x in leaves - PLAIN if not (isinstance(x, type) and issubclass(x, (Enum, PurePath)))}
        known = all(x in VALUES.values() or is_dataclass(x) or is_typeddict(x) for x in classes)
        text = next(_texts(value, within=not known), None) if classes else None
        if text is not None:
            raise ValueError(
                f"{where} has {name}={text!r:.80}, which may be the name of a class, a function or another file, and a file "
                f"does not decide which is read. If you trust it, give {name} yourself, in a recipe or as --model.{name}."
            )


def _leaves(hint: Any) -> set[Any]:
    if get_origin(hint) is Literal:
        return {str}
    if hint not in VALUES.values() and (is_dataclass(hint) or is_typeddict(hint)):
        try:
            return {hint}.union(*map(_leaves, get_type_hints(hint).values()))
        except NameError:  # an annotation names a type that only type checkers import
            return {hint, object}
    if get_origin(hint) in (Callable, type) or not (inner := [x for x in get_args(hint) if x is not Ellipsis]):
        return {hint}
    return set().union(*map(_leaves, inner[:1] if get_origin(hint) is Annotated else inner))


def _texts(value: Any, within: bool) -> Iterator[str]:
    """Yield a text, or the texts in lists and, if `within` is True, in mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)) or (within and isinstance(value, Mapping)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner, within)


def with_public_names(value: Any) -> Any:
    """Replace the class in every `class_path` of a configuration with its public name."""
    if isinstance(value, (Namespace, dict)):
        values = {key: with_public_names(x) for key, x in (value if isinstance(value, dict) else vars(value)).items()}
        if isinstance(path := values.get("class_path"), str):
            values["class_path"] = public_path(path)
        return values if isinstance(value, dict) else Namespace(**values)
    return [with_public_names(x) for x in value] if isinstance(value, list) else value


class Parser(LightningArgumentParser):
    """A parser with short errors that do not list all options."""

    def dump(self, cfg: Namespace, *args: Any, **options: Any) -> str:
        """Return a configuration as text, with public names of classes."""
        return super().dump(with_public_names(cfg), *args, **options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error or wants_traceback():
            super().error(message, ex)
        fail(
            "\n".join(
                [summarize_error(message), *dict.fromkeys(advice(message, sys.argv[1:])), where_listed(sys.argv[1:])]
            )
        )


def advice(message: str, argv: list[str]) -> Iterator[str]:
    """Yield suggestions for the keys, classes and words of a command line that an error message mentions."""
    classes: dict[Key, type | None] = {("trainer",): pl.Trainer}
    if not dict(settings(argv)).get(("data",)):
        classes["data",] = ByteDataModule
    for key, value in settings(argv):
        section, owner, name = key[0], key[:-1], key[-1]
        if name in message and owner in classes:
            yield from unknown_key(name, classes[owner], "--trainer." if section == "trainer" else "")
        elif name in message and len(owner) == 1 and section in SECTIONS:
            choices = ", ".join(names(section))
            yield f"No class was chosen before this key: give --{section} CLASS first; one of {choices}."
        elif name in message and section not in (*OPTIONS, "trainer"):
            known = [*OPTIONS, *(f"trainer.{x}" for x in inspect.signature(pl.Trainer).parameters)]
            yield from did_you_mean(".".join(key), [*known, *(f"{x}.{name}" for x in SECTIONS if owner)], "--")
        yield from filter(None, (removed(name), removed_name(value) if isinstance(value, str) else None))
        if isinstance(value, str):
            word = value.rpartition(".")[2]
            classes[key] = next(filter(None, (subclass(base, word) for base in BASES)), None)
            if not owner and section in SECTIONS and classes[key] is None and word in message:
                yield from did_you_mean(word, names(section))
    for option in options(argv):
        if option.values[1:] and option.values[1] in message:
            file = next((Path(word) for word in option.values[1:] if Path(word).exists()), Path("slides/x.h5"))
            yield (
                "An option takes one value. Quote a glob, so that the shell does not expand it: "
                f'{option.name} "{file.with_stem("*")}".'
            )


def unknown_key(name: str, cls: type | None, dashes: str = "") -> Iterator[str]:
    """Yield suggestions for a key that the class does not have."""
    known = keys(cls) if cls else [name]
    if name not in known:
        yield from did_you_mean(name, known, dashes)
        if len(known) <= FEW:
            yield f"Keys of {cls.__name__}: {', '.join(known)}."


def did_you_mean(word: str, known: list[str], dashes: str = "") -> Iterator[str]:
    """Yield a question that suggests the most similar known word, if there is one."""
    yield from (f"Did you mean '{dashes}{close}'?" for close in difflib.get_close_matches(word, known, 1))


def where_listed(argv: list[str]) -> str:
    """Return a sentence with the commands that list the keys."""
    command, listed = f"{PROG} {' '.join(argv[:1])}", ""
    for section, path in chosen_classes(argv).items():
        short = path.rpartition(".")[2] if isinstance(path, str) else ""
        dotted = path if any(subclass(base, short) for base in BASES) else "CLASS"
        name = short if short in names(section) else dotted
        listed += f"`{command} --{section}.help {name}` lists the keys of {name}, "
    return f"{listed}`{command} --help` all others."
