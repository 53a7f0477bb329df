"""In an active sequence, layers give one rank's results, even compiled or with CUDA graphs, and FLOPs add up."""

from contextlib import nullcontext

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_dilated import LongNetLM
from lightning_dilated.attention import dilated_attention
from lightning_dilated.attention.modules import MultiheadDilatedAttention
from lightning_dilated.ext.graphs import cuda_graphs
from lightning_dilated.pattern import Branch, DilatedPattern

from ..attention.strategies import Case
from .calls import positions, sequence, slices
from .strategies import LAYOUTS, Sharded

PATTERN = DilatedPattern([Branch(6, 1, heads=[0, 1, 3]), Branch(12, 3, shift=5), Branch(None, 2)])
N, WIDTH = 21, 16


#: kv head 0 is dense
HYBRID = DilatedPattern([Branch(None, 1, heads=[0, 1]), Branch(6, 1, shift=2, heads=[2, 3])])


def layer(encoding: str) -> MultiheadDilatedAttention:
    """Build a layer with the same weights on every rank. With "dense without", its dense heads have no positions."""
    torch.manual_seed(2)
    options = {"position_encoding": encoding, "pattern": PATTERN}
    if encoding == "dense without":
        options = {"position_encoding": "rotary", "pattern": HYBRID, "global_rotary": False}
    return MultiheadDilatedAttention(WIDTH, 4, num_kv_heads=2, causal=True, sub_layernorm=True, **options).double()


def tokens() -> torch.Tensor:
    return torch.randn(2, N, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def run_layer(module, x, **options):
    """Return [out, dx, gradients of all parameters] for the sum of squares of the output."""
    x = x.clone().requires_grad_()
    out, _ = module(x, **options)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (x, *module.parameters()))]


