"""CompiledPart: a part of a transformer block that torch.compile compiles, with separate graphs for whole chunks.

Shape letters: B batch, N tokens, E embedding dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_dilated._compat.torch import allow_any_length, without_runtime_asserts

#: maximum number of shapes of a part that get graphs of fixed sizes
FIXED = 2


class CompiledPart:
    """A compiled function of x (B, N, E) and other arguments, for any length; call `whole` for lengths that recur.

    torch compiles the second length for all lengths, and runs the latest graph that accepts the inputs. After one
    shorter chunk or tile, such as the last of a sequence, all chunks would run in the slower graph for all lengths. So
    `whole` uses graphs of fixed sizes, which torch stores separately because of `dynamic=False`.

    Args:
        part: the function.
        options: options of torch.compile; if they set `dynamic`, `whole` has no separate graphs.
        shapes: a set of the shapes of x that have graphs of fixed sizes; `whole` adds shapes to it.
        asserts: whether to keep assertions about sizes that are only known at run time.
    """

    def __init__(
        self, part: Callable[..., Any], options: Mapping[str, Any], shapes: set[torch.Size], asserts: bool = True
    ) -> None:
        def compiled(**extra: bool) -> Callable[..., Any]:
            run = torch.compile(part, **{**options, **extra})
            return run if asserts else without_runtime_asserts(run)

        self._any, self._shapes = compiled(), shapes
        self._fixed = compiled(dynamic=False) if options.get("dynamic") is None else self._any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._any(*args, **kwargs)

    def whole(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call the function on a whole chunk or tile. Only the first `FIXED` shapes get graphs of fixed sizes."""
        if len(self._shapes) < FIXED:
            self._shapes.add(x.shape)
        for bounds in (y for y in (*args, *kwargs.values()) if isinstance(y, Tensor) and y.ndim == 1):
            allow_any_length(bounds)  # the number of documents changes from batch to batch
        return (self._fixed if x.shape in self._shapes else self._any)(x, *args, **kwargs)
