"""The files of a tokenizer as {name: text}, which checkpoints and model folders store."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAIN = "tokenizer.json"
#: names of a tokenizer's files in transformers; further chat templates are in a folder
NAMES = (
    MAIN,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
_TEMPLATE = re.compile(r"additional_chat_templates/\w[\w.-]*\.jinja")
#: patterns of these names for huggingface_hub
PATTERNS = (*NAMES, "additional_chat_templates/*.jinja")


def is_known(name: object) -> bool:
    """Return True if a name belongs to a tokenizer's file; other files are neither read nor written."""
    return isinstance(name, str) and (name in NAMES or _TEMPLATE.fullmatch(name) is not None)


def checked_files(files: Any, where: str) -> dict[str, str] | None:
    """Check a tokenizer's files, which are from `where`, and return them; return None for None.

    Raises: ValueError unless the files are {name of a tokenizer's file: text}, including tokenizer.json.
    """
    if files is None:
        return None
    if not (isinstance(files, Mapping) and MAIN in files and all(map(is_known, files))):
        raise ValueError(
            f"{where} holds a tokenizer that is not made of {MAIN} and other files of a tokenizer, but of "
            f"{str(list(files) if isinstance(files, Mapping) else files)[:120]}: it was written by something else"
        )
    if not all(isinstance(text, str) for text in files.values()):
        raise ValueError(f"{where} holds a tokenizer whose files are not texts: it was written by something else")
    return dict(files)


def write_files(folder: Path, files: Mapping[str, str] | None) -> None:
    """Write a tokenizer's files into an existing folder."""
    for name, text in (files or {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def read_files(folder: Path) -> dict[str, str] | None:
    """Read the tokenizer's files in a folder; return None if it has no tokenizer.json."""
    if not (folder / MAIN).is_file():
        return None
    paths = [folder / name for name in NAMES] + sorted((folder / "additional_chat_templates").glob("*.jinja"))
    files = {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}
    return {name: path.read_text() for name, path in files.items() if is_known(name)}
