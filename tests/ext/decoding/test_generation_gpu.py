"""Decoding on CUDA: the kernels against float64, and captured steps against calls of the model."""

import gc
import weakref

import pytest
import torch

from lightning_dilated import DilatedPattern
from lightning_dilated.attention.oracle import oracle
from lightning_dilated.ext.decoding import token_step
from lightning_dilated.ext.decoding.cache_slots import Clock
from lightning_dilated.ext.decoding.kv_cache import KVCache
from lightning_dilated.ext.decoding.new_tokens import decode_attention
from lightning_dilated.pattern import Branch, Window

from ...models import PATTERN, tiny
from .test_generation import CAPTURED, MODELS

pytestmark = pytest.mark.gpu

PATTERNS = {
    "five branches": DilatedPattern.longnet([64, 128, 256, 512, 1024], [1, 2, 4, 8, 16]),
    "shifted, odd": DilatedPattern([Branch(48, 5, shift=7), Branch(200, 3, shift=150), Branch(None, 7)]),
    "blocked": DilatedPattern.longnet([64, 300], [1, 4], offsets="blocked"),
    "kv offsets": DilatedPattern.longnet([64, 256], [1, 2], offset_heads="kv"),
    "windows": DilatedPattern([Window(60), Window(20, 3), (128, 2)]),
    "uncovered heads": DilatedPattern([Branch(64, 4, heads=[0, 5], offset=1), Branch(None, 1, heads=[2])]),
}
HEADS = {"mha": (8, 8), "gqa": (8, 2), "mqa": (8, 1)}
TOL = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("dtype", TOL, ids=str)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", PATTERNS)
def test_kernel(name, heads, dtype):
    """Decode single tokens after prompts of different lengths, across segment ends. Unwritten rows are NaN."""
    pattern, (num_heads, kv_heads), lengths = PATTERNS[name], HEADS[heads], [500, 1, 63, 255]
    for dim in (64, 128, 48):
        steps = 4 if dim != 64 else 70
        torch.manual_seed(dim)
        shape = 4, 500 + steps
        q, k, v = (torch.randn(*shape, n, dim, device="cuda").to(dtype) for n in (num_heads, kv_heads, kv_heads))
        cache = KVCache(pattern, num_heads, kv_heads, max_length=600, clock=Clock(lengths))
        torch.use_deterministic_algorithms(True)  # torch.empty returns NaN
        try:
            cache.append(k[:, :500], v[:, :500])
            got = []
            for step in range(steps):
                at = torch.tensor(lengths, device="cuda") + step
                new = [x[torch.arange(4, device="cuda"), at][:, None] for x in (q, k, v)]
                assert cache.kernel_serves(new[0])
                got.append(decode_attention(*new, cache))
        finally:
            torch.use_deterministic_algorithms(False)
        for b, length in enumerate(lengths):
            parts = (x[b : b + 1, : length + steps].cpu() for x in (q, k, v))
            want = oracle(*parts, pattern, causal=True)[0][:, length:]
            have = torch.cat(got, 1)[b : b + 1].double().cpu()
            torch.testing.assert_close(have, want, rtol=TOL[dtype], atol=TOL[dtype])


def on_gpu(**options):
    """Build the model of `lively` on the GPU."""
    model = tiny(**{"tie_embeddings": False, "dtype": torch.float32, **options})
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(20 if p.ndim >= 2 else 1)
    return model.cuda()


def drawn(model, prompt, new, plain=False, seed=4, **options):
    """Generate tokens. Return (tokens, the generator's final state)."""
    rng = torch.Generator("cuda").manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        if plain:
            patch.setattr(token_step, "why_not", lambda model, device: "told")
        return model.generate(prompt, new, generator=rng, **options), rng.get_state()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CAPTURED)
def test_captured_steps_are_the_plain_ones(name, dtype):
    build, options = CAPTURED[name]
    model, prompt = on_gpu(**{**build, "dtype": dtype}), torch.randint(11, (2, 3), device="cuda")
    for new in (60, 45):
        got, state = drawn(model, prompt, new, **options)
        want, plain_state = drawn(model, prompt, new, plain=True, **options)
        assert torch.equal(got, want) and torch.equal(state, plain_state)
    assert len(token_step._steps[model]) == 1


