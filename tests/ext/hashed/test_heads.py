"""Layers with hashed heads: their definition, the losses of their codes, recomputation, compilation and decoding."""

import copy
import pickle

import pytest
import torch
import torch._dynamo.testing
from torch import nn

import lightning_dilated as ld
from lightning_dilated.attention import hashed_attention
from lightning_dilated.ext.decoding import token_step
from lightning_dilated.memory.settings import MemorySettings

from ...models import PATTERN, SIZES, batch, loader, tiny, trainer

HASHED = {"groups": 2, "codes": 3, "latest": 5, "probes": 2, "soft_until": 20}
KV = {"num_kv_heads": 2}


def moved(model, seed=7):
    """Add noise to every weight of the model, so that it differs from its initial value."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def lively(hashed=HASHED, **options):
    torch.manual_seed(3)
    return moved(tiny(hashed=hashed, **KV | options)).train()


def convolved(x, conv):
    """Convolve x (N, C) by definition."""
    padded = nn.functional.pad(x, (0, 0, conv.taps - 1, 0))
    return x + sum(padded[i : i + len(x)] * w for i, w in enumerate(conv.weight))


def hashed_rows(layer, x, soft, labelled=None):
    """Return the outputs (N, 2, 4) of the hashed heads for a sample x (N, 16), and `HashedLosses`, by definition."""
    heads = layer.hashed
    q, k, v = (y.unflatten(-1, (-1, 4)) for y in (x @ layer.in_proj_weight.T).split([16, 8, 8], -1))
    own = convolved(torch.cat([q[:, 2:].flatten(1), k[:, 1], v[:, 1]], -1), heads.conv)
    q, k, v = (y.unflatten(-1, (-1, 4))[None] for y in own.split([8, 4, 4], -1))
    codes = x.detach() if soft else x
    z_q = convolved(codes, heads.query_conv) @ heads.query_code.weight.T
    z_k = convolved(codes, heads.key_conv) @ heads.key_code.weight.T
    z_q, z_k = (z.view(1, len(x), 1, 2, 3) for z in (z_q, z_k))
    hashed = heads.description
    out, losses = hashed_attention(
        q, k, v, z_q, z_k, heads.null, latest=hashed.latest, probes=hashed.probes, soft=soft, code_scores=not soft,
        labelled=labelled,
    )  # fmt: skip
    return out[0], losses


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("tokens", [20, 21])
def test_the_layer_is_its_definition(training, tokens):
    """In training, sequences of up to `soft_until` tokens read all rows."""
    torch.manual_seed(4)
    layer = ld.MultiheadDilatedAttention(
        16, 4, PATTERN, **KV, causal=True, position_encoding="rotary", bias=False, hashed=HASHED, dtype=torch.float64
    )
    moved(layer).train(training)
    x = torch.randn(tokens, 16, dtype=torch.float64, requires_grad=True)
    leaves = [x, *layer.parameters()]
    out, _ = hashed_rows(layer, x, training and tokens == 20)
    q, k, v = layer.projected(x[None], layer.table(x[None]))[:3]
    others = layer.attention(q, k, v)[0]
    assert not others[:, 2:].any()
    want = layer.join(torch.cat([others[:, :2], out], 1)[None])[0]
    got = layer(x[None])[0][0]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(y.square().sum(), leaves, materialize_grads=True) for y in (got, want)]
    for grad, want_grad in zip(*grads, strict=True):
        torch.testing.assert_close(grad, want_grad, rtol=1e-10, atol=1e-10)


def test_initial_weights():
    """Keys begin with the token before them; codes begin as sums of three tokens."""
    model = ld.LongNetLM(PATTERN, **SIZES, hashed=HASHED)
    model.configure_model()
    heads = model.transformer.blocks[1].attention.hashed
    taps = heads.conv.weight.T.tolist()
    assert taps == [[0, 0, 0, 0]] * 4 + [[0, 0, 1, 0]] * 4 + [[0, 0, 0, 0]] * 4
    x = torch.arange(1.0, 9.0)[:, None] * torch.ones(16)
    torch.testing.assert_close(heads.query_conv(x[None])[0, 5:], x[5:] + 0.8 * x[4:-1] + 0.6 * x[3:-2])
    torch.testing.assert_close(heads.key_conv(x[None])[0, 5:], x[4:-1] + 0.8 * x[3:-2] + 0.6 * x[2:-3])
    assert heads.query_code.weight.std() > 0.1


def test_other_layers_are_unchanged():
    model = ld.LongNetLM([PATTERN, ld.DilatedPattern.dense()], **SIZES, hashed={**HASHED, "layers": [1]})
    assert model.patterns == (PATTERN, ld.DilatedPattern([ld.Branch(None, 1, heads=(0, 1, 2))]))
    model.configure_model()
    assert [block.attention.hashed is not None for block in model.transformer.blocks] == [False, True]


# -- the losses of the codes -------------------------------------------------------------------------------------------
def labels_in_part(data, every=3):
    """Return the batch with labels at some tokens only."""
    labels = data["labels"].clone()
    labels[:, ::every] = -100
    return {**data, "labels": labels}


def by_hand(model, data, seen):
    """Return the mean loss of a token plus the losses of the codes, from the layers' inputs `seen`."""
    total, count = model.loss_terms(data)
    labelled = data["labels"] != -100
    for block in model.transformer.blocks:
        layer, soft = block.attention, data["tokens"].shape[1] <= HASHED["soft_until"]
        losses = [hashed_rows(layer, x, soft, m[None])[1] for x, m in zip(seen[layer], labelled, strict=True)]
        hashed = layer.hashed.description
        for x, mask in zip(losses, labelled, strict=True):
            total = total + (hashed.agree * x.agree + hashed.contrast * x.contrast).mean(-1).sum()
            assert len(losses) == 1  # balance and spread are means over a batch
            total = total + mask.sum() * (hashed.balance * x.balance + hashed.spread * x.spread).mean()
    return total / count


