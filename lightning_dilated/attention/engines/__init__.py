"""The registry of engines, and how `auto` picks one and says why."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_dilated.attention.engines.base import Engine, Request
from lightning_dilated.attention.engines.math import MATH
from lightning_dilated.attention.engines.sdpa import CPU_FLASH, CUDNN, FLASH
from lightning_dilated.attention.engines.triton import TRITON

__all__ = ["ENGINES", "FAMILIES", "Choice", "Engine", "Request", "choose", "engine_names", "for_rows"]

#: every engine by its name
ENGINES: dict[str, Engine] = {e.name: e for e in (CUDNN, FLASH, CPU_FLASH, TRITON, MATH)}
#: names that stand for the first of several engines that serves the call
FAMILIES: dict[str, tuple[str, ...]] = {
    "sdpa": ("cudnn", "flash", "cpu_flash"),
    "auto": ("cudnn", "flash", "cpu_flash", "triton", "math"),
}


@dataclass(frozen=True)
class Choice:
    """The engine picked for a request, and why each one before it was not."""

    engine: Engine
    rejected: dict[str, str]

    @property
    def name(self) -> str:
        """The engine's name."""
        return self.engine.name

    def __str__(self) -> str:
        because = "; ".join(f"{name} {reason}" for name, reason in self.rejected.items())
        return f"{self.name}" + (f" ({because})" if because else "")


def engine_names() -> list[str]:
    """What `engine=` takes."""
    return [*FAMILIES, *ENGINES]


def for_rows(engine: Engine, rows: int) -> Engine:
    """The engine itself, or the math engine for fewer rows (of queries or of keys) than it takes."""
    return engine if rows >= engine.min_rows else MATH


def check_name(name: str) -> str:
    """`name`, or an error that lists the engines."""
    if name not in FAMILIES and name not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(engine_names())}; got {name!r}.")
    return name


def _unmeasured(candidate: str, request: Request) -> str | None:
    """Why `auto` does not take an engine that would serve: nobody has seen it be right and fast there yet."""
    if candidate == "triton" and request.device.type == "cuda" and (request.dtype == torch.float32 or request.dropout):
        return "was not yet measured on a GPU for float32 or dropout (engine='triton' takes them)"
    return None


def choose(name: str, request: Request) -> Choice:
    """The first engine of `name` that serves the request.

    Raises:
        ValueError: if none does, with the reason of each and one that would.
    """
    rejected: dict[str, str] = {}
    for candidate in FAMILIES.get(check_name(name), (name,)):
        reason = ENGINES[candidate].why_not(request)
        if reason is None and name == "auto":
            reason = _unmeasured(candidate, request)
        if reason is None:
            return Choice(ENGINES[candidate], rejected)
        rejected[candidate] = reason
    able = [e.name for e in ENGINES.values() if e.why_not(request) is None]
    reasons = "; ".join(f"{n} {r}" for n, r in rejected.items())
    raise ValueError(f"engine={name!r} cannot serve this call: {reasons}. Use engine={' or '.join(map(repr, able))}.")
