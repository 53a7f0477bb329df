"""Add the output of a recurrent memory to a layer's heads, for whole sequences, chunks of a stream and decoding.

Shape letters: B batch, N tokens (of this rank), n new tokens, E embedding dim, H query heads, K kv heads, D head dim,
W taps of the convolution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_dilated.attention.context import LayerPlace
from lightning_dilated.attention.functional import check_documents
from lightning_dilated.attention.mixer import Mixer
from lightning_dilated.ext.convolution.convolution import ShortConvolution
from lightning_dilated.ext.recurrence.chunk_op import CHUNK
from lightning_dilated.ext.recurrence.op import RECURRENCE, encode
from lightning_dilated.recurrence import Recurrence, recurrent_attention
from lightning_dilated.sequence.group import active_sequence, no_sequence

if TYPE_CHECKING:
    from lightning_dilated.ext.decoding.kv_cache import KVCache

EPS = 1e-6


class Decay(nn.Module):
    """Compute log_decay = -exp(A_log) softplus(a + dt_bias), as in Gated DeltaNet, in fp32 (fp64 for float64 models).

    The parameters stay in fp32 even if the model is cast to 16 bits, as by `Trainer(precision="bf16-true")`, because
    bf16 has too few digits for a decay near 1 and for small updates of log-values.
    """

    keeps_fp32 = True

    def __init__(self, heads: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        dtype = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        self.A_log = nn.Parameter(torch.empty(heads, device=device, dtype=dtype))
        self.dt_bias = nn.Parameter(torch.empty(heads, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize as in the paper: exp(A_log) uniform in (0, 16), softplus(dt_bias) log-uniform in [0.001, 0.1]."""
        self.A_log.uniform_(0, 16).clamp_(min=1e-2).log_()
        step = self.dt_bias.uniform_(math.log(0.001), math.log(0.1)).exp_()
        step.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus

    def forward(self, a: Tensor) -> Tensor:
        """Return log_decay (B, N, K) for a (B, N, K)."""
        with torch.autocast(a.device.type, enabled=False):
            step = nn.functional.softplus(a.to(self.dt_bias.dtype) + self.dt_bias)
            return -self.A_log.exp() * step

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decay:
        def wide(x: Tensor) -> Tensor:
            y = fn(x)
            narrowed = y.is_floating_point() and torch.promote_types(y.dtype, torch.float32) != y.dtype
            return x.to(y.device, torch.float32) if narrowed else y

        return super()._apply(wide, recurse)


#: keys in `KVCache.mixer_states`: the state of the recurrence, and the last rows before its convolution
STATE, ROWS = "recurrence", "recurrence, rows"


