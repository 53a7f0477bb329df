"""Layers in tiles compute gradients explicitly and accumulate them once. Cases where this would be wrong raise.

Hooks on weights run once, with the sum of the gradients of all tiles and chunks of heads.
"""

import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.memory.token_chunks import tiled
from lightning_dilated.models.blocks import TransformerBlock
from lightning_dilated.pattern import DilatedPattern

from . import batch, tiny
from .test_memory_settings import PATTERN, SETTINGS, Largest, same


def test_hooks_on_a_parameter_run_once():
    """DDP and FSDP reduce a gradient when it is accumulated, so it must be accumulated once."""
    block, names = TransformerBlock(16, 4, 24, PATTERN, causal=True), []
    block.memory = MemorySettings("block", tile=4, head_chunks=2)
    for name, p in block.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: names.append(name))
    block(torch.randn(1, 21, 16, requires_grad=True)).sum().backward()
    assert sorted(names) == sorted(name for name, _ in block.named_parameters())


def test_frozen_parameters():
    block = TransformerBlock(16, 4, 24, PATTERN, causal=True)
    block.ffn.requires_grad_(False)
    block.attention.in_proj_weight.requires_grad_(False)
    x = torch.randn(1, 21, 16, requires_grad=True)
    results = []
    for chosen in (MemorySettings(), MemorySettings("block", tile=4, head_chunks=2)):
        block.memory = chosen
        block.zero_grad()
        block(x).square().sum().backward()
        results.append({n: p.grad for n, p in block.named_parameters()})
        assert [n for n, g in results[-1].items() if g is None] == [
            "attention.in_proj_weight", "ffn.gate.weight", "ffn.fc1.weight", "ffn.fc2.weight",
        ]  # fmt: skip
    same([g for g in results[1].values() if g is not None], [g for g in results[0].values() if g is not None], 1e-5)


def test_hooks_on_attention_that_windows_of_heads_pass_by():
    block, calls = TransformerBlock(16, 4, 24, PATTERN, causal=True), []
    block.memory = MemorySettings("block", head_chunks=2)
    handle = block.attention.register_forward_hook(lambda *args: calls.append(args))
    with pytest.warns(UserWarning, match="hooks on the attention layer do not run with head_chunks=2"):
        block(torch.randn(1, 21, 16))
    assert not calls
    handle.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        block(torch.randn(1, 21, 16))


def test_no_double_backward():
    layer = torch.nn.Linear(4, 4)
    x = torch.randn(1, 8, 4, requires_grad=True)
    for out in (tiled(layer, (layer,), 3, x).square().sum(), tiled(layer, (layer,), 3, x).sum()):
        with pytest.raises(RuntimeError, match="have no double backward"):
            torch.autograd.grad(out, x, create_graph=True)


def test_a_parameter_changed_before_the_backward():
    layer = torch.nn.Linear(4, 4)
    out = tiled(layer, (layer,), 3, torch.randn(1, 8, 4, requires_grad=True))
    with torch.no_grad():
        layer.weight += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_evaluation_in_tiles():
    model, data = tiny(PATTERN, ffn_dim=96), batch(1, 64)
    want = model.token_losses(data)
    model.transformer.memory = MemorySettings("block", tile=8)
    with torch.no_grad(), Largest() as largest:
        torch.testing.assert_close(model.token_losses(data), want)
    assert largest.most < 64 * 96


@pytest.mark.parametrize("part", ["ffn", "ffn.fc1", "attention_norm"])
def test_layers_that_are_sharded_by_themselves(part, tmp_path):
    """Layers that are sharded individually are refused, because their gradients would be lost without an error."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        block = TransformerBlock(16, 4, 24, PATTERN, causal=True)
        block.memory = MemorySettings(tile=5, head_chunks=2)
        fully_shard(block.get_submodule(part), mesh=mesh)
        fully_shard(block, mesh=mesh)
        with pytest.raises(ValueError, match="is sharded separately, so its gradients would be lost"):
            block(torch.randn(1, 21, 16))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("chosen", [MemorySettings(tile=5), MemorySettings(head_chunks=2)], ids=str)
def test_flat_parameters(chosen, tmp_path):
    """The modules of FullyShardedDataParallel have views of one tensor instead of parameters."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        block = TransformerBlock(16, 4, 24, PATTERN, causal=True)
        block.memory = chosen
        sharded = FullyShardedDataParallel(block, device_id=torch.device("cpu"))
        with pytest.raises(ValueError, match="not by FullyShardedDataParallel"):
            sharded(torch.randn(1, 21, 16))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("chosen", [MemorySettings(tile=5), MemorySettings(head_chunks=2)], ids=str)
def test_parameters_frozen_between_forward_and_backward(chosen):
    block = TransformerBlock(16, 4, 24, PATTERN, causal=True)
    block.memory = chosen
    out = block(torch.randn(1, 21, 16))
    block.attention_norm.requires_grad_(False)
    block.ffn_norm.requires_grad_(False)
    with pytest.raises(RuntimeError, match="Freeze or unfreeze none in between"):
        out.sum().backward()


@pytest.mark.parametrize("chosen", [MemorySettings(tile=5), MemorySettings("block", tile=5, head_chunks=2)], ids=str)
def test_as_many_others_trained_in_the_backward(chosen):
    """The backward finds different trained parameters, but the same number of them, so counting is not enough."""
    block = TransformerBlock(16, 4, 24, PATTERN, causal=True)
    block.memory = chosen
    block.ffn.gate.requires_grad_(False)
    out = block(torch.randn(1, 21, 16, requires_grad=True))
    block.ffn.gate.requires_grad_(True)
    block.ffn.fc1.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"not the same \d in its backward"):
        out.sum().backward()


