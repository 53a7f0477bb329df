"""The decoding kernels in Triton's interpreter: any pattern and position, prompts of different lengths, NaN rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated import Branch, DilatedPattern, MultiheadDilatedAttention
from lightning_dilated.attention.oracle import oracle
from lightning_dilated.ext.decoding import token_step
from lightning_dilated.ext.decoding.cache_slots import Clock
from lightning_dilated.ext.decoding.kv_cache import KVCache
from lightning_dilated.ext.decoding.new_tokens import decode_attention

from ...examples import examples
from .test_decode import shaped_patterns
from .test_generation import lively

TOL = {torch.float32: 1e-5, torch.float16: 2e-3}  # the interpreter does not support products of bfloat16


@st.composite
def calls(draw):
    """Draw (heads, kv heads, pattern, prompt lengths, steps, head dim, whether buffers have full size, dtype)."""
    heads, kv_heads, pattern = draw(shaped_patterns())
    lengths = draw(st.lists(st.integers(1, 75), min_size=1, max_size=2))
    dim, steps = draw(st.sampled_from([2, 16, 24])), draw(st.integers(1, 3))
    return (
        heads,
        kv_heads,
        pattern,
        lengths,
        steps,
        dim,
        draw(st.booleans()),
        draw(st.sampled_from(sorted(TOL, key=str))),
    )


def small_tiles(patch):
    from lightning_dilated.ext.decoding import kernels as decode

    patch.setattr(decode, "KEYS", 16)
    patch.setattr(decode, "ENTRIES", 4)
    patch.setattr(decode, "LOOKUP", 4)
    patch.setattr(decode, "SHARE", {1: 16, 2: 24})
    decode.launch.cache_clear()


def decoded(rank, group, call):
    """Compare the steps after prompts of these lengths with the oracle. Unwritten rows are NaN."""
    heads, kv_heads, pattern, lengths, steps, dim, fixed, dtype = call
    torch.use_deterministic_algorithms(True)  # torch.empty returns NaN
    torch.manual_seed(0)
    longest, batch = max(lengths), len(lengths)
    q, k, v = (torch.randn(batch, longest + steps, n, dim).to(dtype) for n in (heads, kv_heads, kv_heads))
    cache = KVCache(pattern, heads, kv_heads, max_length=longest + steps if fixed else None, clock=Clock(lengths))
    with pytest.MonkeyPatch.context() as patch:
        small_tiles(patch)
        cut = longest // 2
        for part in (slice(0, cut), slice(cut, longest)):
            cache.append(k[:, part], v[:, part])
        for step in range(steps):
            at = torch.tensor(lengths)[:, None, None, None] + step
            new = [x.gather(1, at.expand(-1, 1, *x.shape[2:])) for x in (q, k, v)]
            assert cache.kernel_serves(new[0])
            got = decode_attention(*new, cache)
            for b, length in enumerate(lengths):
                stop = length + step + 1
                want = oracle(*(x[b : b + 1, :stop] for x in (q, k, v)), pattern, causal=True)[0]
                torch.testing.assert_close(got[b, 0].double(), want[0, -1], rtol=TOL[dtype], atol=TOL[dtype])


@given(calls())
@settings(max_examples=examples(4))
def test_random(interpreter, call):
    interpreter.run(1, decoded, call)


@pytest.mark.slow
@given(calls())
@settings(max_examples=examples(100))
def test_more(interpreter, call):
    interpreter.run(1, decoded, call)


LAYERS = {
    "rotary": {"position_encoding": "rotary"},
    "xpos, gqa": {"position_encoding": "xpos", "xpos_scale_base": 16.0, "num_kv_heads": 2},
    "kv_conv, scale, kv offsets": {"kv_conv": 3, "scale": 0.3, "num_kv_heads": 2, "position_encoding": "rotary"},
    "dense heads without positions": {"position_encoding": "xpos", "xpos_scale_base": 16.0, "global_rotary": False},
}


@torch.no_grad()
def layer_steps(rank, group, options):
    """Compare a layer's single tokens after prompts of 11 and 6 tokens with a run of each whole sequence."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    offsets = "kv" if options.get("kv_conv") else "query"
    pattern = DilatedPattern([(16, 2), (None, 3)], offset_heads=offsets).shifted(0.25)
    if not options.get("global_rotary", True):
        pattern = DilatedPattern([Branch(5, 1, heads=[1, 2, 3]), Branch(None, 1, heads=[0])])
    layer = MultiheadDilatedAttention(32, 4, pattern, causal=True, **options)
    for p in layer.parameters():
        p.normal_(std=0.3)
    lengths, steps, clock = [11, 6], 2, Clock([11, 6])
    x, cache = torch.randn(2, 13, 32), layer.new_cache(13, clock)
    for part in (x[:, :5], x[:, 5:11]):
        layer(part, cache=cache)
    want = layer(x)[0]
    with pytest.MonkeyPatch.context() as patch:
        small_tiles(patch)
        for step in range(steps):
            at = torch.tensor(lengths) + step
            got = layer(x[range(2), at][:, None], cache=cache)[0]
            assert (clock.positions(11 + step, 2, x.device) == at).all()
            torch.testing.assert_close(got[:, 0], want[range(2), at], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_layer(interpreter, name):
    interpreter.run(1, layer_steps, LAYERS[name])


def frozen_steps(rank, group, options):
    """Check that captured and plain steps agree, although the counts on the host stay as they were at capture."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    model = lively(pattern=DilatedPattern([(4, 1), (None, 2)]).shifted(), dtype=torch.float32, **options)
    prompts, lengths = torch.randint(11, (2, 5)), [5, 3]
    want = model.generate(prompts, 4, temperature=0, lengths=lengths)

    def next_frozen(step, source):
        step.replayed = getattr(step, "replayed", 0) + 1
        step._count(1 - step.replayed)
        step._replay()
        step._count(step.replayed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_step, "why_not", lambda model, device: token_step.why_not_captured(model))
        patch.setattr(token_step, "capture", lambda run, generator, device: torch.no_grad()(run))
        patch.setattr(token_step.TokenStep, "next", next_frozen)
        assert torch.equal(model.generate(prompts, 4, temperature=0, lengths=lengths), want)
        assert [step.replayed for step in token_step._steps[model].values()] == [3]


def test_captured_steps_read_the_device_only(interpreter):
    options = {"num_heads": 2, "num_kv_heads": 1, "kv_conv": 3, "rotary_base": [1e4, 1e5], "engine": "math"}
    interpreter.run(1, frozen_steps, options)


@pytest.mark.parametrize("group, stages", [(1, 1), (1, 3), (16, 1)])
def test_compiles_without_a_gpu(group, stages):
    """Compiling finds errors that the interpreter misses: variables that change type, products of wrong shapes."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lightning_dilated.ext.decoding.kernels import _attend

    ints = {"positions": "*i64", "slots": "*i64", "branches": "*i64", "scale": "fp32"}
    ints |= dict.fromkeys(("programs", "lookup", "users", "unrotated"), "*i32")
    floats = dict.fromkeys(("part", "part_lse", "cos", "sin", "factor"), "*fp32")
    halves = dict.fromkeys(("q", "k", "v", "rows_k", "rows_v"), "*bf16")
    options = {
        "ROTARY": True, "XPOS": True, "UNROTATED": True, "PRECISION": "tf32", "GROUP": group, "KEYS": 64,
        "STAGES": stages, "DIM": 48, "BLOCK": 64,
    }  # fmt: skip
    kinds = {**ints, **floats, **halves, **dict.fromkeys(options, "constexpr")}
    signature = {name: kinds.get(name, "i32") for name in _attend.arg_names}
    compiled = triton.compile(ASTSource(_attend, signature, options), target=GPUTarget("cuda", 90, 32))
    assert len(compiled.asm["cubin"]) > 0 and compiled.metadata.shared < 100_000
