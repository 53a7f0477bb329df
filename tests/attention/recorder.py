"""Engines that tests register: one records the tensors of each call, one runs triton's kernels block by block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from torch import Tensor

from lightning_dilated.attention import resolve
from lightning_dilated.attention.backends import ENGINES, Engine


@dataclass
class Calls:
    """Tensors of every call, in order: forward (q, k, v), backward (grad, q, k, v, out, lse)."""

    forward: list[tuple[Tensor, ...]] = field(default_factory=list)
    backward: list[tuple[Tensor, ...]] = field(default_factory=list)

    def clear(self) -> None:
        self.forward.clear()
        self.backward.clear()

    @property
    def tensors(self) -> list[Tensor]:
        return [x for call in (*self.forward, *self.backward) for x in call]


def record(monkeypatch: pytest.MonkeyPatch, name: str, base: Engine | None = None, **statements: Any) -> Calls:
    """Record the calls of engine `name`, which computes as engine `base` (default: `name`) and has `statements`."""
    calls, base = Calls(), base or ENGINES[name]

    def forward(q, k, v, *args):
        calls.forward.append((q, k, v))
        return base.forward(q, k, v, *args)

    def backward(grad, q, k, v, out, lse, *call_args):
        calls.backward.append((grad, q, k, v, out, lse))
        return base.backward(grad, q, k, v, out, lse, *call_args)

    resolve.forget()  # the cache of resolved calls names the engines of earlier tests
    monkeypatch.setitem(ENGINES, name, replace(base, name=name, forward=forward, backward=backward, **statements))
    return calls


@contextlib.contextmanager
def block_by_block() -> Iterator[list[tuple[int, ...]]]:
    """Register the engine "blocks", which calls `kernels.dense` for every block, never a grouped or pipelined kernel.

    Yields a list with the shape of q in each forward so far.
    """
    from lightning_dilated.kernels import pipelined

    shapes, triton = [], ENGINES["triton"]

    def forward(q, *args):
        shapes.append(tuple(q.shape))
        return triton.forward(q, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipelined, "serves", lambda *views: False)
        resolve.forget()
        patch.setitem(ENGINES, "blocks", replace(triton, name="blocks", forward=forward))
        yield shapes
