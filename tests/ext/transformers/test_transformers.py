"""attn_implementation="ring_dilated" equals sdpa for decoders of transformers. Cases that would differ are refused."""

import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch

import lightning_dilated as ld

pytest.importorskip("transformers", reason="needs the extra transformers", minversion="5.24")
import transformers

from .decoders import FAMILIES, WINDOW, close, config, decoder, step, tokens

N = 23
BOUNDS = [0, 9, 10, N]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
DTYPES = list(TOLERANCE)
ld.integrations.transformers.register()


def restarting():
    """Return position_ids (1, N) that restart in each document of BOUNDS."""
    return torch.cat([torch.arange(b - a) for a, b in pairwise(BOUNDS)])[None]


def padded(lengths=(N, 14, 1)):
    """Return (tokens, labels, attention_mask) of samples that are padded on the right."""
    inputs = tokens(len(lengths), N)
    mask = (torch.arange(N)[None] < torch.tensor(lengths)[:, None]).long()
    return inputs, inputs.masked_fill(mask == 0, -100), mask


# -- equal to sdpa -------------------------------------------------------------------------------------------------------
def equal(family, dtype, *inputs, **options):
    """Compare a step with the model's step under sdpa."""
    want = step(decoder(family, "sdpa", dtype), *inputs, **options)
    close(step(decoder(family, "ring_dilated", dtype), *inputs, **options), want, TOLERANCE[dtype])
    return want


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_equals_sdpa(family, dtype):
    equal(family, dtype, tokens(2, N))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_equal_sdpa(family, dtype):
    options = {"position_ids": restarting(), "use_cache": False}
    want = equal(family, dtype, tokens(1, N), **options)
    parts = [tokens(1, N)[:, a:b] for a, b in pairwise(BOUNDS)]
    apart = torch.cat([step(decoder(family, dtype=dtype), part)["logits"] for part in parts])
    close({"logits": apart}, {"logits": want["logits"]}, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_right_padding_equals_sdpa(family, dtype):
    inputs, labels, mask = padded()
    equal(family, dtype, inputs, labels, attention_mask=mask)


@pytest.mark.parametrize("cache", [False, True])
def test_positions_that_jump_ahead(cache):
    """Without a cache or mask, transformers interprets jumps of positions as new documents."""
    at = (torch.arange(N) + 7 * (torch.arange(N) > 11))[None]
    for options in ({}, {"attention_mask": torch.ones(1, N)}):
        equal("mistral", torch.float64, tokens(1, N), position_ids=at, use_cache=cache, **options)


def test_positions_of_padded_tokens():
    """Positions are computed from a mask, as in transformers, and are 1 at padding."""
    inputs, labels, mask = padded()
    at = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    equal("gemma3", torch.float64, inputs, labels, attention_mask=mask, position_ids=at)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_equals_eager(family):
    want = step(decoder(family, "eager", torch.float32), tokens(2, N))
    close(step(decoder(family, dtype=torch.float32), tokens(2, N)), want, 1e-5)


@pytest.mark.parametrize("width", [1, 2, N - 1, N, 100])
def test_widths_of_windows(width):
    options = {"sliding_window": width}
    want = step(decoder("mistral", "sdpa", **options), tokens(2, N))
    close(step(decoder("mistral", **options), tokens(2, N)), want, 1e-10)


@pytest.mark.parametrize("cache", [False, True])
def test_cu_seq_lens_are_the_documents(cache):
    """Positions may restart or continue at each document, because rotary positions are relative."""
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    want = step(decoder("mistral", "sdpa"), tokens(1, N), position_ids=restarting(), use_cache=False)
    bound_options = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds.clone(), "use_cache": cache}
    close(step(decoder("mistral"), tokens(1, N), position_ids=restarting(), **bound_options), want, 1e-10)
    close(step(decoder("mistral"), tokens(1, N), **bound_options), want, 1e-6)  # rotary tables have fp32 rounding


def test_the_loss_and_gradient_checkpointing():
    want = decoder("gemma3", "sdpa")
    loss = want(tokens(2, N), labels=tokens(2, N)).loss
    loss.backward()
    model = decoder("gemma3")
    model.gradient_checkpointing_enable()
    model.train()
    ours = model(tokens(2, N), labels=tokens(2, N), use_cache=False).loss
    ours.backward()
    close(
        {"loss": ours.detach(), **{n: p.grad for n, p in model.named_parameters()}},
        {"loss": loss.detach(), **{n: p.grad for n, p in want.named_parameters()}},
        1e-6,  # transformers computes the loss in fp32
    )


