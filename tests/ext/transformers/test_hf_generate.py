"""Decoding of decoders with patterns equals the full pass, in every mode of transformers' generate."""

import pytest
import torch

import lightning_dilated as ld

pytest.importorskip("transformers", reason="needs the extra transformers", minversion="5.24")
from .decoders import FAMILIES, config, decoder, tokens
from .test_hf_causal_lm import HYBRID

HFCausalLM = ld.integrations.transformers.HFCausalLM
dilated_cache = ld.integrations.transformers.dilated_cache
N, NEW = 19, 14
PATTERNS = {
    "own": None,
    "hybrid": HYBRID,
    "longnet": ld.DilatedPattern.longnet([4, 16], [1, 2]),
    "shifted, windows": {"branches": [{"segment_length": 8, "dilation_rate": 2, "shift": 3}, {"width": 3}]},
}


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_equal_the_full_pass(family, name):
    """Decode a prompt, further chunks and single tokens in float64."""
    model, inputs = decoder(family, pattern=PATTERNS[name]).eval(), tokens(2, N + NEW)
    with torch.no_grad():
        want = model(inputs, use_cache=False).logits
        cache = dilated_cache(model.config)
        parts = [model(part, cache=cache).logits for part in inputs.split([N - 8, 1, 7, *[1] * NEW], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), want, rtol=0, atol=1e-10)
    assert cache.get_seq_length() == N + NEW


def recomputed(model, ids, steps):
    """Return greedy tokens, each computed from the whole sequence."""
    with torch.no_grad():
        for _ in range(steps):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids


@pytest.mark.parametrize("name", [x for x in PATTERNS if x != "own"])
def test_greedy_tokens_are_those_of_the_whole_sequence(name):
    model = decoder("qwen3", pattern=PATTERNS[name], eos_token_id=None).eval()
    ids = tokens(2, N)
    options = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    want = recomputed(model, ids, NEW)
    assert torch.equal(model.generate(ids, cache=dilated_cache(model.config), **options), want)
    assert torch.equal(model.generate(ids, use_cache=False, **options), want)


@pytest.mark.parametrize("options", [
    {"do_sample": True, "top_k": 7, "temperature": 0.8},
    {"num_beams": 3, "do_sample": False},
    {"do_sample": False, "num_return_sequences": 2, "num_beams": 2},
    {"do_sample": False, "repetition_penalty": 1.3, "eos_token_id": [5, 9, 40]},
], ids=str)  # fmt: skip
def test_every_way_of_generating(options):
    """The tokens equal those generated without a cache."""
    model = decoder("llama", pattern=HYBRID).eval()
    ids = tokens(2, N)
    options = {"max_new_tokens": NEW, "attention_mask": torch.ones_like(ids), **options}
    outs = []
    for extra in ({"use_cache": False}, {"cache": dilated_cache(model.config)}):
        torch.manual_seed(1)
        outs.append(model.generate(ids, **options, **extra))
    assert torch.equal(*outs) and outs[0].shape[1] > N


def test_a_conversation_goes_on():
    """A second turn continues with the cache of the first answer."""
    model = decoder("mistral", pattern=HYBRID, eos_token_id=None).eval()
    ids, cache = tokens(1, N), dilated_cache(model.config)
    options = {"max_new_tokens": 5, "do_sample": False}
    first = model.generate(ids, cache=cache, attention_mask=torch.ones_like(ids), **options)
    longer = torch.cat([first, tokens(1, 6)], 1)
    again = model.generate(longer, cache=cache, attention_mask=torch.ones_like(longer), **options)
    assert torch.equal(again, recomputed(model, longer, 5))


def test_the_cache_is_bounded():
    model = decoder("llama", pattern=ld.DilatedPattern([ld.Window(4)])).eval()
    sizes = []
    for length in (64, 128):
        cache = dilated_cache(model.config)
        with torch.no_grad():
            model(tokens(1, length), cache=cache)
        sizes.append(cache.nbytes)
    assert sizes[0] == sizes[1] == 2 * 2 * 2 * 4 * 8 * 8  # layers, k and v, kv heads, rows, D, bytes of float64


def test_hf_causal_lm_generates():
    for pattern in (None, HYBRID):
        model = HFCausalLM(config("gemma3", eos_token_id=None), pattern).train()
        ids = tokens(2, N)
        got = model.generate(ids, max_new_tokens=NEW, do_sample=False)
        assert model.decoder.training
        assert torch.equal(got, recomputed(model.eval().decoder, ids, NEW))


def test_refused():
    model, ids = decoder("llama", pattern=HYBRID).eval(), tokens(2, N)
    mask = (torch.arange(N)[None] < torch.tensor([[N], [7]])).long()
    options = {"max_new_tokens": 3, "do_sample": False}
    with pytest.raises(ValueError, match=r"Pass cache=.*dilated_cache\(model.config\)"):
        model.generate(ids, **options, attention_mask=torch.ones_like(ids))
    with pytest.raises(ValueError, match="padding on the right"):
        model.generate(ids, **options, attention_mask=mask, cache=dilated_cache(model.config))
    with pytest.raises(ValueError, match="a cache serves inference, without gradients"):
        model(ids, cache=dilated_cache(model.config))
    cache = dilated_cache(model.config, max_length=4)
    with pytest.raises(ValueError, match="max_length=4"), torch.no_grad():
        model(ids, cache=cache)
    with pytest.raises(ValueError, match="cannot remove tokens"):
        dilated_cache(model.config).crop(-1)
    scaled = config("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(ValueError, match="Pass use_cache=False, or take another rope_type"):
        dilated_cache(scaled)


@pytest.mark.parametrize("pattern", [None, {"hybrid": {"local": 8, "global_every": 2}}], ids=["own", "hybrid"])
def test_a_stream_draws_what_generate_does(pattern):
    model = HFCausalLM(config("llama"), pattern)
    model.configure_model()
    ids = tokens(3, 20)
    greedy = list(model.generate_stream(ids, 9, temperature=0))
    whole = model.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=[])
    assert torch.equal(torch.stack(greedy, 1), whole[:, 20:])
    drawn = [list(model.generate_stream(ids, 9, top_k=5, generator=torch.Generator().manual_seed(3))) for _ in range(2)]
    assert torch.equal(torch.stack(drawn[0]), torch.stack(drawn[1])) and not torch.equal(
        torch.stack(drawn[0]), torch.stack(greedy)
    )
    # a row that has ended repeats its last token, and the stream ends when all rows have ended
    ends = [int(row[2]) for row in whole[:, 20:]]
    stopped = torch.stack(list(model.generate_stream(ids, 9, temperature=0, stop=ends)), 1)
    for row, full in zip(stopped, whole[:, 20:], strict=True):
        first = next(i for i, x in enumerate(full.tolist()) if x in ends)
        assert row[: first + 1].tolist() == full[: first + 1].tolist() and set(row[first:].tolist()) == {
            int(full[first])
        }
    assert stopped.shape[1] <= 3
    assert list(model.generate_stream(ids, 0)) == []
    for error, message, options in (
        (ValueError, "temperature", {"temperature": -1.0}),
        (ValueError, "stop must lie below", {"stop": 10**6}),
        (ValueError, "at least one token", {"tokens": ids[:, :0]}),
        (TypeError, "max_new_tokens", {"max_new_tokens": 2.5}),
    ):
        with pytest.raises(error, match=message):
            next(model.generate_stream(**{"tokens": ids, "max_new_tokens": 2, **options}))
