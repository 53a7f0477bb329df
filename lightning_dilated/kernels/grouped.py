"""Flash attention over all blocks of all documents of a call in one launch, forward and backward, from a table of jobs.

A job is one block: G samples and segments, J heads, n rows. Row i of head j of group g is read from (B, N, H, D)
tensors at position first + segment * segment_stride + j * position_step + i * rate. Its results are written to row
offset + (g * J + j) * n + i of a buffer that all jobs share.
With lengths on the device, the table is for samples of N tokens, and programs skip rows beyond a sample's length.
With bounds of documents on the device, a job is all blocks of one head and branch in a row of N tokens, and a program
finds its document by bisection. There are enough programs for any bounds; programs without rows return immediately.
Shape letters: B batch, N tokens, H query heads, K kv heads, D head dim, n rows of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_dilated.kernels import dense
from lightning_dilated.kernels.tiles import (
    LN2,
    LOG2E,
    attend,
    block_dim,
    fold,
    key_gradients,
    precision,
    query_gradient,
    read,
)

#: columns of the table of jobs, in this order (int64; the 16 fill one cache line)
JOB = (
    "sample", "segments", "first", "segment_stride", "rows", "rate", "heads", "head", "head_step", "kv_head",
    "kv_head_step", "position_step", "offset", "origin", "branch", "pads",
)  # fmt: skip
#: columns of the table for bounds on the device: N, t, o, w, (o - t) mod r, r, _, head, numbers, kv head, _, _, first
#: row of the buffer, 0, branch, segment length (at most N). Segments are numbered, and a segment's number is added to its
#: rows of the buffer, so that no two segments share a row. A row of N tokens has N / w numbers, and each document has
#: `numbers` more; 0 means no numbering. w and r are at most N + t, because larger values give the same positions
DOCUMENT_JOB = (
    "tokens", "shift", "residue", "width", "first_residue", "rate", "", "head", "numbers", "kv_head", "", "", "offset",
    "origin", "branch", "pads",
)  # fmt: skip
#: rows of a program in the kernels that prepare delta, the log-sum-exp and the positions of rows
PREPARED = 64
#: the width of a job without a window, longer than any window
ENDLESS = 2**30
#: a divisor larger than every position: the quotient is 0
NONE = 2**31 - 1
#: {columns of a tile: (query rows, key rows, warps, stages)} that differ from `dense`, because finding the job also
#: needs registers. FORWARD and OVER_ROWS serve calls that are not causal; they are the best of ten tried on an H200
OVER_KEYS = {128: (32, 64, 4, 2)}
FORWARD = {64: (128, 64, 8, 3)}
OVER_ROWS = {64: (128, 64, 8, 3)}


def config(dtype: torch.dtype, dim: int, causal: bool) -> tuple[int, int, int, int]:
    """Return (query rows, key rows, warps, stages) of the forward."""
    configs = {} if causal or dtype == torch.float32 else FORWARD
    return configs.get(block_dim(dim)) or dense.config(dtype, dim)


def backward_config(dtype: torch.dtype, dim: int, causal: bool, over_keys: bool) -> tuple[int, int, int, int]:
    """Return (query rows, key rows, warps, stages) of the backward over keys, or over query rows."""
    configs = {} if dtype == torch.float32 else OVER_KEYS if over_keys else {} if causal else OVER_ROWS
    return configs.get(block_dim(dim)) or dense.backward_config(dtype, dim, causal, over_keys)


@dataclass(frozen=True)
class Grid:
    """The programs of a launch, for tiles of a given number of rows.

    Attributes:
        programs: number of programs.
        job: (programs,) int32, the job of each program.
        first: (jobs,) int32, each job's first program; with bounds of documents (jobs, 4), followed by its `slots`.
    """

    programs: int
    job: Tensor
    first: Tensor


@dataclass(frozen=True)
class Outputs:
    """The table of the buffer's rows that contribute to each output row.

    Attributes:
        entries: (entries, 7) int32, sorted by span and output head. The columns: job, head in the job, first position,
            segments, width, rows, rate.
        starts: (spans * heads + 1,) int32, the first entry of each span and head.
    """

    entries: Tensor
    starts: Tensor


@dataclass(frozen=True)
class Work:
    """The tables of a call, built from its documents and its pattern.

    Attributes:
        rows: number of rows of the buffer, for all jobs.
        positions: number of positions of all spans.
        pads: whether any job has zero pads that get softmax weight.
        rate: the largest dilation rate of a job.
        windows: (jobs,) int32, the width of each job's window in rows, or `ENDLESS`; None if no job has a window.
        jobs: (jobs, 16) int64 with the columns of `JOB`; with lengths on the device, the last column is the branch's
            segment length (at most N). With bounds of documents, the columns of `DOCUMENT_JOB`.
        grids: the programs, by rows of a tile.
        tokens: output rows of a program that combines results.
        tiles: number of programs that combine results, for each head.
        spans: (spans, 6) int64: first sample, first position, length, step between a program's rows, first tile, tiles
            of a sample.
        span: (tiles,) int32, the span of each tile.
        queries, keys: the entries by query head and by kv head.
        sent: on a GPU, the stream that copied the tables and the event after the copy.
        bits: number of bits of a document's index, if 2**bits + 1 bounds of documents are on the device; else 0.
    """

    rows: int
    positions: int
    pads: bool
    rate: int
    windows: Tensor | None
    jobs: Tensor
    grids: dict[int, Grid]
    tokens: int
    tiles: int
    spans: Tensor
    span: Tensor
    queries: Outputs
    keys: Outputs
    sent: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None
    bits: int = 0

    def wait(self) -> None:
        """Make the current stream wait for the tables, and keep their memory until this stream has read them."""
        if self.sent is None or (stream := torch.cuda.current_stream(self.jobs.device)) == self.sent[0]:
            return
        stream.wait_event(self.sent[1])
        outputs = [x for o in (self.queries, self.keys) for x in (o.entries, o.starts)]
        grids = [x for g in self.grids.values() for x in (g.job, g.first)]
        windows = [] if self.windows is None else [self.windows]
        for x in (*windows, self.jobs, self.spans, self.span, *outputs, *grids):
            x.record_stream(stream)

    def far(self, *tensors: Tensor) -> bool:
        """Return whether consecutive rows of a job can be 2**31 elements apart in one of the (B, N, H, D) tensors."""
        return self.rate * max(x.stride(1) for x in tensors) >= 2**31

    def window_arguments(self) -> dict[str, object]:
        """Return the kernels' arguments for windows; without windows, a placeholder that is not read."""
        return {"windows": self.jobs if self.windows is None else self.windows, "BAND": self.windows is not None}

    def place(self, size: int, lengths: Tensor | None) -> tuple[Tensor, ...]:
        """Return the arguments for `_find` with tiles of `size` rows; the last argument is not read without lengths."""
        return self.jobs, self.grids[size].job, self.grids[size].first, self.jobs if lengths is None else lengths


