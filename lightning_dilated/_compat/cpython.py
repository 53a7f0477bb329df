"""Private behaviour of CPython, used only by functions that name the versions that they are known to work in."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

#: number of stack entries of 8 bytes, more than a normal chunk holds, so that CPython allocates a larger chunk
_ROOM = 1 << 13


def avoid_frame_chunk_edge(function: Callable[..., Result]) -> Callable[..., Result]:
    """Return the function with a stack chunk of about 60 KiB, enough for hundreds of frames of functions that it calls.

    CPython stores frames in chunks of 16 KiB and frees a chunk when the chunk's first frame returns. If a loop runs at
    the end of a chunk, each call in it allocates and frees the next chunk, which takes 5 us instead of 0.05, and more
    with other threads. At some depths of the caller, loops over blocks run at the end of a chunk. A larger
    `co_stacksize` in the code object gives the function its own chunk, for about 9 us a call.

    CPython 3.11 and 3.12 need this, as do releases of 3.13 and 3.14 before March 2026, when a fix added a spare chunk
    (https://github.com/python/cpython/issues/142183). It is harmless in later releases. Known to work in 3.11 to 3.14.
    """

    @functools.wraps(function)
    def call(*args: object) -> Result:
        return function(*args)

    call.__code__ = call.__code__.replace(co_stacksize=_ROOM)
    return call


# -- the command `generate` --------------------------------------------------------------------------------------------
def option_actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the options of a parser, in order: `ArgumentParser._actions`, which has no public name in 3.11 to 3.14."""
    return parser._actions
