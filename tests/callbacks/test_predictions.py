"""PredictionWriter writes one CSV row per sequence, batch by batch, and refuses outputs of other modules clearly."""

import csv
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_dilated import LongNetClassifier, LongNetLM
from lightning_dilated.callbacks import AttentionWriter, PredictionWriter
from lightning_dilated.data import ByteDataModule, SlideDataModule, TokenDataModule, write_synthetic_slides

from ..ext.slides.slides import encoder
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
    data = text(tmp_path)
    predict(PredictionWriter(str(tmp_path / "p.csv")), data, model)
    samples = range(len(data.dataset("test")))
    assert [line[:2] for line in rows(tmp_path / "p.csv")[1:]] == [[str(i), "32"] for i in samples] and samples


@pytest.mark.parametrize("pack_tokens", [None, 64], ids=["sequences", "packed files"])
def test_a_text_has_file_and_offset(tmp_path, pack_tokens):
    """A row of a text has file and offset: a sequence may begin anywhere, also in a later file of the split."""
    sizes = {"a.txt": 40, "b.txt": 100, "c.txt": 70}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(97 + i % 26 for i in range(size)))
    paths = [str(tmp_path / name) for name in sizes]
    sizes_of_data = {"seq_len": 32, "val_fraction": 0.0, "test_fraction": 0.8, "pack_tokens": pack_tokens}
    data = ByteDataModule(paths, **sizes_of_data)
    predict(PredictionWriter(str(tmp_path / "p.csv")), data, LongNetLM(PATTERN, dim=16, depth=1, num_heads=4))
    header, *lines = rows(tmp_path / "p.csv")
    assert header[-2:] == ["file", "offset"] and len(lines) > 3
    samples, at = data.dataset("test"), header.index("index")
    for line in lines:
        tokens, begin = samples[int(line[at])]["tokens"], int(line[-1])
        text = Path(line[-2]).read_bytes()[begin : begin + len(tokens)]
        assert text == bytes(tokens.tolist())[: len(text)] and text
    assert len({line[-2] for line in lines}) > 1


def test_tokens_have_file_and_offset_in_tokens(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(100, dtype=np.uint16))
    np.save(tmp_path / "b.npy", np.arange(100, 200, dtype=np.uint16))
    data = TokenDataModule(str(tmp_path), vocab_size=256, seq_len=16, val_fraction=0.0, test_fraction=0.9)
    predict(PredictionWriter(str(tmp_path / "p.csv")), data, LongNetLM(PATTERN, dim=16, depth=1, num_heads=4))
    lines = rows(tmp_path / "p.csv")[1:]
    for line in lines:
        assert data.dataset("test")[int(line[0])]["tokens"][0] == np.load(line[-2])[int(line[-1])]
    assert {Path(line[-2]).name for line in lines} == {"a.npy", "b.npy"}


@pytest.mark.parametrize("writer", [PredictionWriter(), AttentionWriter()], ids=["predictions", "attention"])
@pytest.mark.parametrize("command", ["validate", "test"])
def test_other_commands_say_that_nothing_is_written(tmp_path, writer, command, caplog):
    logging.getLogger("lightning.pytorch").addHandler(caplog.handler)
    run = trainer(callbacks=[writer], default_root_dir=tmp_path)
    try:
        getattr(run, command)(tiny(dtype=torch.float32), loader(batch(2, 20)))
    finally:
        logging.getLogger("lightning.pytorch").removeHandler(caplog.handler)
    assert f"{type(writer).__name__} writes nothing in `{command}`" in caplog.text
    assert "run `predict` in place of it" in caplog.text and not [*tmp_path.iterdir()]


def test_each_rank_has_its_own_file(tmp_path):
    where = {"num_replicas": 4, "rank": 2}  # each rank predicts other samples
    run = SimpleNamespace(distributed_sampler_kwargs=where, log_dir=None, default_root_dir=str(tmp_path))
    for path, want in ((None, tmp_path / "predictions.2.csv"), ("x/y.csv", Path("x/y.2.csv"))):
        writer = PredictionWriter(path)
        writer.on_predict_start(run, None)
        assert writer._target == want


