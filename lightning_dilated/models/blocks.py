"""The pre-norm transformer block: attention, feed-forward and stochastic depth.

Shape letters: B batch, N tokens, E embedding dim, H heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_dilated._validation import flag, integer, one_of, real
from lightning_dilated.attention.context import LayerContext
from lightning_dilated.attention.functional import AUTOCAST_DEVICES
from lightning_dilated.attention.modules import MultiheadDilatedAttention
from lightning_dilated.attention.rotary import RotaryTable
from lightning_dilated.memory.block_memory import BlockMemory
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.pattern import DilatedPattern, Hashed
from lightning_dilated.recurrence import Recurrence
from lightning_dilated.sequence import active_sequence


def drop_path_rates(rate: float, depth: int) -> list[float]:
    """Return each layer's drop probability, which rises linearly from 0 to `rate` (arXiv 1603.09382)."""
    return [rate * i / max(1, depth - 1) for i in range(depth)]


def drop_path_factors(rate: float, depth: int, x: Tensor, samples: int | None = None) -> Tensor | None:
    """Draw factors (depth, 2, B, 1, 1) for attention and feed-forward in each layer; None if `rate` is 0.

    A factor is 0 with a layer's probability p, else 1 / (1 - p). All ranks of a sequence drop the same samples, because
    they use rank 0's seed. The seed is from torch's CPU generator, so `torch.manual_seed` makes results reproducible.

    Args:
        rate: probability in the last layer, in [0, 1).
        x: (B, N, E); only its batch size, dtype and device are used.
        samples: number of samples packed into one row; None: B.
    """
    if rate == 0:
        return None
    samples = len(x) if samples is None else samples
    seed, group = int(torch.randint(2**62, ())), active_sequence()
    if group is not None:
        seed = group.agree({"call": "drop_path", "rate": rate, "samples": samples}, seed=seed).seed
    drawn = torch.rand(depth, 2, samples, 1, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    p = torch.tensor(drop_path_rates(rate, depth), dtype=torch.float64)[:, None, None, None, None]
    return ((drawn >= p) / (1 - p)).to(x.device, x.dtype)


@dataclass(frozen=True)
class BlockOptions:
    """Options of a block, without its sizes.

    Args:
        norm: kind of the norms before attention, before the feed-forward and after the last block.
        ffn: activation of the feed-forward; "swiglu" has a gate (arXiv 2002.05202).
        bias: whether linear layers have a bias.
        dropout: probability for hidden features, in [0, 1).
        attention_dropout: probability for attention weights, in [0, 1).
        drop_path: probability of stochastic depth in the last layer (arXiv 1603.09382); it rises from 0 in the first.
        sub_layernorm: add norms before the output projections of attention and feed-forward (arXiv 2210.06423).
        position_encoding: "rotary", "xpos" (rotary with decay, arXiv 2212.10554) or "none".
        xpos_scale_base: number of tokens over which xPos decays.
        engine: attention backend; "auto": the fastest one that supports the call.
        kv_conv: number of taps, usually 4, of a short convolution on every layer's keys and values, which mixes
            neighbouring tokens before attention. None: no convolution.
        residual_dtype: dtype of the hidden states between blocks. Under mixed precision the default is float32;
            "bfloat16" halves the memory that recomputation saves.
        rotary_base: base of the layer's rotary positions.
        global_rotary: whether dense heads have rotary positions. False helps these heads to find keys in sequences that
            are longer than in training (docs/patterns.md).

    Raises:
        ValueError, TypeError: naming the option.
    """

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
    kv_conv: int | None = None
    drop_path: float = 0.0
    residual_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    global_rotary: bool = True

    def __post_init__(self) -> None:
        for name, allowed in (("norm", ("rmsnorm", "layernorm")), ("ffn", ("swiglu", "gelu"))):
            one_of(getattr(self, name), name, allowed)
        if self.residual_dtype not in (None, "float32", "bfloat16", "float16"):
            raise ValueError(
                f"residual_dtype must be float32, bfloat16, float16 or null (the embedding's); got {self.residual_dtype!r}."
            )
        flag(self.bias, "bias")
        flag(self.sub_layernorm, "sub_layernorm")
        if self.kv_conv is not None:
            integer(self.kv_conv, "kv_conv", 2)
        for name in ("dropout", "attention_dropout", "drop_path"):
            real(getattr(self, name), name, least=0, below=1)

    def with_base(self, base: float | None) -> BlockOptions:
        """Return a copy of the options with the rotary base `base`, or without positions if `base` is None."""
        return replace(self, position_encoding="none") if base is None else replace(self, rotary_base=base)


def make_norm(kind: str, dim: int) -> nn.Module:
    """Make an RMSNorm or LayerNorm over the embedding dim."""
    return nn.RMSNorm(dim, eps=1e-6) if kind == "rmsnorm" else nn.LayerNorm(dim, eps=1e-5)


def working(x: Tensor, weight: Tensor) -> Tensor:
    """Cast x to the dtype of the weight that multiplies it; under autocast return x, because the product casts it."""
    kind = x.device.type
    return x if kind in AUTOCAST_DEVICES and torch.is_autocast_enabled(kind) else x.to(weight.dtype)


class FeedForward(nn.Module):
    """A feed-forward E -> hidden -> E with GELU, or with the gate of SwiGLU (arXiv 2002.05202)."""

    def __init__(self, dim: int, hidden: int, options: BlockOptions) -> None:
        super().__init__()
        # a layer separate from fc1: splitting a joint output would cost one more pass over it in the backward
        self.gate = nn.Linear(dim, hidden, bias=options.bias) if options.ffn == "swiglu" else None
        self.fc1 = nn.Linear(dim, hidden, bias=options.bias)
        self.norm = nn.LayerNorm(hidden) if options.sub_layernorm else nn.Identity()
        self.fc2 = nn.Linear(hidden, dim, bias=options.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, N, E) to (B, N, E)."""
        x = nn.functional.gelu(self.fc1(x)) if self.gate is None else nn.functional.silu(self.gate(x)) * self.fc1(x)
        return self.fc2(self.norm(x))


class TransformerBlock(BlockMemory):
    """A pre-norm block: x + attention(norm(x)), then x + feed_forward(norm(x))."""

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
        recurrence: Recurrence | None = None,
        hashed: Hashed | None = None,
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
            global_rotary=options.global_rotary,
            kv_conv=options.kv_conv,
            recurrence=recurrence,
            hashed=hashed,
            engine=options.engine,
        )
        self.ffn_norm = make_norm(options.norm, dim)
        self.ffn = FeedForward(dim, hidden, options)
        self.dropout = nn.Dropout(options.dropout)
        self.memory = MemorySettings()

    def _attend(
        self,
        x: Tensor,
        positions: Tensor | RotaryTable | None,
        lengths: Tensor | None,
        cu_seqlens: Tensor | None,
        cache: LayerContext | None,
        drop: Tensor | None,
    ) -> Tensor:
        documents = {"lengths": lengths, "cu_seqlens": cu_seqlens}
        normed = self.attention_norm(working(x, self.attention_layer.in_proj_weight))
        return self._added(x, self.attention(normed, positions=positions, cache=cache, **documents)[0], drop)

    def _normed(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self.attention_norm(working(x, self.attention_layer.in_proj_weight)).to(dtype)

    def _join(self, x: Tensor, out: Tensor, drop: Tensor | None) -> Tensor:
        return self._added(x, self.attention.join(out), drop)

    def _feed(self, x: Tensor, drop: Tensor | None) -> Tensor:
        return self._added(x, self.ffn(self.ffn_norm(working(x, self.ffn.fc1.weight))), drop)

    def _added(self, x: Tensor, y: Tensor, drop: Tensor | None) -> Tensor:
        """Return x + y in the dtype of x, after dropout and stochastic depth on y."""
        y = self.dropout(y)
        return x + (y if drop is None else y * drop).to(x.dtype)


def default_hidden(dim: int, ffn: str) -> int:
    """Return 4 E for GELU, or 8/3 E rounded up to a multiple of 32 for SwiGLU, which has 3 matrices instead of 2."""
    return 4 * dim if ffn == "gelu" else -(-8 * dim // 3 // 32) * 32
