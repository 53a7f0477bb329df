"""DilatedAttention is the op as a module; MultiheadDilatedAttention replaces nn.MultiheadAttention."""

import copy

import pytest
import torch
from torch import nn

from lightning_dilated.attention import DilatedAttention, MultiheadDilatedAttention, dilated_attention
from lightning_dilated.pattern import DilatedPattern

from .recorder import record

E, H, N = 24, 4, 13
DENSE = DilatedPattern.dense()
PATTERN = DilatedPattern.longnet([4, 16], [1, 2])
SHAPES = {"3-D": (3, N), "2-D": (N,), "one token": (2, 1)}
LENGTHS = torch.tensor([N, 5, 1])


def jiggled(module):
    """Add noise to biases and norms, which are initialized to zeros and ones."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return module


def layer(pattern=PATTERN, dim=E, dtype=torch.float64, **options):
    return jiggled(MultiheadDilatedAttention(dim, H, pattern, dtype=dtype, **options))


def torchs(**options):
    return jiggled(nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64, **options))


def rand(*shape):
    return torch.randn(*shape, E, dtype=torch.float64, requires_grad=True)


def same(got, want, tol=1e-12):
    torch.testing.assert_close(got, want, rtol=tol, atol=tol)


def right_padding(floating):
    """Return a padding mask (B, N): True (or -inf) beyond LENGTHS."""
    pad = torch.arange(N) >= LENGTHS[:, None]
    return torch.zeros(pad.shape, dtype=torch.float64).masked_fill(pad, -torch.inf) if floating else pad


# (arguments of the constructor, arguments of the call)
CALLS = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {}),
    "not this time": ({"causal": True}, {"causal": False}),
    "this time": ({}, {"causal": True}),
    "scale, engine": ({"scale": 0.3, "engine": "math"}, {}),
    "lengths": ({"causal": True}, {"lengths": torch.tensor([9, 0])}),
    "documents": ({}, {"cu_seqlens": torch.tensor([0, 4, 9], dtype=torch.int32)}),
}


@pytest.mark.parametrize("options, called", CALLS.values(), ids=CALLS)
def test_is_the_op(options, called):
    q, k, v = (torch.randn(1 if "cu_seqlens" in called else 2, 9, h, 6) for h in (4, 2, 2))
    want = dilated_attention(q, k, v, PATTERN, **{**options, **called})
    assert torch.equal(DilatedAttention(PATTERN, **options)(q, k, v, **called), want)


def test_dropout_follows_the_mode():
    q, module = torch.randn(2, 9, 4, 6), DilatedAttention(PATTERN, dropout=0.5)
    torch.manual_seed(3)
    trained = module(q, q, q)
    torch.manual_seed(3)
    assert torch.equal(trained, dilated_attention(q, q, q, PATTERN, dropout=0.5))
    plain = dilated_attention(q, q, q, PATTERN)
    assert torch.equal(module.eval()(q, q, q), plain) and not torch.equal(trained, plain)


def test_engine_choice_says_name_and_reasons():
    module = DilatedAttention(PATTERN, dropout=0.1)
    q = torch.randn(1, 4, 4, 8)
    choice = module.engine_choice(q)
    assert choice.name == "math" and {"cudnn", "flash", "cpu_flash"} <= set(choice.rejected)
    assert "dropout" in choice.rejected["cpu_flash"] and "runs on cuda, not on cpu" in str(choice)
    assert module.eval().engine_choice(q).name == "cpu_flash"  # in eval mode the layer uses no dropout
    assert DilatedAttention(PATTERN, engine="math").engine_choice(q).rejected == {}


def test_pattern_as_a_mapping():
    assert DilatedAttention(PATTERN.to_dict()).pattern == layer(PATTERN.to_dict()).attention.pattern == PATTERN


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_dense_equals_torchs(shape, bias):
    theirs, ours = torchs(bias=bias), layer(DENSE, bias=bias)
    ours.load_state_dict(theirs.state_dict())
    x = rand(*shape)
    y = x.detach().clone().requires_grad_()
    want, got = theirs(x, x, x, need_weights=False)[0], ours(y, y, y)[0]
    same(got, want)
    compare_gradients(theirs, ours, (x, y), (want, got), torch.ones_like(want).cumsum(-1))


@pytest.mark.parametrize("batched", [True, False], ids=["3-D", "2-D"])
@pytest.mark.parametrize("floating", [False, True], ids=["bool", "-inf"])
def test_padding_equals_torchs(floating, batched):
    theirs, ours, mask = torchs(), layer(DENSE), right_padding(floating)
    ours.load_state_dict(theirs.state_dict())
    x = rand(3, N) if batched else rand(N)
    y = x.detach().clone().requires_grad_()
    mask = mask if batched else mask[1]
    want = theirs(x, x, x, key_padding_mask=mask, need_weights=False)[0]
    got = ours(y, y, y, key_padding_mask=mask)[0]
    # padded queries, used by no one: torch lets them attend to real keys, here they are 0 before the output projection
    real = mask == 0
    same(got[real], want[real])
    same(got[~real], ours.out_proj.bias.expand_as(got[~real]))
    compare_gradients(theirs, ours, (x, y), (want, got), real[..., None] * torch.ones_like(want).cumsum(-1))


def compare_gradients(theirs, ours, inputs, outputs, grad):
    want = torch.autograd.grad(outputs[0], [inputs[0], *theirs.parameters()], grad)
    got = torch.autograd.grad(outputs[1], [inputs[1], *ours.parameters()], grad)
    assert list(dict(theirs.named_parameters())) == list(dict(ours.named_parameters()))
    for a, b in zip(got, want, strict=True):
        same(a, b, 1e-10)


def test_returns_a_pair_without_weights():
    x, module = rand(2, N), layer()
    for out, weights in (module(x), module(x, x, x), module(query=x, key=x, value=x, need_weights=False)):
        assert weights is None and torch.equal(out, module(x)[0])


def test_is_causal_of_a_call():
    x, module = rand(2, N), layer()
    once = module(x, is_causal=True)[0]
    assert not torch.allclose(module(x)[0], once)
    module.attention.causal = True
    assert torch.equal(module(x)[0], once)


def by_hand(block, x, lengths=None):
    """nn.TransformerEncoderLayer with norm_first=False, composed from its parts with the op as attention."""
    a = block.self_attn
    q, k, v = nn.functional.linear(x, a.in_proj_weight, a.in_proj_bias).unflatten(-1, (3, H, E // H)).unbind(-3)
    attended = dilated_attention(q, k, v, PATTERN, causal=a.attention.causal, lengths=lengths).flatten(-2)
    x = block.norm1(x + a.out_proj(attended))
    return block.norm2(x + block.linear2(block.linear1(x).relu()))


def encoder_layer(**options):
    dense = nn.TransformerEncoderLayer(E, H, 32, batch_first=True, dropout=0.0, dtype=torch.float64)
    block = copy.deepcopy(dense)
    block.self_attn = layer(**options)
    block.self_attn.load_state_dict(dense.self_attn.state_dict())
    return block, dense


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("causal", [False, True], ids=["both directions", "causal"])
@pytest.mark.parametrize("mode", ["train", "eval", "eval, no_grad"])
def test_inside_an_encoder_layer(mode, causal, padded):
    """In eval mode, torch has a fast path that would compute dense attention from the layer's parameters."""
    block, dense = encoder_layer(causal=causal)
    block.train(mode == "train"), dense.eval()
    x, options = rand(3, N).detach(), {"src_key_padding_mask": right_padding(False)} if padded else {}
    with torch.set_grad_enabled(mode != "eval, no_grad"):
        got = block(x, **options)
        want = by_hand(block, x, LENGTHS if padded else None)
    real = ~right_padding(False) if padded else slice(None)
    same(got[real], want[real])
    assert not torch.allclose(got[0], dense(x)[0], atol=1e-3)


