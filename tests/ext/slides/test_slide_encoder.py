"""SlideEncoder: ragged batches equal single slides, training batches equal calls with tiles, silent mistakes raise."""

import warnings

import pytest
import torch

from lightning_dilated import Global, SlideEncoder, SlidePretrainer
from lightning_dilated.data import SlideDataModule, write_synthetic_slides
from lightning_dilated.ext.slides.backbone import released_segments

from ...models import loader, trainer
from .slides import SIZES, batch, encoder, slides

TASK = {"task": "classification", "num_classes": 2}
WAYS = {"masked": {}, "attended": {"padding": "attended"}, "mean": {"pool": "mean"}}
WAYS["global class token"] = {"global_class_token": True}
same = lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=1e-12)  # noqa: E731


# -- slides ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", WAYS)
def test_ragged_batch_equals_slides_alone(way):
    model = encoder(**WAYS[way]).eval()
    features, coords, tiles = slides(40, 23, 1)
    got, layers = model(features, coords, tiles), model(features, coords, tiles, all_layers=True)
    assert got.shape == (3, 16) and len(layers) == 3
    for i, n in enumerate(tiles):
        alone = features[i : i + 1, :n], coords[i : i + 1, :n]
        same(got[i], model(*alone)[0])
        for a, b in zip(layers, model(*alone, all_layers=True), strict=True):
            same(a[i], b[0])
    moved = model(features, coords.roll(1, 1)[:1].repeat(3, 1, 1), None)  # positions affect the output
    assert not torch.allclose(moved[0], got[0])


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_rows_of_batches_equal_tiles(pool):
    """A training batch with its blank row equals a call with tiles. The features of the blank row have no effect."""
    model = encoder(pool=pool).eval()
    features, coords, tiles = slides(40, 23)
    data = batch(40, 23)
    data["features"][:, 0] = 3.0
    same(model.embed(data), model(features, coords, tiles))


def test_gradients_of_a_ragged_batch():
    model, data = encoder(**TASK), batch(40, 23, 1)
    total, count = model.loss_terms(data)
    got = torch.autograd.grad(total, list(model.parameters()))
    alone = 0.0
    for i, n in enumerate(data["lengths"]):
        part = {k: v[i : i + 1, :n] if v.ndim == 3 else v[i : i + 1] for k, v in data.items()}
        alone = alone + model.loss_terms(part)[0]
    assert count == 3 and all(g.any() for g in got)
    for a, b in zip(got, torch.autograd.grad(alone, list(model.parameters())), strict=True):
        same(a, b)


def test_coordinates_of_any_kind_are_the_same_cells():
    model = encoder().eval()
    features, coords, _ = slides(30)
    want = model(features, coords)
    for other in (coords.int(), coords.float(), coords.to(torch.uint16), coords // 256 * 256):
        same(model(features, other), want)
    same(encoder(tile_size=512).eval()(features, 2 * coords), want)


@pytest.mark.parametrize("size, tile, want", [
    (262144, 256, [1024, 5792, 32768, 185363, 1048576]),
    (250000, 256, [1024, 4870, 23170, 110217, 524288]),
    (262144, 512, [1024, 4096, 16384, 65536, 262144]),
])  # fmt: skip
def test_released_segments(size, tile, want):
    assert released_segments(size, tile) == want


def test_tile_size_alone_does_not_change_the_segments():
    """Level-0 coordinates need a larger tile_size, but the segments must remain as in training."""
    segments = lambda **o: [b.segment_length for b in SlideEncoder(**o).pattern.branches]  # noqa: E731
    assert segments(tile_size=512) == segments() != segments(max_wsi_size=131072)


@torch.no_grad()
def test_a_global_class_token_sees_every_tile():
    """A global class token sees every tile in one layer, even outside of a head's segments."""
    features, coords, _ = slides(60)
    short = {"depth": 1, "segment_lengths": [4], "dilation_rates": [1]}
    for options, sees in (({}, False), ({"global_class_token": True}, True)):
        model = encoder(**short, **options).eval()
        moved = features.clone()
        moved[:, -1] += 1.0
        assert torch.equal(model(features, coords), model(moved, coords)) is not sees
    assert model.pattern.branches[-1] == Global(1)


def test_a_checkpoint_keeps_the_global_class_token(tmp_path):
    model = encoder(global_class_token=True, **TASK)
    run = trainer()
    run.strategy.connect(model)
    run.save_checkpoint(tmp_path / "x.ckpt")
    twin = SlideEncoder.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True).double().eval()
    assert twin.pattern == model.pattern and torch.equal(twin.embed(batch(20)), model.eval().embed(batch(20)))
    with pytest.warns(UserWarning, match=r"was trained with .*Global\(1\)"):
        SlideEncoder(**SIZES, pretrained=str(tmp_path / "x.ckpt")).configure_model()


