"""Work of a block that is not compiled, counted operator by operator: FLOPs of products, and bytes that kernels move.

A step is run under fake tensors, as memory is counted. Each operator is a kernel that reads its tensors and writes its
results once; views are none. Calls of attention and of recurrences are left out, which are priced by themselves.

Shape letters: L tokens of a rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lightning_dilated._compat import torch as compat
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.planning.counting import dry_run
from lightning_dilated.planning.counting.memory_tracker import Tape
from lightning_dilated.planning.counting.workspace import NAMES

if TYPE_CHECKING:
    from lightning_dilated.planning.counting.footprint import Subject

#: tokens of the steps that are counted; what does not grow with them, casts of weights, is a hundredth there
TOKENS = 1 << 16
#: products of fewer FLOPs a byte wait for memory, those of an adapter's rank among them: 700 TFLOP/s of 2.9 to 4.1 TB/s
RIDGE = 200
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


class Work(NamedTuple):
    """Of a token: FLOPs of products, and bytes that all other kernels read and write."""

    flops: float
    moved: float

    def seconds(self, flops: float, bandwidth: float) -> float:
        """At so many FLOP/s and bytes/s."""
        return self.flops / flops + self.moved / bandwidth


@dataclass(frozen=True)
class BlockWork:
    """Of a block: its forward, its backward, and what a recomputed forward repeats of it."""

    forward: Work
    backward: Work
    again: Work

    @classmethod
    def of(cls, subject: Subject) -> BlockWork:
        """Of the blocks of a model's first stack, run with everything saved and with blocks recomputed."""
        kept, recomputed = (_counted(subject, MemorySettings(policy)) for policy in ("none", "block"))
        backward = kept.work(("backward", 1))
        both = recomputed.work(("backward", 1))
        return cls(kept.work(("forward", 1)), backward, Work(both.flops - backward.flops, both.moved - backward.moved))


def _counted(subject: Subject, settings: MemorySettings) -> WorkTape:
    """A step of two blocks: the first one's backward may be less, where nothing before it is trained."""
    tape = WorkTape()
    make, batch = (lambda: subject.make(2)), (lambda: subject.batch(TOKENS))
    dry_run.step(make, batch, subject.precision, settings, tape=tape)
    return tape


class WorkTape(Tape):
    """Adds up the work of each part of a step."""

    def __init__(self) -> None:
        super().__init__()
        self._flops: Counter[tuple] = Counter()
        self._moved: Counter[tuple] = Counter()

    def work(self, part: tuple) -> Work:
        """Of a part, a token."""
        return Work(self._flops[part] / TOKENS, self._moved[part] / TOKENS)

    def _after(self, func: Any, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> Any:
        if _is_kernel(func):
            moved = sum(x.nbytes for x in (*inputs, *results))
            flops = _flops(func, inputs)
            if flops > RIDGE * moved:
                self._flops[self.part] += flops
            else:
                self._moved[self.part] += moved
        return super()._after(func, inputs, results)


def _is_kernel(func: Any) -> bool:
    """Whether an operator moves memory, and is not priced by itself."""
    ops = torch.ops.lightning_dilated
    if func in (ops.attention.default, ops.attention_backward.default) or func in NAMES:
        return False
    if "empty" in func.overloadpacket.__name__:
        return False
    return compat.changes_inputs(func) or not compat.returns_view(func)


def _flops(func: Any, inputs: Sequence[Tensor]) -> int:
    """Of a product of the last two of its tensors."""
    if func.overloadpacket.__name__ not in PRODUCTS:
        return 0
    left, right = inputs[-2:]
    return 2 * left.numel() * right.shape[-1]
