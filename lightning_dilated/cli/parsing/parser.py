"""A parser whose errors are short: what is wrong, what was meant, and the command that lists the keys."""

from __future__ import annotations

import difflib
import inspect
import pkgutil
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin, get_type_hints, is_typeddict

import lightning.pytorch as pl
from lightning.pytorch.cli import LightningArgumentParser, Namespace

from lightning_dilated._extensions import public_path
from lightning_dilated.cli.errors import PROG, essence, fail, wants_traceback
from lightning_dilated.cli.parsing.class_help import SECTIONS, keys, names
from lightning_dilated.models.pretrained import VALUES

#: options of every command of Lightning's besides `trainer`
OPTIONS = ("config", "ckpt_path", "seed_everything", "print_config", "model", "data")
#: of a class with so few keys an error lists all
FEW = 12


#: types that a parser reads without looking for a class, a function or another file, as are subclasses of Enum and PurePath
PLAIN = {
    *(Any, str, int, float, bool, complex, type(None), list, tuple, set, frozenset, dict, Mapping, Sequence, Iterable)
}


def check_texts(arguments: Mapping[str, Any], types: Mapping[str, list[Any]], where: str) -> None:
    """Refuse texts of a file where a parser takes texts for classes, functions or other files.

    Args:
        arguments: checked values of the file (`file_arguments`).
        types: the annotations of each argument (`argument_types`).
        where: the file, for messages.

    Raises:
        ValueError: naming the argument, the text and what to do.
    """
    for name, value in arguments.items():
        leaves = {leaf for hint in types.get(name, ()) for leaf in _leaves(hint)}
        others = {x for x in leaves - PLAIN if not (isinstance(x, type) and issubclass(x, (Enum, PurePath)))}
        ours = all(x in VALUES.values() or is_dataclass(x) or is_typeddict(x) for x in others)
        text = next(_texts(value, within=not ours), None) if others else None
        if text is not None:
            raise ValueError(
                f"{where} has {name}={text!r:.80}, which may be the name of a class, a function or another file, and a file "
                f"does not decide which is read. If you trust it, give {name} yourself, in a recipe or as --model.{name}."
            )


def _leaves(hint: Any) -> set[Any]:
    """The types that an annotation consists of."""
    if get_origin(hint) is Literal:
        return {str}
    if hint not in VALUES.values() and (is_dataclass(hint) or is_typeddict(hint)):
        try:
            return {hint}.union(*map(_leaves, get_type_hints(hint).values()))
        except NameError:  # of a type that only type checkers import
            return {hint, object}
    if get_origin(hint) in (Callable, type) or not (inner := [x for x in get_args(hint) if x is not Ellipsis]):
        return {hint}
    return set().union(*map(_leaves, inner[:1] if get_origin(hint) is Annotated else inner))