def test_dropout_in_training_only():
    model = decoder("llama", attention_dropout=0.5).eval()
    want = step(decoder("llama", "sdpa").eval(), tokens(1, N))
    close(step(model, tokens(1, N)), want, 1e-10)
    model.train()
    torch.manual_seed(1)
    first = step(model, tokens(1, N))["loss"]
    assert not torch.allclose(first, want["loss"], rtol=1e-4)
    torch.manual_seed(1)
    assert torch.equal(step(model, tokens(1, N))["loss"], first)


def test_set_attn_implementation_and_reload(tmp_path):
    model = decoder("qwen3", "sdpa", torch.float32)
    want = step(model, tokens(1, N))
    model.set_attn_implementation("ring_dilated")
    close(step(model, tokens(1, N)), want, 1e-5)
    model.save_pretrained(tmp_path)
    for implementation in ("ring_dilated", "sdpa"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, attn_implementation=implementation, dtype=torch.float32
        )
        close(step(loaded, tokens(1, N)), want, 1e-5)


@pytest.mark.full
def test_compiled():
    model = decoder("mistral", num_hidden_layers=1)
    with torch.no_grad():
        want = model(tokens(2, N), use_cache=False).logits
        got = torch.compile(model, backend="eager")(tokens(2, N), use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


# -- decoding ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_generate_equals_sdpa(family):
    inputs = tokens(2, 2 * WINDOW)
    options = {"attention_mask": torch.ones_like(inputs), "max_new_tokens": 2 * WINDOW, "do_sample": False}
    want = decoder(family, "sdpa").generate(inputs, **options)
    assert torch.equal(decoder(family).generate(inputs, **options), want)


def test_several_steps_of_a_cache():
    model, inputs = decoder("gemma3").eval(), tokens(2, N)
    want = model(inputs, use_cache=False).logits
    cache = transformers.DynamicCache(config=model.config)
    parts = [model(part, past_key_values=cache).logits for part in inputs.split([9, 1, 6, 7], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), want, rtol=0, atol=1e-6)


# -- patterns of one's own -----------------------------------------------------------------------------------------------
PATTERN = ld.DilatedPattern.longnet([4, 16], [1, 2])
PATTERNS = {
    "one": PATTERN,
    "in turns": [PATTERN, ld.DilatedPattern([ld.Window(3)]), ld.DilatedPattern.dense()],
    "hybrid": {"hybrid": {"local": 4, "global_every": 2}},
    "mapping": {"branches": [{"segment_length": 8, "dilation_rate": 2, "shift": 3}, {"width": 2}]},
}


class Recorded:
    """Records calls of `dilated_attention` in a model."""

    def __init__(self, monkeypatch):
        from lightning_dilated.ext.transformers import attention

        self.calls = []
        monkeypatch.setattr(attention, "dilated_attention", self)

    def __call__(self, q, k, v, pattern, **options):
        out = ld.dilated_attention(q, k, v, pattern, **options)
        self.calls.append((q, k, v, pattern, options, out))
        return out


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("name", PATTERNS)
def test_layers_attend_by_their_patterns(name, family, monkeypatch):
    """The inputs of o_proj are outputs of the op that was called with the layer's pattern and all kv heads."""
    turns = {"layer_types": ["sliding_attention", "full_attention"] * 2} if family == "gemma3" else {}
    model = decoder(family, num_hidden_layers=4, **turns)
    ld.integrations.transformers.set_pattern(model, PATTERNS[name])
    inputs = []
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    recorded = Recorded(monkeypatch)
    model(tokens(2, N))
    read = ld.pattern.layers.layer_patterns(ld.pattern.layers.read_patterns(PATTERNS[name], 4, 4, 2), 4)
    assert [call[3] for call in recorded.calls] == list(read)
    for (q, k, v, pattern, options, _), x in zip(recorded.calls, inputs, strict=True):
        assert q.shape == (2, N, 4, 8) and k.shape == v.shape == (2, N, 2, 8)
        want = ld.dilated_attention(q, k, v, pattern, causal=True, scale=options["scale"])
        assert torch.equal(x, want.flatten(2))


def test_a_pattern_changes_the_result_and_none_takes_it_back():
    model = decoder("mistral")
    want = step(model, tokens(1, N))
    ld.integrations.transformers.set_pattern(model, PATTERN)
    assert not torch.allclose(step(model, tokens(1, N))["logits"], want["logits"], rtol=1e-3)
    ld.integrations.transformers.set_pattern(model, None)
    close(step(model, tokens(1, N)), want, 1e-10)


def test_a_pattern_that_sees_all_is_dense():
    inputs, labels, mask = padded()
    pattern = [ld.DilatedPattern.dense(64), ld.DilatedPattern([ld.Window(50)])]
    want = step(decoder("llama", "sdpa"), inputs, labels, attention_mask=mask)
    close(step(decoder("llama", pattern=pattern), inputs, labels, attention_mask=mask), want, 1e-10)


def test_a_pattern_travels_with_the_config(tmp_path):
    model = decoder("qwen2", dtype=torch.float32, pattern=PATTERNS["in turns"][:2])
    want = step(model, tokens(1, N))
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="ring_dilated", dtype=torch.float32
    )
    close(step(loaded, tokens(1, N)), want, 1e-6)


