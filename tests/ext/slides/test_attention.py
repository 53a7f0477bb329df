"""AttentionWriter writes a file per predicted slide, with the model's attention map of the slide, and its errors."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_dilated import LongNetClassifier
from lightning_dilated.callbacks import AttentionWriter
from lightning_dilated.data import SlideDataModule, heat_map, write_heat_map, write_synthetic_slides

from ...models import PATTERN, loader, trainer
from .slides import batch, encoder
from .test_slides import table


@pytest.mark.parametrize("options", [{}, {"heads": "all", "layer": 0}], ids=["mean", "all heads"])
def test_the_maps_of_all_slides(tmp_path, capsys, options):
    write_synthetic_slides(tmp_path / "in", slides=5, tiles=(4, 20), features=12)
    data = SlideDataModule(str(tmp_path / "in"), val_fraction=0, test_fraction=1, batch_size=2, order="raster")
    model = encoder(dtype=torch.float32, grid=100).eval()
    trainer(callbacks=[AttentionWriter(**options)], default_root_dir=tmp_path).predict(model, data)
    assert f"attention: {tmp_path / 'attention'}" in capsys.readouterr().out
    names = [f"slide_{i:03}.{ending}" for i in range(5) for ending in ("npz", "png")]
    assert sorted(x.name for x in (tmp_path / "attention").iterdir()) == names
    for sample in (data.dataset("test")[i] for i in range(5)):
        with np.load(tmp_path / "attention" / f"{sample['slide_id']}.npz") as file:
            attention, coords = file["attention"], file["coords"]
        assert np.array_equal(coords, sample["coords"][1:].numpy())
        want = model.attention_map(sample["features"][None, 1:], sample["coords"][None, 1:], **options)[0]
        np.testing.assert_allclose(attention, want.T.numpy() if options else want.numpy(), rtol=1e-4, atol=1e-7)
        heat_map(attention[:, 0] if options else attention, coords, data.tile_size)


def test_without_lengths_and_into_a_folder_of_ones_own(tmp_path):
    model, data = encoder(), batch(9)
    del data["lengths"]
    writer = AttentionWriter(path=str(tmp_path / "a" / "b"))
    trainer(callbacks=[writer]).predict(model, loader({**data, "slide_id": ["x.1"]}))
    with np.load(tmp_path / "a" / "b" / "x.1.npz") as file:
        assert file["attention"].shape == (9,) and file["coords"].shape == (9, 2)


# -- pictures ------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def slides(tmp_path_factory):
    """Three slides. Two have a thumbnail of the slide's proportions, one with TRIDENT's file name, one with another."""
    path = tmp_path_factory.mktemp("pictures")
    write_synthetic_slides(path / "in", slides=3, tiles=(8, 20), features=12)
    (path / "thumbs").mkdir()
    for slide, name in zip(data(path).dataset("test").slides, ("slide_000.jpg", "slide_001.svs.png"), strict=False):
        size = tuple(round(x / 16) for x in slide.extent)
        Image.new("RGB", size, (10, 200, 30)).save(path / "thumbs" / name)
    return path


def data(path, **options):
    return SlideDataModule(str(path / "in"), **{"val_fraction": 0, "test_fraction": 1, **options})


def draw(path, out, module=None, **options):
    model = encoder(dtype=torch.float32, grid=100).eval()
    writer = AttentionWriter(path=str(out), **options)
    trainer(callbacks=[writer]).predict(model, data(path) if module is None else module)


def test_pictures_on_thumbnails(slides, tmp_path):
    with pytest.warns(UserWarning, match=r"1 of 3 slides have no thumbnail in .*white background: slide_002"):
        draw(slides, tmp_path, thumbnails=str(slides / "thumbs"), heads="all")
    for slide in data(slides).dataset("test").slides:
        with np.load(tmp_path / f"{slide.name}.npz") as file:
            values, coords = file["attention"].mean(1), file["coords"]
        options = {"thumbnail": next((slides / "thumbs").glob(f"{slide.name}*"), None), "slide_size": slide.extent}
        write_heat_map(tmp_path / "want.png", values, coords, **options)
        picture, want = (np.array(Image.open(tmp_path / x)) for x in (f"{slide.name}.png", "want.png"))
        assert np.array_equal(picture, want)
        if options["thumbnail"]:
            assert picture.shape[:2] == tuple(round(x / 16) for x in slide.extent[::-1])


def test_one_thumbnail_for_one_slide_and_no_pictures(slides, tmp_path):
    one = SlideDataModule(str(slides / "in" / "slide_000.h5"), val_fraction=0, test_fraction=1)
    draw(slides, tmp_path, one, thumbnails=str(slides / "thumbs" / "slide_000.jpg"))
    assert (tmp_path / "slide_000.png").is_file()
    draw(slides, tmp_path / "none", one, pictures=False)
    assert [x.name for x in (tmp_path / "none").iterdir()] == ["slide_000.npz"]


def test_thumbnails_that_cannot_be_used(slides, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"thumbnails .*none: no such file or folder"):
        draw(slides, tmp_path / "a", thumbnails=str(slides / "none"))
    with pytest.raises(ValueError, match=r"is one file, but 3 slides are predicted"):
        draw(slides, tmp_path / "a", thumbnails=str(slides / "thumbs" / "slide_000.jpg"))
    with pytest.raises(ValueError, match="set pictures to True"):
        AttentionWriter(pictures=False, thumbnails="x")
    write_synthetic_slides(tmp_path / "in", slides=1, tiles=(8, 8), features=12, kind="pt")
    Image.new("RGB", (9, 9)).save(tmp_path / "slide_000.png")
    with pytest.raises(ValueError, match=r"which the files of 1 slides do not state .* the first slide_000"):
        draw(tmp_path, tmp_path / "a", thumbnails=str(tmp_path))
    lines = [f"slide_{i:03},p" for i in range(3)]
    path = table(tmp_path / "l.csv", "slide_id,patient", *lines)
    merged = data(slides, labels_csv=path, labels="none", group_column="patient", merge_groups=True)
    with pytest.raises(ValueError, match="these are samples of several slides: leave thumbnails out"):
        draw(slides, tmp_path / "a", merged, thumbnails=str(slides / "thumbs"))
    assert not (tmp_path / "a").exists()
    draw(slides, tmp_path / "a", merged)
    assert (tmp_path / "a" / "p.png").is_file()


@pytest.mark.parametrize("change, says", [({}, "slide_id.*got None"), ({"slide_id": ["a/b"]}, "without folders; got")])
def test_names_it_cannot_use(tmp_path, change, says):
    with pytest.raises(ValueError, match=says):
        writer = AttentionWriter(path=str(tmp_path / "a"))
        trainer(callbacks=[writer]).predict(encoder(), loader({**batch(9), **change}))
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("options, error, says", [
    ({"layer": "all"}, TypeError, "layer must be an integer, got 'all'"),
    ({"layer": True}, TypeError, "got the bool True"),
    ({"heads": 3}, ValueError, "heads must be one of mean, all; got 3"),
])  # fmt: skip
def test_arguments(options, error, says):
    with pytest.raises(error, match=says):
        AttentionWriter(**options)


RUNS = {
    "another model": (lambda: LongNetClassifier(PATTERN, feature_dim=3, num_classes=2), {}, TypeError, "LongNetClass"),
    "layer": (encoder, {}, ValueError, "layer=5, but the model has 2 layers"),
    "shared": (encoder, {"sequence": SimpleNamespace(ranks=3)}, ValueError, "3 ranks share each slide"),
    "dealt": (encoder, {"shards_parameters": True}, ValueError, "ranks shard the model's parameters: predict with"),
}


@pytest.mark.parametrize("name", RUNS)
def test_refused_before_predicting(name):
    model, strategy, error, says = RUNS[name]
    run = SimpleNamespace(strategy=SimpleNamespace(**strategy), log_dir=None, default_root_dir=".")
    with pytest.raises(error, match=says):
        AttentionWriter(layer=5 if name == "layer" else -1).on_predict_start(run, model())
