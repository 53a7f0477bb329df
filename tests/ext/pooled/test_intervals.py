"""BootstrapIntervals: agreement with theory, whole groups, equal results on any number of ranks, file and table."""

import csv

import numpy as np
import pytest
import torch

from lightning_dilated import LongNetClassifier, LongNetLM, SlideEncoder
from lightning_dilated.callbacks import BootstrapIntervals
from lightning_dilated.data import SlideDataModule, write_synthetic_slides
from lightning_dilated.ext.pooled.bootstrap import COLUMNS, bootstrap, group_numbers
from lightning_dilated.ext.pooled.heads import ClassificationHead

from ...models import PATTERN, text, trainer

SIZES = {"feature_dim": 4, "dim": 16, "depth": 1, "num_heads": 4, "segment_lengths": [16], "dilation_rates": [1]}


def mean(scores, labels):
    return {"mean": scores.mean()}


def test_the_interval_of_a_mean_is_students():
    values = torch.from_numpy(np.random.default_rng(0).standard_normal((400, 1)))
    interval = bootstrap(mean, values, values, np.arange(400), 2000, 0.95, 0)["mean"]
    error = 1.96 * float(values.std()) / 20
    assert interval["value"] == pytest.approx(float(values.mean()))
    assert interval["low"] == pytest.approx(interval["value"] - error, abs=0.1 * error)
    assert interval["high"] == pytest.approx(interval["value"] + error, abs=0.1 * error)
    assert (interval["samples"], interval["groups"], interval["undefined"]) == (400, 400, 0)
    narrow = bootstrap(mean, values, values, np.arange(400), 2000, 0.5, 0)["mean"]
    assert narrow["high"] - narrow["low"] == pytest.approx(2 * 0.674 / 1.96 * error, rel=0.1)


