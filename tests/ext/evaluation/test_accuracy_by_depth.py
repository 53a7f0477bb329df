"""AccuracyByDepth against answers counted one by one, and with models that read the whole text or only its end."""

import csv
import random
import warnings
from collections import defaultdict

import pytest
import torch

from lightning_dilated import LongNetLM, LongNetMLM
from lightning_dilated.callbacks import AccuracyByDepth
from lightning_dilated.data import ByteDataModule, FarRecallDataModule, LongContextDataModule

from ...models import PATTERN, SIZES, batch, loader, tiny, trainer


def task(name="needle", **options):
    sizes = {"lengths": [41, 60], "depths": [0, 50, 100], "samples_per_cell": 5, "batch_size": 4, "train_size": 8}
    small = {"vocabulary": 2, "fillers": 2, "distractors": 1, "value_tokens": 2, "num_values": 2, "hops": 2}
    return LongContextDataModule(name, form="tokens", **{**sizes, **small, "key_tokens": 3, **options})


def model_of(data):
    torch.manual_seed(3)
    return tiny(vocab_size=data.vocab_size, tie_embeddings=False)  # tied weights would repeat the input


def quiet(tmp_path, *callbacks, **options):
    return trainer(callbacks=list(callbacks), default_root_dir=tmp_path, precision="64-true", **options)


def by_hand(model, data, split):
    """Count sample by sample. Return {(length, depth): [samples, right, tokens, right tokens]}."""
    counts = defaultdict(lambda: [0, 0, 0, 0])
    for sample in data.dataset(split):
        with torch.no_grad():
            likeliest = model(sample["tokens"][None])[0].argmax(-1).tolist()
        size = data.task.num_values * data.form.value_tokens
        n = len(sample["tokens"])
        right = [likeliest[p] == sample["tokens"].tolist()[p + 1] for p in range(n - size - 1, n - 1)]
        for i, amount in enumerate((1, all(right), size, sum(right))):
            counts[tuple(data.cell(split, sample["index"]))][i] += amount
    return dict(counts)


@pytest.mark.parametrize("name", ["needle", "multi_value", "tracing"])
@pytest.mark.parametrize("split", ["val", "test"])
def test_equals_answers_counted_by_hand(tmp_path, capsys, split, name):
    data, callback = task(name), AccuracyByDepth()
    model, run = model_of(data), quiet(tmp_path, callback)
    (run.validate if split == "val" else run.test)(model, data, verbose=False)
    want = by_hand(model, data, split)
    assert len(want) == 6 and sum(x[3] for x in want.values()) > 0
    rows = {(r["length"], r["depth"]): [r[k] for k in ("samples", "right", "tokens")] for r in callback.rows}
    assert rows == {cell: x[:3] for cell, x in want.items()}
    for row in callback.rows:
        samples, right, tokens, good = want[row["length"], row["depth"]]
        assert row["accuracy"] == right / samples and row["token_accuracy"] == good / tokens
        assert (row["split"], row["task"], row["step"]) == (split, name, 0)
        assert {k: row[k] for k in ("blind", "unbound")} == data.guess
    logged = {k: float(x) for k, x in run.callback_metrics.items() if "accuracy" in k}
    expected = {f"{split}_accuracy": sum(x[1] for x in want.values()) / 30}
    for n in (41, 60):
        expected[f"{split}_accuracy_{n}"] = sum(x[1] for cell, x in want.items() if cell[0] == n) / 15
    assert logged == pytest.approx(expected, rel=1e-6)
    assert model.watch_predictions is None
    with (tmp_path / "accuracy_by_depth.csv").open() as file:
        assert list(csv.DictReader(file)) == [{k: str(v) for k, v in row.items()} for row in callback.rows]
    assert (tmp_path / f"accuracy_by_depth_{name}.png").stat().st_size > 1000
    assert f"{name}: percent of right answers" in capsys.readouterr().out


class Reader(LongNetLM):
    """Answers from the last `reach` tokens. If the key is not among them, it guesses one of all values.

    Real models do not see labels. This one uses labels only to find the positions of answers.
    """

    reach = 10**6

    def _read(self, tokens, at):
        """Return the token after position `at` in a sample."""
        draw, question = random.Random(sum(tokens)), tokens.index(1)
        key, said = tokens[question + 1 : question + 4], tokens[question + 4 : at + 1]
        for i in range(max(0, at + 1 - self.reach), question - 3):
            if tokens[i : i + 3] == key and tokens[i + 3] >= self.first_value:
                return tokens[i + 3 + len(said)]
        return draw.randrange(self.first_value, self.vocab_size)

    def loss_terms(self, batch):
        counted = batch["labels"] != -100
        answers = torch.full_like(batch["labels"], -100)
        for row, position in counted.nonzero().tolist():
            answers[row, position] = self._read(batch["tokens"][row].tolist(), position)
        if self.watch_predictions is not None:
            self.watch_predictions(batch, answers)
        return self.head.weight.sum() * 0, counted.sum()


