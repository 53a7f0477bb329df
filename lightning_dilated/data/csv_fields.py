"""Words in a CSV that a spreadsheet shows and does not run.

Excel and LibreOffice take a field that begins with = + - @, a tab or a line break for a formula, which may start programs
and send data away. Names of slides and classes come from files and tables of others, so such words are written with a '
in front.
"""

from __future__ import annotations

from typing import Any

#: what a formula begins with, also in full-width letters; and the mark itself, so that it can be taken off again
_MARKED = tuple("'=+-@\t\r\n＝＋－＠")


def guarded_field(value: Any) -> Any:
    """A word with ' in front where it begins with ' or as a formula does; numbers and other words as they are."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_MARKED) else value


def plain_field(text: str) -> str:
    """The word that `guarded_field` was given: without the first ' where there is one."""
    return text.removeprefix("'")
