"""The product of attention_weights and v equals the oracle's output at the given rows, for any pattern."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated.attention import attention_weights, dilated_attention
from lightning_dilated.attention.oracle import oracle
from lightning_dilated.pattern import Branch, DilatedPattern
from lightning_dilated.sequence.group import SequenceGroup

from ...attention.strategies import Case, cases
from ...examples import examples, scale

PATTERN = DilatedPattern.longnet([8, 32], [1, 2])


def rows(case: Case, queries: list[int]) -> None:
    """Compare weights with the oracle, and the share of real keys with the logarithm of the denominator."""
    q, k, v, _ = (x.detach() for x in case.tensors())
    weights = attention_weights(q, k, case.pattern, queries, **case.options())
    assert weights.shape == (case.batch, case.heads, len(queries), case.seq_len) and weights.dtype == torch.float64
    out, lse = case.oracle(q, k, v)
    got = torch.einsum("bhqn,bnhd->bqhd", weights, v.repeat_interleave(case.heads // case.kv_heads, dim=2))
    torch.testing.assert_close(got, out[:, queries], rtol=1e-10, atol=1e-10)
    c, n_pad = case.counts()
    want = torch.where(c.sum(-1) > 0, 1 - n_pad * torch.exp(-lse), 0.0)[:, :, queries]
    torch.testing.assert_close(weights.sum(-1), want, rtol=1e-9, atol=1e-9)
    assert (weights[c[:, :, queries] == 0] == 0).all() and not weights.requires_grad


@st.composite
def calls(draw, padding: str):
    """Draw a call and its queries, in any order and with repetitions."""
    case = draw(cases(padding=padding, longest=48))
    queries = draw(st.lists(st.integers(0, case.seq_len - 1), max_size=6)) if case.seq_len else []
    return case, queries


@pytest.mark.parametrize("padding", ["masked", "attended"])
def test_random(padding):
    covered = []

    @settings(max_examples=examples(150))
    @given(calls(padding))
    def random(drawn):
        case, queries = drawn
        if case.refused():
            with pytest.raises(ValueError, match="not a multiple of dilation_rate"):
                q, k, _, _ = case.tensors()
                attention_weights(q, k, case.pattern, queries, **case.options())
            return
        rows(case, queries)
        covered.append(len(queries) * case.batch)

    random()
    assert sum(covered) > 200 * scale()


SLIDE = DilatedPattern.longnet([8, 24, 64], [1, 2, 4], offsets="blocked", padding="attended")


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("offset_heads", ["query", "kv"])
@pytest.mark.parametrize("offsets", ["interleaved", "blocked"])
@pytest.mark.parametrize("padding", ["masked", "attended"])
def test_ragged_slides(padding, offsets, offset_heads, kv_heads):
    pattern = DilatedPattern(SLIDE.branches, offsets=offsets, offset_heads=offset_heads, padding=padding)
    rows(Case(pattern, 3, 60, 4, kv_heads, 8, lengths=(60, 37, 1)), [0, 36, 59, 1])


def test_zero_keys_take_weight():
    q = torch.randn(1, 20, 4, 8, dtype=torch.float64)
    masked = attention_weights(q, q, DilatedPattern(SLIDE.branches, offsets="blocked"), [19])
    attended = attention_weights(q, q, SLIDE, [19])
    assert torch.allclose(masked.sum(-1), torch.ones_like(masked.sum(-1)))
    assert (attended.sum(-1) < 0.999).any() and (attended <= masked + 1e-12).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dtypes(dtype):
    q, k = (torch.randn(2, 40, heads, 8).to(dtype) for heads in (4, 2))
    weights = attention_weights(q, k, PATTERN, torch.tensor([0, 39]))
    want = attention_weights(q.double(), k.double(), PATTERN, [0, 39])
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.double(), want, rtol=1e-5, atol=1e-6)


def test_autocast_is_that_of_the_op():
    q = torch.randn(1, 40, 4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        weights = attention_weights(q, q, PATTERN, [3])
    low = q.to(torch.bfloat16)
    assert torch.equal(weights, attention_weights(low, low, PATTERN, [3]))


def test_large_scores_stay_finite():
    q = 1e3 * torch.randn(1, 40, 4, 8)
    weights = attention_weights(q, q, PATTERN, range(40))
    assert weights.isfinite().all() and torch.allclose(weights.sum(-1), torch.ones(1, 4, 40))


def test_a_key_of_two_branches_counts_twice():
    """Head 0 has offset 0: both branches see the even keys, so their weight is double."""
    q = torch.zeros(1, 8, 1, 4)
    weights = attention_weights(q, q, DilatedPattern([(8, 1), (8, 2)]), [0])
    torch.testing.assert_close(weights[0, 0, 0], torch.tensor([2.0, 1.0] * 4) / 12)


def test_head_without_a_branch_gives_zeros():
    q = torch.randn(1, 8, 2, 4)
    weights = attention_weights(q, q, DilatedPattern([Branch(8, 1, heads=[1])]), [0, 5])
    assert (weights[:, 0] == 0).all() and torch.allclose(weights[:, 1].sum(-1), torch.ones(1, 2))


def test_long_sequence_in_little_memory():
    """For a class token over a million tiles, the N x N matrix would have 4 TB per head."""
    n = 1 << 20
    pattern = DilatedPattern.longnet([1024, 32768, n], [1, 4, 16])
    q = torch.randn(1, n, 1, 2)
    weights = attention_weights(q, q, pattern, [0])
    assert weights.shape == (1, 1, 1, n) and abs(float(weights.sum()) - 1) < 1e-4
    assert int((weights > 0).sum()) == 1024 + (32768 - 1024) // 4 + (n - 32768) // 16


def test_rows_of_the_op():
    q, k, v = (torch.randn(1, 300, 4, 8) for _ in range(3))
    pattern = DilatedPattern.geometric(32, 512)
    got = torch.einsum("bhqn,bnhd->bqhd", attention_weights(q, k, pattern, [0, 299]), v)
    torch.testing.assert_close(got, dilated_attention(q, k, v, pattern)[:, [0, 299]])


Q = torch.randn(2, 8, 2, 4)
BAD = {
    "beyond": ({"queries": [8]}, ValueError, r"queries holds position 8, but there are 8 tokens \(0\.\.7\)"),
    "negative": ({"queries": [0, -1]}, ValueError, r"queries\[1\] must be at least 0"),
    "float": ({"queries": [0.5]}, TypeError, r"queries\[0\] must be an integer"),
    "a number": ({"queries": 3}, TypeError, "queries must be a list of positions"),
    "0-D tensor": ({"queries": torch.tensor(3)}, TypeError, "queries must be a list of positions"),
    "pattern": ({"pattern": [(8, 1)]}, TypeError, "pattern must be a DilatedPattern"),
    "shape": ({"q": Q[0]}, ValueError, "q must have 4 dimensions"),
    "heads": ({"k": torch.randn(2, 8, 3, 4)}, ValueError, "kv heads must divide"),
    "length": ({"lengths": [8, 9]}, ValueError, r"lengths must lie in 0\.\.8"),
    "lengths": ({"lengths": [8]}, ValueError, "one entry a sample"),
    "documents": ({"q": Q[:1], "k": Q[:1], "cu_seqlens": torch.tensor([0, 5]).int()}, ValueError, "rise from 0"),
    "scale": ({"scale": float("nan")}, ValueError, "scale must be a finite number"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_misuse(name):
    change, error, message = BAD[name]
    call = {"q": Q, "k": Q, "pattern": PATTERN, "queries": [0], **change}
    with pytest.raises(error, match=message):
        attention_weights(**call)


def test_refused_while_ranks_share_the_sequence(monkeypatch):
    group = SequenceGroup.__new__(SequenceGroup)
    monkeypatch.setattr(SequenceGroup, "ranks", 2, raising=False)
    monkeypatch.setattr("lightning_dilated.ext.evaluation.attention_weights.active_sequence", lambda: group)
    with pytest.raises(RuntimeError, match="2 ranks share the sequence"):
        attention_weights(Q, Q, PATTERN, [0])


def test_weights_of_a_whole_layer_are_the_oracle():
    q, k, v = (torch.randn(1, 30, 2, 4, dtype=torch.float64) for _ in range(3))
    weights = attention_weights(q, k, PATTERN, range(30), causal=True, scale=0.4)
    out, _ = oracle(q, k, v, PATTERN, causal=True, scale=0.4)
    torch.testing.assert_close(torch.einsum("bhqn,bnhd->bqhd", weights, v), out)
