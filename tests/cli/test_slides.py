"""predict with a slide encoder: embeddings of a folder in one command, and predictions of a checkpoint, as a CSV."""

import csv
import json

import h5py
import numpy as np
import pytest
import torch

from lightning_dilated import SlideEncoder
from lightning_dilated.data import SlideDataModule, write_synthetic_slides

from ..models.slides import encoder

pytestmark = pytest.mark.full

SIZES = {"feature_dim": 8, "dim": 16, "depth": 1, "num_heads": 4, "segment_lengths": [16, 64], "dilation_rates": [1, 4]}
MODEL = ["--model", "SlideEncoder", *(x for k, v in SIZES.items() for x in (f"--model.{k}", json.dumps(v)))]
ALL = ["--data.val_fraction", "0", "--data.test_fraction", "1", "--data.batch_size", "2"]
DATA = ["--data", "SlideDataModule", "--data.paths", "slides", *ALL]
QUIET = ["--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.logger", "false"]


@pytest.fixture
def here(tmp_path):
    """Five slides in the folder of the command line."""
    write_synthetic_slides(tmp_path / "slides", slides=5, tiles=(5, 20), features=8)
    return tmp_path


def written(result):
    assert result.code == 0, result.err[-2000:]
    (path,) = result.folder.rglob("predictions.csv")
    assert f"predictions: {path.resolve()}" in result.out.replace("\n", "")
    return list(csv.DictReader(path.open()))


def test_embeddings_of_a_folder(cli, here):
    """From released weights, without labels, a checkpoint or Python; and maps of attention with one option more."""
    torch.save({"model": encoder(**SIZES, dtype=torch.float32).released_state_dict()}, here / "slide_encoder.pth")
    maps = ["--trainer.callbacks", "lightning_dilated.callbacks.AttentionWriter"]
    result = cli("predict", *MODEL, *DATA, *QUIET, "--model.pretrained", "slide_encoder.pth", *maps)
    rows = written(result)
    model = SlideEncoder(**SIZES, pretrained=str(here / "slide_encoder.pth"))
    model.configure_model()
    data = SlideDataModule(str(here / "slides"), val_fraction=0, test_fraction=1).dataset("test")
    assert len(rows) == len(data) == 5
    for row, sample in zip(rows, data, strict=False):
        assert row["slide_id"] == sample["slide_id"]
        tiles = sample["features"][None, 1:], sample["coords"][None, 1:]
        want = model.eval()(*tiles)[0].tolist()
        assert [float(row[f"e{i}"]) for i in range(16)] == pytest.approx(want, abs=1e-5)
        (path,) = here.rglob(f"attention/{row['slide_id']}.npz")
        with np.load(path) as file:
            np.testing.assert_allclose(file["attention"], model.attention_map(*tiles)[0], rtol=1e-4, atol=1e-7)


def test_predictions_of_a_checkpoint(cli, here):
    task = ["--model.task", "classification", "--model.num_classes", "2"]
    labels = ["--data.labels_csv", "slides/labels.csv"]
    fit = cli("fit", *MODEL, *task, *DATA[:4], *labels, *QUIET, "--trainer.max_steps", "1")
    assert fit.code == 0, fit.err[-2000:]
    (ckpt,) = here.rglob("*.ckpt")
    for given in (labels, []):
        rows = written(cli("predict", *DATA, *QUIET, *given, "--ckpt_path", ckpt))
        names = ["index", "slide_id", *(["label"] if given else []), "prediction", "prediction_class"]
        assert list(rows[0]) == [*names, "probability_0", "probability_1"] and [r["slide_id"] for r in rows] == [
            f"slide_{i:03}" for i in range(5)
        ]
        for row in rows:
            scores = float(row["probability_0"]), float(row["probability_1"])
            assert sum(scores) == pytest.approx(1) and int(row["prediction"]) == (scores[1] > scores[0])
            assert row["prediction_class"] == row["prediction"]  # the words of the csv are 0 and 1


def test_fit_without_a_slide_to_train_on(cli, here):
    result = cli("fit", *MODEL, *DATA, *QUIET, "--model.task", "regression")
    assert result.code == 2 and "no train split to fit on: all slides are in the test split" in result.err
    assert "Traceback" not in result.err


def test_fit_on_tile_numbers(cli, here):
    """Files that say nothing, as CLAM's: the model's tile_size tells what is wrong, before a step is made."""
    for path in (here / "slides").glob("*.h5"):
        with h5py.File(path, "r+") as file:
            coords = file["coords"][()] // 256
            del file["coords"]
            file["coords"] = coords
    result = cli("fit", *MODEL, *DATA[:4], *QUIET, "--data.val_fraction", "0", "--model.task", "regression")
    assert result.code == 2 and "look like tile numbers, not pixels: multiply them" in result.err
    assert "slide_000.h5" in result.err and "Traceback" not in result.err
