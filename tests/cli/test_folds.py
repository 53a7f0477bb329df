"""`folds` computes mean and deviation of results that `test` wrote, and raises clear errors."""

import csv
import os
import statistics

import pytest

from .conftest import run_in


def write(path, **metrics):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["metric,value,low,high", *(f"{k},{v},0,1" for k, v in metrics.items())]) + "\n")
    return path


def test_a_summary(tmp_path):
    values = [0.7, 0.8, 0.95]
    for i, value in enumerate(values):
        write(tmp_path / f"runs/fold_{i}/version_1/test_metrics.csv", auroc=value, balanced_accuracy=0.5)
    older = write(tmp_path / "runs/fold_0/version_0/test_metrics.csv", auroc=0.1, balanced_accuracy=0.1)
    os.utime(older, (1, 1))
    result = run_in(tmp_path, "folds", "runs/fold_0", "runs/fold_1", "runs/fold_2", "--out", "out/folds.csv").ok()
    rows = {row["metric"]: row for row in csv.DictReader((tmp_path / "out/folds.csv").open())}
    assert float(rows["auroc"]["mean"]) == pytest.approx(statistics.mean(values))
    assert float(rows["auroc"]["std"]) == pytest.approx(statistics.stdev(values))
    assert (rows["auroc"]["min"], rows["auroc"]["max"], rows["auroc"]["folds"]) == ("0.7", "0.95", "3")
    assert rows["balanced_accuracy"]["std"] == "0.0"
    assert "0.8167" in result.out and "0.1258" in result.out and "runs/fold_0/version_1" in result.out


def test_an_undefined_fold_is_not_left_out(tmp_path):
    for i, value in enumerate(("nan", 0.8)):
        write(tmp_path / f"{i}.csv", auroc=value, mse=i)
    result = run_in(tmp_path, "folds", "0.csv", "1.csv", "--out", "o.csv")
    rows = {row["metric"]: row for row in csv.DictReader((tmp_path / "o.csv").open())}
    assert result.code == 0 and rows["auroc"]["mean"] == "nan" and rows["mse"]["mean"] == "0.5"


REFUSED = {
    "none": (["empty"], "empty: no test_metrics.csv there"),
    "one": (["a.csv"], "two folds or more, got a.csv"),
    "twice": (["a.csv", "a.csv"], "a.csv is given twice"),
    "another task": (["a.csv", "b.csv"], "a.csv has the metrics auroc, but b.csv has mse"),
    "another file": (["a.csv", "c.csv"], "c.csv has no columns metric and value"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path, name):
    arguments, says = REFUSED[name]
    (tmp_path / "empty").mkdir()
    write(tmp_path / "a.csv", auroc=0.5)
    write(tmp_path / "b.csv", mse=0.5)
    (tmp_path / "c.csv").write_text("slide_id,label\ns,1\n")
    result = run_in(tmp_path, "folds", *arguments)
    assert result.code == 2 and says in result.err and "Traceback" not in result.err
