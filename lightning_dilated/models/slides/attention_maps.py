"""What chosen queries attend to in the layers of a transformer, while it runs: exact, and without an N x N matrix.

Shape letters: B batch, N tokens, Q chosen queries, H query heads, E embedding dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dilated.attention import DilatedAttention, attention_weights
from lightning_dilated.models.transformer import DilatedTransformer
from lightning_dilated.pattern.branch import integer


@torch.no_grad()
def layer_weights(
    transformer: DilatedTransformer,
    x: Tensor,
    queries: Sequence[int],
    layers: Sequence[int],
    lengths: Tensor | None = None,
) -> list[Tensor]:
    """The weights that some layers give every token for some queries; the layers above the last one are not run.

    They are read where the op gets q and k, so that whatever changes these (low-rank updates, autocast) is part of them.

    Args:
        transformer: without rotary positions, in eval mode.
        x: (B, N, E), its input.
        queries: Q positions in [0, N).
        layers: numbers in [0, depth), rising.
        lengths: (B,), as the transformer takes them.

    Returns:
        For each layer (B, H, Q, N), as `attention_weights` returns it.
    """
    found: list[Tensor] = []

    def look(core: nn.Module, args: Any, kwargs: Any) -> None:
        options = {name: kwargs[name] for name in ("causal", "lengths", "cu_seqlens")}
        found.append(attention_weights(*args[:2], core.pattern, queries, scale=core.scale, **options))

    with torch.compiler.set_stance("force_eager"):  # a hook in a compiled block would compile it anew
        for i, block in enumerate(transformer.blocks[: max(layers) + 1]):
            cores = [m for m in block.modules() if isinstance(m, DilatedAttention)] if i in layers else []
            hooks = [core.register_forward_pre_hook(look, with_kwargs=True) for core in cores]
            try:
                x = block(x, lengths=lengths)
            finally:
                for hook in hooks:
                    hook.remove()
    return found


def chosen_layers(layer: Any, depth: int) -> list[int]:
    """The numbers of the layers that `layer` names: "all", or one from -depth to depth - 1.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(layer, str) and layer == "all":
        return list(range(depth))
    if isinstance(layer, bool) or not hasattr(layer, "__index__") or not -depth <= index(layer) < depth:
        raise ValueError(
            f"layer must be 'all' or a number from {-depth} to {depth - 1} (-1 is the last), got {layer!r}."
        )
    return [index(layer) % depth]


def tile_rows(queries: Any, tiles: int) -> list[int]:
    """The rows of tiles: one further on, after the class token's.

    Raises:
        TypeError, ValueError: for what is no list of tiles in [0, `tiles`).
    """
    given = queries.tolist() if isinstance(queries, Tensor) else queries
    if not isinstance(given, (list, tuple, range)):
        raise TypeError(f"queries must be a list of tiles such as [0], or None for the class token; got {queries!r}.")
    found = [integer(tile, f"queries[{i}]", 0) for i, tile in enumerate(given)]
    if any(tile >= tiles for tile in found):
        raise ValueError(f"queries holds tile {max(found)}, but there are {tiles} tiles (0..{tiles - 1}).")
    return [tile + 1 for tile in found]
