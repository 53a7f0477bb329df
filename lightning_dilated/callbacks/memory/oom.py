"""What to tell of an allocation that failed: in which phase, how much was missing, what held the memory, what would help."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

#: what to try where nothing better is known, the cheapest first
GENERAL = (
    "What makes room, the cheapest first: ActivationRecompute('attention-kept'), then ActivationRecompute('block'), which "
    "keeps a block's input only; the feed-forward and the loss over tiles of tokens, and attention over chunks of heads, "
    "where the model has such settings; offload of activations or optimizer states to the host; strategy="
    "'ring_dilated_fsdp', which deals parameters, gradients and optimizer states to the ranks; more GPUs to a sequence."
)
_UNITS = {"bytes": 1, "byte": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"(\d+(?:\.\d+)?) (bytes|byte|KiB|MiB|GiB|TiB)"
_FACTS = {
    "asked": rf"[Tt]ried to allocate {_SIZE}",
    "total": rf"total capacity of {_SIZE}",
    "free": rf"of which {_SIZE} is free",
    "allowed": rf"{_SIZE} allowed",
    "process": rf"this process has {_SIZE} memory in use",
    "allocated": rf"{_SIZE} is allocated by PyTorch",
    "unused": rf"{_SIZE} is reserved by PyTorch but unallocated",
}


@dataclass(frozen=True)
class Shortage:
    """Bytes that an error names, None where it does not: asked for, of the device in total, free, allowed to the process,
    used by it, allocated by torch, and reserved by torch but unused."""

    asked: int | None = None
    total: int | None = None
    free: int | None = None
    allowed: int | None = None
    process: int | None = None
    allocated: int | None = None
    unused: int | None = None

    @property
    def room(self) -> int | None:
        """Bytes that torch could still have had: what is free, but no more than the process is allowed."""
        if self.free is None or self.allowed is None or self.allocated is None:
            return self.free
        return max(0, min(self.free, self.allowed - self.allocated - (self.unused or 0)))

    @property
    def missing(self) -> int | None:
        """Bytes by which there was too little, at least; None where that is not said, or was not so."""
        if self.asked is None or self.room is None or self.asked <= self.room:
            return None
        return self.asked - self.room


def find_shortage(error: BaseException) -> BaseException | None:
    """The error of an allocation that failed: this one, or one that it came from."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        if isinstance(current, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(current):
            return current
        seen.append(current)
        current = current.__cause__ or current.__context__
    return None


def parse(text: str) -> Shortage:
    """The bytes that the message of torch's allocator for GPUs or for the CPU names; what it does not name is None."""
    found = {}
    for name, pattern in _FACTS.items():
        match = re.search(pattern, text)
        found[name] = None if match is None else round(float(match[1]) * _UNITS[match[2]])
    return Shortage(**found)


def in_words(size: float) -> str:
    """Bytes as torch writes them."""
    for name in ("GiB", "MiB", "KiB"):
        if abs(size) >= _UNITS[name]:
            return f"{size / _UNITS[name]:.2f} {name}"
    return f"{size:.0f} bytes"


def report(rank: int, phase: str, step: int, text: str, held: Mapping[str, int], advice: str | None) -> str:
    """The message.

    Args:
        phase: what was computed, in words.
        text: torch's message.
        held: bytes by kind.
        advice: what would make it fit, where that is known.
    """
    short = parse(text)
    asked = "an allocation" if short.asked is None else f"an allocation of {in_words(short.asked)}"
    lines = [
        f"MemoryProfiler: rank {rank} ran out of memory in step {step}, {phase}: {asked} failed. {_missing(short)}"
    ]
    kinds = [f"{kind} {in_words(n)}" for kind, n in held.items() if n]
    if kinds:
        lines.append(f"Held by {', '.join(kinds)}.")
    return "\n".join([*lines, advice or GENERAL])


def _missing(short: Shortage) -> str:
    """How much there was, and how much was missing."""
    told = []
    if short.room is not None:
        of = "" if short.total is None else f" of {in_words(short.total)}"
        told.append(f"{in_words(short.room)}{of} was free")
    if short.missing is not None:
        told.append(f"{in_words(short.missing)} at least was missing")
    if short.unused:
        told.append(f"torch held {in_words(short.unused)} in pieces that nothing used")
    said = f"{'; '.join(told)}." if told else ""
    if short.asked is not None and short.unused and short.asked <= short.unused + (short.room or 0):
        said += " In one piece that would have been enough: set PYTORCH_ALLOC_CONF=expandable_segments:True."
    return said


def advise(trainer: Any, pl_module: Any) -> str | None:
    """What the planner would change about this run; None where it has nothing to say."""
    try:
        from lightning_dilated.planning.advice import advise as planned
    except ImportError:
        return None
    try:
        return planned(trainer, pl_module)
    except Exception as error:  # the run is ending already: its own error is the one to show
        return f"{GENERAL} (The planner could not say more: {type(error).__name__}: {error})"