def test_groups_are_drawn_whole():
    """Ten equal samples of one patient have no more information than one, so whole patients are drawn."""
    values = torch.from_numpy(np.random.default_rng(0).standard_normal((40, 1))).repeat_interleave(10, 0)
    apart, whole = (
        bootstrap(mean, values, values, x, 500, 0.95, 0)["mean"] for x in (np.arange(400), np.arange(400) // 10)
    )
    assert (whole["high"] - whole["low"]) / (apart["high"] - apart["low"]) == pytest.approx(10**0.5, rel=0.15)
    assert whole["groups"] == 40


def test_the_seed_alone_decides():
    values = torch.randn(30, 1)
    runs = [bootstrap(mean, values, values, np.arange(30), 50, 0.95, seed)["mean"] for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]


def test_resamples_without_a_value_are_counted():
    scores, labels = torch.tensor([[0.2, 0.8], [0.7, 0.3], [0.4, 0.6]]), torch.tensor([1, 0, 0])
    drawn = bootstrap(ClassificationHead(3, 2).metrics, scores, labels, np.arange(3), 300, 0.95, 0)
    # share of draws with one class only: (2/3)^3 + (1/3)^3
    assert drawn["auroc"]["undefined"] / 300 == pytest.approx(1 / 3, abs=0.08)
    assert drawn["auroc"]["value"] == drawn["auroc"]["high"] == 1 and drawn["balanced_accuracy"]["undefined"] == 0


def test_groups_of_the_data():
    class Data:
        def groups(self, split):
            return {"test": ["b", "a", "b", "c"]}[split]

    assert group_numbers(np.array([0, 1, 2, 3]), Data()).tolist() == [1, 0, 1, 2]
    assert group_numbers(np.array([2, 3]), Data()).tolist() == [0, 1]
    for index, data in ((np.array([-1, -1]), Data()), (np.array([0, 1]), None), (np.array([0, 1]), object())):
        assert group_numbers(index, data).tolist() == [0, 1]


# -- a test run --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("intervals")
    write_synthetic_slides(path, slides=12, tiles=(4, 9), features=4)
    return str(path)


def data(folder, **options):
    defaults = {"group_column": "patient", "val_fraction": 0, "test_fraction": 1, "batch_size": 5}
    return SlideDataModule(folder, f"{folder}/labels.csv", **{**defaults, **options})


def model(**options):
    torch.manual_seed(0)
    return SlideEncoder(**SIZES, **{"task": "classification", "num_classes": 2, **options}).eval()


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def run(folder, path, made=None, data_options=None, **options):
    writer = BootstrapIntervals(resamples=50, path=str(path))
    metrics = trainer(callbacks=[writer], **options).test(
        made or model(), data(folder, **(data_options or {})), verbose=False
    )
    return metrics[0], writer


def test_what_is_written_and_printed(folder, tmp_path, capsys):
    metrics, writer = run(folder, tmp_path / "a" / "m.csv")
    table = rows(tmp_path / "a" / "m.csv")
    assert list(table[0]) == list(COLUMNS) and [x["metric"] for x in table] == list(writer.intervals)
    for row in table:
        assert float(row["value"]) == pytest.approx(metrics[f"test_{row['metric']}"])
        assert float(row["low"]) <= float(row["value"]) <= float(row["high"])
        assert (row["samples"], row["groups"], row["level"], row["resamples"]) == ("12", "6", "0.95", "50")
    assert set(writer.intervals) == {"auroc", "balanced_accuracy", "quadratic_kappa"}
    out = capsys.readouterr().out
    assert "test of 12 samples in 6 groups" in out and "95% interval" in out and "m.csv" in out


@pytest.mark.parametrize("task", ["regression", "survival"])
def test_other_tasks(folder, tmp_path, task):
    if task == "survival":
        lines = [f"slide_{i:03},{i + 1},{i % 3 > 0:d}" for i in range(12)]
        (tmp_path / "l.csv").write_text("\n".join(["slide_id,time,event", *lines]))
        module = SlideDataModule(folder, str(tmp_path / "l.csv"), labels="survival", val_fraction=0, test_fraction=1)
        net = model(task="survival", num_classes=None, time_bins=[4.0])
    else:
        module, net = data(folder, labels="numbers", label_column="score"), model(task="regression", num_classes=1)
    writer = BootstrapIntervals(resamples=20, path=str(tmp_path / "m.csv"))
    trainer(callbacks=[writer]).test(net, module, verbose=False)
    assert set(writer.intervals) == ({"concordance"} if task == "survival" else {"mse", "r2"})


def test_batches_do_not_matter(folder, tmp_path):
    for i, size in enumerate((1, 5, 12)):
        run(folder, tmp_path / f"{i}.csv", data_options={"batch_size": size})
    assert rows(tmp_path / "0.csv") == rows(tmp_path / "1.csv") == rows(tmp_path / "2.csv")


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp_fork", "ring_dilated_notebook"])
def test_ranks_do_not_matter(folder, tmp_path, strategy):
    run(folder, tmp_path / "one.csv", made=model().double())
    run(folder, tmp_path / "two.csv", made=model().double(), strategy=strategy, devices=2)
    one, two = rows(tmp_path / "one.csv"), rows(tmp_path / "two.csv")
    assert len(one) == 3
    for a, b in zip(one, two, strict=True):
        assert a["metric"] == b["metric"]
        assert [float(a[x]) for x in COLUMNS[1:]] == pytest.approx([float(b[x]) for x in COLUMNS[1:]], abs=1e-9)


def test_models_it_is_not_for(tmp_path):
    language = LongNetLM(PATTERN, dim=16, depth=1, num_heads=4)
    with pytest.raises(TypeError, match="one prediction a sequence, got LongNetLM: leave it out"):
        trainer(callbacks=[BootstrapIntervals()]).test(language, text(tmp_path), verbose=False)
    writer, plain = (
        BootstrapIntervals(),
        LongNetClassifier(PATTERN, feature_dim=3, task=None, dim=16, depth=1, num_heads=4),
    )
    with pytest.raises(TypeError, match="got LongNetClassifier without a task"):
        writer.on_test_start(trainer(), plain)


@pytest.mark.parametrize("options", [{"resamples": 0}, {"level": 1.0}, {"level": 0}, {"seed": -1}])
def test_arguments(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        BootstrapIntervals(**options)
