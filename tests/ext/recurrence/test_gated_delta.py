"""Kernels of the gated delta rule in the interpreter: results, states and gradients, against the definition."""

import gc
import random
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_dilated import recurrent_attention
from lightning_dilated.ext.planning.counting.memory_tracker import Meter
from lightning_dilated.ext.planning.counting.workspace import _recurrence_held
from lightning_dilated.ext.recurrence import op, triton_chunks
from lightning_dilated.ext.recurrence.rules import oracle

from ...distributed.calls import positions, sequence
from .cases import NAMES, Case, compare


def gated(documents, **options):
    return Case("gated_delta", documents, **options)


def narrow(tensors, dtype=torch.float32):
    return tuple(x.detach().to(dtype).requires_grad_() for x in tensors)


def run(case):
    """Call `Case.run` with rows in fp32."""
    tensors, past = narrow(case.tensors()), narrow(case.past())
    assert triton_chunks.serves(case.kind, *tensors[:3])
    settings = {**case.settings(), **case.limits(), "state": case.state(past), "return_state": True}
    out, state = recurrent_attention(*tensors, **settings)
    return {name: x.double() for name, x in case.results(out, case.summary(state), tensors, past).items()}


def grouped_from(chunks):
    """Process runs of `chunks` or more chunks in groups."""
    triton_chunks.layout.cache_clear()
    return mock.patch.object(triton_chunks, "GROUPED_FROM", chunks)


CASES = {
    "one token": gated((1,)),
    "a chunk less one": gated((63,), kv_heads=1, group=3),
    "a chunk": gated((64,), group=1),
    "a chunk and one": gated((65,), kv_heads=1, dim=17, values=9),
    "several chunks": gated((300,), kv_heads=1, group=1, dim=16, values=24),
    "documents": gated((70, 0, 7, 64), packed=True, earlier=(0, 3, 5, 66), kv_heads=1, dim=5, values=18),
    "padded samples": gated((5, 66), padding=2, earlier=(2, 0), group=1),
    "several blocks of columns": gated((66,), kv_heads=1, group=2, dim=70, values=65),
}


def equal(rank, group, name):
    case = CASES[name]
    compare(run(case), case.by_definition(), 1e-5)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(interpreter, name):
    interpreter.run(1, equal, name)


def random_cases(rank, group, number, examples):
    chosen = random.Random(number)
    for _ in range(examples):
        documents = tuple(chosen.choice([0, 1, 9, 63, 64, 65, 140]) for _ in range(chosen.randint(1, 3)))
        earlier = tuple(chosen.randint(0, 9) for _ in documents) if chosen.random() < 0.5 else None
        sizes = {"kv_heads": chosen.randint(1, 2), "group": chosen.randint(1, 3)}
        sizes |= {"dim": chosen.randint(1, 20), "values": chosen.randint(1, 20)}
        packed = chosen.random() < 0.5
        case = gated(documents, packed=packed, earlier=earlier, padding=0 if packed else chosen.randint(0, 2), **sizes)
        with grouped_from(chosen.choice([1, 2, 32])):
            got, want = run(case), case.by_definition()
        if case.dim == 1:  # here gradients of q and k are 0, so they are rounding errors divided by |q| or |k|
            of_one = [name for name in want if name.split()[-1] in "qk"]
            compare(*({name: tensors.pop(name) for name in of_one} for tensors in (got, want)), 1e-4)
        compare(got, want, 1e-5)


@pytest.mark.parametrize("number, examples", [(0, 2), pytest.param(1, 60, marks=pytest.mark.slow)])
def test_random_calls(interpreter, number, examples):
    interpreter.run(1, random_cases, number, examples)


def by_groups(rank, group):
    case = gated((330, 70), packed=True, earlier=(2, 0), kv_heads=1, group=1, dim=4, values=3)
    with grouped_from(2):
        got = run(case)
        assert triton_chunks.layout.cache_info().currsize == 2  # one layout is for the earlier tokens
    with grouped_from(100):
        compare(got, run(case), 1e-6)


def repeated(x):
    x[1][:] = x[1][:, :1].clone()
    x[3][:], x[4][:] = 0, 1


