"""Sliding windows with cuDNN: one call computes a band, with a graph of nvidia-cudnn-frontend (extra `windows`).

torch's cuDNN attention has no bands. Each combination of shape, strides, scale and band needs a graph, which takes time
to build. The Triton kernels therefore compute short blocks, which vary in length, and bands that cuDNN refuses.
Shape letters: G samples and segments, J heads, n rows, D head dim.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_dilated.attention.backends.base import Band, Engine, Terms

_log = logging.getLogger(__name__)
#: minimum number of rows in a block that cuDNN computes
FEWEST = 8192
#: maximum number of cached graphs; a hybrid model needs two for each shape of a batch
REMEMBERED = 256
#: cuDNN's handles, one for each thread and device: a handle belongs to one stream at a time
_handles = threading.local()


@functools.cache
def installed() -> bool:
    """Return whether nvidia-cudnn-frontend is installed."""
    return importlib.util.find_spec("cudnn") is not None


@functools.cache
def with_bands(engine: Engine, other: Engine) -> Engine:
    """Return cuDNN's engine with `bands`; the engine `other` computes bands that cuDNN's graphs do not support."""
    forward = functools.partial(_forward, engine, other)
    return replace(engine, forward=forward, backward=functools.partial(_backward, engine, other), bands=True)


@dataclass(frozen=True)
class _Graph:
    """A built graph, its tensors by name, and the bytes of its workspace."""

    graph: Any
    tensors: Mapping[str, Any]
    workspace: int

    def run(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Write the results into `tensors`, on torch's current stream."""
        space = torch.empty(max(1, self.workspace), dtype=torch.uint8, device=device)
        named = {self.tensors[name]: x for name, x in tensors.items()}
        self.graph.execute(named, space, handle=_handle(device))


#: (size, strides) of a tensor
_Place = tuple[tuple[int, ...], tuple[int, ...]]


def _place(x: Tensor) -> _Place:
    return tuple(x.shape), x.stride()


def _serves(q: Tensor, k: Tensor, band: Band) -> bool:
    """Return whether graphs support the block: it is long, a row sees itself, and no stride repeats elements."""
    dense = all(step for x in (q, k) for n, step in zip(x.shape, x.stride(), strict=True) if n > 1)
    return q.shape == k.shape and q.shape[2] >= FEWEST and band.lower <= 0 <= band.upper and dense


def _forward(engine: Engine, other: Engine, q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    if (band := terms.band) is None:
        return engine.forward(q, k, v, terms)
    if _serves(q, k, band):
        out, lse = _like(q), torch.empty(*q.shape[:3], 1, dtype=torch.float32, device=q.device)
        tensors = {"q": q, "k": k, "v": v, "o": out, "stats": lse}
        if (graph := _graph(tensors, band, terms.scale)) is not None:
            graph.run(tensors, q.device)
            return out, lse[..., 0]
    return other.forward(q, k, v, terms)


def _backward(
    engine: Engine, other: Engine, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, terms: Terms
) -> tuple[Tensor, Tensor, Tensor]:
    if (band := terms.band) is None:
        return engine.backward(grad, q, k, v, out, lse, terms)
    if _serves(q, k, band):
        results = {"dq": _like(q), "dk": _like(k), "dv": _like(v)}
        merged = {"o": out.to(q.dtype), "dO": grad.to(q.dtype), "stats": lse.float().contiguous()[..., None]}
        tensors = {"q": q, "k": k, "v": v, **merged, **results}
        if (graph := _graph(tensors, band, terms.scale)) is not None:
            graph.run(tensors, q.device)
            return results["dq"], results["dk"], results["dv"]
    return other.backward(grad, q, k, v, out, lse, terms)


def _like(x: Tensor) -> Tensor:
    """Allocate a tensor like x (G, J, n, D), with a row's heads adjacent in memory, as in (B, N, H, D) tensors."""
    samples, heads, rows, dim = x.shape
    return torch.empty(samples, rows, heads, dim, dtype=x.dtype, device=x.device).transpose(1, 2)


def _graph(tensors: Mapping[str, Tensor], band: Band, scale: float) -> _Graph | None:
    """Return the graph for tensors of these shapes and strides; None if cuDNN refuses it."""
    q = tensors["q"]
    places = tuple((name, *_place(x)) for name, x in tensors.items())
    with torch.cuda.device(q.device):
        return _built(places, q.dtype, band, scale, q.device)


@functools.lru_cache(maxsize=REMEMBERED)
def _built(
    places: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...],
    dtype: torch.dtype,
    band: Band,
    scale: float,
    device: torch.device,
) -> _Graph | None:
    import cudnn

    kinds = cudnn.data_type
    kind = kinds.BFLOAT16 if dtype == torch.bfloat16 else kinds.HALF
    graph = cudnn.pygraph(
        io_data_type=kind, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT, handle=_handle(device)
    )
    options = {
        "attn_scale": scale,
        "diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT,
        "diagonal_band_left_bound": 1 - band.lower,
        "diagonal_band_right_bound": band.upper,
    }
    shapes = {name: (shape, strides) for name, shape, strides in places}
    kind_of = lambda name: kinds.FLOAT if name == "stats" else kind  # noqa: E731
    results = [name for name in ("dq", "dk", "dv") if name in shapes] or ["o", "stats"]
    inputs = {
        name: graph.tensor(dim=list(shape), stride=list(strides), data_type=kind_of(name), name=name)
        for name, (shape, strides) in shapes.items()
        if name not in results
    }
    try:
        if "dq" in shapes:
            computed = graph.sdpa_backward(**inputs, **options)
        else:
            computed = graph.sdpa(**inputs, generate_stats=True, **options)
        named = dict(zip(results, computed, strict=True))
        for name, x in named.items():
            shape, strides = shapes[name]
            x.set_output(True).set_dim(list(shape)).set_stride(list(strides)).set_data_type(kind_of(name))
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
    except (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError) as error:
        _log.info("cuDNN does not take windows of %s, band %s: %s", shapes["q"], band, error)
        return None
    return _Graph(graph, inputs | named, graph.get_workspace_size())


def _handle(device: torch.device) -> Any:
    """Return this thread's handle of a device, on torch's current stream."""
    import cudnn

    if not hasattr(_handles, "by_device"):
        _handles.by_device = {}
    if device not in _handles.by_device:
        with torch.cuda.device(device):
            _handles.by_device[device] = cudnn.create_handle()
    cudnn.set_stream(handle=_handles.by_device[device], stream=torch.cuda.current_stream(device).cuda_stream)
    return _handles.by_device[device]
