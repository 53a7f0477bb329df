"""The stack of blocks that every model here shares, with its rotary table and its weights at the start.

Shape letters: B batch, N tokens, E embedding dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_dilated.attention.decode import KVCache
from lightning_dilated.attention.functional import autocast
from lightning_dilated.attention.rotary import Rotary, RotaryTable
from lightning_dilated.models.blocks import BlockOptions, TransformerBlock, default_hidden, make_norm
from lightning_dilated.models.drop_path import drop_path_factors
from lightning_dilated.models.memory import MemorySettings
from lightning_dilated.models.offload import Host
from lightning_dilated.models.recompute import in_groups
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.branch import integer


def odd_pattern(pattern: DilatedPattern, shift_layers: str, shift_below: int | None) -> DilatedPattern | None:
    """The pattern of layers 1, 3, ... where they have one of their own, else None.

    With "odd" their segments of w < `shift_below` (all finite ones if None) move by w // 2, whatever the sequence's length:
    no position is a wall for every layer then.

    Raises:
        ValueError: for another word, for a pattern that a shift is not defined for, and where nothing would move.
    """
    if shift_layers not in ("none", "odd"):
        raise ValueError(f"shift_layers must be none or odd; got {shift_layers!r}.")
    if shift_layers == "none":
        if shift_below is not None:
            raise ValueError(f'shift_below={shift_below!r} needs shift_layers="odd"; without it no layer is shifted.')
        return None
    if pattern.padding == "attended":
        raise ValueError(
            'shift_layers="odd" needs padding="masked": padding="attended" reproduces releases whose layers are unshifted.'
        )
    if any(b.shift for b in pattern.branches):
        raise ValueError(
            f'shift_layers="odd" shifts a pattern that has no shift of its own, got {pattern}. Leave its shifts out, or '
            'use shift_layers="none".'
        )
    odd = pattern.shifted(0.5, shift_below)
    if odd == pattern:
        raise ValueError(
            f'shift_layers="odd" would move no branch of {pattern}: it takes finite segments of at least 2 tokens'
            + ("" if shift_below is None else f", below shift_below={shift_below}")
            + '. Use shift_layers="none".'
        )
    return odd


class DilatedTransformer(nn.Module):
    """`depth` blocks and a last norm; positions are turned into one rotary table for all of them.

    `shift_layers`, `shift_below`: see `odd_pattern`.
    """

    def __init__(
        self,
        dim: int,
        depth: int,
        num_heads: int,
        pattern: DilatedPattern,
        *,
        causal: bool,
        hidden: int | None = None,
        num_kv_heads: int | None = None,
        options: BlockOptions | None = None,
        shift_layers: Literal["none", "odd"] = "none",
        shift_below: int | None = None,
    ) -> None:
        super().__init__()
        options = options or BlockOptions()
        integer(depth, "depth", 1)
        hidden = integer(hidden, "ffn_dim", 1) if hidden is not None else default_hidden(dim, options.ffn)
        odd = odd_pattern(pattern, shift_layers, shift_below)
        self.blocks = nn.ModuleList(
            TransformerBlock(dim, num_heads, hidden, which, causal=causal, num_kv_heads=num_kv_heads, options=options)
            for which in (odd if odd and i % 2 else pattern for i in range(depth))
        )
        self.norm = make_norm(options.norm, dim)
        self.drop_path = options.drop_path
        self.residual_dtype = options.residual_dtype and getattr(torch, options.residual_dtype)
        self._memory, self._host = MemorySettings(), Host(0)
        self.rotary: Rotary | None = self.blocks[0].attention.rotary

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
        given = {"positions": self._table(x, positions, caches), "lengths": lengths, "cu_seqlens": cu_seqlens}
        if caches is None:
            drops = drop_path_factors(self.drop_path if self.training else 0.0, len(self.blocks), x)
            more = [{} if drops is None else {"drop": d} for d in (drops if drops is not None else self.blocks)]
            layers = [partial(block, **given, **m) for block, m in zip(self.blocks, more, strict=True)]
        else:  # past what compiles a call: every token would have a length of its own
            layers = [partial(b.forward, **given, cache=c) for b, c in zip(self.blocks, caches, strict=True)]
        if watch is not None:
            watch(x)
            layers = [partial(_watched, layer, watch) for layer in layers]
        every = self._memory.every if torch.is_grad_enabled() and watch is None else 1
        x = in_groups(layers, x, every, self._host)
        return self.norm(x) if normed else x

    def _table(self, x: Tensor, positions: Tensor | None, caches: Sequence[KVCache] | None) -> RotaryTable | None:
        """Rotary positions for all blocks."""
        if self.rotary is None:
            return None
        return self.rotary.table(x, _working_dtype(x), positions, caches[0].length if caches else 0)

    def compile_blocks(self) -> None:
        """Compile each block in place, as one graph; one called by itself takes a rotary table then, no positions."""
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
        residual = name.endswith(("out_proj.weight", "fc2.weight"))
        nn.init.normal_(parameter, std=std / (2 * depth) ** 0.5 if residual else std)
