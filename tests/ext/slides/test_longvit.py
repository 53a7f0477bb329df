"""LongViT: strips, batches of images of unlike size, settings and training; wrong images and batches are named."""

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_dilated import LongViT
from lightning_dilated.ext.slides.longvit import model as longvit
from lightning_dilated.models import image_patches

from .images import load, made, pixels, state


@pytest.mark.parametrize(
    "size, segments",
    [(1024, [64, 128, 256, 512, 1024]), (2048, [64, 128, 256, 512, 1024]), (8192, [1024, 4096, 8192, 16384, 65536])],
)
def test_segments_follow_the_size_of_images(size, segments):
    pattern = LongViT(image_size=size).pattern
    assert [b.segment_length for b in pattern.branches] == segments
    assert [b.dilation_rate for b in pattern.branches] == [1, 2, 4, 8, 16]
    assert (pattern.offsets, pattern.padding) == ("blocked", "masked")


@pytest.mark.parametrize("heights", [(4,) * 9, (16, 20), (36,)])
def test_strips_are_the_image(heights, monkeypatch):
    model, images = made(), pixels(2, 3, 36, 28)
    monkeypatch.setattr(longvit, "CHUNK", 1)
    with torch.no_grad():
        want, states = model(images), model.hidden_states(images)
        got = model(x for x in images.split(heights, 2))
    assert states.shape == (2, 63, 16)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(model.norm(states.mean(1)), want, rtol=0, atol=1e-12)


def test_a_large_image_is_copied_strip_by_strip(monkeypatch):
    sizes = []
    monkeypatch.setattr(longvit, "CHUNK", 16)
    monkeypatch.setattr(longvit, "image_patches", lambda x, p: sizes.append(x.shape[2:]) or image_patches(x, p))
    with torch.no_grad():
        made()(pixels(1, 3, 36, 28))
    assert sizes == [(8, 28)] * 4 + [(4, 28)]  # 2 rows of 7 patches: at most 16


WRONG_IMAGES = {
    "bytes": (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), TypeError, r"torch.uint8: scale them to \[0, 1\]"),
    "one image": (pixels(3, 8, 8), ValueError, r"images must be \(images, 3, height, width\), got \(3, 8, 8\)"),
    "channels last": (pixels(1, 8, 8, 3), ValueError, r"got \(1, 8, 8, 3\)"),
    "no whole patches": (pixels(1, 3, 9, 8), ValueError, "9 x 8 pixels is not made of whole patches of 4 x 4.*8 x 8"),
    "nothing": (iter([]), ValueError, "there is no image"),
    "no images": (pixels(0, 3, 8, 8), ValueError, "there is no image"),
    "strips of other images": (
        iter([pixels(1, 3, 4, 8), pixels(1, 3, 4, 12)]),
        ValueError,
        r"strips must be of the same images: .* of \[\(1, 2\), \(1, 3\)\]",
    ),
    "no tensors": (iter(["slide.png"]), ValueError, "got str"),
    "a list": (
        [pixels(1, 3, 8, 8)] * 2,
        TypeError,
        r"stacked \(B, C, H, W\); strips of the same images come from an iterator",
    ),
}


@pytest.mark.parametrize("name", WRONG_IMAGES)
def test_wrong_images(name):
    images, error, says = WRONG_IMAGES[name]
    with pytest.raises(error, match=says):
        made()(images)


WRONG_SETTINGS = {
    "patch": ({"patch_size": 5}, "patch_size=5 must divide image_size=32"),
    "norm": ({"norm_at": "token"}, "norm_at must be mean or patches"),
    "heads": ({"num_heads": 3}, "num_heads=3 must divide dim=16"),
    "rates": ({"dilation_rates": [1, 2]}, "segment_lengths"),
    "head": ({"num_classes": 3}, "num_classes=3 needs a task"),
}


@pytest.mark.parametrize("name", WRONG_SETTINGS)
def test_wrong_settings(name):
    options, says = WRONG_SETTINGS[name]
    with pytest.raises(ValueError, match=says):
        made(**options)


