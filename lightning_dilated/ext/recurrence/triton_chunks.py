"""Chunks of the gated delta rule by Triton kernels, as one function of autograd; `chunks.py` serves what they do not.

Shape letters: B batch, L tokens of this rank, H query heads, K kv heads, D head dim, E value dim, W columns of the state of
which the last E get values added, n runs, T chunks, m groups.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_dilated import kernels
from lightning_dilated._compat.torch import real_tensors, transformed
from lightning_dilated._device import send
from lightning_dilated.ext.recurrence.runs import CHUNK, Call, tables

if TYPE_CHECKING:
    from lightning_dilated.ext.recurrence.gated_delta import Chunks, Rows

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: the largest D and E
LARGEST = 128
#: the largest D and E of tiles of 16 columns; the largest of rows of 16 bits that kernels of 4 warps take
NARROW, SMALL = 16, 64
#: bytes that a window of a long call may hold in its backward. Each window computes the states before its groups of chunks
#: once more, which takes a tenth of the time of windows half as long
WINDOW_MEMORY = 5 << 30
#: chunks of the longest run from which runs are passed in groups of about the square root of them
GROUPED_FROM = 32
#: runs times kv heads that keep a GPU busy by themselves: they are passed chunk by chunk
BUSY = 256


def why_not(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """None where the kernels serve q (B, L, H, D), k (B, L, K, D) and v (B, L, K, E), else the reason."""
    if q.dtype not in DTYPES:
        return f"takes {', '.join(str(x).removeprefix('torch.') for x in DTYPES)}, not {str(q.dtype).removeprefix('torch.')}"
    dims = k.shape[3], v.shape[3]
    if max(dims) > LARGEST:
        return f"takes head dims up to {LARGEST}, not {max(dims)}"
    if q.device.type == "cuda" and not proven(q.dtype, *dims):
        return (
            f"takes head dims up to {NARROW} only in 16 bits and with none above {SMALL}, not {dims[0]} and {dims[1]} in "
            f"{str(q.dtype).removeprefix('torch.')}"
        )
    return kernels.why_not(q.device) or ("takes no transforms of torch.func" if transformed() else None)


def proven(dtype: torch.dtype, dim: int, values: int) -> bool:
    """Whether the kernels of these D and E, up to `LARGEST`, were right on a GPU.

    Tiles of 16 columns with 8 warps are not: on Hopper, Triton 3.6 has the second four read beyond the shared memory.
    """
    eight_warps = dtype == torch.float32 or max(dim, values) > SMALL
    return min(dim, values) > NARROW or not eight_warps


def serves(kind: str, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels compute a call of a kind."""
    return kind == "gated_delta" and why_not(q, k, v) is None