def part_of_layer(rank, group, settings, encoding, options):
    with sequence(group, **settings) as ours, ours.active():
        x = tokens()[:, positions(ours, N)]
        return positions(ours, N), run_layer(layer(encoding), x, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("encoding", ["none", "rotary", "xpos"])
def test_layer(pool, layout, encoding):
    """Rotary angles come from global positions, and every parameter's gradient is the sum over ranks."""
    check_layer(pool, 3, {"layout": layout}, encoding)


EXCHANGES = [(1, "gather", 1), (2, "ring", 1), (3, "switch", 1), (4, "gather", 1), (4, "ring", 2), (2, "gather", 2)]


@pytest.mark.parametrize("ranks, exchange, head_size", EXCHANGES)
def test_dense_heads_without_positions(pool, ranks, exchange, head_size):
    check_layer(pool, ranks, {"exchange": exchange, "head_size": head_size}, "dense without")


def check_layer(pool, ranks, settings, encoding):
    options = {"lengths": torch.tensor([N, 13])}
    want = run_layer(layer(encoding), tokens(), **options)
    parts = pool.run(ranks, part_of_layer, settings, encoding, options)
    at = torch.tensor([p for held, _ in parts for p in held])
    for i in range(2):
        got = torch.cat([tensors[i] for _, tensors in parts], 1)[:, at.argsort()]
        torch.testing.assert_close(got, want[i], rtol=0, atol=1e-10)
    for i in range(2, len(want)):
        torch.testing.assert_close(sum(tensors[i] for _, tensors in parts), want[i], rtol=0, atol=1e-10)


def refusals(rank, group):
    with sequence(group) as ours, ours.active():
        x = tokens()[:, positions(ours, N)]
        errors = []
        for encoding, options in (
            ("none", {"key_padding_mask": torch.zeros(x.shape[:2], dtype=torch.bool)}),
            ("none", {"cache": layer("none").new_cache()}),
        ):
            try:
                layer(encoding).eval()(x, **options)
            except ValueError as error:
                errors.append(str(error))
        return errors


def test_what_a_layer_refuses(pool):
    for errors in pool.run(2, refusals):
        assert "pass lengths" in errors[0] and "a cache serves one rank" in errors[1], errors


def far_xpos(rank, group, explicit):
    """Compute xPos in fp16, which overflows at the last positions only, but must raise on all ranks."""
    with sequence(group) as ours, ours.active():
        built = layer("xpos").half()
        built.rotary.xpos_scale_base = 1.0
        own_positions = positions(ours, N)
        built(tokens()[:, own_positions].half(), positions=torch.as_tensor(own_positions) if explicit else None)


def test_xpos_out_of_range(pool):
    errors = pool.errors(ValueError, 3, far_xpos, False)
    assert all("overflows" in error for error in errors), errors
    assert len(set(errors)) == 1  # every rank computes it from the length of the sequence
    errors = pool.errors(ValueError, 3, far_xpos, True)
    assert all("overflows" in error for error in errors), errors
    assert "rank 2 of the sequence refused the call" in errors[0]


CALLS = {
    "mixed, causal": Case(PATTERN, 2, 29, 4, 2, 8, causal=True),
    "mixed, lengths": Case(PATTERN, 2, 29, 4, 2, 8, lengths=(29, 11)),
    "nested": Case(DilatedPattern.geometric(4, 32), 1, 32, 6, 3, 8),
    "nine tokens": Case(DilatedPattern.geometric(4, 32), 1, 9, 6, 3, 8, causal=True),
}


def flops_of(case, at, group=None):
    """Return the (forward, backward) FLOPs of the call at the given positions."""
    q, k, v, grad = slices(case, at, torch.float32)
    counts = []
    with FlopCounterMode(display=False) as counter:
        out = case.call.run(q, k, v, sequence=group)
        counts.append(counter.get_total_flops())
        torch.autograd.grad(out, (q, k, v), grad)
    return counts[0], counter.get_total_flops() - counts[0]


def flops_of_part(rank, group, case):
    with sequence(group, **case.settings()) as ours:
        return flops_of(case, positions(ours, case.call.seq_len), ours)


@pytest.mark.parametrize("head_size", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
def test_flops(pool, name, layout, head_size):
    case = Sharded(CALLS[name], 4, layout, "auto", head_size)
    parts = pool.run(4, flops_of_part, case)
    want = flops_of(case, range(case.call.seq_len))
    assert want[0] > 0
    assert tuple(map(sum, zip(*parts, strict=True))) == want
    if case.call.seq_len > 9:
        assert max(p[0] for p in parts) < want[0]


def compiled_and_plain(rank, group, exchange, backend, explicit):
    """Compare a compiled call with a plain call in both passes. A second input shows if the first became a constant."""
    with sequence(group, exchange=exchange) as ours, ours.active():
        options = {"sequence": ours} if explicit else {}
        pattern = DilatedPattern.geometric(4, 32)

        def block(x, weight):
            q, k, v = (x.sin() @ weight).unflatten(-1, (3, 4, 4)).unbind(2)
            return dilated_attention(q, k, v, pattern, causal=True, **options).flatten(2).cos()

        run, equal = torch.compile(block, fullgraph=True, backend=backend), []
        for seed in range(2):
            built = torch.Generator().manual_seed(seed)
            x, weight = (torch.randn(*s, generator=built, dtype=torch.float64) for s in ((1, 32, 8), (8, 48)))
            leaves = x[:, positions(ours, 32)].requires_grad_(), weight.requires_grad_()
            got, want = ((out, *torch.autograd.grad(out.sum(), leaves)) for out in (run(*leaves), block(*leaves)))
            equal += [torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(got, want, strict=True)]
        return equal, ours.backward_traffic.sent


@pytest.mark.parametrize("given", [False, True], ids=["active", "given"])
@pytest.mark.parametrize("exchange", ["gather", "ring", "switch", "butterfly"])
def test_compile(pool, exchange, given):
    results = pool.run(2, compiled_and_plain, exchange, "aot_eager", given)
    assert all(all(equal) for equal, _ in results), results
    assert sum(sent for _, sent in results) > 0


def compiled_convolution(rank, group, layout):
    """Return whether a compiled layer with kv_conv equals the plain layer, forward and backward."""
    with sequence(group, layout=layout) as ours, ours.active():
        torch.manual_seed(0)
        layer = MultiheadDilatedAttention(8, 2, DilatedPattern.geometric(4, 32), causal=True, kv_conv=3).double()
        torch.nn.init.normal_(layer.kv_conv.weight)
        run, equal = torch.compile(lambda x: layer(x)[0].cos(), fullgraph=True, backend="aot_eager"), []
        for length in (32, 21):
            x = torch.randn(1, length, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
            leaves = x[:, positions(ours, length)].requires_grad_(), *layer.parameters()
            pair = ((y, *torch.autograd.grad(y.sum(), leaves)) for y in (run(leaves[0]), layer(leaves[0])[0].cos()))
            equal += [torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(*pair, strict=True)]
        return equal


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_compile_with_kv_conv(pool, layout):
    assert all(all(equal) for equal in pool.run(2, compiled_convolution, layout))


def compiled_once(rank, group):
    """Return (compiled, plain) outputs of a function in one sequence, in none, in another, and again in the first."""
    pattern = DilatedPattern.geometric(4, 32)
    block = lambda x: dilated_attention(x.sin(), x, x, pattern)  # noqa: E731
    run = torch.compile(block, fullgraph=True, backend="aot_eager")
    outputs = []
    with sequence(group) as first, sequence(group, layout="zigzag", exchange="ring") as second:
        x = torch.randn(1, 16, 2, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        for group in (first, None, second, first):
            with nullcontext() if group is None else group.active():
                outputs.append((run(x), block(x)))
    return outputs


def test_a_compiled_function_follows_the_active_sequence(pool):
    for outputs in pool.run(2, compiled_once):
        for got, want in outputs:
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
        assert not torch.equal(outputs[0][1], outputs[1][1]) and not torch.equal(outputs[0][1], outputs[2][1])
        assert torch.equal(outputs[0][1], outputs[3][1])


def with_graphs_and_without(rank, group):
    """Return [out, dx, gradients of parameters] of a model without and with CUDA graphs, and the warnings."""
    results, said = [], []
    with sequence(group) as ours, ours.active():
        for graphs in (False, True):
            torch.manual_seed(0)
            model = LongNetLM(PATTERN, 11, WIDTH, 2, 4, max_seq_len=N, cuda_graphs=graphs)
            model.configure_model()
            stack = model.double().transformer
            x = tokens()[:, positions(ours, N)].requires_grad_()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(cuda_graphs._log, "warning", lambda message, *values: said.append(message % values))
                for _ in range(2):
                    out = stack(x)
                    grads = torch.autograd.grad(out.square().sum(), (x, *stack.parameters()))
            results.append([out.detach(), *grads])
    return results, said


def test_cuda_graphs(pool):
    """Ranks that share a sequence warn once that CUDA graphs are not used, and compute without graphs."""
    for (want, got), said in pool.run(2, with_graphs_and_without):
        assert all(map(torch.equal, got, want)) and len(got) == len(want)
        assert len(said) == 1 and "are not used for a stack, since ranks share its sequence" in said[0]
