"""Batches of prompts of different lengths: each row equals a run of the row alone."""

import pytest
import torch

import lightning_dilated as ld

pytest.importorskip("transformers", reason="needs the extra transformers", minversion="5.24")
from .decoders import close, config, decoder, tokens
from .test_hf_causal_lm import HYBRID
from .test_hf_generate import PATTERNS, N

HFCausalLM = ld.integrations.transformers.HFCausalLM
dilated_cache = ld.integrations.transformers.dilated_cache
LENGTHS = [N, 1, 11, 8]
NEW = 9
GREEDY = {"max_new_tokens": NEW, "do_sample": False}


def padded(side, lengths=LENGTHS, columns=N):
    """Return (tokens (B, N) with random padding, attention_mask, prompts (1, n))."""
    ids, at = tokens(len(lengths), columns), torch.arange(columns)[None]
    start = {"left": lambda n: columns - n, "right": lambda n: 0, "both": lambda n: (columns - n) // 2}[side]
    starts = torch.tensor([start(n) for n in lengths])
    mask = (at >= starts[:, None]) & (at < starts[:, None] + torch.tensor(lengths)[:, None])
    return ids, mask.long(), [row[keep][None] for row, keep in zip(ids, mask, strict=True)]


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("name", PATTERNS)
def test_rows_and_gradients_are_those_alone(name, side):
    model = decoder("llama", pattern=PATTERNS[name])
    ids, mask, rows = padded(side)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions).logits[mask.bool()]
    logits.square().sum().backward()
    got = {"logits": logits.detach(), **{n: p.grad.clone() for n, p in model.named_parameters()}}
    model.zero_grad()
    alone = torch.cat([model(x, use_cache=False).logits[0] for x in rows])
    alone.square().sum().backward()
    close(got, {"logits": alone.detach(), **{n: p.grad for n, p in model.named_parameters()}}, 1e-6)


@pytest.mark.parametrize("family, name, lengths", [
    *(("gemma3", name, LENGTHS) for name in PATTERNS),
    ("phi", "own", [7, 3, 5]), ("qwen3", "hybrid", [7, 3, 5]), ("mistral", "hybrid", [6, 6]),
], ids=str)  # fmt: skip
def test_generated_rows_are_those_alone(family, name, lengths):
    """With every cache, each row equals a run of the row alone, even if some columns are padding in all rows."""
    model = decoder(family, pattern=PATTERNS[name], eos_token_id=None).eval()
    ids, mask, rows = padded("left", lengths)
    alone = torch.cat([model.generate(x, use_cache=False, **GREEDY)[:, x.shape[1] :] for x in rows])
    options = {"attention_mask": mask, **GREEDY}
    assert torch.equal(model.generate(ids, cache=dilated_cache(model.config), **options)[:, N:], alone)
    assert torch.equal(model.generate(ids, use_cache=False, **options)[:, N:], alone)
    if name == "own":  # the cache of transformers itself
        assert torch.equal(model.generate(ids, **options)[:, N:], alone)


@pytest.mark.parametrize("name", PATTERNS)
def test_logits_of_steps_are_those_alone(name):
    """In single forwards, each row has the same logits as it has alone, up to rounding."""
    model = decoder("qwen3", pattern=PATTERNS[name]).eval()
    ids, mask, rows = padded("left")
    new, cache = tokens(len(rows), NEW), dilated_cache(model.config)
    with torch.no_grad():
        first = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), cache=cache)
        parts = [first.logits[:, -1:]]
        for i in range(NEW):
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            positions = mask.sum(1, keepdim=True) - 1
            parts.append(model(new[:, i : i + 1], attention_mask=mask, position_ids=positions, cache=cache).logits)
        got = torch.cat(parts, 1)
        for row, (prompt, later) in enumerate(zip(rows, new, strict=True)):
            want = model(torch.cat([prompt, later[None]], 1), use_cache=False).logits[0, prompt.shape[1] - 1 :]
            torch.testing.assert_close(got[row], want, rtol=0, atol=1e-6)  # rotary tables have fp32 rounding
    assert cache.get_seq_length() == N + NEW


