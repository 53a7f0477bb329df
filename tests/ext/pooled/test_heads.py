"""Heads: losses by their formulas, exact in the tails, and metrics by their definitions for any epoch."""

import math

import pytest
import torch
from torch import nn

from lightning_dilated.ext.pooled.heads import (
    ClassificationHead,
    OrdinalHead,
    RegressionHead,
    check_classes,
    class_metrics,
    make_head,
)


def ordinal(classes=4):
    head = OrdinalHead(5, classes).double()
    with torch.no_grad():
        for p in head.parameters():
            p.add_(torch.randn_like(p))
    return head


# -- losses ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("classes", [2, 3, 7])
def test_ordinal_is_the_cumulative_link(classes):
    head, x = ordinal(classes), torch.randn(9, 5, dtype=torch.float64)
    t = head.thresholds()
    cumulative = torch.sigmoid(t - head.linear(x))  # cumulative probability P(y <= k)
    whole = torch.cat([torch.zeros(9, 1), cumulative, torch.ones(9, 1)], 1)
    torch.testing.assert_close(head(x).exp(), whole.diff(dim=1))
    torch.testing.assert_close(head.scores(head(x)).sum(1), torch.ones(9).double())
    assert (t.diff() > 0).all() and len(t) == classes - 1
    label = torch.arange(9) % classes
    torch.testing.assert_close(head.losses(head(x), label), -whole.diff(dim=1)[torch.arange(9), label].log())


def test_ordinal_in_the_tails():
    """From |a| = 17 on, sigmoid(a) - sigmoid(b) is 0 in fp32, but the loss and its gradient must not be 0."""
    head = OrdinalHead(1, 3)
    x = torch.tensor([[200.0], [-200.0]], requires_grad=True)
    with torch.no_grad():
        head.linear.weight.fill_(1.0)
    loss = head.losses(head(x), torch.tensor([1, 1]))
    assert loss.tolist() == pytest.approx([199.96, 199.96], abs=0.05)
    assert torch.autograd.grad(loss.sum(), x)[0].flatten().tolist() == pytest.approx([1, -1])


def test_ordinal_starts_evenly_and_learns_its_thresholds():
    head = OrdinalHead(3, 4)
    assert head.thresholds().tolist() == pytest.approx([-1, 0, 1], abs=1e-4)
    head.losses(head(torch.ones(4, 3)), torch.arange(4)).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in head.parameters())


def test_other_losses():
    x, label = torch.randn(6, 5), torch.arange(6) % 3
    head = ClassificationHead(5, 3)
    torch.testing.assert_close(head.losses(head(x), label).mean(), nn.functional.cross_entropy(head.linear(x), label))
    for name, loss in (("mse", nn.functional.mse_loss), ("smooth_l1", nn.functional.smooth_l1_loss)):
        head, label = RegressionHead(5, 2, name), torch.randn(6, 2)
        torch.testing.assert_close(head.losses(head(x), label).mean(), loss(head.linear(x), label))


# -- predictions and metrics -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("head, names", [
    (ClassificationHead(5, 3), ["prediction", "probability_0", "probability_1", "probability_2"]),
    (OrdinalHead(5, 2), ["prediction", "probability_0", "probability_1"]),
    (RegressionHead(5, 1), ["prediction"]),
    (RegressionHead(5, 2), ["prediction_0", "prediction_1"]),
])  # fmt: skip
def test_predictions(head, names):
    predicted = head.predictions(head(torch.randn(4, 5)))
    assert list(predicted) == names and all(x.shape == (4,) for x in predicted.values())


def by_definition(scores, labels, classes):
    """Compute AUROC by counting pairs, balanced accuracy as mean recall, and quadratic kappa by its sums."""
    areas, recalls, predicted = [], [], scores.argmax(1)
    for c in labels.unique():
        positive, negative = scores[labels == c, c], scores[labels != c, c]
        pairs = positive[:, None] - negative[None]
        areas.append(((pairs > 0).double() + 0.5 * (pairs == 0)).mean())
        recalls.append((predicted[labels == c] == c).double().mean())
    weight = (torch.arange(classes)[:, None] - torch.arange(classes)[None]).double() ** 2
    observed = sum(weight[a, b] for a, b in zip(labels, predicted, strict=True)) * len(labels)
    expected = sum(weight[a, b] for a in labels for b in predicted)
    return {
        "auroc": sum(areas) / len(areas),
        "balanced_accuracy": sum(recalls) / len(recalls),
        "quadratic_kappa": 1 - observed / expected,
    }


