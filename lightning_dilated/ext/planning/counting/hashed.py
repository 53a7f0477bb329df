"""Compute the memory of the op of hashed heads in addition to its inputs and results: a Meter measures short calls.

Shape letters: N tokens, H query heads, K kv heads, D head dim, G groups of M codes, P lookups for each query.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from lightning_dilated import kernels
from lightning_dilated._compat.torch import real_tensors
from lightning_dilated.ext._compat.torch import replaced
from lightning_dilated.ext.hashed import lookup
from lightning_dilated.ext.hashed.functional import BLOCK
from lightning_dilated.ext.hashed.op import HashedSpec, LossTerms, encode, run_backward, run_forward

#: smallest number of tokens of a short call, and the largest that `latest` causes
LEAST, MOST = 2048, 8192


class HashedSizes(NamedTuple):
    """H, D, K, G and M of a call."""

    heads: int
    head_dim: int
    kv_heads: int
    groups: int
    codes: int


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
