"""Generation: greedy tokens equal repeated runs of the whole sequence, and sampling follows its options."""

import gc
import math
import weakref

import lightning.pytorch as pl
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from lightning_dilated import DilatedPattern, LongNetLM
from lightning_dilated.ext.decoding import token_step
from lightning_dilated.ext.decoding.sampling import sample

from ...models import PATTERN, batch, loader, tiny, trainer

PROMPT = torch.tensor([[1, 2, 3], [7, 0, 10]])
MODELS = {
    "longnet": {},
    "shifted": {"pattern": PATTERN.shifted()},
    "shifted layers": {"shift_layers": "odd", "num_kv_heads": 2},
    "hybrid, positions in some layers": {
        "pattern": {"hybrid": {"local": 5, "global_every": 2}},
        "num_kv_heads": 2,
        "depth": 4,
        "rotary_base": [1e4, "none", 1e5],
    },
    "hybrid, dense heads without positions": {
        "pattern": {"hybrid": {"local": 5, "global_every": 2}},
        "num_kv_heads": 2,
        "global_rotary": False,
    },
    "head groups, blocked": {"pattern": DilatedPattern.head_groups([4, 16], [1, 3], 4, offsets="blocked")},
    "gqa, kv offsets": {"pattern": DilatedPattern.longnet([4, 16], [1, 2], offset_heads="kv"), "num_kv_heads": 2},
    "whole sequence": {"pattern": DilatedPattern([(4, 1), (None, 3)])},
    "xpos": {"position_encoding": "xpos", "xpos_scale_base": 16.0},
    "recurrence": {
        "recurrence": [{"gate_init": 1.0}, {"kind": "delta", "segment": 5, "gate_init": 1.0}],
        "num_kv_heads": 2,
    },
    "no positions, sub-norm": {"position_encoding": "none", "sub_layernorm": True},
}


def lively(**options):
    """Build a model with large weights, so that predictions depend on all visible tokens and vary."""
    model = tiny(**{"tie_embeddings": False, **options})
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(20 if p.ndim >= 2 else 1)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_greedy_is_the_full_sequence_at_each_length(name):
    """45 tokens after prompts of 3 tokens cross the ends of several segments of 4 and of 16."""
    model = lively(**MODELS[name])
    out = model.generate(PROMPT, 45, temperature=0)
    want = PROMPT
    with torch.no_grad():
        for _ in range(45):
            want = torch.cat([want, model(want)[:, -1:].argmax(-1)], 1)
    assert torch.equal(out, want)
    assert len(out[:, 3:].unique()) > 2


@pytest.mark.parametrize("name", MODELS)
def test_cached_logits_are_the_full_ones(name):
    model, tokens = lively(**MODELS[name]), torch.randint(11, (2, 40))
    caches = model.transformer.new_caches()
    with torch.no_grad():
        steps = [model(part, caches=caches) for part in tokens.split([7, *[1] * 33], 1)]
        torch.testing.assert_close(torch.cat(steps, 1), model(tokens), rtol=1e-9, atol=1e-9)


def generate(model, seed=0, **options):
    return model.generate(PROMPT, 20, generator=torch.Generator().manual_seed(seed), **options)


@pytest.mark.parametrize(
    "options", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-6}, {"temperature": 1e-46}], ids=str
)
def test_no_choice_is_greedy(options):
    model = lively()
    assert torch.equal(generate(model, **options), generate(model, temperature=0))


def test_seeds_repeat():
    model = tiny()
    assert torch.equal(generate(model, 1), generate(model, 1)) and not torch.equal(
        generate(model, 1), generate(model, 2)
    )
    torch.manual_seed(5)
    first = model.generate(PROMPT, 20)
    torch.manual_seed(5)
    assert torch.equal(model.generate(PROMPT, 20), first)


# -- streams -----------------------------------------------------------------------------------------------------------
STREAMS = {"greedy": {"temperature": 0}, "drawn": {"top_k": 5, "top_p": 0.9, "temperature": 1.3}}


@pytest.mark.parametrize("name", STREAMS)
def test_stream_yields_what_generate_returns(name):
    model, options = lively(), STREAMS[name]
    rng = torch.Generator().manual_seed(3)
    stream = model.generate_stream(PROMPT, 20, generator=rng, **options)
    steps = torch.stack(list(stream), 1)
    assert torch.equal(torch.cat([PROMPT, steps], 1), generate(model, 3, **options))


