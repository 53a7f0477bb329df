"""Heads over a pooled embedding: classification, regression and ordinal, with their losses, predictions and metrics.

Shape letters: B batch, E embedding dim, C classes (or targets of a regression), S samples of an epoch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics.functional.classification import binary_auroc, multiclass_cohen_kappa
from torchmetrics.functional.regression import r2_score

from lightning_dilated._validation import integer, one_of

REGRESSION_LOSSES = ("mse", "smooth_l1")


def unrounded(linear: nn.Linear, x: Tensor) -> Tensor:
    """Compute linear(x) in the weights' dtype, without autocast, which would round losses to 8 bits of mantissa."""
    with torch.autocast(x.device.type, enabled=False):
        return linear(x.to(linear.weight.dtype))


class Head(nn.Module):
    """Base of the heads: a linear layer over an embedding."""

    name: str
    classes: int
    #: number of scores of a sample; and number of values in a label, None if a label is the number of a class
    columns: int
    label_columns: int | None = None
    #: True if the loss compares all samples of an epoch, so that it is not a sum over batches
    of_epoch = False
    linear: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs (B, C) from (B, E)."""
        return unrounded(self.linear, x)

    def count(self, label: Tensor) -> Any:
        """Return the divisor of the sum of losses."""
        return len(label)


class ClassificationHead(Head):
    """C logits; cross-entropy."""

    name = "classification"

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.classes = self.columns = integer(classes, "num_classes", 2)
        self.linear = nn.Linear(dim, classes)

    def check(self, label: Tensor) -> Tensor:
        """Return the labels as int64 (B,). Raises the errors that `check_classes` raises."""
        return check_classes(label, self.classes)

    def losses(self, logits: Tensor, label: Tensor) -> Tensor:
        """The losses in nats, (B,)."""
        wide = torch.promote_types(logits.dtype, torch.float32)
        return nn.functional.cross_entropy(logits.to(wide), label, reduction="none")

    def scores(self, logits: Tensor) -> Tensor:
        """Probabilities (B, C), fp64."""
        return logits.double().softmax(-1)

    def predictions(self, logits: Tensor) -> dict[str, Tensor]:
        """The likeliest class and every class's probability, each (B,)."""
        scores = self.scores(logits)
        return {"prediction": scores.argmax(-1)} | {f"probability_{c}": scores[:, c] for c in range(self.classes)}

    def metrics(self, scores: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """AUROC, balanced accuracy and quadratic kappa of scores (S, C) and labels (S,)."""
        return class_metrics(scores, labels.long(), self.classes)


class OrdinalHead(ClassificationHead):
    """Cumulative link model with the logistic link (McCullagh 1980): P(y > k) = sigmoid(s - t_k), t increasing.

    s is a linear function of the embedding; t are C - 1 thresholds. The loss is the negative log-likelihood of a class.
    """

    name = "ordinal"

    def __init__(self, dim: int, classes: int) -> None:
        nn.Module.__init__(self)
        self.classes = self.columns = integer(classes, "num_classes", 2)
        self.linear = nn.Linear(dim, 1, bias=False)
        self.first = nn.Parameter(torch.tensor([(2 - classes) / 2]))
        self.gaps = nn.Parameter(torch.full((classes - 2,), 0.5413)) if classes > 2 else None  # softplus(0.5413) = 1

    def thresholds(self) -> Tensor:
        """Thresholds (C - 1,), increasing."""
        if self.gaps is None:
            return self.first
        return torch.cat([self.first, self.first + nn.functional.softplus(self.gaps).cumsum(0)])

    def forward(self, x: Tensor) -> Tensor:
        """Log-probabilities (B, C) from (B, E), at least fp32.

        P(y = k) = sigmoid(a) - sigmoid(b) with a = t_k - s and b = t_{k-1} - s, which equals sigmoid(a) sigmoid(-b) (1
        - exp(b - a)). The logarithm of this product is exact in the tails.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        t, s = self.thresholds().to(wide), unrounded(self.linear, x).to(wide)
        below = nn.functional.logsigmoid(t - s)  # log P(y <= k)
        above = nn.functional.logsigmoid(s - t)
        between = below[:, 1:] + above[:, :-1] + torch.log(-torch.expm1(t[:-1] - t[1:]))
        return torch.cat([below[:, :1], between, above[:, -1:]], 1)

    def losses(self, logits: Tensor, label: Tensor) -> Tensor:
        """The losses in nats, (B,)."""
        return -logits.gather(1, label[:, None])[:, 0]

    def scores(self, logits: Tensor) -> Tensor:
        """Probabilities (B, C), fp64."""
        return logits.double().exp()


class RegressionHead(Head):
    """C real targets (one by default); mean squared error, or smooth L1 (Huber with delta 1)."""

    name = "regression"

    def __init__(self, dim: int, targets: int, loss: str = "mse") -> None:
        super().__init__()
        self.classes = self.columns = self.label_columns = integer(targets, "num_classes", 1)
        one_of(loss, "regression_loss", REGRESSION_LOSSES)
        self.linear, self.loss = nn.Linear(dim, targets), loss

    def check(self, label: Tensor) -> Tensor:
        """Return the labels (B, C); raise for other shapes, infinite or NaN values, and 16-bit dtypes."""
        if label.dtype in (torch.bfloat16, torch.float16):
            raise TypeError(
                f"the labels are rounded to {label.dtype}: Trainer(precision='bf16-true' or '16-true') casts the numbers of "
                "a batch. Train with precision='bf16-mixed', or make the labels of the data integers."
            )
        shaped = label[:, None] if label.ndim == 1 else label
        if shaped.ndim != 2 or shaped.shape[1] != self.classes:
            raise ValueError(f"labels of this regression must be (B, {self.classes}), got {tuple(label.shape)}.")
        if not bool(shaped.isfinite().all()):
            raise ValueError("a label is NaN or infinite: leave samples without a label out of the data.")
        return shaped

    def losses(self, logits: Tensor, label: Tensor) -> Tensor:
        """The mean loss over each sample's targets, (B,)."""
        name = "mse_loss" if self.loss == "mse" else "smooth_l1_loss"
        wide = torch.promote_types(logits.dtype, torch.float32)  # bf16 would round the labels
        return getattr(nn.functional, name)(logits.to(wide), label.to(wide), reduction="none").mean(1)

    def scores(self, logits: Tensor) -> Tensor:
        """Predicted targets (B, C), fp64."""
        return logits.double()

    def predictions(self, logits: Tensor) -> dict[str, Tensor]:
        """Return "prediction", or for several targets "prediction_0" and so on, each (B,)."""
        if self.classes == 1:
            return {"prediction": logits[:, 0]}
        return {f"prediction_{c}": logits[:, c] for c in range(self.classes)}

    def metrics(self, scores: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Mean squared error and R2 (mean over targets); R2 is NaN for fewer than two samples."""
        nan = scores.new_full((), torch.nan)
        r2 = r2_score(scores, labels, multioutput="uniform_average") if len(scores) > 1 else nan
        return {"mse": (scores - labels).square().mean(), "r2": r2}


HEADS = {head.name: head for head in (ClassificationHead, RegressionHead, OrdinalHead)}
TASKS = (*HEADS, "survival")


def make_head(task: str, dim: int, num_classes: int | None, regression_loss: str) -> nn.Module:
    """Make the head of a task other than survival (see `survival.survival_head`).

    Raises:
        ValueError: for an unknown task or a missing number of classes.
    """
    if task not in HEADS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, or null for embeddings only; got {task!r}.")
    if task == "regression":
        return RegressionHead(dim, 1 if num_classes is None else num_classes, regression_loss)
    if num_classes is None:
        raise ValueError(f"task={task!r} needs num_classes, the number of classes of the labels.")
    return HEADS[task](dim, num_classes)


def check_classes(label: Tensor, classes: int) -> Tensor:
    """Return the labels (B,) as int64.

    Raises:
        TypeError, ValueError: if they are not integers in [0, classes), one for each sample.
    """
    if label.is_floating_point() or label.dtype == torch.bool or label.ndim != 1:
        raise TypeError(f"labels of classes must be integers (B,), got {label.dtype} of shape {tuple(label.shape)}.")
    if label.numel():
        low, high = (int(x) for x in torch.stack([label.amin(), label.amax()]).tolist())
        if low < 0 or high >= classes:
            raise ValueError(
                f"labels must lie in 0 to {classes - 1} (num_classes={classes}), found {low if low < 0 else high}. Set "
                "num_classes, or leave samples without a label out of the data."
            )
    return label.long()


def class_metrics(scores: Tensor, labels: Tensor, classes: int) -> dict[str, Tensor]:
    """AUROC, balanced accuracy and Cohen's kappa with quadratic weights, from probabilities (S, C) and labels (S,).

    AUROC (of one class against the others) and balanced accuracy (recall) are means over the classes that occur. A
    metric without a value, such as AUROC if only one class occurs, is NaN, not 0.
    """
    present = [c for c in range(classes) if bool((labels == c).any())]
    nan = scores.new_full((), torch.nan)
    if not present or not bool(scores.isfinite().all()):  # the model may have diverged
        return dict.fromkeys(("auroc", "balanced_accuracy", "quadratic_kappa"), nan)
    predicted = scores.argmax(-1)
    recalls = [(predicted[labels == c] == c).double().mean() for c in present]
    compared = present if len(present) > 1 else []
    areas = [binary_auroc(scores[:, c], (labels == c).long()) for c in compared]
    return {
        "auroc": torch.stack(areas).mean() if areas else nan,
        "balanced_accuracy": torch.stack(recalls).mean(),
        "quadratic_kappa": multiclass_cohen_kappa(predicted, labels, classes, weights="quadratic"),
    }
