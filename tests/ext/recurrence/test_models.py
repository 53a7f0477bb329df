"""Models with a recurrence in layers: the definition, decoding, checkpoints, optimizer groups, and refusals.

Tests of streams, packed rows, ranks and generation include models with a recurrence.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lightning_dilated as ld
from lightning_dilated.ext.decoding import token_step
from lightning_dilated.ext.recurrence.branch import Decay, RecurrentBranch
from lightning_dilated.ext.recurrence.rules import oracle
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.models.learning_rate import LR_SCALE

from ...examples import examples
from ...models import PATTERN, SIZES, batch, tiny, trainer

KINDS = {
    "gated_delta": {"kind": "gated_delta"},
    "gated_delta, no convolution": {"kind": "gated_delta", "conv": 0},
    "linear": {"kind": "linear", "segment": 4},
    "delta": {"kind": "delta", "segment": 5, "conv": 2},
}


def moved(model, seed=7):
    """Add noise to every weight of the model, so that it differs from its initial value and gates are open."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p) if p.ndim >= 2 else 0.5 * torch.rand_like(p))
    return model


def lively(recurrence, **options):
    torch.manual_seed(3)
    return moved(tiny(recurrence=recurrence, **options))


# -- the description ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", KINDS)
def test_description_reads_what_it_writes(name):
    recurrence = ld.Recurrence(**KINDS[name])
    assert ld.Recurrence.from_dict(recurrence.to_dict()) == recurrence
    assert recurrence.to_dict() == KINDS[name]


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"kind": "mamba"}, ValueError, "kind must be one of gated_delta, linear, delta; got 'mamba'"),
        ({"kind": "linear"}, ValueError, "'linear' needs segment, the tokens of a memory segment: segment=2048"),
        ({"segment": 4}, ValueError, "segment=4 belongs to kinds linear, delta, not to 'gated_delta'"),
        ({"kind": "delta", "segment": 0}, ValueError, "segment must be at least 1, got 0"),
        ({"kind": "delta", "segment": 2.5}, TypeError, "segment must be an integer"),
        ({"conv": 1}, ValueError, "conv must be 0 .none. or at least 2 taps, got 1"),
        ({"conv": -2}, ValueError, "conv must be at least 0"),
        ({"gate_init": "open"}, TypeError, "gate_init must be a number"),
    ],
)
def test_wrong_descriptions(arguments, error, says):
    with pytest.raises(error, match=says):
        ld.Recurrence(**arguments)


def test_wrong_arguments_of_models():
    for value, error, says in (
        ({"sort": "linear"}, ValueError, "recurrence has no key 'sort'"),
        ("gated_delta", TypeError, "recurrence must be a Recurrence, a mapping, None, or a list"),
        ([{}, {}, None], ValueError, "lists 3 entries for a model of 2 layers"),
        ([], ValueError, "lists 0 entries"),
        ([7], TypeError, "a mapping of its arguments; got 7"),
    ):
        with pytest.raises(error, match=says):
            ld.LongNetLM(PATTERN, **SIZES, recurrence=value)
    for kind in ("gated_delta", "delta"):
        with pytest.raises(
            ValueError, match=rf"kind '{kind}' overwrites .* this layer is not causal. Take kind='linear'"
        ):
            ld.LongNetMLM(PATTERN, **SIZES, recurrence=KINDS[kind])
    with pytest.raises(TypeError, match=r"SlideEncoder has no argument 'recurrence'\. The class sets it itself"):
        ld.SlideEncoder(recurrence={})


# -- the layer ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "kv_conv": 3}, {"position_encoding": "none"}])
def test_a_closed_gate_changes_nothing(name, options):
    torch.manual_seed(1)
    without = tiny(**options)
    model = tiny(recurrence=KINDS[name], **options)
    missing = model.load_state_dict(without.state_dict(), strict=False).missing_keys
    assert missing and all(".recurrence." in key for key in missing)
    tokens = batch(2, 37)["tokens"]
    assert torch.equal(model(tokens), without(tokens))


