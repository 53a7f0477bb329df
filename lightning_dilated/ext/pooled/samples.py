"""Samples of pooled models: all scores of an epoch, and a check of samples that are packed into one row.

Shape letters: B batch, C scores of a sample, S samples of an epoch, D documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_dilated.models.metrics import Float64Metric


class EpochScores(Float64Metric):
    """All scores and labels of an epoch and of all ranks, for metrics that are not sums over batches, such as AUROC.

    If batches contain `index`, samples are sorted by it, so their order is the same on any number of ranks.

    Args:
        columns: C, the number of scores of a sample.
        label_columns: number of values in a label; None for labels (B,).
    """

    def __init__(self, columns: int, label_columns: int | None = None) -> None:
        super().__init__()
        labels = (0,) if label_columns is None else (0, label_columns)
        self._shapes: dict[str, tuple[int, ...]] = {"scores": (0, columns), "labels": labels, "index": (0,)}
        for name in self._shapes:
            self.add_state(name, [], dist_reduce_fx="cat")
        self._begin()

    def _begin(self) -> None:
        """Start with empty tensors, because a rank may have no sample, and gathering needs the same dtype and dims."""
        for name, shape in self._shapes.items():
            setattr(self, name, [torch.empty(shape, dtype=torch.float64, device=self.device)])

    def reset(self) -> None:
        """Forget all samples."""
        super().reset()
        self._begin()

    def update(self, scores: Tensor, labels: Tensor, index: Tensor | None = None) -> None:
        """Add samples: scores (B, C), labels (B,) or (B, C), and indices (B,) or None; B may be 0."""
        self.scores.append(scores.detach().double())
        self.labels.append(labels.detach().double())
        unknown = scores.new_full((len(scores),), -1)
        self.index.append((unknown if index is None else index.to(scores.device)).detach().double())

    def compute(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return, in fp64, the scores (S, C), the labels, and the index (S,), which is -1 if unknown."""
        whole = lambda x: torch.cat(x) if isinstance(x, list) else x  # noqa: E731 - gathered states are one tensor
        return whole(self.scores), whole(self.labels), whole(self.index)

    def whole_epoch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tensors of `compute` sorted by index; restore dims that torchmetrics squeezes for one sample."""
        scores, labels, index = (
            x.reshape(-1, *shape[1:]) for x, shape in zip(self.compute(), self._shapes.values(), strict=True)
        )
        order = index.argsort(stable=True)
        return scores[order], labels[order], index[order]


def check_documents(batch: Mapping[str, Any], rows: int, least: int, what: str) -> None:
    """Raise ValueError if samples are packed in a form that a pooled model cannot read.

    Args:
        rows: B of the batch.
        least: minimum number of tokens of a sample; errors state `what` as the reason for it.
    """
    bounds = batch.get("cu_seqlens")
    if bounds is None:
        return
    bounds = torch.as_tensor(bounds)
    if bounds.is_floating_point() or bounds.ndim != 1 or len(bounds) < 2 or rows != 1:
        raise ValueError(
            f"samples packed into one row need cu_seqlens (D + 1,) integers and a batch of 1, got {tuple(bounds.shape)} of "
            f"{bounds.dtype} and a batch of {rows}."
        )
    if batch.get("lengths") is not None:
        raise ValueError("the batch holds lengths (padded samples) and cu_seqlens (packed ones): leave one out.")
    sizes = bounds.diff().tolist()
    for i, n in enumerate(sizes):
        if n < least:
            raise ValueError(f"document {i} of cu_seqlens has {n} tokens; {what}, so it must have at least {least}.")
    label = batch.get("label")
    if label is not None and len(torch.as_tensor(label)) != len(sizes):
        raise ValueError(
            f"the batch packs {len(sizes)} samples (cu_seqlens), but has {len(torch.as_tensor(label))} labels: give each "
            "sample a label."
        )
