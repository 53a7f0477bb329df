"""LoRA: only updates and head are trained, they begin at nothing, and merged they are plain weights again."""

import pytest
import torch

from lightning_dilated import SlideEncoder

from . import loader, trainer
from .slides import SIZES, batch, encoder

TASK = {"task": "classification", "num_classes": 2}


@pytest.mark.parametrize("name, options, says", [
    ("no task", {}, "lora_rank needs a task"),
    ("frozen", {**TASK, "freeze_encoder": True}, "freeze_encoder=False"),
    ("compiled", {**TASK, "compile_blocks": True}, "set compile_blocks=False"),
    ("rank", {**TASK, "lora_rank": 0}, "lora_rank must be at least 1"),
])  # fmt: skip
def test_refused(name, options, says):
    with pytest.raises(ValueError, match=says):
        SlideEncoder(**{**SIZES, "lora_rank": 2, **options})


def test_without_peft(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-dilated\[lora\]'"):
        SlideEncoder(**SIZES, **TASK, lora_rank=2).configure_model()


@pytest.fixture
def start(tmp_path):
    """A file of weights to begin from."""
    pytest.importorskip("peft")
    torch.save(encoder(dtype=torch.float32).released_state_dict(), tmp_path / "x.pth")
    return str(tmp_path / "x.pth")


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_trains_updates_only(start, tmp_path, recompute):
    plain, model = (SlideEncoder(**SIZES, **TASK, pretrained=start, **o) for o in ({}, {"lora_rank": 2}))
    plain.configure_model(), model.configure_model()
    data = {**batch(20, 9), "features": batch(20, 9)["features"].float()}
    assert torch.equal(model.eval().embed(data), plain.eval().embed(data))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for block in model.transformer.blocks:
        block.recompute = recompute
    run = trainer(max_steps=3)
    run.fit(model.train(), loader(*[data] * 3))
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert (
        moved == {name for name in before if ".lora_" in name or name.startswith("head.")} and len(moved) == 2 + 2 * 8
    )
    run.save_checkpoint(tmp_path / "x.ckpt")
    twin = SlideEncoder.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True).eval()
    want = model.eval().embed(data)
    assert torch.equal(twin.embed(data), want) and not torch.equal(want, plain.embed(data))
    with pytest.raises(ValueError, match=r"call merge_lora\(\) first"):
        twin.released_state_dict()
    twin.merge_lora()
    assert {n for n, _ in twin.named_parameters()} == {n for n, _ in plain.named_parameters()}
    torch.testing.assert_close(twin.embed(data), want, rtol=1e-5, atol=1e-5)
    torch.save(twin.released_state_dict(), tmp_path / "merged.pth")
    again = SlideEncoder(**SIZES, pretrained=str(tmp_path / "merged.pth")).eval()
    again.configure_model()
    assert torch.equal(again.embed(data), twin.embed(data))