def by_definition(layer, x):
    """Compute the layer's output for one sample x (N, E), token by token."""
    branch, (q, k, v) = layer.recurrence, (x @ layer.in_proj_weight.T).split([16, 8, 8], -1)
    rotated = [y.unflatten(-1, (-1, 4))[None] for y in (q, k)]
    if layer.rotary is not None:
        rotated = layer.rotary.table(x[None], x.dtype).rotate(*rotated)
    dilated = layer.attention(*rotated, v.unflatten(-1, (-1, 4))[None])[0]
    joint = torch.cat([q, k, v], -1)
    if branch.conv is not None:
        taps, left = branch.conv.weight, branch.conv.taps - 1 - branch.conv.right
        padded = nn.functional.pad(joint, (0, 0, left, branch.conv.right))
        joint = joint + sum(padded[i : i + len(x)] * w for i, w in enumerate(taps))
    q, k, v = (y.unflatten(-1, (-1, 4)) for y in joint.split([16, 8, 8], -1))
    gates = ()
    if branch.controls is not None:
        a, b = (x @ branch.controls.weight.T).split([2, 2], -1)
        step = nn.functional.softplus(a + branch.decay.dt_bias)
        gates = -branch.decay.A_log.exp() * step, b.sigmoid()
    kind, segment = branch.description.kind, branch.description.segment
    memory = oracle(q, k, v, *gates, kind=kind, segment=segment or 1, causal=layer.attention.causal).out
    normed = nn.functional.rms_norm(memory, (4,), branch.norm_weight, 1e-6)
    gate = branch.scale * (x @ branch.out_gate.weight.T).sigmoid()
    return layer.join((dilated + gate[..., None] * normed)[None])[0]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("positions", ["rotary", "none"])
@pytest.mark.parametrize("name", KINDS)
def test_the_layer_is_its_definition(name, positions, causal):
    if not causal and name != "linear":
        return
    torch.manual_seed(4)
    layer = ld.MultiheadDilatedAttention(
        16, 4, PATTERN, num_kv_heads=2, causal=causal, position_encoding=positions, recurrence=KINDS[name], bias=False,
        dtype=torch.float64,
    )  # fmt: skip
    moved(layer)
    x = torch.randn(23, 16, dtype=torch.float64, requires_grad=True)
    leaves = [x, *layer.parameters()]
    got, want = layer(x[None])[0][0], by_definition(layer, x)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(y.square().sum(), leaves) for y in (got, want)]
    for grad, want_grad in zip(*grads, strict=True):
        torch.testing.assert_close(grad, want_grad, rtol=1e-10, atol=1e-10)


def test_is_causal_is_refused_by_a_layer_that_is_not():
    layer = ld.MultiheadDilatedAttention(16, 4, PATTERN, recurrence=KINDS["linear"])
    with pytest.raises(ValueError, match=r"its recurrence sees tokens on both sides\. Build it with causal=True"):
        layer(torch.randn(1, 5, 16), is_causal=True)


