"""linear_dtype="float8": torchao's linear layers. A CPU imitates their rounding in float32, a GPU uses float8."""

import sys

import pytest
import torch

import lightning_dilated as ld
from lightning_dilated.ext.float8 import float8

pytest.importorskip("torchao")
PATTERN = ld.DilatedPattern([(16, 1), (64, 4)])


def trained(steps=20, width=32, device="cpu", **options):
    """Train a model on one text with AdamW. Return (model, losses)."""
    torch.manual_seed(0)
    model = ld.LongNetLM(PATTERN, 64, width, 2, 2, max_seq_len=64, **options)
    model.configure_model()
    model.to(device)
    text = (torch.arange(64) * 7 % 11).repeat(2, 1).to(device)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(steps):
        with torch.autocast(device, torch.bfloat16):
            total, count = model.loss_terms({"tokens": text, "labels": text.roll(-1, 1)})
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float((total / count).detach()))
    return model, losses


def test_it_learns_as_bf16_does():
    plain, want = trained()
    model, losses = trained(linear_dtype="float8")
    assert want[-1] < want[0] / 2 and losses != want
    assert max(abs(a - b) for a, b in zip(want, losses, strict=True)) < 0.1
    kinds = {type(m).__name__ for m in model.transformer.blocks.modules()}
    assert "Float8Linear" in kinds and "Linear" not in kinds and type(model.head).__name__ == "Linear"
    plain.load_state_dict(model.state_dict())  # names and shapes of the weights do not change
    assert "linear_dtype" not in model.hparams


def test_layers_of_odd_sizes_stay():
    model, _ = trained(1, width=40, linear_dtype="float8")
    assert not any(type(m).__name__ == "Float8Linear" for m in model.transformer.blocks.modules())


def test_recomputation_and_plans():
    model, _ = trained(1, linear_dtype="float8")
    model.transformer.memory = ld.memory.settings.MemorySettings("block", tile=16)
    text = torch.arange(64)[None]
    model.loss_terms({"tokens": text, "labels": text})[0].backward()
    assert model.planning_copy(1).linear_dtype is None


def test_refusals(monkeypatch):
    with pytest.raises(ValueError, match=r"linear_dtype must be .float8. or null, got 'int4'"):
        ld.LongNetLM(PATTERN, 64, 32, 1, 2, max_seq_len=64, linear_dtype="int4")
    with pytest.raises(ValueError, match="leave out lora_rank or linear_dtype"):
        ld.SlideEncoder(32, 32, 1, 2, task="classification", num_classes=2, lora_rank=2, linear_dtype="float8")
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
        with pytest.raises(ValueError, match=r"needs a GPU of compute capability 8.9 or more, and this one has 8.0"):
            float8.to_float8(torch.nn.Linear(16, 16))
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs torchao: pip install 'lightning-dilated\[eightbit\]'"):
        float8.to_float8(torch.nn.Linear(16, 16))


@pytest.mark.gpu
def test_on_a_gpu():
    if torch.cuda.get_device_capability() < float8.CAPABILITY:
        pytest.skip("needs compute capability 8.9")
    _, want = trained(30, 256, "cuda", compile_blocks=True)
    _, losses = trained(30, 256, "cuda", compile_blocks=True, linear_dtype="float8")
    assert max(abs(a - b) for a, b in zip(want, losses, strict=True)) < 0.1 and losses[-1] < losses[0] / 2
