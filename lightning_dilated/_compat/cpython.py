"""Private behaviour of CPython, each use behind a function that names the versions that need it."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

#: stack entries of 8 bytes: more than a chunk holds, so that CPython allocates a chunk of the next power of two for the call
_ROOM = 1 << 13


def with_room(function: Callable[..., Result]) -> Callable[..., Result]:
    """The function, with about 60 KiB of stack for all that it calls (hundreds of frames) in one chunk of memory.

    CPython keeps frames in chunks of 16 KiB and frees a chunk when its first frame returns. In a loop at the end of a chunk
    every call allocates and frees one: 5 us instead of 0.05, more with other threads. Whether our loops over blocks stand
    there depends on the caller's depth. Replacing the code object's `co_stacksize` gives the function a chunk of its own,
    for about 9 us a call.

    Needed by CPython 3.11 and 3.12, and by releases of 3.13 and 3.14 without the fix of March 2026, which keeps one spare
    chunk (https://github.com/python/cpython/issues/142183); harmless in later ones. Known to work in 3.11 to 3.14.
    """

    @functools.wraps(function)
    def call(*args: object) -> Result:
        return function(*args)

    call.__code__ = call.__code__.replace(co_stacksize=_ROOM)
    return call


# -- the command `generate` --------------------------------------------------------------------------------------------
def option_actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The options of a parser, in order: `ArgumentParser._actions`, which has no public name; 3.11 to 3.14."""
    return parser._actions
