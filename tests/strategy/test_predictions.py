"""Predicting slides on many ranks: the rows of one rank, each once, whatever ranks share a slide or have their own."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_dilated import RingDilatedStrategy
from lightning_dilated.callbacks import AttentionWriter, PredictionWriter
from lightning_dilated.data import SlideDataModule, write_synthetic_slides

from ..ext.slides.slides import encoder
from .runs import launched, trainer

pytestmark = pytest.mark.full

#: {way: (ranks, settings of the strategy, files that its data ranks write)}
WAYS = {
    "2": (2, {}, 1),
    "4, data 2": (4, {"sequence_size": 2}, 2),
    "4, strided": (4, {"layout": "strided"}, 1),
    "2, data 2": (2, {"sequence_size": 1}, 2),
}
TASKS = {"embedding": {}, "classes": {"task": "classification", "num_classes": 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Five slides, so that two data ranks have unlike numbers of them."""
    path = tmp_path_factory.mktemp("slides")
    write_synthetic_slides(path, slides=5, tiles=(6, 40), features=12)
    return str(path)


def predicted(rank, group, settings, folder, out, options, writers):
    """The names that this rank's predictions carry; its rows are in `out`."""
    callbacks = [PredictionWriter(f"{out}/p.csv"), *([AttentionWriter(path=f"{out}/maps")] if writers else [])]
    data = SlideDataModule(folder, f"{folder}/labels.csv", val_fraction=0, test_fraction=1, batch_size=2)
    run = trainer(RingDilatedStrategy(**settings), launched(rank), callbacks=callbacks)
    try:
        found = run.predict(encoder(grid=100, **options), data)
    except ValueError as error:
        return str(error)
    return [name for batch in found for name in batch["slide_id"]]


def table(folder):
    """{slide: the other columns' numbers} over all files, and how many there are."""
    files = sorted(Path(folder).glob("p*.csv"))
    lines = [row for path in files for row in csv.DictReader(path.open())]
    assert len({row["slide_id"] for row in lines}) == len(lines)
    return {row.pop("slide_id"): {k: float(v) for k, v in row.items()} for row in lines}, len(files)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("task", TASKS)
def test_rows_of_one_rank(pools, tmp_path, folder, task, way):
    ranks, settings, files = WAYS[way]
    (names,) = pools(1).run(1, predicted, {}, folder, str(tmp_path / "one"), TASKS[task], False)
    found = pools(ranks).run(ranks, predicted, settings, folder, str(tmp_path / "many"), TASKS[task], False)
    shared = ranks // files
    assert sorted(name for part in found for name in part) == sorted(names * shared) and len(names) == 5
    (one, _), (many, written) = table(tmp_path / "one"), table(tmp_path / "many")
    assert written == files and one.keys() == many.keys() == set(names)
    for name, row in one.items():
        assert many[name] == pytest.approx(row, rel=1e-9, abs=1e-12)


def test_attention_of_data_ranks(pools, tmp_path, folder):
    """Ranks with slides of their own write them all; ranks that share slides are told so, each of them, beforehand."""
    pools(1).run(1, predicted, {}, folder, str(tmp_path / "one"), {}, True)
    pools(2).run(2, predicted, {"sequence_size": 1}, folder, str(tmp_path / "many"), {}, True)
    written = [sorted(x.name for x in (tmp_path / name / "maps").iterdir()) for name in ("one", "many")]
    files = sorted((tmp_path / "one" / "maps").glob("*.npz"))
    assert written[0] == written[1] == sorted(f"{x.stem}.{kind}" for x in files for kind in ("npz", "png"))
    assert len(files) == 5
    for path in files:
        with np.load(path) as one, np.load(tmp_path / "many" / "maps" / path.name) as other:
            torch.testing.assert_close(torch.tensor(other["attention"]), torch.tensor(one["attention"]))
    told = pools(2).run(2, predicted, {}, folder, str(tmp_path / "shared"), {}, True)
    assert all(isinstance(text, str) and "2 ranks share each slide" in text for text in told)
    assert not (tmp_path / "shared").exists()
