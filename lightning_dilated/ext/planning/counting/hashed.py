"""Compute the memory and the time of the op of hashed heads, and the rows that ranks exchange and that streams carry.

A Meter measures the memory of short calls in addition to inputs and results. Times were measured on an H200.

Shape letters: N tokens, C tokens of a chunk, R ranks, H query heads, K kv heads, D head dim, G groups of M codes, P
lookups for each query.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from lightning_dilated import kernels
from lightning_dilated._compat.torch import real_tensors
from lightning_dilated.ext._compat.torch import replaced
from lightning_dilated.ext.hashed import lookup
from lightning_dilated.ext.hashed.functional import BLOCK
from lightning_dilated.ext.hashed.lookup import Inputs
from lightning_dilated.ext.hashed.op import HashedSpec, LossTerms, encode, run_backward, run_forward
from lightning_dilated.ext.hashed.ranks import planned_bytes
from lightning_dilated.pattern import Hashed

#: smallest number of tokens of a short call, and the largest that `latest` causes
LEAST, MOST = 2048, 8192
#: seconds of the op's (forward, backward) on an H200 with 3 * 2**20 rows and lookups, of one query head of 64 features and
#: 4 groups of 16 codes, that read up to 64 rows: seconds of the kernels of lookups, and of sorts, sums and copies. The
#: op's backward computes the forward again (benchmarks/results/2026-11-28_h200_hashed.md, 1,048,576 tokens)
KERNELS, PASSES = (1.50e-3, 6.84e-3), (1.09e-3, 2.60e-3)
#: the same of a call that ranks share or that reads rows of earlier chunks, before one function of kernels computed it
SHARED_KERNELS, SHARED_PASSES = (2.05e-3, 11.28e-3), (7.03e-3, 13.78e-3)
ENTRIES, FEATURES, ROWS = 3 << 20, 128, BLOCK + 64


class HashedSizes(NamedTuple):
    """H, D, K, G and M of a call."""

    heads: int
    head_dim: int
    kv_heads: int
    groups: int
    codes: int


def entry_seconds(x: Hashed, sizes: HashedSizes, shared: bool) -> tuple[float, ...]:
    """Return the (forward, backward) seconds of the op on an H200 for one row or one lookup.

    Args:
        shared: whether ranks share the call, or it reads rows of earlier chunks.
    """
    measured = (SHARED_KERNELS, SHARED_PASSES) if shared else (KERNELS, PASSES)
    wide = (sizes.heads // sizes.kv_heads * sizes.head_dim + sizes.groups * sizes.codes) / FEATURES / ENTRIES
    rows = (BLOCK + x.latest) / ROWS
    return tuple(wide * (rows * kernels + passes) for kernels, passes in zip(*measured, strict=True))


def sent_bytes(
    x: Hashed, sizes: HashedSizes, dtype: torch.dtype, rows: float, lookups: float, ranks: int
) -> tuple[float, float]:
    """Return the mean bytes that a rank sends in the op's forward and backward, if it has these rows and lookups."""
    new = lambda *shape, dtype=dtype: torch.empty(0, *shape, dtype=dtype, device="meta")  # noqa: E731
    chances = new(sizes.groups, sizes.codes, dtype=torch.promote_types(dtype, torch.float32))
    row = new(sizes.head_dim)
    inputs = Inputs(new(sizes.heads // sizes.kv_heads, sizes.head_dim), row, row, chances, chances)
    moved = tuple(n * (ranks - 1) / ranks for n in (rows, lookups))
    forward, backward = planned_bytes(inputs, ranks, 0, x.latest, moved, moved, kernels=True)
    return forward, forward + backward


def carried_hashed(x: Hashed, sizes: HashedSizes, tokens: int, chunk: int) -> tuple[int, int]:
    """Return how many rows a layer carries to a chunk, at most: the sum over chunks, and the number in the last chunk."""
    most = x.codes**x.groups * x.latest
    rows = [sizes.kv_heads * min(most, at) for at in range(chunk, tokens, chunk)]
    return sum(rows), rows[-1] if rows else 0


def looked_up_share(x: Hashed, chunk: int) -> float:
    """Return the share of carried rows that a chunk looks up if all codes are equally frequent."""
    return -math.expm1(-chunk * x.probes / x.codes**x.groups)


class CarriedBytes(NamedTuple):
    """Bytes of a layer's rows on a rank.

    `stored`: replaced rows of all chunks; `live`: carried rows; `grads`: their gradients; `moved`: copies for a short time,
    either of all rows and gradients for the next chunk, or twice of the rows that a chunk looks up.
    """

    stored: int = 0
    live: int = 0
    grads: int = 0
    moved: int = 0

    @classmethod
    def of(
        cls, x: Hashed, sizes: HashedSizes, dtype: torch.dtype, tokens: int, chunk: int, ranks: int = 1
    ) -> CarriedBytes:
        """Count the bytes of one layer."""
        wide, codes = torch.promote_types(dtype, torch.float32).itemsize, sizes.groups * sizes.codes
        row, grad = 2 * sizes.head_dim * dtype.itemsize + codes * wide + 16, (2 * sizes.head_dim + codes) * wide
        live = carried_hashed(x, sizes, tokens, chunk)[1]
        leaving = sizes.kv_heads * min(chunk, x.codes**x.groups * x.latest) * len(range(chunk, tokens, chunk))
        stored = max(0, leaving - live)
        moved = live * max(row + grad, round(looked_up_share(x, chunk) * (2 * row + grad)))
        return cls(*(-(-n // ranks) for n in (stored * row, live * row, live * grad, moved)))


def hashed_workspace(
    forward: bool,
    tokens: int,
    sizes: HashedSizes,
    dtype: torch.dtype,
    spec: str,
    meter: Callable[[], Any],
    capability: tuple[int, int],
) -> int:
    """Return the bytes of a call with `tokens` tokens in all samples; `meter` returns a new `Meter`.

    GPUs of compute capability 8.0 or later run Triton kernels; otherwise the op runs PyTorch code, which needs more.
    """
    described = HashedSpec.decode(spec)
    if capability >= (8, 0) and importlib.util.find_spec("triton") is not None:
        (short, low), (long, high) = _metered(forward, sizes, dtype, described.latest, described.probes, meter, 0)
        return max(0, round(low + (high - low) * (tokens - short) / (long - short)))
    # the peak is in a part of the computation or outside of all parts, whichever needs more at this length
    in_part = _metered(forward, sizes, dtype, described.latest, described.probes, meter, lookup.PART)
    outside = _metered(forward, sizes, dtype, 1, described.probes, meter, 1)
    lines = [
        low + (high - low) * (tokens - short) / (long - short) for (short, low), (long, high) in (in_part, outside)
    ]
    return max(0, round(max(lines)))


@functools.lru_cache(maxsize=64)
def _metered(
    forward: bool, sizes: HashedSizes, dtype: torch.dtype, latest: int, probes: int, meter: Callable[[], Any], part: int
) -> tuple[tuple[int, int], ...]:
    """Run two calls on the CPU, and return the (tokens, bytes) of each; `part`: see `lookup.PART`, 0 for kernels.

    Each call has several parts, because bytes grow with tokens in a line from there on. It has an incomplete last block,
    which needs more memory.
    """
    numbers = (BLOCK + latest) * (3 * sizes.heads // sizes.kv_heads + 2 * sizes.codes)
    entries = 8 * part // (numbers * sizes.kv_heads * (1 + probes))
    short = max(LEAST, min(latest, MOST), entries) | 1
    with real_tensors(), replaced(lookup, "PART", part) if part else _kernels():
        return tuple((n, _held(forward, n, sizes, dtype, latest, probes, meter())) for n in (short, 2 * short + 1))


@contextlib.contextmanager
def _kernels() -> Iterator[None]:
    """Allocate the tensors of the kernels, and launch nothing."""
    from triton.runtime.jit import KernelInterface

    modules = [importlib.import_module(f"lightning_dilated.ext.hashed.{x}") for x in ("kernels", "token_kernels")]
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(kernels, "why_not", lambda device: None))
        for module in modules:
            for name, value in list(vars(module).items()):
                if isinstance(value, KernelInterface):
                    stack.enter_context(replaced(module, name, _NotLaunched()))
        yield


class _NotLaunched:
    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **options: None


def _held(
    forward: bool, tokens: int, sizes: HashedSizes, dtype: torch.dtype, latest: int, probes: int, meter: Any
) -> int:
    """Run one call of a training step on the CPU, and return its bytes in addition to inputs and results."""
    heads, dim, kv_heads, groups, codes = sizes
    terms = LossTerms((1.0, 1.0, 1.0, 1.0))
    spec = encode(latest, probes, 1.0, False)
    with torch.device("cpu"), meter:
        q, k, v = (torch.zeros(1, tokens, n, dim, dtype=dtype) for n in (heads, kv_heads, kv_heads))
        wide = torch.promote_types(dtype, torch.float32)
        logits = [torch.zeros(1, tokens, kv_heads, groups, codes, dtype=wide) for _ in range(2)]
        for i in range(1, probes):  # every code that a query looks up has rows
            logits[1][:, i::probes, :, i - 1, 1:2] = 1
        tensors = [q, k, v, *logits, torch.zeros(heads, dtype=wide), None, None, None, terms.number]
        labelled = torch.ones(1, tokens, dtype=torch.bool)
        grad = torch.zeros_like(q)
        known = meter.live
        meter.reset_peak()
        if forward:
            terms.labelled = labelled
            results = run_forward(*tensors, spec)
        else:
            terms.scale = torch.ones(())
            results = run_backward(grad, *tensors, labelled, spec)
        return meter.peak - known - sum(x.nbytes for x in results)