def forgotten(x):
    x[3][:] = -30
    x[4][:, ::2] = 0


def reflected(x):
    x[3][:, ::3], x[4][:] = 0, 2


def empty(x):
    x[0][:, 3:7], x[1][:, 5:9], x[2][:, 60:] = 0, 0, 0


def reset(x):
    x[3][:, 20:30], x[3][:, 70], x[3][:, 100:102] = -80, -1e9, -3e38


EDGES = {"resets": reset, "equal keys": repeated, "far decay": forgotten, "reflections": reflected, "zero rows": empty}


def edge(rank, group, name):
    """Compare with the torch path in float64."""
    case = gated((130,), kv_heads=1, group=1, dim=8, values=5)
    tensors = [x.detach().float() for x in case.tensors()]
    EDGES[name](tensors)
    results = []
    for dtype in (torch.float32, torch.float64):
        x = narrow(tensors, dtype)
        out, state = recurrent_attention(*x, return_state=True)
        results.append({n: y.double() for n, y in case.results(out, case.summary(state), x, case.past()).items()})
    assert all(x.isfinite().all() for x in results[0].values())
    compare(*results, 3e-5)


@pytest.mark.parametrize("name", EDGES)
def test_edges(interpreter, name):
    interpreter.run(1, edge, name)


def exact_dots():
    """Replace products, because Triton's interpreter multiplies the bits of bfloat16 as integers."""
    from triton.runtime import interpreter

    real = interpreter.InterpreterBuilder.create_dot

    def wide(x):
        if x.dtype != interpreter.tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype("uint32") << 16).view("float32"), interpreter.tl.float32)

    return mock.patch.object(
        interpreter.InterpreterBuilder, "create_dot", lambda self, a, b, *args: real(self, wide(a), wide(b), *args)
    )


def narrow_rows(rank, group, dtype, tolerance):
    """Compare strided 16-bit rows with the definition on the rounded rows. The padding may contain anything."""
    case = gated((140, 65), padding=3, kv_heads=1, group=2, dim=16, values=16)
    joint = torch.cat([x.detach() for x in case.tensors()[:3]], 2).to(dtype)
    joint[0, 140:], joint[1, 65:] = torch.nan, torch.inf
    rows = [x.detach().requires_grad_() for x in joint.split((2, 1, 1), 2)]
    gates = narrow(case.tensors()[3:])
    with exact_dots():
        out, state = recurrent_attention(*rows, *gates, lengths=[140, 65], return_state=True)
    assert out.dtype == dtype and state.matrix.dtype == torch.float32 and not out[0, 140:].any()
    wide = narrow((*rows, *gates), torch.float64)
    want = [oracle(*(x[i, :n] for x in wide), kind="gated_delta") for i, n in enumerate((140, 65))]
    padded = [torch.cat([x.out, x.out.new_zeros(143 - len(x.out), *x.out.shape[1:])]) for x in want]
    pairs = [(out, torch.stack(padded)), (state.matrix, torch.stack([x.matrix for x in want]))]
    weights = [case.weights(*x.shape) for x, _ in pairs]
    losses = [
        sum((x.double() * w).sum() for x, w in zip(every, weights, strict=True)) for every in zip(*pairs, strict=True)
    ]
    with exact_dots():
        grads = [torch.autograd.grad(*x) for x in zip(losses, ((*rows, *gates), wide), strict=True)]
    for x, y in (*pairs, *zip(*grads, strict=True)):
        torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance * float(y.detach().abs().max()))


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_rows_of_16_bits(interpreter, dtype, tolerance):
    interpreter.run(1, narrow_rows, dtype, tolerance)


def trained_after_inference(rank, group):
    """A backward cannot save tensors that were created in `torch.inference_mode`, such as layouts cached then."""
    triton_chunks.layout.cache_clear()
    rows = narrow(gated((70,), kv_heads=1, group=1, dim=4, values=4).tensors())
    with torch.inference_mode():
        want = recurrent_attention(*rows)
    out = recurrent_attention(*rows)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), rows)) and torch.equal(out, want)


