"""The loss of all tokens: summed in tiles, with the gradients computed in the same pass."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_dilated import LongNetLM, LongNetMLM
from lightning_dilated.memory import chunked_loss
from lightning_dilated.memory.chunked_loss import loss_tile, tiled_sum
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.models.longnet import lm as longnet_lm

from . import SIZES, batch, tiny
from .test_memory_settings import PATTERN, Largest, same


def test_tiles_of_wide_vocabularies_are_shorter(monkeypatch):
    assert [loss_tile(x, 256) for x in (None, 1, 32768)] == [None, 1, 32768]
    assert [loss_tile(x, 128256) for x in (None, 100, 32768)] == [None, 100, 4185]
    assert loss_tile(32768, 2**21) == 1024
    monkeypatch.setattr(chunked_loss, "MOST", 2**14)
    monkeypatch.setattr(chunked_loss, "LEAST", 8)
    model, data = tiny(vocab_size=1024, dim=8), batch(1, 100, vocab_size=1024)
    for kind in (model, LongNetMLM(PATTERN, mask_fraction=0.9, **{**SIZES, "vocab_size": 1024, "dim": 8})):
        kind.configure_model()
        kind.transformer.memory = MemorySettings(tile=50)
        with Largest() as largest:
            kind.loss_terms({**data, "index": torch.zeros(1, dtype=torch.int64)})[0].backward()
        assert largest.most == 16 * 1024


def sums(model, data, memory):
    """Return [mean loss, gradients of all trained parameters]."""
    model.transformer.memory = memory
    total, count = model.loss_terms(data)
    return [
        total.detach() / count,
        *torch.autograd.grad(total / count, [p for p in model.parameters() if p.requires_grad]),
    ]


OPTIONS = {"tied": {}, "untied, layernorm": {"tie_embeddings": False, "norm": "layernorm", "bias": True}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("frozen", [None, "transformer.norm", "head", "transformer.blocks"])
@pytest.mark.parametrize("tile", [7, 1, 64])
def test_gradients_that_are_made_with_the_sum(options, frozen, tile):
    model, data = tiny(PATTERN, **options), batch(2, 23)
    data["labels"][:, 3:9] = -100
    if frozen:
        model.get_submodule(frozen).requires_grad_(False)
    same(sums(model, data, MemorySettings(tile=tile)), sums(model, data, MemorySettings()))


def test_each_tile_runs_once_and_a_graph_that_is_kept_gives_the_same_again():
    layer, calls = nn.Linear(4, 1), []

    def run(x):
        calls.append(x.shape[1])
        return layer(x)[..., 0].square()

    x = torch.randn(2, 8, 4, requires_grad=True)
    total, leaves = tiled_sum(run, (layer,), 6, x), [x, *layer.parameters()]
    assert calls == [3, 3, 2]
    twice = [torch.autograd.grad(3 * total, leaves, retain_graph=True) for _ in range(2)]
    assert calls == [3, 3, 2]
    want = torch.autograd.grad(3 * run(x).sum(), leaves)
    for grads in twice:
        same(grads, want, 1e-5)
    with torch.no_grad():
        torch.testing.assert_close(tiled_sum(run, (layer,), 6, x), total.detach())


def test_a_number_that_gradients_are_multiplied_with_is_not_rounded():
    """In bfloat16, 1 / 1001 would be off by 0.2 %, and all gradients with it."""
    layer, x = nn.Linear(999, 1, bias=False).bfloat16(), torch.randn(1, 64, 999).bfloat16().requires_grad_()
    total = tiled_sum(lambda x: layer(x)[..., 0].float(), (layer,), 8, x)
    by = torch.tensor(1 / 1001)
    one, small = (torch.autograd.grad(total, [x, layer.weight], g, retain_graph=True) for g in (None, by))
    torch.testing.assert_close(small[0], (one[0].float() * by).bfloat16(), rtol=0, atol=0)
    want = x.detach().float().sum((0, 1)) * by
    assert (small[1].float() - want).norm() < 2**-8 * want.norm()


def test_a_double_backward_is_refused():
    """A double backward is refused, because it would omit all earlier layers without an error."""
    model, data = tiny(PATTERN), batch(1, 23)
    for tile in (None, 5):
        model.transformer.memory = MemorySettings(tile=tile)
        with pytest.raises(RuntimeError, match="no double backward"):
            torch.autograd.grad(model.loss_terms(data)[0], model.head.weight, create_graph=True)


def test_within_a_checkpoint():
    """A checkpoint's hooks would store each tile's logits, and would raise when these are read before the backward."""
    model, data = tiny(PATTERN), batch(1, 64)
    want = sums(model, data, MemorySettings())
    model.transformer.memory = MemorySettings(tile=8)
    total = checkpoint(lambda: model.loss_terms(data)[0], use_reentrant=False)
    same([total / 64, *torch.autograd.grad(total / 64, list(model.parameters()))], want)


def test_hooks_see_gradients_of_the_loss():
    norms, model, data = {}, tiny(PATTERN), batch(1, 64)
    model.head.register_full_backward_hook(lambda m, to, grads: norms.setdefault(tile, []).append(grads[0].abs().max()))
    for tile in (None, 8):
        model.transformer.memory = MemorySettings(tile=tile)
        (model.loss_terms(data)[0] / 1000).backward()
    torch.testing.assert_close(max(norms[8]), max(norms[None]))


def test_logits_are_made_once(monkeypatch):
    """The logits are computed once in training, unless a different loss is set."""
    model, data = tiny(PATTERN), batch(1, 64)
    model.transformer.memory = MemorySettings(tile=8)
    calls = []
    model.head.register_forward_hook(lambda *args: calls.append(1))
    model.loss_terms(data)[0].backward()
    assert len(calls) == 8
    monkeypatch.setattr(LongNetLM, "token_losses", lambda self, batch: torch.ones(1, 64))
    assert model.loss_terms(data)[0] == 64


def test_the_loss_of_a_subclass_is_its_own():
    class Half(LongNetLM):
        def token_losses(self, batch):
            return super().token_losses(batch) / 2

    data, loss_by = batch(1, 23), {}
    for kind in (LongNetLM, Half):
        torch.manual_seed(0)
        model = kind(PATTERN, dim=16, depth=1, num_heads=4)
        model.configure_model()
        model.transformer.memory = MemorySettings(tile=5)
        loss_by[kind] = model.loss_terms(data)[0]
    torch.testing.assert_close(loss_by[Half], loss_by[LongNetLM] / 2)


def test_states_in_fp16_have_no_gradients_without_a_loss_scale(monkeypatch):
    monkeypatch.setattr(longnet_lm, "tiled_sum", None)
    model, data = tiny(PATTERN, torch.float32, residual_dtype="float16"), batch(1, 64)
    model.transformer.memory = MemorySettings(tile=8)
    model.loss_terms(data)[0].backward()
    with torch.autocast("cpu", torch.float16):
        tiny(PATTERN, torch.float32).loss_terms(data)[0].backward()


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_under_autocast(precision):
    model, data = tiny(PATTERN, torch.float32, vocab_size=300), batch(1, 64)
    exact = sums(model, data, MemorySettings())
    with torch.autocast("cpu", precision):
        plain, tiled = (sums(model, data, MemorySettings(tile=tile)) for tile in (None, 8))
    off = lambda tensors: max(float((a.float() - b).norm() / b.norm()) for a, b in zip(tensors, exact, strict=True))  # noqa: E731
    assert off(tiled) < 1.5 * off(plain) + 1e-4
