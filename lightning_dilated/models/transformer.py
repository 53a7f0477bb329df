"""The stack of blocks that every model here shares, with its rotary table and its weights at the start.

Shape letters: B batch, N tokens, E embedding dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from lightning_dilated.attention.functional import autocast
from lightning_dilated.attention.kv_cache import KVCache
from lightning_dilated.attention.rotary import Rotary, RotaryTable
from lightning_dilated.memory.offload import Host
from lightning_dilated.memory.recompute import in_groups
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.models.blocks import BlockOptions, TransformerBlock, default_hidden, drop_path_factors, make_norm
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.branch import integer


class DilatedTransformer(nn.Module):
    """Blocks and a last norm; positions become one rotary table for all blocks of one base.

    Args:
        dim: E.
        patterns: of each block; their number is the depth.
        num_heads, num_kv_heads, causal: of every block.
        hidden: of the feed-forward; None: `default_hidden`.
        options: of every block.
        rotary_bases: of each block, None for one without positions; None: all have `options.rotary_base`.
    """

    def __init__(
        self,
        dim: int,
        patterns: Sequence[DilatedPattern],
        num_heads: int,
        *,
        causal: bool,
        hidden: int | None = None,
        num_kv_heads: int | None = None,
        options: BlockOptions | None = None,
        rotary_bases: Sequence[float | None] | None = None,
    ) -> None:
        super().__init__()
        options = options or BlockOptions()
        integer(len(patterns), "depth", 1)
        hidden = integer(hidden, "ffn_dim", 1) if hidden is not None else default_hidden(dim, options.ffn)
        each = [options] * len(patterns) if rotary_bases is None else [options.with_base(base) for base in rotary_bases]
        self.blocks = nn.ModuleList(
            TransformerBlock(dim, num_heads, hidden, pattern, causal=causal, num_kv_heads=num_kv_heads, options=own)
            for pattern, own in zip(patterns, each, strict=True)
        )
        self.norm = make_norm(options.norm, dim)
        self.drop_path = options.drop_path
        self.residual_dtype = options.residual_dtype and getattr(torch, options.residual_dtype)
        self._memory, self._host = MemorySettings(), Host(0)
        #: of each block, None for one without positions
        self.rotaries: list[Rotary | None] = [block.attention.rotary for block in self.blocks]

    @property
    def memory(self) -> MemorySettings:
        """What training keeps, of the stack and of each block."""
        return self._memory

    @memory.setter
    def memory(self, settings: MemorySettings) -> None:
        """Of the stack and of each block."""
        for block in self.blocks:
            block.memory = settings
        self._memory, self._host = settings, Host(settings.offload)

    def free_host_memory(self) -> None:
        """Give host memory of offloaded block inputs back to the system; forwards that wait for a backward are lost.

        A later forward takes it anew.
        """
        self._host.close()

    def residual(self, x: Tensor) -> Tensor:
        """x in the dtype of the hidden states between blocks. Who makes x calls it, lest the wider one be held meanwhile."""
        return x if self.residual_dtype is None else x.to(self.residual_dtype)

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        caches: Sequence[KVCache] | None = None,
        watch: Callable[[Tensor], None] | None = None,
        normed: bool = True,
    ) -> Tensor:
        """(B, N, E) to (B, N, E); `positions` are global, counted from 0 (or after the cached tokens) if None; `watch` is
        called with the input and with every block's output; `normed=False` leaves the last norm to the caller."""
        x = self.residual(x)
        tables = self._tables(x, positions, caches)
        of_all = {"lengths": lengths, "cu_seqlens": cu_seqlens}
        if caches is None:
            drops = drop_path_factors(self.drop_path if self.training else 0.0, len(self.blocks), x)
            own = [{"positions": table} for table in tables]
            for one, drop in zip(own, () if drops is None else drops, strict=drops is not None):
                one["drop"] = drop
            layers = [partial(block, **of_all, **one) for block, one in zip(self.blocks, own, strict=True)]
        else:  # past what compiles a call: every token would have a length of its own
            own = [{"positions": t, "cache": c} for t, c in zip(tables, caches, strict=True)]
            layers = [partial(block.forward, **of_all, **one) for block, one in zip(self.blocks, own, strict=True)]
        if watch is not None:
            watch(x)
            layers = [partial(_watched, layer, watch) for layer in layers]
        every = self._memory.every if torch.is_grad_enabled() and watch is None else 1
        x = in_groups(layers, x, every, self._host)
        return self.norm(x) if normed else x

    def _tables(
        self, x: Tensor, positions: Tensor | None, caches: Sequence[KVCache] | None
    ) -> list[RotaryTable | None]:
        """Rotary positions for each block; blocks of one base share a table."""
        dtype, start, tables = _working_dtype(x), caches[0].length if caches else 0, {}
        for rotary in self.rotaries:
            if rotary is not None and rotary.base not in tables:
                tables[rotary.base] = rotary.table(x, dtype, positions, start)
        return [None if rotary is None else tables[rotary.base] for rotary in self.rotaries]

    def compile_blocks(self) -> None:
        """Compile each block in place, as one graph; one called by itself takes a rotary table then, no positions."""
        kinds = len({block.attention_layer.attention.pattern for block in self.blocks})
        # a graph for each pattern: with gradients, without, with static and dynamic lengths
        torch._dynamo.config.recompile_limit = max(8 * kinds, torch._dynamo.config.recompile_limit)
        for block in self.blocks:
            block.compile(fullgraph=True)

    def new_caches(self) -> list[KVCache]:
        """An empty cache for every block."""
        return [block.attention.new_cache() for block in self.blocks]


def _watched(layer: Callable[[Tensor], Tensor], watch: Callable[[Tensor], None], x: Tensor) -> Tensor:
    x = layer(x)
    watch(x)
    return x


def _working_dtype(x: Tensor) -> torch.dtype:
    """The dtype that q and k will have, so that xPos is checked against the range it will really have."""
    return autocast(x[:0])[0].dtype


def init_weights(model: nn.Module, depth: int, dim: int) -> None:
    """Normal(0, std) for matrices and embeddings, 0 for biases; projections into the residual by std / sqrt(2 depth).

    std = sqrt(2 / (5 dim)), about 0.02 at a `dim` of 1024 (Nguyen and Salazar 2019, arXiv 1910.05895, SmallInit): with 0.02
    everywhere narrow models hardly begin to learn.
    """
    std = (2 / (5 * integer(dim, "dim", 1))) ** 0.5
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            continue
        if name.endswith("kv_conv.weight"):
            nn.init.zeros_(parameter)  # the identity
            continue
        residual = name.endswith(("out_proj.weight", "fc2.weight"))
        nn.init.normal_(parameter, std=std / (2 * depth) ** 0.5 if residual else std)
