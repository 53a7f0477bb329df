"""Errors of the command line: printed in one line, or with a traceback if LIGHTNING_DILATED_TRACEBACK is set."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

PROG = "lightning-dilated"


def fail(message: Any, code: int = 2) -> NoReturn:
    """Print the error on standard error and exit."""
    print(f"{PROG}: error: {message}", file=sys.stderr)
    raise SystemExit(code)


def wants_traceback() -> bool:
    """Return True if errors must be shown with their traceback."""
    return bool(os.environ.get("LIGHTNING_DILATED_TRACEBACK"))


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Print an error from wrong settings as one line and exit, unless tracebacks are requested."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError, MisconfigurationException) as error:
        if wants_traceback():
            raise
        fail(summarize_error(str(error)))


def check_device(name: str) -> None:
    """Raise ValueError unless this machine has the device."""
    try:
        kind = torch.device(name).type
    except RuntimeError:
        raise ValueError(f"--device {name}: torch knows no such device; use cpu, cuda or cuda:1.") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: this machine has no CUDA device. Leave --device out to use the CPU.")


def summarize_error(message: str) -> str:
    """Reduce the parser's nested report, which lists every type that was tried, to the lines with the error."""
    noise = ("Given value type", "Given value: Namespace", "Given value: NestedArg", "Subtypes:", "Errors:")
    noise += ("- Expected a <class 'NoneType'>", "Does not validate against any")
    lines = [line.strip() for line in message.splitlines()]
    shown = [line.removeprefix("- ") for line in lines if line and not line.startswith(noise)]
    return "\n  ".join(line[:1000] for line in shown[:12]) or message