def test_nothing_predicted(tmp_path, capsys):
    predict(PredictionWriter(str(tmp_path / "p.csv")), [batch(2, 20)], limit_predict_batches=0)
    assert not (tmp_path / "p.csv").exists() and "predictions:" not in capsys.readouterr().out


FORMULAS = ["=cmd|'calc'!A0", "@SUM(1)", "+1", "-2+3", "\t=1", "\r=1", "\n=1", "＝1", "'=1", "'"]
PLAIN = ["a", "", "s=1", "1'", " b"]


def test_no_formulas(tmp_path):
    """Strings that a spreadsheet would run as formulas begin with a quote. Without the quote they are unchanged."""
    words = [*FORMULAS, *PLAIN]
    strategy = SimpleNamespace(is_first_of_sequence=True)
    run = SimpleNamespace(distributed_sampler_kwargs=None, strategy=strategy)
    writer = PredictionWriter(str(tmp_path / "p.csv"))
    writer.on_predict_start(run, None)
    prediction = {"slide_id": words, "=score": torch.arange(len(words)) - 3.5}
    writer.write_on_batch_end(run, None, prediction, None, None, 0, 0)
    header, *lines = rows(tmp_path / "p.csv")
    assert header == ["slide_id", "'=score"]
    assert [line[0] for line in lines] == [*(f"'{x}" for x in FORMULAS), *PLAIN]
    assert [line[0].removeprefix("'") for line in lines] == words
    assert [float(line[1]) for line in lines] == prediction["=score"].tolist()  # numbers are not quoted
    assert lines[0][1] == "-3.5"


def test_names_of_files_that_are_no_text(tmp_path):
    writer = PredictionWriter(str(tmp_path / "p.csv"))
    run = SimpleNamespace(distributed_sampler_kwargs=None, strategy=SimpleNamespace(is_first_of_sequence=True))
    writer.on_predict_start(run, None)
    writer.write_on_batch_end(run, None, {"slide_id": [os.fsdecode(b"a\xff")]}, None, None, 0, 0)
    assert (tmp_path / "p.csv").read_bytes() == b"slide_id\r\na\xff\r\n"


# -- slides ------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A read-only folder with five slides and their labels.csv."""
    path = tmp_path_factory.mktemp("slides")
    write_synthetic_slides(path, slides=5, tiles=(4, 20), features=12, classes=3)
    return str(path)


SCORES = [f"probability_{c}" for c in range(3)]
TASKS = {
    "classification": ({"task": "classification", "num_classes": 3}, ["label", "prediction", *SCORES]),
    "ordinal": ({"task": "ordinal", "num_classes": 3}, ["label", "prediction", *SCORES]),
    "regression": ({"task": "regression"}, ["label", "prediction"]),
    "two targets": ({"task": "regression", "num_classes": 2}, ["label", "prediction_0", "prediction_1"]),
    "embedding": ({}, ["label", *(f"e{i}" for i in range(16))]),
    "unlabelled": ({"task": "regression"}, ["prediction"]),
}


