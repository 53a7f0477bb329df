"""Private behaviour of CPython, each use behind a function that names its versions."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

#: stack entries of 8 bytes: more than fit a chunk, so that CPython allocates a larger chunk for the call
_ROOM = 1 << 13


def avoid_frame_chunk_edge(function: Callable[..., Result]) -> Callable[..., Result]:
    """Return the function with one chunk of about 60 KiB of stack for everything that it calls (hundreds of frames).

    CPython keeps frames in chunks of 16 KiB and frees a chunk when its first frame returns. A loop at the end of a
    chunk allocates and frees one in every call: 5 us instead of 0.05, more with other threads. Our loops over blocks
    reach the end of a chunk at some depths of the caller. Replacing the code object's `co_stacksize` gives the function
    its own chunk, for about 9 us a call.

    CPython 3.11 and 3.12 need this, and releases of 3.13 and 3.14 before the fix of March 2026, which keeps one spare
    chunk (https://github.com/python/cpython/issues/142183). It is harmless later. Known to work in 3.11 to 3.14.
    """

    @functools.wraps(function)
    def call(*args: object) -> Result:
        return function(*args)

    call.__code__ = call.__code__.replace(co_stacksize=_ROOM)
    return call


# -- the command `generate` --------------------------------------------------------------------------------------------
def option_actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the options of a parser, in order: `ArgumentParser._actions`, without a public name in 3.11 to 3.14."""
    return parser._actions
