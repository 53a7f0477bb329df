"""LongNetClassifier, and features of all pooled models: learning each task, metrics of epochs, fine-tuning."""

import csv
import functools

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_dilated import DilatedPattern, LongNetClassifier
from lightning_dilated.callbacks import PredictionWriter
from lightning_dilated.ext.pooled.heads import class_metrics

from ...models import PATTERN, loader, trainer

SIZES = {"dim": 16, "depth": 2, "num_heads": 4}
same = lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=1e-12)  # noqa: E731


def model(**options):
    net = LongNetClassifier(PATTERN, **{**SIZES, **({} if "vocab_size" in options else {"feature_dim": 3}), **options})
    net.configure_model()
    return net


TASKS = {
    "classification": {"task": "classification", "num_classes": 3},
    "ordinal": {"task": "ordinal", "num_classes": 3},
    "regression": {"task": "regression"},
}


class Rows(torch.utils.data.Dataset):
    """Sequences with labels that are functions of their means."""

    def __init__(self, task, tokens=False, n=24):
        self.task, self.tokens, self.n = task, tokens, n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        rng, cls = torch.Generator().manual_seed(i), i % 3
        label = torch.tensor(cls) if "num_classes" in TASKS[self.task] else torch.tensor(float(cls))
        x = {"tokens": torch.randint(3, (20,), generator=rng) + 3 * cls}
        if not self.tokens:
            x = {"features": torch.randn(20, 3, generator=rng) + cls - 1}
        return {**x, "label": label, "index": i}


@pytest.mark.parametrize("task, tokens", [*((task, False) for task in TASKS), ("classification", True)])
def test_every_task_learns(task, tokens, tmp_path):
    options = {**TASKS[task], **({"vocab_size": 9} if tokens else {}), "pool": "mean"}
    net = model(**options, optimizer=functools.partial(torch.optim.AdamW, lr=0.02))
    data = DataLoader(Rows(task, tokens), batch_size=6)
    run = trainer(max_epochs=15, callbacks=[PredictionWriter(f"{tmp_path}/x.csv")])
    run.fit(net, data, data)
    found = run.callback_metrics
    if net.task == "regression":
        assert found["val_mse"] < 0.2 and found["val_r2"] > 0.7
    else:
        assert found["val_auroc"] > 0.95 and found["val_balanced_accuracy"] > 0.7 and found["val_quadratic_kappa"] > 0.7
    shown = {name for name in run.progress_bar_metrics if name.startswith("val_")}
    assert shown == ({"val_mse"} if net.task == "regression" else {"val_auroc"})  # the progress bar shows one metric
    run.predict(net, data, return_predictions=False)
    rows = list(csv.DictReader((tmp_path / "x.csv").open()))
    assert len(rows) == 24 and [int(r["index"]) for r in rows] == list(range(24))
    run.save_checkpoint(tmp_path / "x.ckpt")
    twin = LongNetClassifier.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    batch = next(iter(data))
    assert torch.equal(twin.eval().embed(batch), net.eval().embed(batch)) and twin.pattern == net.pattern


@pytest.mark.parametrize("pool", ["mean", "first"])
@pytest.mark.parametrize("options", [{}, {"vocab_size": 7}], ids=["features", "tokens"])
def test_ragged_batch_equals_samples_alone(pool, options):
    net = model(task=None, pool=pool, **options).double().eval()
    x = torch.randint(7, (3, 30)) if options else torch.randn(3, 30, 3).double()
    lengths = torch.tensor([30, 13, 1])
    got = net(x, lengths)
    for i, n in enumerate(lengths):
        same(got[i], net(x[i : i + 1, :n])[0])
    assert got.shape == (3, 16)


def test_forward_gives_logits():
    net = model(num_classes=3).eval()
    x = torch.randn(2, 9, 3)
    assert torch.equal(net(x), net.head(net.embed({"features": x}))) and net(x).shape == (2, 3)


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_metrics_are_those_of_the_whole_epoch(stage):
    """AUROC is computed over the whole epoch, not as a mean over batches, and is reset for the next epoch."""
    net, rows = model(num_classes=3).eval(), Rows("classification")
    data = DataLoader(rows, batch_size=5)
    whole = next(iter(DataLoader(rows, batch_size=24)))
    with torch.no_grad():
        want = class_metrics(net(whole["features"]).double().softmax(1), whole["label"], 3)
    name = "val" if stage == "validate" else "test"
    for _ in range(2):
        (metrics,) = getattr(trainer(), stage)(net, data, verbose=False)
        for key, value in want.items():
            assert metrics[f"{name}_{key}"] == pytest.approx(value.item(), abs=1e-6)


# -- fine-tuning -------------------------------------------------------------------------------------------------------
def test_layer_decay():
    net = model(num_classes=3, layer_decay=0.5, bias=True, optimizer=functools.partial(torch.optim.AdamW, lr=0.8))
    groups = net.configure_optimizers().param_groups
    held = {id(p): g for g in groups for p in g["params"]}
    want = {
        "project": 0.1,
        "transformer.blocks.0.": 0.2,
        "transformer.blocks.1.": 0.4,
        "transformer.norm": 0.8,
        "head": 0.8,
    }
    for name, p in net.named_parameters():
        group = held.pop(id(p))
        assert group["lr"] == pytest.approx(next(v for k, v in want.items() if name.startswith(k))), name
        assert (group["weight_decay"] == 0) == (p.ndim < 2) and "lr_scale" not in group
    assert not held


