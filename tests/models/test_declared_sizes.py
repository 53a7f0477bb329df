"""Sizes in a file are compared with its tensors before a layer is created. Without tensors, sizes are limited."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lightning_dilated import DilatedModule, DilatedPattern, LongNetLM, Window
from lightning_dilated.cli.load_model import load_module
from lightning_dilated.models.pretrained import CONFIG, WEIGHTS

SIZES = {"dim": 16, "depth": 2, "num_heads": 2}


def model() -> LongNetLM:
    return LongNetLM(DilatedPattern.longnet([8], [1]), vocab_size=32, **SIZES)


@pytest.fixture(autouse=True)
def no_large_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise if a tensor of more than a megabyte is allocated."""
    empty = torch.empty
    # torch caches a list of functions that device contexts change, and it must list the original `empty`
    with torch.device("meta"):
        torch.empty(0)

    def small(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = empty(*args, **kwargs)
        assert out.is_meta or out.nbytes < 1 << 20, out.shape
        return out

    monkeypatch.setattr(torch, "empty", small)


def folder_of(tmp_path: Path, **changes: Any) -> Path:
    path = model().save_pretrained(tmp_path / "folder")
    config = json.loads((path / CONFIG).read_text())
    config["init_args"] |= changes
    (path / CONFIG).write_text(json.dumps(config))
    return path


def checkpoint_of(trained: DilatedModule, path: Path, **changes: Any) -> Path:
    hparams = {**copy.deepcopy(dict(trained.hparams)), **changes}
    stored = {"state_dict": trained.state_dict(), "hyper_parameters": hparams}
    torch.save({**stored, "pytorch-lightning_version": pl.__version__}, path)
    return path


DECLARED = {
    "depth": ({"depth": 9_000}, r"depth=9,000, but there are \d+ tensors"),
    "a layer more": ({"depth": 3}, "blocks.2"),
    "a layer less": ({"depth": 1}, "blocks.1"),
    "width": ({"dim": 1 << 19}, "size mismatch|large"),
    "ffn": ({"ffn_dim": 1 << 22}, "size mismatch"),
    "vocabulary": ({"vocab_size": 1 << 30}, "size mismatch"),
    "convolution": ({"kv_conv": 4}, "kv_conv|conv"),
    "too deep": ({"depth": 10**8}, "depth must be at most 10,000, got 100,000,000"),
    "too wide": ({"dim": 1 << 30}, r"dim must be at most 1,048,576"),
    "heads": ({"num_heads": 1 << 19, "dim": 1 << 19}, "num_heads must be at most 65,536"),
    "windows": (
        {"pattern": {"branches": [{"width": 8, "dilation_rate": 1024}] * 3000}},
        "has 3,072,000 branches.* at most 1,024",
    ),
    "branches": ({"pattern": {"branches": [[8, 1]] * 2000}}, "has 2,000 branches.* at most 1,024"),
    "a rate": ({"pattern": {"branches": [{"width": 8, "dilation_rate": 10**12}]}}, "at most 1024"),
}


@pytest.mark.parametrize("name", DECLARED)
@pytest.mark.parametrize("form", ["folder", "ckpt", "command"])
def test_sizes_that_are_not_those_of_the_tensors(name: str, form: str, tmp_path: Path) -> None:
    changes, message = DECLARED[name]
    begin = time.perf_counter()
    with pytest.raises((ValueError, RuntimeError, TypeError), match=message):
        if form == "folder":
            DilatedModule.from_pretrained(folder_of(tmp_path, **changes))
        elif form == "ckpt":
            LongNetLM.load_from_checkpoint(checkpoint_of(model(), tmp_path / "it.ckpt", **changes), weights_only=True)
        else:
            load_module(
                checkpoint_of(model(), tmp_path / "it.ckpt", _class_path="lightning_dilated.LongNetLM", **changes)
            )
    assert time.perf_counter() - begin < 20


def test_windows_of_one_residue_are_compared_quickly() -> None:
    begin = time.perf_counter()
    pattern = DilatedPattern([Window(8, dilation_rate=1024, offset=0)] * 500)
    assert len(pattern.branches) == 500 and time.perf_counter() - begin < 5


def test_a_file_without_tensors(tmp_path: Path) -> None:
    path = folder_of(tmp_path, dim=4096, num_heads=2)
    save_file({}, path / WEIGHTS)
    with pytest.raises(ValueError, match=r"depth=2, but there are 0 tensors"):
        DilatedModule.from_pretrained(path)
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, path / WEIGHTS)
    with pytest.raises(ValueError, match="missing: "):
        DilatedModule.from_pretrained(path)