class Layout(NamedTuple):
    """Where a rank's runs stand, on the CPU.

    Attributes:
        table: (numbers, 2) int64, what `Chunks` has, one after another.
        sizes: rows of `Chunks.rows`, `runs`, `groups` and `members` in it; no groups: 0.
        covered: whether every row of (B L) belongs to a run.
    """

    table: Tensor
    sizes: tuple[int, int, int, int]
    covered: bool

    def on(self, device: torch.device) -> Chunks:
        """The same on a device, by one copy."""
        from lightning_dilated.ext.recurrence.gated_delta import Chunks

        rows, runs, groups, members = send(self.table, device).split(self.sizes)
        return Chunks(rows, runs, *((groups, members) if self.sizes[2] else (None, None)))


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # a call that trains may find it
@real_tensors()
def layout(call: Call, rank: int, heads: int) -> Layout:
    """That of one rank's part of a call with K = `heads`."""
    places = tables(call, rank, CHUNK)
    firsts = places.queries[: len(places.runs), 0].tolist()
    lengths = [run.stop - run.start for run in places.runs]
    rows = [(row + at, min(CHUNK, n - at)) for row, n in zip(firsts, lengths, strict=True) for at in range(0, n, CHUNK)]
    numbers = [-(-n // CHUNK) for n in lengths]
    runs = _spans(numbers)
    groups: list[tuple[int, int]] = []
    members: list[tuple[int, int]] = []
    if max(numbers, default=0) >= GROUPED_FROM and len(runs) * heads < BUSY:
        size = math.isqrt(max(numbers))
        groups = [(at, min(at + size, stop)) for start, stop in runs for at in range(start, stop, size)]
        members = _spans([-(-n // size) for n in numbers])
    every = [*rows, *runs, *groups, *members]
    table = torch.tensor(every, dtype=torch.int64).view(-1, 2)
    return Layout(table, (len(rows), len(runs), len(groups), len(members)), sum(lengths) == len(places.outputs))


def _spans(numbers: list[int]) -> list[tuple[int, int]]:
    """(first, one past the last) of so many, one after another."""
    return list(itertools.pairwise([0, *itertools.accumulate(numbers)]))


@torch.compiler.disable
def gated_delta(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    begin: Tensor,
    places: Layout,
    read: bool = True,
) -> tuple[Tensor | None, Tensor]:
    """(the output (rows, H, E), 0 for rows without a run; the state after each run (n, K, D, W)).

    Args:
        q: (rows, H, D); W is E then. None: no output.
        k: (rows, K, D). v: (rows, K, E), of one dtype, any strides.
        log_decay, beta: (rows, K) fp32.
        begin: (n, K, D, W) fp32, before each run. W above E: columns that get nothing added, [1 | 0] for the map of a run.
        read: whether anything reads the output; else it holds anything, and is there to be differentiated.
    """
    tensors = q, k, v, log_decay, beta, begin
    differentiated = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    out, last = _GatedDelta.apply(*tensors, places, differentiated, read)
    return (None if q is None else out), last


def held_bytes(
    tokens: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    backward: bool,
    cut: bool = True,
) -> int | None:
    """At most what the kernels hold beside the inputs and results of a call of one rank; None where they serve none.

    Args:
        tokens: B L. heads: H and K. dims: D and E.
        backward: of a forward and the backward after it.
        cut: whether the tokens are one of several windows of a call, to whose results its own are copied.
    """
    dim, values = dims
    if dtype not in DTYPES or max(dims) > LARGEST:
        return None
    stored = 2 if dtype == torch.bfloat16 else 4  # bytes of a number of `Rows.stored`
    state, row = stored * dim * values / CHUNK, stored * values
    held = state + row + CHUNK * max(2, dtype.itemsize) + 12 + 8  # with gates in fp32
    if cut or backward:
        held += heads[0] / heads[1] * values * dtype.itemsize  # the output of a window, or one that no gradient needs
    if backward:
        held += max(2 * state + 2 * row, state + row + stored * dim + 4)
    if cut and backward:
        held += (dim * (1 + heads[0] / heads[1]) + values) * dtype.itemsize + 8  # gradients of a window
    chunks = -(-tokens // CHUNK)
    groups = 4 * dim * (dim + 4 * values) * (chunks // math.isqrt(max(chunks, 1)) + 2)
    return round(heads[1] * (chunks * CHUNK * held + groups + 40 * dim * values))  # and states between windows


@functools.lru_cache(maxsize=256)
def window(batch: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype) -> int:
    """Tokens of each of B samples that are computed at a time: a power of two; arguments as of `held_bytes`."""
    tokens = 1 << 14
    while (held_bytes(2 * max(1, batch) * tokens, heads, dims, dtype, True) or math.inf) <= WINDOW_MEMORY:
        tokens *= 2
    return tokens


class _GatedDelta(torch.autograd.Function):
    """Saves what the passes over chunks make, so that the backward computes none of it again."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        begin: Tensor,
        places: Layout,
        differentiated: bool,
        read: bool,
    ) -> tuple[Tensor, Tensor]:
        from lightning_dilated.ext.recurrence import gated_delta as forward

        rows = forward.Rows(_dense(k), _dense(v), log_decay, beta)
        query, begin = None if q is None else _dense(q), begin.contiguous()
        heads = 0 if query is None else query.shape[1]
        out = (torch.empty if places.covered else torch.zeros)(
            (len(v), heads, v.shape[2]), dtype=v.dtype, device=v.device
        )
        ctx.places = places
        if not places.sizes[0]:
            ctx.save_for_backward(query, *_tensors(rows))
            return out, begin.clone()
        with kernels.on(k.device):
            chunks = places.on(k.device)
            inverse = forward.invert(rows, chunks)
            if query is None and not differentiated:
                return out, forward.last_states(rows, chunks, inverse, begin)
            passed = forward.pass_chunks(rows, chunks, inverse, begin)
            if query is not None and read:
                forward.output(query, rows, chunks, inverse, passed, out)
        if differentiated:
            saved = inverse.matrix, inverse.total, inverse.rate, passed.before, passed.new, passed.maps
            ctx.save_for_backward(query, *_tensors(rows), *saved, *chunks)
        return out, passed.last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, last: Tensor) -> tuple[Tensor | None, ...]:
        from lightning_dilated.ext.recurrence import gated_delta as forward
        from lightning_dilated.ext.recurrence import gated_delta_backward as back

        query, *tensors = ctx.saved_tensors
        rows, rest = forward.Rows(*tensors[:4]), tensors[4:]
        if not rest:
            return *(None if x is None else torch.zeros_like(x) for x in (query, *tensors)), last, None, None, None
        inverse = forward.Inverse(*rest[:3])
        passed = forward.Passed(rest[3], rest[4], last, rest[5])
        reading = None if query is None else back.Reading(query, _dense(grad))
        with kernels.on(rows.k.device):
            return *back.backward(
                rows, forward.Chunks(*rest[6:]), inverse, passed, reading, last.contiguous(), ctx.places.covered
            ), None, None, None  # fmt: skip


def _tensors(rows: Rows) -> tuple[Tensor, ...]:
    return rows.k, rows.v, rows.log_decay, rows.beta


def _dense(x: Tensor) -> Tensor:
    """x with adjacent columns."""
    return x if x.stride(-1) == 1 else x.contiguous()