def test_layer_decay_of_slides():
    from ..slides.slides import encoder

    net = encoder(task="ordinal", num_classes=3, layer_decay=0.5)
    layers = {name: net.layer_of(name) for name, _ in net.named_parameters()}
    assert {layers["cls_token"], layers["patch_embed.weight"], layers["patch_embed.bias"]} == {0}
    assert {v for k, v in layers.items() if k.startswith("transformer.blocks.1.")} == {2}
    assert {v for k, v in layers.items() if k.startswith(("norm.", "transformer.norm", "head."))} == {3}


def test_scheduler_keeps_the_layers_rates():
    net = model(
        num_classes=3, layer_decay=0.5, lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda _: 0.5)
    )
    rates = sorted({g["lr"] for g in net.configure_optimizers()["optimizer"].param_groups})
    assert rates == pytest.approx([1e-3 * 0.5 * 0.5**i for i in (3, 2, 1, 0)])


def test_frozen_encoder():
    net = model(num_classes=3, freeze_encoder=True, dropout=0.5, drop_path=0.5)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    trainer(max_epochs=2).fit(net, DataLoader(Rows("classification"), batch_size=6))
    moved = {name for name, p in net.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"head.linear.weight", "head.linear.bias"}
    net.train()
    assert net.head.training and not net.transformer.training and not net.dropout.training
    data = next(iter(DataLoader(Rows("classification"), batch_size=6)))
    assert torch.equal(net.embed(data), net.embed(data)) and not net.embed(data).requires_grad


# -- what it refuses ---------------------------------------------------------------------------------------------------
def batches(**changes):
    return {"features": torch.randn(2, 9, 3), "label": torch.tensor([0, 1]), **changes}


def loss(**changes):
    return lambda: model(num_classes=3).loss_terms(batches(**changes))


REFUSED = {
    "neither": (lambda: LongNetClassifier(PATTERN, **SIZES, num_classes=2), "give feature_dim .* or vocab_size"),
    "both": (lambda: model(feature_dim=3, vocab_size=3, num_classes=2), "one of them"),
    "no classes": (lambda: model(), "needs num_classes"),
    "pool": (lambda: model(num_classes=2, pool="class"), "pool must be mean or first"),
    "heads": (lambda: model(num_classes=2, num_heads=5), "num_heads=5 must divide dim=16"),
    "width": (loss(features=torch.randn(2, 9, 4)), r"features must be floating point \(B, N, 3\)"),
    "no input": (lambda: model(num_classes=3).loss_terms({"label": torch.zeros(2).long()}), "but no features"),
    "no label": (lambda: model(num_classes=3).loss_terms({"features": torch.randn(2, 9, 3)}), "but no label"),
    "empty sample": (loss(lengths=torch.tensor([9, 0])), r"lengths\[1\] is 0; a sample has at least one token"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, says = REFUSED[name]
    with pytest.raises(ValueError, match=says):
        call()


def test_no_task_cannot_be_evaluated():
    with pytest.raises(ValueError, match="makes embeddings only"):
        trainer().validate(model(task=None), loader(batches()), verbose=False)


def test_a_blank_row_is_refused():
    """SlideDataModule adds a blank row for a class token. This model has no class token, so the row is refused."""
    model = LongNetClassifier(DilatedPattern.dense(), feature_dim=4, num_classes=2, dim=8, depth=1, num_heads=2)
    data = {
        "features": torch.zeros(1, 5, 4),
        "coords": torch.zeros(1, 5, 2, dtype=torch.int64),
        "label": torch.tensor([0]),
    }
    model.loss_terms(data)
    data["coords"][:, 0] = -1
    with pytest.raises(ValueError, match=r"set data\.class_token to false"):
        model.loss_terms(data)
    packed = {**data, "label": torch.tensor([0, 1]), "cu_seqlens": torch.tensor([0, 2, 5], dtype=torch.int32)}
    packed["coords"] = torch.zeros(1, 5, 2, dtype=torch.int64)
    model.loss_terms(packed)
    packed["coords"][:, 2] = -1  # in the second sample of the packed row
    with pytest.raises(ValueError, match=r"sample 1 .*set data\.class_token to false"):
        model.loss_terms(packed)


@pytest.mark.parametrize("label, message", [([0, 3], "found 3"), ([0.5, 1.0], "must be integers"), ([0, 1], None)])
def test_labels_are_read_before_they_are_moved(label, message):
    """Labels are read once, because each read waits for the GPU. A wrong label raises in the step, on all ranks."""
    model = LongNetClassifier(PATTERN, vocab_size=8, num_classes=3, **SIZES)
    model.configure_model()
    checked, check = [], model.head.check
    model.head.check = lambda label: checked.append(label) or check(label)
    moved = model.transfer_batch_to_device(
        {"tokens": torch.zeros(2, 8, dtype=torch.int64), "label": torch.tensor(label)}, torch.device("cpu"), 0
    )
    if message is None:
        model.loss_terms(moved)
    else:
        with pytest.raises((TypeError, ValueError), match=message):
            model.loss_terms(moved)
    assert len(checked) == 1
    moved["label"].fill_(5)  # a hook may change labels in between
    with pytest.raises((TypeError, ValueError), match=r"found 5|must be integers"):
        model.loss_terms(moved)
    with pytest.raises(ValueError, match="found 7"):
        model.loss_terms({**moved, "label": torch.tensor([7, 0])})
    assert len(checked) == 3
