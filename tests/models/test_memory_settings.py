"""Memory settings: each keeps loss and gradients, and saves the promised memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dilated import Branch, DilatedPattern
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.models.blocks import BlockOptions, FeedForward, TransformerBlock
from lightning_dilated.models.transformer import DilatedTransformer

from ..examples import examples
from . import batch, tiny

PATTERN = DilatedPattern([Branch(5, 1), Branch(12, 3, shift=4), Branch(None, 2)])
SETTINGS = {
    "block": MemorySettings("block"),
    "kept": MemorySettings("attention-kept"),
    "every 2": MemorySettings("block", every=2),
    "every 5": MemorySettings("block", every=5),
    "offload": MemorySettings("block", offload=1),
    "offload some": MemorySettings("attention-kept", offload=0.4),
    "offload GiB": MemorySettings("block", offload=1.5),
    "tile": MemorySettings(tile=7),
    "tile 1": MemorySettings("block", tile=1),
    "tile 1, heads": MemorySettings(tile=1, head_chunks=2),
    "heads": MemorySettings(head_chunks=2),
    "kept, tile, heads": MemorySettings("attention-kept", tile=16, head_chunks=2),
    "kept, heads": MemorySettings("attention-kept", head_chunks=2),
    "all": MemorySettings("block", every=2, offload=1, tile=9, head_chunks=2),
}


def gradients(model: torch.nn.Module, settings: MemorySettings, data: dict, seed: int = 0) -> list[Tensor]:
    """Return [losses by token, gradients of all parameters]."""
    model.transformer.memory = settings
    torch.manual_seed(seed)
    losses = model.token_losses(data)
    weights = torch.linspace(0.5, 1.5, losses.numel(), dtype=losses.dtype, device=losses.device).view_as(losses)
    return [losses.detach(), *torch.autograd.grad((losses * weights).sum(), list(model.parameters()))]


def same(got: list[Tensor], want: list[Tensor], tol: float = 1e-11) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


MODELS = {
    "causal, grouped": {"num_kv_heads": 2, "depth": 3},
    "layernorm": {"norm": "layernorm", "ffn": "gelu", "bias": True, "sub_layernorm": True, "depth": 3},
    "xpos, untied": {"position_encoding": "xpos", "tie_embeddings": False, "depth": 2},
    "no positions, shifted": {"position_encoding": "none", "shift_layers": "odd", "depth": 2},
    "dense heads without positions": {
        "pattern": DilatedPattern([Branch(7, 1, heads=[1, 3]), Branch(None, 1, heads=[0, 2])]),
        "global_rotary": False,
    },
}


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("chosen", SETTINGS.values(), ids=SETTINGS)
def test_gradients_are_the_plain_ones(chosen, options):
    pattern = DilatedPattern.longnet([5, 12], [1, 3]) if "shift_layers" in options else PATTERN
    model, data = tiny(**{"pattern": pattern, **options}), batch(2, 23)
    data["labels"][0, 3:9] = -100
    data["lengths"] = torch.tensor([23, 17])
    same(gradients(model, chosen, data), gradients(model, MemorySettings(), data))


@pytest.mark.parametrize("chosen", SETTINGS.values(), ids=SETTINGS)
def test_a_graph_that_is_retained(chosen):
    model = tiny(PATTERN, num_kv_heads=2, depth=3)
    model.transformer.memory = chosen
    loss, parameters = model.token_losses(batch(2, 23)).sum(), list(model.parameters())
    want = torch.autograd.grad(loss, parameters, retain_graph=True)
    for retained in (True, False):
        assert all(map(torch.equal, torch.autograd.grad(loss, parameters, retain_graph=retained), want))


@given(
    policy=st.sampled_from(["none", "attention-kept", "block"]),
    every=st.integers(1, 4),
    offload=st.sampled_from([0, 0.5, 1, 2]),
    tile=st.one_of(st.none(), st.integers(1, 40)),
    chunks=st.integers(1, 3),
    tokens=st.integers(1, 33),
    samples=st.integers(1, 3),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=examples(25))
def test_any_of_them(policy, every, offload, tile, chunks, tokens, samples, seed):
    chosen = MemorySettings(policy, every if policy == "block" else 1, offload if policy != "none" else 0, tile, chunks)
    torch.manual_seed(seed)
    model = tiny(PATTERN, dim=24, num_heads=6, num_kv_heads=3, depth=2, attention_dropout=0.3).train()
    data = batch(samples, tokens)
    # heads and positions determine the attention masks, so pieces get the same masks
    same(gradients(model, chosen, data, seed), gradients(model, MemorySettings(), data, seed))


@pytest.mark.parametrize("chosen", SETTINGS.values(), ids=SETTINGS)
def test_dropout_is_drawn_again_alike(chosen):
    """Tiles draw their own masks for hidden features, so gradients are compared with finite differences."""
    model = tiny(PATTERN, dropout=0.4, num_kv_heads=2, depth=3).train()
    model.transformer.drop_path = 0.3
    model.transformer.memory = chosen
    data, parameters = batch(2, 23), list(model.parameters())
    steps = [torch.randn_like(p) * 1e-6 for p in parameters]

    def loss() -> Tensor:
        torch.manual_seed(5)
        return model.token_losses(data).sum()

    grads = torch.autograd.grad(loss(), parameters)
    want = []
    for sign in (1, -1):
        with torch.no_grad():
            for p, step in zip(parameters, steps, strict=True):
                p += sign * step
            want.append(loss())
            for p, step in zip(parameters, steps, strict=True):
                p -= sign * step
    slope = sum((g * s).sum() for g, s in zip(grads, steps, strict=True))
    torch.testing.assert_close(slope, (want[0] - want[1]) / 2, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_precision(dtype):
    """Gradients of tiles are summed in float32, so they are about as exact as without tiles."""
    model, data = tiny(PATTERN, torch.float32, num_kv_heads=2), batch(2, 40)
    exact = gradients(model.double(), MemorySettings(), data)[1:]
    model.to(dtype)
    errors = []
    for chosen in (MemorySettings(), MemorySettings("block", tile=4, head_chunks=2)):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            losses, *grads = gradients(model, chosen, data)
        assert losses.dtype == torch.float32 and {g.dtype for g in grads} == {dtype}
        distance = sum((a.double() - b).square().sum() for a, b in zip(grads, exact, strict=True))
        errors.append((distance / sum(b.square().sum() for b in exact)).sqrt())
    assert errors[1] < 1.3 * errors[0] < 0.2


@pytest.mark.parametrize("tile, chunks", [(5, 1), (None, 2), (5, 2)])
def test_casts_of_autocast_are_not_taken_without_gradients(tile, chunks):
    """Two lengths and the backward share one autocast. Its cache must not return casts that have no graph."""
    results = []
    for chosen in (MemorySettings(), MemorySettings(tile=tile, head_chunks=chunks)):
        torch.manual_seed(0)
        model = tiny(PATTERN, torch.float32, num_kv_heads=2)
        model.transformer.memory = chosen
        with torch.autocast("cpu", torch.bfloat16):
            losses = [model.token_losses(batch(1, n)).sum() for n in (23, 4)]
            model.transformer.memory = MemorySettings()
            losses.append(model.token_losses(batch(1, 9)).sum())
            sum(losses).backward()
        results.append([p.grad for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() < 0.05 * b.norm()


class Largest(TorchDispatchMode):
    """Records the largest number of elements in any result, and the shapes with that number."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor):
                self.most = max(self.most, x.untyped_storage().nbytes() // x.element_size())
        return out


def test_nothing_wide_exists():
    """No tensor has tokens x hidden features, tokens x vocabulary, or q, k and v of all heads."""
    tokens, dim, options = 256, 16, {"ffn_dim": 96, "vocab_size": 80, "num_heads": 8, "depth": 2}
    model, data = tiny(PATTERN, dim=dim, **options), batch(1, tokens, vocab_size=80)
    for chosen, most in [
        (MemorySettings(), 96 * tokens),
        (MemorySettings(tile=32), 2 * dim * tokens),  # output of the joint projection of q and k
        (MemorySettings("block", tile=32, head_chunks=4), dim * tokens),
    ]:
        with Largest() as largest:
            gradients(model, chosen, data)
        assert largest.most == most, chosen


class _Kept(torch.autograd.graph.saved_tensors_hooks):
    """Counts the saved tensors with `elements` elements, except in checkpointed pieces."""

    def __init__(self, elements: int) -> None:
        self.found: set[int] = set()
        super().__init__(lambda x: (self.found.add(x.data_ptr()) if x.numel() == elements else None, x)[1], lambda x: x)


@pytest.mark.parametrize("every, inputs", [(1, 6), (2, 3), (4, 2), (6, 1), (9, 1)])
def test_every_so_many_th_input_is_kept(every, inputs):
    stack = DilatedTransformer(16, [PATTERN] * 6, 4, causal=True)
    stack.memory = MemorySettings("block", every=every)
    saved = _Kept(2 * 21 * 16)
    with saved:
        out = stack(torch.randn(2, 21, 16, requires_grad=True), normed=False)
    assert len(saved.found) == inputs
    out.sum().backward()


def test_the_feed_forward_runs_once_forward_and_once_backward(monkeypatch):
    """Recomputation of a block stops before the feed-forward, because the feed-forward's backward recomputes itself."""
    ran, real = [], FeedForward.forward
    monkeypatch.setattr(FeedForward, "forward", lambda self, x: ran.append(x.shape[1]) or real(self, x))
    block = TransformerBlock(16, 4, 24, PATTERN, causal=True)
    block.memory = MemorySettings("block", tile=8)
    out = block(torch.randn(1, 21, 16, requires_grad=True))
    assert ran == [8, 8, 5]
    out.sum().backward()
    assert ran == [8, 8, 5] * 2


#: settings with features that the other cases also cover
TWICE = [SETTINGS[name] for name in ("tile 1", "heads", "kept, heads")]
PIECES = [pytest.param(s, marks=[pytest.mark.slow] * (s in TWICE)) for s in SETTINGS.values() if s.in_pieces]


@pytest.mark.parametrize("chosen", PIECES, ids=str)
@pytest.mark.full
def test_compiled_in_pieces(chosen, monkeypatch):
    torch._dynamo.reset()
    model, data = tiny(PATTERN, num_kv_heads=2, depth=2), batch(1, 21)
    want = gradients(model, MemorySettings(), data)
    compiled, real = [], torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **kwargs: compiled.append(f) or real(f, **kwargs))
    for block in model.transformer.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    same(gradients(model, chosen, data), want)
    assert compiled and not any(b._compiled_call_impl for b in model.transformer.blocks)
    same(gradients(model, MemorySettings("block"), data), want)  # compiled blocks are used again
    assert all(b._compiled_call_impl for b in model.transformer.blocks)