@pytest.mark.parametrize("depth", [10_001, 10**8])
def test_a_model_without_a_file_is_bounded(depth: int) -> None:
    with pytest.raises(ValueError, match="depth must be at most 10,000"):
        LongNetLM({"hybrid": {}}, dim=16, depth=depth, num_heads=2)
    with pytest.raises(ValueError, match="depth must be at most 10,000"):
        DilatedPattern.hybrid(depth, 2)


def test_a_part_of_the_tensors_is_loaded(tmp_path: Path) -> None:
    weight = torch.ones(32, 16)
    unbuilt = model()
    unbuilt.load_state_dict({"embedding.weight": weight}, strict=False)
    assert torch.equal(unbuilt.state_dict()["embedding.weight"], weight)
    path = checkpoint_of(model(), tmp_path / "it.ckpt")
    stored = torch.load(path, weights_only=True)
    stored["state_dict"] = {"embedding.weight": weight}
    torch.save(stored, path)
    loaded = LongNetLM.load_from_checkpoint(path, strict=False, weights_only=True)
    assert torch.equal(loaded.embedding.weight, weight)
    with pytest.raises(ValueError, match="depth=2, but there are 1 tensors"):
        LongNetLM.load_from_checkpoint(path, weights_only=True)
    with pytest.raises(RuntimeError, match="size mismatch"):
        LongNetLM.load_from_checkpoint(path, strict=False, weights_only=True, vocab_size=1 << 30)


class ReadsValues(LongNetLM):
    """A model in which `build` reads values of tensors."""

    def build(self) -> None:
        super().build()
        self.rates = [x.item() for x in torch.linspace(0, 0.1, self.depth)]
        self.more = torch.linspace(0, 0.1, self.depth).numpy().tolist() + torch.ones(2).tolist()


class Grows(LongNetLM):
    """Adds rows to the embedding of a checkpoint when it is loaded."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        state = dict(checkpoint["state_dict"])
        for name in [x for x, value in state.items() if value.ndim == 2 and value.shape[0] == 32 and "blocks" not in x]:
            state[name] = torch.cat([state[name], torch.zeros(self.vocab_size - 32, state[name].shape[1])])
        checkpoint["state_dict"] = state


class Shares(DilatedModule):
    """Uses one layer at every depth."""

    def __init__(self, depth: int = 24, dim: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.depth, self.dim = depth, dim

    def build(self) -> None:
        self.layer = nn.Linear(self.dim, self.dim)


def test_a_build_that_reads_values_loads(tmp_path: Path) -> None:
    first = ReadsValues(DilatedPattern.longnet([8], [1]), vocab_size=32, **SIZES)
    for second in (
        ReadsValues.load_from_checkpoint(checkpoint_of(first, tmp_path / "a.ckpt"), weights_only=True),
        ReadsValues.from_pretrained(first.save_pretrained(tmp_path / "folder")),
    ):
        assert second.rates == first.rates and torch.equal(second.embedding.weight, first.embedding.weight)
    with pytest.raises(RuntimeError, match="size mismatch"):
        ReadsValues.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True, vocab_size=64)
    save_file({"a": torch.ones(1)}, tmp_path / "folder" / WEIGHTS)
    with pytest.raises(ValueError, match="missing: "):
        ReadsValues.from_pretrained(tmp_path / "folder")


def test_a_hook_replaces_the_tensors(tmp_path: Path) -> None:
    first = Grows(DilatedPattern.longnet([8], [1]), vocab_size=32, **SIZES)
    path = checkpoint_of(first, tmp_path / "a.ckpt")
    second = Grows.load_from_checkpoint(path, weights_only=True, vocab_size=40)
    assert second.embedding.weight.shape[0] == 40
    assert torch.equal(second.embedding.weight[:32], first.embedding.weight)


def test_layers_may_be_one(tmp_path: Path) -> None:
    first = Shares()
    path = checkpoint_of(first, tmp_path / "a.ckpt")
    assert torch.equal(Shares.load_from_checkpoint(path, weights_only=True).layer.weight, first.layer.weight)
    second = Shares.from_pretrained(first.save_pretrained(tmp_path / "folder"))
    assert torch.equal(second.layer.weight, first.layer.weight)
    with pytest.raises(RuntimeError, match="size mismatch"):
        Shares.load_from_checkpoint(path, weights_only=True, dim=1 << 19)
