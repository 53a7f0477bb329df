"""What was measured: where the triton engine is faster than cuDNN's calls, block by block.

`benchmarks/results/2026-11-21_h200_speed.md` has the rows. Change an entry to suit another machine; `engine=` overrides all.

The registry of engines, and how `auto` picks one and says why.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from math import inf  # `math` is an engine here

import torch
import torch.nn.attention

from lightning_dilated import kernels
from lightning_dilated.attention.backends.base import Engine, Request
from lightning_dilated.attention.backends.math import MATH
from lightning_dilated.attention.backends.sdpa import CPU_FLASH, CUDNN, FLASH
from lightning_dilated.attention.backends.triton import TRITON

#: FLOPs of forward and backward of a block, on the mean of a call, below which the host's work for one call of cuDNN (about
#: 0.2 ms each way) takes longer than triton's kernels do; by compute capability
GROUPED_BELOW: dict[tuple[int, int], float] = {(9, 0): 1.0e11}
#: of any other
DEFAULT = 0.0
#: (query, key) pairs of a head up to which triton's forward, which goes on from the running result, is faster than cuDNN's
#: and a merge: what arrives from other ranks is merged so
CHAINED_UP_TO: dict[tuple[int, int], float] = {(9, 0): 2.0**24}


__all__ = ["ENGINES", "FAMILIES", "Choice", "Engine", "Request", "chained_up_to", "choose", "engine_names", "for_rows"]

_log = logging.getLogger(__name__)
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


def _first_to_ask(name: str, request: Request) -> tuple[str, ...]:
    """The engines of a name, in the order in which they are asked.

    Where a user has activated another flash attention in torch (`torch.nn.attention.activate_flash_attention_impl("FA3")`,
    torch 2.11), that is taken before cuDNN.
    """
    found = FAMILIES.get(check_name(name), (name,))
    active = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    if len(found) > 1 and active is not None:
        found = ("flash", *(e for e in found if e != "flash"))
    return found


def _grouped(request: Request) -> str | None:
    """Why the triton engine's grouped launch is taken before engines that are called block by block, if it is."""
    if request.block_flops == inf or (found := kernels.capability(request.device)) is None:
        return None
    limit = GROUPED_BELOW.get(found, DEFAULT)
    if request.block_flops >= limit:
        return None
    return f"would be called for blocks of {request.block_flops:.1e} FLOPs, and triton runs those below {limit:.1e} at once"


def chained_up_to(name: str, request: Request) -> float:
    """(query, key) pairs of a head up to which "auto" merges what arrives from other ranks in triton's forward itself."""
    if name != "auto" or request.device.type != "cuda" or TRITON.why_not(request) is not None:
        return 0.0
    found = kernels.capability(request.device)
    return 0.0 if found is None else CHAINED_UP_TO.get(found, 0.0)


def _said(choice: Choice, request: Request) -> Choice:
    if not torch.compiler.is_compiling():
        _say(choice, request.dtype, request.device.type, request.head_dim)
    return choice


_seen: set[tuple] = set()


def _say(choice: Choice, dtype: torch.dtype, device: str, head_dim: int) -> None:
    """Log what auto picked, once for each kind of call."""
    if (kind := (choice.name, dtype, device, head_dim)) not in _seen:
        _seen.add(kind)
        _log.info("engine for %s, head dim %d, on %s: %s", str(dtype).removeprefix("torch."), head_dim, device, choice)


def choose(name: str, request: Request, say: bool = True) -> Choice:
    """The first engine of `name` that serves the request; what "auto" picks is logged once, at level INFO, if it `say`s so.

    Raises:
        ValueError: if none does, with the reason of each and one that would.
    """
    rejected: dict[str, str] = {}
    if name == "auto" and (reason := _grouped(request)) is not None and TRITON.why_not(request) is None:
        choice = Choice(ENGINES["triton"], dict.fromkeys(("cudnn", "flash"), reason))
        return _said(choice, request) if say else choice
    for candidate in _first_to_ask(name, request):
        reason = ENGINES[candidate].why_not(request)
        if reason is None:
            choice = Choice(ENGINES[candidate], rejected)
            return _said(choice, request) if say and name == "auto" else choice
        rejected[candidate] = reason
    able = [e.name for e in ENGINES.values() if e.why_not(request) is None]
    reasons = "; ".join(f"{n} {r}" for n, r in rejected.items())
    raise ValueError(f"engine={name!r} cannot serve this call: {reasons}. Use engine={' or '.join(map(repr, able))}.")
