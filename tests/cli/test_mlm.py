"""LongNetMLM from the command line: `fit` by its name, and evaluation of its checkpoint with and without a recipe."""

import csv

import pytest
import torch
import yaml

import lightning_dilated as ld

from ..models import trainer
from .conftest import DATA, MODEL, run_in, write_text

pytestmark = pytest.mark.full

PATTERN = {"segment_lengths": [8, 64], "dilation_rates": [1, 2]}
FRACTIONS = ["--data.val_fraction", "0.02", "--data.test_fraction", "0.02"]
RUN = [
    "--trainer.max_steps",
    "2",
    "--trainer.val_check_interval",
    "2",
    "--trainer.logger.class_path",
    "CSVLogger",
    "--trainer.logger.save_dir",
    "runs",
]


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """(run folder, checkpoint, result) of a run without a recipe."""
    folder = tmp_path_factory.mktemp("mlm")
    write_text(folder)
    torch.manual_seed(0)
    pattern = ["--model.pattern", str(PATTERN), "--model.mask_span", "3"]
    result = run_in(folder, "fit", "--model", "LongNetMLM", *pattern, *MODEL, *DATA, *FRACTIONS, *RUN).ok()
    (ckpt,) = folder.rglob("*.ckpt")
    return folder, ckpt, result


def test_fit(fitted):
    folder, ckpt, _ = fitted
    with next(folder.rglob("metrics.csv")).open() as file:
        logged = set(next(csv.reader(file)))
    assert {"val_loss", "val_accuracy", "val_bits_per_token"} <= logged and "val_bits_per_byte" not in logged
    init = yaml.safe_load(next(folder.rglob("config.yaml")).read_text())["model"]["init_args"]
    assert init["mask_span"] == 3 and init["dim"] == 16 and "bytes_per_token" not in init
    assert ld.LongNetMLM.load_from_checkpoint(ckpt, weights_only=True).masking.span == 3


@pytest.mark.parametrize("made", ["command line", "python"])
def test_checkpoint_alone(cli, fitted, made, tmp_path):
    """A checkpoint works without a recipe, even if Python wrote it, so that only the file names the class."""
    ckpt = fitted[1]
    model = ld.LongNetMLM.load_from_checkpoint(ckpt, weights_only=True)
    data = ld.data.ByteDataModule(str(tmp_path / "text.txt"), 64, 2, 0.02, 0.02, 2)
    run = trainer(max_steps=0)
    if made == "python":
        run.fit(model, data)
        ckpt = tmp_path / "made.ckpt"
        run.save_checkpoint(ckpt)
    result = cli("validate", *DATA, *FRACTIONS, "--ckpt_path", ckpt).ok()
    (want,) = run.validate(model, data, verbose=False)
    for name in ("val_loss", "val_accuracy", "val_bits_per_token"):
        assert result.metric(name) == pytest.approx(want[name], rel=1e-5)


def test_predict(cli, fitted):
    result = cli("predict", *DATA, *FRACTIONS, "--ckpt_path", fitted[1]).ok()
    header, *rows = csv.reader(next(result.folder.rglob("predictions.csv")).open())
    assert header == ["index", "masked", "bits_per_token", "accuracy", "file", "offset"]
    assert [row[0] for row in rows] == ["0", "1"]
    assert all(0 < int(row[1]) < 64 and float(row[2]) > 0 for row in rows)


def test_what_it_is_not(cli, fitted):
    errors = cli("generate", "--ckpt_path", fitted[1], "--prompt", "a").err
    assert "holds a LongNetMLM with vocab_size 256" in errors
    errors = cli("validate", "--config", "quickstart.yaml", *DATA, "--ckpt_path", fitted[1]).err
    assert "holds a" in errors and "LongNetMLM, but the recipe or --model names lightning_dilated.LongNetLM" in errors