def test_stream_draws_one_at_a_time():
    """A step is computed when its token is requested. Between steps, the model is in its own mode."""
    model, calls = lively(dropout=0.5).train(), []
    model.register_forward_hook(lambda *args: calls.append(model.training))
    stream = model.generate_stream(PROMPT, 20)
    assert calls == []
    first = next(stream)
    assert first.shape == (2,) and calls == [False] and model.training and model.dropout.training
    loss = model(PROMPT).sum()  # between steps, a caller that samples during training has gradients
    assert loss.requires_grad and calls == [False, True]
    next(stream)
    assert calls == [False, True, False] and model.training


@pytest.mark.parametrize("chunk", [1, 2, 7, 30, 1000])
def test_prompt_in_chunks(chunk):
    """A prompt of 30 tokens is longer than the segments of 4 and of 16."""
    model, prompt = lively(shift_layers="odd"), torch.randint(11, (2, 30))
    want = model.generate(prompt, 12, temperature=0)
    assert torch.equal(model.generate(prompt, 12, temperature=0, prompt_chunk=chunk), want)


def test_last_only():
    model, tokens = lively(), torch.randint(11, (2, 30))
    torch.testing.assert_close(model(tokens, last_only=True), model(tokens)[:, -1:])


@pytest.mark.parametrize("many", [False, True], ids=["a token", "a list"])
def test_stop(many):
    """A row ends with its stop token and repeats the token until the last row has ended."""
    model = lively()
    free = generate(model, temperature=0)
    for token in free[:, 3:].unique().tolist():
        got = generate(model, temperature=0, stop=[token, token] if many else token)
        assert not many or torch.equal(got, generate(model, temperature=0, stop={token}))
        ends = [next((i + 1 for i in range(3, 23) if row[i] == token), 23) for row in free]
        assert got.shape[1] == max(ends)
        for row, want, end in zip(got, free, ends, strict=True):
            assert torch.equal(row[:end], want[:end]) and (row[end:] == token).all()


def test_stop_leaves_the_draws_alone():
    model = tiny()
    free, got = generate(model, 2), generate(model, 2, stop=int(generate(model, 2)[0, 8]))
    for row, want in zip(got, free, strict=True):
        end = next((i for i in range(3, len(row)) if row[i] != want[i]), len(row))
        assert torch.equal(row[:end], want[:end]) and (row[end:] == row[-1]).all()


# -- prompts of different lengths --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name, chunk",
    [
        *((name, 2) for name in (*MODELS, "kv_conv")),
        *((name, 1000) for name in ("longnet", "kv_conv")),
        *(pytest.param(name, 1000, marks=pytest.mark.slow) for name in MODELS if name != "longnet"),
    ],
)
def test_prompts_of_different_lengths(name, chunk):
    """Each row equals a run of the row alone: its prompt, its continuation, then repetitions of its last token."""
    model = lively(**MODELS.get(name, {"kv_conv": 3}))
    prompts, lengths = torch.randint(11, (3, 17)), [17, 3, 9]
    got = model.generate(prompts, 20, temperature=0, lengths=torch.tensor(lengths), prompt_chunk=chunk)
    assert got.shape == (3, 37)
    for row, prompt, length in zip(got, prompts, lengths, strict=True):
        alone = model.generate(prompt[None, :length], 20, temperature=0)[0]
        assert torch.equal(row[: length + 20], alone) and (row[length + 20 :] == alone[-1]).all()


# -- captured steps ----------------------------------------------------------------------------------------------------
@pytest.fixture
def captured(monkeypatch):
    """Capture steps as on a GPU, but with replays that run the Python code again. Return the list of captured steps."""
    steps, real = [], token_step.TokenStep._captured
    monkeypatch.setattr(token_step, "why_not", lambda model, device: token_step.why_not_captured(model))
    monkeypatch.setattr(token_step, "capture", lambda run, generator, device: torch.no_grad()(run))
    monkeypatch.setattr(token_step.TokenStep, "_captured", lambda step, model: steps.append(step) or real(step, model))
    return steps


