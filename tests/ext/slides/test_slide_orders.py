"""Tiles are in raster order for new models, and in the trained order for other models, in every kind of run."""

import numpy as np
import pytest
import torch

from lightning_dilated import SlideEncoder, SlidePretrainer
from lightning_dilated.data import SlideDataModule

from ...models import trainer
from .test_slides import grid, table, write

SIZES = {"feature_dim": 3, "dim": 16, "depth": 1, "num_heads": 4, "segment_lengths": [4, 16], "dilation_rates": [1, 2]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Six slides in which the tiles are not in raster order."""
    path = tmp_path_factory.mktemp("orders")
    for i in range(6):
        rng = np.random.default_rng(i)
        write(path / f"s{i}.h5", rng.random((20, 3), np.float32), grid(20)[rng.permutation(20)], patch_size_level0=256)
    table(path / "labels.csv", "slide_id,label", *(f"s{i},{i % 2}" for i in range(6)))
    return str(path)


def data(folder, **options) -> SlideDataModule:
    return SlideDataModule(folder, f"{folder}/labels.csv", **{"val_fraction": 0, "test_fraction": 0.34, **options})


def model(**options) -> SlideEncoder:
    return SlideEncoder(**SIZES, task="classification", num_classes=2, **options)


def served(module: SlideDataModule) -> str:
    coords = module.dataset("test")[0]["coords"][1:]
    raster = sorted(coords.tolist(), key=lambda x: (x[1], x[0]))
    return "raster" if coords.tolist() == raster else "file"


@pytest.fixture(scope="module")
def checkpoints(folder, tmp_path_factory):
    """{order: path}. "old" is a checkpoint with the file's order from a version without this setting."""
    paths, place = {}, tmp_path_factory.mktemp("checkpoints")
    for order in ("raster", "file"):
        run, paths[order] = trainer(max_steps=1), str(place / f"{order}.ckpt")
        run.fit(model(), data(folder, order=order))
        run.save_checkpoint(paths[order])
    old = torch.load(paths["file"], weights_only=True)
    del old["tile_order"], old["SlideDataModule"]["order"], old["SlideDataModule"]["train"]["balanced"]
    paths["old"] = str(place / "old.ckpt")
    torch.save(old, paths["old"])
    return paths


def test_new_ones_are_raster(folder):
    assert data(folder).order == served(data(folder)) == "raster"
    assert data(folder, order="file").order == served(data(folder, order="file")) == "file"
    assert data(folder, coords_name=None).order == "file"


@pytest.mark.parametrize("name, want", [("raster", "raster"), ("file", "file"), ("old", "file")])
@pytest.mark.parametrize("way", ["tested by path", "loaded", "resumed", "from the hub's folder"])
def test_trained_ones_keep_theirs(folder, checkpoints, tmp_path, name, want, way, recwarn):
    module, path = data(folder), checkpoints[name]
    if way == "tested by path":
        trainer().test(model(), module, ckpt_path=path, verbose=False, weights_only=True)
    elif way == "resumed":
        trainer(max_steps=2).fit(model(), module, ckpt_path=path, weights_only=True)
        assert module.train_dataloader().dataset.order == want
    else:
        loaded = SlideEncoder.load_from_checkpoint(path, weights_only=True)
        if way != "loaded":
            pytest.importorskip("safetensors")
            loaded = SlideEncoder.from_pretrained(loaded.save_pretrained(tmp_path))
        trainer().predict(loaded, module)
    assert served(module) == want
    assert not [w for w in recwarn.list if "data.order" in str(w.message)]


def test_another_order_that_is_asked_for_says_so(folder, checkpoints):
    module = data(folder, order="raster")
    with pytest.warns(UserWarning, match=r"trained with data\.order 'file', but data\.order is 'raster' now"):
        trainer().test(model(), module, ckpt_path=checkpoints["old"], verbose=False, weights_only=True)
    assert served(module) == "raster"


def test_a_new_fit_of_a_trained_model_is_new(folder, checkpoints):
    loaded, module = SlideEncoder.load_from_checkpoint(checkpoints["file"], weights_only=True), data(folder)
    trainer().predict(loaded, module)
    assert served(module) == "file"
    trainer(max_steps=1).fit(loaded, module)
    assert served(module) == loaded.tile_order == "raster"


def test_pretraining_goes_on_in_its_order(folder, tmp_path):
    sizes = {**SIZES, "decoder_dim": 16, "decoder_depth": 1}
    run = trainer(max_steps=1)
    run.fit(SlidePretrainer(**sizes), SlideDataModule(folder, order="file", val_fraction=0, test_fraction=0))
    run.save_checkpoint(tmp_path / "x.ckpt")
    module = SlideDataModule(folder, val_fraction=0, test_fraction=0)
    trainer(max_steps=2).fit(SlidePretrainer(**sizes), module, ckpt_path=tmp_path / "x.ckpt", weights_only=True)
    assert module.order == "file"


# -- classes of the model ------------------------------------------------------------------------------------------------
def test_a_cohort_of_one_class_takes_the_models(folder, tmp_path):
    for i, words in enumerate((["tumor"], ["tumor", "normal"])):
        lines = [f"s{j},{words[j % len(words)]}" for j in range(6)]
        table(tmp_path / f"{i}.csv", "slide_id,label", *lines)
    net = model()
    trainer(max_steps=1).fit(net, SlideDataModule(folder, str(tmp_path / "1.csv"), val_fraction=0, test_fraction=0))
    assert net.classes == ["normal", "tumor"]
    cohort = SlideDataModule(folder, str(tmp_path / "0.csv"), val_fraction=0, test_fraction=1)
    with pytest.warns(UserWarning, match="one class only: 6 of 'tumor'"):
        trainer().test(net, cohort, verbose=False)
    assert cohort.classes == ["normal", "tumor"] and set(cohort.inventory.labels) == {1}
    other = SlideDataModule(folder, f"{folder}/labels.csv", val_fraction=0, test_fraction=1)
    with pytest.raises(ValueError, match=r"line 2: the label '0' is none of the classes .* trained on, \['normal'"):
        trainer().test(net, other, verbose=False)


def test_numbers_are_the_models_however_they_are_written(folder, tmp_path):
    path = table(tmp_path / "l.csv", "slide_id,label", *(f"s{i},{i % 2}.0" for i in range(6)))
    module = SlideDataModule(folder, path, val_fraction=0, test_fraction=1, classes=["1", "0"])
    assert [module.dataset("test")[i]["label"] for i in range(6)] == [1, 0] * 3
