"""Tape: a meter whose peaks are noted piece by piece, a piece for each part of a step and for each call of the op."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dilated.planning.counting.memory_tracker import Meter

#: names of the op's two passes in a piece
FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Piece:
    """What was held in a piece of a step.

    Attributes:
        part: of the step, such as ("forward", 0) for the first block's.
        peak: the most bytes at once, without what the op holds beside its results.
        static: bytes of parameters and gradients when it began.
        op: FORWARD or BACKWARD where the piece is one call of the op, "" elsewhere.
        heads, dtype: query heads of that call, and the dtype of q.
    """

    part: tuple
    peak: int
    static: int
    op: str = ""
    heads: int = 0
    dtype: torch.dtype | None = None


class Tape(Meter):
    """Counts as `Meter` does and notes `pieces`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(labels=self._after, **options)
        self.pieces: list[Piece] = []
        self.part: tuple = ("before",)
        self.parameters: Sequence[nn.Parameter] = ()
        #: bytes of the hidden states that go into the first block of a stack, by the stack's name
        self.hidden: dict[str, int] = {}
        #: whether the backward has begun
        self.returning = False
        self._static = 0
        self._paused = False

    def enter(self, *part: Any) -> None:
        """End the piece; what follows is a part of the step, or goes on with the last one."""
        self._cut()
        self.part = part or self.part

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run` as a piece of its own, so that what a loop over tiles holds is told from what is held around it."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.enter()
            try:
                return run(*args, **kwargs)
            finally:
                self.enter()

        return call

    def _cut(self, op: str = "", q: Tensor | None = None) -> None:
        of = (0, None) if q is None else (q.shape[2], q.dtype)
        self.pieces.append(Piece(self.part, self.peak, self._static, op, *of))
        self._static = sum(x.nbytes for p in self.parameters for x in (p, p.grad) if x is not None)
        self.reset_peak()

    def _after(self, func: Any, given: Sequence[Tensor], made: Sequence[Tensor]) -> Iterable[tuple[Tensor, str]]:
        ops = torch.ops.lightning_dilated
        if func in (ops.attention.default, ops.attention_backward.default):
            forward = func is ops.attention.default
            # before it at most as much as with its results, where they made the peak
            self.pieces.append(Piece(self.part, self.peak, self._static))
            self.peak, q = self.live, given[0 if forward else 1]
            self._cut(FORWARD if forward else BACKWARD, q)
        return ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, unless paused."""
        if func is torch.ops.prim.device.default:  # asked very often
            return args[0].fake_device
        if self._paused:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within, results are not counted, until `count` is told of them."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were made while paused."""
        with self._lock:
            for x in tensors:
                self._see(x, True)