def gradients_by_hand(model, data):
    seen, hooks = {}, []
    for block in model.transformer.blocks:
        keep = lambda layer, args, options: seen.__setitem__(layer, args[0])  # noqa: E731
        hooks.append(block.attention.register_forward_pre_hook(keep, with_kwargs=True))
    loss = by_hand(model, data, seen)
    for hook in hooks:
        hook.remove()
    return gradients(model, loss)


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)


def compare(got, want):
    for grad, want_grad in zip(got, want, strict=True):
        torch.testing.assert_close(grad, want_grad, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("tokens", [20, 33])
def test_the_loss_trains_the_codes(tokens):
    model, data = lively({**HASHED, "contrast": 0.7, "spread": 0.3}), labels_in_part(batch(1, tokens))
    want = gradients_by_hand(model, data)
    loss, _ = model.token_mean(data)
    torch.testing.assert_close(loss, model.loss_terms(data)[0] / (data["labels"] != -100).sum())
    model.token_mean(data)  # a forward without a backward changes nothing
    loss, _ = model.token_mean(data)
    compare(gradients(model, loss), want)
    compare(gradients(model, model.token_mean(data)[0] * 3), [3 * x for x in want])


@pytest.mark.parametrize(
    "options", [{"policy": "block", "tile": 8}, {"policy": "attention-kept"}, {"policy": "block", "every": 2}]
)
def test_recomputed_gradients_are_equal(options):
    """Two batches of different labels count in one backward."""
    model = lively()
    data = [labels_in_part(batch(2, 33), every) for every in (2, 3)]
    want = [gradients(model, model.token_mean(x)[0]) for x in data]
    assert not torch.equal(want[0][-1], want[1][-1])
    model.transformer.memory = MemorySettings(**options)
    both = gradients(model, sum(model.token_mean(x)[0] for x in data))
    compare(both, [a + b for a, b in zip(*want, strict=True)])
    for x, grads in zip(data, want, strict=True):
        compare(gradients(model, model.token_mean(x)[0]), grads)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_its_own_losses(duplicate):
    """The copy's step trains its codes, and neither model changes a step of the other."""
    model, data = lively(), batch(2, 33)
    want = gradients(model, model.token_mean(data)[0])
    other = duplicate(model)
    steps = [(x, x.token_mean(data)[0]) for x in (model, other)]
    for x, loss in steps:
        compare(gradients(x, loss), want)
    del model, steps, x
    compare(gradients(other, other.token_mean(data)[0]), want)


def test_only_training_steps_train_the_codes():
    model, data = lively(), batch(2, 33)
    want = gradients(model, model.loss_terms(data)[0])
    gradients(model, model.token_mean(data)[0])
    compare(gradients(model, model.loss_terms(data)[0]), want)
    model.transformer.memory = MemorySettings(policy="block")
    gradients(model, model.token_mean(data)[0])
    compare(gradients(model, model.loss_terms(data)[0]), want)
    with torch.no_grad():
        model.eval()(batch(3, 40)["tokens"])
    compare(gradients(model, model.loss_terms(data)[0]), want)
    heads = model.transformer.blocks[0].attention.hashed
    heads.begin_losses(data)
    assert heads.terms.labelled is None


def raised(*unused):
    raise MemoryError


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_step_that_raised_counts_no_queries_later(in_backward):
    model, data = lively(), batch(2, 33)
    want = gradients(model, model.loss_terms(data)[0])
    loss = model.token_mean(data)[0]
    last = model.transformer.blocks[0].attention
    hook = last.register_full_backward_hook(raised) if in_backward else last.register_forward_hook(raised)
    with pytest.raises(MemoryError):
        loss = model.token_mean(data)[0]
        loss.backward()
    hook.remove()
    terms = [block.attention.hashed.terms for block in model.transformer.blocks]
    assert all(x.labelled is None and x.scale is None for x in terms)
    compare(gradients(model, model.loss_terms(data)[0]), want)


def test_a_step_builds_the_model():
    loss = ld.LongNetLM(PATTERN, **SIZES, hashed=HASHED).training_step(batch(1, 21), 0)
    assert torch.isfinite(loss)


def test_a_fit_logs_the_rows_that_queries_read():
    model = ld.LongNetLM(PATTERN, **SIZES, hashed={**HASHED, "layers": [1]})
    run = trainer(max_steps=2, accumulate_grad_batches=2)
    run.fit(model, loader(*[batch(2, 20)] * 4))
    assert run.logged_metrics["train_hashed_rows_1"] == 10.5  # all earlier rows


def test_compiled_blocks_train_as_eager_ones_in_one_graph():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model, data = lively(depth=3), labels_in_part(batch(2, 33))
    want = gradients(model, model.token_mean(data)[0])
    for block in model.transformer.blocks:
        block.compile(fullgraph=True, backend=counter)
    compare(gradients(model, model.token_mean(data)[0]), want)
    assert counter.frame_count == 1


def test_layers_with_and_without_hashed_heads_may_have_their_own_graphs():
    with torch._dynamo.config.patch(recompile_limit=8):
        model = tiny(hashed={**HASHED, "layers": [0, 1, 2]}, depth=5)
        model.transformer.compile_blocks()
        assert torch._dynamo.config.recompile_limit == 2 * 24


def test_padding_and_documents():
    model = lively().eval()
    tokens = batch(2, 40)["tokens"]
    whole = model(tokens, lengths=torch.tensor([17, 40]))
    torch.testing.assert_close(whole[:1, :17], model(tokens[:1, :17]), rtol=1e-11, atol=1e-11)
    packed = model(tokens[:1], cu_seqlens=torch.tensor([0, 22, 40], dtype=torch.int32))
    torch.testing.assert_close(packed[:, 22:], model(tokens[:1, 22:]), rtol=1e-11, atol=1e-11)


def test_double_backward_is_refused():
    model = lively()
    weight = model.transformer.blocks[0].attention.hashed.query_code.weight
    with pytest.raises(RuntimeError, match="hashed attention of a layer has no double backward"):
        torch.autograd.grad(model(batch(1, 9)["tokens"]).sum(), weight, create_graph=True)[0].sum().backward()


# -- decoding ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cuts", [[60], [35, 25], [1] * 60, [30] + [1] * 30])
@pytest.mark.parametrize("latest", [5, 10**12])
@torch.no_grad()
def test_decoding_equals_the_whole_sequence(cuts, latest):
    """Memory grows with the tokens, not with `latest`."""
    model, tokens = lively({**HASHED, "codes": 2, "latest": latest}).eval(), batch(2, 60)["tokens"]
    caches = model.transformer.new_caches(max_length=30)
    parts = [model(x, caches=caches) for x in tokens.split(cuts, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens), rtol=1e-11, atol=1e-11)
    assert caches[0].nbytes > caches[0].mixer_states["hashed"].nbytes > 0
    assert caches[0].mixer_states["hashed"].places.shape[3] <= min(latest, 120)


@torch.no_grad()
def test_prompts_of_different_lengths():
    model, tokens = lively().eval(), batch(2, 60)["tokens"]
    want, lengths = model(tokens), [27, 40]
    for cuts in ([40], [20, 20]):
        caches = model.transformer.new_caches(lengths=lengths)
        for prompt in tokens[:, :40].split(cuts, 1):
            model(prompt, caches=caches)
        for i in range(3):
            following = torch.stack([tokens[b, n + i] for b, n in enumerate(lengths)])[:, None]
            got = model(following, caches=caches)[:, 0]
            torch.testing.assert_close(got, torch.stack([want[b, n + i] for b, n in enumerate(lengths)]))


@torch.no_grad()
def test_selected_samples():
    model, tokens = lively().eval(), batch(3, 41)["tokens"]
    caches = model.transformer.new_caches()
    model(tokens[:, :40], caches=caches)
    for cache in caches:
        cache.select(torch.tensor([2, 0]))
    got = model(tokens[[2, 0], 40:], caches=caches)
    torch.testing.assert_close(got, model(tokens)[[2, 0], 40:], rtol=1e-11, atol=1e-11)


def test_a_token_step_is_not_captured():
    assert token_step.why_not_captured(lively()) == "the host counts the rows of hashed heads"


# -- refusals ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"groups": 0}, ValueError, "hashed groups must be at least 1, got 0"),
        ({"codes": 1}, ValueError, "hashed codes must be at least 2, got 1"),
        ({"codes": 64}, ValueError, r"codes \*\* groups must be at most 1,048,576; got 64 \*\* 4"),
        ({"probes": 6}, ValueError, "hashed probes must be at most 5, got 6. There are 4 groups"),
        ({"layers": []}, TypeError, r"hashed layers must be a list of layer numbers, or None; got \[\]"),
        ({"layers": "3"}, TypeError, "hashed layers must be a list of layer numbers, or None; got '3'"),
        ({"layers": [-1]}, ValueError, "hashed layers must be at least 0, got -1"),
        ({"agree": -1.0}, ValueError, r"hashed agree must be a number in \[0"),
        ({"soft_until": None}, TypeError, "hashed soft_until must be an integer, got None"),
    ],
)
def test_wrong_descriptions(arguments, error, says):
    with pytest.raises(error, match=says):
        ld.Hashed(**arguments)


