"""The settings of a command line, before the parser reads them: the options, and the values in recipes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lightning_dilated.cli.errors import fail

#: the parts of a setting's name except `class_path` and `init_args`: ("model", "dim"), or ("model",) for the class
Key = tuple[str, ...]
CONFIG: Key = ("config",)


class Option(NamedTuple):
    """The words, name (with dashes), key and values of an option, or the words before a command line's first option."""

    words: list[str]
    name: str
    key: Key
    values: list[str]

    @property
    def appends(self) -> bool:
        """True for `--KEY+ VALUE`, which appends the value to a list."""
        return self.name.endswith("+")


def options(argv: Sequence[str]) -> list[Option]:
    """Return the options of a command line, with recipes first, because other options replace the recipes' values."""
    grouped: list[list[str]] = []
    for word in argv:
        if not grouped or word.startswith("--") or word.partition("=")[0] in ("-c", "-h"):
            grouped.append([])
        grouped[-1].append(word)
    listed = []
    for words in grouped:
        name, equals, text = words[0].partition("=")
        first, *parts = name.lstrip("-").rstrip("+").split(".")
        key = ("config" if name == "-c" else first, *(x for x in parts if x not in ("class_path", "init_args")))
        listed.append(Option(words, name, key, [text, *words[1:]] if equals else words[1:]))
    return sorted(listed, key=lambda option: (option.name.startswith("-"), option.key != CONFIG))


def settings(argv: Sequence[str]) -> list[tuple[Key, Any]]:
    """Return (key, value) of each setting: values of recipes, then texts of options, which override them."""
    groups = ([(x.key, next(iter(x.values), None))] if x.key != CONFIG else recipe_settings(x) for x in options(argv))
    return [setting for listed in groups for setting in listed]


def recipe_settings(config: Option) -> list[tuple[Key, Any]]:
    """Return (key, value) of each setting in a recipe; [] for a broken file, which the parser will report."""
    with contextlib.suppress(yaml.YAMLError, UnicodeDecodeError):
        texts = [Path(path).read_text() for path in config.values[:1] if Path(path).is_file()]
        return [setting for text in texts for setting in _flat((), yaml.safe_load(text)) if setting[0]]
    return []


def _flat(key: Key, value: Any) -> Iterator[tuple[Key, Any]]:
    """Yield the settings in a value; a mapping inside a section is a single setting, unless it describes a class."""
    if not isinstance(value, dict) or (len(key) > 1 and not {"class_path", "init_args"} & value.keys()):
        yield key, value
        return
    if "class_path" in value:
        yield key, value["class_path"]
    arguments = value.get("init_args")
    for name, x in {**value, **(arguments if isinstance(arguments, dict) else {})}.items():
        if name not in ("class_path", "init_args"):
            yield from _flat((*key, str(name)), x)


def chosen_classes(argv: Sequence[str]) -> dict[str, str | None]:
    """Return the names of the model and data classes that a command would use; None if no class is named."""
    classes, has_recipe = dict(settings(argv)), any(option.key == CONFIG for option in options(argv))
    defaults = {"model": "LongNetLM", "data": "ByteDataModule"} if has_recipe else {}
    return {name: classes.get((name,)) or defaults.get(name) for name in ("model", "data")}


def with_parts(argv: Sequence[str]) -> list[str]:
    """Replace an option for a part (--model.pattern.hybrid.local 128) by one for the whole: the parser drops other parts."""
    words: list[str] = []
    wholes: dict[Key, Any] = {("model", "pattern"): {}}
    for option in options(argv):
        key, parts = option.key[:2], option.key[2:]
        whole = wholes.get(key) if key[0] in ("model", "data") and option.values else None
        if option.key == CONFIG:
            wholes |= dict(recipe_settings(option))
        elif not parts:
            value, before = _plain(next(iter(option.values), "")), wholes.get(key)
            appended = (
                [*before, *(value if isinstance(value, list) else [value])] if isinstance(before, list) else value
            )
            wholes[key] = appended if option.appends else value
        elif isinstance(whole, dict | list) and "class_path" not in whole:
            if option.appends:
                fail(
                    f"{option.name} appends to a part of {'.'.join(key)}: set all of it, {option.name.rstrip('+')} [...]."
                )
            wholes[key] = _with_part(copy.deepcopy(whole), parts, _plain(option.values[0]), option.name)
            flow = yaml.safe_dump(wholes[key], default_flow_style=True, sort_keys=False, width=float("inf")).strip()
            words += [f"{option.name.removesuffix('.' + '.'.join(parts))}={flow}", *option.values[1:]]
            continue
        words += option.words
    return words


def _plain(text: str) -> Any:
    """Return the value of an option's text, or the text if it is not YAML."""
    with contextlib.suppress(yaml.YAMLError):
        return yaml.safe_load(text)
    return text


def _with_part(whole: Any, keys: Key, value: Any, option: str) -> Any:
    """Set one part of a mapping or list, at the end of a path of keys, and return the whole mapping or list."""
    part = whole
    for i, key in enumerate(keys):
        name = ".".join([option.removesuffix("." + ".".join(keys)), *keys[:i]])
        place: Any = next((x for x in part if str(x) == key), key) if isinstance(part, dict) else key
        if isinstance(part, list):
            if not key.isdecimal() or int(key) >= len(part):
                fail(f"{option}: {name} is a list, whose parts are called 0 to {len(part) - 1}; got {key!r}.")
            place = int(key)
        elif not isinstance(part, dict):
            fail(f"{option}: {name} is {part!r}, which has no parts. Set {name} itself.")
        if i == len(keys) - 1:
            part[place] = value
        elif isinstance(part, list) or part.get(place) is not None:
            part = part[place]
        else:
            part[place] = part = {}
    return whole