def both_ways(model, *args, **options):
    """Return the results of captured and of plain steps with equal seeds, each with the generator's final state."""
    results = []
    for why_not in (token_step.why_not, lambda model, device: "told"):
        rng = torch.Generator().manual_seed(4)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(token_step, "why_not", why_not)
            results.append((model.generate(*args, generator=rng, **options), rng.get_state()))
    return results


CAPTURED = {
    **{name: (options, {"temperature": 0}) for name, options in MODELS.items() if name not in ("xpos", "recurrence")},
    "kv_conv": ({"kv_conv": 3}, {"temperature": 0}),
    "drawn": ({}, {"temperature": 1.3, "top_k": 5, "top_p": 0.9}),
    "lengths, drawn": ({"kv_conv": 3}, {"lengths": [3, 1], "temperature": 0.7}),
    "stop": ({}, {"stop": [3, 4], "temperature": 2.0}),
    "max_length": ({"pattern": DilatedPattern([(4, 1), (None, 3)])}, {"max_length": 1000}),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_captured_steps_are_the_plain_ones(captured, name):
    build, options = CAPTURED[name]
    model = lively(**build)
    for new in (30, 25):  # the second call reuses the captured step, which must not depend on the first call
        (got, state), (want, plain_state) = both_ways(model, PROMPT, new, **options)
        assert torch.equal(got, want) and torch.equal(state, plain_state)
    assert len(captured) == 1


def test_stream_of_captured_steps(captured):
    """If a stream ends, the step that it started ahead is undone. A second stream does not use the first one's step."""
    model = lively()
    for stop in (0, 5):
        (got, _), _ = both_ways(model, PROMPT, 30, stop=stop, temperature=2.0)
        rng = torch.Generator().manual_seed(4)
        stream = model.generate_stream(PROMPT, 30, stop=stop, temperature=2.0, generator=rng)
        other = model.generate_stream(PROMPT, 30, temperature=2.0, generator=torch.Generator().manual_seed(5))
        pairs = [(x, next(other)) for x in stream]
        assert torch.equal(torch.stack([x for x, _ in pairs], 1), got[:, 3:])
        want = model.generate(PROMPT, 30, temperature=2.0, generator=torch.Generator().manual_seed(5))
        assert torch.equal(torch.stack([x for _, x in pairs], 1), want[:, 3 : 3 + len(pairs)])


def test_one_token_captures_nothing(captured):
    model = lively()
    (got, state), (want, plain_state) = both_ways(model, PROMPT, 1)
    assert torch.equal(got, want) and torch.equal(state, plain_state) and captured == []
    (got, state), (want, plain_state) = both_ways(model, PROMPT, 9)
    assert torch.equal(got, want) and torch.equal(state, plain_state) and len(captured) == 1


def test_default_generator_in_captured_steps(captured):
    model = tiny()
    torch.manual_seed(5)
    first, after = model.generate(PROMPT, 20), torch.rand(1)
    torch.manual_seed(5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_step, "why_not", lambda model, device: "told")
        assert torch.equal(model.generate(PROMPT, 20), first) and torch.rand(1) == after
    assert len(captured) == 1


def test_steps_are_captured_anew_where_weights_move(captured):
    model = lively()
    for _ in range(2):
        generate(model)
    assert len(captured) == 1
    with torch.no_grad():
        model.head.weight.mul_(1.5)  # the graph reads the changed memory
    generate(model)
    assert len(captured) == 1
    replaced_head(model)
    generate(model)
    assert len(captured) == 2 and len(token_step._steps[model]) == 1


def replaced_head(model):
    model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())


@pytest.mark.parametrize("change", [lambda model: model.float(), replaced_head], ids=["moved", "replaced"])
def test_weights_that_move_while_tokens_are_drawn(captured, change):
    model = lively()
    stream = model.generate_stream(PROMPT, 20)
    next(stream), next(stream)
    change(model)
    with pytest.raises(RuntimeError, match=r"weights moved .* or were replaced while tokens were drawn"):
        next(stream)
    assert generate(model).shape == (2, 23)


@torch.inference_mode()
def test_inference_mode_has_steps_of_its_own(captured):
    model = lively()
    want = generate(model)
    with torch.inference_mode(False), torch.no_grad():
        other = lively()
        other.load_state_dict(model.state_dict())
        assert torch.equal(generate(other), want)
    for _ in range(2):
        assert torch.equal(generate(other), want)
    with torch.inference_mode(False):
        assert torch.equal(generate(other), want)


