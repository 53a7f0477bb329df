"""RecallByDistance against answers counted one by one. It does not affect the run."""

from collections import Counter

import pytest
import torch

from lightning_dilated import LongNetLM, LongNetMLM
from lightning_dilated.callbacks import LossByPosition, RecallByDistance
from lightning_dilated.data import ByteDataModule, FarRecallDataModule
from lightning_dilated.memory.settings import MemorySettings

from ...models import PATTERN, SIZES, batch, loader, tiny, trainer


def task(pair_tokens=2, **options):
    sizes = {"batch_size": 3, "train_size": 6, "val_size": 20, "test_size": 14}
    return FarRecallDataModule(40, 3, 4, 6, pair_tokens, **{**sizes, **options})


def model_of(data):
    torch.manual_seed(3)
    return tiny(vocab_size=data.vocab_size, tie_embeddings=False)  # tied weights would repeat the input


def by_hand(model, data, split):
    """Count label by label. Return {first distance of an octave: (right, labels)}."""
    vocabulary, half, right, labels = data.vocabulary, data.seq_len // 2, Counter(), Counter()
    for sample in data.dataset(split):
        tokens = sample["tokens"].tolist()
        with torch.no_grad():
            likeliest = model(sample["tokens"][None])[0].argmax(-1).tolist()
        for p, label in enumerate(sample["labels"].tolist()):
            if label == -100:
                continue
            key = tokens[p]
            if data.pair_tokens == 2:
                pair = tokens.index(key)
            else:
                of_key = range(1 + vocabulary + vocabulary * (key - 1), 1 + vocabulary + vocabulary * key)
                pair = next(q for q in range(half) if tokens[q] in of_key)
            octave = 1
            while 2 * octave <= p - pair:
                octave *= 2
            labels[octave] += 1
            right[octave] += likeliest[p] == label
    return {octave: (right[octave], labels[octave]) for octave in sorted(labels)}


def quiet(tmp_path, *callbacks, **options):
    return trainer(callbacks=list(callbacks), default_root_dir=tmp_path, precision="64-true", **options)


@pytest.mark.parametrize("pair_tokens", [1, 2])
@pytest.mark.parametrize("split", ["val", "test"])
def test_equals_answers_counted_by_hand(tmp_path, split, pair_tokens):
    data, callback = task(pair_tokens), RecallByDistance()
    model = model_of(data)
    run = quiet(tmp_path, callback)
    (run.validate if split == "val" else run.test)(model, data, verbose=False)
    want = by_hand(model, data, split)
    right, labels = (sum(x[i] for x in want.values()) for i in (0, 1))
    assert 0 < right < labels and len(want) >= 3, "an untrained model that is sometimes right, at several distances"
    assert callback.rows == [
        {"first": first, "last": 2 * first - 1, "labels": n, "accuracy": k / n} for first, (k, n) in want.items()
    ]
    metrics = {name: float(x) for name, x in run.callback_metrics.items() if "accuracy" in name}
    expected = {f"{split}_accuracy": right / labels}
    expected |= {f"{split}_accuracy_{first}": k / n for first, (k, n) in want.items()}
    assert metrics == pytest.approx(expected, rel=1e-6)
    assert model.watch_predictions is None


def test_fit_logs_it_at_each_validation(tmp_path):
    data, callback = task(), RecallByDistance()
    run = quiet(tmp_path, callback, max_epochs=2, num_sanity_val_steps=1)
    model = model_of(data).train()
    run.fit(model, data)
    want = by_hand(model.eval(), data, "val")
    assert [(r["first"], r["labels"]) for r in callback.rows] == [(first, n) for first, (_, n) in want.items()]
    assert float(run.callback_metrics["val_accuracy"]) == pytest.approx(
        sum(k for k, _ in want.values()) / sum(n for _, n in want.values())
    )
    assert "val_accuracy" in run.progress_bar_metrics and model.watch_predictions is None


@pytest.mark.parametrize("tile", [None, 7])
def test_logits_are_made_at_labels_only(tmp_path, tile):
    """The tiles of the loss compute the logits of all tokens. The callback adds only logits at labels."""
    data, rows = task(val_size=3), {}
    for callbacks in ((), (RecallByDistance(),)):
        model, sizes = model_of(data), []
        model.transformer.memory = MemorySettings(tile=tile)
        model.head.register_forward_hook(lambda _, given, __, seen=sizes: seen.append(given[0].shape[:-1].numel()))
        run = quiet(tmp_path, *callbacks)
        run.validate(model, data, verbose=False)
        assert tile is None or max(sizes) <= tile
        rows[len(callbacks)] = sum(sizes), float(run.callback_metrics["val_loss"])
    labels = sum(int((sample["labels"] != -100).sum()) for sample in data.dataset("val"))
    assert rows == {0: (3 * 40, rows[0][1]), 1: (3 * 40 + labels, rows[0][1])}


def test_beside_losses_by_position_and_a_loss_of_a_subclass(tmp_path):
    class Half(LongNetLM):
        def token_losses(self, batch):
            return super().token_losses(batch) / 2

    data, by_callback = task(), {}
    for kind in (LongNetLM, Half):
        torch.manual_seed(3)
        model = kind(PATTERN, **{**SIZES, "vocab_size": data.vocab_size})
        recall, losses = RecallByDistance(), LossByPosition(table=False, picture=False)
        run = quiet(tmp_path, recall, losses)
        run.validate(model, data, verbose=False)
        by_callback[kind] = recall.rows, float(run.callback_metrics["val_loss"]), losses.rows[0]["bits"]
    assert by_callback[Half][0] == by_callback[LongNetLM][0] != []
    assert by_callback[Half][1:] == pytest.approx([x / 2 for x in by_callback[LongNetLM][1:]])


def test_labels_without_a_distance_do_not_count(tmp_path, monkeypatch):
    data, callback = task(), RecallByDistance()
    monkeypatch.setattr(data, "distances", lambda split, index: torch.full((40,), 5 if index % 2 else 0))
    quiet(tmp_path, callback).validate(model_of(data), data, verbose=False)
    assert [(r["first"], r["last"], r["labels"]) for r in callback.rows] == [(4, 7, 3 * 10)]


def test_a_failed_validation_leaves_the_model_alone(tmp_path, monkeypatch):
    data = task()
    model = model_of(data)
    monkeypatch.setattr(data, "distances", lambda split, index: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        quiet(tmp_path, RecallByDistance()).validate(model, data)
    assert model.watch_predictions is None


def test_what_has_no_distances_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"RecallByDistance needs a causal language model.*got LongNetMLM"):
        quiet(tmp_path, RecallByDistance()).validate(LongNetMLM(PATTERN, **SIZES), task())
    with pytest.raises(TypeError, match=r"a method distances\(split, index\), .* got loaders alone"):
        quiet(tmp_path, RecallByDistance()).validate(tiny(), loader(batch(1, 9)))
    (tmp_path / "text.txt").write_bytes(b"text" * 400)
    with pytest.raises(TypeError, match="got ByteDataModule"):
        model = tiny(vocab_size=256)
        quiet(tmp_path, RecallByDistance()).validate(model, ByteDataModule(str(tmp_path / "text.txt"), seq_len=32))
