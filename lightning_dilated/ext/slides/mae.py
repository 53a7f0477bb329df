"""SlidePretrainer: masked-autoencoder pretraining of the slide encoder on tile features, without labels.

Shape letters: B slides, N rows (class token first), L rows of this rank, F features, M hidden tiles, E embedding dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dilated._device import send
from lightning_dilated._validation import flag, integer, real
from lightning_dilated.attention.dropout import Dropout
from lightning_dilated.ext.masked.mlm import sample_numbers
from lightning_dilated.ext.pooled.pooled_model import check_lengths, checked_by_all
from lightning_dilated.ext.slides.backbone import SlideBackbone
from lightning_dilated.models.documents import Documents
from lightning_dilated.models.transformer import DilatedTransformer, init_weights
from lightning_dilated.pattern.rows import cycle_to


class SlidePretrainer(SlideBackbone):
    """Hides most tiles of a slide and learns to predict their features from the others (after MAE, arXiv 2111.06377).

    Unlike MAE, the encoder runs over all rows, with a learned token in place of hidden tiles, so a slide keeps its
    length, its dilated attention, and its sharding. A light decoder and a linear layer predict the features; the loss
    is the mean squared error over hidden tiles. `SlideEncoder.from_pretrained_mae` reads checkpoints.

    Batches are mappings with `features`, `coords`, `lengths` or `cu_seqlens` as in `SlideEncoder`, and `index` (B,), or
    (D,) for packed slides: the slide's number in the data set. Hidden tiles depend only on (mask_seed, optimizer step,
    index, position), so neither the number of ranks nor a resume changes them. Validation always hides the same tiles.

    Args:
        mask_ratio: probability in (0, 1) that a tile is hidden.
        normalise: whether the target is a tile's features minus their mean, divided by their standard deviation.
        decoder_dim: features of the decoder, which has the encoder's number of heads and pattern.
        decoder_depth: layers of the decoder.
        mask_seed: seed of the choice of hidden tiles.
        options: options of `SlideBackbone`; the decoder has no dropout.

    Raises:
        ValueError, TypeError: for an invalid argument; the message names it.
    """

    def __init__(
        self,
        mask_ratio: float = 0.75,
        normalise: bool = True,
        decoder_dim: int = 512,
        decoder_depth: int = 2,
        mask_seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        ratio = real(mask_ratio, "mask_ratio", above=0, below=1, hint=" 0.75 is MAE's.")
        self.hiding = Dropout(ratio, integer(mask_seed, "mask_seed", 0))
        self.normalise = flag(normalise, "normalise")
        self.decoder_dim = integer(decoder_dim, "decoder_dim", 1)
        self.decoder_depth = integer(decoder_depth, "decoder_depth", 1)
        if decoder_dim % self.num_heads:
            raise ValueError(f"num_heads={self.num_heads} must divide decoder_dim={decoder_dim}.")

    def build(self) -> None:
        """Build encoder and decoder with fresh weights."""
        self._build_backbone()
        self.mask_token = nn.Parameter(torch.zeros(1, 1, self.dim))
        self.decoder_embed = nn.Linear(self.dim, self.decoder_dim)
        options = replace(self.options, dropout=0.0, attention_dropout=0.0, drop_path=0.0)
        self.decoder = DilatedTransformer(
            self.decoder_dim, cycle_to(self.patterns, self.decoder_depth), self.num_heads, causal=False, options=options
        )
        self.decoder_predict = nn.Linear(self.decoder_dim, self.feature_dim)
        init_weights(self, self.depth, self.dim)
        init_weights(self.decoder, self.decoder_depth, self.decoder_dim)
        if self.compile_blocks:
            self.transformer.compile_blocks()
            self.decoder.compile_blocks()

    def example_batch(self, tokens: int) -> dict[str, Any]:
        """Return a random slide of N rows."""
        return {**self.example_rows(tokens), "index": torch.zeros(1, dtype=torch.int64)}

    def planning_copy(self, depth: int) -> SlidePretrainer:
        """Copy as DilatedModule does, with the mean number of hidden tiles, because the true number needs values."""
        copy = super().planning_copy(depth)
        rows = lambda hidden: torch.zeros(round(self.hiding.p * hidden.numel()), dtype=torch.int64)  # noqa: E731
        copy.hidden_rows = rows  # type: ignore[method-assign]
        return copy

    def token_features(self) -> tuple[int, ...]:
        """Return the features of a row plus the decoder's input, and the mean number of predicted features per row."""
        return self.feature_dim + self.decoder_dim, round(self.hiding.p * self.feature_dim)

    def planning_notes(self) -> list[str]:
        """Return a note on the number of hidden tiles."""
        return [
            f"the mean number of tiles is hidden, mask_ratio={self.hiding.p:g}; activations that the decoder's blocks save "
            "are counted as temporary."
        ]

    def hidden_tiles(
        self, index: Tensor, positions: Tensor, lengths: Tensor | None, documents: Documents | None = None
    ) -> Tensor:
        """Return a mask (B, L) on the CPU of the tiles that this step hides, for slides `index` (B,), `positions` (L,).

        For D slides packed into one row, `index` is (D,), and `positions` count within each slide.
        """
        step = 1 + self._optimizer_step() if self.training else 0
        zero = torch.zeros((), dtype=torch.int64)
        slide = index.cpu().long()[:, None] if documents is None else index.cpu().long()[documents.number][None]
        keep = self.hiding.keep(step, slide, zero, positions[None], zero)
        tiles = (positions > 0).expand(keep.shape)
        return ~keep & (tiles if lengths is None else tiles & (positions < lengths[:, None]))

    def hidden_rows(self, hidden: Tensor) -> Tensor:
        """Return numbers (M,) int64 of the hidden rows among all B L, on the CPU to avoid waiting for a GPU."""
        return hidden.flatten().nonzero()[:, 0]

    def reconstruct(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return predictions and targets of this rank's hidden tiles, each (M, F) and at least fp32."""
        self.configure_model()
        checked_by_all(_check_index, batch)
        checked_by_all(self._check_entries, batch)
        lengths = check_lengths(batch.get("lengths"), -1, 2, "it counts the class token's row and at least one tile")
        features, hidden, documents = batch["features"], [], self._documents(batch)
        packed = {"lengths": lengths, "cu_seqlens": batch.get("cu_seqlens")}

        def hide(x: Tensor, positions: Tensor) -> Tensor:
            packed_by = () if documents is None else (documents,)
            hidden.append(self.hidden_tiles(batch["index"], positions, lengths, *packed_by))
            return torch.where(send(hidden[0], x.device)[..., None], self.mask_token.to(x.dtype), x)

        x, _ = self.row_tokens(features, batch["coords"], lengths, change=hide, documents=documents)
        x = self.norm(self.transformer(self.dropout(x), **packed))
        x = self.decoder(self.decoder_embed(x), **packed)
        rows = send(self.hidden_rows(hidden[0]), x.device)
        target = features.flatten(0, 1)[rows]
        target = target.to(torch.promote_types(target.dtype, torch.float32))
        if self.normalise:
            target = nn.functional.layer_norm(target, target.shape[-1:], eps=1e-6)
        return self.decoder_predict(x.flatten(0, 1)[rows]).to(target.dtype), target

    def loss_terms(self, batch: Mapping[str, Any]) -> tuple[Tensor, int]:
        """Return the sum of the mean squared errors of this rank's hidden tiles, and the number of these tiles."""
        predicted, target = self.reconstruct(batch)
        return (predicted - target).square().mean(1).sum(), len(target)


def _check_index(batch: Mapping[str, Any]) -> None:
    if "index" not in batch:
        raise ValueError(f"the batch holds {list(batch)}, but no index (B,) of its slides, which selects hidden tiles.")
    sample_numbers(batch["index"])
    bounds = batch.get("cu_seqlens")
    if bounds is not None and len(batch["index"]) != len(bounds) - 1:
        raise ValueError(
            f"the batch packs {len(bounds) - 1} slides (cu_seqlens), but has {len(batch['index'])} numbers in index: give "
            "each slide a number."
        )