def test_padding_adds_nothing():
    model, tokens = lively(KINDS["gated_delta"]), batch(2, 30)["tokens"]
    whole = model(tokens, lengths=torch.tensor([17, 30]))
    torch.testing.assert_close(whole[:1, :17], model(tokens[:1, :17]), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", KINDS)
def test_training_after_inference_mode(name):
    """Tables that inference caches for a length also work in a call that trains."""
    model, data = lively(KINDS[name]), batch(1, 31)
    with torch.inference_mode():
        model(data["tokens"])
    model.loss_terms(data)[0].backward()
    assert model.transformer.blocks[0].attention.recurrence.scale.grad.any()


def test_double_backward_is_refused():
    model = lively(KINDS["gated_delta"])
    total, _ = model.loss_terms(batch(1, 9))
    weight = model.transformer.blocks[0].attention.recurrence.out_gate.weight
    with pytest.raises(RuntimeError, match="no double backward"):
        grad = torch.autograd.grad(total, weight, create_graph=True)[0]
        grad.sum().backward()


# -- what training saves -----------------------------------------------------------------------------------------------
RECOMPUTED = (
    {"policy": "block", "tile": 8},
    {"policy": "attention-kept"},
    {"policy": "block", "every": 2, "offload": 1.0},
)


@pytest.mark.parametrize("name", KINDS)
def test_recomputed_gradients_are_equal(name):
    model, data = lively(KINDS[name], num_kv_heads=2), batch(2, 29)

    def gradients():
        return torch.autograd.grad(model.loss_terms(data)[0], list(model.parameters()))

    want = gradients()
    for options in RECOMPUTED:
        model.transformer.memory = MemorySettings(**options)
        for grad, want_grad in zip(gradients(), want, strict=True):
            torch.testing.assert_close(grad, want_grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", KINDS)
def test_truncated_gradients_do_not_depend_on_what_is_saved(name):
    """Chunks carry detached states, even if the backward recomputes blocks."""
    model, data = lively(KINDS[name]), batch(1, 40)

    def gradients(**options):
        model.transformer.memory = MemorySettings(stream=11, **options)
        return torch.autograd.grad(model.loss_terms(data)[0], list(model.parameters()))

    exact, want = gradients(), gradients(truncate=True)
    assert any(not torch.allclose(x, y, rtol=1e-4) for x, y in zip(exact, want, strict=True))
    for policy in ("block", "attention-kept"):
        for grad, want_grad in zip(gradients(truncate=True, policy=policy), want, strict=True):
            torch.testing.assert_close(grad, want_grad, rtol=1e-10, atol=1e-10)


LIMITS = {
    "whole": {},
    "padded": {"lengths": torch.tensor([29, 12])},
    "packed": {"cu_seqlens": torch.tensor([0, 7, 14, 18, 29], dtype=torch.int32)},
}


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("name", KINDS)
def test_windows_of_a_long_call_change_nothing(name, limits, monkeypatch):
    """With windows of 7 tokens, some documents begin with a window, others inside one. Chunks have windows as well."""
    from lightning_dilated.ext.recurrence import op

    model, data = lively(KINDS[name], num_kv_heads=2), {**batch(1 + (limits != "packed"), 29), **LIMITS[limits]}

    def gradients():
        total, _ = model.loss_terms(data)
        return total.detach(), *torch.autograd.grad(total, list(model.parameters()))

    want = gradients()
    monkeypatch.setattr(op, "WINDOW", 7)
    results = [gradients()]
    model.transformer.memory = MemorySettings(stream=17)
    for got in (*results, gradients()):
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_attention_kept_computes_each_call_once(monkeypatch):
    from lightning_dilated.ext.recurrence import op

    model, data, calls = lively(KINDS["gated_delta"]), batch(1, 29), []
    for name in ("recurrent_attention", "recur"):
        real = getattr(op, name)
        monkeypatch.setattr(op, name, lambda *a, real=real, **k: calls.append(torch.is_grad_enabled()) or real(*a, **k))
    counts = {}
    for policy in ("attention-kept", "block"):
        calls.clear()
        model.transformer.memory = MemorySettings(policy)
        model.loss_terms(data)[0].backward()
        counts[policy] = calls.count(False)
        assert calls.count(True) == 2  # in the backward, one per layer
    assert counts == {"attention-kept": 2, "block": 4}


def test_refused_settings():
    with pytest.raises(ValueError, match="head_chunks=2 is not offered with recurrence"):
        lively(KINDS["linear"]).transformer.memory = MemorySettings("block", head_chunks=2)
    with pytest.raises(ValueError, match="cuda_graphs cannot record layers with a recurrence"):
        ld.LongNetLM(PATTERN, **SIZES, recurrence=[None, {}], cuda_graphs=True)
    with pytest.raises(ValueError, match=r"recurrence=.* cannot be exported"):
        ld.export(lively(KINDS["linear"]), "model.pt2", 64)
    with pytest.raises(ValueError, match="a torchscale decoder has no recurrence: leave it out"):
        ld.LongNetLM.from_torchscale({}, [4], [1], recurrence={})


@pytest.mark.slow
def test_compiled_blocks():
    """A block is one graph, which calls the op."""
    model, data = lively(KINDS["gated_delta"], num_kv_heads=2), batch(2, 29)
    want = torch.autograd.grad(model.loss_terms(data)[0], list(model.parameters()))
    for block in model.transformer.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    for options in ({}, {"policy": "attention-kept"}, {"stream": 11}):
        model.transformer.memory = MemorySettings(**options)
        got = torch.autograd.grad(model.loss_terms(data)[0], list(model.parameters()))
        for grad, want_grad in zip(got, want, strict=True):
            torch.testing.assert_close(grad, want_grad, rtol=1e-10, atol=1e-10)


# -- precision ---------------------------------------------------------------------------------------------------------
def test_decays_stay_in_fp32():
    """Trainer(precision="bf16-true") casts the module, but A_log stays fp32: rounding it would change the decay."""
    model = tiny(dtype=torch.float32, recurrence={})
    before = {n: p.clone() for n, p in model.named_parameters() if ".decay." in n}
    model.to(torch.bfloat16)
    assert {p.dtype for n, p in model.named_parameters() if ".decay." not in n} == {torch.bfloat16}
    for name, p in model.named_parameters():
        if ".decay." in name:
            assert p.dtype == torch.float32 and torch.equal(p, before[name])
    data = batch(1, 19)
    model.loss_terms(data)[0].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.double()
    assert {p.dtype for p in model.parameters()} == {torch.float64}


def test_mixed_precision_computes_the_state_wide():
    """q, k and v are rounded to bf16, but not the state. After 2,000 tokens the error is still as small as bf16's."""
    torch.manual_seed(0)
    layer = ld.MultiheadDilatedAttention(32, 2, ld.DilatedPattern.dense(8), causal=True, recurrence={"gate_init": 1.0})
    x = torch.randn(1, 2000, 32)
    with torch.no_grad():
        want = layer(x)[0]
        with torch.autocast("cpu", torch.bfloat16):
            got = layer(x)[0]
    assert got.dtype == torch.bfloat16
    assert (got[:, -100:] - want[:, -100:]).abs().max() < 0.03 * want.abs().max()


def test_decays_start_as_published():
    torch.manual_seed(0)
    decay = Decay(4096)
    rate, step = decay.A_log.exp(), nn.functional.softplus(decay.dt_bias)
    assert rate.min() > 0.009 and rate.max() < 16 and abs(rate.mean() - 8) < 0.3
    assert step.min() > 0.00099 and step.max() < 0.101
    assert abs(step.log().mean() - torch.tensor([0.001, 0.1]).log().mean()) < 0.1


# -- decoding ----------------------------------------------------------------------------------------------------------
@given(st.data(), st.sampled_from(sorted(KINDS)))
@settings(max_examples=examples(15), deadline=None)
def test_decoding_equals_the_whole(data, name):
    """Decode prompts and chunks of any length, then single tokens."""
    model = lively(KINDS[name], num_kv_heads=2, kv_conv=3)
    cuts = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    tokens = torch.randint(11, (2, sum(cuts)), generator=torch.Generator().manual_seed(1))
    caches = model.transformer.new_caches()
    with torch.no_grad():
        parts = [model(part, caches=caches) for part in tokens.split(cuts, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(tokens), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", KINDS)
def test_the_state_does_not_grow(name):
    model = lively(KINDS[name])
    caches, sizes = model.transformer.new_caches(), []
    with torch.no_grad():
        for part in torch.randint(11, (2, 120)).split(40, 1):
            model(part, caches=caches)
            cache = caches[0]
            rows = cache.mixer_states.get("recurrence, rows")
            sizes.append(cache.mixer_states["recurrence"].nbytes + (0 if rows is None else rows.nbytes))
            assert rows is None or rows.untyped_storage().nbytes() == rows.nbytes  # no view of the prompt's rows
    assert len(set(sizes)) == 1
    assert caches[0].nbytes > sizes[0]


def test_beams_hold_the_samples_that_they_select():
    model, tokens = lively(KINDS["delta"]), torch.randint(11, (3, 14))
    caches = model.transformer.new_caches()
    with torch.no_grad():
        model(tokens[:, :9], caches=caches)
        for cache in caches:
            cache.select(torch.tensor([2, 0, 2]))
        order = tokens[[2, 0, 2]]
        continued = torch.cat([model(x, caches=caches) for x in order[:, 9:].split(1, 1)], 1)
        torch.testing.assert_close(continued, model(order)[:, 9:], rtol=1e-10, atol=1e-10)
        for cache in caches:
            cache.reset()
            assert "recurrence" not in cache.mixer_states
        torch.testing.assert_close(model(tokens, caches=caches), model(tokens), rtol=1e-10, atol=1e-10)


def test_a_cache_of_another_layer_is_refused():
    model, other = lively(KINDS["linear"]), tiny()
    with torch.no_grad(), pytest.raises(ValueError, match="made for recurrence=None, but the layer has Recurrence"):
        model(batch(1, 4)["tokens"], caches=other.transformer.new_caches())


def test_token_steps_are_not_captured():
    assert "recurrence" in token_step.why_not_captured(lively([None, {}]))
    assert token_step.why_not_captured(tiny()) is None


# -- checkpoints and optimizers ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [{"kind": "delta", "segment": 4}, [None, {"kind": "gated_delta", "conv": 0}]])
def test_checkpoints_keep_it(tmp_path, value):
    model, tokens = lively(value), batch(1, 20)["tokens"]
    run = trainer(max_steps=0)
    run.strategy.connect(model)
    run.save_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    loaded = ld.LongNetLM.load_from_checkpoint(tmp_path / "model.ckpt").double().eval()
    assert loaded.recurrences == model.recurrences and loaded.hparams.recurrence == value
    torch.testing.assert_close(loaded(tokens), model(tokens), rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path / "hub")
    again = ld.LongNetLM.from_pretrained(tmp_path / "hub").double().eval()
    torch.testing.assert_close(again(tokens), model(tokens), rtol=1e-5, atol=1e-5)


def test_folders_of_16_bits_load_in_16_bits(tmp_path):
    """Only the decays are stored in fp32."""
    model, tokens = lively({}).to(torch.bfloat16), batch(1, 20)["tokens"]
    model.save_pretrained(tmp_path)
    again = ld.LongNetLM.from_pretrained(tmp_path).eval()
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert set(dtypes.values()) == {torch.bfloat16, torch.float32}
    assert {name: p.dtype for name, p in again.named_parameters()} == dtypes
    assert torch.equal(again(tokens), model(tokens))


@pytest.mark.parametrize("positions", ["rotary", "none"])
def test_resuming_with_another_recurrence_is_refused(positions):
    """Linear and delta have the same weights, but compute different functions."""
    model = ld.LongNetLM(PATTERN, **SIZES, recurrence=KINDS["linear"], position_encoding=positions)
    run = trainer(max_steps=1)
    run.strategy.connect(model)
    model.trainer = run
    stored = {"recurrence": {"kind": "delta", "segment": 4}, "rotary_base": 10000.0}
    with pytest.raises(ValueError, match=r"trained with recurrence=.*'delta'.*, and this model has .*'linear'"):
        model.on_load_checkpoint({"hyper_parameters": stored})
    for other in ([None, KINDS["linear"]], [KINDS["linear"]] * 3, None):
        with pytest.raises(ValueError, match="trained with recurrence="):
            model.on_load_checkpoint({"hyper_parameters": {**stored, "recurrence": other}})
    for same in ({"gate_init": 0.5, **KINDS["linear"]}, [KINDS["linear"]] * 2):  # `gate_init` may differ: gates train
        model.on_load_checkpoint({"hyper_parameters": {**stored, "recurrence": same}})


def test_streams_go_on_whatever_gates_began_with():
    models = [lively({"gate_init": x}) for x in (0.0, 0.5)]
    models[1].load_state_dict(models[0].state_dict())
    tokens = batch(1, 20)["tokens"]
    with torch.no_grad():
        _, state = models[0].stream(tokens[:, :9])
        nats = [m.stream(tokens[:, 9:], state=state, per_token=True)[0] for m in models]
    assert torch.equal(*nats)


@pytest.mark.parametrize("cls", [ld.LongNetLM, ld.LongNetClassifier])
def test_parameter_groups(cls):
    options = {"layer_decay": 0.5, "num_classes": 2} if cls is ld.LongNetClassifier else {}
    model = cls(PATTERN, **SIZES, recurrence=KINDS["linear"] if options else {}, **options)
    model.configure_model()
    branches = [m for m in model.modules() if isinstance(m, RecurrentBranch)]
    fast = {id(p) for b in branches for p in ([b.scale] if b.decay is None else [b.scale, *b.decay.parameters()])}
    groups = model.parameter_groups()
    every = [id(p) for g in groups for p in g["params"]]
    assert sorted(every) == sorted(id(p) for p in model.parameters())
    grouped = set()
    for group in groups:
        ids = {id(p) for p in group["params"]}
        assert ids <= fast or not ids & fast
        if ids <= fast:
            grouped |= ids
            assert group["weight_decay"] == 0 and group["lr_scale"] in (LR_SCALE, LR_SCALE / 2, LR_SCALE / 4)
    assert grouped == fast
    assert not any(p.ndim >= 2 for g in groups if g.get("lr_scale", 1) >= LR_SCALE / 4 > 1 for p in g["params"])


def test_gates_move():
    """A few training steps open the gate and move the convolution away from the identity."""
    torch.manual_seed(0)
    model = ld.LongNetLM(PATTERN, **SIZES, recurrence={})
    run = trainer(max_steps=30)
    run.fit(model, torch.utils.data.DataLoader([batch(4, 40)] * 30, batch_size=None))
    branch = model.transformer.blocks[0].attention.recurrence
    assert branch.scale.abs().max() > 0.05
    assert branch.conv.weight.any()
