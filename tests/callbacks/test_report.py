"""RunReport: two pictures and a table per run, with and without a logger, a baseline, a pattern and bits per byte."""

from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from matplotlib.image import imread
from torch import nn

from lightning_dilated import DilatedModule, DilatedPattern, LongNetLM
from lightning_dilated.callbacks import RunReport

from ..models import PATTERN, batch, loader, text, trainer

pytestmark = pytest.mark.full


class Plain(DilatedModule):
    """A module for bytes, without a pattern and without bits per byte."""

    def build(self):
        self.layer = nn.Embedding(256, 256)

    def loss_terms(self, batch):
        logits, labels = self.layer(batch["tokens"]), batch["labels"]
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()


class Patterned(Plain):
    """A module with a pattern, but without `num_heads` and `depth`."""

    def __init__(self):
        super().__init__()
        self.pattern = DilatedPattern.dense()


def lm(**options):
    return LongNetLM(PATTERN, **{"dim": 16, "depth": 1, "num_heads": 4, **options})


def fit(report, model=None, data=None, folder=None, logger=False, **options):
    run = trainer(
        max_steps=4, val_check_interval=2, callbacks=[report], logger=logger, default_root_dir=folder, **options
    )
    fitted = {"datamodule": data} if isinstance(data, pl.LightningDataModule) else data
    run.fit(model or lm(), **fitted)
    return run


def pictured(path):
    return imread(path)[..., :3].std() > 0.05


def words(capsys):
    return " ".join(capsys.readouterr().out.split())


def test_a_run_explains_itself(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")  # the folder's name is on one line
    data = text(tmp_path)
    run = fit(RunReport(), data=data, logger=CSVLogger(tmp_path, "name"))
    folder, out = tmp_path / "name" / "version_0", words(capsys)
    assert pictured(folder / "loss.png") and pictured(folder / "pattern.png")
    assert "32 tokens, 4 heads, 1 layers, causal" in out and f"run folder: {folder}" in out
    assert "validation after step 2" in out and "validation after step 4" in out and "bits per byte" in out
    assert f"LongNetLM │ {run.callback_metrics['val_bits_per_byte']:.3f}" in out
    assert f"bigram of the training bytes │ {data.bigram_bits_per_byte('val'):.3f}" in out


def test_shifted_layers_are_explained_as_they_are(tmp_path, capsys):
    """Shifted layers are explained with their shifts: the unshifted pattern has a wall at 16, the model has none."""
    fit(RunReport(), lm(depth=2, shift_layers="odd"), text(tmp_path), tmp_path / "odd")
    out = words(capsys)
    assert "layers 1: DilatedPattern([Branch(4, 1, shift=2), Branch(16, 2, shift=8)])" in out and "wall(s)" not in out
    assert all(pictured(tmp_path / "odd" / f"{name}.png") for name in ("pattern", "pattern_layer_1"))
    fit(RunReport(), lm(depth=2), text(tmp_path), tmp_path / "none")
    assert "1 wall(s)" in words(capsys) and not [*(tmp_path / "none").glob("pattern_layer_*.png")]


def test_without_a_datamodule(tmp_path, capsys):
    loaders = {"train_dataloaders": loader(*[batch(2, 20)] * 4), "val_dataloaders": loader(batch(2, 20))}
    fit(RunReport(), data=loaders, folder=tmp_path)
    out = words(capsys)
    assert pictured(tmp_path / "loss.png") and not (tmp_path / "pattern.png").exists()  # no sequence length is known
    assert "LongNetLM │" in out and "bigram" not in out


@pytest.mark.parametrize("make", [Plain, Patterned], ids=["no pattern", "a pattern, no heads"])
def test_other_models(tmp_path, make):
    fit(RunReport(), make(), text(tmp_path), tmp_path)
    assert pictured(tmp_path / "loss.png")


def test_curve_holds_every_step(tmp_path):
    report = RunReport()
    run = fit(report, data=text(tmp_path), folder=tmp_path)
    assert [step for step, _ in report.train] == [1, 2, 3, 4] and [step for step, _ in report.val] == [2, 4]
    assert report.train[-1][1] == run.callback_metrics["train_bits_per_byte"]
    assert all(not x.requires_grad for _, x in report.train)
    fit(report, data=text(tmp_path), folder=tmp_path)
    assert len(report.train) == 4  # a second run starts a new curve


@pytest.mark.parametrize("pattern, loss", [(True, False), (False, True), (False, False)])
def test_pictures_can_be_left_out(tmp_path, pattern, loss):
    fit(RunReport(pattern_picture=pattern, loss_picture=loss), data=text(tmp_path), folder=tmp_path)
    assert ((tmp_path / "pattern.png").exists(), (tmp_path / "loss.png").exists()) == (pattern, loss)


def test_without_validation_data(tmp_path, capsys):
    data = text(tmp_path)
    data.val_fraction = 0
    trainer(max_steps=2, callbacks=[RunReport()], default_root_dir=tmp_path).fit(lm(), datamodule=data)
    assert pictured(tmp_path / "loss.png") and "bigram" not in words(capsys)


def test_validate(tmp_path, capsys):
    report = RunReport()
    trainer(callbacks=[report], default_root_dir=tmp_path).validate(lm(), datamodule=text(tmp_path), verbose=False)
    out = words(capsys)
    assert "validation" in out and "bigram of the training bytes" in out and report.val == []


def test_sanity_check_says_nothing(tmp_path, capsys):
    fit(RunReport(), data=text(tmp_path), folder=tmp_path, num_sanity_val_steps=1, limit_val_batches=1)
    assert words(capsys).count("validation after step") == 2


def test_other_ranks_say_and_write_nothing(tmp_path, capsys, monkeypatch):
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    monkeypatch.setattr(rank_zero_only, "rank", 1)
    report = RunReport()
    run = SimpleNamespace(
        log_dir=str(tmp_path / "x"), default_root_dir=str(tmp_path), callback_metrics={"train_loss": torch.ones(())}
    )
    report.on_fit_start(run, lm()), report.on_train_batch_end(run, lm()), report.on_fit_end(run, lm())
    assert report.train == [] and not (tmp_path / "x").exists() and capsys.readouterr().out == ""