@pytest.mark.parametrize("chosen", [MemorySettings(tile=5), MemorySettings(head_chunks=2)], ids=str)
@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_of_a_functional_call(chosen, frozen):
    """Gradients are right in a functional_call, and the modules have their own parameters afterwards."""
    block, x = TransformerBlock(16, 4, 24, PATTERN, causal=True), torch.randn(1, 21, 16, requires_grad=True)
    replacements = {n: torch.nn.Parameter(torch.randn_like(p) / 4, not frozen) for n, p in block.named_parameters()}
    leaves = [x, *(() if frozen else replacements.values())]
    call = lambda: torch.func.functional_call(block, replacements, (x,)).square().sum()  # noqa: E731
    want = torch.autograd.grad(call(), leaves)
    block.requires_grad_(not frozen)
    block.memory = chosen
    with pytest.raises(RuntimeError, match="have other parameters now"):
        call().backward()
    inside = lambda m, x: torch.autograd.grad(m(x).square().sum(), leaves)  # noqa: E731
    runner = torch.nn.Module()
    runner.block = block
    runner.forward = lambda x: inside(block, x)
    same(torch.func.functional_call(runner, {f"block.{n}": p for n, p in replacements.items()}, (x,)), want, 1e-5)


@pytest.mark.parametrize("chosen", [MemorySettings(tile=2), MemorySettings(head_chunks=2, tile=2)], ids=str)
def test_many_tiles_are_summed_in_float32(chosen):
    """The sum has 1,024 terms of the same sign. In bfloat16 it would stop growing early."""
    block = TransformerBlock(16, 4, 24, DilatedPattern.longnet([8], [1]), causal=True).bfloat16()
    x, results = torch.randn(1, 16, 16).repeat(1, 128, 1).bfloat16(), []
    for settings in (MemorySettings(), chosen):
        block.memory = settings
        results.append(torch.autograd.grad(block(x.requires_grad_()).float().sum(), list(block.parameters())))
    for a, b in zip(*results, strict=True):
        assert (a.float() - b.float()).norm() < 0.03 * b.float().norm()


@pytest.mark.parametrize("chosen", [MemorySettings("block", tile=8), MemorySettings(head_chunks=2, tile=8)], ids=str)
def test_the_backward_runs_under_the_autocast_of_the_forward(chosen):
    """The backward runs after the autocast context has ended, as in a Trainer, but under the same settings."""
    block, dtypes = TransformerBlock(16, 4, 24, PATTERN, causal=True), []
    block.memory = chosen
    for layer in (block.ffn.fc1, block.attention.out_proj):
        layer.register_forward_hook(lambda layer, inputs, out: dtypes.append(out.dtype))
    norm = block._normed
    block._normed = lambda x, dtype: dtypes.append(dtype) or norm(x, dtype)
    with torch.autocast("cpu", torch.bfloat16):
        out = block(torch.randn(1, 21, 16, requires_grad=True))
    before = len(dtypes)
    out.sum().backward()
    assert len(dtypes) >= before + 3 and set(dtypes) == {torch.bfloat16}


def test_windows_of_heads_are_projected_in_tiles():
    """The norm runs tile by tile: 7 passes of 3 tiles each (forward, backward, and weights, with 2 chunks of heads)."""
    block, row_sizes = TransformerBlock(16, 4, 24, PATTERN, causal=True), []
    block.memory = MemorySettings(tile=1, head_chunks=2)
    assert block.memory.narrow_tile == 8
    norm = block._normed
    block._normed = lambda x, *args: row_sizes.append(x.shape[1]) or norm(x, *args)
    block(torch.randn(1, 21, 16, requires_grad=True)).sum().backward()
    assert row_sizes == [8, 8, 5] * 7


# -- hooks on weights --------------------------------------------------------------------------------------------------
def hooked(model, data, chosen, factor):
    """Return (gradients of the mean loss, number of calls of each weight's hook). The hooks multiply by `factor`."""
    model.transformer.memory = chosen
    model.zero_grad()
    calls = dict.fromkeys(dict(model.named_parameters()), 0)

    def add(name, p):
        def hook(grad):
            calls[name] += 1
            return factor * grad

        return p.register_hook(hook)

    handles = [add(name, p) for name, p in model.named_parameters()]
    total, count = model.loss_terms(data)
    (total / count).backward()
    for handle in handles:
        handle.remove()
    return [p.grad.clone() for p in model.parameters()], calls


@pytest.mark.parametrize("options", [{}, {"tie_embeddings": False}], ids=["tied", "untied"])
@pytest.mark.parametrize("chosen", SETTINGS.values(), ids=SETTINGS)
def test_a_hook_sees_the_whole_gradient_once(chosen, options):
    model, data = tiny(PATTERN, num_kv_heads=2, depth=3, **options), batch(1, 21)
    want, _ = hooked(model, data, MemorySettings(), 1.0)
    for factor in (3.0, 1.0):  # hooks of the first round are removed for the second
        grads, calls = hooked(model, data, chosen, factor)
        same(grads, [factor * x for x in want])
        assert set(calls.values()) == {1}


def test_hooks_are_there_after_a_failed_backward():
    model, data, grads = tiny(PATTERN, torch.float64, depth=1), batch(1, 21), []
    model.transformer.memory = MemorySettings(tile=7)
    weight = model.transformer.blocks[0].ffn.fc2.weight
    weight.register_hook(grads.append)

    def fail(module, inputs, out):
        if out.requires_grad:  # only when the backward recomputes the block
            out.register_hook(lambda grad: 1 / 0)

    failing = model.transformer.blocks[0].ffn.register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model.token_losses(data).sum().backward()
    failing.remove()
    assert not grads
    model.token_losses(data).sum().backward()
    assert len(grads) == 1
