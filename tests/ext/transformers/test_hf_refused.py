"""Unsupported decoders and batches raise on every rank before a number is wrong."""

import re

import pytest
import torch

import lightning_dilated as ld

pytest.importorskip("transformers", reason="needs the extra transformers", minversion="5.24")
import transformers

from ...distributed.calls import positions, sequence
from .decoders import close, config, decoder, tokens
from .test_transformers_ranks import LLAMA4

HFCausalLM, set_pattern = ld.integrations.transformers.HFCausalLM, ld.integrations.transformers.set_pattern
N = 24
STATES = {
    "states": ("BambaConfig", {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "attn_layer_indices": [1]}),
    "filters": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "linear attention": ("RecurrentGemmaConfig", {"num_hidden_layers": 3, "lru_width": 32, "head_dim": 8}),
}
BOUNDS = torch.tensor([0, 9, N], dtype=torch.int32)


def batch(**options):
    inputs = tokens(1, N)
    return {"tokens": inputs, "labels": inputs.roll(-1, 1), **options}


def states(name):
    family, options = STATES[name]
    return HFCausalLM(config(family, **options))


@pytest.mark.parametrize("name", STATES)
def test_documents_of_layers_with_states(name):
    model = states(name)
    assert torch.isfinite(model(batch())).all()
    model(batch(cu_seqlens=torch.tensor([0, N], dtype=torch.int32)))
    with pytest.raises(ValueError, match=r"documents would see each other.*data.pack_tokens: 1"):
        model(batch(cu_seqlens=BOUNDS))
    with pytest.raises(ValueError, match=r"documents would see each other|where position_ids do not"):
        model.decoder(tokens(1, N), position_ids=torch.arange(N)[None] % 9, use_cache=False)


def states_on_ranks(rank, group, name, plain):
    with sequence(group) as ours, ours.active():
        model, at = states(name), torch.tensor(positions(ours, N))
        model.configure_model()
        if plain:
            return model.decoder(tokens(1, N)[:, at], position_ids=at[None], use_cache=False)
        return model({key: value[:, at] for key, value in batch().items()})


@pytest.mark.parametrize("plain", [False, True])
def test_states_on_ranks(pools, plain):
    for answer in pools(2).answers(2, states_on_ranks, "filters", plain):
        assert answer.error == "ValueError" and "start with an empty state" in answer.message, answer.trace


@pytest.mark.parametrize("length", [6, N])
def test_chunks(length):
    model = HFCausalLM(config("Llama4TextConfig", **LLAMA4))
    with pytest.raises(ValueError, match="within chunks"):
        model({key: value[:, :length] for key, value in batch().items()})
    with pytest.raises(ValueError, match="within chunks"):
        ld.integrations.transformers.dilated_cache(model.config)


def chunks_on_ranks(rank, group):
    """Use shards up to the length of a chunk, so that no rank's mask has a second chunk."""
    with sequence(group) as ours, ours.active():
        at = torch.tensor(positions(ours, 16))
        decoder("Llama4TextConfig", dtype=torch.float32, **LLAMA4)(
            tokens(1, 16)[:, at], position_ids=at[None], use_cache=False
        )


def test_short_chunks_on_ranks(pools):
    for answer in pools(2).answers(2, chunks_on_ranks):
        assert answer.error == "ValueError" and "within chunks" in answer.message, answer.trace


def test_other_restarts_than_the_documents():
    from lightning_dilated.ext.transformers.masks import known_documents, visible_keys

    chunked = transformers.masking_utils.chunked_causal_mask_function(8, torch.zeros(1))
    for bounds in (None, BOUNDS):
        with known_documents(bounds), pytest.raises(ValueError, match=re.escape("[8, 16]")):
            visible_keys(1, N, N, mask_function=chunked, local_size=8)


