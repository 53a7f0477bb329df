"""SlidePretrainer: masked-autoencoder pretraining of the slide encoder on tile features, without labels.

Shape letters: B slides, N rows (the class token's in front), L rows of this rank, F features, M hidden tiles,
E embedding dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_dilated._device import send
from lightning_dilated._validation import integer
from lightning_dilated.attention.dropout import Dropout
from lightning_dilated.models.longnet.mlm import sample_numbers
from lightning_dilated.models.module import DilatedModule
from lightning_dilated.models.pooled_model import check_lengths, guarded
from lightning_dilated.models.slides.backbone import SlideBackbone
from lightning_dilated.models.slides.encoder import slide_options
from lightning_dilated.models.transformer import DilatedTransformer, init_weights
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.cycle import in_turns
from lightning_dilated.sequence import SequenceSpec


class SlidePretrainer(SlideBackbone, DilatedModule):
    """Hides most tiles of a slide and learns to tell their features from the others (after MAE, arXiv 2111.06377).

    Unlike MAE the encoder runs over all rows, with a learned token in place of what is hidden: so a slide keeps its length,
    its dilated attention, and its place on several ranks. A light decoder and a linear layer predict the features; the loss
    is their mean squared error over hidden tiles. `SlideEncoder.from_pretrained_mae` (or `pretrained=`) takes checkpoints.

    Batches are mappings with `features`, `coords`, `lengths` as `SlideEncoder` has them, and `index` (B,), the slide's
    number in the data set. What is hidden follows from (mask_seed, optimizer step, index, position) alone, on any number of
    ranks and in a resumed run; validation hides the same tiles every time.

    Args:
        mask_ratio: probability in (0, 1) with which a tile is hidden.
        normalise: the target is a tile's features with their mean taken off and divided by their standard deviation.
        decoder_dim, decoder_depth: sizes of the decoder; its heads and pattern are the encoder's.
        mask_seed: of what is hidden.
        feature_dim ... engine, compile_blocks: see `SlideEncoder`; the decoder has no dropout.
        pattern: another pattern than the released branches, as `models.longnet_lm.TokenModel` takes it, also a list with one
            a layer; in place of segment_lengths, dilation_rates and padding.
        optimizer, lr_scheduler: see `DilatedModule`.

    Raises:
        ValueError, TypeError: when made, naming the argument.
    """

    sequence_spec = SequenceSpec({"features": 1, "coords": 1}, whole=["label", "lengths", "index", "slide_id"])

    def __init__(
        self,
        mask_ratio: float = 0.75,
        normalise: bool = True,
        decoder_dim: int = 512,
        decoder_depth: int = 2,
        mask_seed: int = 0,
        feature_dim: int = 1536,
        dim: int = 768,
        depth: int = 12,
        num_heads: int = 16,
        ffn_dim: int | None = None,
        segment_lengths: list[int] | None = None,
        dilation_rates: list[int] | None = None,
        max_wsi_size: int | None = None,
        tile_size: int = 256,
        grid: int = 1000,
        padding: Literal["masked", "attended"] = "masked",
        dropout: float = 0.0,
        drop_path: float = 0.0,
        attention_dropout: float = 0.0,
        engine: str = "auto",
        compile_blocks: bool = False,
        pattern: dict[str, Any] | DilatedPattern | list[dict[str, Any] | DilatedPattern] | None = None,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        self.save_hyperparameters(ignore=["pattern", "optimizer", "lr_scheduler", "compile_blocks"])
        if isinstance(mask_ratio, bool) or not isinstance(mask_ratio, (int, float)) or not 0 < mask_ratio < 1:
            raise ValueError(f"mask_ratio must lie between 0 and 1, got {mask_ratio!r}; 0.75 is MAE's.")
        self.hiding = Dropout(float(mask_ratio), integer(mask_seed, "mask_seed", 0))
        self.normalise, self.compile_blocks = normalise, compile_blocks
        self.decoder_dim = integer(decoder_dim, "decoder_dim", 1)
        self.decoder_depth = integer(decoder_depth, "decoder_depth", 1)
        if decoder_dim % num_heads:
            raise ValueError(f"num_heads={num_heads} must divide decoder_dim={decoder_dim}.")
        self._configure_slide(
            feature_dim, dim, depth, num_heads, ffn_dim, segment_lengths, dilation_rates, max_wsi_size, tile_size, grid,
            padding, slide_options(dropout, attention_dropout, drop_path, engine), pattern,
        )  # fmt: skip

    def build(self) -> None:
        """Encoder and decoder, with fresh weights."""
        self._build_backbone()
        self.mask_token = nn.Parameter(torch.zeros(1, 1, self.dim))
        self.decoder_embed = nn.Linear(self.dim, self.decoder_dim)
        options = replace(self.options, dropout=0.0, attention_dropout=0.0, drop_path=0.0)
        self.decoder = DilatedTransformer(
            self.decoder_dim, in_turns(self.patterns, self.decoder_depth), self.num_heads, causal=False, options=options
        )
        self.decoder_predict = nn.Linear(self.decoder_dim, self.feature_dim)
        init_weights(self, self.depth, self.dim)
        init_weights(self.decoder, self.decoder_depth, self.decoder_dim)
        if self.compile_blocks:
            self.transformer.compile_blocks()
            self.decoder.compile_blocks()

    def example_batch(self, tokens: int) -> dict[str, Any]:
        """A random slide of N rows."""
        return {**self.example_rows(tokens), "index": torch.zeros(1, dtype=torch.int64)}

    def planning_copy(self, depth: int) -> SlidePretrainer:
        """DilatedModule's, hiding as many tiles as in the mean: which ones follows from values."""
        made = super().planning_copy(depth)
        rows = lambda hidden: torch.zeros(round(self.hiding.p * hidden.numel()), dtype=torch.int64)  # noqa: E731
        made.hidden_rows = rows  # type: ignore[method-assign]
        return made

    def token_features(self) -> tuple[int, ...]:
        """Those of a row and of the decoder's input; and of the decoder's output, for hidden tiles."""
        return self.feature_dim + self.decoder_dim, round(self.hiding.p * self.feature_dim)

    def planning_notes(self) -> list[str]:
        """How many tiles are hidden."""
        return [
            f"as many tiles are hidden as in the mean, mask_ratio={self.hiding.p:g}; what the decoder's blocks save is "
            "counted as temporary."
        ]

    def hidden_tiles(self, index: Tensor, positions: Tensor, lengths: Tensor | None) -> Tensor:
        """(B, L) bool on the CPU: the tiles that this step hides, of slides `index` (B,) at global `positions` (L,).

        Validation hides the same tiles every time.
        """
        step = 1 + (self._trainer.global_step if self._trainer else 0) if self.training else 0
        zero = torch.zeros((), dtype=torch.int64)
        keep = self.hiding.keep(step, index.cpu().long()[:, None], zero, positions[None], zero)
        tiles = (positions > 0).expand(keep.shape)
        return ~keep & (tiles if lengths is None else tiles & (positions < lengths[:, None]))

    def hidden_rows(self, hidden: Tensor) -> Tensor:
        """(M,) int64: the numbers of the hidden rows among all B L; found on the CPU, so that no GPU is waited for."""
        return hidden.flatten().nonzero()[:, 0]

    def reconstruct(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """(predictions, targets), each (M, F) and at least fp32, of this rank's hidden tiles."""
        self.configure_model()
        guarded(_check_index, batch)
        guarded(self._check_entries, batch)
        lengths = check_lengths(batch.get("lengths"), -1, 2, "it counts the class token's row and at least one tile")
        features, found = batch["features"], []

        def hide(x: Tensor, positions: Tensor) -> Tensor:
            found.append(self.hidden_tiles(batch["index"], positions, lengths))
            return torch.where(send(found[0], x.device)[..., None], self.mask_token.to(x.dtype), x)

        x, _ = self.row_tokens(features, batch["coords"], lengths, change=hide)
        x = self.norm(self.transformer(self.dropout(x), lengths=lengths))
        x = self.decoder(self.decoder_embed(x), lengths=lengths)
        rows = send(self.hidden_rows(found[0]), x.device)
        target = features.flatten(0, 1)[rows]
        target = target.to(torch.promote_types(target.dtype, torch.float32))
        if self.normalise:
            target = nn.functional.layer_norm(target, target.shape[-1:], eps=1e-6)
        return self.decoder_predict(x.flatten(0, 1)[rows]).to(target.dtype), target

    def loss_terms(self, batch: Mapping[str, Any]) -> tuple[Tensor, int]:
        """(sum over this rank's hidden tiles of their mean squared error, how many they are)."""
        got, target = self.reconstruct(batch)
        return (got - target).square().mean(1).sum(), len(target)


def _check_index(batch: Mapping[str, Any]) -> None:
    if "index" not in batch:
        raise ValueError(f"the batch holds {list(batch)}, but no index (B,) of its slides, which says what is hidden.")
    sample_numbers(batch["index"])
