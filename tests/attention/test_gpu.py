"""Every engine on CUDA against the oracle, and properties that only CUDA has."""

import contextlib
from itertools import product

import pytest
import torch

from lightning_dilated.attention import DilatedAttention, backends, dilated_attention, resolve
from lightning_dilated.attention.backends import ENGINES, Request, choose, cudnn_bands
from lightning_dilated.attention.executors import fused, grouped
from lightning_dilated.pattern import Branch, DilatedPattern, Window

from .recorder import block_by_block, record
from .reference import GRADIENTS, close, close_lse, error, gradients, leaves, plain
from .strategies import Case

pytestmark = pytest.mark.gpu

PATTERN = DilatedPattern([(32, 1), Branch(64, 2, shift=11), (128, 4), (None, 8)])
BASE = Case(PATTERN, 1, 256, 4, 4, 64)
CASES = {
    "odd widths": Case(DilatedPattern([(205, 3), (1025, 8)]), 1, 2050, 2, 2, 64),
    "no tokens": BASE.but(seq_len=0),
    "one token": BASE.but(seq_len=1),
    "segments of one token": BASE.but(pattern=DilatedPattern([(1, 1), (7, 7)]), seq_len=33),
    "no head covered": BASE.but(pattern=DilatedPattern([Branch(8, 4, offset=3)]), seq_len=3),
    "plain": BASE,
    "causal": BASE.but(causal=True),
    "ragged": BASE.but(seq_len=203, batch=3, causal=True),
    "folded samples": BASE.but(batch=3),
    "gqa": BASE.but(heads=6, kv_heads=2, causal=True),
    "gqa, kv offsets": BASE.but(
        heads=6, kv_heads=2, pattern=DilatedPattern.longnet([32, 64], [1, 2], offset_heads="kv")
    ),
    "lengths": BASE.but(batch=3, lengths=(256, 0, 77), causal=True),
    "documents": BASE.but(seq_len=203, documents=(0, 0, 1, 100, 203), causal=True),
    "attended": BASE.but(
        seq_len=203, pattern=DilatedPattern([(32, 1), (64, 4)], offsets="blocked", padding="attended")
    ),
    "window": BASE.but(seq_len=300, pattern=DilatedPattern([Window(100)]), causal=True),
    "windows and branches": BASE.but(
        seq_len=303, batch=2, pattern=DilatedPattern([Window(70, heads=[0, 3]), Window(21, 3), (64, 2)])
    ),
    "windows of documents": BASE.but(
        seq_len=303, pattern=DilatedPattern([Window(70), (64, 2)]), documents=(0, 0, 1, 100, 303), causal=True
    ),
    "expanded kv": BASE.but(kv_heads=2, layout="expanded kv"),
    "fused": BASE.but(batch=2, layout="fused", causal=True),
    "D strided": BASE.but(layout="D strided"),
    "D = 48": BASE.but(head_dim=48, causal=True),
    "D = 128": BASE.but(head_dim=128, causal=True),
}