OTHER_CODE = {
    "openai-gpt": ("OpenAIGPTConfig", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "xlm": ("XLMConfig", {"emb_dim": 32, "n_layers": 2, "n_heads": 4}),
    "bloom": ("BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
}


@pytest.mark.parametrize("name", OTHER_CODE)
def test_code_that_does_not_take_the_attention(name):
    family, options = OTHER_CODE[name]
    own = getattr(transformers, family)(vocab_size=61, **options)
    with pytest.raises(ValueError, match="attention by code of its own"):
        HFCausalLM(own).configure_model()
    with pytest.raises(ValueError, match="attention by code of its own"):
        set_pattern(transformers.AutoModelForCausalLM.from_config(own), ld.DilatedPattern.dense())


def test_layers_without_attention_heads():
    for kind in ("MambaConfig", "RwkvConfig"):
        with pytest.raises(ValueError, match="num_attention_heads"):
            HFCausalLM(getattr(transformers, kind)(vocab_size=61, hidden_size=32, num_hidden_layers=2))


def test_a_pattern_takes_the_place_of_chunks():
    net = HFCausalLM(config("Llama4TextConfig", **LLAMA4), ld.DilatedPattern([ld.Window(100)]))
    dense = HFCausalLM(config("Llama4TextConfig", **LLAMA4), ld.DilatedPattern.dense())
    for model in (net, dense):
        torch.manual_seed(0)
        model.configure_model()
    short = {key: value[:, :8] for key, value in batch().items()}
    close({"logits": net(short)}, {"logits": dense(short)}, 1e-5)


def empty_shard(rank, group):
    with sequence(group) as ours, ours.active():
        at = torch.tensor(positions(ours, 4), dtype=torch.int64)
        HFCausalLM(config("llama"))({key: value[:, at] for key, value in batch().items()})


def test_fewer_tokens_than_ranks_take(pools):
    for answer in pools(3).answers(3, empty_shard):
        assert answer.error == "ValueError" and "4 tokens on 3 ranks leaves rank 2" in answer.message, answer.trace


def plain_empty_shard(rank, group, options):
    """Run a forward of a plain model, as in the loop of `docs/transformers.md`."""
    with sequence(group) as ours, ours.active():
        held = len(positions(ours, 4))
        at = ours.positions(held)[None] if options.pop("positions", True) else None
        decoder("gemma3")(tokens(1, held), position_ids=at, **options)


@pytest.mark.parametrize("options", [{"use_cache": False}, {}, {"positions": False}], ids=str)
def test_a_plain_model_on_fewer_tokens_than_ranks_take(pools, options):
    """All ranks raise. Without the check, only the rank without tokens would fail, inside transformers."""
    for answer in pools(3).answers(3, plain_empty_shard, dict(options)):
        assert answer.error == "ValueError" and "rank 2 of 3 holds no token" in answer.message, answer.trace


def test_caches_of_others():
    dilated_cache = ld.integrations.transformers.dilated_cache
    ids = tokens(1, 8)
    options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    model = decoder("llama", pattern=ld.DilatedPattern([ld.Window(3)])).eval()
    for other in ("llama", "mistral"):
        with pytest.raises(ValueError, match=r"attends by DilatedPattern\(\[Window\(3\)\]\)"):
            model.generate(ids, cache=dilated_cache(config(other)), **options)
    with pytest.raises(ValueError, match="the model has another attention"):
        decoder("llama", "sdpa").eval().generate(ids, cache=dilated_cache(config("llama")), **options)
    with pytest.raises(ValueError, match="whose state a DilatedCache does not hold"):
        dilated_cache(config(*STATES["states"][:1], **STATES["states"][1]))
    with pytest.raises(TypeError, match="dilated_cache takes a model or a config"):
        dilated_cache(7)
    assert len(dilated_cache(model).layers) == 2
    shallow = config("llama", num_hidden_layers=1)
    set_pattern(shallow, ld.DilatedPattern([ld.Window(3)]))
    with pytest.raises(ValueError, match="made for 1 layers, and the model asks for number 1"):
        model.generate(ids, cache=dilated_cache(shallow), **options)


def test_layers_that_share_keys():
    sizes = {"num_hidden_layers": 4, "head_dim": 8, "num_kv_shared_layers": 2, "sliding_window": 5}
    wide = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 61, "laurel_rank": 4, "altup_num_inputs": 2}
    wide["layer_types"] = ["sliding_attention", "full_attention"] * 2
    model = decoder("Gemma3nTextConfig", dtype=torch.float32, activation_sparsity_pattern=None, **sizes, **wide).eval()
    cache = ld.integrations.transformers.dilated_cache(model.config)
    with pytest.raises(ValueError, match="keys of another layer"), torch.no_grad():
        model(tokens(1, 8), cache=cache)


def test_new_keys_alone():
    """A layer that ignores the cache and attends only to new keys is refused."""
    from lightning_dilated.ext.transformers.attention import attend
    from lightning_dilated.ext.transformers.masks import visible_keys

    mask, q = visible_keys(1, 1, 1, q_offset=8, kv_offset=8), torch.randn(1, 2, 1, 8)
    with pytest.raises(ValueError, match="or to new keys alone"):
        attend(torch.nn.Module(), q, q, q, mask)


def test_folders_to_save_in(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="is a file"):
        HFCausalLM(config("llama")).save_pretrained(tmp_path / "file")
    with pytest.raises(TypeError, match="merge must be True or False"):
        HFCausalLM(config("llama")).save_pretrained(tmp_path, merge=1)


def test_names_in_a_config_by_hand():
    sizes = {"model_type": "llama", "vocab_size": 61, "hidden_size": 32, "rope_theta": 1e3, "num_hidden_layers": 1}
    assert HFCausalLM(sizes).config.rope_parameters["rope_theta"] == 1e3
    with pytest.raises(ValueError, match=r"hiden_size.*hidden_size"):
        HFCausalLM({**sizes, "hiden_size": 32})
    stored = {**HFCausalLM(sizes).config.to_dict(), "of_another_tool": 1}
    HFCausalLM(stored)
