"""LongNetClassifier: one prediction for a sequence of features or tokens, by dilated attention.

Shape letters: B batch, N tokens, F features, V vocabulary, E embedding dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_dilated._validation import integer
from lightning_dilated.attention.rotary import token_positions
from lightning_dilated.models.blocks import BlockOptions
from lightning_dilated.models.module import was_given
from lightning_dilated.models.pooled_model import PooledModule, check_lengths, first_token, guarded, mean_token
from lightning_dilated.models.transformer import DilatedTransformer, init_weights, stored_bases
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.layers import plain_patterns
from lightning_dilated.sequence import SequenceSpec


class LongNetClassifier(PooledModule):
    """Bidirectional LongNet with a pooled prediction: a class, an ordered class, or numbers.

    Batches are mappings with `features` (B, N, F) or `tokens` (B, N) and `label` (B,); optionally `lengths` (B,) of samples
    that are padded on the right.

    Args:
        pattern, rotary_base, max_seq_len, kv_conv: see `models.longnet_lm.TokenModel`.
        feature_dim: F, for batches of features.
        vocab_size: V, for batches of tokens. One of the two is given.
        task: "classification", "regression" or "ordinal"; None makes embeddings only.
        num_classes: classes; of a regression its targets, 1 if None.
        pool: "mean" over the tokens, or "first", the first token's.
        dim, depth, num_heads, num_kv_heads, ffn_dim: sizes; ffn_dim None is 4 dim (GELU) or about 8/3 dim (SwiGLU).
        norm, ffn, bias, dropout, attention_dropout, drop_path, sub_layernorm, position_encoding,
            xpos_scale_base, engine: see `models.blocks.BlockOptions`.
        regression_loss, layer_decay, freeze_encoder, lora_rank, lora_alpha: see `models.pooled.PooledModule`.
        compile_blocks: compile every block by torch.compile when it is first run.
        optimizer, lr_scheduler: see `DilatedModule`.

    Raises:
        ValueError, TypeError: when made, naming the argument.
    """

    sequence_spec = SequenceSpec({"features": 1, "tokens": 1}, whole=["label", "lengths", "index", "slide_id"])
    input_layers = ("embedding.", "project.")

    def __init__(
        self,
        pattern: dict[str, Any] | DilatedPattern | list[dict[str, Any] | DilatedPattern],
        feature_dim: int | None = None,
        vocab_size: int | None = None,
        task: Literal["classification", "regression", "ordinal"] | None = "classification",
        num_classes: int | None = None,
        pool: Literal["mean", "first"] = "mean",
        dim: int = 256,
        depth: int = 4,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        ffn_dim: int | None = None,
        norm: Literal["rmsnorm", "layernorm"] = "rmsnorm",
        ffn: Literal["swiglu", "gelu"] = "swiglu",
        bias: bool = False,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        drop_path: float = 0.0,
        sub_layernorm: bool = False,
        position_encoding: Literal["none", "rotary", "xpos"] = "rotary",
        rotary_base: float | str | list[float | str] | None = None,
        xpos_scale_base: float = 512.0,
        engine: str = "auto",
        regression_loss: Literal["mse", "smooth_l1"] = "mse",
        layer_decay: float = 1.0,
        freeze_encoder: bool = False,
        lora_rank: int | None = None,
        lora_alpha: float | None = None,
        compile_blocks: bool = False,
        max_seq_len: int | None = None,
        kv_conv: int | None = None,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        dim, depth = integer(dim, "dim", 1), integer(depth, "depth", 1)
        super().__init__(
            dim, depth, task, num_classes, regression_loss, layer_decay, freeze_encoder, lora_rank, lora_alpha,
            optimizer, lr_scheduler,
        )  # fmt: skip
        self._choose_layers(
            pattern, depth, num_heads, num_kv_heads,
            rotary_base=rotary_base, max_seq_len=max_seq_len, position_encoding=position_encoding,
        )  # fmt: skip
        self.save_hyperparameters(ignore=["pattern", "optimizer", "lr_scheduler", "compile_blocks"])
        if was_given(self, "pattern"):
            self.save_hyperparameters({"pattern": plain_patterns(self.pattern)})
        if position_encoding != "none" and "rotary_base" in self.hparams:
            # in numbers, so that no other length changes what was trained
            self.save_hyperparameters({"rotary_base": stored_bases(self.rotary_bases)})
        if (feature_dim is None) == (vocab_size is None):
            raise ValueError(
                f"give feature_dim (batches of features) or vocab_size (batches of tokens), one of them; got "
                f"feature_dim={feature_dim} and vocab_size={vocab_size}."
            )
        if pool not in ("mean", "first"):
            raise ValueError(f"pool must be mean or first, got {pool!r}.")
        self.input = "tokens" if feature_dim is None else "features"
        self.width = integer(*((vocab_size, "vocab_size") if feature_dim is None else (feature_dim, "feature_dim")), 1)
        self.pool = pool
        if dim % num_heads:
            raise ValueError(f"num_heads={num_heads} must divide dim={dim}.")
        self.ffn_dim, self.compile_blocks = ffn_dim, self._compiled(compile_blocks)
        self.options = BlockOptions(
            norm, ffn, bias, dropout, attention_dropout, sub_layernorm,
            position_encoding, xpos_scale_base=xpos_scale_base, engine=engine, drop_path=drop_path, kv_conv=kv_conv,
        )  # fmt: skip
        with torch.device("meta"):  # one layer without memory, so that a wrong size or option is an error here
            self._transformer(depth=1)

    def _transformer(self, depth: int) -> DilatedTransformer:
        return DilatedTransformer(
            self.dim, self.patterns[:depth], self.num_heads,
            causal=False, hidden=self.ffn_dim, num_kv_heads=self.num_kv_heads, options=self.options,
            rotary_bases=self.rotary_bases[:depth],
        )  # fmt: skip

    def setup(self, stage: str) -> None:
        """See that the data's features or tokens fit the input layer."""
        super().setup(stage)
        name = "vocab_size" if self.input == "tokens" else "feature_dim"
        there = getattr(getattr(self._trainer, "datamodule", None), name, None)
        if there is not None and (there > self.width if self.input == "tokens" else there != self.width):
            raise ValueError(f"{name}={self.width}, but the data's is {there}: set the model's {name} to {there}.")

    def build(self) -> None:
        """Input layer, blocks and head, with fresh weights."""
        if self.input == "tokens":
            self.embedding = nn.Embedding(self.width, self.dim)
        else:
            self.project = nn.Linear(self.width, self.dim)
        self.dropout = nn.Dropout(self.options.dropout)
        self.transformer = self._transformer(self.depth)
        self.head = self._make_head()
        init_weights(self, self.depth, self.dim)
        if self.compile_blocks:
            self.transformer.compile_blocks()

    def example_batch(self, tokens: int) -> dict[str, Any]:
        """Random features or tokens, and a label."""
        random = (
            torch.randint(0, self.width, (1, tokens)) if self.input == "tokens" else torch.randn(1, tokens, self.width)
        )
        return {self.input: random, **self.example_label()}

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Logits (B, num_classes), or embeddings (B, E) without a task, from features (B, N, F) or tokens (B, N).

        Those of a classification are unnormalised log-probabilities, of an ordinal task log-probabilities, of a regression
        the targets.
        """
        embedding = self.embed({self.input: x, "lengths": lengths})
        return embedding if self.head is None else self.head(embedding)

    def embed(self, batch: Mapping[str, Any]) -> Tensor:
        """(B, E) pooled hidden states, on every rank of the sequence."""
        self.configure_model()
        guarded(self._check_input, batch)
        lengths = check_lengths(batch.get("lengths"), -1, 1, "a sample has at least one token")
        x = batch[self.input]
        x = self.embedding(x) if self.input == "tokens" else self.project(x.to(self.project.weight.dtype))
        positions = token_positions(0, x.shape[1])
        x = self.transformer(self.dropout(x), positions=positions, lengths=lengths)
        return first_token(x, positions) if self.pool == "first" else mean_token(x, positions, lengths)

    def _check_input(self, batch: Mapping[str, Any]) -> None:
        if self.input not in batch:
            raise ValueError(f"the batch holds {list(batch)}, but no {self.input} for this model.")
        x, coords = batch[self.input], batch.get("coords")
        if isinstance(coords, Tensor) and coords.numel() and bool((coords[:, 0] == -1).all()):
            raise ValueError(
                "the batch has a blank row in front, for a class token that this model does not have: set "
                "data.class_token to false."
            )
        if self.input == "tokens":
            if x.ndim != 2 or x.is_floating_point():
                raise ValueError(f"tokens must be integers (B, N), got {x.dtype} of shape {tuple(x.shape)}.")
        elif x.ndim != 3 or x.shape[2] != self.width or not x.is_floating_point():
            raise ValueError(
                f"features must be floating point (B, N, {self.width}), got {x.dtype} of shape {tuple(x.shape)}."
            )
