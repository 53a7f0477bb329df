"""DilatedAttention over (q, k, v), and MultiheadDilatedAttention, a replacement for nn.MultiheadAttention.

This file also has the joint projection of q, k and v, and converts torch's padding masks to lengths.
Shape letters: B batch, N tokens, E embedding dim, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from einops import rearrange
from torch import Tensor, nn

from lightning_dilated._extensions import hook
from lightning_dilated._validation import flag, integer, real
from lightning_dilated.attention.backends import Choice, Request, check_name, choose
from lightning_dilated.attention.context import LayerContext, LayerPlace
from lightning_dilated.attention.executors import HeadWindow
from lightning_dilated.attention.executors.grouped import block_flops
from lightning_dilated.attention.functional import autocast, dilated_attention, op_arguments
from lightning_dilated.attention.resolve import has_varying_length
from lightning_dilated.attention.rotary import Rotary, RotaryTable
from lightning_dilated.attention.spans import spans
from lightning_dilated.pattern import DilatedPattern, Hashed
from lightning_dilated.pattern.rows import dense_kv_heads
from lightning_dilated.recurrence import Recurrence
from lightning_dilated.sequence.group import SequenceGroup, active_sequence


def lengths_of(mask: Tensor, shape: torch.Size) -> Tensor:
    """Return (B,) int64 lengths from a key padding mask (B, N) with True or -inf at the padding, which is on the right.

    Raises:
        ValueError: for another shape, other values, or padding that is not on the right.
    """
    if mask.shape != shape:
        raise ValueError(f"key_padding_mask must be (B, N) = {tuple(shape)}, got {tuple(mask.shape)}.")
    pad = mask
    if mask.is_floating_point():
        pad = mask == -torch.inf
        if not bool((pad | (mask == 0)).all()):
            raise ValueError("a floating key_padding_mask may hold 0 and -inf only; a bias on keys is not offered.")
    elif mask.dtype != torch.bool:
        raise ValueError(f"key_padding_mask must be bool (True at padding) or floating, got {mask.dtype}.")
    if bool((pad[:, :-1] & ~pad[:, 1:]).any()):
        raise ValueError(
            "key_padding_mask has real tokens after padding: only padding on the right is offered. "
            "Move the padding to the end, or pack the pieces with cu_seqlens."
        )
    return (~pad).sum(1)


#: advice in error messages about masks
MASKS = (
    "Leave attn_mask (src_mask of nn.TransformerEncoderLayer) out: the pattern says who attends to whom, and causal=True of "
    "the layer or is_causal=True of the call hides later tokens. For padding pass lengths or key_padding_mask, for "
    "documents cu_seqlens."
)


def is_causal_mask(mask: Any, shape: tuple[int, ...]) -> bool:
    """Return whether torch's `attn_mask`, with the shape (N, N) or `shape` = (B H, N, N), is exactly the causal mask.

    The causal mask is bool, True at later keys; or float, -inf at later keys and 0 elsewhere, as from
    `nn.Transformer.generate_square_subsequent_mask`.
    """
    if not isinstance(mask, Tensor) or tuple(mask.shape) not in (shape, shape[1:]):
        return False
    tokens = shape[-1]
    hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=mask.device).triu(1)
    if mask.dtype == torch.bool:
        return bool((mask == hidden).all())
    return mask.is_floating_point() and bool((mask == torch.zeros_like(mask).masked_fill(hidden, -torch.inf)).all())


@dataclass
class Projection:
    """Projects x (B, N, E) to q (B, N, H, D), k and v (B, N, K, D).

    Attributes:
        head_dim: D.
        table: rotates q and k; None means no rotary positions.
        mixes: functions of the concatenated k and v (B, N, 2 K D), applied before the rotation.
    """

    head_dim: int
    table: RotaryTable | None = None
    mixes: Sequence[Callable[[Tensor], Tensor]] = ()

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, group: int = 1
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return (q, k, v, unrotated q, unrotated k) with weight ((H + 2 K) D, E) and bias ((H + 2 K) D,).

        `group` is H / K. Without rotary positions, all results are views of one projection. With them, v is projected
        separately, because a view would keep the unrotated q and k in memory until the backward.
        """
        kv, linear = len(weight) // (group + 2), nn.functional.linear
        heads = lambda y: y.unflatten(-1, (-1, self.head_dim))  # noqa: E731
        if self.mixes:
            q, keys_values = linear(x, weight, bias).split((group * kv, 2 * kv), -1)
            for mix in self.mixes:
                keys_values = mix(keys_values)
            k, v = keys_values.split((kv, kv), -1)
            if self.table is None:
                return self._unrotated(heads(q), heads(k), heads(v))
            joint, v = heads(torch.cat([q, k], -1)), heads(v)
        elif self.table is None:
            return self._unrotated(*(heads(y) for y in linear(x, weight, bias).split((group * kv, kv, kv), -1)))
        else:
            biases = (None, None) if bias is None else (bias[:-kv], bias[-kv:])
            joint, v = heads(linear(x, weight[:-kv], biases[0])), heads(linear(x, weight[-kv:], biases[1]))
        rotated = self.table.split(joint, group * kv // self.head_dim)
        return *rotated, v, *joint.split((group * kv // self.head_dim, kv // self.head_dim), 2)

    @staticmethod
    def _unrotated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return q, k, v, q, k


class DilatedAttention(nn.Module):
    """`dilated_attention` as a module, with dropout in training mode only.

    Args:
        pattern: the pattern of attention; a mapping is read by `DilatedPattern.from_dict`.
        causal, scale, dropout, engine: as in `dilated_attention`.

    Raises:
        ValueError: if dropout is outside [0, 1), the engine is unknown, or the pattern is invalid.
    """

    def __init__(
        self,
        pattern: DilatedPattern,
        *,
        causal: bool = False,
        dropout: float = 0.0,
        scale: float | None = None,
        engine: str = "auto",
    ) -> None:
        super().__init__()
        real(dropout, "dropout", least=0, below=1)
        self.pattern = DilatedPattern.from_dict(pattern)
        self.causal, self.dropout, self.scale, self.engine = causal, dropout, scale, check_name(engine)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        causal: bool | None = None,
        sequence: SequenceGroup | None = None,
        chunk: LayerPlace | None = None,
    ) -> Tensor:
        """Return (B, N, H, D) from q (B, N, H, D) and k, v (B, N, K, D).

        Args:
            lengths, cu_seqlens, sequence: as in `dilated_attention`.
            causal: overrides the module's setting for this call; None means the module's setting.
            chunk: the layer's place in a stream, if q, k and v are a chunk of a stream.

        Raises:
            TypeError, ValueError: as `dilated_attention`.
        """
        options = {**self._options(causal), "lengths": lengths, "cu_seqlens": cu_seqlens, "sequence": sequence}
        if chunk is None:
            return dilated_attention(q, k, v, self.pattern, **options)
        return torch.ops.lightning_dilated.attention(*op_arguments(q, k, v, self.pattern, **options, chunk=chunk))[0]

    def _options(self, causal: bool | None) -> dict[str, Any]:
        return {
            "causal": self.causal if causal is None else causal,
            "scale": self.scale,
            "dropout": self.dropout if self.training else 0.0,
            "engine": self.engine,
        }

    def op_arguments(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **options: Any) -> tuple[Any, ...]:
        """Return the op's arguments for q (B, N, H, D) and k, v (B, N, K, D), see `functional.op_arguments`."""
        return op_arguments(q, k, v, self.pattern, **self._options(causal), **options)

    def engine_choice(self, q: Tensor, num_kv_heads: int | None = None) -> Choice:
        """Return the engine for a call with this q (B, N, H, D), without documents; see `Choice`.

        `num_kv_heads`: K; None means H.
        """
        (q,) = autocast(q)
        request = Request.of(q, self.dropout if self.training else 0.0, self.scale)
        if active_sequence() is None:
            whole = spans(q.shape[0], q.shape[1], None, None)
            window = HeadWindow(self.pattern, q.shape[2], num_kv_heads or q.shape[2], (0, q.shape[2]))
            flops = block_flops(window, self.causal, whole, q.shape)
            request = replace(request, block_flops=flops, changing=has_varying_length(whole, q.shape[1]))
        return choose(self.engine, request)

    def extra_repr(self) -> str:
        return f"{self.pattern}, causal={self.causal}, dropout={self.dropout}, engine={self.engine!r}"


class MultiheadDilatedAttention(nn.Module):
    """Multi-head dilated self-attention with the parameters of nn.MultiheadAttention(batch_first=True).

    It loads the state dict of nn.MultiheadAttention (`in_proj_weight`, `in_proj_bias`, `out_proj.*`) and can be the
    `self_attn` of nn.TransformerEncoderLayer. It never computes attention weights, so `need_weights` must be False, the
    default here. The causal mask is the only `attn_mask`, because the pattern and `causal` define the attention.

    Args:
        embed_dim: E; the head dim is E / num_heads.
        num_heads: H.
        pattern: the pattern of attention.
        num_kv_heads: K, a divisor of H; None means H.
        causal, scale, engine: as in `dilated_attention`.
        dropout: probability with which attention weights are dropped, in training mode only.
        bias: whether both projections have a bias.
        sub_layernorm: LayerNorm of the heads' output before the output projection (MAGNETO, arXiv 2210.06423).
        position_encoding: "none", "rotary" or "xpos", from global positions.
        rotary_base: `base` of `Rotary`.
        xpos_scale_base: `xpos_scale_base` of `Rotary`, for "xpos" only.
        global_rotary: whether dense heads have positions. Dense heads are the heads of a branch `Branch(None, 1)`, if
            no other branch serves one of them. All other heads have positions.
        kv_conv: taps of a short convolution on v, and on k before its rotation (see `ext/convolution`). It is causal
            if the layer is causal. None means no convolution.
        recurrence: a memory of constant size besides the pattern: a `Recurrence`, or a mapping for its `from_dict`;
            None means no recurrence.
        hashed: the last kv heads read rows with the query's learned code: a `Hashed`, or a mapping for its
            `from_dict`; None means no such heads. These heads do not follow the pattern.
        batch_first: must be True.
        device, dtype: device and dtype of the parameters.

    Raises:
        TypeError, ValueError: if an argument is invalid. The message states its value and the allowed values.
    """

    # nn.TransformerEncoderLayer reads both. _qkv_same_embed_dim = False disables its fused path with dense attention
    batch_first = True
    _qkv_same_embed_dim = False
    #: kv heads without positions; their query heads have none either
    unrotated: tuple[int, ...] = ()

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        pattern: DilatedPattern,
        *,
        num_kv_heads: int | None = None,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        sub_layernorm: bool = False,
        position_encoding: Literal["none", "rotary", "xpos"] = "none",
        rotary_base: float = 10000.0,
        xpos_scale_base: float = 512.0,
        global_rotary: bool = True,
        kv_conv: int | None = None,
        recurrence: Recurrence | Mapping[str, Any] | None = None,
        hashed: Hashed | Mapping[str, Any] | None = None,
        scale: float | None = None,
        engine: str = "auto",
        batch_first: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.embed_dim = integer(embed_dim, "embed_dim", 1)
        self.num_heads = integer(num_heads, "num_heads", 1)
        if embed_dim % num_heads:
            raise ValueError(f"num_heads={num_heads} must divide embed_dim={embed_dim}.")
        if not batch_first:
            raise ValueError(
                "batch_first=False is not offered: inputs are (B, N, E). Transpose them, or drop the argument."
            )
        self.head_dim = embed_dim // num_heads
        if hashed is not None:
            hashed = Hashed.from_dict(hashed)
            pattern = hashed.without_heads(DilatedPattern.from_dict(pattern), num_heads, num_kv_heads or num_heads)
        self.attention = DilatedAttention(pattern, causal=causal, dropout=dropout, scale=scale, engine=engine)
        _, self.num_kv_heads = self.attention.pattern.check_heads(num_heads, num_kv_heads)
        if not flag(global_rotary, "global_rotary"):
            self.unrotated = dense_kv_heads(self.attention.pattern, num_heads, self.num_kv_heads)
        self.rotary = self._positions(position_encoding, rotary_base, xpos_scale_base)
        factory = {"device": device, "dtype": dtype}
        rows = (num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.in_proj_weight = nn.Parameter(torch.empty(rows, embed_dim, **factory))
        self.in_proj_bias = nn.Parameter(torch.empty(rows, **factory)) if bias else None
        sizes = embed_dim, num_heads, self.num_kv_heads, self.head_dim
        channels = 2 * self.num_kv_heads * self.head_dim
        self.kv_conv: Any = None
        if kv_conv is not None:
            self.kv_conv = hook("short convolution of a layer")(channels, kv_conv, causal, **factory)
        self.recurrence: Any = None
        if recurrence is not None:
            branch = hook("recurrence of a layer")
            self.recurrence = branch(Recurrence.from_dict(recurrence), *sizes, causal, **factory)
        self.hashed: Any = None
        if hashed is not None:
            self.hashed = hook("hashed heads of a layer")(hashed, *sizes, causal, dropout, scale, **factory)
        self.sub_norm = nn.LayerNorm(embed_dim, **factory) if sub_layernorm else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)
        self.reset_parameters()

    def _positions(self, kind: str, base: float, scale_base: float) -> Rotary | None:
        if kind not in ("none", "rotary", "xpos"):
            raise ValueError(f"position_encoding must be none, rotary or xpos; got {kind!r}.")
        if kind == "none" or len(self.unrotated) == self.num_kv_heads:
            return None
        return Rotary(self.head_dim, base, scale_base if kind == "xpos" else None)

    def reset_parameters(self) -> None:
        """Initialise the projections as nn.MultiheadAttention does."""
        nn.init.xavier_uniform_(self.in_proj_weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        positions: Tensor | RotaryTable | None = None,
        cache: LayerContext | None = None,
    ) -> tuple[Tensor, None]:
        """Compute self-attention of `query` (B, N, E), or (N, E) without a batch.

        Args:
            key, value: None, or the same tensor as `query`.
            key_padding_mask: (B, N), True (or -inf) at the padding, which must be on the right.
            need_weights: must be False.
            attn_mask: None, or exactly the causal mask (N, N) or (B * H, N, N), which makes this call causal.
            average_attn_weights: has no effect, because no weights are returned.
            is_causal: True makes this call causal; every call of a module with causal=True is causal.
            lengths, cu_seqlens: as in `dilated_attention`.
            positions: global positions (N,) or (B, N) for rotary or xPos, or their table. None means 0..N-1, or in an
                active `SequenceGroup` the positions of this rank's tokens.
            cache: earlier rows, for causal calls: a cache from `new_cache`, which also stores the new tokens; or the
                layer's place in a stream, if `query` is a chunk of a stream. Calls with a cache run on one rank. The
                exception is a cache of prompts that ranks share: it reads the prompts in the active group.

        Returns:
            (out with query's shape, None).

        Raises:
            TypeError, ValueError: if an argument is invalid. The message states its value and the allowed values.
        """
        if attn_mask is not None and cache is not None:
            raise ValueError(f"attn_mask goes with whole sequences, not with a cache or stream. {MASKS}")
        is_causal = is_causal or attn_mask is not None  # `_refuse` accepts only the causal mask
        group, arguments = active_sequence(), (query, key, value, key_padding_mask, need_weights, attn_mask, is_causal)
        self._refuse(*arguments) if group is None else group.guard(self._refuse, *arguments)
        if cache is not None and (isinstance(cache, nn.Module) or not hasattr(cache, "heads")):
            raise TypeError(f"cache must be what new_cache() of the layer returns, got {type(cache).__name__}.")
        if query.ndim == 2:
            mask = None if key_padding_mask is None else key_padding_mask[None]
            out, _ = self(query[None], key_padding_mask=mask, is_causal=is_causal, lengths=lengths,
                          cu_seqlens=cu_seqlens, positions=positions, cache=cache)  # fmt: skip
            return out[0], None
        if key_padding_mask is not None:
            if lengths is not None:
                raise ValueError("give key_padding_mask or lengths, not both.")
            lengths = lengths_of(key_padding_mask, query.shape[:2])
        options = positions, lengths, cu_seqlens, self.attention.causal or is_causal
        return self.join(self.heads(query, *options) if cache is None else cache.heads(self, query, *options)), None

    @property
    def mixers(self) -> list[Any]:
        """Return the layer's additions to attention, see `Mixer`."""
        return [mixer for mixer in (self.kv_conv, self.recurrence, self.hashed) if mixer is not None]

    def heads(
        self,
        query: Tensor,
        positions: Tensor | RotaryTable | None,
        lengths: Tensor | None,
        cu_seqlens: Tensor | None,
        causal: bool,
        place: LayerPlace | None = None,
    ) -> Tensor:
        """Return the heads' outputs (B, N, H, D), for `join`, from `query` (B, N, E); other arguments as in `forward`.

        `place`: the layer's place in a context of the op, such as a stream.
        """
        table = self.table(query, positions)
        documents = lengths, cu_seqlens
        projected = self.projected(query, table, [m.mix(query, *documents, place) for m in self.mixers if m.mixes])
        q, k, v = projected[:3]
        adding = [m for m in self.mixers if m.adds]
        unrotated = projected[3:] if adding else ()
        del projected  # frees memory for the attention
        out = self.attention(q, k, v, lengths=lengths, cu_seqlens=cu_seqlens, causal=causal, chunk=place)
        for mixer in adding:
            out = out + mixer.add(query, (*unrotated, v), *documents, place).to(out.dtype)
        return out

    def projected(
        self, query: Tensor, table: RotaryTable | None, mixes: Sequence[Callable[[Tensor], Tensor]] = ()
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return (q (B, N, H, D), k and v (B, N, K, D), unrotated q, unrotated k)."""
        project = Projection(self.head_dim, table, mixes)
        return project(query, self.in_proj_weight, self.in_proj_bias, self.num_heads // self.num_kv_heads)

    def join(self, out: Tensor) -> Tensor:
        """Return (B, N, E) from the heads' outputs (B, N, H, D)."""
        out = rearrange(out, "b n h d -> b n (h d)")
        return self.out_proj(out if self.sub_norm is None else self.sub_norm(out))

    def _refuse(
        self, query: Tensor, key: Any, value: Any, padding: Any, need_weights: bool, attn_mask: Any, is_causal: bool
    ) -> None:
        if not isinstance(query, Tensor):
            raise TypeError(f"query must be a torch.Tensor (B, N, {self.embed_dim}), got {type(query).__name__}.")
        if query.ndim not in (2, 3) or query.shape[-1] != self.embed_dim:
            raise ValueError(f"query must be (B, N, {self.embed_dim}), got {tuple(query.shape)}.")
        for name, x in (("key", key), ("value", value)):
            if x is not None and x is not query:
                raise ValueError(
                    f"{name} must be the query itself: dilated attention is self-attention. Leave {name} out."
                )
        if padding is not None and active_sequence() is not None:
            raise ValueError("a rank's part of key_padding_mask does not show the global lengths; pass lengths (B,).")
        if need_weights:
            raise ValueError("need_weights=True is not offered: the weights are never formed. Pass need_weights=False.")
        if attn_mask is not None and active_sequence() is not None:
            raise ValueError(f"a rank has only its part of attn_mask, which cannot be checked. {MASKS}")
        tokens = query.shape[-2]
        matrices = self.num_heads * (1 if query.ndim == 2 else len(query))
        if attn_mask is not None and not is_causal_mask(attn_mask, (matrices, tokens, tokens)):
            raise ValueError(
                f"attn_mask is not exactly the causal mask of {tokens} tokens, ({tokens}, {tokens}) with True or -inf "
                f"after each query and False or 0 elsewhere, and no other mask is offered. {MASKS}"
            )
        if is_causal and self.mixers and not self.attention.causal:
            raise ValueError(
                f"is_causal=True cannot make this layer causal: its {self.mixers[0].option} sees tokens on both sides. "
                "Build it with causal=True."
            )

    def table(
        self, x: Tensor, positions: Tensor | RotaryTable | None = None, start: int = 0, furthest: int | None = None
    ) -> RotaryTable | None:
        """Return the rotary table for x (B, N, E), see `Rotary.table`; None without rotary positions."""
        if self.rotary is None:
            return None
        table = positions
        if not isinstance(table, RotaryTable):
            table = self.rotary.table(x, autocast(x[:0])[0].dtype, table, start, furthest)
        return table if table.unrotated == self.unrotated else replace(table, unrotated=self.unrotated)

    def new_cache(self, max_length: int | None = None, clock: Any = None) -> Any:
        """Make an empty cache for this layer's `forward`; the arguments are as in `KVCache`."""
        return hook("cache of a layer")(self, max_length, clock)

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