def test_a_model_is_not_kept(captured):
    model = lively()
    generate(model)
    step, alive = weakref.ref(captured.pop()), weakref.ref(model)
    step()._replay = None  # the test's own replay function refers to the model
    del model
    gc.collect()
    assert alive() is None and step() is None


def between(model, own):
    """Leave a stream after 12 tokens. Return (tokens, the caller's random numbers between tokens, the number after)."""
    torch.manual_seed(3)
    tokens, drawn, generator = [], [], torch.Generator().manual_seed(4) if own else None
    for token in model.generate_stream(PROMPT, 30, stop=[9], generator=generator):
        tokens.append(token.tolist())
        token.fill_(0)
        drawn.append(float(torch.rand(1)))
        if len(tokens) == 12:
            break
    assert len(set(drawn)) == len(drawn)
    return tokens, drawn, float(torch.rand(1))


@pytest.mark.parametrize("own", [False, True])
def test_what_a_caller_does_between_tokens(captured, own):
    """Between tokens, the caller draws random numbers and changes the tokens. Neither side affects the other."""
    model = lively()
    got = between(model, own)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_step, "why_not", lambda model, device: "plain")
        assert between(model, own) == got
    assert len(captured) == 1


def test_a_step_that_is_not_kept_is_freed(captured, monkeypatch):
    """A step that is not stored is freed before the next call allocates its caches."""
    monkeypatch.setattr(token_step, "KEPT_BYTES", 1)
    model = lively()
    generate(model)
    first = weakref.ref(captured.pop())
    first()._replay = None  # the test's own replay function refers to the step
    gc.collect()
    stream = model.generate_stream(PROMPT, 20, top_k=3)
    next(stream)
    gc.collect()
    assert first() is None


def test_short_memory_is_no_reason_for_ever(captured, monkeypatch):
    def short(run, generator, device):
        raise torch.OutOfMemoryError("no memory")

    model = lively()
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="could not be captured"):
        patch.setattr(token_step, "capture", short)
        want = generate(model)
    captured.clear()
    assert torch.equal(generate(model), want) and len(captured) == 1


def test_kept_steps_are_few(captured, monkeypatch):
    model = tiny()
    for k in range(1, 8):
        model.generate(PROMPT, 3, top_k=k)
        assert len(token_step._steps[model]) == min(k, 4)
    monkeypatch.setattr(token_step, "KEPT_BYTES", 1)
    model.generate(PROMPT, 3, top_k=3)
    assert len(captured) == 8 and len(token_step._steps[model]) == 1
    model.generate(PROMPT, 3, top_k=3)
    assert len(captured) == 8


@pytest.mark.full
def test_nothing_stays_while_a_trainer_fits(captured):
    """A fit frees earlier steps, and steps of its validation are not stored."""
    model, data, alive = tiny(dtype=torch.float32), loader(batch(2, 8)), []
    generate(model)
    assert model in token_step._steps

    class Draws(pl.Callback):
        def on_train_batch_start(self, *unused):
            alive.append(model in token_step._steps)

        def on_validation_epoch_end(self, trainer, pl_module):
            pl_module.generate(PROMPT, 3)

    trainer(max_epochs=1, callbacks=[Draws()]).fit(model, data, data)
    assert alive and not any(alive)
    assert len(captured) == 2 and model not in token_step._steps
    generate(model)
    assert len(token_step._steps[model]) == 1


class Other(LongNetLM):
    """A model that overrides forward."""

    def forward(self, tokens, **options):
        return super().forward(tokens, **options) * 2


def test_what_cannot_be_captured(captured):
    hooked, other, xpos = tiny(), Other(PATTERN, vocab_size=11, dim=16, depth=1, num_heads=4), tiny(**MODELS["xpos"])
    hooked.transformer.blocks[1].ffn.register_forward_hook(lambda *args: None)
    attended = tiny(DilatedPattern.longnet([4, 16], [1, 2], padding="attended"))
    reasons = [token_step.why_not_captured(x) for x in (hooked, other, xpos, attended)]
    for model, text in zip((hooked, other, xpos, attended), ("hooks", "redefines", "xPos", "attended"), strict=True):
        assert text in reasons.pop(0) and model.generate(PROMPT, 4).shape == (2, 7)
    assert captured == []


