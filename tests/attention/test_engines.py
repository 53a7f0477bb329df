"""Engines state what they support, such as dtypes, and `choose` uses these statements."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from lightning_dilated import kernels
from lightning_dilated._compat.torch import missing_op
from lightning_dilated.attention import DilatedAttention, dilated_attention, modules, resolve
from lightning_dilated.attention import backends as engines
from lightning_dilated.attention.backends import ENGINES, FAMILIES, Engine, Request, choose, engine_names, windows
from lightning_dilated.attention.backends import math as math_engine
from lightning_dilated.attention.backends.base import Band, Terms
from lightning_dilated.attention.backends.sdpa import CPU_FLASH, CUDNN, FLASH
from lightning_dilated.pattern import DilatedPattern, Window

from ..examples import examples
from .recorder import record
from .reference import GRADIENTS, close, close_lse, gradients, leaves
from .strategies import Case, cases

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DTYPES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
CPU_ENGINES = [name for name, e in ENGINES.items() if e.why_not(Request(CPU, torch.float32, 8)) is None]
PATTERN = DilatedPattern.longnet([8, 24], [1, 3])


def test_the_table():
    assert set(ENGINES) == {"cudnn", "flash", "cpu_flash", "triton", "math"} and CPU_ENGINES == ["cpu_flash", "math"]
    assert all(ENGINES[name].name == name for name in ENGINES)
    assert engine_names() == [*FAMILIES, *ENGINES]
    assert all(name in ENGINES for family in FAMILIES.values() for name in family)


@pytest.mark.parametrize("head_dim", [1, 3, 8, 33, 64, 96, 128, 257])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("engine", CPU_ENGINES)
def test_dtype_and_head_dim(engine, dtype, head_dim):
    """A CPU engine accepts each dtype and head dim, and is as exact as the dtype allows."""
    assert ENGINES[engine].why_not(Request(CPU, dtype, head_dim)) is None
    case = Case(PATTERN, 2, 27, 4, 2, head_dim, causal=True, layout="fused")
    q, k, v, grad = case.tensors(dtype)
    exact = leaves(q, k, v, dtype=torch.float64)
    out, lse = case.run(q, k, v, engine=engine, return_lse=True)
    want, want_lse = case.oracle(*exact)
    tol = DTYPES[dtype]
    close("out", out, want, tol)
    close_lse("lse", lse, want_lse, tol)
    grads = zip(GRADIENTS, gradients(out, (q, k, v), grad), gradients(want, exact, grad.double()), strict=True)
    for name, a, b in grads:  # inputs are of size 1, so rounding errors are absolute, even where a sum cancels
        close(name, a, b, tol, floor=1.0)


# (engine, unsupported request, part of the reason)
REFUSALS = [
    ("cudnn", Request(CPU, torch.bfloat16, 64), "runs on cuda, not on cpu"),
    ("flash", Request(CPU, torch.bfloat16, 64), "runs on cuda, not on cpu"),
    ("cpu_flash", Request(CUDA, torch.float32, 64), "runs on cpu, not on cuda"),
    ("cudnn", Request(CUDA, torch.float32, 64), "takes bfloat16, float16, not float32"),
    ("flash", Request(CUDA, torch.float64, 64), "takes bfloat16, float16, not float64"),
    ("cudnn", Request(CUDA, torch.float16, 136), "takes a head dim up to 128, not 136"),
    ("flash", Request(CUDA, torch.float16, 264), "takes a head dim up to 256, not 264"),
    ("cudnn", Request(CUDA, torch.bfloat16, 60), "takes a head dim that is a multiple of 8, not 60"),
    ("flash", Request(CUDA, torch.bfloat16, 60), "takes a head dim that is a multiple of 8, not 60"),
    ("cudnn", Request(CUDA, torch.bfloat16, 64, dropout=True), "has no attention dropout"),
    ("flash", Request(CUDA, torch.bfloat16, 64, dropout=True), "has no attention dropout"),
    ("cpu_flash", Request(CPU, torch.float32, 64, dropout=True), "has no attention dropout"),
    ("cudnn", Request(CUDA, torch.bfloat16, 64, scale=0.0), "takes a scale above 0, not 0"),
    ("flash", Request(CUDA, torch.bfloat16, 64, scale=-0.5), "takes a scale above 0, not -0.5"),
]


@pytest.mark.parametrize("engine, request_, reason", REFUSALS, ids=[f"{e}-{r}" for e, _, r in REFUSALS])
def test_refusal(engine, request_, reason):
    assert reason in ENGINES[engine].why_not(request_)
    if request_.device == CUDA:
        return  # on this machine, `choose` would stop at the missing device
    with pytest.raises(ValueError, match=f"engine='{engine}' cannot serve this call: {engine} {reason}.*'math'"):
        choose(engine, request_)


def test_math_takes_everything():
    for device in (CPU, CUDA, torch.device("meta")):
        for dtype in (*DTYPES, torch.float64):
            for dropout, scale in ((False, 1.0), (True, -1.0)):
                assert ENGINES["math"].why_not(Request(device, dtype, 1009, dropout, scale)) is None


def test_unavailable_op():
    assert "no aten::no_such_op" in missing_op("no_such_op")
    missing = replace(CPU_FLASH, available=lambda device: missing_op("no_such_op"))
    assert f"this torch ({torch.__version__})" in missing.why_not(Request(CPU, torch.float32, 64))


@pytest.mark.parametrize(
    "name, dtype, dropout, want, rejected",
    [
        ("auto", torch.float32, False, "cpu_flash", {"cudnn": "not on cpu", "flash": "not on cpu"}),
        (
            "auto",
            torch.float32,
            True,
            "math",
            {"cudnn": "cpu", "flash": "cpu", "cpu_flash": "no attention dropout", "triton": "a CUDA device"},
        ),
        ("sdpa", torch.bfloat16, False, "cpu_flash", {"cudnn": "not on cpu", "flash": "not on cpu"}),
        ("math", torch.float32, False, "math", {}),
        ("cpu_flash", torch.float64, False, "cpu_flash", {}),
    ],
    ids=["auto", "auto with dropout", "sdpa", "math", "cpu_flash"],
)
def test_choose(name, dtype, dropout, want, rejected):
    choice = choose(name, Request(CPU, dtype, 64, dropout))
    assert choice.name == want and choice.engine is ENGINES[want]
    assert list(choice.rejected) == list(rejected)
    assert all(reason in choice.rejected[e] for e, reason in rejected.items())
    assert str(choice).startswith(want) and all(f"{e} {why}" in str(choice) for e, why in choice.rejected.items())


def test_auto_follows_the_request(monkeypatch):
    """The op runs the engine that `choose` returns: dropout moves `auto` to the math engine, also in the backward."""
    flash, math = record(monkeypatch, "cpu_flash"), record(monkeypatch, "math")
    q, k, v = torch.randn(3, 1, 16, 2, 4, requires_grad=True)
    dilated_attention(q, k, v, PATTERN).sum().backward()
    assert flash.forward and flash.backward and not math.tensors
    flash.clear()
    dilated_attention(q, k, v, PATTERN, dropout=0.1).sum().backward()
    assert math.forward and math.backward and not flash.tensors


def test_another_flash_attention_goes_first(monkeypatch):
    """Flash attention is preferred to cuDNN if the user has activated a different implementation of it in torch."""
    request = Request(CUDA, torch.bfloat16, 64)
    for name in ("cudnn", "flash"):
        monkeypatch.setitem(ENGINES, name, replace(ENGINES[name], available=lambda device: None))
    assert choose("auto", request).name == choose("sdpa", request).name == "cudnn"
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3", raising=False)
    assert choose("auto", request).name == choose("sdpa", request).name == "flash"
    assert (
        choose("cudnn", request).name == "cudnn" and choose("auto", Request(CPU, torch.float32, 8)).name == "cpu_flash"
    )


@pytest.mark.parametrize("flops, changing, want", [
    (1e9, False, "triton"),
    (1e12, False, "cudnn"),
    (1e12, True, "triton"),
    (1e13, True, "cudnn"),
    (float("inf"), True, "cudnn"),
])  # fmt: skip
def test_small_blocks_are_launched_at_once(flops, changing, want, monkeypatch):
    """Blocks below the measured limit run in grouped launches. The choice gives the reasons against other engines."""
    for name in ("cudnn", "triton"):
        monkeypatch.setitem(ENGINES, name, replace(ENGINES[name], available=lambda device: None))
    monkeypatch.setattr(engines, "TRITON", ENGINES["triton"])
    monkeypatch.setattr(kernels, "capability", lambda device: (9, 0))
    request = Request(CUDA, torch.bfloat16, 64, block_flops=flops, changing=changing)
    choice = choose("auto", request)
    assert choice.name == want and ("joins blocks below" in str(choice)) == (want == "triton")
    assert choose("sdpa", request).name == "cudnn"
    monkeypatch.setattr(kernels, "capability", lambda device: (8, 0))
    assert choose("auto", request).name == "cudnn"  # no limit was measured on this device


@pytest.mark.parametrize("seq_len, documents, changing", [
    (64, {}, False),
    (65, {}, True),  # the tiles of a slide
    (64, {"lengths": torch.tensor([64])}, False),
    (64, {"lengths": torch.tensor([39])}, True),
    (64, {"cu_seqlens": torch.tensor([0, 64], dtype=torch.int32)}, False),
    (64, {"cu_seqlens": torch.tensor([0, 8, 64], dtype=torch.int32)}, True),
])  # fmt: skip
def test_any_length_changes_the_shapes_of_blocks(seq_len, documents, changing, monkeypatch):
    requests, x = [], torch.randn(1, seq_len, 2, 8)
    resolve.forget()
    monkeypatch.setattr(resolve, "choose", lambda name, request: requests.append(request) or choose(name, request))
    dilated_attention(x, x, x, PATTERN, causal=True, **documents)
    assert [x.changing for x in requests] == [changing]


@pytest.mark.parametrize("table", [engines.GROUPED_BELOW, engines.CHANGING_BELOW], ids=["grouped", "changing"])
def test_other_limits_hold_at_once(table, monkeypatch):
    """If a limit changes, calls that were resolved before are resolved again."""
    monkeypatch.setattr(kernels, "capability", lambda device: (9, 0))
    before = engines.environment(CPU)
    monkeypatch.setitem(table, (9, 0), 1.0)
    assert engines.environment(CPU) != before


@pytest.mark.parametrize("seq_len", [64, 65])
def test_the_module_names_the_engine_of_the_op(seq_len, monkeypatch):
    """`engine_choice` asks `choose` with the same request as the op."""
    requests, x = [], torch.randn(1, seq_len, 2, 8)
    resolve.forget()
    for module in (resolve, modules):
        monkeypatch.setattr(module, "choose", lambda name, request: requests.append(request) or choose(name, request))
    layer = DilatedAttention(PATTERN, causal=True)
    layer(x, x, x)
    layer.engine_choice(x)
    assert [x.changing for x in requests] == [seq_len == 65] * 2


def test_auto_is_logged_once(caplog):
    engines._seen.clear()
    with caplog.at_level("INFO", "lightning_dilated.attention.backends"):
        for _ in range(3):
            choose("auto", Request(CPU, torch.float32, 24))
            choose("math", Request(CPU, torch.float32, 24))
        choose("auto", Request(CPU, torch.float64, 24))
    assert [("float32" in m, "float64" in m, "cpu_flash" in m) for m in caplog.messages] == [(1, 0, 1), (0, 1, 1)]


def test_unknown_engine():
    with pytest.raises(ValueError, match=r"engine must be one of sdpa, auto, .*math.*; got 'triton2'"):
        choose("triton2", Request(CPU, torch.float32, 64))


def test_no_dropout_reaches_an_engine_without_it():
    # if `choose` failed, the engine itself would raise instead of ignoring the dropout
    q = torch.randn(1, 1, 4, 8)
    for engine in (CPU_FLASH, CUDNN, FLASH):
        with pytest.raises(ValueError, match="no exact attention dropout; use engine='math'"):
            engine.forward(q, q, q, Terms(False, 1.0, object()))
        with pytest.raises(ValueError, match="no exact attention dropout; use engine='math'"):
            engine.backward(q, q, q, q, q, q[..., 0], Terms(False, 1.0, object()))


@pytest.mark.parametrize("shape", [(0, 2, 5, 8), (2, 0, 5, 8), (2, 2, 0, 8)], ids=["G", "J", "n"])
@pytest.mark.parametrize("name", [name for name, e in ENGINES.items() if e.empty])
def test_empty(name, shape):
    q = torch.randn(shape)
    for causal in (False, True):
        out, lse = ENGINES[name].forward(q, q, q, Terms(causal, 1.0))
        assert out.shape == shape and lse.shape == shape[:-1]
        assert [x.shape for x in ENGINES[name].backward(out, q, q, q, out, lse, Terms(causal, 1.0))] == [shape] * 3


def test_math_leaves_out_what_causality_hides(monkeypatch):
    monkeypatch.setattr(math_engine, "SCORE_BUDGET", 2 * 64 * 4)
    tiles = list(math_engine._tiles(torch.empty(3, 2, 64, 8), 64, Band(-64, 0)))
    scores = sum((g.stop - g.start) * (i.stop - i.start) * (j.stop - j.start) for g, i, j in tiles)
    assert 3 * 64 * 65 // 2 <= scores < 3 * 64 * 64 * 0.6


def test_the_op_never_asks_for_no_rows(monkeypatch):
    """Engines with `empty=False` crash or return nothing on tensors without rows, so the op must not call them."""
    assert not CPU_FLASH.empty and not CUDNN.empty and not FLASH.empty
    calls = record(monkeypatch, "math")
    without = []

    @settings(max_examples=examples(200))
    @given(cases(longest=20))
    def check(case):
        calls.clear()
        q, k, v, grad = case.tensors()
        out = case.run(q, k, v, engine="math")
        gradients(out, (q, k, v), grad)
        assert all(x.numel() for x in calls.tensors)
        # if only the gradient's samples do not fold into one axis, the backward computes samples one by one
        assert len(calls.forward) <= len(calls.backward) <= max(1, case.batch) * len(calls.forward)
        without.append(not calls.forward)

    check()
    assert any(without) and not all(without)


def test_takes_strides():
    x = torch.empty(2, 16, 4, 8, dtype=torch.bfloat16)  # 16 bytes a row
    assert CUDNN.takes_strides(x) and CPU_FLASH.takes_strides(x)
    assert not CUDNN.takes_strides(x.transpose(2, 3)) and not CPU_FLASH.takes_strides(x.transpose(2, 3))
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    assert not CUDNN.takes_strides(shifted) and CPU_FLASH.takes_strides(shifted)
    narrow = torch.empty(2, 16, 4, 12, dtype=x.dtype)[..., :8]
    assert not CUDNN.takes_strides(narrow) and CPU_FLASH.takes_strides(narrow)
    wide = torch.empty(2, 16, 4, 16, dtype=x.dtype)
    assert CUDNN.takes_strides(wide[..., :8]) and CUDNN.takes_strides(wide[..., 8:])
    # an axis of length 1 never uses its stride
    assert CUDNN.takes_strides(torch.empty(100, dtype=x.dtype).as_strided((1, 4, 1, 8), (3, 8, 5, 1)))


@pytest.mark.parametrize("layout", ["contiguous", "fused", "transposed", "D strided", "sliced", "unaligned"])
def test_alignment(layout, monkeypatch):
    """An engine that states an alignment gets only aligned rows in both passes, and the result does not change."""
    calls = record(monkeypatch, "cpu_flash", alignment=16, head_dim_multiple=8)
    case = Case(DilatedPattern.longnet([8, 12], [1, 3]), 2, 30, 3, 3, 8, layout=layout)
    q, k, v, grad = case.tensors(torch.float32)
    if layout == "sliced":
        q, k, v = (torch.randn(2, 30, 3, 9)[..., 1:].requires_grad_() for _ in "qkv")
    if layout == "unaligned":
        q, k, v = (torch.randn(q.numel() + 1)[1:].view(q.shape).requires_grad_() for _ in "qkv")
    out = case.run(q, k, v, engine="cpu_flash")
    got = gradients(out, (q, k, v), grad)
    for x in [x for x in calls.tensors if x.ndim == 4]:
        assert x.data_ptr() % 16 == 0 and x.stride(-1) == 1
        assert all(s * 4 % 16 == 0 for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1)
    exact = leaves(q, k, v, dtype=torch.float64)
    want, _ = case.oracle(*exact)
    for name, a, b in zip(
        ("out", *GRADIENTS), (out, *got), (want, *gradients(want, exact, grad.double())), strict=True
    ):
        close(name, a, b, 1e-5)


def test_min_rows(monkeypatch):
    """Blocks with fewer rows than an engine supports run on the math engine, in both passes."""
    calls = record(monkeypatch, "cpu_flash", min_rows=4)
    case = Case(DilatedPattern([(8, 1), (6, 2), (4, 3)]), 2, 27, 3, 3, 8, causal=True)  # rows: 8 or 3, 1 to 3, 1 or 2
    q, k, v, grad = case.tensors()
    out, lse = case.run(q, k, v, engine="cpu_flash", return_lse=True)
    got = gradients(out, (q, k, v), grad)
    assert [q.shape[2] for q, *_ in calls.forward] == [8, 8] == [q.shape[2] for _, q, *_ in calls.backward]
    exact = leaves(q, k, v)
    want, want_lse = case.oracle(*exact)
    close_lse("lse", lse, want_lse, 1e-10)
    for name, a, b in zip(("out", *GRADIENTS), (out, *got), (want, *gradients(want, exact, grad)), strict=True):
        close(name, a, b, 1e-10)


def test_a_new_engine_needs_only_a_statement(monkeypatch):
    math = ENGINES["math"]
    monkeypatch.setitem(ENGINES, "mine", Engine("mine", math.forward, math.backward, dtypes=(torch.float64,)))
    q, k, v = torch.randn(3, 1, 16, 2, 4, dtype=torch.float64)
    want = dilated_attention(q, k, v, PATTERN, engine="math")
    assert torch.equal(dilated_attention(q, k, v, PATTERN, engine="mine"), want)
    with pytest.raises(ValueError, match="mine takes float64, not float32"):
        dilated_attention(q.float(), k.float(), v.float(), PATTERN, engine="mine")


@pytest.mark.parametrize("dtype, tol", [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["float64", "float32"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_windows_by_blocks(causal, dtype, tol, monkeypatch):
    """An engine without bands agrees with the math engine for any window width and row count, divisible or not."""
    monkeypatch.setattr(windows, "NARROW", 1)
    engine, math, chosen = windows.with_windows(CPU_FLASH), ENGINES["math"], random.Random(int(causal))
    for _ in range(60):
        groups, heads, dim, width = (
            chosen.randint(1, 3),
            chosen.randint(1, 3),
            chosen.choice([4, 8]),
            chosen.randint(1, 12),
        )
        n = chosen.choice([width * chosen.randint(2, 5), chosen.randint(2 * width, 5 * width + 3)])
        monkeypatch.setattr(windows, "AT_ONCE", chosen.choice([1, groups * heads * dim * width * 2, 1 << 24]))
        q, k, v, grad = (torch.randn(groups, n, heads, dim).to(dtype).transpose(1, 2) for _ in range(4))
        terms = Terms(causal, 0.3, None, Band(1 - width, 0 if causal else width - 1))
        out, lse = engine.forward(q, k, v, terms)
        want_out, want_lse = math.forward(q, k, v, terms)
        close("out", out, want_out, tol)
        close_lse("lse", lse, want_lse, tol)
        gradients_of = [x.backward(grad, q, k, v, want_out, want_lse, terms) for x in (engine, math)]
        for name, a, b in zip(GRADIENTS, *gradients_of, strict=True):
            close(name, a, b, tol, floor=1.0)


@pytest.mark.parametrize("rows", [64, 77])
def test_windows_reach_the_cpu_kernel(rows, monkeypatch):
    """On a CPU, "auto" computes blocks of a window with torch's kernel, and leftover rows with the math engine."""
    calls = record(monkeypatch, "cpu_flash")
    q = torch.randn(1, rows, 2, 8, requires_grad=True)
    dilated_attention(q, q, q, DilatedPattern([Window(16)]), causal=True).sum().backward()
    assert [x[0].shape for x in calls.forward] == [x[1].shape for x in calls.backward] == [(4, 2, 16, 8), (3, 2, 15, 8)]