@pytest.mark.parametrize("classes, occur", [(2, 2), (4, 4), (5, 3)], ids=["binary", "several", "some absent"])
def test_class_metrics(classes, occur):
    """The mean does not include classes that do not occur in the epoch."""
    labels = torch.arange(40) % occur
    scores = (torch.randn(40, classes).double() + 2 * nn.functional.one_hot(labels, classes)).softmax(1)
    scores[7] = scores[8]  # two scores are equal
    got, want = class_metrics(scores, labels, classes), by_definition(scores, labels, classes)
    for name, value in want.items():
        assert got[name].item() == pytest.approx(value.item(), abs=1e-6), name


def test_metrics_that_do_not_exist_are_nan():
    one = class_metrics(torch.tensor([[0.9, 0.1], [0.2, 0.8]]).double(), torch.tensor([0, 0]), 2)
    assert math.isnan(one["auroc"]) and one["balanced_accuracy"] == 0.5
    broken = torch.tensor([[0.9, 0.1], [torch.nan, 0.8]]).double()
    for epoch in (class_metrics(broken, torch.tensor([0, 1]), 2), class_metrics(torch.empty(0, 2), torch.empty(0), 2)):
        assert all(map(math.isnan, epoch.values()))
    assert math.isnan(RegressionHead(5, 1).metrics(torch.ones(1, 1).double(), torch.ones(1, 1).double())["r2"])


def test_regression_metrics():
    scores, labels = torch.randn(30, 2).double(), torch.randn(30, 2).double()
    metrics = RegressionHead(5, 2).metrics(scores, labels)
    residual, total = (scores - labels).square(), (labels - labels.mean(0)).square()
    torch.testing.assert_close(metrics["mse"], residual.mean())
    torch.testing.assert_close(metrics["r2"], (1 - residual.sum(0) / total.sum(0)).mean())


# -- labels ------------------------------------------------------------------------------------------------------------
BAD = {
    "above": (lambda: check_classes(torch.tensor([0, 3]), 3), ValueError, "found 3"),
    "below": (lambda: check_classes(torch.tensor([0, -1]), 3), ValueError, "found -1"),
    "two columns": (lambda: check_classes(torch.zeros(2, 2).long(), 3), TypeError, r"must be integers \(B,\)"),
    "floats": (lambda: check_classes(torch.zeros(2), 3), TypeError, "must be integers"),
    "NaN": (lambda: RegressionHead(5, 1).check(torch.tensor([1.0, torch.nan])), ValueError, "NaN or infinite"),
    "targets": (lambda: RegressionHead(5, 2).check(torch.zeros(4)), ValueError, r"must be \(B, 2\)"),
    "loss": (lambda: make_head("regression", 5, None, "mae"), ValueError, "regression_loss must be one of"),
    "one class": (lambda: make_head("classification", 5, 1, "mse"), ValueError, "num_classes must be at least 2"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_labels_and_settings(name):
    call, error, says = BAD[name]
    with pytest.raises(error, match=says):
        call()


@pytest.mark.parametrize("name", ["classification", "ordinal", "regression"])
def test_autocast_does_not_round_logits(name):
    head, x = make_head(name, 16, 3, "mse"), torch.randn(4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        got = head(x)
    assert got.dtype == torch.float32 and torch.equal(got, head(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_labels_that_were_rounded_are_refused(dtype):
    with pytest.raises(TypeError, match=r"labels are rounded to torch\.\w+16: .*bf16-mixed"):
        make_head("regression", 4, 1, "mse").check(torch.tensor([1234.6]).to(dtype))


def test_losses_are_not_rounded_to_the_logits_dtype():
    logits, label = torch.zeros(1, 1, dtype=torch.bfloat16), torch.tensor([[1234.6]])
    assert float(make_head("regression", 4, 1, "mse").losses(logits, label)) == pytest.approx(1234.6**2, rel=1e-6)
    head, logits, label = make_head("classification", 4, 3, "mse"), torch.randn(5, 3).bfloat16(), torch.arange(5) % 3
    want = torch.nn.functional.cross_entropy(logits.double(), label, reduction="none")
    torch.testing.assert_close(head.losses(logits, label).double(), want, rtol=1e-6, atol=1e-7)
