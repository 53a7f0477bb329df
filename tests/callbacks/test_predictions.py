"""PredictionWriter: one CSV row a sequence, batch by batch, and a clear word to modules that return something else."""

import csv
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_dilated import LongNetLM
from lightning_dilated.callbacks import PredictionWriter

from ..models import PATTERN, SIZES, batch, loader, text, tiny, trainer


def rows(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def predict(writer, data, model=None, **options):
    data = loader(*data) if isinstance(data, list) else data
    return trainer(callbacks=[writer], **options).predict(model or tiny(dtype=torch.float32), data)


def test_rows_are_the_predictions(tmp_path, capsys):
    data = [{**batch(n, 20), "index": torch.arange(n) + 10 * n} for n in (3, 1)]
    got = predict(PredictionWriter(str(tmp_path / "a" / "b.csv")), data)
    header, *lines = rows(tmp_path / "a" / "b.csv")
    assert header == ["index", "tokens", "bits_per_byte"] and [line[0] for line in lines] == ["30", "31", "32", "10"]
    assert [float(line[2]) for line in lines] == [x for part in got for x in part["bits_per_byte"].tolist()]
    assert f"predictions: {tmp_path / 'a' / 'b.csv'}" in capsys.readouterr().out


@pytest.mark.parametrize("logged", [True, False], ids=["logger", "no logger"])
def test_default_place(tmp_path, logged):
    options = {"logger": CSVLogger(tmp_path, "name")} if logged else {"default_root_dir": tmp_path}
    predict(PredictionWriter(), [batch(2, 20), batch(2, 20)], **options)
    path = tmp_path / "name" / "version_0" / "predictions.csv" if logged else tmp_path / "predictions.csv"
    assert len(rows(path)) == 5


def test_second_run_starts_anew(tmp_path):
    writer = PredictionWriter(str(tmp_path / "p.csv"))
    for n in (3, 1):
        predict(writer, [batch(n, 20)])
        assert len(rows(tmp_path / "p.csv")) == n + 1


def test_test_split_of_a_datamodule(tmp_path):
    model = LongNetLM(PATTERN, dim=16, depth=1, num_heads=4)
    predict(PredictionWriter(str(tmp_path / "p.csv")), text(tmp_path), model)
    assert [line[:2] for line in rows(tmp_path / "p.csv")[1:]] == [[str(i), "32"] for i in range(3)]


def test_each_rank_has_its_own_file(tmp_path):
    where = {"num_replicas": 4, "rank": 2}  # of those that have samples of their own
    run = SimpleNamespace(distributed_sampler_kwargs=where, log_dir=None, default_root_dir=str(tmp_path))
    for path, want in ((None, tmp_path / "predictions.2.csv"), ("x/y.csv", Path("x/y.2.csv"))):
        writer = PredictionWriter(path)
        writer.on_predict_start(run, None)
        assert writer._target == want


def test_nothing_predicted(tmp_path, capsys):
    predict(PredictionWriter(str(tmp_path / "p.csv")), [batch(2, 20)], limit_predict_batches=0)
    assert not (tmp_path / "p.csv").exists() and "predictions:" not in capsys.readouterr().out


WRONG = {
    "a tensor": torch.ones(2),
    "a list": [torch.ones(2)],
    "a mapping of floats": {"score": 1.0},
    "scalars": {"score": torch.ones(())},
}


@pytest.mark.parametrize("name", WRONG)
def test_other_predictions_are_refused(tmp_path, name):
    class Odd(LongNetLM):
        def predict_step(self, batch, batch_idx):
            return WRONG[name]

    with pytest.raises(TypeError, match=r"Odd.predict_step must return a mapping of names to tensors \(B,\)"):
        predict(PredictionWriter(str(tmp_path / "p.csv")), [batch(2, 20)], Odd(PATTERN, **SIZES))
    assert not (tmp_path / "p.csv").exists()