@pytest.mark.parametrize("options", [
    {"num_beams": 3, "do_sample": False},
    {"num_beams": 2, "num_return_sequences": 2, "do_sample": False},
    {"do_sample": False, "eos_token_id": [5, 9, 40]},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["own", "hybrid", "shifted, windows"])
def test_hf_causal_lm(name, options):
    model = HFCausalLM(config("mistral", eos_token_id=options.get("eos_token_id")), PATTERNS[name]).double()
    ids, mask, rows = padded("left")
    options = {"max_new_tokens": NEW, "pad_token_id": 0, **options}
    got = model.generate(ids, attention_mask=mask, **options)
    each = options.get("num_return_sequences", 1)
    for i, row in enumerate(rows):
        alone = model.generate(row, **options)[:, row.shape[1] :]
        own_rows = got[each * i : each * (i + 1), N:]
        assert torch.equal(own_rows[:, : alone.shape[1]], alone) and not own_rows[:, alone.shape[1] :].any()


@pytest.mark.parametrize("pattern", [None, HYBRID], ids=["own", "hybrid"])
def test_streams(pattern):
    model = HFCausalLM(config("mistral", eos_token_id=None), pattern).double()
    ids, mask, rows = padded("left")
    options = {"max_new_tokens": NEW, "temperature": 0}
    alone = torch.cat([torch.stack(list(model.generate_stream(x, **options)), 1) for x in rows])
    got = torch.stack(list(model.generate_stream(ids, attention_mask=mask, **options)), 1)
    assert torch.equal(got, alone) and got.shape == (len(rows), NEW)
    with pytest.raises(ValueError, match="padding on the right"):
        next(model.generate_stream(ids, attention_mask=padded("right")[1], **options))
    with pytest.raises(ValueError, match=r"attention_mask must be \(B, N\)"):
        next(model.generate_stream(ids, attention_mask=mask[:, 1:], **options))


def test_compiled_layers():
    model = HFCausalLM(config("llama", eos_token_id=None), HYBRID, compile_blocks=True)
    ids, mask, rows = padded("left", [9, 4], 9)
    alone = torch.cat([model.generate(x, max_new_tokens=3, do_sample=False)[:, x.shape[1] :] for x in rows])
    got = model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, use_cache=False)
    assert torch.equal(got[:, 9:], alone)


def test_a_cache_is_used_again():
    """After prompts of different lengths, a cache can be used for prompts of equal length."""
    model = decoder("llama", pattern=HYBRID, eos_token_id=None).eval()
    ids, mask, _ = padded("left")
    cache = dilated_cache(model.config)
    model.generate(ids, cache=cache, attention_mask=mask, **GREEDY)
    cache.reset()
    got = model.generate(ids, cache=cache, attention_mask=torch.ones_like(ids), **GREEDY)
    assert torch.equal(got, model.generate(ids, use_cache=False, attention_mask=torch.ones_like(ids), **GREEDY))


def test_refused():
    model = decoder("llama", pattern=HYBRID, eos_token_id=None).eval()
    ids, mask, _ = padded("left")

    def generate(mask, **options):
        return model.generate(ids, cache=dilated_cache(model.config), attention_mask=mask, **{**GREEDY, **options})

    with pytest.raises(ValueError, match=r"sample 1 has padding on the right.*padding_side = \"left\""):
        generate(padded("right")[1])
    holes = mask.clone()
    holes[0, 4] = 0
    with pytest.raises(ValueError, match="sample 0 has holes"):
        generate(holes)
    with pytest.raises(ValueError, match=r"sample 1 has no real token among the first 5.*prefill_chunk_size"):
        generate(mask, prefill_chunk_size=5)
    with pytest.raises(ValueError, match=r"prompts of different lengths in one call.*prefill_chunk_size"):
        generate(padded("left", [N, 15, 16, 17])[1], prefill_chunk_size=8)
    with torch.no_grad():
        for later in (None, torch.cat([mask.flip(0), mask[:, -1:]], 1)):
            cache = dilated_cache(model.config)
            model(ids, attention_mask=mask, cache=cache)
            with pytest.raises(ValueError, match=r"have \[0, 18, 8, 11\] tokens of padding.*with a one appended"):
                model(ids[:, :1], attention_mask=later, cache=cache)
    with pytest.raises(ValueError, match="a sample can only replace"):
        cache.reorder_cache(torch.tensor([1, 0, 2, 3]))
