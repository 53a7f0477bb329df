"""HashedHeads: the heads of a layer that read rows by learned codes, their parameters and their training.

Shape letters: B batch, N tokens, E embedding dim, H query heads and K kv heads of the layer, D head dim, G groups of M
codes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_dilated._compat.lightning import attached_trainer
from lightning_dilated.attention.context import LayerPlace
from lightning_dilated.attention.functional import check_documents
from lightning_dilated.attention.mixer import Mixer
from lightning_dilated.ext._compat.torch import after_backward
from lightning_dilated.ext.convolution.convolution import ShortConvolution
from lightning_dilated.ext.hashed.functional import Options
from lightning_dilated.ext.hashed.op import HASHED, LossTerms, encode, token_flops
from lightning_dilated.ext.hashed.state import HashedState
from lightning_dilated.pattern import Hashed
from lightning_dilated.sequence.group import SequenceGroup, active_sequence

if TYPE_CHECKING:
    from lightning_dilated.ext.decoding.kv_cache import KVCache

#: taps of all convolutions
TAPS = 4
#: initial weights of taps for the token 3, 2, 1 and 0 positions before, besides the 1 of the token itself. Keys begin as
#: the sum of a token and the token before it. Codes of queries begin as sums of three tokens, and codes of keys as the
#: same sums one token earlier, so a query has the code of the row that follows its own three tokens elsewhere
NONE, WITH_PREVIOUS = (0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0)
QUERY_CODE, KEY_CODE = (0.0, 0.6, 0.8, 0.0), (0.6, 0.8, 1.0, -1.0)
#: label of a token without a label
IGNORE = -100


class HashedHeads(Mixer):
    """Add the output of `hashed_attention` for the last kv heads of a layer, and 0 for the others.

    q, k and v of these heads pass through a short convolution first. Codes are computed from the layer's input by a short
    convolution and a projection, one each for queries and keys.

    Args:
        hashed: the description.
        embed_dim, num_heads, num_kv_heads, head_dim, causal, dropout, scale: the layer's values.

    Raises:
        ValueError: if the layer is not causal, or drops attention weights.
    """

    option, adds = "hashed", True

    def __init__(
        self,
        hashed: Hashed,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool,
        dropout: float = 0.0,
        scale: float | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if not causal:
            raise ValueError("hashed heads read earlier rows only, and this layer is not causal: leave hashed out.")
        if dropout:
            raise ValueError(
                f"hashed heads do not drop attention weights, and attention_dropout is {dropout:g}: set it to 0, or leave "
                "hashed out. You may keep dropout."
            )
        factory = {"device": device, "dtype": dtype}
        self.description, self.scale = hashed, head_dim**-0.5 if scale is None else scale
        kv_heads, group = hashed.heads, num_heads // num_kv_heads
        self.kv_heads, self.num_heads, self.head_dim = kv_heads, kv_heads * group, head_dim
        self.others = num_heads - self.num_heads
        codes = hashed.groups * hashed.codes
        self.token_flops = token_flops(hashed.latest, hashed.probes, self.num_heads, kv_heads, head_dim, codes)
        starts = ((self.num_heads * head_dim, NONE), (kv_heads * head_dim, WITH_PREVIOUS), (kv_heads * head_dim, NONE))
        self.conv = ShortConvolution(sum(n for n, _ in starts), TAPS, True, **factory, starts=starts)
        self.query_conv = ShortConvolution(embed_dim, TAPS, True, **factory, starts=((embed_dim, QUERY_CODE),))
        self.key_conv = ShortConvolution(embed_dim, TAPS, True, **factory, starts=((embed_dim, KEY_CODE),))
        self.query_code = nn.Linear(embed_dim, kv_heads * codes, bias=False, **factory)
        self.key_code = nn.Linear(embed_dim, kv_heads * codes, bias=False, **factory)
        self.null = nn.Parameter(torch.zeros(self.num_heads, **factory))
        self.terms = LossTerms((hashed.agree, hashed.contrast, hashed.balance, hashed.spread))
        #: in a training step, whether its sequences have at most `soft_until` tokens; None: unknown. A compiled graph
        #: cannot read the number of tokens that ranks agreed on
        self.is_short: bool | None = None

    def add(
        self, query: Tensor, rows: Sequence[Tensor], lengths: Any, cu_seqlens: Any, place: LayerPlace | None
    ) -> Tensor:
        """See `Mixer.add`. In an endless sequence, heads read by code also in training: its length is not known."""
        group, documents = active_sequence(), (query, lengths, cu_seqlens)
        lengths, cu_seqlens = check_documents(*documents) if group is None else group.guard(check_documents, *documents)
        soft = self.training and self._has_soft_lookups(query, place, group)
        q, k, v = self._own(rows)
        near = [None if place is None else place.of_part(i) for i in (1, 2, 3)]
        parts = self.conv.together([x.flatten(2) for x in (q, k, v)], lengths, cu_seqlens, near[0])
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in parts)
        codes = query.detach() if soft else query
        z_q, z_k = (
            self._logits(conv(codes, lengths, cu_seqlens, at), project)
            for conv, project, at in (
                (self.query_conv, self.query_code, near[1]),
                (self.key_conv, self.key_code, near[2]),
            )
        )
        where = place.context if place is not None else "" if group is None or group.ranks == 1 else group.name
        chunk, terms = None if place is None else place.place, self.terms.number if self.training else None
        out, _ = HASHED(q, k, v, z_q, z_k, self.null, lengths, cu_seqlens, chunk, terms, self._spec(soft, where))
        return nn.functional.pad(out, (0, 0, self.others, 0))

    def _has_soft_lookups(self, query: Tensor, place: LayerPlace | None, group: SequenceGroup | None) -> bool:
        """Return whether the sequence has at most `soft_until` tokens.

        In a compiled graph on several ranks, a forward outside of a training step assumes equal shares.
        """
        if place is None and group is not None and self.is_short is not None:
            return self.is_short
        known = None if group is None or torch.compiler.is_compiling() else group.agreed
        tokens = query.shape[1] * (1 if group is None else group.ranks) if known is None else known.seq_len
        if place is not None:
            tokens = place.seq_len
        return tokens is not None and tokens <= self.description.soft_until

    def add_new(self, x: Tensor, rows: Sequence[Tensor], cache: KVCache) -> Tensor:
        """See `Mixer.add_new`. The cache stores the rows of all tokens, and the places of each code's latest rows."""
        parts = [y.flatten(2) for y in self._own(rows)]
        joint = self._continued("rows", self.conv, torch.cat(parts, -1), cache)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in joint.split([y.shape[-1] for y in parts], -1))
        z_q = self._logits(self._continued("query", self.query_conv, x, cache), self.query_code)
        z_k = self._logits(self._continued("key", self.key_conv, x, cache), self.key_code)
        new = cache.clock.added(cache.length, x.shape[1], len(x))
        hashed, state = self.description, cache.mixer_states.get(self.option)
        if state is None:
            state = cache.mixer_states[self.option] = HashedState(hashed.latest, k, z_k, cache.max_length or 0)
        if x.shape[1] == 1:
            state.add(k, v, z_k, new)
            out = state.read(q, z_q, self.null, hashed.probes, self.scale)
        else:
            options = Options(hashed.latest, hashed.probes, self.scale, False, True)
            out = state.compute((q, k, v, z_q, z_k, self.null), new, options)
        return nn.functional.pad(out, (0, 0, self.others, 0))

    def _continued(self, name: str, conv: ShortConvolution, x: Tensor, cache: KVCache) -> Tensor:
        """Convolve new tokens x (B, n, C); the cache stores the rows that the next tokens need."""
        name = f"{self.option}, {name}"
        y, rows = conv.continued(x, cache.mixer_states.get(name))
        cache.remember(name, rows, x.shape[1])
        return y

    def _own(self, rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return q, k and v of the hashed heads."""
        q, k, v = rows
        return q[:, :, self.others :], k[:, :, -self.kv_heads :], v[:, :, -self.kv_heads :]

    def _logits(self, x: Tensor, project: nn.Linear) -> Tensor:
        """Return logits (B, N, K, G, M) in fp32 or wider."""
        z = project(x)
        sizes = self.kv_heads, self.description.groups, self.description.codes
        return z.to(torch.promote_types(z.dtype, torch.float32)).unflatten(-1, sizes)

    def _spec(self, soft: bool, sequence: str = "") -> str:
        hashed = self.description
        return encode(hashed.latest, hashed.probes, self.scale, soft, sequence)

    # -- losses of the codes -------------------------------------------------------------------------------------------
    @staticmethod
    def train_codes(
        layers: Sequence[HashedHeads | None], model: pl.LightningModule, batch: Any, run: Callable[[Any], Any]
    ) -> tuple[Tensor, Any]:
        """Return run(batch), a sum of token losses and their count; its backward also trains the codes of all layers.

        In a Trainer's run, log the mean number of rows that a labelled query reads, as `train_hashed_rows_LAYER`.
        """
        heads = {number: layer for number, layer in enumerate(layers) if layer is not None}
        try:
            for layer in heads.values():
                layer.begin_losses(batch)
            losses, count = run(batch)
            for number, layer in heads.items():
                layer.add_losses(losses)
                latest = layer.terms.latest
                if attached_trainer(model) is not None and latest is not None:
                    model.log(f"train_hashed_rows_{number}", latest[2] / latest[3].clamp_min(1), batch_size=1)
        except BaseException:
            for layer in heads.values():
                layer.end_losses()
            raise
        return losses, count

    def begin_losses(self, batch: Any) -> None:
        """Let the losses count the queries of a training batch that have labels; all ranks of a sequence call this."""
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        self.end_losses()
        self.terms.latest = None
        if not self.training or not isinstance(labels, Tensor):
            return
        self.terms.labelled = labels != IGNORE
        if (group := active_sequence()) is not None:
            agreed = group.agree({"call": "a step of hashed heads"}, labels.shape[1], later=True)
            self.is_short = agreed.seq_len <= self.description.soft_until

    def add_losses(self, losses: Tensor) -> None:
        """Train the codes when the sum of the batch's token losses is differentiated."""
        labelled, is_short = self.terms.labelled, self.is_short
        self.end_losses()

        def begin_backward(grad: Tensor) -> None:  # before the layers' backward, which may compute layers again
            self.terms.labelled, self.terms.scale, self.is_short = labelled, grad.detach(), is_short
            after_backward(self.end_losses)

        if losses.requires_grad and labelled is not None:
            losses.register_hook(begin_backward)

    def end_losses(self) -> None:
        """Let no losses count until the next step or backward."""
        self.terms.end()
        self.is_short = None

    def extra_repr(self) -> str:
        return f"{self.description}"
