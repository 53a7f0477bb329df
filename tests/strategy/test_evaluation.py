"""Test, predict, and callbacks of an evaluation give the same results on many ranks as on one."""

import csv
from pathlib import Path
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch

from lightning_dilated import DilatedPattern, LongNetLM, RingDilatedFSDPStrategy, RingDilatedStrategy
from lightning_dilated.attention.rotary import token_positions
from lightning_dilated.callbacks import AccuracyByDepth, LossByPosition, PredictionWriter, RecallByDistance
from lightning_dilated.data import FarRecallDataModule, LongContextDataModule

from .runs import PATTERN, Data, Run, launched, make, trainer

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


# -- LossByPosition ----------------------------------------------------------------------------------------------------
def losses_by_position(rank, group, run, folder):
    """Return this rank's losses_by_position after a validation."""
    built, model, data, _ = make(run, launched(rank))
    callback = LossByPosition(table=False, picture=False)
    built.callbacks.append(callback)
    built._default_root_dir = folder
    built.validate(model, data, verbose=False)
    return callback.rows


LAYOUTS = {
    "2": (2, {}),
    "4, data 2": (4, {"sequence_size": 2}),
    "2, zigzag": (2, {"layout": "zigzag"}),
    "2, chunked": (2, {"layout": "chunked"}),
}
KINDS = ("whole", "lengths", "documents")
#: cases in CI, with each way and each kind of batch; other pairs run with `-m slow`
CI = {("2", "documents"), ("4, data 2", "lengths"), ("2, zigzag", "lengths"), ("2, chunked", "documents")}
CI |= {("4, data 2", "whole")}


@pytest.mark.parametrize(
    "way, kind", [pytest.param(w, k, marks=[] if (w, k) in CI else pytest.mark.slow) for w in LAYOUTS for k in KINDS]
)
def test_loss_by_position(pools, tmp_path, way, kind):
    ranks, strategy = LAYOUTS[way]
    if kind == "documents":  # a batch has one row, so there are no data ranks
        strategy = {k: v for k, v in strategy.items() if k != "sequence_size"}
    run = Run(kind=kind, batch_size=2 if "sequence_size" in strategy else 1, masked=0.3)
    want = pools(1).run(1, losses_by_position, run, str(tmp_path / "one"))[0]
    memory = {"stream": 11} if strategy.get("layout") == "chunked" else None
    results = pools(ranks).run(
        ranks, losses_by_position, run.but(strategy=strategy, memory=memory), str(tmp_path / "many")
    )
    for got in results:
        assert [{k: v for k, v in r.items() if k != "bits"} for r in got] == [
            {k: v for k, v in r.items() if k != "bits"} for r in want
        ]
        assert [r["bits"] for r in got] == pytest.approx([r["bits"] for r in want], rel=1e-9)


# -- AccuracyByDepth ---------------------------------------------------------------------------------------------------
class Erring(LongNetLM):
    """Predicts all labels correctly, except the last or the third last label of some samples, chosen by index."""

    def loss_terms(self, batch):
        labels = batch["labels"]
        positions = token_positions(0, labels.shape[1])  # a collective operation
        answers = labels.clone()
        for row, index in enumerate(batch["index"].tolist()):
            length = LENGTHS[0] if index < 6 else LENGTHS[1]
            for place, wrong in ((length - 2, index % 3 == 1), (length - 4, index % 3 == 2)):
                answers[row, (positions == place) & (labels[row].cpu() != -100) & wrong] += 1
        if self.watch_predictions is not None:
            self.watch_predictions(batch, answers)
        return self.head.weight.sum() * 0, (labels != -100).sum()


LENGTHS = (34, 29)


def accuracies_by_depth(rank, group, kind, strategy, batch_size, folder):
    """Return this rank's accuracies_by_depth after a test. Answers have 12 tokens, so some are on several ranks."""
    world = launched(rank)
    task = LongContextDataModule(
        "needle", list(LENGTHS), [0, 100], 3, "tokens", vocabulary=3, fillers=1, distractors=0, value_tokens=12,
        batch_size=batch_size, train_size=9,
    )  # fmt: skip
    torch.manual_seed(7)
    pattern = DilatedPattern.longnet([8, 16, 64], [1, 2, 4])
    model = kind(pattern, vocab_size=task.vocab_size, dim=16, depth=2, num_heads=4, tie_embeddings=False)
    model.configure_model()  # before sharding, so that all strategies draw the same weights
    callback = AccuracyByDepth(folder, table=False, picture=False)
    fsdp = strategy.pop("fsdp", False)
    plugin = (RingDilatedFSDPStrategy if fsdp else RingDilatedStrategy)(**strategy)
    precision = "32-true" if fsdp else "64-true"
    trainer(plugin, world, callbacks=[callback], precision=precision).test(model, task, verbose=False)
    return callback.rows


@pytest.mark.parametrize("kind", [Erring, LongNetLM])
@pytest.mark.parametrize(
    "ranks, strategy", [(2, {}), (3, {}), (4, {"sequence_size": 2}), (2, {"layout": "zigzag"}), (2, {"fsdp": True})]
)
def test_accuracy_by_depth(pools, tmp_path, ranks, strategy, kind):
    want = pools(1).run(1, accuracies_by_depth, kind, {}, 1, str(tmp_path / "one"))[0]
    if kind is Erring:
        assert [(r["samples"], r["right"], r["token_accuracy"]) for r in want] == [(3, 1, 34 / 36)] * 4
    else:
        assert 0 < sum(r["token_accuracy"] for r in want) < 4
    # a batch of 4 has samples of both lengths
    for size in (1, 4):
        for got in pools(ranks).run(ranks, accuracies_by_depth, kind, strategy, size, str(tmp_path / f"many{size}")):
            assert got == want


# -- RecallByDistance --------------------------------------------------------------------------------------------------
def recalled(rank, group, seq_len, strategy):
    """Return the rows and metrics of this rank after a validation and a test."""
    world = launched(rank)
    pl.seed_everything(5, verbose=False)
    pairs = 3 if seq_len > 8 else 1
    data = FarRecallDataModule(
        seq_len, pairs, 4, pair_tokens=1 if seq_len < 8 else 2, batch_size=1, train_size=8, val_size=16, test_size=6
    )  # fmt: skip
    model = LongNetLM(PATTERN, vocab_size=data.vocab_size, dim=16, depth=2, tie_embeddings=False)
    callback = RecallByDistance()
    run = trainer(RingDilatedStrategy(**strategy), world, precision="64-true", callbacks=[callback])
    results = []
    for evaluate in (run.validate, run.test):
        evaluate(model, data, verbose=False)
        results.append((callback.rows, {k: float(x) for k, x in run.callback_metrics.items() if "accuracy" in k}))
    return results


CASES = {
    "2": (2, 40, {}),
    "2, zigzag": (2, 40, {"layout": "zigzag"}),
    "2, strided": (2, 40, {"layout": "strided"}),
    "2, odd": (2, 41, {}),
    "4, data 2": (4, 40, {"sequence_size": 2}),
    "4, a rank without tokens": (4, 3, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_recall_by_distance(pools, case):
    ranks, seq_len, strategy = CASES[case]
    want = pools(1).run(1, recalled, seq_len, {})[0]
    for rows, metrics in want:
        assert rows and len(metrics) == 1 + len(rows)
    if seq_len >= 40:
        assert any(row["accuracy"] > 0 for row in want[0][0]), "all wrong would say nothing of who is right"
    for outcome in pools(ranks).run(ranks, recalled, seq_len, strategy):
        assert outcome == want