def test_compiled_whole_with_offload():
    torch._dynamo.reset()
    model, data = tiny(PATTERN, num_kv_heads=2, depth=3), batch(1, 21)
    want = gradients(model, MemorySettings(), data)
    for block in model.transformer.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    same(gradients(model, MemorySettings("block", offload=1), data), want)
    assert model.transformer._host.bytes == 3 * 21 * 16 * 8


# -- refusals and residual dtype ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "given, words",
    [
        ({"policy": "all"}, "must be one of none, attention-kept, block; got 'all'"),
        ({"policy": "none", "every": 2}, 'every=2 saves .* it needs policy="block"'),
        ({"policy": "attention-kept", "every": 2}, 'every=2 saves .* it needs policy="block"'),
        ({"policy": "block", "every": 0}, "every must be at least 1, got 0"),
        ({"offload": 0.5}, "offload=0.5 moves the block inputs"),
        ({"policy": "block", "offload": -1}, "offload must be a number in .0, inf., got -1"),
        ({"policy": "block", "offload": True}, "offload must be .* got True"),
        ({"policy": "block", "offload": float("nan")}, "offload must be .* got nan"),
        ({"tile": 0}, "tile must be at least 1, got 0"),
        ({"tile": 2.5}, "tile must be .* got 2.5"),
        ({"head_chunks": 0}, "head_chunks must be at least 1, got 0"),
    ],
)
def test_settings_that_are_refused(given, words):
    with pytest.raises((ValueError, TypeError), match=words):
        MemorySettings(**given)