@pytest.mark.parametrize("reach", [None, 45])
def test_a_reader_is_right_within_its_reach_and_guesses_beyond(tmp_path, reach):
    """With 16 values, a guess is right once in 16. Beyond the reach, no model can do better."""
    data = task(lengths=[40, 120], depths=[0, 50, 90], samples_per_cell=60, vocabulary=16, value_tokens=1)
    model = Reader(PATTERN, **{**SIZES, "vocab_size": data.vocab_size})
    model.first_value = 2 + data.form.fillers + 16
    model.reach = reach or model.reach
    callback = AccuracyByDepth()
    quiet(tmp_path, callback).test(model, data, verbose=False)
    share = {(r["length"], r["depth"]): r["accuracy"] for r in callback.rows}
    assert data.guess["blind"] == 1 / 16
    for cell, accuracy in share.items():
        if reach is None or cell[0] == 40 or cell[1] == 90:
            assert accuracy == 1, cell
        else:
            assert accuracy < 0.2, cell


def test_right_answers_are_those_of_greedy_decoding(tmp_path):
    data, callback = task(samples_per_cell=7, value_tokens=2, vocabulary=2, key_tokens=2), AccuracyByDepth()
    model = model_of(data)
    quiet(tmp_path, callback, max_steps=40, limit_val_batches=0).fit(model.train(), data)
    quiet(tmp_path, callback).test(model.eval(), data, verbose=False)
    right = {}
    for sample in data.dataset("test"):
        prompt = sample["tokens"][None, :-2]
        decoded = model.generate(prompt, 2, temperature=0)[0, -2:]
        cell = data.cell("test", sample["index"])
        right[cell] = right.get(cell, 0) + int(torch.equal(decoded, sample["tokens"][-2:]))
    assert 0 < sum(right.values()) < 42
    assert {(r["length"], r["depth"]): r["right"] for r in callback.rows} == right


def test_every_validation_of_a_fit_is_appended(tmp_path):
    data, callback = task(), AccuracyByDepth(folder=tmp_path / "own", table=False, picture=False)
    run = quiet(tmp_path, callback, max_epochs=2, num_sanity_val_steps=1)
    run.fit(model_of(data).train(), data)
    with (tmp_path / "own" / "accuracy_by_depth.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["2"] * 6 + ["4"] * 6
    assert not list(tmp_path.rglob("*.png")) and "val_accuracy" in run.progress_bar_metrics


def test_samples_that_were_left_out_do_not_count(tmp_path):
    callback = AccuracyByDepth()
    data = task()
    quiet(tmp_path, callback, limit_test_batches=2).test(model_of(data), data, verbose=False)
    assert [(r["length"], r["depth"], r["samples"]) for r in callback.rows] == [(41, 0, 5), (41, 50, 3)]


def test_what_has_no_depths_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"AccuracyByDepth needs a causal language model.*got LongNetMLM"):
        quiet(tmp_path, AccuracyByDepth()).validate(LongNetMLM(PATTERN, **SIZES), task())
    with pytest.raises(TypeError, match=r"AccuracyByDepth needs a LongContextDataModule.*got loaders alone"):
        quiet(tmp_path, AccuracyByDepth()).validate(tiny(), loader(batch(1, 9)))
    data = FarRecallDataModule(40)
    with pytest.raises(TypeError, match="got FarRecallDataModule"):
        quiet(tmp_path, AccuracyByDepth()).validate(model_of(data), data)
    (tmp_path / "text.txt").write_bytes(b"text" * 400)
    with pytest.raises(TypeError, match="got ByteDataModule"):
        model = tiny(vocab_size=256)
        quiet(tmp_path, AccuracyByDepth()).validate(model, ByteDataModule(str(tmp_path / "text.txt"), seq_len=32))


def test_a_vocabulary_that_is_too_small_and_a_length_that_is_too_long(tmp_path):
    with pytest.raises(ValueError, match=r"the model has 7 tokens, and the data \(tokens of their own.* has 8"):
        quiet(tmp_path, AccuracyByDepth()).test(tiny(vocab_size=7), task())
    with pytest.warns(UserWarning, match="the lengths go up to 60, above the 50 tokens that the model is made for"):
        quiet(tmp_path, AccuracyByDepth()).test(tiny(vocab_size=8, max_seq_len=50), task(), verbose=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the lengths go up")
        quiet(tmp_path, AccuracyByDepth()).test(tiny(vocab_size=8, max_seq_len=60), task(), verbose=False)