@dataclass(frozen=True)
class GroupedDrop:
    """Attention dropout of a call.

    Attributes:
        states: (branches,) int64, the hash of seed and branch.
        threshold: pairs with a smaller hash are dropped.
        keep: 1 / (1 - p).
        first_head: global index of the tensors' head 0.
    """

    states: Tensor
    threshold: int
    keep: float
    first_head: int


def slots(width: int, shift: int, rate: int, tile: int, tokens: int) -> tuple[int, int, int]:
    """Return (a, b, c): documents share no tile if document d begins at tile bounds[d] // a + bounds[d] // b + c * d.

    The job has segments of `width`, and tiles of `tile` rows. All documents are within a row of N = `tokens`.
    """
    positions = rate * tile  # positions that a tile spans
    if width - shift >= tokens or (width % positions == 0 and shift % positions == 0):
        return positions, NONE, 1  # ceil(L / positions) tiles for a document of L tokens
    if width <= positions:
        return width, NONE, 2 if shift else 1  # a tile for each segment
    return positions, width, 3


@triton.jit
def bound(bounds, i, tokens):
    """Return bound i of the documents, clamped to the row, as a 32-bit integer."""
    return tl.minimum(tl.maximum(tl.load(bounds + i), 0), tokens)


@triton.jit
def _find_in_document(jobs, job_of, first_of, bounds, TILE: tl.constexpr, FAR: tl.constexpr, BITS: tl.constexpr):
    """Return the results of `_find` for 2**BITS + 1 bounds of documents on the device."""
    number = tl.load(job_of + tl.program_id(0))
    job, slot = jobs + number.to(tl.int64) * 16, first_of + number * 4
    at, a, b, c = tl.program_id(0) - tl.load(slot), tl.load(slot + 1), tl.load(slot + 2), tl.load(slot + 3)
    tokens, width, shift = tl.load(job).to(tl.int32), tl.load(job + 3).to(tl.int32), tl.load(job + 1).to(tl.int32)
    rate = tl.load(job + 5)
    document = at * 0
    for bit in tl.static_range(BITS):
        later = document + (1 << (BITS - 1 - bit))
        begin = bound(bounds, later, tokens)
        document = tl.where(begin // a + begin // b + c * later <= at, later, document)
    start, stop = bound(bounds, document, tokens), bound(bounds, document + 1, tokens)
    at -= start // a + start // b + c * document
    step = rate.to(tl.int32)
    initial = tl.cdiv(tl.cdiv(tl.minimum(width - shift, tl.maximum(stop - start, 0)), step), TILE)
    each = tl.cdiv(tl.cdiv(width, step), TILE)
    segment, tile, residue = 0 * at, at, tl.load(job + 4)
    if at >= initial:
        segment, tile, residue = 1 + (at - initial) // each, (at - initial) % each, tl.load(job + 2)
    first = start.to(tl.int64) - shift + segment.to(tl.int64) * width  # index 0 of the segment
    position = tl.maximum(first, start.to(tl.int64)) + residue
    left = tl.minimum(first + width, stop.to(tl.int64)) - position
    n = tl.maximum((left + rate - 1) // rate, 0).to(tl.int32)
    tiles = tl.cdiv(n, TILE)
    if (tile >= tiles) | (tile < 0):  # these bounds do not need this slot
        n, tile, tiles = 0 * n, 0 * tile, 0 * tiles + 1
    row = tl.load(job + 12) + position // rate
    numbers = tl.load(job + 8)
    if numbers > 0:
        row += start // width + document * numbers + segment
    extent = (stop - start).to(tl.int64)
    head, kv_head = tl.load(job + 7), tl.load(job + 9)
    if not FAR:
        rate = rate.to(tl.int32)
    return job, tile, tiles, n, rate, row, head * 0, position, head, kv_head, extent


@triton.jit
def _find(
    jobs, job_of, first_of, lengths, TILE: tl.constexpr, FAR: tl.constexpr, LENGTHS: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """Return a program's (job's row of the table, tile, tiles, rows, rate, first row of the buffer, sample, position,
    head, kv head, tokens of the sample or document).

    The rate has 32 bits unless rows are FAR apart, because its products with strides need registers in the inner loops.
    With LENGTHS, there may be fewer rows than the tiles can hold, or none. Without LENGTHS, the tokens are 0. With
    BITS, `lengths` are the bounds of documents.
    """
    if BITS:
        return _find_in_document(jobs, job_of, first_of, lengths, TILE, FAR, BITS)
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
    sample, rate = tl.load(job) + group // segments, tl.load(job + 5)
    extent = sample * 0
    if LENGTHS:
        extent = tl.load(lengths + sample).to(tl.int64)
        left = extent - position
        n = tl.minimum(tl.maximum((left + rate - 1) // rate, 0), n.to(tl.int64)).to(tl.int32)
    if not FAR:
        rate = rate.to(tl.int32)
    return job, at % tiles, tiles, n, rate, row, sample, position, head, kv_head, extent


@triton.jit
def _window(windows, job_of, CAUSAL: tl.constexpr, BAND: tl.constexpr):
    """Return (lower, upper) of the window in a program's job: query row i sees key rows i + lower to i + upper."""
    lower, upper = 0, 0
    if BAND:
        width = tl.load(windows + tl.load(job_of + tl.program_id(0)))
        lower = 1 - width
        if not CAUSAL:
            upper = width - 1
    return lower, upper


@triton.jit
def _hash_state(states, job, sample, head):
    """Return the dropout hash of seed, branch, sample and head, (1,) uint32."""
    start = tl.full([1], 0, tl.int64) + tl.load(states + tl.load(job + 14))
    return fold(fold(start.to(tl.uint32), sample), head)


def _drop_arguments(drop: GroupedDrop | None, positions: Tensor | None, q: Tensor) -> dict[str, object]:
    """Return the kernels' arguments for dropout; without dropout, placeholders that are not read."""
    if drop is None:
        return {"states": q, "threshold": 0, "keep": 1.0, "first_head": 0, "positions": q, "DROP": False}
    numbers = {"threshold": drop.threshold, "keep": drop.keep, "first_head": drop.first_head}
    return {"states": drop.states, **numbers, "positions": positions, "DROP": True}


@triton.jit
def _positions(positions, jobs, job_of, first_of, bounds, BITS: tl.constexpr, ROWS: tl.constexpr):
    """Write the global position of each row of the buffer."""
    job, tile, _, n, rate, row, _, position, _, _, _ = _find(jobs, job_of, first_of, bounds, ROWS, False, False, BITS)
    i = tile * ROWS + tl.arange(0, ROWS)
    tl.store(positions + row + i, tl.load(job + 13) + position + i * rate, mask=i < n)


def _positions_of(work: Work, drop: GroupedDrop | None, lengths: Tensor | None) -> Tensor | None:
    """Return (rows,) int64 global positions for the dropout hash; None without dropout."""
    if drop is None:
        return None
    out = torch.empty(work.rows, dtype=torch.int64, device=work.jobs.device)
    if work.rows:
        place = work.place(PREPARED, lengths)
        _positions[(work.grids[PREPARED].programs,)](out, *place, BITS=work.bits, ROWS=PREPARED)
    return out


@triton.jit(do_not_specialize=["threshold", "first_head"])
def _grouped_forward(
    out, lse, q, q_sb, q_sn, q_sh, k, k_sb, k_sn, k_sh, v, v_sb, v_sn, v_sh, jobs, job_of, first_of,
    lengths, scale, states, threshold, keep, first_head, positions, windows,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, PADS: tl.constexpr, DROP: tl.constexpr, FAR: tl.constexpr,
    LENGTHS: tl.constexpr, BITS: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    job, tile, tiles, n, rate, row, sample, position, head, kv_head, extent = _find(
        jobs, job_of, first_of, lengths, ROWS, FAR, LENGTHS, BITS
    )
    if CAUSAL:
        tile = tiles - 1 - tile  # tiles with most keys first
    if LENGTHS and tile * ROWS >= n:
        return
    i, column = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    query = read(q + sample * q_sb + position * q_sn + head * q_sh, i, rate * q_sn, column, n, DIM, BLOCK, False)
    k += sample * k_sb + position * k_sn + kv_head * k_sh
    v += sample * v_sb + position * v_sn + kv_head * v_sh
    k_sn, v_sn = rate * k_sn, rate * v_sn
    row_state = tl.zeros([ROWS], tl.uint32)
    if DROP:
        hash_state = _hash_state(states, job, sample, head + first_head)
        row_state = fold(hash_state, tl.load(job + 13) + position + i * rate)
        positions += row
    lower, upper = _window(windows, job_of, CAUSAL, BAND)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc, most, total = attend(
        acc, most, total, query, k, v, k_sn, v_sn, i, tile, n, lower, upper, scale, row_state, positions, threshold,
        CAUSAL, BAND, DROP, PRECISION, ROWS, KEYS, DIM, BLOCK,
    )  # fmt: skip
    if PADS:  # zero keys with zero values: scores of 0
        if LENGTHS:  # column 15 is the segment length; a shorter sample is one segment
            width = tl.minimum(tl.load(job + 15), extent)
            pads = ((width + rate - 1) // rate - n).to(tl.float32)
        else:
            pads = tl.load(job + 15).to(tl.float32)
        top = tl.where(pads > 0, tl.maximum(most, 0.0), most)
        rescale = tl.exp2(most - top)
        total = total * rescale + tl.where(pads > 0, pads * tl.exp2(-top), 0.0)
        acc = acc * rescale[:, None]
        most = top
    acc = acc * (keep / total)[:, None]
    mask = (i < n)[:, None] & (column < DIM)[None, :]
    tl.store(out + (row + i)[:, None] * DIM + column[None, :], acc.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + row + i, (most + tl.log2(total)) * LN2, mask=i < n)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    work: Work,
    causal: bool,
    scale: float,
    drop: GroupedDrop | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (rows (rows, D), natural log-sum-exp (rows,) fp32) of all jobs from q (B, N, H, D) and k, v (B, N, K, D).

    The stride along D must be 1; other strides are free. The log-sum-exp ignores dropout and includes the zero pads of
    a job. With `lengths` (B,) on the device, rows beyond them are not written. If `work` is for bounds of documents,
    `lengths` are these bounds (2**bits + 1,).
    """
    dim = q.shape[3]
    rows, keys, warps, stages = config(q.dtype, dim, causal)
    out = torch.empty(work.rows, dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(work.rows, dtype=torch.float32, device=q.device)
    if work.rows:
        _grouped_forward[(work.grids[rows].programs,)](
            out, lse, q, *q.stride()[:3], k, *k.stride()[:3], v, *v.stride()[:3], *work.place(rows, lengths),
            scale * LOG2E.value, **_drop_arguments(drop, _positions_of(work, drop, lengths), q),
            **work.window_arguments(), CAUSAL=causal,
            PADS=work.pads and not causal, FAR=work.far(q, k, v), LENGTHS=lengths is not None, BITS=work.bits,
            PRECISION=precision(q), ROWS=rows, KEYS=keys, DIM=dim, BLOCK=block_dim(dim), num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out, lse


@triton.jit
def _grouped_delta(
    delta, row_lse, grad, g_sb, g_sn, g_sh, out, o_sb, o_sn, o_sh, lse, l_sb, l_sh, l_sn, jobs, job_of, first_of,
    lengths, FAR: tl.constexpr, LENGTHS: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write delta, the sum over D of grad * out, and the log-sum-exp for each row of the buffer."""
    _, tile, _, n, rate, row, sample, position, head, _, _ = _find(
        jobs, job_of, first_of, lengths, ROWS, FAR, LENGTHS, BITS
    )
    if LENGTHS and tile * ROWS >= n:
        return
    i, column = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    grad += sample * g_sb + position * g_sn + head * g_sh
    out += sample * o_sb + position * o_sn + head * o_sh
    a = read(grad, i, rate * g_sn, column, n, DIM, BLOCK, False).to(tl.float32)
    b = read(out, i, rate * o_sn, column, n, DIM, BLOCK, False).to(tl.float32)
    tl.store(delta + row + i, tl.sum(a * b, 1), mask=i < n)
    lse += sample * l_sb + position * l_sn + head * l_sh
    tl.store(row_lse + row + i, tl.load(lse + i.to(tl.int64) * (rate * l_sn), mask=i < n), mask=i < n)


@triton.jit(do_not_specialize=["threshold", "first_head"])
def _grouped_keys(
    dk, dv, q, q_sb, q_sn, q_sh, k, k_sb, k_sn, k_sh, v, v_sb, v_sn, v_sh, grad, g_sb, g_sn, g_sh, lse, delta,
    jobs, job_of, first_of, lengths, scale, plain_scale, states, threshold, keep, first_head, positions, windows,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, DROP: tl.constexpr, FAR: tl.constexpr, LENGTHS: tl.constexpr,
    BITS: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    job, tile, _, n, rate, row, sample, position, head, kv_head, _ = _find(
        jobs, job_of, first_of, lengths, KEYS, FAR, LENGTHS, BITS
    )
    if LENGTHS and tile * KEYS >= n:
        return
    j, column = tile * KEYS + tl.arange(0, KEYS), tl.arange(0, BLOCK)
    k += sample * k_sb + position * k_sn + kv_head * k_sh
    v += sample * v_sb + position * v_sn + kv_head * v_sh
    key = read(k, j, rate * k_sn, column, n, DIM, BLOCK, False)
    value = read(v, j, rate * v_sn, column, n, DIM, BLOCK, False)
    q += sample * q_sb + position * q_sn + head * q_sh
    grad += sample * g_sb + position * g_sn + head * g_sh
    q_sn, g_sn = rate * q_sn, rate * g_sn
    lse += row
    delta += row
    hash_state = tl.zeros([1], tl.uint32)
    key_positions = tl.zeros([KEYS], tl.int64)
    if DROP:
        hash_state = _hash_state(states, job, sample, head + first_head)
        positions += row
        key_positions = tl.load(job + 13) + position + j * rate
    lower, upper = _window(windows, job_of, CAUSAL, BAND)
    acc_k, acc_v = key_gradients(
        key, value, q, grad, q_sn, g_sn, lse, delta, j, tile, n, n, lower, upper, scale, hash_state, positions,
        key_positions, threshold, keep, CAUSAL, BAND, DROP, PRECISION, ROWS, KEYS, DIM, BLOCK,
    )  # fmt: skip
    tl.debug_barrier()  # find the job again, so that the loops need not keep it in registers
    _, tile, _, n, _, row, _, _, _, _, _ = _find(jobs, job_of, first_of, lengths, KEYS, FAR, LENGTHS, BITS)
    j = tile * KEYS + tl.arange(0, KEYS)
    rows = (row + j)[:, None] * DIM + column[None, :]
    mask = (j < n)[:, None] & (column < DIM)[None, :]
    tl.store(dk + rows, (acc_k * plain_scale).to(dk.dtype.element_ty), mask=mask)
    tl.store(dv + rows, acc_v.to(dv.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["threshold", "first_head"])
def _grouped_rows(
    dq, q, q_sb, q_sn, q_sh, k, k_sb, k_sn, k_sh, v, v_sb, v_sn, v_sh, grad, g_sb, g_sn, g_sh, lse, delta,
    jobs, job_of, first_of, lengths, scale, plain_scale, states, threshold, keep, first_head, positions, windows,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, DROP: tl.constexpr, FAR: tl.constexpr, LENGTHS: tl.constexpr,
    BITS: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    job, tile, tiles, n, rate, row, sample, position, head, kv_head, _ = _find(
        jobs, job_of, first_of, lengths, ROWS, FAR, LENGTHS, BITS
    )
    if CAUSAL:
        tile = tiles - 1 - tile  # tiles with most keys first
    if LENGTHS and tile * ROWS >= n:
        return
    i, column = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    q += sample * q_sb + position * q_sn + head * q_sh
    grad += sample * g_sb + position * g_sn + head * g_sh
    query = read(q, i, rate * q_sn, column, n, DIM, BLOCK, False)
    do = read(grad, i, rate * g_sn, column, n, DIM, BLOCK, False)
    k += sample * k_sb + position * k_sn + kv_head * k_sh
    v += sample * v_sb + position * v_sn + kv_head * v_sh
    k_sn, v_sn = rate * k_sn, rate * v_sn
    row_lse = tl.load(lse + row + i, mask=i < n, other=float("inf")) * LOG2E
    row_delta = tl.load(delta + row + i, mask=i < n, other=0.0)
    row_state = tl.zeros([ROWS], tl.uint32)
    if DROP:
        hash_state = _hash_state(states, job, sample, head + first_head)
        row_state = fold(hash_state, tl.load(job + 13) + position + i * rate)
        positions += row
    lower, upper = _window(windows, job_of, CAUSAL, BAND)
    acc = query_gradient(
        query, do, row_lse, row_delta, k, v, k_sn, v_sn, i, tile, n, lower, upper, scale, row_state, positions, threshold,
        keep, CAUSAL, BAND, DROP, PRECISION, ROWS, KEYS, DIM, BLOCK,
    )  # fmt: skip
    mask = (i < n)[:, None] & (column < DIM)[None, :]
    to = dq + (row + i)[:, None] * DIM + column[None, :]
    tl.store(to, (acc * plain_scale).to(dq.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class Backward:
    """The inputs of both kernels of the backward.

    Attributes:
        tensors: grad, q (B, N, H, D) and k, v (B, N, K, D).
        lse, delta: (rows,) fp32 in the order of the buffer, because the loops read them without a stride.
        positions: (rows,) int64 with dropout, else None.
        lengths: (B,) on the device, or bounds of documents, or None.
    """

    work: Work
    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    lse: Tensor
    delta: Tensor
    causal: bool
    scale: float
    drop: GroupedDrop | None
    positions: Tensor | None
    lengths: Tensor | None

    @classmethod
    def of(
        cls,
        work: Work,
        tensors: list[Tensor],
        lse: Tensor,
        causal: bool,
        scale: float,
        drop: GroupedDrop | None,
        lengths: Tensor | None = None,
    ) -> Backward:
        """Compute delta and the rows of lse from grad, q (B, N, H, D), k, v (B, N, K, D) and the merged out and lse."""
        grad, q, k, v, out = tensors
        # one allocation takes less host time than two; both parts are aligned
        delta, row_lse = torch.empty(2, -(-work.rows // 64) * 64, dtype=torch.float32, device=q.device)
        if work.rows:
            _grouped_delta[(work.grids[PREPARED].programs,)](
                delta, row_lse, grad, *grad.stride()[:3], out, *out.stride()[:3], lse, *lse.stride(),
                *work.place(PREPARED, lengths), FAR=work.far(grad, out), LENGTHS=lengths is not None, BITS=work.bits,
                ROWS=PREPARED, DIM=q.shape[3], BLOCK=block_dim(q.shape[3]),
            )  # fmt: skip
        return cls(
            work, (grad, q, k, v), row_lse, delta, causal, scale, drop, _positions_of(work, drop, lengths), lengths
        )

    def keys(self) -> Tensor:
        """Return dk and dv (2, rows, D), for each query head."""
        return self._run(_grouped_keys, 2, True)

    def queries(self) -> Tensor:
        """Return dq (1, rows, D)."""
        return self._run(_grouped_rows, 1, False)

    def _run(self, kernel, results: int, over_keys: bool) -> Tensor:
        grad, q, k, v = self.tensors
        dim = q.shape[3]
        rows, keys, warps, stages = backward_config(q.dtype, dim, self.causal, over_keys)
        tile = keys if over_keys else rows
        out = torch.empty(results, self.work.rows, dim, dtype=q.dtype, device=q.device)
        views = [argument for x in (q, k, v, grad) for argument in (x, *x.stride()[:3])]
        if self.work.rows:
            kernel[(self.work.grids[tile].programs,)](
                *out, *views, self.lse, self.delta, *self.work.place(tile, self.lengths), self.scale * LOG2E.value,
                self.scale, **_drop_arguments(self.drop, self.positions, q), **self.work.window_arguments(),
                CAUSAL=self.causal,
                FAR=self.work.far(*self.tensors), LENGTHS=self.lengths is not None, BITS=self.work.bits,
                PRECISION=precision(q), ROWS=rows, KEYS=keys, DIM=dim, BLOCK=block_dim(dim), num_warps=warps,
                num_stages=stages,
            )  # fmt: skip
        return out
