"""hashed_attention equals its definition: outputs, losses, counts and every gradient."""

import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_dilated.attention import hashed_attention
from lightning_dilated.ext._compat.torch import TorchDispatchMode, leaves
from lightning_dilated.ext.hashed import functional, lookup
from lightning_dilated.ext.hashed.oracle import looked_up, oracle
from lightning_dilated.ext.hashed.order import codes

from ...examples import examples
from .cases import LOSSES, Case, cases, compare


@given(case=cases(), block=st.integers(1, 9), part=st.sampled_from([1, 1000, 1 << 23]))
@settings(max_examples=examples(40), deadline=None)
def test_any_call(case, block, part):
    """Compute with blocks of any size, one or several at a time."""
    blocks = mock.patch.multiple(functional, BLOCK=block, SOFT_BLOCK=block)
    with blocks, mock.patch.object(lookup, "PART", part):
        compare(case.run(), case.by_definition())


@pytest.mark.parametrize("soft", [False, True])
def test_several_blocks(soft):
    case = Case((150, 170), kv_heads=1, group=1, groups=2, codes=3, latest=9, probes=1 if soft else 3, soft=soft)
    compare(case.run(), case.by_definition())


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("soft", [False, True])
def test_no_token_and_one(tokens, batch, soft):
    case = Case((tokens,) * batch, kv_heads=3, group=3, soft=soft)
    got = case.run()
    compare(got, case.by_definition())
    assert got["out"].shape == (batch, tokens, 9, 3)
    no_samples = [x.detach()[:0] for x in case.tensors()[:5]]
    assert hashed_attention(*no_samples, torch.zeros(9))[0].shape == (0, tokens, 9, 3)


def logits(case, index):
    """Return the tensors of a case in which all queries have the code `index`, and all rows have the code 0."""
    tensors = [x.detach() for x in case.tensors()]
    for z, i in zip(tensors[3:5], (index, 0), strict=True):
        z.abs_().neg_()[..., i] = 1.0
    return tensors


@pytest.mark.parametrize("latest", [1, 7, 100])
def test_all_codes_equal(latest):
    """All tokens have the same code, so a query reads the latest rows."""
    case = Case((90,), latest=latest)
    tensors = logits(case, 0)
    out, losses = hashed_attention(*tensors, latest=latest)
    assert losses.rows[0, :, 0].tolist() == [min(p + 1, latest) for p in range(90)]
    torch.testing.assert_close(out, oracle(*tensors, latest=latest)[0], rtol=0, atol=1e-12)


def test_no_row_has_the_code():
    """Queries see only the null key. Therefore outputs, counts, losses of queries, and gradients are 0."""
    case = Case((90,), codes=3)
    tensors = [x.requires_grad_() for x in logits(case, 1)]
    out, losses = hashed_attention(*tensors)
    assert not out.any() and not losses.rows.any() and not losses.agree.any() and not losses.contrast.any()
    grads = torch.autograd.grad(sum(x.sum() for x in (out, losses.agree, losses.contrast)), tensors)
    assert not any(x.any() for x in grads)


def test_equal_logits_take_the_lowest_index():
    """If all logits are 0, all codes are 0. Further probes look up index 1 in group 0, then in group 1, then in 2."""
    case = Case((40,), groups=3, codes=3)
    q, k, v, _, _, null = (x.detach() for x in case.tensors())
    z = torch.zeros(1, 40, 1, 3, 3, dtype=torch.float64)
    filed = z.clone()
    order = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    # the codes have 1, 2, 3 and 4 rows; two codes that no query looks up have a row each
    rows_of_codes = [code for number, code in enumerate(order, 1) for _ in range(number)] + [(2, 0, 0), (1, 1, 0)]
    for p, code in enumerate(rows_of_codes):
        filed[0, p, 0, range(3), code] = 1.0
    filed[0, 12:, :, :, 2] = 1.0
    for probes, want in ((1, 1), (2, 3), (3, 6), (4, 10)):
        rows = hashed_attention(q, k, v, z, filed, null, latest=10, probes=probes)[1].rows
        assert rows[0, 12:].unique().tolist() == [want]
    assert hashed_attention(q, k, v, z, z, null, latest=10)[1].rows[0, -1].item() == 10


