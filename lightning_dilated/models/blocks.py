"""The pre-norm transformer block: attention, feed-forward, stochastic depth, and how it trains in little memory.

Shape letters: B batch, N tokens, E embedding dim.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_dilated._validation import integer, one_of, real
from lightning_dilated.attention.functional import AUTOCAST_DEVICES
from lightning_dilated.attention.kv_cache import KVCache
from lightning_dilated.attention.modules import MultiheadDilatedAttention
from lightning_dilated.attention.rotary import RotaryTable
from lightning_dilated.memory.head_chunks import HeadChunks, Pieces, attend_in_chunks
from lightning_dilated.memory.recompute import guarded, recomputed, result_is_unused
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.memory.token_chunks import tiled
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.sequence import active_sequence


def drop_path_rates(rate: float, depth: int) -> list[float]:
    """Each layer's probability: linearly from 0 in the first to `rate` in the last (arXiv 1603.09382)."""
    return [rate * i / max(1, depth - 1) for i in range(depth)]


def drop_path_factors(rate: float, depth: int, x: Tensor) -> Tensor | None:
    """(depth, 2, B, 1, 1) factors of the two branches of every layer, 0 or 1 / (1 - p); None where nothing is dropped.

    The ranks of a sequence hold parts of one sample, so they have to drop it together: they take rank 0's seed, as attention
    dropout does. It comes from torch's CPU generator, so `torch.manual_seed` repeats it.

    Args:
        rate: of the last layer, in [0, 1).
        x: (B, N, E), for its batch, dtype and device.
    """
    if rate == 0:
        return None
    seed, group = int(torch.randint(2**62, ())), active_sequence()
    if group is not None:
        seed = group.agree({"call": "drop_path", "rate": rate, "samples": len(x)}, seed=seed).seed
    drawn = torch.rand(depth, 2, len(x), 1, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    p = torch.tensor(drop_path_rates(rate, depth), dtype=torch.float64)[:, None, None, None, None]
    return ((drawn >= p) / (1 - p)).to(x.device, x.dtype)


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
    #: taps of the short convolution on keys and values; None: none
    kv_conv: int | None = None
    #: stochastic depth of the last layer; it rises linearly from 0 in the first
    drop_path: float = 0.0
    #: of the hidden states between blocks; None: what the embedding gives, float32 under mixed precision
    residual_dtype: Literal["float32", "bfloat16", "float16"] | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("norm", ("rmsnorm", "layernorm")), ("ffn", ("swiglu", "gelu"))):
            one_of(getattr(self, name), name, allowed)
        if self.residual_dtype not in (None, "float32", "bfloat16", "float16"):
            raise ValueError(
                f"residual_dtype must be float32, bfloat16, float16 or null (the embedding's); got {self.residual_dtype!r}."
            )
        if self.kv_conv is not None:
            integer(self.kv_conv, "kv_conv", 2)
        for name in ("dropout", "attention_dropout", "drop_path"):
            real(getattr(self, name), name, least=0, below=1)

    def with_base(self, base: float | None) -> BlockOptions:
        """These options with a rotary base; without positions where it is None."""
        return replace(self, position_encoding="none") if base is None else replace(self, rotary_base=base)


def make_norm(kind: str, dim: int) -> nn.Module:
    """RMSNorm or LayerNorm over the embedding dim."""
    return nn.RMSNorm(dim, eps=1e-6) if kind == "rmsnorm" else nn.LayerNorm(dim, eps=1e-5)


