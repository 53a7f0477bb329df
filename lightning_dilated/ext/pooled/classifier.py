"""LongNetClassifier: one prediction for a sequence of features or tokens, by dilated attention.

Shape letters: B batch, N tokens, F features, V vocabulary, E embedding dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_dilated._validation import integer
from lightning_dilated.attention.rotary import token_positions
from lightning_dilated.ext.pooled.pooled_model import PooledModule, check_lengths, checked_by_all, first_token
from lightning_dilated.ext.pooled.samples import check_documents
from lightning_dilated.models.documents import Documents, check_mapping, mean_token
from lightning_dilated.models.transformer import init_weights
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.sequence import SequenceSpec


class LongNetClassifier(PooledModule):
    """Bidirectional LongNet with a pooled prediction: a class, an ordered class, or numbers.

    Batches are mappings with `features` (B, N, F) or `tokens` (B, N), and `label` (B,). Right-padded samples also need
    `lengths` (B,). D samples packed into one row have B = 1, `cu_seqlens` (D + 1,) int32 on the CPU, and `label` (D,);
    predictions are then (D,).

    Args:
        pattern: see `TransformerModel`.
        feature_dim: F, for batches of features.
        vocab_size: V, for batches of tokens. Set one of the two.
        task: "classification", "regression", "ordinal" or "survival"; None: the model only makes embeddings.
        num_classes: the number of classes, or of a regression's targets (None: 1); see `PooledModule`.
        pool: embedding of a sequence: "mean" over its tokens' states, or the state of its "first" token.
        options: options of `PooledModule` and `TransformerModel`, except residual_dtype, shift_layers and shift_below.

    Raises:
        ValueError, TypeError: for an invalid argument; the message names it.
    """

    #: coordinates stay on the host, so that the check for blank rows need not wait for a GPU
    host_entries = (*PooledModule.host_entries, "coords")
    sequence_spec = SequenceSpec(
        {"features": 1, "tokens": 1}, whole=["label", "lengths", "cu_seqlens", "index", "slide_id"]
    )
    input_layers = ("embedding.", "project.")
    length_from_data = True

    def __init__(
        self,
        pattern: dict[str, Any] | DilatedPattern | list[dict[str, Any] | DilatedPattern],
        feature_dim: int | None = None,
        vocab_size: int | None = None,
        task: Literal["classification", "regression", "ordinal", "survival"] | None = "classification",
        num_classes: int | None = None,
        pool: Literal["mean", "first"] = "mean",
        **options: Any,
    ) -> None:
        super().__init__(
            pattern, task, num_classes, residual_dtype=None, shift_layers="none", shift_below=None, **options
        )
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

    def setup(self, stage: str) -> None:
        """Check that the data's features or tokens fit the input layer."""
        super().setup(stage)
        name = "vocab_size" if self.input == "tokens" else "feature_dim"
        there = self._data_setting(name)
        if there is not None and (there > self.width if self.input == "tokens" else there != self.width):
            raise ValueError(f"{name}={self.width}, but the data's is {there}: set the model's {name} to {there}.")

    def build(self) -> None:
        """Build the input layer, blocks and head, with fresh weights."""
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
        """Make random features or tokens, and a label."""
        random = (
            torch.randint(0, self.width, (1, tokens)) if self.input == "tokens" else torch.randn(1, tokens, self.width)
        )
        return {self.input: random, **self.example_label()}

    def export_inputs(self, length: int, batch_size: int) -> dict[str, Tensor]:
        """Make features (B, N, F) or tokens (B, N)."""
        shape, device = (batch_size, length), next(self.parameters()).device
        if self.input == "tokens":
            return {"tokens": torch.randint(0, self.width, shape, device=device)}
        return {"features": torch.randn(*shape, self.width, device=device)}

    def export_outputs(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Return embeddings (B, E), and logits (B, C) as in `forward` if the model has a task."""
        return self._exported(self.embed(inputs))

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return logits (B, num_classes) of features (B, N, F) or tokens (B, N); embeddings (B, E) without a task.

        Logits are unnormalised log-probabilities for classification, log-probabilities for an ordinal task, and the
        predicted targets for regression.
        """
        embedding = self.embed({self.input: x, "lengths": lengths})
        return embedding if self.head is None else self.head(embedding)

    def embed(self, batch: Mapping[str, Any]) -> Tensor:
        """Return pooled states (B, E), on every rank of the sequence; (D, E) for a row of D packed samples."""
        self.configure_model()
        checked_by_all(self._check_input, batch)
        lengths = check_lengths(batch.get("lengths"), -1, 1, "a sample has at least one token")
        x = batch[self.input]
        x = self.embedding(x) if self.input == "tokens" else self.project(x.to(self.project.weight.dtype))
        positions, bounds, documents = token_positions(0, x.shape[1]), batch.get("cu_seqlens"), None
        if bounds is not None:
            documents = Documents.of(bounds, x.shape[1])
            positions = documents.position
        x = self.transformer(self.dropout(x), positions=positions, lengths=lengths, cu_seqlens=bounds)
        if self.pool == "first":
            return first_token(x, positions, documents)
        return mean_token(x, positions, lengths, documents=documents)

    def _check_input(self, batch: Mapping[str, Any]) -> None:
        check_mapping(self, batch, self.input, self.input)
        if self.input not in batch:
            raise ValueError(f"the batch holds {list(batch)}, but no {self.input} for this model.")
        if not isinstance(batch[self.input], Tensor):
            raise TypeError(f"{self.input} must be a tensor, got a {type(batch[self.input]).__name__}: convert it.")
        check_documents(batch, len(batch[self.input]), 1, "a sample has at least one token")
        x, blank = batch[self.input], _blank_in_front(batch.get("coords"), batch.get("cu_seqlens"))
        if blank:
            raise ValueError(
                f"sample {blank[0]} of the batch has a blank row in front, for a class token that this model does not have: "
                "set data.class_token to false."
            )
        if self.input == "tokens":
            if x.ndim != 2 or x.is_floating_point():
                raise ValueError(f"tokens must be integers (B, N), got {x.dtype} of shape {tuple(x.shape)}.")
        elif x.ndim != 3 or x.shape[2] != self.width or not x.is_floating_point():
            raise ValueError(
                f"features must be floating point (B, N, {self.width}), got {x.dtype} of shape {tuple(x.shape)}."
            )


def _blank_in_front(coords: Any, cu_seqlens: Any) -> list[int]:
    """Return the samples (or documents of one row) that begin with a blank row, with coordinates (B, N, 2) of -1."""
    if not isinstance(coords, Tensor) or not coords.numel():
        return []
    first = coords[:, 0]
    if cu_seqlens is not None:
        starts = torch.as_tensor(cu_seqlens)[:-1].to(coords.device, torch.int64)
        first = coords[0, starts[starts < coords.shape[1]]]  # attention itself rejects wrong bounds
    return (first == -1).all(1).nonzero()[:, 0].tolist()