def in_windows(rank, group):
    """Several windows, one window, and torch agree. The kernels' backward first computes states only, without outputs."""
    rows = [x.detach().float() for x in gated((160,), kv_heads=1, group=2, dim=4, values=4).tensors()]
    from lightning_dilated.ext.recurrence import gated_delta

    results, states = {}, mock.Mock(wraps=gated_delta.last_states)
    for name, tokens in (("one", 1000), ("several", 70), ("torch", 1000)):
        x = narrow(rows)
        with (
            mock.patch.object(triton_chunks, "window", lambda *unused, n=tokens: n),
            mock.patch.object(gated_delta, "last_states", states),
            mock.patch.object(triton_chunks, "why_not", triton_chunks.why_not if name != "torch" else lambda *_: "no"),
        ):
            out = op.RECURRENCE(*x, None, torch.tensor([0, 90, 160]), op.encode("gated_delta", None, True))
            grads = torch.autograd.grad(out.square().sum(), x)
        results[name] = {"out": out.detach(), **dict(zip(NAMES, grads, strict=True))}
    compare(results["several"], results["one"], 1e-5)
    compare(results["torch"], results["one"], 1e-5)
    assert states.call_count == 2


@pytest.mark.parametrize("check", [by_groups, trained_after_inference, in_windows], ids=lambda check: check.__name__)
def test_in_the_interpreter(interpreter, check):
    interpreter.run(1, check)


@pytest.mark.parametrize("sizes, tokens", [
    ((1, (12, 12), (64, 64)), 262144),
    ((0, (12, 12), (64, 64)), 262144),
    ((4, (12, 12), (64, 64)), 65536),
    ((1, (32, 32), (128, 128)), 32768),
])  # fmt: skip
def test_windows_fit_their_memory(sizes, tokens):
    batch, *dims = sizes
    assert triton_chunks.window(*sizes, torch.bfloat16) == tokens
    held = triton_chunks.held_bytes(max(1, batch) * tokens, *dims, torch.bfloat16, True)
    assert held <= triton_chunks.WINDOW_MEMORY < 2.1 * held


def held(rank, group, forward, window):
    """Return (bytes that the op stores besides inputs and results, predicted bytes)."""
    from lightning_dilated.ext.recurrence import gated_delta_backward  # imported here, where the interpreter runs

    heads, kv_heads, dim, tokens = 4, 2, 16, 400
    launch = gated_delta_backward.launch_queries

    def collected(*args):
        gc.collect()  # Triton's interpreter keeps memory of earlier launches in reference cycles
        return launch(*args)

    queries = mock.patch.object(gated_delta_backward, "launch_queries", collected)
    with mock.patch.object(triton_chunks, "window", lambda *unused: window), grouped_from(4), queries:
        spec = op.encode("gated_delta", None, True)
        got = _recurrence_held(forward, tokens, (heads, kv_heads, dim), torch.float32, spec, Meter())
    within = min(tokens, window)
    sizes = (heads, kv_heads), (dim, dim)
    return got, triton_chunks.held_bytes(within, *sizes, torch.float32, not forward, within < tokens)


@pytest.mark.parametrize("window", [1000, 200])
@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
def test_memory_is_counted(interpreter, forward, window):
    got, counted = interpreter.run(1, held, forward, window)[0]
    assert got <= counted < 1.5 * got


def shared(rank, group, case):
    """Return this rank's part of the results of `run`."""
    with sequence(group) as ours:
        at = positions(ours, case.seq_len)
        tensors = [x[:, at].detach().requires_grad_() for x in narrow(case.tensors())]
        out, state = recurrent_attention(*tensors, **case.limits(), sequence=ours, return_state=True)
        weights = case.weights(*out.shape[:1], case.seq_len, *out.shape[2:])[:, at]
        loss = (out * weights).sum() + (state.matrix * case.weights(*state.matrix.shape, seed=3)).sum() * (rank == 0)
        grads = torch.autograd.grad(loss, tensors)
        return [x.detach().double() for x in (out, *grads)], state.matrix.detach().double()


