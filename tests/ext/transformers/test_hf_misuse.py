"""Wrong uses of HFCausalLM raise before a number is wrong or work is lost. Errors name the value and the remedy."""

import pytest
import torch

import lightning_dilated as ld

pytest.importorskip("transformers", reason="needs the extra transformers", minversion="5.24")
import transformers

from ...distributed.calls import positions, sequence
from .decoders import V, config, decoder, tokens
from .test_hf_causal_lm import HYBRID

HFCausalLM = ld.integrations.transformers.HFCausalLM
N = 19
IDS, NUMBERS = tokens(1, N), torch.arange(N)[None]
LEARNED = {
    "GPT2Config": {"max_position_embeddings": 16, "num_key_value_heads": 4},
    "OPTConfig": {"max_position_embeddings": 16, "ffn_dim": 48, "word_embed_proj_dim": 32},
}


def model(pattern=HYBRID, family="llama", sizes=None, **options):
    return HFCausalLM(config(family, **(sizes or {})), pattern, **options)


# -- positions ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", LEARNED)
def test_learned_positions_end(family):
    learned = model(None, family, LEARNED[family])
    with pytest.raises(ValueError, match=r"19 tokens go beyond the 16 positions.*learned embeddings"):
        learned.loss_terms({"tokens": IDS, "labels": IDS})
    short = IDS[:, :16]
    assert torch.isfinite(learned.loss_terms({"tokens": short, "labels": short})[0])
    documents = {"tokens": IDS, "labels": IDS, "cu_seqlens": torch.tensor([0, 9, N], dtype=torch.int32)}
    assert torch.isfinite(learned.loss_terms(documents)[0])  # each document has its own positions


@pytest.mark.parametrize("pattern", [None, HYBRID])
def test_generation_does_not_outgrow_learned_positions(pattern):
    learned, prompt = model(pattern, "GPT2Config", LEARNED["GPT2Config"]), IDS[:, :12]
    options = {"do_sample": False, "eos_token_id": []}
    assert learned.generate(prompt, max_new_tokens=5, **options).shape == (1, 17)  # the last new token is not an input
    assert len(list(learned.generate_stream(prompt, 5, temperature=0))) == 5
    for call in (
        lambda: learned.generate(prompt, max_new_tokens=6, **options),
        lambda: learned.generate(prompt, max_length=18, **options),
        lambda: next(learned.generate_stream(prompt, 6)),
    ):
        with pytest.raises(ValueError, match="beyond the 16 positions"):
            call()


