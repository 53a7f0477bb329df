"""Class names of a trained head: data that numbers classes differently is refused at the start of every run."""

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_dilated import LongNetClassifier

from ...models import PATTERN, trainer

NAMES = ["ADI", "STR", "TUM"]


class Data(pl.LightningDataModule):
    """Six sequences with class names."""

    def __init__(self, classes):
        super().__init__()
        self.classes = classes

    def train_dataloader(self):
        rng = torch.Generator().manual_seed(0)
        rows = [{"features": torch.randn(12, 3, generator=rng), "label": torch.tensor(i % 3)} for i in range(6)]
        return DataLoader(rows, batch_size=3)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def model(**options):
    return LongNetClassifier(PATTERN, feature_dim=3, dim=16, depth=1, num_heads=4, **{"num_classes": 3, **options})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path, run = tmp_path_factory.mktemp("classes") / "x.ckpt", trainer(max_steps=1)
    run.fit(model(), Data(NAMES))
    run.save_checkpoint(path)
    return str(path)


WAYS = {
    "resumed": lambda path, data: trainer(max_steps=2).fit(model(), data, ckpt_path=path, weights_only=True),
    "tested by path": lambda path, data: trainer().test(
        model(), data, ckpt_path=path, verbose=False, weights_only=True
    ),
    "tested, loaded": lambda path, data: trainer().test(
        LongNetClassifier.load_from_checkpoint(path, weights_only=True), data, verbose=False
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("classes", [["ADI", "TUM", "STR"], ["ADI", "STR", "LYM"]], ids=["order", "names"])
def test_other_classes_are_refused(checkpoint, way, classes):
    with pytest.raises(ValueError, match=r"trained on the classes \['ADI', 'STR', 'TUM'\].*Set data.classes to"):
        WAYS[way](checkpoint, Data(classes))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("classes", [NAMES, None], ids=["same", "unnamed"])
def test_the_same_or_unnamed_classes_are_taken(checkpoint, way, classes):
    WAYS[way](checkpoint, Data(classes))


def test_a_refused_resume_leaves_the_classes(checkpoint):
    model = LongNetClassifier.load_from_checkpoint(checkpoint, weights_only=True)
    with pytest.raises(ValueError, match="trained on the classes"):
        trainer(max_steps=2).fit(model, Data(NAMES[::-1]), ckpt_path=checkpoint, weights_only=True)
    assert model.classes == NAMES


def test_saved_for_the_hub_and_predicted_by_name(checkpoint, tmp_path):
    pytest.importorskip("safetensors")
    model = LongNetClassifier.load_from_checkpoint(checkpoint, weights_only=True)
    twin = LongNetClassifier.from_pretrained(model.save_pretrained(tmp_path))
    assert twin.classes == NAMES
    with pytest.raises(ValueError, match="trained on the classes"):
        trainer().test(twin, Data(NAMES[::-1]), verbose=False)
    for predicted in trainer().predict(twin, Data(NAMES)):
        assert predicted["prediction_class"] == [NAMES[i] for i in predicted["prediction"]]


def test_rounded_labels_are_not_written(checkpoint):
    net = model(task="regression", num_classes=1)
    batch = {"features": torch.randn(2, 12, 3), "label": torch.tensor([1000.7, 1001.7])}
    assert "label" in net.predict_step(batch, 0)
    assert "label" not in net.predict_step({**batch, "label": batch["label"].bfloat16()}, 0)


def test_their_number_and_a_new_task(checkpoint):
    with pytest.raises(ValueError, match=r"num_classes=4, but the data has 3 classes \(ADI, STR, TUM\)"):
        trainer(max_steps=1).fit(model(num_classes=4), Data(NAMES))
    loaded = LongNetClassifier.load_from_checkpoint(checkpoint, weights_only=True)
    assert loaded.classes == NAMES
    trainer(max_steps=1).fit(loaded, Data(NAMES[::-1]))  # only initial weights, not a resumed run
    assert loaded.classes == NAMES[::-1]
    assert model(task="regression", num_classes=1).classes is None
