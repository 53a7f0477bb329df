"""CompiledPart: a part of a transformer block that torch.compile compiled, with a graph of its own for whole chunks.

Shape letters: B batch, N tokens, E embedding dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_dilated._compat.torch import allow_any_length, without_runtime_asserts

#: so many shapes of a part have graphs of fixed sizes
FIXED = 2


class CompiledPart:
    """A compiled function of x (B, N, E) and more; a call computes any length, and `whole` those that recur.

    torch compiles the second length that it meets for all lengths, and of several graphs that fit takes the latest. After
    one shorter chunk or tile, such as the last of a sequence, all others would run in that graph. Here they keep one of
    fixed sizes: torch holds graphs of `dynamic=False` apart from others.

    Args:
        part: the function.
        options: of torch.compile; with `dynamic` among them there is nothing to keep apart.
        shapes: those of x for which graphs of fixed sizes were made; added to.
        asserts: whether graphs have assertions on sizes that are known at run time only.
    """

    def __init__(
        self, part: Callable[..., Any], options: Mapping[str, Any], shapes: set[torch.Size], asserts: bool = True
    ) -> None:
        def compiled(**more: bool) -> Callable[..., Any]:
            run = torch.compile(part, **{**options, **more})
            return run if asserts else without_runtime_asserts(run)

        self._any, self._shapes = compiled(), shapes
        self._fixed = compiled(dynamic=False) if options.get("dynamic") is None else self._any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._any(*args, **kwargs)

    def whole(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The same of a whole chunk or tile. The first `FIXED` shapes have graphs of fixed sizes; more would be a graph
        for each batch size."""
        if len(self._shapes) < FIXED:
            self._shapes.add(x.shape)
        for bounds in (y for y in (*args, *kwargs.values()) if isinstance(y, Tensor) and y.ndim == 1):
            allow_any_length(bounds)  # of documents, whose number changes from batch to batch
        return (self._fixed if x.shape in self._shapes else self._any)(x, *args, **kwargs)