# -- training ----------------------------------------------------------------------------------------------------------
@pytest.mark.full
def test_trains_under_a_trainer(tmp_path):
    data = [{**batch(20, 9, seed=s), "features": batch(20, 9, seed=s)["features"].float()} for s in range(3)]
    for d in data:
        d["features"][1] += 1.0
    model = SlideEncoder(**{**SIZES, "dropout": 0.1, "drop_path": 0.2}, **TASK, optimizer=adam, compile_blocks=False)
    run = trainer(max_epochs=15)
    run.fit(model, loader(*data), loader(*data))
    assert run.callback_metrics["val_loss"] < 0.2 and run.callback_metrics["val_auroc"] == 1
    run.save_checkpoint(tmp_path / "x.ckpt")
    twin = SlideEncoder.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True).eval()
    model.eval()
    assert torch.equal(twin.embed(data[0]), model.embed(data[0])) and twin.pattern == model.pattern
    predicted = run.predict(twin, loader(data[0]))[0]
    assert predicted["index"].tolist() == [0, 1] and predicted["prediction"].tolist() == [0, 1]
    start = SlideEncoder(**SIZES, pretrained=str(tmp_path / "x.ckpt"))
    start.configure_model()
    assert torch.equal(start.eval().embed(data[0]), model.embed(data[0]))


@pytest.mark.parametrize("options, label", [
    (TASK, [1]), ({"task": "ordinal", "num_classes": 3}, [2]), ({"task": "regression"}, [0.5]),
    ({"task": "regression", "num_classes": 2}, [[0.5, 1.0]]),
])  # fmt: skip
def test_one_slide_to_validate_on(options, label):
    """torchmetrics turns a tensor with one number into a scalar, which is not a list of labels."""
    model = encoder(**options, dtype=torch.float32)
    data = {**batch(9), "label": torch.tensor(label)}
    (metrics,) = trainer().validate(model, loader(data), verbose=False)
    assert metrics["val_mse" if options["task"] == "regression" else "val_balanced_accuracy"] >= 0
    if options["task"] == "regression":
        assert metrics["val_mse"] == pytest.approx(metrics["val_loss"], rel=1e-5)


@pytest.mark.parametrize("cls", [SlideEncoder, SlidePretrainer])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_half_precision(precision, cls):
    options = TASK if cls is SlideEncoder else {"decoder_dim": 8}
    data = {**batch(20, 9), "features": batch(20, 9)["features"].half()}  # features are often stored in fp16
    run = trainer(max_steps=2, precision=precision)
    run.fit(cls(**SIZES, **options), loader(data, data), loader(data))
    assert run.callback_metrics["train_loss"].isfinite() and run.callback_metrics["val_loss"].isfinite()


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3)


def test_embeddings_only():
    model = encoder().eval()
    predicted = model.predict_step(batch(9, 4), 0)
    assert predicted["embedding"].shape == (2, 16) and predicted["index"].tolist() == [0, 1]
    with pytest.raises(ValueError, match="makes embeddings only: give task and num_classes"):
        model.loss_terms(batch(9))


# -- what it refuses ---------------------------------------------------------------------------------------------------
def inputs(change=lambda f, c, n: (f, c, n)):
    return lambda: encoder()(*change(*slides(9, 5)))


def rows(**changes):
    data = {name: x for name, x in {**batch(9, 5), **changes}.items() if x is not None}
    return lambda: encoder(**TASK).loss_terms(data)


def build(**options):
    return lambda: SlideEncoder(**{**SIZES, **options})