def test_a_capture_that_fails(captured, monkeypatch):
    model = lively()
    want = generate(model)
    token_step.forget(model)
    monkeypatch.setattr(token_step, "capture", lambda run, generator, device: 1 / 0)
    with pytest.warns(UserWarning, match="LongNetLM could not be captured .* division by zero"):
        assert torch.equal(generate(model), want)
    assert torch.equal(generate(model), want)  # the capture is not tried a second time


LOGITS = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
SHARES = {
    "as they are": ({}, [0.5, 0.25, 0.15, 0.1]),
    "cold": ({"temperature": 0.5}, [0.25 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345, 0.01 / 0.345]),
    "top 2": ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
    "more than there are": ({"top_k": 9}, [0.5, 0.25, 0.15, 0.1]),
    "half": ({"top_p": 0.49}, [1, 0, 0, 0]),
    "reaching into the second": ({"top_p": 0.6}, [2 / 3, 1 / 3, 0, 0]),
    "all": ({"top_p": 1.0}, [0.5, 0.25, 0.15, 0.1]),
    "both": ({"top_k": 3, "top_p": 0.5}, [1, 0, 0, 0]),
    "the smaller of both": ({"top_k": 2, "top_p": 0.99}, [2 / 3, 1 / 3, 0, 0]),
}


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 3, 1]], ids=["sorted", "shuffled"])
@pytest.mark.parametrize("name", SHARES)
def test_sample_draws_these_shares(name, order):
    options, want = SHARES[name]
    draws = sample(LOGITS[order].expand(20000, 4), **options)
    got = torch.bincount(draws, minlength=4) / 20000
    torch.testing.assert_close(got, torch.tensor(want).float()[order], rtol=0, atol=0.015)
    assert ((got == 0) == (torch.tensor(want)[order] == 0)).all()


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_modes_come_back_and_dropout_sleeps(training):
    model = lively(dropout=0.5, attention_dropout=0.5).train(training)
    model.transformer.blocks[0].train(not training)
    before = [m.training for m in model.modules()]
    out = generate(model, temperature=0)
    assert torch.equal(generate(model, temperature=0), out)
    model.head.register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(model)
    assert [m.training for m in model.modules()] == before


def test_builds_the_model_and_keeps_no_graph():
    model = LongNetLM(PATTERN, vocab_size=11, dim=16, depth=1, num_heads=4)
    assert model.generate(PROMPT, 2).shape == (2, 5) and model.embedding.weight.grad_fn is None
    assert torch.equal(model.generate(PROMPT, 0), PROMPT)