def test_codes_of_equal_and_infinite_logits():
    values = torch.tensor(list(itertools.product((-torch.inf, 0.0, 1.0), repeat=3)))
    z = torch.stack([values, values.flip(0), values.roll(5, 0)], 1)
    z = z[(z > -torch.inf).any(-1).all(-1)]
    for probes in (1, 2, 3, 4):
        want = [[sum(i * 3**g for g, i in enumerate(code)) for code in looked_up(x, probes)] for x in z.tolist()]
        assert codes(z, probes).tolist() == want


def test_more_documents_than_rows_of_a_code():
    case = Case((1, 2, 0, 1, 3, 1, 1, 2, 1, 1), packed=True, groups=1, codes=2, latest=3, probes=2)
    got = case.run()
    compare(got, case.by_definition())
    assert got["rows"][0, :, 0].tolist() == [1, 1, 2, 1, 1, 2, 3, 1, 1, 1, 2, 1, 1]


def test_one_code_and_all_rows_are_dense_attention_with_a_null_key():
    case = Case((70,), groups=1, codes=1, latest=70, kv_heads=2, group=3)
    q, k, v, z_q, z_k, null = (x.detach() for x in case.tensors())
    heads = [x.transpose(1, 2) for x in (q, *(y.repeat_interleave(3, 2) for y in (k, v)))]
    scores = (heads[0] @ heads[1].mT * 3**-0.5).masked_fill(torch.ones(70, 70).triu(1).bool(), -torch.inf)
    shares = torch.cat([null[:, None, None].expand(1, -1, 70, 1), scores], -1).softmax(-1)[..., 1:]
    want = (shares @ heads[2]).transpose(1, 2)
    for soft in (False, True):
        got = hashed_attention(q, k, v, z_q, z_k, null, latest=70, soft=soft)[0]
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", [Case((60,), probes=3), Case((60,), soft=True), Case((25, 35), packed=True)], ids=str)
def test_later_tokens_change_nothing(case):
    tensors, other = ([x.detach() for x in case.tensors(seed)] for seed in (0, 1))
    out, losses = hashed_attention(*tensors, **case.settings())
    for cut in (1, 25, 40, 59):
        mixed = [torch.cat([x[:, :cut], y[:, cut:]], 1) for x, y in zip(tensors[:5], other[:5], strict=True)]
        again, others = hashed_attention(*mixed, tensors[5], **case.settings())
        pairs = [(again, out), *((getattr(others, x), getattr(losses, x)) for x in ("agree", "contrast", "rows"))]
        for got, want in pairs:
            torch.testing.assert_close(got[:, :cut], want[:, :cut], rtol=0, atol=1e-12)


@pytest.mark.parametrize("soft", [False, True])
def test_padding_may_hold_anything(soft):
    case = Case((0, 5, 9), padding=4, soft=soft)
    results = []
    for value in (None, torch.nan, torch.inf):
        tensors = [x.detach().clone() for x in case.tensors()]
        for x in tensors[:5] if value else ():
            x[0], x[1, 5:], x[2, 9:] = value, value, value
        tensors = [x.requires_grad_() for x in tensors]
        out, losses = hashed_attention(*tensors, **case.settings())
        named = {name: getattr(losses, name) for name in LOSSES}
        grads = torch.autograd.grad(out.sum() + sum(x.sum() for x in named.values()), tensors)
        results.append({"out": out, **named, "rows": losses.rows, **{str(i): x for i, x in enumerate(grads)}})
    clean, *dirty = results
    assert not clean["out"][0].any() and not clean["rows"][0].any()
    for each in dirty:
        compare(each, clean, 1e-12)


