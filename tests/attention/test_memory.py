"""Memory: saved tensors and peaks do not grow with the number of branches, and grow linearly with the length."""

import pytest
import torch

from lightning_dilated.attention import dilated_attention
from lightning_dilated.ext.planning.counting.memory_tracker import Meter
from lightning_dilated.pattern import DilatedPattern

from .peak import printed

pytestmark = pytest.mark.full

MIB = 1 << 20


def saved(pattern: DilatedPattern, dtype: torch.dtype = torch.float32, **options) -> list[tuple[int, int]]:
    """Return (storage address, bytes) of each tensor that autograd saves in one call on q, k, v (2, 64, 4, 8)."""
    storages = {}

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    q, k, v = (torch.randn(2, 64, 4, 8, dtype=dtype, requires_grad=True) for _ in "qkv")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = dilated_attention(q, k, v, pattern, **options)
    inputs = {x.untyped_storage().data_ptr() for x in (q, k, v, out)}
    assert inputs <= set(storages)
    return sorted(storages.values())


@pytest.mark.parametrize("engine", ["math", "cpu_flash"])
@pytest.mark.parametrize("branches", [1, 10])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["float64", "float32", "bf16"])
def test_saved_is_q_k_v_out_lse(branches, engine, dtype):
    tensor, lse = 2 * 64 * 4 * 8 * dtype.itemsize, 2 * 4 * 64 * max(dtype.itemsize, 4)
    pattern = DilatedPattern([(w, 1) for w in range(6, 6 + branches)])
    assert saved(pattern, dtype, engine=engine) == sorted([tensor] * 4 + [lse])


def test_saved_besides():
    # lengths, bounds and the dropout seed need a few bytes, and a mask is never saved
    plain = saved(DilatedPattern.dense())
    assert saved(DilatedPattern.dense(), lengths=[3, 64]) == sorted([*plain, 2 * 4])
    assert saved(DilatedPattern.dense(), dropout=0.5) == sorted([*plain, 8])


@pytest.mark.parametrize("batch, segment", [(2, None), (1, 16)])
def test_the_results_of_one_block_are_those_of_the_call(batch, segment):
    """A call with one block stores only q, k, v, out, its log-sum-exp, and their gradients, each of them once."""
    shape, pattern = (batch, 64, 4, 8), DilatedPattern.dense(segment)
    grad, *inputs = torch.randn(4, *shape).bfloat16().unbind()
    q, k, v = (x.clone().requires_grad_() for x in inputs)
    with Meter() as meter:
        out = dilated_attention(q, k, v, pattern, engine="cpu_flash")
        torch.autograd.grad(out, (q, k, v), grad.clone())
    assert meter.peak <= 8 * q.nbytes + 2 * batch * 64 * 4 * 4 + grad.untyped_storage().nbytes()


def test_nothing_is_saved_without_gradients():
    q = torch.randn(1, 8, 2, 4)
    out = dilated_attention(q, q, q, DilatedPattern.dense(4))
    assert out.grad_fn is None and not out.requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("engine", ["auto", "math"])
def test_long_sequence(engine, causal):
    """64K tokens, forward and backward in fp32: out and the gradients are 128 MiB; an N x N matrix would be 16 GiB."""
    (got,) = printed(f"""
        q, k, v = (torch.randn(1, 65536, 4, 32).requires_grad_() for _ in "qkv")
        pattern = DilatedPattern.geometric(1024, 8192)
        run = lambda: dilated_attention(q, k, v, pattern, causal={causal}, engine="{engine}").sum().backward()
        print(peak(run)[0])
    """)
    assert 128 * MIB < got < 2048 * MIB


@pytest.mark.slow
def test_ten_branches_peak_like_one():
    """q, k, v and out are 16 MiB each. Ten branches peak as two do: one branch's result and the sums are stored."""
    peaks = {}
    for branches in (2, 10):  # in new processes: freed memory stays resident and would hide the second peak
        (peaks[branches],) = printed(f"""
            q, k, v = (torch.randn(1, 32768, 4, 32).requires_grad_() for _ in "qkv")
            pattern = DilatedPattern([(256 + i, 1) for i in range({branches})])
            print(peak(lambda: dilated_attention(q, k, v, pattern).sum().backward())[0])
        """)
    assert peaks[2] > 64 * MIB and peaks[10] < peaks[2] + 8 * MIB, peaks


@pytest.mark.parametrize(
    "dropout, limit", [pytest.param(0.0, 160, marks=pytest.mark.slow), pytest.param(0.1, 400, marks=pytest.mark.slow)]
)
def test_math_engine_never_holds_all_scores(dropout, limit):
    """The fp32 scores of 8192 dense tokens and two heads are 512 MiB. The engine stores a few tiles of 16 MiB."""
    (got,) = printed(f"""
        q, k, v = (torch.randn(1, 8192, 2, 8).requires_grad_() for _ in "qkv")
        run = lambda: dilated_attention(q, k, v, DilatedPattern.dense(), engine="math", dropout={dropout})
        print(peak(lambda: run().sum().backward())[0])
    """)
    assert got < limit * MIB
