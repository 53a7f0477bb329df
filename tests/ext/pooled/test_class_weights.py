"""Class weights: training multiplies losses by weights, given or counted from the data. Evaluation does not."""

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_dilated import LongNetClassifier, SlideEncoder

from ...models import PATTERN, trainer
from ..slides.slides import batch, encoder

SIZES = {"feature_dim": 3, "dim": 16, "depth": 1, "num_heads": 4, "num_classes": 2}


def model(**options) -> LongNetClassifier:
    return LongNetClassifier(PATTERN, **{**SIZES, **options})


class Data(pl.LightningDataModule):
    """Eight sequences, two of them of class 1."""

    def __init__(self, counts=None, sampling="all"):
        super().__init__()
        self.class_counts, self.sampling = counts, sampling

    def train_dataloader(self):
        rng = torch.Generator().manual_seed(0)
        rows = [{"features": torch.randn(12, 3, generator=rng), "label": torch.tensor(int(i < 2))} for i in range(8)]
        return DataLoader(rows, batch_size=4)

    val_dataloader = test_dataloader = train_dataloader


def classifier(weights, task="classification", **options):
    torch.manual_seed(0)
    out = model(class_weights=weights, task=task, **options)
    out.configure_model()
    return out.eval()


@pytest.mark.parametrize("task", ["classification", "ordinal"])
def test_a_list(task):
    plain, weighted = classifier(None, task), classifier([0.5, 3.0], task)
    (rows,) = DataLoader(Data().train_dataloader().dataset, batch_size=8)
    losses = plain.head.losses(plain(rows["features"]), rows["label"])
    total, count = weighted.loss_terms(rows)
    assert total.item() == pytest.approx((losses * torch.tensor([0.5, 3.0])[rows["label"]]).sum().item(), rel=1e-6)
    assert count == 8


@pytest.mark.parametrize("counts, weights", [([6, 2], [8 / 12, 8 / 4]), ([6, 0, 2], [8 / 12, 1.0, 8 / 4])])
def test_balanced_counts_the_training_samples(counts, weights):
    """The mean weight of a sample is 1, and all classes have the same share. An absent class changes nothing."""
    balanced = model(class_weights="balanced", num_classes=len(counts))
    trainer(max_steps=1).fit(balanced, Data(counts))
    assert balanced._loss_weights == weights
    assert sum(w * n for w, n in zip(weights, counts, strict=True)) == 8


def test_validation_has_no_weights():
    plain, weighted = (trainer().validate(classifier(w), Data(), verbose=False) for w in (None, [0.1, 9.0]))
    assert plain == weighted and plain[0]["val_loss"] == pytest.approx(0.7, abs=0.3)


def test_every_model_of_one_prediction_has_them():
    slide = encoder(task="classification", num_classes=2, class_weights=[1.0, 4.0], dtype=torch.float32).eval()
    rows = {name: x.float() if x.is_floating_point() else x for name, x in batch(9, 12).items()}
    plain = slide.head.losses(slide.head(slide.embed(rows)), rows["label"])
    assert slide.loss_terms(rows)[0].item() == pytest.approx((plain[0] + 4 * plain[1]).item(), rel=1e-5)
    assert SlideEncoder(task="ordinal", num_classes=3, class_weights="balanced")


REFUSED = {
    "regression": ({"task": "regression", "num_classes": 1, "class_weights": "balanced"}, "the task is 'regression'"),
    "number": ({"class_weights": [1.0, 2.0, 3.0]}, r"'balanced' or a list of 2 numbers, got \[1.0, 2.0, 3.0\]"),
    "word": ({"class_weights": "equal"}, "'balanced' or a list of 2 numbers, got 'equal'"),
    "negative": ({"class_weights": [1.0, -2.0]}, r"class_weights\[1\] must be a number in \[0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    options, says = REFUSED[name]
    with pytest.raises(ValueError, match=says):
        model(**options)


def test_refused_by_the_data():
    with pytest.raises(ValueError, match=r"needs the number of training samples of each class.*class_counts"):
        trainer(max_steps=1).fit(model(class_weights="balanced"), Data())
    with pytest.raises(ValueError, match="correct for rare classes twice"):
        trainer(max_steps=1).fit(model(class_weights="balanced"), Data([6, 2], sampling="balanced"))
    with pytest.raises(ValueError, match=r"without Trainer\.fit give a list"):
        classifier("balanced").loss_terms({"features": torch.randn(1, 12, 3), "label": torch.tensor([0])})