@pytest.mark.parametrize("documents", [(150,), (9, 131)])
def test_two_ranks(interpreter, documents):
    case = gated(documents, packed=True, kv_heads=1, group=1, dim=4, values=3)
    answers, want = interpreter.run(2, shared, case), case.by_definition()
    whole = [torch.cat(x, 1) for x in zip(*(rows for rows, _ in answers), strict=True)]
    got = {"out": whole[0], "state 0": answers[0][1], **{f"d {n}": x for n, x in zip(NAMES, whole[1:], strict=True)}}
    compare(got, {name: want[name] for name in got}, 1e-5)


def test_what_the_kernels_take():
    rows = lambda dim, dtype=torch.float32: [torch.zeros(1, 2, 1, dim, dtype=dtype) for _ in range(3)]  # noqa: E731
    assert "head dims up to 128, not 130" in triton_chunks.why_not(*rows(130))
    assert "not float64" in triton_chunks.why_not(*rows(8, torch.float64))
    with mock.patch.object(triton_chunks.kernels, "why_not", lambda device: None):
        reasons = []
        torch.func.vmap(lambda x: reasons.append(triton_chunks.why_not(x, x, x)) or x)(torch.zeros(1, 1, 2, 1, 8))
        assert "torch.func" in reasons[0]
    with FakeTensorMode(), mock.patch.object(triton_chunks.kernels, "why_not", lambda device: None):
        narrow = [torch.zeros(1, 2, 1, dim, device="cuda") for dim in (16, 16, 64)]
        assert "up to 16 only in 16 bits and with none above 64, not 16 and 64 in float32" in triton_chunks.why_not(
            *narrow
        )
        assert triton_chunks.serves("gated_delta", *(x.bfloat16() for x in narrow))
        assert not triton_chunks.serves(
            "gated_delta", *(x.bfloat16() for x in (*narrow[:2], torch.cat([narrow[2]] * 2, 3)))
        )
        assert triton_chunks.serves("gated_delta", narrow[2], narrow[2], narrow[2])
    assert "TRITON_INTERPRET" in triton_chunks.why_not(*rows(8)) and not triton_chunks.serves("delta", *rows(8))


KERNELS = {
    "_invert": {"SOLVE": "tf32x3"},
    "_pass": {"MAPS": False, "STORE": True},
    "pass_groups": {"BACK": True, "SUMS": True},
    "_read": {"GROUP": 2},
    "_sums": {"GROUP": 2},
    "_pass_back": {"ZERO": False, "STORE": True, "READ": True},
    "_queries": {"GROUP": 2, "BLOCKS": 1},
    "_gradients": {"READ": True, "BLOCKS": 2},
}


@pytest.mark.parametrize("stored", ["*bf16", "*fp32"])
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_without_a_gpu(name, stored):
    """Compiling finds errors that the interpreter misses: variables that change type, products of wrong shapes."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lightning_dilated.ext.recurrence import gated_delta, gated_delta_backward

    kernel = getattr(gated_delta, name, None) or getattr(gated_delta_backward, name)
    kinds = {**dict.fromkeys(("rows", "items", "members"), "*i64"), "matrix": "*fp16"}
    kinds |= dict.fromkeys(("q", "k", "v", "grad", "out", "dq", "dk", "dv"), "*bf16")
    kinds |= dict.fromkeys(("before", "new", "after", "solved", "to_new", "to_state", "to_key"), stored)
    numbers = ("heads", "width", "extra", "maps_width", "sums_width", "sums_first")
    sizes = {"SLOTS": 64, "DIM": 32, "BLOCK": 32, "COLUMNS": 32, "PRECISION": "tf32"}
    options = {n: x for n, x in {**sizes, **KERNELS[name]}.items() if n in kernel.arg_names}
    kinds |= {n: "i32" for n in kernel.arg_names if n in numbers or n[1:] in ("_sr", "_sh")}
    kinds |= dict.fromkeys(options, "constexpr")
    signature = {n: kinds.get(n, "*fp32") for n in kernel.arg_names}
    compiled = triton.compile(ASTSource(kernel, signature, options), target=GPUTarget("cuda", 90, 32))
    assert len(compiled.asm["cubin"]) > 0 and compiled.metadata.shared < 100_000