# -- batches -----------------------------------------------------------------------------------------------------------
def padded(*images):
    """The batch of images of unlike size."""
    found = [image_patches(x, 4) for x in images]
    patches = torch.nn.utils.rnn.pad_sequence([p[0] for p, _ in found], batch_first=True, padding_value=7.0)
    return {"patches": patches, "grid": torch.cat([g for _, g in found])}


@pytest.mark.parametrize("options", [{}, {"padding": "attended"}, {"norm_at": "patches"}], ids=str)
def test_a_batch_is_its_images(options):
    model = made(**options)
    images = [pixels(1, 3, 32, 32), pixels(1, 3, 12, 20), pixels(1, 3, 36, 28), pixels(1, 3, 32, 32) + 1]
    with torch.no_grad():
        want = torch.cat([model(x) for x in images])
        got = model.embed(padded(*images))
        one = model.embed({"image": images[0]})
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(one, want[:1], rtol=0, atol=1e-12)


WRONG_BATCHES = {
    "neither": ({"label": torch.ones(1)}, r"holds \['label'\], but a LongViT takes either `image`, or `patches`"),
    "no grid": ({"patches": torch.ones(1, 4, 48)}, "with `grid`"),
    "both": ({"image": 1, "patches": 1, "grid": 1}, "takes either"),
    "width": ({"patches": torch.ones(1, 4, 47), "grid": [[2, 2]]}, r"\(B, N, 48\)"),
    "grid's shape": ({"patches": torch.ones(1, 4, 48), "grid": [2, 2]}, r"integers \(1, 2\), rows and columns"),
    "too large": (
        {"patches": torch.ones(1, 4, 48), "grid": [[2, 3]]},
        r"4 rows an image, but the grids are \[\[2, 3\]\]",
    ),
    "pixels": ({"patches": torch.ones(1, 4, 48), "grid": [[8, 8]]}, "4 rows an image"),
    "patches left over": ({"patches": torch.ones(1, 4, 48), "grid": [[1, 3]]}, "4 rows an image"),
    "empty": ({"patches": torch.ones(2, 4, 48), "grid": [[2, 2], [0, 2]]}, "at least 1 x 1"),
}


@pytest.mark.parametrize("name", WRONG_BATCHES)
def test_wrong_batches(name):
    batch, says = WRONG_BATCHES[name]
    with pytest.raises(ValueError, match=says):
        made().embed(batch)


def test_fine_tuned_saved_and_loaded(tmp_path):
    """A release fine-tuned on images of another size; every part learns, and a checkpoint is the model."""
    model = load(
        tmp_path, state(), "ragged_stock", image_size=40, norm_at="mean", task="classification", num_classes=2,
        layer_decay=0.5, drop_path=0.0, optimizer=lambda groups: torch.optim.AdamW(groups, lr=0.01),
    )  # fmt: skip
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    images, label = pixels(4, 3, 40, 40).float(), torch.tensor([0, 1, 0, 1])
    data = DataLoader([{"image": x, "label": y} for x, y in zip(images, label, strict=True)], 2)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = pl.Trainer(max_epochs=3, default_root_dir=tmp_path, enable_checkpointing=False, **quiet)
    trainer.fit(model, data)
    stuck = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert stuck == [] and trainer.callback_metrics["train_loss"] < 0.5
    scales = {g["lr"] for g in trainer.optimizers[0].param_groups}
    assert scales == {0.01, 0.005, 0.0025, 0.00125} and model.layer_of("pos_embed") == 0
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    twin = LongViT.load_from_checkpoint(tmp_path / "it.ckpt", map_location="cpu").eval()
    with torch.no_grad():
        assert torch.equal(twin(images), model.cpu().eval()(images))


def test_grids_stay_on_the_cpu():
    batch = {"patches": torch.zeros(1, 4, 48), "grid": torch.tensor([[2, 2]])}
    moved = made().transfer_batch_to_device(batch, torch.device("meta"), 0)
    assert (moved["patches"].device.type, moved["grid"].device.type) == ("meta", "cpu")