def test_more_chunks_than_kv_heads():
    with pytest.raises(ValueError, match="head_chunks=3 must be at most the 2 kv heads"):
        tiny(PATTERN, num_kv_heads=2).transformer.memory = MemorySettings(head_chunks=3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", None])
def test_residual_dtype(dtype):
    model = tiny(PATTERN, torch.float32, residual_dtype=dtype)
    dtypes = []
    with torch.autocast("cpu", torch.bfloat16):
        model.transformer(model.embedding(batch(1, 9)["tokens"]), watch=lambda x: dtypes.append(x.dtype))
    assert set(dtypes) == {getattr(torch, dtype or "float32")} and len(dtypes) == 3


@pytest.mark.parametrize("chosen", [MemorySettings(), SETTINGS["all"]], ids=["plain", "all"])
def test_residual_dtype_without_autocast(chosen):
    """Weights and their gradients stay float32. Only the hidden states between blocks are rounded."""
    exact, rounded = (tiny(PATTERN, torch.float32, num_kv_heads=2, residual_dtype=x) for x in (None, "bfloat16"))
    rounded.load_state_dict(exact.state_dict())
    data = batch(2, 23)
    want, got = gradients(exact, chosen, data), gradients(rounded, chosen, data)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32 and 0 < (a - b).norm() < 0.05 * b.norm()


def test_residual_dtype_is_checked():
    with pytest.raises(ValueError, match=r"residual_dtype must be float32, bfloat16, float16 or null .* got 'int8'"):
        BlockOptions(residual_dtype="int8")


def test_unknown_settings_do_not_slip_through():
    """Every field of MemorySettings is an argument of the callback."""
    from dataclasses import fields
    from inspect import signature

    from lightning_dilated.callbacks import ActivationRecompute

    assert [f.name for f in fields(MemorySettings)] == list(signature(ActivationRecompute).parameters)