def test_description_reads_what_it_writes():
    hashed = ld.Hashed(layers=[3, 1, 3], probes=1)
    assert hashed.layers == (1, 3)
    assert hashed.to_dict() == {"probes": 1, "layers": [1, 3]}
    assert ld.Hashed.from_dict(hashed.to_dict()) == hashed


@pytest.mark.parametrize(
    ("hashed", "error", "says"),
    [
        ({"layers": [0, 2]}, ValueError, r"hashed layers=\[0, 2\] must be below the model's depth, 2"),
        ({"heads": 4}, ValueError, "hashed heads=4 leaves no other head: the layer has 4 kv heads"),
        ({"head": 1}, ValueError, "hashed has no key 'head'"),
        (4, TypeError, "hashed is given as a Hashed or a mapping of its arguments; got 4"),
    ],
)
def test_wrong_arguments_of_models(hashed, error, says):
    with pytest.raises(error, match=says):
        ld.LongNetLM(PATTERN, **SIZES, hashed=hashed)


def test_heads_that_only_the_pattern_serves():
    pattern = ld.DilatedPattern([ld.Branch(8, 1, heads=(3,))])
    with pytest.raises(ValueError, match=r"hashed heads=1 leaves .* without heads: take fewer hashed heads"):
        ld.LongNetLM(pattern, **SIZES, hashed=HASHED)


def test_layers_that_are_not_causal():
    with pytest.raises(ValueError, match="hashed heads read earlier rows only, and this model is not causal"):
        ld.LongNetMLM(PATTERN, **SIZES, hashed=HASHED)
    with pytest.raises(ValueError, match="hashed heads read earlier rows only, and this layer is not causal"):
        ld.MultiheadDilatedAttention(16, 4, PATTERN, hashed=HASHED)


def test_dropout_of_weights_is_refused():
    with pytest.raises(ValueError, match=r"attention_dropout is 0\.1: set it to 0, or leave hashed out"):
        ld.LongNetLM(PATTERN, **SIZES, hashed=HASHED, attention_dropout=0.1)


def test_graphs_and_head_chunks_are_refused():
    with pytest.raises(ValueError, match="cuda_graphs cannot record layers with a recurrence or hashed heads"):
        ld.LongNetLM(PATTERN, **SIZES, hashed=HASHED, cuda_graphs=True)
    with pytest.raises(ValueError, match="head_chunks=2 is not offered with hashed, which reads all heads"):
        lively().transformer.memory = MemorySettings(head_chunks=2)
