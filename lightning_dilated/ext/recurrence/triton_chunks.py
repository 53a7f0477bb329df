"""Compute chunks of the gated delta rule with Triton kernels, as an autograd function; `chunks.py` serves other calls.

Shape letters: B batch, L tokens of this rank, H query heads, K kv heads, D head dim, E value dim, W columns of the
state (values are added to the last E), n runs, T chunks, m groups.
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
LARGEST = 128
#: largest D and E with tiles of 16 columns, and largest D and E for which kernels with 16-bit rows have 4 warps
NARROW, SMALL = 16, 64
#: bytes that a window of a long call may use in its backward. Each window computes the states before its groups of
#: chunks again; with windows half as long, this would take a tenth of the whole time
WINDOW_MEMORY = 5 << 30
#: minimum number of chunks of the longest run for which runs are passed in groups; a group has about its square root
GROUPED_FROM = 32
#: smallest product of the numbers of runs and kv heads that keeps a GPU busy without groups
BUSY = 256


def why_not(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return None if the kernels serve q (B, L, H, D), k (B, L, K, D) and v (B, L, K, E), else the reason."""
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
    """Return whether the kernels were verified on a GPU for these D and E, if both are at most `LARGEST`.

    Tiles of 16 columns with 8 warps fail: on Hopper, Triton 3.6 lets four of the warps read beyond shared memory.
    """
    eight_warps = dtype == torch.float32 or max(dim, values) > SMALL
    return min(dim, values) > NARROW or not eight_warps


def serves(kind: str, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether the kernels compute this call."""
    return kind == "gated_delta" and why_not(q, k, v) is None


class Layout(NamedTuple):
    """The chunks of a rank's runs, on the CPU.

    Attributes:
        table: (entries, 2) int64, the concatenated tables of `Chunks`.
        sizes: lengths of the tables `rows`, `runs`, `groups` and `members`; the last two are 0 without groups.
        covered: whether all B L rows belong to runs.
    """

    table: Tensor
    sizes: tuple[int, int, int, int]
    covered: bool

    def on(self, device: torch.device) -> Chunks:
        """Copy the tables to a device, in one transfer."""
        from lightning_dilated.ext.recurrence.gated_delta import Chunks

        rows, runs, groups, members = send(self.table, device).split(self.sizes)
        return Chunks(rows, runs, *((groups, members) if self.sizes[2] else (None, None)))


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # no inference tensors, because a training call may reuse the cached layout
@real_tensors()
def layout(call: Call, rank: int, heads: int) -> Layout:
    """Return the layout of one rank's part of a call; `heads`: K."""
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
    """Return consecutive ranges (first, stop) with these lengths."""
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
    """Return the output (rows, H, E), 0 in rows without a run, and the state after each run, (n, K, D, W).

    Args:
        q: (rows, H, D), with W = E; None: no output.
        k, v: (rows, K, D) and (rows, K, E), in the same dtype, with any strides.
        log_decay, beta: (rows, K) fp32.
        begin: (n, K, D, W) fp32, state before each run; [1 | 0] gives the runs' maps. Values go into the last E columns.
        read: whether the output's values are used; if not, they are arbitrary, and only its gradient is computed.
    """
    tensors = q, k, v, log_decay, beta, begin
    differentiated = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    out, last = _GatedDelta.apply(*tensors, places, differentiated, read)
    return (None if q is None else out), last


def held_bytes(
    tokens: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, backward: bool, cut: bool = True
) -> int | None:
    """Return the kernels' peak bytes in addition to a call's inputs and results, or None if they do not serve the call.

    Args:
        tokens, heads, dims: B L, (H, K) and (D, E).
        backward: whether to count a forward and its backward, not only a forward.
        cut: whether the tokens are one of several windows of a call; results of windows are copied.
    """
    dim, values = dims
    if dtype not in DTYPES or max(dims) > LARGEST:
        return None
    stored = 2 if dtype == torch.bfloat16 else 4  # bytes of a number in `Rows.stored`
    state, row = stored * dim * values / CHUNK, stored * values
    held = state + row + CHUNK * max(2, dtype.itemsize) + 12 + 8  # the 8 bytes are gates in fp32
    if cut or backward:
        held += heads[0] / heads[1] * values * dtype.itemsize  # a window's output, or an output that no gradient needs
    if backward:
        held += max(2 * state + 2 * row, state + row + stored * dim + 4)
    if cut and backward:
        held += (dim * (1 + heads[0] / heads[1]) + values) * dtype.itemsize + 8  # gradients of a window
    chunks = -(-tokens // CHUNK)
    groups = 4 * dim * (dim + 4 * values) * (chunks // math.isqrt(max(chunks, 1)) + 2)
    return round(heads[1] * (chunks * CHUNK * held + groups + 40 * dim * values))  # the last term: states of windows


@functools.lru_cache(maxsize=256)
def window(batch: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype) -> int:
    """Return the number of tokens per sample in a window, a power of two; see `held_bytes` for the arguments."""
    tokens = 1 << 14
    while (held_bytes(2 * max(1, batch) * tokens, heads, dims, dtype, True) or math.inf) <= WINDOW_MEMORY:
        tokens *= 2
    return tokens


class _GatedDelta(torch.autograd.Function):
    """The autograd function of the kernels. It saves results of the passes, so the backward does not repeat them."""

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
        rows, intermediates = forward.Rows(*tensors[:4]), tensors[4:]
        if not intermediates:
            return *(None if x is None else torch.zeros_like(x) for x in (query, *tensors)), last, None, None, None
        inverse = forward.Inverse(*intermediates[:3])
        passed = forward.Passed(intermediates[3], intermediates[4], last, intermediates[5])
        reading = None if query is None else back.Reading(query, _dense(grad))
        with kernels.on(rows.k.device):
            return *back.backward(
                rows, forward.Chunks(*intermediates[6:]), inverse, passed, reading, last.contiguous(), ctx.places.covered
            ), None, None, None  # fmt: skip


def _tensors(rows: Rows) -> tuple[Tensor, ...]:
    return rows.k, rows.v, rows.log_decay, rows.beta


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
