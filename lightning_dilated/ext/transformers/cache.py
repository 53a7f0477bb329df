"""DilatedCache: the bounded key and value caches of this package behind the Cache interface of transformers.

`update` returns a layer's new keys and values unchanged and marks the keys; the attention function then adds them to
the cache and attends to it. Import this module lazily, because it imports transformers.

Shape letters: B batch, n new tokens, K kv heads, D head dim.
"""

from __future__ import annotations

from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from lightning_dilated.ext.decoding.cache_slots import Clock
from lightning_dilated.ext.decoding.kv_cache import KVCache
from lightning_dilated.ext.decoding.new_tokens import decode_attention
from lightning_dilated.ext.transformers.attention import CACHE
from lightning_dilated.ext.transformers.kinds import other_kinds
from lightning_dilated.ext.transformers.padding import Padding
from lightning_dilated.ext.transformers.patterns import layer_pattern, text_config
from lightning_dilated.ext.transformers.rotary import follows_length


class DilatedCache(Cache):
    """A cache for generation; made by `dilated_cache`."""

    def __init__(self, config: Any, max_length: int | None = None) -> None:
        text, clock = text_config(config, "dilated_cache"), Clock()
        if kinds := other_kinds(text):
            raise ValueError(
                f"layers of {text.model_type} have the kind {', '.join(kinds)}, whose state a DilatedCache does not hold. "
                "Pass use_cache=False; layers with their own attention take transformers' cache."
            )
        if follows_length(text):
            raise ValueError(
                "rotary frequencies of this model depend on the sequence length (rope_type dynamic or longrope), so "
                "cached keys would be wrong for later tokens. Pass use_cache=False, or take another rope_type (yarn)."
            )
        heads = text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        patterns = (layer_pattern(text, i) for i in range(text.num_hidden_layers))
        super().__init__(
            layers=[_Layer(KVCache(x, heads, kv_heads, max_length=max_length, clock=clock)) for x in patterns]
        )

        self._depth = len(self.layers)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **options: Any) -> Any:
        """See `_Layer.update`. Raises ValueError for layers that the config does not list, as in a looped model."""
        if layer_idx >= self._depth:
            raise ValueError(
                f"a DilatedCache was made for {self._depth} layers, and the model asks for number {layer_idx}, counted from "
                "0. Make it with this model's config; a model that runs its layers in loops needs use_cache=False."
            )
        return super().update(key_states, value_states, layer_idx, *args, **options)

    @property
    def nbytes(self) -> int:
        """Total bytes of all buffers."""
        return sum(cast(_Layer, layer).rows.nbytes for layer in self.layers)


class _Layer(CacheLayerMixin):
    """The cache of a layer. Lengths that transformers gets include `skipped` columns of padding, which are not kept."""

    supports_early_init = False

    def __init__(self, rows: KVCache) -> None:
        super().__init__()
        self.rows = rows
        #: number of tokens that `update` returned to the layer's attention
        self.handed = 0
        #: padding before each prompt, (B,) int64 on the CPU; None: no padding
        self.left: Tensor | None = None
        #: number of prompt columns that are padding in every sample
        self.skipped = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing, because the first tokens allocate the buffers."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Return new keys and values (B, K, n, D) unchanged; the layer's attention adds them."""
        if self.get_seq_length() != self.handed:
            raise ValueError(
                f"a DilatedCache got {self.handed} tokens from this layer, but ring_dilated attended to "
                f"{self.get_seq_length()}: the model has another attention, or an earlier call with this cache failed. Load "
                'the model with attn_implementation="ring_dilated", or pass no DilatedCache; after a failure make a new one.'
            )
        self.handed += key_states.shape[2]
        keys = key_states.view_as(key_states)  # a new tensor object, so that no other code sees the mark
        setattr(keys, CACHE, self)
        return keys, value_states

    def attend(self, q: Tensor, k: Tensor, v: Tensor, padding: Padding | None, scale: float | None) -> Tensor:
        """Add n new tokens and return their outputs (B, n, H, D); `padding` covers all tokens so far.

        Raises: ValueError for padding that is not on the left, or that differs from the first call's, and for several
            later tokens in one call if prompts differ in length.
        """
        if self.get_seq_length() == 0:
            self._begin(padding)
            if padding is not None:
                q, k, v = (padding.aligned(x)[:, : x.shape[1] - self.skipped] for x in (q, k, v))
                out = decode_attention(q, k, v, self.rows, scale)
                return padding.restored(nn.functional.pad(out, (0, 0, 0, 0, 0, self.skipped)))
        else:
            self._check_later(padding, q.shape[1])
        return decode_attention(q, k, v, self.rows, scale)

    def _begin(self, padding: Padding | None) -> None:
        """Store the padding of the prompts, and their lengths in the clock, which all layers share."""
        lengths = None
        if padding is not None:
            padding.check_prompts()
            lengths, self.left = padding.lengths.tolist(), padding.left
            self.skipped = padding.columns - max(lengths)
            lengths = lengths if len(set(lengths)) > 1 else None
        self.rows.clock.begin(lengths)

    def _check_later(self, padding: Padding | None, new: int) -> None:
        """Raise if `new` tokens do not continue the prompts."""
        none = torch.zeros(0, dtype=torch.int64)
        left, ours = (none if x is None else x for x in (None if padding is None else padding.left, self.left))
        if not torch.equal(left, ours):
            raise ValueError(
                f"the prompts of a DilatedCache have {ours.tolist() or 'no'} tokens of padding before them, but the "
                f"attention_mask of later tokens has {left.tolist() or 'none'}. Pass the prompts' mask with a one appended "
                "for each later token."
            )
        if padding is not None:
            padding.check_prompts()
        if self.rows.clock.ragged and new > 1:
            raise ValueError(
                f"a DilatedCache reads prompts of different lengths in one call, then one token per call; got {new} tokens. "
                "Leave prefill_chunk_size out; to add several tokens, pass one sample, or prompts of equal length."
            )

    def get_seq_length(self) -> int:
        return self.rows.length + self.skipped

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of new keys, and the position of the first one; `update` returns no other keys."""
        return query_length, self.get_seq_length()

    def get_max_length(self) -> int:
        return -1 if self.rows.max_length is None else self.rows.max_length

    def reset(self) -> None:
        self.rows.reset()
        self.handed = self.skipped = 0
        self.left = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.rows.select(beam_idx)
        if self.left is not None:
            self.left = self.left[beam_idx.cpu()]

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.rows.repeat(repeats)
        if self.left is not None:
            self.left = self.left.repeat_interleave(repeats)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            self._refuse("remove tokens, as assisted decoding requires")

    def offload(self) -> NoReturn:
        self._refuse("be offloaded")

    prefetch = offload

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(
            f"a DilatedCache cannot {what}: it holds only the rows that later tokens see. Generate without, or with "
            "use_cache=False."
        )