def _texts(value: Any, within: bool) -> Iterator[str]:
    """The texts of a value; those within mappings, too, if `within`."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)) or (within and isinstance(value, Mapping)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner, within)


def with_public_names(value: Any) -> Any:
    """Return a configuration in which every `class_path` is the public name of the class."""
    if isinstance(value, (Namespace, dict)):
        values = {key: with_public_names(x) for key, x in (value if isinstance(value, dict) else vars(value)).items()}
        if isinstance(path := values.get("class_path"), str):
            values["class_path"] = public_path(path)
        return values if isinstance(value, dict) else Namespace(**values)
    return [with_public_names(x) for x in value] if isinstance(value, list) else value


class Parser(LightningArgumentParser):
    """A parser with short errors: what is wrong, without the list of options."""

    def dump(self, cfg: Namespace, *args: Any, **options: Any) -> str:
        """Write a configuration as text, classes by their public names."""
        return super().dump(with_public_names(cfg), *args, **options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error or wants_traceback():
            super().error(message, ex)
        lines = [
            essence(message),
            *filter(None, (unknown_key(message), unknown_words(message), unknown_class(message))),
        ]
        fail("\n".join([*lines, where_listed(message)]))


def unknown_key(message: str) -> str | None:
    """What was meant by a key that a class does not have."""
    match = re.search(r"Option '([\w.]+)' is not accepted(?:\. Got value: Namespace\(class_path='([\w.]+)')?", message)
    if match is None:
        return None
    before = re.findall(r"given class_path '([\w.]+)'", message[: match.start()])
    path = match[2] or (before[-1] if before else None)
    try:
        cls = pkgutil.resolve_name(path or "")
        known = keys(cls)
    except (ImportError, AttributeError, ValueError, TypeError):
        return None
    if section := next((name for name, (base, _) in SECTIONS.items() if cls is base), None):
        return f"No class was chosen before this key: give --{section} CLASS first; one of {', '.join(names(section))}."
    hint = did_you_mean(match[1], known)
    listed = f"Keys of {cls.__name__}: {', '.join(known)}." if len(known) <= FEW else ""
    return " ".join(filter(None, (hint, listed))) or None


def unknown_class(message: str) -> str | None:
    """What was meant by a class of the model or the data that is not there."""
    section = re.search(r'Parser key "(\w+)"', message)
    if section is None or section[1] not in SECTIONS or "Option '" in message:
        return None
    words = re.findall(r"Given value: (\S+)|import path (\S+)|class_path='([\w.]+)'", message)
    tried = next((x.strip("'\"").rpartition(".")[2] for found in words for x in found if x), None)
    return did_you_mean(tried, names(section[1])) if tried else None


def unknown_words(message: str) -> str | None:
    """What was meant by options that do not exist, and by files that a glob of the shell left over."""
    match = re.search(r"unrecognized arguments: (.*)", message, re.I)
    if match is None:
        return None
    words = shlex.split(match[1].replace("'", ""))
    if not words[0].startswith("-"):
        option = _option_before(words[0])
        files = [word for word in words if Path(word).exists()]
        pattern = f"{Path(files[0]).parent}/*{Path(files[0]).suffix}" if files else "slides/*.h5"
        return (
            f"An option takes one value. Quote a glob, so that the shell does not expand it: {option or '--data.paths'} "
            f'"{pattern.removeprefix("./")}".'
        )
    known = [*OPTIONS, *(f"trainer.{name}" for name in inspect.signature(pl.Trainer).parameters)]
    name = words[0].lstrip("-").partition("=")[0]
    section, dot, rest = name.partition(".")
    close = difflib.get_close_matches(section, ("model", "data", "trainer"), 1)
    if dot and close and section != close[0]:
        return f"Did you mean '--{close[0]}.{rest}'?"
    return did_you_mean(name, known, "--")


def _option_before(word: str) -> str | None:
    """The last option before a word of the command line."""
    before = sys.argv[: sys.argv.index(word)] if word in sys.argv else []
    return next((x for x in reversed(before) if x.startswith("--")), None)


def did_you_mean(word: str, known: list[str], dashes: str = "") -> str | None:
    """The nearest of the known words, as a question; None where none is near."""
    close = difflib.get_close_matches(word, known, 1)
    return f"Did you mean '{dashes}{close[0]}'?" if close else None


def where_listed(message: str) -> str:
    """Which command lists the keys."""
    command = f"{PROG} {' '.join(sys.argv[1:2])}"
    section = re.search(r'Parser key "(\w+)"', message)
    cls = re.search(r"given class_path '([\w.]+)'", message)
    bases = {f"{base.__module__.partition('.')[0]}.{base.__name__}" for base, _ in SECTIONS.values()}
    if section and cls and section[1] in SECTIONS and cls[1] not in bases:
        name = cls[1].rpartition(".")[2]
        name = name if name in names(section[1]) else cls[1]
        return f"`{command} --{section[1]}.help {name}` lists the keys of {name}, `{command} --help` all others."
    return (
        f"`{command} --help` lists the keys; those of model and data with --config, or by --model.help and --data.help."
    )