@pytest.mark.parametrize("name", MODELS)
def test_greedy_is_the_full_sequence(name):
    """Each token is the most likely one after all tokens before it, up to float32's precision."""
    model, prompt = on_gpu(**MODELS[name]), torch.randint(11, (3, 5), device="cuda")
    out = model.generate(prompt, 60, temperature=0)
    with torch.no_grad():
        logits = model(out)[:, 4:-1]
    chosen = logits.gather(2, out[:, 5:, None])[..., 0]
    torch.testing.assert_close(chosen, logits.amax(-1), rtol=1e-3, atol=1e-3)
    assert len(out[:, 5:].unique()) > 2


def test_streams():
    model, prompt = on_gpu(), torch.randint(11, (2, 3), device="cuda")
    for stop in (None, 3, [1, 2]):
        options = {"temperature": 2.0, "top_k": 7, "stop": stop}
        stream = model.generate_stream(prompt, 40, generator=torch.Generator("cuda").manual_seed(4), **options)
        other = model.generate_stream(prompt, 40, generator=torch.Generator("cuda").manual_seed(5), temperature=2.0)
        got = torch.stack([[x, next(other)][0] for x in stream], 1)
        assert torch.equal(torch.cat([prompt, got], 1), drawn(model, prompt, 40, plain=True, **options)[0])


def test_lengths():
    model, prompts, lengths = on_gpu(kv_conv=3), torch.randint(11, (3, 17), device="cuda"), [17, 3, 9]
    got = model.generate(prompts, 30, temperature=0, lengths=lengths)
    for row, prompt, length in zip(got, prompts, lengths, strict=True):
        assert torch.equal(row[: length + 30], model.generate(prompt[None, :length], 30, temperature=0)[0])


def test_the_host_does_not_wait():
    model, prompt = on_gpu(), torch.randint(11, (2, 3), device="cuda")
    for options in ({"temperature": 0}, {"top_k": 3, "top_p": 0.9}):
        stream = model.generate_stream(prompt, 30, **options)
        next(stream), next(stream)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(20):
                next(stream)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_autocast():
    model, prompt = on_gpu(), torch.randint(11, (2, 3), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        got, _ = drawn(model, prompt, 40, temperature=0)
        assert torch.equal(got, drawn(model, prompt, 40, plain=True, temperature=0)[0])
    assert torch.equal(
        drawn(model, prompt, 40, temperature=0)[0], drawn(model, prompt, 40, plain=True, temperature=0)[0]
    )


def test_weights_change_in_place():
    model, prompt = on_gpu(), torch.randint(11, (2, 3), device="cuda")
    before, _ = drawn(model, prompt, 40, temperature=0)
    with torch.no_grad():
        model.head.weight.normal_()
    got, _ = drawn(model, prompt, 40, temperature=0)
    assert torch.equal(got, drawn(model, prompt, 40, plain=True, temperature=0)[0]) and not torch.equal(got, before)
    assert len(token_step._steps[model]) == 1


def test_memory_goes_with_the_model():
    gc.collect()
    torch.cuda.synchronize()
    model = on_gpu(pattern=PATTERN)
    model.generate(torch.randint(11, (2, 3), device="cuda"), 20)
    steps = [weakref.ref(step) for step in token_step._steps[model].values()]
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None and all(step() is None for step in steps)


def test_compiled_blocks():
    model, prompt = on_gpu(dim=64), torch.randint(11, (2, 30), device="cuda")
    model.transformer.compile_blocks()
    got, _ = drawn(model, prompt, 40, temperature=0)
    with torch.no_grad():
        logits = model(got)[:, 29:-1]
    chosen = logits.gather(2, got[:, 30:, None])[..., 0]
    torch.testing.assert_close(chosen, logits.amax(-1), rtol=1e-3, atol=1e-3)
    assert len(token_step._steps[model]) == 1
