"""Python's frames of one call in one piece of memory.

CPython (3.11, 3.12, and the first releases of 3.13 and 3.14) keeps frames in chunks of 16 KiB, and gives a chunk back as
soon as its first frame returns. What is called again and again just where a chunk ends asks the system for memory every
time: 5 us instead of 0.05, more where other threads run (https://github.com/python/cpython/issues/142183). Where that is
depends on how deep the caller stands, below a trainer in the middle of our loops over blocks. A chunk of one's own costs
about 9 us a call.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

#: stack entries of 8 bytes: more than a chunk, so that a chunk is made for it, of a power of two and with half of it left
_ROOM = 1 << 13


def with_room(function: Callable[..., Result]) -> Callable[..., Result]:
    """The function, with room for the frames of all that it calls (about 60 KiB, hundreds of frames) beside its own."""

    @functools.wraps(function)
    def call(*args: object) -> Result:
        return function(*args)

    call.__code__ = call.__code__.replace(co_stacksize=_ROOM)
    return call


# -- the command `generate` --------------------------------------------------------------------------------------------
def option_actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The options of a parser, in order: `ArgumentParser._actions`, which has no public name; 3.11 to 3.14."""
    return parser._actions