REFUSED = {
    "coords of a slide outside": (inputs(lambda f, c, n: (f, c * 9, n)), ValueError, "cells along an axis"),
    "no coords": (inputs(lambda f, c, n: (f, None, n)), ValueError, r"coords must be a tensor .* got NoneType"),
    "coords of other tiles": (inputs(lambda f, c, n: (f, c[:, 1:], n)), ValueError, r"coords must be \(2, 9, 2\)"),
    "2-D features": (inputs(lambda f, c, n: (f[0], c, None)), ValueError, r"features must be a tensor .* got \(9, 12\)"),
    "other features": (inputs(lambda f, c, n: (f[..., :7], c, n)), ValueError, "the features are 7 wide.*feature_dim=12"),
    "integer features": (inputs(lambda f, c, n: (f.long(), c, n)), TypeError, "features must be floating"),
    "padding without lengths": (inputs(lambda f, c, n: (f, c, None)), ValueError, "negative for a tile, got -5"),
    "no tiles": (inputs(lambda f, c, n: (f[:, :0], c[:, :0], None)), ValueError, "at least one tile"),
    "no tile": (inputs(lambda f, c, n: (f, c, torch.tensor([9, 0]))), ValueError, r"lengths\[1\] is 0.*1 to 9"),
    "more than there are": (inputs(lambda f, c, n: (f, c, n + 1)), ValueError, r"lengths\[0\] is 10"),
    "float lengths": (inputs(lambda f, c, n: (f, c, n.float())), TypeError, "lengths must be integers"),
    "batch without coords": (rows(coords=None), ValueError, "no coords, which a slide encoder needs"),
    "no blank row": (rows(coords=batch(9, 5)["coords"].clamp(min=0)), ValueError, "carry one blank row in front"),
    "length of the blank row only": (rows(lengths=torch.tensor([10, 1])), ValueError, r"lengths\[1\] is 1; it counts"),
    "label of no class": (rows(label=torch.tensor([0, 2])), ValueError, r"labels must lie in 0 to 1 .*found 2"),
    "missing label": (rows(label=torch.tensor([0, -100])), ValueError, "found -100"),
    "float label": (rows(label=torch.tensor([0.0, 1.0])), TypeError, "labels of classes must be integers"),
    "segments twice": (build(max_wsi_size=262144), ValueError, "segment_lengths or max_wsi_size, not both"),
    "small slides": (build(max_wsi_size=1024, segment_lengths=None), ValueError, "has 4 tiles along an axis"),
    "heads": (build(num_heads=3), ValueError, "num_heads=3 must divide dim=16"),
    "dim": (build(dim=18, num_heads=2), ValueError, "multiple of 4"),
    "pool": (build(pool="max"), ValueError, "pool must be class or mean"),
    "padding": (build(padding="zero"), ValueError, "padding must be one of masked, attended"),
    "global and attended": (
        build(global_class_token=True, padding="attended"),
        ValueError,
        "global_class_token=True needs padding='masked'",
    ),
    "global and a pattern": (
        build(global_class_token=True, segment_lengths=None, dilation_rates=None, pattern={"branches": [[8, 1]]}),
        ValueError,
        "pattern takes the place of global_class_token",
    ),
    "global of another type": (build(global_class_token=1), TypeError, "global_class_token must be"),
    "drop_path": (build(drop_path=1.0), ValueError, "drop_path must be a number in"),
    "task": (build(task="cluster"), ValueError, "task must be one of classification, regression, ordinal, survival"),
    "no classes": (build(task="ordinal"), ValueError, "needs num_classes"),
    "classes of nothing": (build(num_classes=2), ValueError, "num_classes=2 needs a task"),
    "frozen without a head": (build(freeze_encoder=True), ValueError, "freeze_encoder needs a task"),
    "layer_decay": (build(layer_decay=1.5), ValueError, r"layer_decay must be a number in \(0, 1\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, error, says = REFUSED[name]
    with pytest.raises(error, match=says):
        call()


# -- what does not fit -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("change", [{"num_heads": 2}, {"tile_size": 512}, {"grid": 9}])
def test_a_checkpoint_of_other_settings_is_refused(tmp_path, change):
    run = trainer(max_steps=1)
    run.fit(
        encoder(**TASK).float(), loader({k: v.float() if v.is_floating_point() else v for k, v in batch(20).items()})
    )
    run.save_checkpoint(tmp_path / "it.ckpt")
    (name,) = change
    with pytest.raises(ValueError, match=f"was trained with {name}=.*Set the model's {name}"):
        SlideEncoder(**{**SIZES, **change}, **TASK, pretrained=str(tmp_path / "it.ckpt")).configure_model()


def test_data_that_does_not_fit_is_refused_before_training(tmp_path):
    write_synthetic_slides(tmp_path, slides=10, tiles=(5, 9), features=5, classes=3)
    data = SlideDataModule(str(tmp_path), str(tmp_path / "labels.csv"))
    fits = {**SIZES, "feature_dim": 5, "tile_size": 256, "task": "classification", "num_classes": 3}
    for name, value, there in (("num_classes", 2, "3"), ("feature_dim", 6, "5"), ("tile_size", 128, "256")):
        with pytest.raises(ValueError, match=f"{name}={value}.*set the model's {name} to {there}"):
            trainer(max_steps=1).fit(SlideEncoder(**{**fits, name: value}), data)


def test_loaded_encoders_train_in_training_mode():
    """from_gigapath returns a model in eval mode. A fit must not keep it, or dropout would be off."""
    model, modes = encoder(**TASK).float().eval(), []
    model.transformer.register_forward_pre_hook(lambda module, args: modes.append(module.training))
    trainer(max_steps=1).fit(
        model, loader({k: v.float() if v.is_floating_point() else v for k, v in batch(20).items()})
    )
    assert modes == [True]


RELEASED = {name: value for name, value in SIZES.items() if name not in ("segment_lengths", "dilation_rates")}


@pytest.mark.parametrize("theirs", [{}, {"max_wsi_size": 16384}, {"segment_lengths": [8, 16, 32, 64, 128]}])
@pytest.mark.parametrize("cls", [SlideEncoder, SlidePretrainer])
def test_a_checkpoint_of_another_pattern_is_said(tmp_path, theirs, cls):
    """A warning names both patterns, even the releases' pattern, which is not listed in a checkpoint's settings."""
    net = cls(**RELEASED, **theirs).float()
    net.configure_model()
    torch.save(
        {"state_dict": net.state_dict(), "hyper_parameters": dict(net.hparams), "pytorch-lightning_version": "2.6.6"},
        tmp_path / "it.ckpt",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SlideEncoder(**RELEASED, **theirs, pretrained=str(tmp_path / "it.ckpt")).configure_model()
    with pytest.warns(UserWarning, match="was trained with .* and this model attends by .*4096"):
        own = {"segment_lengths": [4096], "dilation_rates": [1]}
        SlideEncoder(**RELEASED, **own, pretrained=str(tmp_path / "it.ckpt")).configure_model()
