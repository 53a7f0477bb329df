"""The kernels of the short convolution in the interpreter: results and gradients equal torch's operations."""

import random
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_dilated import Recurrence
from lightning_dilated.ext.convolution import convolution
from lightning_dilated.ext.convolution.convolution import ShortConvolution
from lightning_dilated.ext.planning.counting.memory_tracker import Meter
from lightning_dilated.ext.recurrence.branch import RecurrentBranch

from ...distributed.calls import positions, sequence
from .cases import CASES, Case, compare, drawn, without_kernels


def equal(rank, group, name):
    compare(CASES[name].results(torch.float32), CASES[name].by_torch(), torch.float32)


@pytest.mark.parametrize("name", CASES)
def test_equals_torch(interpreter, name):
    interpreter.run(1, equal, name)


def random_calls(rank, group, number, examples):
    chosen = random.Random(number)
    for _ in range(examples):
        case = drawn(chosen)
        compare(case.results(torch.float32), case.by_torch(), torch.float32)


@pytest.mark.parametrize("number, examples", [(0, 4), pytest.param(1, 200, marks=pytest.mark.slow)])
def test_random_calls(interpreter, number, examples):
    interpreter.run(1, random_calls, number, examples)


def narrow(rank, group, dtype):
    """Compare 16-bit rows. With fp32 weights, as in Trainer(precision="bf16-mixed"), their gradient is not rounded."""
    for case in (Case(300, (5, 8), batch=2), Case(40, causal=False, cuts=(0, 3, 4, 40))):
        for weights in (dtype, torch.float32):
            compare(case.results(dtype, weights=weights), case.by_torch(), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_of_16_bits(interpreter, dtype):
    interpreter.run(1, narrow, dtype)


def weights_are_rounded(rank, group):
    """As in torch's operations, fp32 weights are rounded to the dtype of the rows."""
    module = ShortConvolution(1, 2, True)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1 + 2**-9], [-2]]))
    assert module(torch.ones(1, 2, 1, dtype=torch.bfloat16))[0, 1] == 0


def padding_is_not_seen(rank, group):
    """The results of real tokens do not depend on the values of the padding."""
    case = Case(20, (4,), causal=False, batch=2, lengths=(20, 7))
    (x,), module = case.parts(torch.float32), case.module(torch.float32)
    x[1, 7:] = torch.nan
    y = module(x, **case.documents())
    assert y[0].isfinite().all() and y[1, :7].isfinite().all()
    grad = torch.zeros_like(y)
    grad[1, :7] = 1
    x = x.nan_to_num().requires_grad_()
    assert not torch.autograd.grad(module(x, **case.documents()), x, grad)[0][1, 7:].any()


# -- the op ------------------------------------------------------------------------------------------------------------
def module_and_parts():
    case = Case(21, (3, 4), cuts=(0, 5, 21))
    parts = [x.requires_grad_() for x in Case(21, (3, 4), layout="apart").parts(torch.float32)]
    return case.module(torch.float32), parts, case.documents()["cu_seqlens"]


def summed(module, parts, cu_seqlens):
    """Return a scalar of the outputs. Its gradient depends on the outputs, too."""
    q, k = module.together(parts, None, cu_seqlens)
    return (q * k[..., :3]).sum() + k.square().sum()


def runs(rank, group, name):
    module, parts, cu_seqlens = module_and_parts()
    compiled = lambda run: torch.compile(run, fullgraph=True, backend="aot_eager")  # noqa: E731
    recomputed = lambda run: lambda *args: checkpoint(run, *args, use_reentrant=False)  # noqa: E731
    run = {"compiled": compiled, "recomputed": recomputed}[name](summed)
    got, want = (torch.autograd.grad(f(module, parts, cu_seqlens), (*parts, module.weight)) for f in (run, summed))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["compiled", "recomputed"])
def test_runs(interpreter, name):
    interpreter.run(1, runs, name)


