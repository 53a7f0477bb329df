"""The table that tells the combining kernels where each output row's parts lie, made from blocks; integers only.

Shape letters: H heads.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING

import torch

from lightning_dilated.pattern.rows import Block
from lightning_dilated.transfer import send

if TYPE_CHECKING:
    from lightning_dilated.kernels.combine import Entries


@functools.lru_cache(maxsize=4096)
def entries(
    found: tuple[Block, ...], heads: int, kv: bool, device: torch.device, start: int, length: int, stream: int = 0
) -> Entries:
    """The table of the rows of blocks at start..start + length by output head (kv head with `kv`).

    One for each stream: its memory, when it is let go, is taken again by what runs after its last reader.
    """
    from lightning_dilated.kernels.combine import COLUMNS, Entries

    rows = rows_by_head(found, heads, kv)
    step = _step(found, length)
    classes = [
        [(*x, step // x[6] * (step % x[6] == 0)) for x in of_head if _meets(x, start + residue, step)]
        for residue in range(step)
        for of_head in rows
    ]
    begins = list(itertools.accumulate(map(len, classes), initial=0))
    tensor = lambda x: send(torch.tensor(x, dtype=torch.int32, device="cpu"), device)  # noqa: E731
    table = tensor([x for c in classes for x in c]).reshape(-1, COLUMNS)
    several = [i for i, c in enumerate(classes) if len(c) > 1]
    return Entries(table, tensor(begins), tensor(several), tensor(range(len(classes))), step)


def rows_by_head(found: tuple[Block, ...], heads: int, kv: bool) -> list[list[tuple[int, ...]]]:
    """By output head (kv head with `kv`): (block, head in it, first position, segments, width, rows, rate) of its blocks."""
    rows: list[list[tuple[int, ...]]] = [[] for _ in range(heads)]
    for number, b in enumerate(found):
        for j in range(b.heads):
            head = b.kv_head + j * b.kv_head_step if kv else b.head + j * b.head_step
            first = b.first + j * b.position_step
            # one segment may be wider than these positions, and than 32 bits
            width = b.segment_stride if b.segments > 1 else first + b.rows * rate_of(b)
            rows[head].append((number, j, first, b.segments, width, b.rows, rate_of(b)))
    return rows


def rate_of(b: Block) -> int:
    """Positions between a block's rows; any where it has but one."""
    return b.row_stride if b.rows > 1 else 1


def _step(found: tuple[Block, ...], length: int) -> int:
    """A multiple of most rates at which a program's rows are still in one segment, mostly."""
    from lightning_dilated.kernels.combine import SUM

    step, widths = 1, [b.segment_stride for b in found if b.segments > 1]
    for rate in sorted({b.row_stride for b in found}):
        together = math.lcm(step, rate)
        step = together if together <= 64 and together * SUM[0] <= min([length, *widths]) else step
    return step


def _meets(entry: tuple[int, ...], position: int, step: int) -> bool:
    """Whether an entry can have rows at position, position + step, ..."""
    _, _, first, segments, width, _, rate = entry
    together = math.gcd(rate, step) if segments == 1 else math.gcd(rate, step, width)
    return (position - first) % together == 0
