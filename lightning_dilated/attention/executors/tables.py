"""Integer tables for kernels, made from blocks: the parts of each output row, and the work of grouped launches.

All layers, and forward and backward, share one table.
Shape letters: N tokens, H query heads, K kv heads, n rows of a block.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_dilated._device import send
from lightning_dilated.attention.executors.base import Call, HeadWindow
from lightning_dilated.attention.spans import Span
from lightning_dilated.pattern.rows import Block, segment_width

if TYPE_CHECKING:
    from lightning_dilated.kernels.combine import Entries
    from lightning_dilated.kernels.grouped import Grid, Outputs, Work


@functools.lru_cache(maxsize=4096)
def entries(
    blocks: tuple[Block, ...], heads: int, kv: bool, device: torch.device, start: int, length: int, stream: int = 0
) -> Entries:
    """Return the table of the blocks' rows at positions start..start + length, by query head (by kv head if `kv`).

    Each stream has its own table, because freed memory is reused on its stream only.
    """
    from lightning_dilated.kernels.combine import COLUMNS, Entries

    rows = rows_by_head(blocks, heads, kv)
    step = _step(blocks, length)
    classes = [
        [(*x, step // x[6] * (step % x[6] == 0)) for x in head_rows if _meets(x, start + residue, step)]
        for residue in range(step)
        for head_rows in rows
    ]
    begins = list(itertools.accumulate(map(len, classes), initial=0))
    tensor = lambda x: send(torch.tensor(x, dtype=torch.int32, device="cpu"), device)  # noqa: E731
    table = tensor([x for c in classes for x in c]).reshape(-1, COLUMNS)
    several = [i for i, c in enumerate(classes) if len(c) > 1]
    return Entries(table, tensor(begins), tensor(several), tensor(range(len(classes))), step)


def rows_by_head(blocks: tuple[Block, ...], heads: int, kv: bool) -> list[list[tuple[int, ...]]]:
    """Return the entries of the blocks of each query head (of each kv head if `kv`).

    An entry is (block, head in the block, first position, segments, width, rows, rate).
    """
    rows: list[list[tuple[int, ...]]] = [[] for _ in range(heads)]
    for number, b in enumerate(blocks):
        for j in range(b.heads):
            head = b.kv_head + j * b.kv_head_step if kv else b.head + j * b.head_step
            first = b.first + j * b.position_step
            # a single segment may be wider than its positions, and wider than 32 bits
            width = b.segment_stride if b.segments > 1 else first + b.rows * rate_of(b)
            rows[head].append((number, j, first, b.segments, width, b.rows, rate_of(b)))
    return rows


def rate_of(b: Block) -> int:
    """Return the distance between a block's rows, in positions; 1 for a single row."""
    return b.row_stride if b.rows > 1 else 1