@pytest.mark.parametrize("dtype, tol", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_other_dtypes_and_autocast(dtype, tol):
    """Compare with float64 results from the same rounded inputs, which have the same codes."""
    case = Case((150,), dim=16, groups=2, codes=4, latest=20, probes=2, dtype=dtype)
    got = case.run()
    compare(got, case.by_definition(), tol)
    tensors = case.tensors()
    out, losses = hashed_attention(*tensors, **case.settings())
    assert out.dtype == dtype and losses.agree.dtype == losses.balance.dtype == torch.float32
    with torch.autocast("cpu", dtype if dtype != torch.float32 else torch.bfloat16):
        again = case.run()
        cast = hashed_attention(*(x.float() for x in tensors), **case.settings())[0]
    if dtype == torch.float32:  # autocast rounds q, k and v, as it does for torch's attention
        assert cast.dtype == torch.bfloat16
    else:
        assert torch.equal(cast, out) and all(torch.equal(x, got[name]) for name, x in again.items())


def test_scores_of_16_bits_are_fp32():
    """The scores 64 + j / 16 cannot be represented in bf16, but q and k can."""
    case = Case((64,), groups=1, codes=1, latest=64, group=1, dim=2, dtype=torch.bfloat16)
    q, k, *others = (x.detach() for x in case.tensors())
    q[:], k[..., 0], k[0, :, 0, 1] = 1, 64, torch.arange(64) / 16
    out, want = (call(q, k, *others, latest=64, scale=1.0)[0] for call in (hashed_attention, oracle))
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-2)


def test_chances_below_the_floor():
    """If logits differ by hundreds, chances are 0 in fp32. Losses and gradients are finite, and equal to float64."""
    case = Case((30,), groups=2, codes=3, soft=True, dtype=torch.float32)
    tensors = [x.detach().clone() for x in case.tensors()]
    for z in tensors[3:5]:
        z *= 300
    with mock.patch.object(Case, "tensors", lambda *unused: tuple(x.requires_grad_() for x in tensors)):
        got = case.run()
        assert all(x.isfinite().all() for x in got.values())
        compare(got, case.by_definition(), 1e-4)


@pytest.mark.parametrize("change", [{}, {"probes": 3}, {"soft": True}, {"soft": True, "code_scores": False}], ids=str)
def test_gradcheck(change):
    """The choice of rows has no derivative, so in this case no logits are close to a tie."""
    case = replace(Case((4,), kv_heads=1, group=2, dim=2, latest=2), **change)
    call = lambda *x: hashed_attention(*x, **case.settings())[0]  # noqa: E731
    assert torch.autograd.gradcheck(call, case.tensors(3), atol=1e-7, rtol=1e-6)


def test_losses_train_codes_only():
    case = Case((30,), probes=2)
    tensors = case.tensors()
    losses = hashed_attention(*tensors, **case.settings())[1]
    for name in LOSSES:
        grads = torch.autograd.grad(getattr(losses, name).sum(), tensors, allow_unused=True, retain_graph=True)
        trained = [grad is not None and bool(grad.any()) for grad in grads]
        assert trained == [False] * 3 + [name != "balance", name != "spread", False], name


def test_taught_scores_leave_codes_out():
    """With code_scores=False, the output does not depend on the logits of codes."""
    case = Case((30,), soft=True, code_scores=False)
    q, k, v, z_q, z_k, null = case.tensors()
    out = hashed_attention(q, k, v, z_q, z_k, null, **case.settings())[0]
    assert torch.equal(out, hashed_attention(q, k, v, z_k, z_q * 2, null, **case.settings())[0])
    assert not any(x.any() for x in torch.autograd.grad(out.sum(), (z_q, z_k)))


class Largest(TorchDispatchMode):
    """Records the number of elements in the largest result of any operation."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.numbers = max([self.numbers, *(x.numel() for x in leaves(result) if isinstance(x, Tensor))])
        return result


@pytest.mark.parametrize("latest", [16, 64])
def test_memory_grows_with_tokens(latest, monkeypatch):
    """No tensor is larger than a small multiple of the tokens, whatever the number of rows that a query reads."""
    monkeypatch.setattr(lookup, "PART", 1 << 16)
    case = Case((3000,), group=1, dim=8, groups=2, codes=4, latest=latest, dtype=torch.float32)
    with Largest() as largest:
        case.run()
    assert largest.numbers <= 3000 * 30 < 3000 * latest * 2


def test_two_runs_give_equal_bits():
    """Queries in several blocks read the same row. Their gradients are always added in the same order."""
    case = Case((600,), latest=300, probes=2, dtype=torch.float32)
    first, again = case.run(), case.run()
    assert all(torch.equal(x, again[name]) for name, x in first.items())


def test_gradients_are_not_differentiated_again():
    tensors = Case((5,)).tensors()
    grads = torch.autograd.grad(hashed_attention(*tensors)[0].square().sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grads[0].sum().backward()