# -- refusals ------------------------------------------------------------------------------------------------------------
def holes():
    return {"attention_mask": torch.tensor([[1] * 3 + [0] + [1] * (N - 4)])}


FOUR = torch.ones(1, 1, N, N, dtype=torch.bool).tril()
CALLS = {
    "holes": (1, holes(), "has holes.*one run"),
    "longer mask": (1, {"attention_mask": torch.ones(1, N + 1)}, r"must be \(1, 23\).*got \(1, 24\)"),
    "4-D mask": (1, {"attention_mask": FOUR}, r"no mask of shape \(1, 1, 23, 23\)"),
    "output_attentions": (1, {"output_attentions": True}, "output_attentions.*eager"),
    "documents in two rows": (2, {"position_ids": restarting().expand(2, -1), "use_cache": False}, "batch of 2 rows"),
    "documents with a cache": (1, {"position_ids": restarting()}, "use_cache=False"),
    "documents with a mask of ones": (
        1, {"position_ids": restarting(), "attention_mask": torch.ones(1, N)}, "Leave attention_mask out",
    ),
    "documents and padding": (
        1,
        {"cu_seq_lens_q": torch.tensor(BOUNDS, dtype=torch.int32), "attention_mask": torch.ones(1, N)},
        "not both",
    ),
    "documents that differ": (
        1,
        {"cu_seq_lens_q": torch.tensor([0, 5, N]), "position_ids": restarting(), "use_cache": False},
        r"\[9, 10\] and cu_seq_lens_q at \[5\]",
    ),
    "documents of keys": (
        1, {"cu_seq_lens_q": torch.tensor([0, 5, N]), "cu_seq_lens_k": torch.tensor([0, 6, N])}, "cross attention",
    ),
    "documents that end early": (1, {"cu_seq_lens_q": torch.tensor([0, 5, N - 1])}, "cu_seqlens"),
    "head_mask": (1, {"head_mask": torch.ones(2, 4)}, "head masks"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_refused_calls(name):
    batch, options, message = CALLS[name]
    with pytest.raises(ValueError, match=message):
        decoder("llama")(tokens(batch, N), **options)


MODELS = {
    "softcap": ("Gemma2Config", {"head_dim": 8}, "soft-capped scores.*eager"),
    "sinks": ("GptOssConfig", {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}, "attention sinks.*eager"),
    "chunks": (
        "Llama4TextConfig",
        {"head_dim": 8, "num_local_experts": 2, "attention_chunk_size": 8, "intermediate_size_mlp": 32},
        "within chunks",
    ),
    "two-way": ("gemma3", {"use_bidirectional_attention": True}, "mask"),
    "two-way by config": ("LlamaConfig", {"is_causal": False}, "another one"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_refused_models(name):
    family, options, message = MODELS[name]
    model = decoder(family, dtype=torch.float32, **options)
    with pytest.raises(ValueError, match=message):
        model(tokens(1, N))


def test_refused_layers():
    """Arguments that a layer may pass to attention, but that this package does not support, raise."""
    from lightning_dilated.ext.transformers.attention import attend
    from lightning_dilated.ext.transformers.masks import visible_keys

    mask = visible_keys(1, N, N, mask_function=transformers.masking_utils.causal_mask_function)
    q, layer = torch.randn(1, 2, N, 8), torch.nn.Module()
    assert attend(layer, q, q, q, mask)[0].shape == (1, N, 2, 8)
    for message, options in {
        "no mask of transformers": {"attention_mask": None},
        "is_causal=False": {"is_causal": False},
        "sliding_window=4": {"sliding_window": 4},
        "bias of positions": {"position_bias": q},
        "23 queries and 20 keys": {"key": q[:, :, :20], "value": q[:, :, :20]},
        "within chunks": {"position_ids": torch.arange(N)[None], "attention_mask": visible_keys(
            1, N, N, mask_function=transformers.masking_utils.chunked_causal_mask_function(8, torch.zeros(1)), local_size=8
        )},
        r"must be \(1, N\)": {"position_ids": torch.zeros(3, 1, N)},
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=message):
            attend(layer, **{"query": q, "key": q, "value": q, "attention_mask": mask, **options})
    layer.is_cross_attention = True
    with pytest.raises(ValueError, match="cross attention"):
        attend(layer, q, q, q, mask)


def test_refused_patterns():
    set_pattern = ld.integrations.transformers.set_pattern
    model = decoder("llama")
    for error, message, pattern in (
        (ValueError, "1 to 2", [PATTERN] * 3),
        (TypeError, "pattern must be", 7),
        (ValueError, "head", ld.DilatedPattern([ld.Window(4, heads=[4])])),
        (ValueError, "hybrid", {"hybrid": {"unknown": 1}}),
    ):
        with pytest.raises(error, match=message):
            set_pattern(model, pattern)
    with pytest.raises(TypeError, match="a model or a config of transformers, got Linear"):
        set_pattern(torch.nn.Linear(2, 2), PATTERN)
    set_pattern(model, PATTERN)
    with pytest.raises(ValueError, match="caches serve only layers without a pattern"):
        model.generate(tokens(1, 4), max_new_tokens=2)
    assert model.generate(tokens(1, 4), max_new_tokens=2, use_cache=False).shape == (1, 6)


def test_a_pattern_list_needs_the_layers_number():
    from lightning_dilated.ext.transformers.patterns import own_pattern

    layer = torch.nn.Module()
    layer.config = config("llama", dilated_pattern=[PATTERN.to_dict(), ld.DilatedPattern.dense().to_dict()])
    with pytest.raises(ValueError, match="layer_idx"):
        own_pattern(layer)
    layer.layer_idx = 3
    assert own_pattern(layer) == ld.DilatedPattern.dense()


# -- on a GPU ------------------------------------------------------------------------------------------------------------
#: a CPU works, too
DEVICE = "cuda"
LONG = 509


def made_in_16_bits(family, implementation, dtype=torch.bfloat16):
    """Build the decoder in `dtype` with weights that are rounded to bfloat16."""
    sizes = {"head_dim": 64, "hidden_size": 256, "max_position_embeddings": 1024, "eos_token_id": None}
    sizes |= {"initializer_range": 0.08}  # so that scores vary
    sizes |= {} if family == "llama" else {"sliding_window": 100}
    return decoder(family, implementation, torch.bfloat16, **sizes).to(DEVICE, dtype)


def distance(got, want):
    """Return the norm of the difference, relative to the norm of `want`."""
    return float((got.float() - want).norm() / want.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_16_bits_on_a_gpu(family):
    """Logits, loss and gradients are as close to float32 as with sdpa. Greedy tokens differ only in near ties."""
    inputs = tokens(1, LONG).to(DEVICE)
    exact = step(made_in_16_bits(family, "sdpa", torch.float32), inputs)
    models = [made_in_16_bits(family, implementation) for implementation in ("sdpa", "ring_dilated")]
    want, got = (step(model, inputs) for model in models)
    assert set(want) == set(got) == set(exact)
    for name, value in exact.items():
        assert distance(got[name], value) <= 1.5 * distance(want[name], value) + 2**-7, name

    prompts = tokens(8, LONG).to(DEVICE)
    options = {"attention_mask": torch.ones_like(prompts), "max_new_tokens": 8, "do_sample": False}
    for use_cache in (True, False):
        first, second = (
            model.eval().generate(
                prompts, use_cache=use_cache, output_logits=True, return_dict_in_generate=True, **options
            )
            for model in models
        )
        logits = torch.stack(first.logits, 1).float()
        best = logits.topk(2).values
        sure = (best[..., 0] - best[..., 1] > 0.15 * logits.std(-1)).cummin(1).values
        assert sure.sum() > len(prompts)
        assert torch.equal(second.sequences[:, LONG:][sure], first.sequences[:, LONG:][sure])


# -- without transformers ------------------------------------------------------------------------------------------------
SCRIPT = """
import sys
import torchmetrics  # which imports transformers itself, and is imported by lightning
for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
    del sys.modules[name]
import lightning_dilated as ld
ld.integrations.transformers.set_pattern
assert "transformers" not in sys.modules
sys.modules["transformers"] = None
try:
    ld.integrations.transformers.register()
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.mark.full
def test_the_package_does_not_import_transformers():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300
    )
    assert 'pip install "lightning-dilated[transformers]"' in result.stdout, result.stderr


@pytest.mark.parametrize("version", ["4.57.1", "5.0.0", "5.23.0"])
def test_older_releases_are_refused(monkeypatch, version):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)  # imported together with register
    with pytest.raises(
        ImportError, match=rf"needs transformers 5.24 or newer, and {version} is installed: pip install"
    ):
        ld.integrations.transformers.register()