def _step(blocks: tuple[Block, ...], length: int) -> int:
    """Return a common multiple of most rates. It is small, so a program's rows are usually in one segment."""
    from lightning_dilated.kernels.combine import SUM

    widths = [b.segment_stride for b in blocks if b.segments > 1]
    return _common_multiple({b.row_stride for b in blocks}, min([length, *widths]) // SUM[0])


def _common_multiple(rates: Iterable[int], most: int) -> int:
    """Return the common multiple of the smallest rates; skip rates with which it would exceed 64 or `most`."""
    step = 1
    for rate in sorted(set(rates)):
        multiple = math.lcm(step, rate)
        step = multiple if multiple <= min(64, most) else step
    return step


def _meets(entry: tuple[int, ...], position: int, step: int) -> bool:
    """Return whether an entry can have rows at position, position + step, ..."""
    _, _, first, segments, width, _, rate = entry
    divisor = math.gcd(rate, step) if segments == 1 else math.gcd(rate, step, width)
    return (position - first) % divisor == 0


#: tuples are hashed and compared faster than dataclasses; a call may have a thousand spans
_fields = operator.attrgetter("batch", "batches", "start", "length", "whole", "offset", "origin")


@dataclass(frozen=True)
class _Document:
    """A span's share of the table, computed for a single span that begins at 0.

    Attributes:
        jobs: (blocks, 16) int64, without offsets.
        windows: (blocks,) int32, as in `Work`.
        rows: by query head and by kv head: entries (entries, 7) int32, and their number for each head.
        step, tiles: distance between the rows of a program that combines results, and number of tiles in one sample.
    """

    jobs: Tensor
    windows: Tensor
    rows: tuple[tuple[Tensor, Tensor], ...]
    step: int
    tiles: int


def work_of(
    call: Call,
    spans: Sequence[Span],
    device: torch.device,
    sizes: tuple[int, ...],
    tokens: int,
    cut: bool = False,
    bits: int = 0,
) -> Work:
    """Return the table of all blocks of a call, with programs for tiles of `sizes` rows.

    A program that combines results has `tokens` rows. With `cut`, the lengths of samples are on the device. With
    `bits`, the bounds of 2**bits documents in the only span are on the device.

    Raises:
        LookupError: if positions need more than 32 bits, or if a CUDA graph records before the table exists, because
            the table cannot be sent then.
    """
    return _work(call.window, tuple(map(_fields, spans)), device, sizes, tokens, cut, bits)


@functools.lru_cache(maxsize=64)
def _work(
    window: HeadWindow,
    span_fields: tuple[tuple, ...],
    device: torch.device,
    sizes: tuple[int, ...],
    tokens: int,
    cut: bool,
    bits: int,
) -> Work:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise LookupError("no table yet")
    with torch.device("cpu"):
        spans = [Span(*fields) for fields in span_fields]
        if bits:
            work = _build_packed(window, spans[0].length, device, sizes, tokens, bits)
        else:
            work = _build(window, spans, device, sizes, tokens, cut)
    if device.type != "cuda":
        return work
    stream = torch.cuda.current_stream(device)
    return replace(work, sent=(stream, stream.record_event()))


def _build(
    window: HeadWindow, spans: Sequence[Span], device: torch.device, sizes: tuple[int, ...], tokens: int, cut: bool
) -> Work:
    from lightning_dilated.kernels.grouped import JOB, Work

    documents = [_document(window, s.document, s.part, tokens) for s in spans]
    job_counts = torch.tensor([len(d.jobs) for d in documents], dtype=torch.int64)
    facts = torch.tensor([(s.batch, s.start, s.origin, s.batches, d.step, d.tiles, s.length)
                          for s, d in zip(spans, documents, strict=True)], dtype=torch.int64).reshape(-1, 7)  # fmt: skip
    jobs = _join([d.jobs for d in documents], len(JOB))
    column = {name: jobs[:, i] for i, name in enumerate(JOB)}
    batch, start, origin, batches = facts[:, :4].repeat_interleave(job_counts, 0).unbind(1)
    column["sample"].add_(batch)
    column["first"].add_(start)
    column["origin"].copy_(origin)
    heads = batches * column["segments"] * column["heads"]  # in all samples and segments
    counts = heads * column["rows"]
    column["offset"].copy_(counts.cumsum(0) - counts)
    pattern = window.pattern
    pads = bool((column["pads"] > 0).any())
    if cut:  # kernels compute the pads from the length, the segment length and the rate, even for jobs of one row
        pads, tokens_of = pattern.padding == "attended", max(1, max(s.length for s in spans))
        widths = torch.tensor([min(b.segment_length or tokens_of, tokens_of) for b in pattern.branches])
        rates = torch.tensor([min(b.dilation_rate, tokens_of) for b in pattern.branches])
        column["pads"].copy_(widths[column["branch"]])
        column["rate"].copy_(rates[column["branch"]])
    tiles = facts[:, 3] * facts[:, 5]
    table = torch.stack([facts[:, 0], facts[:, 1], facts[:, 6], facts[:, 4], tiles.cumsum(0) - tiles, facts[:, 5]], 1)
    to = functools.partial(send, device=device)
    return Work(
        rows=int(counts.sum()),
        positions=int((facts[:, 3] * facts[:, 6]).sum()),
        pads=pads,
        rate=int(column["rate"].max()) if len(jobs) else 1,
        windows=_windows(torch.cat([d.windows for d in documents]) if documents else jobs.new_empty(0), to),
        jobs=to(jobs),
        grids={size: _grid(column["rows"], heads, size, to) for size in set(sizes)},
        tokens=tokens,
        tiles=int(tiles.sum()),
        spans=to(table),
        span=to(torch.arange(len(spans), dtype=torch.int32).repeat_interleave(tiles)),
        queries=_outputs([d.rows[0] for d in documents], job_counts, to),
        keys=_outputs([d.rows[1] for d in documents], job_counts, to),
    )


def _width(width: int | None) -> int:
    from lightning_dilated.kernels.grouped import ENDLESS

    return ENDLESS if width is None else min(width, ENDLESS)


def _windows(widths: Tensor, to: functools.partial[Tensor]) -> Tensor | None:
    """Return the windows of jobs; None if no job has a window."""
    return to(widths.int()) if bool((widths < _width(None)).any()) else None


def bits_of(documents: int) -> int:
    """Return the number of bits of a document's index, at least 2. Few tables then serve all numbers of documents."""
    return max(2, (documents - 1).bit_length())


def packed_jobs(window: HeadWindow, tokens: int, documents: int) -> Tensor:
    """Return the jobs of a row of N `tokens`, (jobs + 1, 16) int64 with the columns of `DOCUMENT_JOB`.

    Each head and branch that may have positions has a job. The last line of the table contains only the number of rows
    of the buffer, in the column `offset`.

    Raises:
        LookupError: if positions need more than 32 bits.
    """
    pattern, num_heads, num_kv_heads, heads, _ = window
    group, jobs, rows = num_heads // num_kv_heads, [], 0
    for h in range(*heads):
        for i, branch in enumerate(pattern.branches):
            o, t, longest = pattern.offset(branch, h, num_heads, num_kv_heads), branch.shift, tokens + branch.shift
            if longest >= 2**30:
                raise LookupError("positions of more than 32 bits")
            if not branch.serves(h) or o >= longest:
                continue
            w, r = segment_width(branch, tokens), min(branch.dilation_rate, longest)
            numbers = 0 if r == 1 else 2 if t else 1  # segments need numbers, else their rows could coincide
            numbered = tokens // w + numbers * documents if numbers else 0
            head, kv_head = h - heads[0], h // group - heads[0] // group
            length = min(branch.segment_length or tokens, tokens)
            jobs.append((tokens, t, o, w, (o - t) % r, r, 1, head, numbers, kv_head, 0, 0, rows, 0, i, length))
            rows += -(-tokens // r) + numbered
    return torch.tensor([*jobs, (0,) * 12 + (rows,) + (0,) * 3], dtype=torch.int64)


def _build_packed(
    window: HeadWindow, length: int, device: torch.device, sizes: tuple[int, ...], tokens: int, bits: int
) -> Work:
    """Return the table for a row of N = `length` tokens with up to 2**bits documents."""
    from lightning_dilated.kernels.grouped import Work

    pattern, num_heads, num_kv_heads, heads, _ = window
    jobs, to = packed_jobs(window, length, 2**bits), functools.partial(send, device=device)
    jobs, rows = jobs[:-1], int(jobs[-1, 12])
    step = _common_multiple(jobs[:, 5].tolist(), length // tokens)
    tiles = -(-length // (tokens * step)) * step
    kv_heads = -(-heads[1] * num_kv_heads // num_heads) - heads[0] * num_kv_heads // num_heads
    return Work(
        rows=rows,
        positions=length,
        pads=pattern.padding == "attended",
        rate=int(jobs[:, 5].max()) if len(jobs) else 1,
        windows=_windows(torch.tensor([_width(pattern.branches[i].width) for i in jobs[:, 14].tolist()]), to),
        jobs=to(jobs),
        grids={size: _packed_grid(jobs, size, 2**bits, to) for size in set(sizes)},
        tokens=tokens,
        tiles=tiles,
        spans=to(torch.tensor([[0, 0, length, step, 0, tiles]], dtype=torch.int64)),
        span=to(torch.zeros(tiles, dtype=torch.int32)),
        queries=_packed_outputs(jobs[:, 7], heads[1] - heads[0], to),
        keys=_packed_outputs(jobs[:, 9], kv_heads, to),
        bits=bits,
    )


def _packed_grid(jobs: Tensor, size: int, documents: int, to: functools.partial[Tensor]) -> Grid:
    """Return enough programs for any bounds of the documents; jobs with most rows in a segment run first."""
    from lightning_dilated.kernels.grouped import Grid, slots

    columns = jobs[:, [3, 1, 5, 0]].tolist()
    job_slots = torch.tensor([slots(w, t, r, size, n) for w, t, r, n in columns], dtype=torch.int64).reshape(-1, 3)
    programs = jobs[:, 0] // job_slots[:, 0] + jobs[:, 0] // job_slots[:, 1] + job_slots[:, 2] * documents
    order, first = (jobs[:, 3] // jobs[:, 5]).argsort(descending=True, stable=True), torch.empty_like(programs)
    first[order] = programs[order].cumsum(0) - programs[order]
    ordered = order.int().repeat_interleave(programs[order])
    return Grid(int(programs.sum()), to(ordered), to(torch.cat([first[:, None], job_slots], 1).int()))


def _packed_outputs(head: Tensor, heads: int, to: functools.partial[Tensor]) -> Outputs:
    from lightning_dilated.kernels.grouped import Outputs

    order = head.argsort(stable=True)
    entries = torch.zeros(len(head), 7, dtype=torch.int32)
    entries[:, 0] = order
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(head, minlength=heads).cumsum(0)])
    return Outputs(to(entries), to(starts.int()))


def _join(tables: list[Tensor], columns: int) -> Tensor:
    return torch.cat(tables) if tables else torch.zeros(0, columns, dtype=torch.int64)


def _grid(rows: Tensor, heads: Tensor, size: int, to: functools.partial[Tensor]) -> Grid:
    """Return programs for tiles of `size` rows; jobs with most rows run first, so that short jobs fill the gaps."""
    from lightning_dilated.kernels.grouped import Grid

    programs, order = heads * ((rows + size - 1) // size), rows.argsort(descending=True, stable=True)
    ordered, first = programs[order], torch.empty_like(programs)
    first[order] = ordered.cumsum(0) - ordered
    return Grid(int(programs.sum()), to(order.int().repeat_interleave(ordered)), to(first.int()))


def _outputs(rows: list[tuple[Tensor, Tensor]], job_counts: Tensor, to: functools.partial[Tensor]) -> Outputs:
    """Join the entries of all spans, and number the jobs over all spans."""
    from lightning_dilated.kernels.grouped import Outputs

    entries = _join([table for table, _ in rows], 7).int()
    lengths = torch.tensor([len(table) for table, _ in rows], dtype=torch.int64)
    entries[:, 0] += (job_counts.cumsum(0) - job_counts).repeat_interleave(lengths).int()
    counts = torch.cat([torch.zeros(1, dtype=torch.int64), *(c for _, c in rows)])
    return Outputs(to(entries), to(counts.cumsum(0).int()))


@functools.lru_cache(maxsize=4096)
def _document(window: HeadWindow, document: int, part: tuple[int, int] | None, tokens: int) -> _Document:
    """Return the table's entries for `part` of a document with `document` tokens."""
    blocks, heads = window.blocks(document, part), window.heads
    length, group = (part[1] - part[0] if part else document), window.num_heads // window.num_kv_heads
    jobs = [
        (0, b.segments, b.first, b.segment_stride, b.rows, rate_of(b), b.heads, b.head, b.head_step, b.kv_head,
         b.kv_head_step, b.position_step, 0, 0, b.branch, b.pads) for b in blocks
    ]  # fmt: skip
    kv_heads = -(-heads[1] // group) - heads[0] // group
    step = _common_multiple(map(rate_of, blocks), length // tokens)
    tiles = -(-length // (tokens * step)) * step
    table = torch.tensor(jobs, dtype=torch.int64).reshape(-1, 16)
    windows = torch.tensor([_width(b.width) for b in blocks], dtype=torch.int32)
    rows = _rows(blocks, heads[1] - heads[0], False), _rows(blocks, kv_heads, True)
    return _Document(table, windows, rows, step, tiles)


def _rows(blocks: tuple[Block, ...], heads: int, kv: bool) -> tuple[Tensor, Tensor]:
    """Return the entries by query head (by kv head if `kv`), as in `Outputs`, and their number by head."""
    rows = rows_by_head(blocks, heads, kv)
    table = torch.tensor([x for head_rows in rows for x in head_rows], dtype=torch.int32).reshape(-1, 7)
    return table, torch.tensor([len(head_rows) for head_rows in rows], dtype=torch.int64)