#: (changes to a valid call for one more token, error, part of the message)
REFUSED = [
    ({"tokens": PROMPT[:, :0]}, ValueError, r"at least one token, got \(2, 0\)"),
    ({"tokens": PROMPT[:0]}, ValueError, r"at least one token, got \(0, 3\)"),
    ({"tokens": PROMPT[0]}, ValueError, r"prompt must be \(B, N\)"),
    ({"tokens": PROMPT > 1}, TypeError, "must hold integer tokens, got torch.bool"),
    ({"tokens": torch.tensor([[1, 2], [3, 11]])}, ValueError, "token 11 at position 1 of row 1, but .* allows 0 to 10"),
    ({"tokens": torch.tensor([[-1, 2]])}, ValueError, "token -1 at position 0 of row 0"),
    ({"max_new_tokens": -1}, ValueError, "max_new_tokens must be at least 0, got -1"),
    ({"max_new_tokens": 1.5}, TypeError, "max_new_tokens must be an integer, got 1.5"),
    ({"temperature": -1}, ValueError, "temperature must be a number in .0, inf., got -1"),
    ({"temperature": math.nan}, ValueError, "temperature must be .*, got nan"),
    ({"temperature": "hot"}, TypeError, "temperature must be .* got 'hot'"),
    ({"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
    ({"top_k": 0.5}, TypeError, "top_k must be an integer, got 0.5"),
    ({"top_p": 0}, ValueError, r"top_p must be a number in \(0, 1\], got 0"),
    ({"top_p": 2}, ValueError, r"top_p must be a number in \(0, 1\], got 2"),
    ({"top_p": "a"}, TypeError, "top_p must be a number, got 'a'"),
    ({"top_p": True}, TypeError, "top_p must be a number, got True"),
    ({"top_p": math.nan}, ValueError, "top_p must be a number in"),
    ({"stop": "a"}, TypeError, "stop must be a token, a list or set of tokens, or None, got 'a'"),
    ({"stop": {3: "x"}}, TypeError, "stop must be a token, a list or set of tokens, or None"),
    ({"stop": [1.5]}, TypeError, "stop must be an integer, got 1.5"),
    ({"stop": -1}, ValueError, "stop must be at least 0, got -1"),
    ({"stop": [3, 11]}, ValueError, "stop must lie below vocab_size=11, got 11"),
    ({"lengths": [3]}, ValueError, "a number for each of the 2 prompts, got 1"),
    ({"lengths": 3}, TypeError, "lengths must hold a number for each prompt, got 3"),
    ({"lengths": [3, 0]}, ValueError, "each of lengths must be at least 1, got 0"),
    ({"lengths": torch.tensor([3, 4])}, ValueError, r"holds 4, but the prompts are \(B"),
    ({"max_length": 3}, ValueError, "max_length=3 is below the prompt's 3 tokens and .* to 4"),
    ({"prompt_chunk": 0}, ValueError, "prompt_chunk must be at least 1, got 0"),
    ({"generator": 3}, TypeError, "generator must be a torch.Generator or None, got 3"),
    ({"bogus": 3}, TypeError, r"generate_stream\(\) got an unexpected keyword argument 'bogus'"),
    ({"int8_weights": True}, TypeError, "int8_weights was taken out of lightning_dilated"),
]


@pytest.mark.parametrize("options, error, text", REFUSED)
def test_refused(options, error, text):
    call = {"tokens": PROMPT, "max_new_tokens": 1, **options}
    with pytest.raises(error, match=text):
        tiny().generate(**call)
    with pytest.raises(error, match=text):
        tiny().generate_stream(**call)  # the call itself raises, before the first token is requested


@pytest.mark.full
def test_compiled_blocks(captured):
    """The modules after attention have three graphs: for one token, the first prompt length, and others. Hooks run."""
    torch._dynamo.reset()
    model, want = lively(kv_conv=3), []
    counter = CompileCounterWithBackend("aot_eager")
    for compiled in (False, True):
        for block in model.transformer.blocks if compiled else ():
            block.compile(fullgraph=True, backend=counter)
        outs, graphs = [], []
        for n in (1, 2, 5, 4, 1):
            outs.append(model.generate(torch.cat([PROMPT] * n, 1), 30, temperature=0))
            graphs.append(counter.frame_count)
        want = want or outs
        assert all(map(torch.equal, outs, want))
        assert graphs == ([2, 3, 3, 3, 3] if compiled else [0] * 5)
    with pytest.raises(ValueError, match="no lengths, no cu_seqlens"):
        model(PROMPT, caches=model.transformer.new_caches(), lengths=torch.tensor([3, 2]))
    calls = []
    model.transformer.blocks[0].ffn.register_forward_hook(lambda *args: calls.append(1))
    assert torch.equal(model.generate(PROMPT, 30, temperature=0), want[0]) and len(calls) == 30


# -- prompts and options at the edge -----------------------------------------------------------------------------------
def test_padding_may_hold_anything():
    model = lively()
    want = model.generate(torch.tensor([[1, 2, 3], [7, 0, 0]]), 5, temperature=0, lengths=[3, 1])
    padded = torch.tensor([[1, 2, 3], [7, -100, 99]])
    assert torch.equal(model.generate(padded, 5, temperature=0, lengths=[3, 1]), want)
    with pytest.raises(ValueError, match="holds token -100 at position 1 of row 1"):
        model.generate(padded, 5)


def test_bytes_are_tokens():
    model = lively()
    assert torch.equal(model.generate(PROMPT.byte(), 5, temperature=0), model.generate(PROMPT, 5, temperature=0))


def test_weights_that_are_nan():
    model = tiny()
    with torch.no_grad():
        model.head.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="logits after the prompt are NaN"):
        model.generate(PROMPT, 5)
