"""Memory of compiled graphs, counted by hand. In a real run, torch's partitioner saves the same tensors."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import lightning_dilated as ld
from lightning_dilated.ext.planning.counting.compiled import Graphs, Kernels
from lightning_dilated.ext.planning.counting.footprint import footprint
from lightning_dilated.ext.planning.counting.memory_tracker import Tape
from lightning_dilated.ext.planning.counting.model_specs import counted_model_of
from lightning_dilated.pattern import DilatedPattern

#: bytes of h and of each result
H, OUT = 64 * 128 * 4, 64 * 32 * 4


def one(x, w, u, v):
    """Between two matrix products, an elementwise operation writes its result into the memory of its input."""
    return ((x @ w) * 2) @ u


def kept(x, w, u, v):
    """The same, but the input is also a result, so its memory cannot be reused."""
    h = x @ w
    return (h * 2) @ u, h


def chain(x, w, u, v):
    """Three elementwise operations are fused into one kernel, which writes no intermediate result."""
    return ((x @ w).sin().exp() * 2) @ u


def fork(x, w, u, v):
    """Two operations on one tensor are one kernel, which cannot overwrite their common input."""
    h = x @ w
    return h.sin() @ u + h.cos() @ v


def wait(x, w, u, v):
    """The second operation needs a product with the first one's result. Of the two kernels, the second works in place."""
    h = x @ w
    a = h.sin()
    return a @ u, (h * (a @ u).sum()) @ v


def far(x, w, u, v):
    """Views and a transposed product use the same memory."""
    h = (x @ w).view(8, 8, 128).flatten(0, 1)
    return (h.t().contiguous() * 2).t() @ u


PEAKS = {
    one: H + OUT,
    kept: 2 * H + OUT,
    chain: H + OUT,
    fork: 3 * H,
    wait: 2 * H + 2 * OUT,
    far: H + OUT,
}


@pytest.mark.parametrize("run", PEAKS, ids=lambda run: run.__name__)
def test_by_hand(run):
    with FakeTensorMode():
        inputs = [torch.zeros(*size) for size in ((64, 32), (32, 128), (128, 32), (128, 32))]
        graph = make_fx(run)(*inputs)
        tape = Tape()
        kernels = Kernels(graph, Graphs(tape))
        with tape:
            results = kernels(inputs)
        assert not inputs  # like compiled code, it empties the list
        assert tape.peak == pytest.approx(PEAKS[run], abs=64)  # sums need a few bytes
        want = sum(x.untyped_storage().nbytes() for x in (results if isinstance(results, tuple) else [results]))
        assert tape.live == want


@pytest.mark.slow
@pytest.mark.parametrize("ffn, norm", [("swiglu", "rmsnorm"), ("gelu", "layernorm")])
def test_kept_is_what_the_partitioner_keeps(ffn, norm):
    """Compare with torch.compile's own partition of a block, run on real tensors."""
    pattern, tokens = DilatedPattern.longnet([64], [1]), 2048
    sizes = {"dim": 64, "num_heads": 4, "position_encoding": "none", "ffn": ffn, "norm": norm}
    subject = counted_model_of(ld.LongNetLM(pattern, depth=2, **sizes), "32-true", compile_blocks=True)
    plan = footprint(subject, (tokens, 2 * tokens))
    moment = next(m for m in plan.moments if m.part == ("behind", 0))

    model = ld.LongNetLM(pattern, depth=1, **sizes)
    model.configure_model()
    block = model.transformer.blocks[0]
    block.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    x = torch.randn(1, tokens, 64, requires_grad=True)
    saved = {}
    own = {p.untyped_storage()._cdata for p in block.parameters()}

    def pack(t):
        if t.untyped_storage()._cdata not in own:
            saved[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        block(x)
    assert plan.saved(moment, tokens) == pytest.approx(sum(saved.values()), rel=0.02)
