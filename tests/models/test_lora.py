"""LoRA trains only the updates and the head. Updates start at zero, and merging returns plain weights."""

import pytest
import torch
from torch import nn

from lightning_dilated import SlideEncoder
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.models.blocks import BlockOptions
from lightning_dilated.models.transformer import DilatedTransformer, step_flops
from lightning_dilated.pattern import DilatedPattern

from ..ext.slides.slides import SIZES, batch, encoder
from . import loader, trainer

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
    """A file with initial weights."""
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


class _Around(nn.Module):
    """Imitates peft's wrapper: a call of the layer adds to its weight, and other attributes are not forwarded."""

    def __init__(self, base_layer: nn.Module, name: str) -> None:
        super().__init__()
        self.base_layer, self.name = base_layer.requires_grad_(False), name
        self.lora = nn.Parameter(torch.randn_like(getattr(base_layer, name)) / 4)

    def forward(self, *args, **kwargs):
        attributes = {self.name: getattr(self.base_layer, self.name) + self.lora}
        return torch.func.functional_call(self.base_layer, attributes, args, kwargs)


def wrapped() -> DilatedTransformer:
    torch.manual_seed(0)
    options = BlockOptions(ffn="gelu", bias=True)
    stack = DilatedTransformer(
        16, [DilatedPattern.longnet([5, 12], [1, 3])] * 2, 4, causal=True, options=options
    ).double()
    for block in stack.blocks:
        block.attention.out_proj = _Around(block.attention.out_proj, "weight")
        block.attention, block.ffn.fc2 = _Around(block.attention, "in_proj_weight"), _Around(block.ffn.fc2, "weight")
    return stack


@pytest.mark.parametrize(
    "chosen",
    [MemorySettings("block"), MemorySettings("attention-kept", tile=5), MemorySettings("block", 2, 1, 5)],
    ids=str,
)
def test_memory_settings(chosen):
    stack, x, results = wrapped(), torch.randn(2, 23, 16, dtype=torch.float64), []
    trained = [p for p in stack.parameters() if p.requires_grad]
    for settings in (None, chosen):
        if settings is not None:
            stack.memory = settings
        out = stack(x)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), trained)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    assert step_flops(stack, 46, [23, 23]) > 0


def test_windows_of_heads_would_pass_the_updates_by():
    stack = wrapped()
    with pytest.raises(ValueError, match="head_chunks=2 is not offered with LoRA: _Around around the attention"):
        stack.memory = MemorySettings(head_chunks=2)
    stack = DilatedTransformer(16, [DilatedPattern.longnet([5], [1])], 4, causal=True)
    stack.memory = MemorySettings(head_chunks=2)
    stack.blocks[0].attention = _Around(stack.blocks[0].attention, "in_proj_weight")  # LoRA added after `memory`
    with pytest.raises(ValueError, match="head_chunks=2 is not offered with LoRA"):
        stack(torch.randn(1, 9, 16))
