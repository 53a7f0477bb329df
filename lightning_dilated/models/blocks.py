"""The transformer: feed-forward, pre-norm block, and the stack of blocks that every model here shares.

Shape letters: B batch, N tokens, E embedding dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_dilated.attention.decode import KVCache
from lightning_dilated.attention.functional import autocast
from lightning_dilated.attention.layers import MultiheadDilatedAttention
from lightning_dilated.attention.rotary import Rotary, RotaryTable, token_positions
from lightning_dilated.models.drop_path import drop_path_factors
from lightning_dilated.models.recompute import guarded, recomputed
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.branch import integer


@dataclass
class BlockOptions:
    """What a block is made of, apart from its sizes; every field is an argument of the models too."""

    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    ffn: Literal["swiglu", "gelu"] = "swiglu"
    bias: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    sub_layernorm: bool = False
    position_encoding: Literal["none", "rotary", "xpos"] = "rotary"
    rotary_base: float = 10000.0
    xpos_scale_base: float = 512.0
    engine: str = "auto"
    #: stochastic depth of the last layer; it rises linearly from 0 in the first
    drop_path: float = 0.0

    def __post_init__(self) -> None:
        for name, allowed in (("norm", ("rmsnorm", "layernorm")), ("ffn", ("swiglu", "gelu"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}.")
        for name in ("dropout", "attention_dropout", "drop_path"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
                raise ValueError(f"{name} must be a probability in [0, 1), got {value!r}.")


def make_norm(kind: str, dim: int) -> nn.Module:
    """RMSNorm or LayerNorm over the embedding dim."""
    return nn.RMSNorm(dim, eps=1e-6) if kind == "rmsnorm" else nn.LayerNorm(dim, eps=1e-5)


class FeedForward(nn.Module):
    """E -> hidden -> E with GELU, or with SwiGLU's gate (arXiv 2002.05202)."""

    def __init__(self, dim: int, hidden: int, options: BlockOptions) -> None:
        super().__init__()
        # of its own rather than half of fc1: the gradient of a chunk is one more pass over the widest activation
        self.gate = nn.Linear(dim, hidden, bias=options.bias) if options.ffn == "swiglu" else None
        self.fc1 = nn.Linear(dim, hidden, bias=options.bias)
        self.norm = nn.LayerNorm(hidden) if options.sub_layernorm else nn.Identity()
        self.fc2 = nn.Linear(hidden, dim, bias=options.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, E) to (B, N, E)."""
        x = nn.functional.gelu(self.fc1(x)) if self.gate is None else nn.functional.silu(self.gate(x)) * self.fc1(x)
        return self.fc2(self.norm(x))


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        hidden: int,
        pattern: DilatedPattern,
        *,
        causal: bool,
        num_kv_heads: int | None = None,
        options: BlockOptions | None = None,
    ) -> None:
        super().__init__()
        options = options or BlockOptions()
        self.attention_norm = make_norm(options.norm, dim)
        self.attention = MultiheadDilatedAttention(
            dim,
            num_heads,
            pattern,
            num_kv_heads=num_kv_heads,
            causal=causal,
            dropout=options.attention_dropout,
            bias=options.bias,
            sub_layernorm=options.sub_layernorm,
            position_encoding=options.position_encoding,
            rotary_base=options.rotary_base,
            xpos_scale_base=options.xpos_scale_base,
            engine=options.engine,
        )
        self.ffn_norm = make_norm(options.norm, dim)
        self.ffn = FeedForward(dim, hidden, options)
        self.dropout = nn.Dropout(options.dropout)
        #: what the backward computes again, one of `recompute.POLICIES`
        self.recompute = "none"

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As `nn.Module.compile`."""
        super().compile(*args, **kwargs)
        self._compiled_call_impl = guarded(self._compiled_call_impl)

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | RotaryTable | None = None,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: KVCache | None = None,
        drop: Tensor | None = None,
    ) -> Tensor:
        """(B, N, E) to (B, N, E); the keywords are those of `MultiheadDilatedAttention`, and `drop`, (2, B, 1, 1) factors of
        the two branches (see `drop_path`)."""
        if self.recompute == "none" or cache is not None or not torch.is_grad_enabled():
            return self._forward(x, positions, lengths, cu_seqlens, cache, drop)
        return recomputed(lambda y: self._forward(y, positions, lengths, cu_seqlens, None, drop), x, self.recompute)

    def _forward(
        self,
        x: Tensor,
        positions: Tensor | RotaryTable | None,
        lengths: Tensor | None,
        cu_seqlens: Tensor | None,
        cache: KVCache | None,
        drop: Tensor | None,
    ) -> Tensor:
        attended, _ = self.attention(
            self.attention_norm(x), positions=positions, lengths=lengths, cu_seqlens=cu_seqlens, cache=cache
        )
        attended = self.dropout(attended)
        x = x + (attended if drop is None else attended * drop[0])
        out = self.dropout(self.ffn(self.ffn_norm(x)))
        return x + (out if drop is None else out * drop[1])


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
        self.rotary: Rotary | None = self.blocks[0].attention.rotary

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        caches: Sequence[KVCache] | None = None,
        watch: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """(B, N, E) to (B, N, E); `positions` are global, counted from 0 (or after the cached tokens) if None; `watch` is
        called with the input and with every block's output."""
        table: RotaryTable | None = None
        if self.rotary is not None:
            if positions is None:
                start = caches[0].length if caches else 0
                positions = token_positions(start, x.shape[1])
            if positions.shape not in (x.shape[1:2], x.shape[:2]):
                raise ValueError(
                    f"positions must be {tuple(x.shape[1:2])} or {tuple(x.shape[:2])}, got {tuple(positions.shape)}."
                )
            table = self.rotary(positions.to(x.device), _working_dtype(x))
        drops = drop_path_factors(self.drop_path if self.training else 0.0, len(self.blocks), x)
        if watch is not None:
            watch(x)
        for i, block in enumerate(self.blocks):
            if caches is None:
                drop = {} if drops is None else {"drop": drops[i]}
                x = block(x, positions=table, lengths=lengths, cu_seqlens=cu_seqlens, **drop)
            else:  # past what compiles a call: every token would have a length of its own
                x = block.forward(x, positions=table, lengths=lengths, cu_seqlens=cu_seqlens, cache=caches[i])
            if watch is not None:
                watch(x)
        return self.norm(x)

    def compile_blocks(self) -> None:
        """Compile each block in place, as one graph where that can be (xPos looks at values)."""
        xpos = self.rotary is not None and self.rotary.xpos_scale_base is not None
        for block in self.blocks:
            block.compile(fullgraph=not xpos)

    def new_caches(self) -> list[KVCache]:
        """An empty cache for every block."""
        return [block.attention.new_cache() for block in self.blocks]


def _working_dtype(x: Tensor) -> torch.dtype:
    """The dtype that q and k will have, so that xPos is checked against the range it will really have."""
    return autocast(x[:0])[0].dtype


def default_hidden(dim: int, ffn: str) -> int:
    """4 E for GELU; 8/3 E, up to a multiple of 32, for SwiGLU, which has about as many weights."""
    return 4 * dim if ffn == "gelu" else -(-8 * dim // 3 // 32) * 32


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
