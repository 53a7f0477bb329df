"""Slide encoders in `predict`: embeddings of a folder by one command, and predictions of a checkpoint as a CSV."""

import csv
import json
import sys

import h5py
import numpy as np
import pytest
import torch

from lightning_dilated import SlideEncoder
from lightning_dilated.data import SlideDataModule, write_synthetic_slides

from ..ext.slides.slides import encoder

pytestmark = pytest.mark.full

SIZES = {"feature_dim": 8, "dim": 16, "depth": 1, "num_heads": 4, "segment_lengths": [16, 64], "dilation_rates": [1, 4]}
MODEL = ["--model", "SlideEncoder", *(x for k, v in SIZES.items() for x in (f"--model.{k}", json.dumps(v)))]
ALL = ["--data.val_fraction", "0", "--data.test_fraction", "1", "--data.batch_size", "2"]
DATA = ["--data", "SlideDataModule", "--data.paths", "slides", *ALL]
QUIET = ["--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.logger", "false"]


@pytest.fixture
def here(tmp_path):
    """A working folder with five slides."""
    write_synthetic_slides(tmp_path / "slides", slides=5, tiles=(5, 20), features=8)
    return tmp_path


def written(result):
    assert result.code == 0, result.err[-2000:]
    (path,) = result.folder.rglob("predictions.csv")
    assert f"predictions: {path.resolve()}" in result.out.replace("\n", "")
    return list(csv.DictReader(path.open()))


def test_embeddings_of_a_folder(cli, here):
    """One command embeds slides with released weights, without labels or checkpoint. One option adds attention maps."""
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
    cli("fit", *MODEL, *task, *DATA[:4], *labels, *QUIET, "--trainer.max_steps", "1").ok()
    (ckpt,) = here.rglob("*.ckpt")
    for label_options in (labels, []):
        rows = written(cli("predict", *DATA, *QUIET, *label_options, "--ckpt_path", ckpt))
        names = ["index", "slide_id", *(["label"] if label_options else []), "prediction", "prediction_class"]
        assert list(rows[0]) == [*names, "probability_0", "probability_1"] and [r["slide_id"] for r in rows] == [
            f"slide_{i:03}" for i in range(5)
        ]
        for row in rows:
            scores = float(row["probability_0"]), float(row["probability_1"])
            assert sum(scores) == pytest.approx(1) and int(row["prediction"]) == (scores[1] > scores[0])
            assert row["prediction_class"] == row["prediction"]  # labels.csv has the classes 0 and 1


def test_fit_without_a_slide_to_train_on(cli, here):
    result = cli("fit", *MODEL, *DATA, *QUIET, "--model.task", "regression")
    assert result.code == 2 and "no train split to fit on: all slides are in the test split" in result.err
    assert "Traceback" not in result.err


def test_fit_on_tile_numbers(cli, here):
    """Files may have tile numbers without a unit, as CLAM's do. The model's tile_size reveals it before any step."""
    for path in (here / "slides").glob("*.h5"):
        with h5py.File(path, "r+") as file:
            coords = file["coords"][()] // 256
            del file["coords"]
            file["coords"] = coords
    result = cli("fit", *MODEL, *DATA[:4], *QUIET, "--data.val_fraction", "0", "--model.task", "regression")
    assert result.code == 2 and "look like tile numbers, not pixels: multiply them" in result.err
    assert "slide_000.h5" in result.err and "Traceback" not in result.err