@pytest.mark.parametrize("nested", [True, False], ids=["nested tensors on", "off"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_inside_an_encoder(training, nested):
    encoder = nn.TransformerEncoder(encoder_layer()[0], 2, enable_nested_tensor=nested).train(training)
    x = rand(3, N).detach()
    with torch.no_grad():
        got = encoder(x, src_key_padding_mask=right_padding(False))
        want = x
        for block in encoder.layers:
            want = by_hand(block, want, LENGTHS)
    same(got[~right_padding(False)], want[~right_padding(False)])


CAUSAL_MASKS = {
    "bool": torch.ones(N, N, dtype=torch.bool).triu(1),
    "float": nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64),
    "float32": nn.Transformer.generate_square_subsequent_mask(N),
    "a matrix a head": torch.ones(3 * H, N, N, dtype=torch.bool).triu(1),
}
FUTURE = CAUSAL_MASKS["float"]
OTHER_MASKS = {
    "nothing hidden": torch.zeros(N, N, dtype=torch.bool),
    "all hidden": torch.ones(N, N, dtype=torch.bool),
    "the diagonal hidden, too": torch.ones(N, N, dtype=torch.bool).triu(),
    "one key more": FUTURE.index_put((torch.tensor(5), torch.tensor(2)), torch.tensor(-torch.inf, dtype=FUTURE.dtype)),
    "one key less": FUTURE.index_put((torch.tensor(2), torch.tensor(5)), torch.tensor(0.0, dtype=FUTURE.dtype)),
    "a bias": FUTURE + torch.full((N, N), 0.5).tril(-1),
    "a large number in place of infinity": FUTURE.clamp(min=-1e9),
    "the other way": FUTURE.T,
    "integers": FUTURE.isinf().long(),
    "one token more": nn.Transformer.generate_square_subsequent_mask(N + 1),
    "other matrices": torch.ones(H, N, N, dtype=torch.bool).triu(1),
}


@pytest.mark.parametrize("hint", [True, False], ids=["is_causal", "no hint"])
@pytest.mark.parametrize("mode", ["train", "eval, no_grad"])
@pytest.mark.parametrize("mask", CAUSAL_MASKS)
def test_an_encoder_layer_takes_the_causal_mask(mask, mode, hint):
    block, _ = encoder_layer()
    x = rand(3, N).detach()
    with torch.set_grad_enabled(mode == "train"):
        got = block.train(mode == "train")(x, src_mask=CAUSAL_MASKS[mask], is_causal=hint)
    block.self_attn.attention.causal = True
    same(got, by_hand(block, x))


def test_an_encoder_and_one_sample_take_the_causal_mask():
    encoder = nn.TransformerEncoder(encoder_layer()[0], 2, enable_nested_tensor=False)
    x, mask = rand(3, N).detach(), CAUSAL_MASKS["float"]
    got = encoder(x, mask=mask, is_causal=True), encoder.layers[0](x[0], src_mask=mask, is_causal=True)
    for block in encoder.layers:
        block.self_attn.attention.causal = True
    same(got[0], by_hand(encoder.layers[1], by_hand(encoder.layers[0], x)))
    same(got[1], by_hand(encoder.layers[0], x[:1])[0])


@pytest.mark.parametrize("mask", OTHER_MASKS)
def test_other_masks_are_refused(mask):
    """Other masks are refused even with is_causal=True, a hint that torch itself would believe."""
    for hint in (True, False):
        with pytest.raises(ValueError, match=r"not exactly the causal mask of .* tokens.*is_causal=True of the call"):
            layer()(rand(3, N), attn_mask=OTHER_MASKS[mask], is_causal=hint)


def test_a_layer_that_sees_both_sides_refuses_the_causal_mask():
    with pytest.raises(ValueError, match="its kv_conv sees tokens on both sides"):
        layer(kv_conv=3)(rand(3, N), attn_mask=CAUSAL_MASKS["bool"])


def test_grouped_query_equals_repeated_weights():
    grouped, full, state = layer(num_kv_heads=2), layer(), {}
    for name, x in grouped.state_dict().items():
        if name.startswith("in_proj"):
            q, *kv = x.split([E, E // 2, E // 2])
            x = torch.cat([q, *(y.unflatten(0, (2, E // H)).repeat_interleave(2, 0).flatten(0, 1) for y in kv)])
        state[name] = x
    full.load_state_dict(state)
    x = rand(2, N)
    same(grouped(x)[0], full(x)[0])


def test_sub_layernorm_comes_before_the_projection():
    with_norm, without = layer(sub_layernorm=True), layer()
    state = with_norm.state_dict()
    assert {"sub_norm.weight", "sub_norm.bias"} == set(state) - set(without.state_dict())
    without.load_state_dict({k: v for k, v in state.items() if not k.startswith("sub_norm")})
    without.out_proj = nn.Sequential(with_norm.sub_norm, with_norm.out_proj)
    x = rand(2, N)
    same(with_norm(x)[0], without(x)[0])


@pytest.mark.parametrize("rotary", [False, True], ids=["none", "rotary"])
def test_projection_is_not_copied(monkeypatch, rotary):
    """q, k, v reach the engine as views of one projection. With rotary v is separate, which frees unrotated q and k."""
    calls, projected, linear = record(monkeypatch, "math"), [], nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda *args: projected.append(linear(*args)) or projected[-1])
    layer(num_kv_heads=2, engine="math", position_encoding="rotary" if rotary else "none")(rand(2, 32))
    storage = lambda x: x.untyped_storage().data_ptr()  # noqa: E731
    assert calls.forward
    for q, k, v in calls.forward:
        assert storage(v) == storage(projected[int(rotary)])
        assert (storage(q) == storage(k) == storage(v)) != rotary


def test_autocast():
    module = layer(dtype=torch.float32, position_encoding="rotary")
    x = torch.randn(2, N, E, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = module(x)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16 and module.in_proj_weight.grad.dtype == torch.float32
    torch.testing.assert_close(out.float(), module(x)[0], rtol=0, atol=0.05)


@pytest.mark.parametrize("copying", [copy.deepcopy, None], ids=["deepcopy", "state dict"])
def test_copies(copying):
    options = {"sub_layernorm": True, "num_kv_heads": 2, "position_encoding": "xpos"}
    module, x = layer(**options), rand(2, N)
    want = module(x)[0]
    twin = copying(module) if copying else layer(**options)
    twin.load_state_dict(module.state_dict())
    assert torch.equal(twin(x)[0], want)
    nn.init.zeros_(twin.in_proj_weight)
    assert torch.equal(module(x)[0], want)


@pytest.mark.parametrize(
    "options",
    [{}, {"position_encoding": "rotary", "num_kv_heads": 2, "sub_layernorm": True, "causal": True}],
    ids=["plain", "rotary, gqa, sub-norm, causal"],
)
def test_compiles_to_one_graph(options):
    module, x = layer(**options), rand(2, N)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    got, want = compiled(x)[0], module(x)[0]
    same(got, want)
    for a, b in zip(*(torch.autograd.grad(y.sum(), list(module.parameters())) for y in (got, want)), strict=True):
        same(a, b)


X = torch.randn(3, N, E)
PAD = right_padding(False)
HOLE = PAD.clone()
HOLE[1, 2] = True
MADE = MultiheadDilatedAttention(E, H, PATTERN)
# (call, exception, part of its message)
MISUSE = [
    (lambda: layer(num_kv_heads=3), ValueError, "num_kv_heads=3.*divide.*num_heads=4"),
    (lambda: layer(dim=25), ValueError, "num_heads=4.*embed_dim=25"),
    (lambda: layer([(4, 1)]), TypeError, r"pattern.*mapping.*\[\(4, 1\)\]"),
    (lambda: layer(batch_first=False), ValueError, "batch_first.*Transpose"),
    (lambda: layer(position_encoding="alibi"), ValueError, "position_encoding.*rotary.*'alibi'"),
    (lambda: layer(position_encoding="rotary", dim=20), ValueError, "head_dim must be even.*got 5"),
    (lambda: layer(dropout=1.0), ValueError, r"dropout.*\[0, 1\).*1.0"),
    (lambda: layer(engine="fast"), ValueError, "engine.*math.*'fast'"),
    (lambda: MADE(X, need_weights=True), ValueError, "need_weights=True.*need_weights=False"),
    (lambda: MADE(X, attn_mask=torch.ones(N, N)), ValueError, "attn_mask.*causal=True.*cu_seqlens"),
    (lambda: MADE(X, X.clone(), X), ValueError, "^key must be the query.*Leave key out"),
    (lambda: MADE(X, X, X.clone()), ValueError, "^value must be the query"),
    (lambda: MADE(X[..., 1:]), ValueError, r"query must be \(B, N, 24\).*\(3, 13, 23\)"),
    (lambda: MADE(X, key_padding_mask=HOLE), ValueError, "real tokens after padding.*on the right"),
    (lambda: MADE(X, key_padding_mask=PAD.flip(1)), ValueError, "on the right.*cu_seqlens"),
    (lambda: MADE(X, key_padding_mask=PAD[:2]), ValueError, r"\(3, 13\).*\(2, 13\)"),
    (lambda: MADE(X, key_padding_mask=PAD.int()), ValueError, "bool.*int32"),
    (lambda: MADE(X, key_padding_mask=PAD * 0.5), ValueError, "0 and -inf only"),
    (lambda: MADE(X, key_padding_mask=PAD, lengths=LENGTHS), ValueError, "not both"),
]


@pytest.mark.parametrize("run, error, message", MISUSE, ids=lambda x: x if isinstance(x, str) else "")
def test_misuse(run, error, message):
    with pytest.raises(error, match=message):
        run()