YARN = {"rope_type": "yarn", "rope_theta": 1e4}
ROPES = {
    "kind": ({"rope_type": "yarm", "rope_theta": 1e4}, "rope_type='yarm'; it is one of default, dynamic"),
    "no factor": (YARN, "Missing required keys.*factor.*Add them"),
    "no base": ({"rope_type": "linear", "factor": 2.0}, "rope_theta=10000 would be lost"),
    "text": ({**YARN, "rope_type": "linear", "factor": "4"}, "a number above 0 as factor, got '4'"),
    "no growth": ({**YARN, "rope_type": "linear", "factor": 0}, "a number above 0"),
    "factors": (
        {**YARN, "rope_type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0] * 4},
        "short_factor has 1 numbers, but this model needs 4",
    ),
}


@pytest.mark.parametrize("name", ROPES)
def test_rotary_options(name):
    with pytest.raises(ValueError, match=ROPES[name][1]):
        model(config={"rope_parameters": ROPES[name][0]})


@pytest.mark.parametrize("name", ["rope_scaling", "rope_theta"])
def test_former_names_of_rotary_options(name):
    with pytest.raises(ValueError, match=f"config has {name}, which transformers keeps in rope_parameters"):
        model(config={name: 5e5})


# -- batches -----------------------------------------------------------------------------------------------------------
BATCHES = {
    "of transformers": (ValueError, "takes no input_ids: give tokens", {"input_ids": IDS, "labels": IDS}),
    "mask": (
        ValueError,
        "takes no attention_mask: give lengths",
        {"tokens": IDS, "labels": IDS, "attention_mask": IDS},
    ),
    "positions": (
        ValueError,
        "takes no position_ids: give cu_seq",
        {"tokens": IDS, "labels": IDS, "position_ids": IDS},
    ),
    "no labels": (ValueError, "no labels among tokens", {"tokens": IDS}),
    "no mapping": (TypeError, "is a mapping of tokens", IDS),
    "fractions": (
        TypeError,
        "tokens must be a tensor of token numbers.*float32",
        {"tokens": IDS.float(), "labels": IDS},
    ),
    "a list": (TypeError, "tokens must be a tensor.*got list", {"tokens": IDS.tolist(), "labels": IDS}),
    "tokens": (ValueError, "tokens must lie from 0 to 60", {"tokens": IDS + V, "labels": IDS}),
    "negative": (ValueError, "tokens must lie from 0 to 60", {"tokens": IDS - V, "labels": IDS}),
    "labels": (ValueError, "labels must lie from -100 to 60", {"tokens": IDS, "labels": IDS + V}),
    "shapes": (ValueError, "labels are the next token", {"tokens": IDS, "labels": IDS[:, 1:]}),
    "no rows": (ValueError, r"\(B, N\), got \(19,\)", {"tokens": IDS[0], "labels": IDS[0]}),
    "beyond": (ValueError, "from 0 to N = 19", {"tokens": IDS, "labels": IDS, "lengths": torch.tensor([N + 1])}),
    "below": (ValueError, "from 0 to N = 19", {"tokens": IDS, "labels": IDS, "lengths": torch.tensor([-1])}),
    "lengths": (ValueError, r"\(B,\) = \(1,\)", {"tokens": IDS, "labels": IDS, "lengths": torch.tensor([4, 4])}),
    "bounds": (TypeError, "int32 tensor of bounds, got list", {"tokens": IDS, "labels": IDS, "cu_seqlens": [0, N]}),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches(name):
    error, message, batch = BATCHES[name]
    with pytest.raises(error, match=message):
        model().loss_terms(batch)


def wrong_on_one_rank(rank, group):
    with sequence(group) as ours, ours.active():
        ids = IDS[:, torch.tensor(positions(ours, N))] + V * (ours.rank == 1)
        model().loss_terms({"tokens": ids, "labels": ids.clamp(max=V - 1)})


def test_a_wrong_token_on_one_rank_is_an_error_on_all(pools):
    for answer in pools(2).answers(2, wrong_on_one_rank):
        assert answer.error == "ValueError" and "tokens must lie from 0 to 60" in answer.message, answer.trace


# -- generation --------------------------------------------------------------------------------------------------------
CALLS = {
    "static": (ValueError, "cache_implementation='static' is not supported", {"cache_implementation": "static"}),
    "quantized": (ValueError, "'quantized' is not supported", {"cache_implementation": "quantized"}),
    "config": (
        ValueError, "'static' is not supported",
        {"generation_config": transformers.GenerationConfig(cache_implementation="static")},
    ),
    "lookup": (ValueError, "prompt_lookup_num_tokens drafts tokens", {"prompt_lookup_num_tokens": 3}),
    "a text": (TypeError, "encode a text first", {"tokens": "hello"}),
    "a list": (TypeError, "a tensor of tokens, got list", {"tokens": [[1, 2]]}),
    "other tokens": (ValueError, "tokens must lie from 0 to 60", {"tokens": IDS + V}),
    "mask": (ValueError, "attention_mask must be .*got list", {"attention_mask": [[1] * N]}),
    "no row": (ValueError, "at least one token", {"tokens": IDS[0]}),
    "no token": (ValueError, "at least one token", {"tokens": IDS[:, :0]}),
    "right padding": (ValueError, "sample 0 has padding on the right", {"attention_mask": (NUMBERS < 5).long()}),
    "padding alone": (ValueError, "sample 0 has no real token", {"attention_mask": torch.zeros_like(IDS)}),
    "a short mask": (ValueError, r"must be \(B, N\) = \(1, 19\).*\(1, 5\)", {"attention_mask": IDS[:, :5]}),
    "a cache of transformers": (ValueError, "has a pattern.*dilated_cache", {"cache": transformers.DynamicCache()}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_generation(name):
    error, message, options = CALLS[name]
    with pytest.raises(error, match=message):
        model().generate(**{"tokens": IDS, "max_new_tokens": 2, **options})


def test_an_assistant():
    options, assistant = {"max_new_tokens": 4, "do_sample": False}, decoder("llama", dtype=torch.float32)
    with pytest.raises(ValueError, match="assistant_model drafts tokens"):
        model().generate(IDS, assistant_model=assistant, **options)
    own = model(None)
    assert torch.equal(own.generate(IDS, assistant_model=assistant, **options), own.generate(IDS, **options))


@pytest.mark.parametrize("pattern", [None, HYBRID])
def test_static_caches_of_a_plain_model(pattern):
    plain = decoder("llama", pattern=pattern).eval()
    for options in (
        {"cache_implementation": "static"},
        {"cache": transformers.StaticCache(config=plain.config, max_cache_len=40)},
    ):
        with pytest.raises(ValueError, match=r"a cache of a fixed size.*static"):
            plain.generate(IDS, max_new_tokens=2, **options)


# -- models ------------------------------------------------------------------------------------------------------------
def test_models(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such folder\. Give a folder"):
        HFCausalLM(tmp_path / "nowhere")
    sizes = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
    with pytest.raises(ValueError, match="gpt_neo computes its attention by code of its own"):
        model(None, "GPTNeoConfig", sizes).configure_model()
