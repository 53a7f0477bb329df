"""The joint projection of q, k and v, with rotary positions.

Shape letters: B batch, N tokens, E embedding dim, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_dilated.attention.rotary import RotaryTable


@dataclass  # not frozen: torch.compile of 2.10 cannot trace how such a one is made
class Projection:
    """From x (B, N, E) to q (B, N, H, D), k and v (B, N, K, D) of heads of `head_dim`; q and k are turned by `table`.

    `mix`, of k and v side by side (B, N, 2 K D), comes before the turn.
    """

    head_dim: int
    table: RotaryTable | None = None
    mix: Callable[[Tensor], Tensor] | None = None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, group: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v by rows of weight ((H + 2 K) D, E) and bias; `group` = H / K.

        Views of one projection; with rotary positions v is one of its own, because q and k are turned into new tensors, and
        a view would keep the unturned ones until the backward.
        """
        kv, linear = len(weight) // (group + 2), nn.functional.linear
        heads = lambda y: y.unflatten(-1, (-1, self.head_dim))  # noqa: E731
        if self.mix is not None:
            q, keys_values = linear(x, weight, bias).split((group * kv, 2 * kv), -1)
            k, v = self.mix(keys_values).split((kv, kv), -1)
            if self.table is None:
                return heads(q), heads(k), heads(v)
            q, k = self.table.split(heads(torch.cat([q, k], -1)), group * kv // self.head_dim)
            return q, k, heads(v)
        if self.table is None:
            return tuple(heads(y) for y in linear(x, weight, bias).split((group * kv, kv, kv), -1))
        biases = (None, None) if bias is None else (bias[:-kv], bias[-kv:])
        joint = heads(linear(x, weight[:-kv], biases[0]))
        q, k = self.table.split(joint, group * kv // self.head_dim)
        return q, k, heads(linear(x, weight[-kv:], biases[1]))