def working(x: Tensor, weight: Tensor) -> Tensor:
    """x as a product with weight takes it: of its dtype, unless autocast sees to that."""
    kind = x.device.type
    return x if kind in AUTOCAST_DEVICES and torch.is_autocast_enabled(kind) else x.to(weight.dtype)


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
            kv_conv=options.kv_conv,
            engine=options.engine,
        )
        self.ffn_norm = make_norm(options.norm, dim)
        self.ffn = FeedForward(dim, hidden, options)
        self.dropout = nn.Dropout(options.dropout)
        self._compiling, self._pieces = None, {}
        self.memory = MemorySettings()

    @property
    def memory(self) -> MemorySettings:
        """What training keeps of this block; `every` and `offload` are the stack's, see `DilatedTransformer`."""
        return self._memory

    @memory.setter
    def memory(self, settings: MemorySettings) -> None:
        """Checked against the sizes, and compiled for."""
        a = self.attention_layer
        chunks = HeadChunks(a.num_heads, a.num_kv_heads, a.head_dim, settings.head_chunks)
        if settings.head_chunks > 1:
            self._check_bare(settings)
        self._chunks, self._memory = chunks, settings
        self._arrange()

    @property
    def attention_layer(self) -> MultiheadDilatedAttention:
        """The attention itself, also where something (LoRA by peft, say) is wrapped around it."""
        if isinstance(self.attention, MultiheadDilatedAttention):
            return self.attention
        return next(m for m in self.attention.modules() if isinstance(m, MultiheadDilatedAttention))

    def _check_bare(self, settings: MemorySettings) -> None:
        """Windows of heads read the weights themselves, and would pass by what is wrapped around the layer."""
        if self.attention is not self.attention_layer:
            raise ValueError(
                f"head_chunks={settings.head_chunks} is not offered with LoRA: {type(self.attention).__name__} around the "
                "attention changes its weights. Set head_chunks=1; policy, every, offload and tile work with it."
            )
        a = self.attention
        if a.kv_conv is not None:
            raise ValueError(
                f"head_chunks={settings.head_chunks} is not offered with kv_conv={a.kv_conv.taps}. Set head_chunks=1; "
                "policy, every, offload and tile work with it. Or leave kv_conv out."
            )
        if a._forward_hooks or a._forward_pre_hooks or a._backward_hooks or a._backward_pre_hooks:
            warnings.warn(
                f"hooks on the attention layer do not run with head_chunks={settings.head_chunks}: put them on its block, "
                "or set head_chunks=1.",
                stacklevel=3,
            )

    @property
    def recompute(self) -> str:
        """The policy of `memory`."""
        return self._memory.policy

    @recompute.setter
    def recompute(self, policy: str) -> None:
        """Another policy, all else as it is."""
        self.memory = replace(self._memory, policy=policy)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As `nn.Module.compile`; in pieces where the memory settings run it so."""
        self._compiling = args, kwargs
        self._arrange()

    def _arrange(self) -> None:
        """Compile what the settings run as one."""
        if self._compiling is None:
            return
        args, kwargs = self._compiling
        self._compiled_call_impl, self._pieces = None, {}
        if not self._memory.in_pieces:
            super().compile(*args, **kwargs)
            self._compiled_call_impl = guarded(self._compiled_call_impl)
            return
        # tiles, last tiles and lengths, with gradients and without: more than the 8 kinds after which torch gives up
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        make = lambda f: torch.compile(f, *args, **kwargs)  # noqa: E731
        self._pieces = {"feed": make(self._feed)}
        if self._memory.head_chunks == 1:
            self._pieces |= {"attend": guarded(make(self._attend)), "attend_kept": guarded(make(self._attend_kept))}
        else:
            self._pieces |= {"norm": make(self._normed), "join": make(self._join)}

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
        given = positions, lengths, cu_seqlens, cache, None if drop is None else drop[0]
        drop, told = None if drop is None else drop[1], self._memory if cache is None else MemorySettings()
        policy = told.policy if torch.is_grad_enabled() else "none"
        attend = self._attend_in_chunks if told.head_chunks > 1 else self._pieces.get("attend", self._attend)
        whole = lambda y: self._fed(attend(y, *given), drop, told.tile)  # noqa: E731
        if policy == "none":
            return whole(x)
        if policy == "block" or not told.in_pieces:
            return recomputed(whole, x, policy, marked=told.tile is not None)
        h = self._pieces.get("attend_kept", self._attend_kept)(x, *given)
        return (
            self._fed(h, drop, told.tile) if told.tile else recomputed(lambda y: self._fed(y, drop, None), h, "block")
        )

    def _attend(
        self,
        x: Tensor,
        positions: Tensor | RotaryTable | None,
        lengths: Tensor | None,
        cu_seqlens: Tensor | None,
        cache: KVCache | None,
        drop: Tensor | None,
    ) -> Tensor:
        """x + attention(norm(x))."""
        documents = {"lengths": lengths, "cu_seqlens": cu_seqlens}
        normed = self.attention_norm(working(x, self.attention_layer.in_proj_weight))
        return self._added(x, self.attention(normed, positions=positions, cache=cache, **documents)[0], drop)

    def _attend_kept(self, x: Tensor, *given: Any) -> Tensor:
        """The same, computed again but for the op."""
        attend = self._attend_in_chunks if self._memory.head_chunks > 1 else self._attend
        return recomputed(lambda y: attend(y, *given), x, "attention-kept")

    def _attend_in_chunks(
        self,
        x: Tensor,
        positions: Tensor | RotaryTable | None,
        lengths: Tensor | None,
        cu_seqlens: Tensor | None,
        cache: None,
        drop: Tensor | None,
    ) -> Tensor:
        """x + attention(norm(x)), a window of heads after another."""
        self._check_bare(self._memory)
        a, tile = self.attention, self._memory.narrow_tile
        arguments = partial(a.attention.op_arguments, causal=a.attention.causal, lengths=lengths, cu_seqlens=cu_seqlens)
        pieces = Pieces(self._pieces.get("norm", self._normed), (self.attention_norm,), arguments, tile)
        table = a.table(x, positions)
        out = attend_in_chunks(
            self._chunks, pieces, x, a.in_proj_weight, a.in_proj_bias, *(table.rows() if table else ())
        )
        join, modules = (
            self._pieces.get("join", self._join),
            [self.dropout, a.out_proj, *([a.sub_norm] if a.sub_norm else [])],
        )
        return tiled(lambda y, part: join(y, part, drop), modules, tile, x, out)

    def _normed(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """What attention projects, in the dtype of its products."""
        return self.attention_norm(working(x, self.attention_layer.in_proj_weight)).to(dtype)

    def _join(self, x: Tensor, out: Tensor, drop: Tensor | None) -> Tensor:
        """x and what the heads gave."""
        return self._added(x, self.attention.join(out), drop)

    def _fed(self, x: Tensor, drop: Tensor | None, tile: int | None) -> Tensor:
        """`_feed`, in tiles."""
        run = self._pieces.get("feed", self._feed)
        modules = self.ffn_norm, self.ffn, self.dropout
        return tiled(lambda y: run(y, drop), modules, tile, x, unused=result_is_unused())

    def _feed(self, x: Tensor, drop: Tensor | None) -> Tensor:
        """x + feed_forward(norm(x))."""
        return self._added(x, self.ffn(self.ffn_norm(working(x, self.ffn.fc1.weight))), drop)

    def _added(self, x: Tensor, more: Tensor, drop: Tensor | None) -> Tensor:
        """x + more, in the dtype of x, after dropout and stochastic depth."""
        more = self.dropout(more)
        return x + (more if drop is None else more * drop).to(x.dtype)


def default_hidden(dim: int, ffn: str) -> int:
    """4 E for GELU; 8/3 E, up to a multiple of 32, for SwiGLU, which has about as many weights."""
    return 4 * dim if ffn == "gelu" else -(-8 * dim // 3 // 32) * 32
