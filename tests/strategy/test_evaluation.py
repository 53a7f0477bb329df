"""Test, predict, and callbacks that act on logged values give the same results on many ranks as on one."""

import csv
from pathlib import Path
from unittest import mock

import lightning.pytorch as pl
import pytest

from lightning_dilated.callbacks import PredictionWriter

from .runs import Data, Run, launched, make

pytestmark = pytest.mark.full

CHUNKS = {"layout": "chunked"}
WAYS = {"2": (2, {}), "4": (4, {}), "4, data 2": (4, {"sequence_size": 2}), "2, chunks": (2, CHUNKS)}
RUN = Run(seq_len=37, masked=0.3, model={"depth": 1})


class Everything(Data):
    """Data that also uses the validation loader for test and predict."""

    def test_dataloader(self):
        return self._loader(False)

    predict_dataloader = test_dataloader


def evaluated(rank, group, settings, samples, folder):
    """Test an untrained model, and write predictions.csv. Return the test loss."""
    run = RUN.but(strategy=settings, batch_size=4, memory={"stream": 11} if settings == CHUNKS else None)
    writer = PredictionWriter(f"{folder}/predictions.csv")
    built, model, _, _ = make(run, launched(rank), callbacks=[writer])
    with mock.patch("tests.strategy.runs.Tokens.__len__", lambda self: samples):
        data = Everything(run)
        loss = built.test(model, data, verbose=False)[0]["test_loss"]
        built.predict(model, data, return_predictions=False)
    return loss


def predictions(folder):
    """Return {index: (tokens, bits per byte)} from all files."""
    rows = [row for path in Path(folder).glob("*.csv") for row in csv.DictReader(path.open())]
    assert len({row["index"] for row in rows}) == len(rows)
    return {int(row["index"]): (int(row["tokens"]), float(row["bits_per_byte"])) for row in rows}


@pytest.mark.parametrize("samples", [12, 5])
@pytest.mark.parametrize("way", WAYS)
def test_and_predict(pools, tmp_path, way, samples):
    """No sample is repeated to give all data ranks the same number, and only one rank writes a sequence's results."""
    folders = [tmp_path / "one", tmp_path / "many"]
    want = pools(1).run(1, evaluated, {}, samples, str(folders[0]))
    ranks, settings = WAYS[way]
    results = pools(ranks).run(ranks, evaluated, settings, samples, str(folders[1]))
    assert results == pytest.approx(want * ranks, rel=1e-9)
    one, many = map(predictions, folders)
    assert one.keys() == many.keys() == set(range(samples))
    for index, (tokens, bits) in one.items():
        assert many[index] == (tokens, pytest.approx(bits, rel=1e-9))


def decided(rank, group, settings, folder):
    """Return (epochs of a fit, name and score of the best checkpoint, epoch in which EarlyStopping stopped the fit)."""
    stop = pl.callbacks.EarlyStopping("val_loss", patience=1, min_delta=0.002)
    best = pl.callbacks.ModelCheckpoint(f"{folder}", monitor="val_loss", save_top_k=1)
    run = RUN.but(strategy=settings, batch_size=4, steps=60)
    built, model, data, _ = make(run, launched(rank), callbacks=[stop, best], enable_checkpointing=True)
    built.fit(model, data)
    return built.current_epoch, Path(best.best_model_path).name, float(best.best_model_score), stop.stopped_epoch


@pytest.mark.parametrize("way", ["2", pytest.param("4, data 2", marks=pytest.mark.slow)])
def test_decisions(pools, tmp_path, way):
    ((epochs, name, score, stopped),) = pools(1).run(1, decided, {}, str(tmp_path / "one"))
    ranks, settings = WAYS[way]
    for outcome in pools(ranks).run(ranks, decided, settings, str(tmp_path / "many")):
        assert outcome == (epochs, name, pytest.approx(score, rel=1e-9), stopped)
    assert (tmp_path / "many" / name).is_file()