@pytest.mark.parametrize("task", TASKS)
def test_a_row_a_slide(tmp_path, folder, task):
    """A slide's row has its name and the model's output for this slide alone. Rows have the order of the files."""
    options, want = TASKS[task]
    model = encoder(dtype=torch.float32, grid=100, **options)
    labels = {} if task == "unlabelled" else {"labels_csv": f"{folder}/labels.csv"}
    kind = {} if not labels else {"labels": "numbers"} if options.get("task") == "regression" else {}
    data = SlideDataModule(folder, **labels, **kind, val_fraction=0, test_fraction=1, batch_size=2)
    predict(PredictionWriter(str(tmp_path / "p.csv")), data, model)
    header, *lines = rows(tmp_path / "p.csv")
    assert header == ["index", "slide_id", *want] and len(lines) == 5
    for i, line in enumerate(lines):
        assert line[:2] == [str(i), f"slide_{i:03}"]
        sample = data.collate([data.dataset("test")[i]])
        with torch.no_grad():
            alone = model(sample["features"][:, 1:], sample["coords"][:, 1:])
            if model.head is not None:
                alone = model.head(alone)
        if "probability_0" in want:
            assert int(line[3]) == max(range(3), key=lambda c: float(line[4 + c]))
            alone = alone.exp() if task == "ordinal" else alone.softmax(-1)
        values = [float(x) for x in line[-alone.numel() :]]
        assert values == pytest.approx(alone[0].tolist(), abs=1e-6)
        if labels:
            assert float(line[2]) == pytest.approx(float(sample["label"][0]))


def test_any_features(tmp_path):
    """LongNetClassifier predicts with and without custom ids and targets."""
    model = LongNetClassifier(PATTERN, feature_dim=3, task=None, dim=16, depth=1)
    x = {"features": torch.randn(2, 9, 3)}
    named = [{**x, "slide_id": ids, "label": torch.randn(2, 2)} for ids in (["a,b", 'c "d"'], ["é", "\n"])]
    for data, want in ((named, ["slide_id", "label_0", "label_1"]), ([x], [])):
        (got, *_) = predict(PredictionWriter(str(tmp_path / "p.csv")), data, model)
        header, *lines = rows(tmp_path / "p.csv")
        assert header == [*want, *(f"e{i}" for i in range(16))]
        assert [float(v) for v in lines[1][len(want) :]] == got["embedding"][1].tolist()
        if want:
            assert [line[0] for line in lines] == ["a,b", 'c "d"', "é", "'\n"]
            assert float(lines[1][2]) == float(named[0]["label"][1, 1])


WRONG = {
    "a tensor": torch.ones(2),
    "a list": [torch.ones(2)],
    "a mapping of floats": {"score": 1.0},
    "scalars": {"score": torch.ones(())},
    "3-D tensors": {"score": torch.ones(2, 3, 4)},
    "lists of tensors": {"score": [torch.ones(())] * 2},
    "words": {"name": "ab"},
    "nothing": {},
}


@pytest.mark.parametrize("name", WRONG)
def test_other_predictions_are_refused(tmp_path, name):
    class Odd(LongNetLM):
        def predict_step(self, batch, batch_idx):
            return WRONG[name]

    with pytest.raises(TypeError, match=r"Odd.predict_step must return a mapping of names to tensors \(B,\) or"):
        predict(PredictionWriter(str(tmp_path / "p.csv")), [batch(2, 20)], Odd(PATTERN, **SIZES))
    assert not (tmp_path / "p.csv").exists()


@pytest.mark.parametrize("second, says", [
    ({"index": torch.arange(2), "name": ["a", "b", "c"]}, r"one value a sequence under every name.*'name': 3"),
    ({"index": torch.arange(2), "score": torch.ones(2)}, r"columns index, score \(2\) after batches with index, name \(2\)"),
    ({"name": ["a"], "index": torch.arange(1)}, r"columns name, index"),
    ({"e0": torch.arange(2), "embedding": torch.ones(2, 2)}, r"two columns 'e0', one of them made from 'embedding'"),
])  # fmt: skip
def test_batches_of_other_columns_are_refused(tmp_path, second, says):
    """A batch with other columns is refused: its values would be written to wrong columns without an error."""

    class Odd(LongNetLM):
        def predict_step(self, batch, batch_idx):
            return second if batch_idx else {"index": torch.arange(2), "name": ["x", "y"]}

    with pytest.raises(ValueError, match=f"Odd.predict_step .*{says}"):
        predict(PredictionWriter(str(tmp_path / "p.csv")), [batch(2, 20)] * 2, Odd(PATTERN, **SIZES))
    assert rows(tmp_path / "p.csv") == [["index", "name"], ["0", "x"], ["1", "y"]]
