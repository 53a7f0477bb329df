"""AttentionWriter: a file for each slide that predict meets, with the model's own map of it, and what it cannot do."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_dilated import LongNetClassifier
from lightning_dilated.callbacks import AttentionWriter
from lightning_dilated.data import SlideDataModule, heat_map, write_synthetic_slides

from ..models import PATTERN, loader, trainer
from ..models.slides import batch, encoder


@pytest.mark.parametrize("options", [{}, {"heads": "all", "layer": 0}], ids=["mean", "all heads"])
def test_the_maps_of_all_slides(tmp_path, capsys, options):
    write_synthetic_slides(tmp_path / "in", slides=5, tiles=(4, 20), features=12)
    data = SlideDataModule(str(tmp_path / "in"), val_fraction=0, test_fraction=1, batch_size=2, order="raster")
    model = encoder(dtype=torch.float32, grid=100).eval()
    trainer(callbacks=[AttentionWriter(**options)], default_root_dir=tmp_path).predict(model, data)
    assert f"attention: {tmp_path / 'attention'}" in capsys.readouterr().out
    assert sorted(x.name for x in (tmp_path / "attention").iterdir()) == [f"slide_{i:03}.npz" for i in range(5)]
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
