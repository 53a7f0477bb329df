"""Rotary scaling in configs: each kind has the logits of sdpa, even on ranks, and too long sequences cause a warning."""

import warnings

import pytest
import torch

import lightning_dilated as ld

pytest.importorskip("transformers", reason="needs the extra transformers", minversion="5.24")
from ...distributed.calls import positions, sequence
from .decoders import config, decoder, tokens
from .test_hf_causal_lm import batch

HFCausalLM = ld.integrations.transformers.HFCausalLM
N, MOST = 23, 16
KINDS = {
    "theta": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": MOST},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": MOST,
    },
    "longrope": {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": MOST, "factor": 4.0,
    },
}  # fmt: skip
FAMILIES = ("llama", "qwen3")


def options(kind):
    return {"rope_parameters": dict(KINDS[kind]), "max_position_embeddings": MOST}


def logits(kind, family, inputs, **extra):
    """Return logits of transformers' sdpa in float64."""
    with torch.no_grad():
        return decoder(family, "sdpa", **options(kind))(inputs, use_cache=False, **extra).logits


def build(kind, family):
    """Build an HFCausalLM with the same weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = HFCausalLM(config(family, **options(kind)))
        ours.configure_model()
    ours.double().decoder.load_state_dict(decoder(family, **options(kind)).state_dict())
    return ours


@pytest.mark.filterwarnings("ignore:a sequence of")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_equals_sdpa(kind, family):
    want = logits(kind, family, tokens(2, N))
    with torch.no_grad():
        torch.testing.assert_close(build(kind, family)({"tokens": tokens(2, N)}), want, rtol=0, atol=1e-10)
    plain = logits("theta", family, tokens(2, N))
    assert kind == "theta" or not torch.allclose(want, plain, atol=1e-4)  # the scaling changes logits


def part(rank, group, kind, family, layout, bounds):
    """Return (positions, logits) of a rank."""
    warnings.simplefilter("ignore")
    with sequence(group, layout=layout) as ours, ours.active(), torch.no_grad():
        at = positions(ours, N)
        data = {"tokens": tokens(1, N)[:, at]}
        if bounds is not None:
            data["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32)
        return at, build(kind, family)(data)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_on_ranks(pools, kind):
    for layout, bounds in (("contiguous", None), ("zigzag", None), ("contiguous", [0, 20, N])):
        at = None if bounds is None else torch.cat([torch.arange(20), torch.arange(3)])[None]
        want = logits(kind, "llama", tokens(1, N), **({} if at is None else {"position_ids": at}))
        got = torch.empty_like(want)
        for where, rows in pools(3).run(3, part, kind, "llama", layout, bounds):
            got[:, where] = rows
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def alone(rank, group, kind):
    """Run a forward of a transformers model without HFCausalLM."""
    with sequence(group) as ours, ours.active(), torch.no_grad():
        at = positions(ours, N)
        decoder("llama", **options(kind))(tokens(1, N)[:, at], position_ids=torch.tensor(at)[None], use_cache=False)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_without_hf_causal_lm_lengths_are_unknown(pools, kind):
    for answer in pools(2).answers(2, alone, kind):
        assert answer.error == "ValueError" and "such as yarn" in answer.message, answer.trace


def test_longer_than_the_config_is_warned_of_once():
    model = HFCausalLM(config("llama", max_position_embeddings=MOST))
    with pytest.warns(
        UserWarning, match=r"23 tokens goes beyond max_position_embeddings=16 of llama.*a factor of 1.44"
    ):
        model(batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(batch())
        short = HFCausalLM(config("llama", max_position_embeddings=MOST))
        short({**batch(), "cu_seqlens": torch.tensor([0, 9, N], dtype=torch.int32)})  # documents are shorter


YARN = {**KINDS["yarn"], "factor": 1.25}
LONGROPE = {**KINDS["longrope"], "factor": 1.25}
LLAMA3 = {**KINDS["llama3"], "factor": 1.25}


@pytest.mark.parametrize("family, rope, message", [
    ("llama", YARN, r"23 tokens goes beyond the rotary scaling of llama: rope_type yarn with factor=1.25 and "
     r"original_max_position_embeddings=16 serves 20 tokens. Set factor .* to 1.44 or more, and continue"),
    ("llama", LONGROPE, r"rope_type longrope .* serves 20 tokens. .* 1.44 or more \(and long_factor to match\)"),
    ("gemma3", {"sliding_attention": KINDS["theta"], "full_attention": YARN}, "gemma3_text: rope_type yarn with"),
], ids=["yarn", "longrope", "a kind of layers"])  # fmt: skip
def test_longer_than_the_rotary_scaling_is_warned_of_once(family, rope, message):
    sizes = {"max_position_embeddings": 128, "rope_parameters": rope}
    model = HFCausalLM(config(family, **sizes))
    with pytest.warns(UserWarning, match=message):
        model(batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(batch())
        short = HFCausalLM(config(family, **sizes))
        short({**batch(), "cu_seqlens": torch.tensor([0, 9, N], dtype=torch.int32)})


@pytest.mark.parametrize(
    "rope", [KINDS["yarn"], {**YARN, "factor": 1.44}, LLAMA3], ids=["longer", "as advised", "llama3"]
)
def test_rotary_scaling_that_reaches_is_not_warned_of(rope):
    """Scaled rotary positions that cover the length cause no warning. The factor of llama3 is not a ratio of lengths."""
    model = HFCausalLM(config("llama", max_position_embeddings=128, rope_parameters=rope))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(batch())


def test_factor_is_that_of_the_original_length():
    model = HFCausalLM(config("llama", max_position_embeddings=20, rope_parameters=YARN))
    with pytest.warns(UserWarning, match=r"max_position_embeddings=20 of llama.*a factor of 1.44 or more"):
        model(batch())


def test_config_replaces_values(tmp_path):
    HFCausalLM(config("llama", max_position_embeddings=MOST)).save_pretrained(tmp_path)
    changes = {"max_position_embeddings": 64, "rope_parameters": KINDS["yarn"]}
    ours = HFCausalLM(tmp_path, config=changes)
    assert ours.config.max_position_embeddings == 64 and ours.config.rope_parameters["rope_type"] == "yarn"
    plain = HFCausalLM(tmp_path)
    inputs = {"tokens": tokens(1, MOST)}
    assert not torch.allclose(ours(inputs), plain(inputs), atol=1e-4)
    assert torch.equal(ours.decoder.lm_head.weight, plain.decoder.lm_head.weight)
    assert ours.hparams["model"]["max_position_embeddings"] == 64


@pytest.mark.parametrize("changes, error, message", [
    (7, TypeError, "config must be a mapping"),
    ({"rope_scalling": 2}, ValueError, "config of llama has no key 'rope_scalling'"),
    ({"num_hidden_layers": 1}, ValueError, "config cannot change num_hidden_layers"),
], ids=str)  # fmt: skip
def test_misuse_of_config(changes, error, message):
    with pytest.raises(error, match=message):
        HFCausalLM(config("llama"), config=changes)
