"""SlidePretrainer: a counter determines the tiles that the model cannot see; it learns, and exports its encoder."""

import functools

import pytest
import torch

from lightning_dilated import SlideEncoder, SlidePretrainer

from ...models import loader, trainer
from .slides import SIZES, batch, encoder

SMALL = {"decoder_dim": 8, "decoder_depth": 2}


def pretrainer(**options):
    return encoder(SlidePretrainer, **{**SMALL, **options})


def test_what_is_hidden():
    model, index, positions = pretrainer(mask_ratio=0.75), torch.arange(4), torch.arange(5001)
    lengths = torch.tensor([5001, 5001, 5001, 3000])
    got = model.hidden_tiles(index, positions, lengths)
    assert not got[:, 0].any() and not got[3, 3000:].any()  # neither the class token nor padding is hidden
    assert got[:3, 1:].double().mean(1).tolist() == pytest.approx([0.75] * 3, abs=0.02)
    assert torch.equal(got[1:, 7:90], model.hidden_tiles(index[1:], positions[7:90], lengths[1:]))  # again
    assert not torch.equal(got[0], got[1])
    other_masks = (
        pretrainer(mask_seed=1).hidden_tiles(index, positions, lengths),
        model.eval().hidden_tiles(index, positions, lengths),
    )
    assert not any(torch.equal(got, x) for x in other_masks)


@pytest.mark.parametrize("normalise", [False, True])
def test_loss_is_its_formula(normalise):
    model, data = pretrainer(normalise=normalise), batch(30, 14)
    total, count = model.loss_terms(data)
    hidden = model.hidden_tiles(data["index"], torch.arange(31), data["lengths"])
    got, target = model.reconstruct(data)
    want = data["features"][hidden]
    if normalise:
        want = (want - want.mean(1, keepdim=True)) / (want.var(1, unbiased=False, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(target, want)
    torch.testing.assert_close(total, ((got - want) ** 2).mean(1).sum())
    assert count == hidden.sum() and 20 < count < 44


def test_hidden_features_are_not_seen():
    model, data = pretrainer(), batch(30, 14)
    hidden = model.hidden_tiles(data["index"], torch.arange(31), data["lengths"])
    want = model.reconstruct(data)[0]
    shown = {**data, "features": data["features"].clone()}
    shown["features"][hidden] += 5.0
    assert torch.equal(model.reconstruct(shown)[0], want)
    shown["features"][0, 1:][~hidden[0, 1:]] += 5.0
    assert not torch.allclose(model.reconstruct(shown)[0], want)


def test_ragged_batch_equals_slides_alone():
    model, data = pretrainer(), batch(30, 14, 1)
    total, count = model.loss_terms(data)
    parts = []
    for i, n in enumerate(data["lengths"]):
        parts.append(model.loss_terms({k: v[i : i + 1, :n] if v.ndim == 3 else v[i : i + 1] for k, v in data.items()}))
    torch.testing.assert_close(total, sum(t for t, _ in parts))
    assert count == sum(c for _, c in parts)


def test_every_parameter_learns():
    model = pretrainer(drop_path=0.3)
    grads = torch.autograd.grad(model.loss_terms(batch(30, 14))[0], list(model.parameters()))
    still = [n for (n, _), g in zip(model.named_parameters(), grads, strict=True) if not g.any()]
    assert still == []


def smooth(seed):
    """Return slides with features that are a function of the cell, so hidden features can be predicted."""
    data = batch(40, 30, seed=seed)
    cells = (data["coords"] // 256).float()
    data["features"] = torch.cat([(cells @ torch.randn(2, 12, generator=torch.Generator().manual_seed(3))).sin()], -1)
    return {**data, "index": data["index"] + 2 * seed}


@pytest.mark.full
def test_trains_and_hands_its_encoder_on(tmp_path):
    torch.manual_seed(0)
    make = functools.partial(torch.optim.AdamW, lr=1e-2)
    model = SlidePretrainer(**SIZES, **SMALL, normalise=False, optimizer=make)
    data = [smooth(s) for s in range(4)]
    run = trainer(max_epochs=15)
    first = run.validate(model, loader(*data), verbose=False)[0]["val_loss"]
    run.fit(model, loader(*data), loader(*data))
    assert run.callback_metrics["val_loss"] < 0.7 * first
    run.save_checkpoint(tmp_path / "x.ckpt")
    twin = SlideEncoder.from_pretrained_mae(tmp_path / "x.ckpt", task="classification", num_classes=2)
    for name, p in model.named_parameters():
        if not name.startswith(("decoder", "mask_token")):
            assert torch.equal(dict(twin.named_parameters())[name], p), name
    assert twin.pattern == model.pattern and twin.grid == model.grid and not twin.training
    torch.save(twin.state_dict(), tmp_path / "bare.pth")
    with pytest.raises(ValueError, match="is not a Lightning checkpoint"):
        SlideEncoder.from_pretrained_mae(tmp_path / "bare.pth")


def test_a_resumed_run_hides_what_an_unbroken_one_hides(tmp_path, monkeypatch):
    """A resumed run hides the same tiles, even if it resumes in mid-epoch, where Lightning's epoch counter is wrong."""
    hidden_masks, real = [], SlidePretrainer.hidden_tiles

    def watched(self, index, positions, lengths):
        chosen = real(self, index, positions, lengths)
        hidden_masks.append((self.trainer.global_step, chosen))
        return chosen

    monkeypatch.setattr(SlidePretrainer, "hidden_tiles", watched)
    data = [smooth(s) for s in range(4)]
    make = lambda: SlidePretrainer(**SIZES, **SMALL)  # noqa: E731
    broken = trainer(max_steps=3)
    broken.fit(make(), loader(*data))
    broken.save_checkpoint(tmp_path / "x.ckpt")
    hidden_masks.clear()
    trainer(max_steps=8).fit(make(), loader(*data), ckpt_path=tmp_path / "x.ckpt")
    assert [step for step, _ in hidden_masks] == [3, 4, 5, 6, 7]
    # step and slide determine the hidden tiles, so the order of the loader does not matter
    model = make().train()
    for step, tile_mask in hidden_masks:
        monkeypatch.setattr(model, "_trainer", type("At", (), {"global_step": step})())
        lengths, positions = data[0]["lengths"], torch.arange(data[0]["features"].shape[1])
        assert any(torch.equal(real(model, x["index"], positions, lengths), tile_mask) for x in data), step


REFUSED = {
    "mask_ratio": (lambda: SlidePretrainer(mask_ratio=1.0), "mask_ratio must be a number in"),
    "decoder_dim": (lambda: SlidePretrainer(decoder_dim=100), "num_heads=16 must divide decoder_dim=100"),
    "no index": (
        lambda: pretrainer().loss_terms({k: v for k, v in batch(9).items() if k != "index"}), "but no index"
    ),
    "float index": (
        lambda: pretrainer().loss_terms({**batch(9), "index": batch(9)["index"].double()}), "index must hold integers"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, says = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=says):
        call()


def test_weights_begin_by_the_width_they_are_of():
    torch.manual_seed(0)
    net = SlidePretrainer(
        feature_dim=32, dim=128, depth=1, num_heads=4, decoder_dim=32, decoder_depth=2,
        segment_lengths=[16], dilation_rates=[1],
    )  # fmt: skip
    net.configure_model()
    for name, dim in (("transformer.blocks.0.ffn.fc1.weight", 128), ("decoder.blocks.0.ffn.fc1.weight", 32)):
        assert net.get_parameter(name).std().item() == pytest.approx((2 / (5 * dim)) ** 0.5, rel=0.05), name