def check(case: Case, engine: str, dtype: torch.dtype) -> None:
    """Allow twice the error of a plain softmax plus the rounding of the result; 1e-5 for fp32, 1e-10 for fp64."""
    q, k, v, grad = case.tensors(dtype, device="cuda")
    out, lse = case.run(q, k, v, engine=engine, return_lse=True)
    exact, rough = leaves(q, k, v, dtype=torch.float64), leaves(q, k, v)
    want, want_lse = case.oracle(*exact)
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    rounded = plain(*rough, *(x.cuda() for x in case.counts()), scale)
    assert out.device.type == lse.device.type == "cuda" and out.dtype == dtype
    close_lse(f"lse of {case}", lse, want_lse, 1e-3 if dtype.itemsize == 2 else 1e-5)
    rows = zip(
        ("out", *GRADIENTS),
        (out, *gradients(out, (q, k, v), grad)),
        (want, *gradients(want, exact, grad.double())),
        (rounded, *gradients(rounded, rough, grad)),
        strict=True,
    )
    for name, a, b, c in rows:
        allowed = {torch.float32: 1e-5, torch.float64: 1e-10}.get(dtype) or 2 * error(c, b, 1.0) + torch.finfo(
            dtype
        ).eps
        close(f"{name} of {case}", a, b, allowed, 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("engine", ["cudnn", "flash", "triton", "math", "sdpa", "auto"])
@pytest.mark.parametrize("name", CASES)
def test_oracle(name, engine, dtype):
    check(CASES[name], engine, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", [name for name in CASES if "window" in name])
def test_windows_by_cudnns_own_band(name, dtype, monkeypatch):
    pytest.importorskip("cudnn")
    monkeypatch.setattr(cudnn_bands, "FEWEST", 1)
    cudnn_bands._built.cache_clear()
    check(CASES[name], "cudnn", dtype)
    assert cudnn_bands._built.cache_info().misses


WIDE = [("math", torch.float64), ("math", torch.float32), ("auto", torch.float64), ("auto", torch.float32)]
WIDE.append(("triton", torch.float32))


@pytest.mark.parametrize("engine, dtype", WIDE)
@pytest.mark.parametrize("name", CASES)
def test_oracle_wide(name, engine, dtype):
    check(CASES[name], engine, dtype)


@pytest.mark.parametrize(
    "dtype, dropout, want",
    [
        (torch.bfloat16, 0.0, "cudnn"),
        (torch.float16, 0.0, "cudnn"),
        (torch.float32, 0.0, "triton"),
        (torch.float64, 0.0, "math"),
        (torch.bfloat16, 0.1, "triton"),
    ],
    ids=["bf16", "fp16", "float32", "float64", "dropout"],
)
def test_auto(dtype, dropout, want, monkeypatch):
    monkeypatch.setattr(backends, "GROUPED_BELOW", {})
    resolve.forget()
    monkeypatch.setattr(grouped, "plan", lambda *args: None)  # without a grouped launch, the engine runs block by block
    q = torch.randn(1, 64, 2, 64, device="cuda", dtype=dtype, requires_grad=True)
    assert choose("auto", Request.of(q, dropout)).name == want
    calls = {name: record(monkeypatch, name) for name in ENGINES}
    dilated_attention(q, q, q, PATTERN, dropout=dropout).sum().backward()
    assert {name for name, c in calls.items() if c.tensors} == {want}


@pytest.mark.parametrize("tokens, want", [(4096, "triton"), (200000, "cudnn")])
def test_auto_launches_small_blocks_at_once(tokens, want, monkeypatch):
    pattern, plans, real = DilatedPattern.geometric(1024, 4096), [], grouped.plan
    resolve.forget()
    monkeypatch.setattr(grouped, "plan", lambda *args: plans.append(real(*args)) or plans[-1])
    q = torch.randn(1, tokens, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    assert DilatedAttention(pattern, causal=True).engine_choice(q).name == want
    dilated_attention(q, q, q, pattern, causal=True).sum().backward()
    assert [p is not None for p in plans] == [want == "triton"]  # one plan serves both passes


@pytest.mark.parametrize("engine", ["cudnn", "flash", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_fp32_reaches_no_half_precision_engine(engine, dtype):
    # cuDNN itself returns NaN for fp32 and raises no error
    q = torch.randn(1, 64, 2, 64, device="cuda", dtype=dtype)
    with pytest.raises(ValueError, match=rf"takes bfloat16, float16, not {str(dtype)[6:]}.*Use engine=.*'math'"):
        dilated_attention(q, q, q, PATTERN, engine=engine)


@pytest.mark.parametrize("scale", [0, -0.3])
def test_scale(scale):
    # with such a scale, both fused engines return wrong results without an error
    case = BASE.but(scale=scale, causal=True)
    for engine in ("math", "auto"):
        check(case, engine, torch.bfloat16)
    for engine in ("cudnn", "flash", "sdpa"):
        with pytest.raises(ValueError, match=f"takes a scale above 0, not {scale}.*Use engine=.*'math'"):
            check(case, engine, torch.bfloat16)


@pytest.mark.parametrize("engine, head_dim", [("cudnn", 136), ("flash", 264), ("cudnn", 60), ("flash", 60)])
def test_head_dim_refused(engine, head_dim):
    q = torch.randn(1, 16, 2, head_dim, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=f"engine='{engine}' cannot serve.*head dim.*not {head_dim}.*'math'"):
        dilated_attention(q, q, q, PATTERN, engine=engine)
    dilated_attention(q, q, q, PATTERN)  # "auto" finds an engine that supports the head dim


@pytest.mark.parametrize("engine, head_dim", list(product(["cudnn", "flash", "triton"], [8, 16, 32, 72, 96, 120, 128])))
def test_head_dim(engine, head_dim):
    check(BASE.but(head_dim=head_dim, seq_len=100, causal=True), engine, torch.bfloat16)


@pytest.mark.parametrize("engine", ["cudnn", "flash"])
@pytest.mark.parametrize("make", ["unaligned", "sliced"])
def test_alignment(make, engine):
    if make == "unaligned":
        q = torch.randn(1 + 64 * 2 * 64, device="cuda").bfloat16()[1:].view(1, 64, 2, 64)
    else:
        q = torch.randn(1, 64, 2, 65, device="cuda").bfloat16()[..., 1:]
    want = dilated_attention(q, q, q, PATTERN, engine="math")
    close("out", dilated_attention(q, q, q, PATTERN, engine=engine), want, 2e-2)


@pytest.mark.parametrize("engine", ["cudnn", "flash", "auto"])
def test_compile(engine):
    case = CASES["gqa"].but(layout="fused")
    q, k, v, grad = case.tensors(torch.bfloat16, device="cuda")
    run = lambda q, k, v: case.run(q * 2, k, v, engine=engine) * 2  # noqa: E731
    torch._dynamo.reset()
    out, want = torch.compile(run, fullgraph=True)(q, k, v), run(q, k, v)
    close("out", out, want, 1e-2)
    for name, a, b in zip(GRADIENTS, gradients(out, (q, k, v), grad), gradients(want, (q, k, v), grad), strict=True):
        close(name, a, b, 2e-2)


def test_autocast():
    q = torch.randn(1, 64, 2, 64, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = dilated_attention(q, q, q, PATTERN)
    out.sum().backward()
    assert out.dtype == torch.bfloat16 and q.grad.dtype == torch.float32 and q.grad.isfinite().all()


@pytest.mark.parametrize("head_dim", [1, 17, 60, 200, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_head_dims_of_triton(head_dim, dtype):
    check(BASE.but(head_dim=head_dim, seq_len=100, causal=True), "triton", dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["plain", "gqa", "lengths", "documents"])
def test_dropout_of_triton(name, dtype):
    """The triton engine draws the same mask as the math engine."""
    case, results = CASES[name], []
    q, k, v, grad = case.tensors(dtype, device="cuda")
    for engine, wide in (("triton", dtype), ("math", torch.float64)):
        x = leaves(q, k, v, dtype=wide)
        torch.manual_seed(5)
        out = case.run(*x, dropout=0.4, engine=engine)
        results.append([out, *gradients(out, x, grad.to(wide))])
    for what, a, b in zip(("out", *GRADIENTS), *results, strict=True):
        close(f"{what} of {case}", a, b, 1e-5 if dtype == torch.float32 else 3e-2, 1.0)


def test_deterministic():
    """Two runs return the same bits. Nondeterministic engines are skipped by "auto" and refused by name."""
    q, k, v = (torch.randn(1, 5000, 4, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "qkv")
    grad, pattern, runs = torch.randn_like(q), DilatedPattern.geometric(256, 4096), []
    torch.use_deterministic_algorithms(True)
    try:
        assert choose("auto", Request.of(q)).name == "triton"
        with pytest.raises(ValueError, match="use_deterministic_algorithms is on"):
            dilated_attention(q, k, v, pattern, engine="cudnn")
        for _ in range(3):
            out = dilated_attention(q, k, v, pattern, causal=True)
            runs.append([out, *gradients(out, (q, k, v), grad)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for again in runs[1:] for a, b in zip(runs[0], again, strict=True))


@pytest.mark.parametrize("engine", ["triton", "cudnn"])
def test_cuda_graph(engine):
    """A recorded forward is replayed with other input values."""
    q = torch.randn(1, 4096, 4, 64, device="cuda", dtype=torch.bfloat16)
    pattern, side, graph = DilatedPattern.geometric(512, 2048), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    call = lambda: dilated_attention(q, q, q, pattern, causal=True, engine=engine)  # noqa: E731
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        out = call()
    q.copy_(torch.randn_like(q))
    graph.replay()
    close("out", out, call(), 1e-2)


@pytest.mark.parametrize("engine", ["triton", "blocks", "cudnn"])
def test_long_calls(engine):
    """Calls that are split over two streams or into several launches equal undivided calls of cuDNN."""
    for batch, tokens in ((1, 9 * 4096), (2, 5 * 4096)):
        q, k, v, grad = (torch.randn(batch, tokens, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        pattern, unit = DilatedPattern.geometric(512, 8192), batch * 4 * 64 * 4096
        for sizes in ((unit, unit, 2 * unit, unit), (2 * unit, unit, unit, unit), (fused.FORWARD,) * 4):
            with pytest.MonkeyPatch.context() as patch:
                for name, size in zip(("FORWARD", "DENSE", "THIN", "ONE_PIECE"), sizes, strict=True):
                    patch.setattr(fused, name, size)
                patch.setattr(grouped, "LIMIT", 2 * unit)
                resolve.forget()
                x = leaves(q, k, v)
                with block_by_block() if engine == "blocks" else contextlib.nullcontext() as shapes:
                    got = dilated_attention(*x, pattern, causal=True, engine=engine)
                    got = [got, *gradients(got, x, grad)]
                assert bool(shapes) == (engine == "blocks")
                patch.setattr(fused, "OVERLAP", 0.0)
                patch.setattr(grouped, "LIMIT", 0)
                resolve.forget()
                x = leaves(q, k, v)
                want = dilated_attention(*x, pattern, causal=True, engine="cudnn")
                want = [want, *gradients(want, x, grad)]
            for name, a, b in zip(("out", *GRADIENTS), got, want, strict=True):
                close(f"{name} of {sizes}", a, b, 2e-2, 1.0)


def test_dropout_mask_is_the_cpus():
    # the mask is a function of counters, not drawn from a generator, so it does not depend on the device
    case = CASES["gqa"]
    outs = []
    for device in ("cpu", "cuda"):
        q, k, v, grad = case.tensors(device=device)
        torch.manual_seed(5)
        out = case.run(q, k, v, dropout=0.4)
        outs.append([x.cpu() for x in (out, *gradients(out, (q, k, v), grad))])
    for a, b in zip(*outs, strict=True):
        close("dropout", a, b, 1e-10)


@pytest.mark.parametrize("engine", ["cudnn", "flash", "math"])
def test_ten_branches_peak_like_three(engine):
    peaks = {}
    for branches in (3, 10):  # up to two branches would be stored and combined in one step, so compare with three
        q, k, v = (torch.randn(1, 16384, 4, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "qkv")
        pattern = DilatedPattern([(512 + i, 1) for i in range(branches)])
        torch.cuda.reset_peak_memory_stats()
        dilated_attention(q, k, v, pattern, engine=engine).sum().backward()
        peaks[branches] = torch.cuda.max_memory_allocated()
    assert peaks[10] < peaks[3] + (4 << 20), peaks


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.mem_get_info()[1] < 100e9, reason="needs 100 GB")
def test_four_million_tokens():
    """Offsets exceed 2**31. This package's kernels and cuDNN's agree only if both compute them right."""
    pattern, rng = DilatedPattern.longnet([2048, 32768], [1, 16]), torch.Generator("cuda").manual_seed(0)
    q, k, v, grad = (
        torch.randn(1, 2**22, 12, 64, device="cuda", dtype=torch.bfloat16, generator=rng) for _ in range(4)
    )
    results = []
    for engine in ("triton", "cudnn"):
        x = leaves(q, k, v)
        out = dilated_attention(*x, pattern, causal=True, engine=engine)
        results.append([out.detach(), *gradients(out, x, grad)])
        del out, x
    for name, a, b in zip(("out", *GRADIENTS), *results, strict=True):
        for i in range(0, 2**22, 2**20):
            close(f"{name} from {i}", a[:, i : i + 2**20], b[:, i : i + 2**20], 2e-2, 1.0)