def is_an_op(rank, group):
    """Run torch's checks of a registered op, and check that it saves only its inputs."""
    module, parts, cu_seqlens = module_and_parts()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.data_ptr()), lambda x: x):
        module.together(parts, None, cu_seqlens)
    assert set(saved) == {x.data_ptr() for x in (*parts, module.weight, cu_seqlens)}
    with FlopCounterMode(display=False) as counter:
        summed(module, parts, cu_seqlens).backward()
    assert counter.get_total_flops() == 0  # torch's counter counts matrix products only
    op, checks = torch.ops.lightning_dilated.local_convolution.default, ("test_schema", "test_faketensor")
    torch.library.opcheck(op, (parts, module.weight, None, cu_seqlens, 0), test_utils=checks)


def grads_of_any_kind(rank, group):
    """Check gradients with an unused output and an expanded gradient. Two runs must agree bit by bit."""
    module, parts, _ = module_and_parts()

    def run():
        return torch.autograd.grad(module.together(parts)[1].sum(), (parts[1], module.weight))

    got = run()
    with without_kernels():
        want = run()
    for x, y, z in zip(got, want, run(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
        assert torch.equal(x, z)
    assert not got[1][:, :3].any()


def double_backward(rank, group):
    module, parts, cu_seqlens = module_and_parts()
    grads = torch.autograd.grad(summed(module, parts, cu_seqlens), parts, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no double backward.*Leave out create_graph=True"):
        grads[0].sum().backward()


def held(rank, group):
    """Return the bytes that the op allocates, without inputs and results, in the forward and in the backward."""
    case = Case(1024, (16, 16), cuts=(0, 5, 1024), layout="apart")
    module, parts, cu_seqlens = case.module(torch.float32), case.parts(torch.float32), case.documents()["cu_seqlens"]
    grads, arguments, beside = case.parts(torch.float32, seed=2), (module.weight, None, cu_seqlens, 0), []
    ops = torch.ops.lightning_dilated
    for run in (
        lambda: ops.local_convolution(parts, *arguments),
        lambda: ops.local_convolution_backward(grads, parts, *arguments),
    ):
        with torch.no_grad(), Meter() as meter:
            meter.track([*grads, *parts, module.weight, cu_seqlens], "inputs")
            before = meter.live
            results = run()
            beside.append(meter.peak - before - sum(x.nbytes for x in results))
    return beside


def test_memory_is_its_results(interpreter):
    """The op allocates no memory except its results and the document number of each token."""
    assert max(interpreter.run(1, held)[0]) <= 4 * 1024


def branch(rank, group, documents):
    """Check the recurrence of a layer, in which q, k and v are convolved in place."""
    results = {}
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        module = RecurrentBranch(Recurrence("linear", 16), 8, 4, 2, 4, True, dtype=torch.float64)
        torch.nn.init.normal_(module.conv.weight, std=0.5)
        x, joint, v = (torch.randn(1, 50, *n, dtype=torch.float64) for n in ((8,), (6, 4), (2, 4)))
        module, (x, joint, v) = module.to(dtype), (y.to(dtype).requires_grad_() for y in (x, joint, v))
        q, k = joint.split((4, 2), 2)
        with mock.patch.object(torch, "cat", wraps=torch.cat) as joined:
            out = module(x, q, k, v, cu_seqlens=documents)
        assert dtype == torch.float64 or all(y.shape[-1] != 32 for (y, *_), _ in joined.call_args_list for y in y)
        leaves = x, joint, v, module.conv.weight
        results[dtype] = [out, *torch.autograd.grad(out.square().sum(), leaves)]
    for got, want in zip(*results.values(), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5 * float(want.detach().abs().max()))


@pytest.mark.parametrize("cuts", [None, (0, 7, 50)])
def test_a_layers_recurrence(interpreter, cuts):
    interpreter.run(1, branch, None if cuts is None else torch.tensor(cuts, dtype=torch.int32))


# -- ranks and streams -------------------------------------------------------------------------------------------------
def shared(rank, group, case, layout):
    """Return the rows of y and dx on this rank, and this rank's part of the weight's gradient."""
    with sequence(group, layout=layout) as ours, ours.active():
        at, module = positions(ours, case.tokens), case.module(torch.float32)
        (x,), (grad,) = (case.parts(torch.float32, seed=seed) for seed in (1, 2))
        x = x[:, at].requires_grad_()
        with mock.patch.object(convolution, "_convolved", side_effect=AssertionError):
            y = module(x, **case.documents())
        with mock.patch.object(convolution, "_gradients", side_effect=AssertionError):
            dx, dweight = torch.autograd.grad(y, (x, module.weight), grad[:, at])
        return at, y.detach(), dx, dweight


SHARED = {
    "causal": Case(37, batch=2),
    "documents": Case(41, cuts=(0, 3, 19, 20, 22, 41)),
    "centred documents": Case(40, causal=False, cuts=(0, 3, 20, 22, 40)),
    "centred lengths": Case(24, causal=False, batch=3, lengths=(24, 13, 0)),
}


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", SHARED)
def test_two_ranks(interpreter, name, layout):
    case = SHARED[name]
    want, parts = case.by_torch(), interpreter.run(2, shared, case, layout)
    got = {"y 0": torch.zeros_like(want["y 0"]).float(), "dx 0": torch.zeros_like(want["dx 0"]).float()}
    for at, y, dx, _ in parts:
        got["y 0"][:, at], got["dx 0"][:, at] = y, dx
    compare({**got, "dweight": sum(part[3] for part in parts)}, want, torch.float32)


def chunks_of_streams(rank, group):
    """Rows of a chunk continue documents of the previous chunk. Gradients of 16-bit rows are summed in fp32."""
    generator = torch.Generator().manual_seed(0)
    rows, weight, grad = (torch.randn(*x, generator=generator) for x in ((2, 300, 5), (4, 5), (2, 297, 5)))
    numbers = torch.randint(0, 2, (2, 300), generator=generator).cumsum(1, dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [x.to(torch.bfloat16).to(dtype) for x in (rows, weight, grad)]
        for seen in (convolution.Seen(), convolution.Seen(numbers)):
            call = lambda rows, weight, grad, seen=seen: {  # noqa: E731
                "y": convolution._run(rows, weight, 0, seen),
                **dict(zip(("d_rows", "dweight"), convolution._run_backward(grad, rows, weight, 0, seen), strict=True)),
            }
            got, want = call(*tensors), call(*(x.double() for x in tensors))
            assert got["y"].is_contiguous() and got["d_rows"].dtype == torch.float32
            compare(got, want, dtype)


@pytest.mark.parametrize(
    "check",
    [weights_are_rounded, padding_is_not_seen, is_an_op, grads_of_any_kind, double_backward, chunks_of_streams],
    ids=lambda check: check.__name__,
)
def test_in_the_interpreter(interpreter, check):
    interpreter.run(1, check)


# -- without the interpreter -------------------------------------------------------------------------------------------
def test_what_the_kernels_take():
    cpu = torch.device("cpu")
    assert "not float64" in convolution.why_not(cpu, torch.float64, 4)
    assert "up to 8 taps, not 9" in convolution.why_not(cpu, torch.float32, 9)
    assert "TRITON_INTERPRET" in convolution.why_not(cpu, torch.float32, 4)


@pytest.mark.parametrize("kind", ["plain", "documents", "lengths"])
@pytest.mark.parametrize("name", ["_forward", "_backward"])
def test_compiles_without_a_gpu(name, kind):
    """Compiling finds errors that the interpreter misses, such as variables that change type."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lightning_dilated.ext.convolution import kernels as source

    kernel, tile = getattr(source, name), getattr(source, name.strip("_").upper())
    sizes = {**tile.sizes(1536, 256), "ROWS": 256, "STAGES": tile.stages, "TAPS": 4, "LEFT": 3}
    sizes |= {"PACKED": kind == "documents", "PADDED": kind == "lengths"}
    options = {n: x for n, x in sizes.items() if n in kernel.arg_names}
    kinds = dict.fromkeys(("x", "y", "grad", "dx"), "*bf16") | dict.fromkeys(("weight", "sums"), "*fp32")
    kinds |= dict.fromkeys(("documents", "lengths"), "*i32") | dict.fromkeys(options, "constexpr")
    signature = {n: kinds.get(n, "i32") for n in kernel.arg_names}
    target, launch = GPUTarget("cuda", 90, 32), {"num_warps": tile.warps}
    compiled = triton.compile(ASTSource(kernel, signature, options), target=target, options=launch)
    assert len(compiled.asm["cubin"]) > 0 and compiled.metadata.shared < 50_000