class RecurrentBranch(Mixer):
    """Add scale * sigmoid(W_g x) * RMSNorm(memory read by q) to a layer's heads.

    Args:
        recurrence: the description of the recurrence.
        embed_dim, num_heads, num_kv_heads, head_dim, causal: the layer's values.

    Raises:
        ValueError: if the kind needs a causal layer.
    """

    option, adds = "recurrence", True

    def __init__(
        self,
        recurrence: Recurrence,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        recurrence.check_causal(causal)
        factory = {"device": device, "dtype": dtype}
        self.description, self.causal = recurrence, causal
        self.token_flops = recurrence.flops(num_heads, num_kv_heads, head_dim)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        channels = (num_heads + 2 * num_kv_heads) * head_dim
        self.conv = ShortConvolution(channels, recurrence.conv, causal, **factory) if recurrence.conv else None
        self.out_gate = nn.Linear(embed_dim, num_heads, bias=False, **factory)
        self.norm_weight = nn.Parameter(torch.ones(head_dim, **factory))
        self.scale = nn.Parameter(torch.full((num_heads,), recurrence.gate_init, **factory))
        gated = recurrence.kind == "gated_delta"
        self.controls = nn.Linear(embed_dim, 2 * num_kv_heads, bias=False, **factory) if gated else None
        self.decay = Decay(num_kv_heads, **factory) if gated else None

    def fast_parameters(self) -> list[nn.Parameter]:
        """Return parameters that train without weight decay, at `LR_SCALE` times the learning rate."""
        return [self.scale, *([] if self.decay is None else self.decay.parameters())]

    def forward(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        chunk: LayerPlace | None = None,
    ) -> Tensor:
        """Return (B, N, H, D) from the layer's input x (B, N, E) and unrotated q (B, N, H, D) and k, v (B, N, K, D).

        Args:
            lengths, cu_seqlens: as in `dilated_attention`.
            chunk: the layer's place in a stream.
        """
        group, documents = active_sequence(), (x, lengths, cu_seqlens)
        lengths, cu_seqlens = check_documents(*documents) if group is None else group.guard(check_documents, *documents)
        q, k, v = self._convolved(q, k, v, lengths, cu_seqlens, chunk)
        rows = q, k, v, *self._controls(x)
        kind, segment = self.description.kind, self.description.segment
        if chunk is not None:
            spec = encode(kind, segment, True)
            memory = CHUNK(*rows, lengths, cu_seqlens, chunk.place, chunk.context, spec)
        else:
            name = "" if group is None else group.name
            memory = RECURRENCE(*rows, lengths, cu_seqlens, encode(kind, segment, self.causal, name))
        return self._gated(memory, x)

    def add(
        self, query: Tensor, rows: Sequence[Tensor], lengths: Any, cu_seqlens: Any, place: LayerPlace | None
    ) -> Tensor:
        """See `Mixer.add`."""
        return self(query, *rows, lengths, cu_seqlens, place)

    def add_new(self, x: Tensor, rows: Sequence[Tensor], cache: KVCache) -> Tensor:
        """See `Mixer.add_new`. The cache stores the state after the new tokens."""
        (q, k, v), new = rows, x.shape[1]
        if self.conv is not None:
            parts = [y.flatten(2) for y in rows]
            joint, rows = self.conv.continued(torch.cat(parts, -1), cache.mixer_states.get(ROWS))
            cache.remember(ROWS, rows, new)
            q, k, v = self._by_heads(joint.split([y.shape[-1] for y in parts], -1))
        kind, segment = self.description.kind, self.description.segment
        options: dict[str, Any] = {"kind": kind, "segment": segment, "return_state": True}
        rows = q, k, v, *self._controls(x)
        counts = cache.clock.added(cache.length, new, len(x))
        limits = {} if min(counts) == new else {"lengths": counts}
        with no_sequence():
            memory, state = recurrent_attention(*rows, **options, **limits, state=cache.mixer_states.get(STATE))
        cache.mixer_states[STATE] = state
        return self._gated(memory, x)

    # -- parts ---------------------------------------------------------------------------------------------------------
    def _by_heads(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(y.unflatten(-1, (-1, self.head_dim)) for y in parts)

    def _convolved(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: Tensor | None,
        cu_seqlens: Tensor | None,
        chunk: LayerPlace | None,
    ) -> tuple[Tensor, ...]:
        if self.conv is None:
            return q, k, v
        place = None if chunk is None else chunk.of_part(0)
        return self._by_heads(self.conv.together([y.flatten(2) for y in (q, k, v)], lengths, cu_seqlens, place))

    def _controls(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return log_decay and beta, each (B, N, K), or None and None for kinds without gates."""
        if self.controls is None or self.decay is None:
            return None, None
        a, b = self.controls(x).chunk(2, -1)
        wide = torch.promote_types(b.dtype, torch.float32)
        return self.decay(a), b.to(wide).sigmoid()

    def _gated(self, memory: Tensor, x: Tensor) -> Tensor:
        """Normalize and gate the memory in fp32 or fp64, and return the result in the memory's own dtype."""
        wide = torch.promote_types(memory.dtype, torch.float32)
        gate = self.out_gate(x).to(wide).sigmoid() * self.scale.to(wide)
        rows = memory.to(wide)
        rows = rows * (rows.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.norm_weight.to(wide)
        return (gate[..., None] * rows).to(memory.dtype)

    def extra_repr(self) -> str:
        return f"{self.description}, causal={self.causal}"
