"""The registry of engines, and the choice of "auto" for a call.

The thresholds below were measured on an H200 (`benchmarks/results/2026-11-21_h200_speed.md`). For other machines,
change the entries. The argument `engine=` overrides all of them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch.nn.attention

from lightning_dilated import kernels
from lightning_dilated.attention.backends import cudnn_bands
from lightning_dilated.attention.backends.base import Engine, Request
from lightning_dilated.attention.backends.math import MATH
from lightning_dilated.attention.backends.sdpa import CPU_FLASH, CUDNN, FLASH
from lightning_dilated.attention.backends.triton import TRITON
from lightning_dilated.attention.backends.windows import with_windows

#: {compute capability: limit in FLOPs}. If the mean FLOPs of a block in both passes are below the limit, triton's
#: grouped launches are faster than a call of cuDNN per block. Such a call takes about 0.2 ms on the host in each pass
GROUPED_BELOW: dict[tuple[int, int], float] = {(9, 0): 1.0e11}
#: the limit for other compute capabilities, with which triton's grouped launches are never preferred
DEFAULT = 0.0
#: the same for shapes that change from call to call: the host takes about 30 ms to compile a cuDNN graph for a new
#: shape. With blocks at the limit, twelve layers of triton take about 30 ms longer than cuDNN on an H100
CHANGING_BELOW: dict[tuple[int, int], float] = {(9, 0): 5.0e12}
#: for keys from other ranks or chunks, {compute capability: limit}. Up to this number of (query, key) pairs in a head,
#: triton's forward, which updates the running result in place, is faster than cuDNN's forward and a merge
CHAINED_UP_TO: dict[tuple[int, int], float] = {(9, 0): 2.0**24}
#: the same limit for shapes that change from call to call; the backward uses it as well
CHANGING_UP_TO = 2.0**24

__all__ = [
    "ENGINES",
    "FAMILIES",
    "Choice",
    "Engine",
    "Request",
    "choose",
    "engine_names",
    "environment",
    "for_band",
    "for_rows",
    "triton_up_to",
]

_log = logging.getLogger(__name__)
#: all engines by name
ENGINES: dict[str, Engine] = {e.name: e for e in (CUDNN, FLASH, CPU_FLASH, TRITON, MATH)}
#: names of lists of engines; the first engine of the list that serves the call is used
FAMILIES: dict[str, tuple[str, ...]] = {
    "sdpa": ("cudnn", "flash", "cpu_flash"),
    "auto": ("cudnn", "flash", "cpu_flash", "triton", "math"),
}


@dataclass(frozen=True)
class Choice:
    """The engine chosen for a request, and the reasons why the engines before it in the list were rejected."""

    engine: Engine
    rejected: dict[str, str]

    @property
    def name(self) -> str:
        return self.engine.name

    def __str__(self) -> str:
        reasons = "; ".join(f"{name} {reason}" for name, reason in self.rejected.items())
        return f"{self.name} ({reasons})" if reasons else self.name


def environment(device: torch.device) -> tuple[object, ...]:
    """Return the settings outside the request that affect the choice of engine and executor, and that can change."""
    capability = kernels.capability(device) or (0, 0)
    limits = [table.get(capability, DEFAULT) for table in (GROUPED_BELOW, CHANGING_BELOW)]
    impl = torch.nn.attention.current_flash_attention_impl()
    return torch.are_deterministic_algorithms_enabled(), kernels.available(device), *limits, impl


def engine_names() -> list[str]:
    """Return all values of `engine=`."""
    return [*FAMILIES, *ENGINES]


def for_rows(engine: Engine, rows: int) -> Engine:
    """Return `engine`, or the math engine if a block has fewer query rows or key rows than `engine` supports."""
    return engine if rows >= engine.min_rows else MATH


def for_band(engine: Engine, request: Request) -> Engine:
    """Return `engine`, or an engine that supports bands if `engine` does not.

    On a CPU, `engine` computes windows in blocks. On a GPU, triton or math replaces `engine`, but with
    nvidia-cudnn-frontend, cuDNN computes long windows.
    """
    if engine.bands:
        return engine
    if request.device.type == "cpu":
        return with_windows(engine)
    other = MATH if TRITON.why_not(request) else TRITON
    return cudnn_bands.with_bands(engine, other) if engine is CUDNN and cudnn_bands.installed() else other


def check_name(name: str) -> str:
    """Return `name`.

    Raises:
        ValueError: if no engine or family has this name.
    """
    if name not in FAMILIES and name not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(engine_names())}; got {name!r}.")
    return name


def _candidates(name: str) -> tuple[str, ...]:
    """Return the names of a family's engines in order of preference; for an engine, only its own name.

    "flash" precedes cuDNN if the user activated a different flash attention in torch
    (`torch.nn.attention.activate_flash_attention_impl("FA3")`).
    """
    names = FAMILIES.get(check_name(name), (name,))
    if len(names) > 1 and torch.nn.attention.current_flash_attention_impl() is not None:
        names = ("flash", *(e for e in names if e != "flash"))
    return names


def _grouped(request: Request) -> str | None:
    """Return the reason to prefer triton's grouped launches to engines that are called block by block, or None."""
    capability = request.capability or kernels.capability(request.device)
    if capability is None:
        return None
    limit = (CHANGING_BELOW if request.changing else GROUPED_BELOW).get(capability, DEFAULT)
    if request.block_flops >= limit:
        return None
    return f"would run blocks of {request.block_flops:.1e} FLOPs one by one, and triton joins blocks below {limit:.1e}"


def triton_up_to(name: str, request: Request) -> tuple[float, float]:
    """Return (forward limit, backward limit): the pairs per head up to which triton computes keys from other ranks."""
    if name != "auto" or request.device.type != "cuda" or TRITON.why_not(request) is not None:
        return 0.0, 0.0
    if request.changing:
        return CHANGING_UP_TO, CHANGING_UP_TO
    capability = kernels.capability(request.device)
    return (0.0 if capability is None else CHAINED_UP_TO.get(capability, 0.0)), 0.0


#: kinds of calls for which the choice has been logged
_seen: set[tuple] = set()


def _log_choice(choice: Choice, request: Request) -> Choice:
    if torch.compiler.is_compiling():
        return choice
    kind = choice.name, request.dtype, request.device.type, request.head_dim
    if kind not in _seen:
        _seen.add(kind)
        dtype = str(request.dtype).removeprefix("torch.")
        _log.info("engine for %s, head dim %d, on %s: %s", dtype, request.head_dim, request.device.type, choice)
    return choice


def choose(name: str, request: Request, log: bool = True) -> Choice:
    """Return the first engine of `name` that serves the request.

    With `log`, log the choice of "auto" at level INFO, once for each kind of call.

    Raises:
        ValueError: if no engine of `name` serves it. The message lists reasons, and the engines that serve the request.
    """
    rejected, candidates = dict[str, str](), _candidates(name)
    if name == "auto" and (grouped := _grouped(request)) is not None and TRITON.why_not(request) is None:
        rejected, candidates = dict.fromkeys(("cudnn", "flash"), grouped), ("triton",)
    for candidate in candidates:
        reason = ENGINES[candidate].why_not(request)
        if reason is None:
            choice = Choice(ENGINES[candidate], rejected)
            return _log_choice(choice, request) if log and name == "auto" else choice
        rejected[candidate] = reason
    able = [e.name for e in ENGINES.values() if e.why_not(request) is None]
    reasons = "; ".join(f"{n} {r}" for n, r in rejected.items())
    raise ValueError(f"engine={name!r} cannot serve this call: {reasons}. Use engine={' or '.join(map(repr, able))}.")
