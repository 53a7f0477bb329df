"""The table of a grouped launch: every block of every document of a call is one row, and programs find their tile in it.

A block of G samples and segments, J heads and n rows has its results in one buffer of rows: row i of head j of group g is
row offset + (g * J + j) * n + i. Its rows of a (B, N, H, D) tensor lie at position first + segment * stride + j * position
step + i * rate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_dilated.kernels.tiles import fold

#: columns of the table of jobs, in this order (int64; 16 of them are one line of cache)
JOB = (
    "sample", "segments", "first", "segment_stride", "rows", "rate", "heads", "head", "head_step", "kv_head",
    "kv_head_step", "position_step", "offset", "origin", "branch", "pads",
)  # fmt: skip
#: columns of the table of spans: first sample, first position, length, step of a program's rows, first tile, tiles a sample
SPAN = ("sample", "start", "length", "step", "first_tile", "tiles")
#: rows of a program of the kernel that prepares rows
PREPARED = 64


@dataclass(frozen=True)
class Grid:
    """The programs of a launch over tiles of so many rows.

    Attributes:
        programs: their number.
        job: (programs,) int32, the job of each.
        first: (jobs,) int32, the first program of each job.
    """

    programs: int
    job: Tensor
    first: Tensor


@dataclass(frozen=True)
class Outputs:
    """Which rows of the buffer make an output row.

    Attributes:
        entries: (entries, 7) int32 by span and output head: job, head in it, first position, segments, width, rows, rate.
        starts: (spans * heads + 1,) int32, where the entries of each span and head begin.
    """

    entries: Tensor
    starts: Tensor


@dataclass(frozen=True)
class Work:
    """All that the kernels of a call need to know of its documents and pattern.

    Attributes:
        rows: rows of the buffer of all jobs.
        positions: of all spans.
        pads: whether a job has zero pads that take mass.
        rate: the largest of a job.
        jobs: (jobs, 16) int64, columns as in `JOB`.
        grids: by tile size.
        tokens: output rows of a program that combines.
        tiles: programs that combine, for each head.
        spans: (spans, 6) int64, columns as in `SPAN`.
        span: (tiles,) int32, the span of each tile.
        queries, keys: entries by query head, and by kv head.
        sent: on a GPU the stream by which the tables come, and when they are there.
    """

    rows: int
    positions: int
    pads: bool
    rate: int
    jobs: Tensor
    grids: dict[int, Grid]
    tokens: int
    tiles: int
    spans: Tensor
    span: Tensor
    queries: Outputs
    keys: Outputs
    sent: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None

    def wait(self) -> None:
        """Let the current stream read the tables: it waits for them, and their memory for it."""
        if self.sent is None or (here := torch.cuda.current_stream(self.jobs.device)) == self.sent[0]:
            return
        here.wait_event(self.sent[1])
        outputs = [x for o in (self.queries, self.keys) for x in (o.entries, o.starts)]
        grids = [x for g in self.grids.values() for x in (g.job, g.first)]
        for x in (self.jobs, self.spans, self.span, *outputs, *grids):
            x.record_stream(here)

    def far(self, *tensors: Tensor) -> bool:
        """Whether neighbouring rows of a job can be 2**31 elements apart in one of (B, N, H, D) tensors."""
        return self.rate * max(x.stride(1) for x in tensors) >= 2**31

    def place(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """The arguments by which programs of tiles of `size` rows find their place."""
        return self.jobs, self.grids[size].job, self.grids[size].first


@dataclass(frozen=True)
class GroupedDrop:
    """Attention dropout of a call.

    Attributes:
        states: (branches,) int64, the hash's state after seed and branch.
        threshold: pairs whose hash is below are dropped.
        keep: 1 / (1 - p).
        first_head: number of the tensors' head 0.
    """

    states: Tensor
    threshold: int
    keep: float
    first_head: int


@triton.jit
def find(jobs, job_of, first_of, TILE: tl.constexpr, FAR: tl.constexpr):
    """(job's row of the table, tile, rows, rate, first row of the buffer, sample, position, head, kv head) of a program.

    The rate is in 32 bits unless rows are FAR apart: its products with strides take registers in the inner loops.
    """
    number = tl.load(job_of + tl.program_id(0))
    job = jobs + number.to(tl.int64) * 16
    n, heads = tl.load(job + 4).to(tl.int32), tl.load(job + 6).to(tl.int32)
    segments = tl.load(job + 1).to(tl.int32)
    at, tiles = tl.program_id(0) - tl.load(first_of + number), tl.cdiv(n, TILE)
    group, j = (at // tiles // heads).to(tl.int64), (at // tiles % heads).to(tl.int64)
    position = tl.load(job + 2) + group % segments * tl.load(job + 3) + j * tl.load(job + 11)
    head = tl.load(job + 7) + j * tl.load(job + 8)
    kv_head = tl.load(job + 9) + j * tl.load(job + 10)
    row = tl.load(job + 12) + (group * heads + j) * n
    rate = tl.load(job + 5)
    if not FAR:
        rate = rate.to(tl.int32)
    return job, at % tiles, n, rate, row, tl.load(job) + group // segments, position, head, kv_head


@triton.jit
def drop_state(states, job, sample, head):
    """The hash's state, (1,) uint32, after seed, branch, sample and head."""
    start = tl.full([1], 0, tl.int64) + tl.load(states + tl.load(job + 14))
    return fold(fold(start.to(tl.uint32), sample), head)


def dropping(drop: GroupedDrop | None, positions: Tensor | None, like: Tensor) -> dict[str, object]:
    """The kernels' arguments of dropout; without any, stand-ins that are not read."""
    if drop is None:
        return {"states": like, "threshold": 0, "keep": 1.0, "first_head": 0, "positions": like, "DROP": False}
    given = {"states": drop.states, "threshold": drop.threshold, "keep": drop.keep, "first_head": drop.first_head}
    return {**given, "positions": positions, "DROP": True}


@triton.jit
def _positions(positions, jobs, job_of, first_of, ROWS: tl.constexpr):
    """The global position of each row of the buffer."""
    job, tile, n, rate, row, _, position, _, _ = find(jobs, job_of, first_of, ROWS, False)
    i = tile * ROWS + tl.arange(0, ROWS)
    tl.store(positions + row + i, tl.load(job + 13) + position + i * rate, mask=i < n)


def positions_of(work: Work, drop: GroupedDrop | None) -> Tensor | None:
    """(rows,) int64 global positions, by which pairs are dropped; None without dropout."""
    if drop is None:
        return None
    out = torch.empty(work.rows, dtype=torch.int64, device=work.jobs.device)
    if work.rows:
        _positions[(work.grids[PREPARED].programs,)](out, *work.place(PREPARED), ROWS=PREPARED)
    return out