def test_an_external_cohort_of_one_class_and_a_table_of_intervals(cli, here):
    """An external cohort uses the checkpoint's classes. `folds` averages metrics and intervals written by `test`."""
    task = ["--model.task", "classification", "--model.num_classes", "2", "--model.class_weights", "balanced"]
    words = {i: ("tumor", "normal")[i % 2] for i in range(5)}
    for name, chosen in (("all", words), ("ext", dict.fromkeys(words, "tumor"))):
        lines = ["slide_id,label", *(f"slide_{i:03},{word}" for i, word in chosen.items())]
        (here / f"{name}.csv").write_text("\n".join(lines) + "\n")
    cli("fit", *MODEL, *task, *DATA[:4], "--data.labels_csv", "all.csv", *QUIET, "--trainer.max_steps", "1").ok()
    (ckpt,) = here.rglob("*.ckpt")
    cli("test", *DATA, *QUIET, "--data.labels_csv", "ext.csv", "--ckpt_path", ckpt).ok()
    (path,) = here.rglob("test_metrics.csv")
    rows = {row["metric"]: row for row in csv.DictReader(path.open())}
    assert rows["auroc"]["value"] == "nan" and rows["auroc"]["undefined"] == "1000"
    assert 0 <= float(rows["balanced_accuracy"]["value"]) <= 1 and rows["balanced_accuracy"]["groups"] == "5"


def test_embeddings_of_a_fine_tuned_checkpoint(cli, here):
    task = ["--model.task", "classification", "--model.num_classes", "2"]
    labels = ["--data.labels_csv", "slides/labels.csv"]
    cli("fit", *MODEL, *task, *DATA[:4], *labels, *QUIET, "--trainer.max_steps", "1").ok()
    (ckpt,) = here.rglob("*.ckpt")
    rows = written(cli("predict", *DATA, *QUIET, "--ckpt_path", ckpt, "--model.predict_embeddings", "true"))
    assert list(rows[0])[-17:] == ["probability_1", *(f"e{i}" for i in range(16))]
    model = SlideEncoder.load_from_checkpoint(ckpt, weights_only=True).eval()
    sample = SlideDataModule(str(here / "slides"), val_fraction=0, test_fraction=1).dataset("test")[0]
    with torch.no_grad():
        want = model(sample["features"][None, 1:], sample["coords"][None, 1:])[0].tolist()
    assert [float(rows[0][f"e{i}"]) for i in range(16)] == pytest.approx(want, abs=1e-5)
    result = cli("predict", *DATA, *QUIET, "--ckpt_path", ckpt, "--model.task", "null")
    assert result.code == 2 and "keep its task and set predict_embeddings=True" in result.err


def test_survival_on_the_command_line(cli, here):
    lines = ["slide_id,months,dead", *(f"slide_{i:03},{10 * i + 3.5},{int(i != 2)}" for i in range(5))]
    (here / "os.csv").write_text("\n".join(lines) + "\n")
    survival = ["--data.labels_csv", "os.csv", "--data.labels", "survival", "--data.time_column", "months"]
    survival += ["--data.event_column", "dead"]
    task = ["--model.task", "survival", "--model.num_classes", "2", "--trainer.max_steps", "1"]
    cli("fit", *MODEL, *task, *DATA[:4], *survival, "--data.val_fraction", "0", *QUIET).ok()
    (ckpt,) = here.rglob("*.ckpt")
    rows = written(cli("predict", *DATA, *QUIET, "--ckpt_path", ckpt))
    assert list(rows[0])[:3] == ["index", "slide_id", "risk"] and list(rows[0])[3].startswith("survival_at_")


def test_a_missing_h5py_is_one_line(cli, here, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    result = cli("predict", *MODEL, *DATA, *QUIET)
    assert result.code == 2 and 'needs h5py: pip install "lightning-dilated[slides]"' in result.err.splitlines()[-1]
    assert "Traceback" not in result.err


def test_last_ckpt_of_the_recipe_is_the_last_validation(cli, here):
    """With a learning rate of 0 the first validation remains the best, so last.ckpt must be a different file."""
    write_synthetic_slides(here / "slides", slides=20, tiles=(5, 20), features=64)
    steps = ("--trainer.max_steps", 4, "--trainer.val_check_interval", 2, "--model.optimizer.lr", 0.0)
    result = cli("fit", "--config", "slide_finetune.yaml", "--trainer.accelerator", "cpu", *steps).ok()
    saved = {x.name: torch.load(x, weights_only=True)["global_step"] for x in result.folder.rglob("*.ckpt")}
    assert saved.pop("last.ckpt") == 4 and list(saved.values()) == [2]
