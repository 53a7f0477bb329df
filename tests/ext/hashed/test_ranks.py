"""hashed_attention on several ranks gives the results and gradients of one rank, for any codes and layout."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated.attention import hashed_attention
from lightning_dilated.ext.hashed import functional, ranks
from lightning_dilated.ext.hashed.lookup import Inputs
from lightning_dilated.ext.hashed.oracle import looked_up
from lightning_dilated.sequence.shard import Shard

from ...distributed.calls import positions, sequence
from ...examples import examples
from ..streams.test_streaming import lm, text
from .cases import LOSSES, NAMES, Case, cases, compare, weights

#: allowed difference relative to the largest number
TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
#: results that are the same on all ranks
SHARED = ("balance", "spread")
LAYOUTS = ("contiguous", "zigzag")


def own_tensors(case, at):
    """Return leaves with the tokens at positions `at`, and null."""
    *rows, null = (x.detach() for x in case.tensors())
    return [x.requires_grad_() for x in (*(x[:, at] for x in rows), null)]


def attend(rank, group, case, options, samples=ranks.SAMPLES, block=functional.BLOCK):
    """Run this rank's part of `Case.run`; return it, the rows and lookups that the rank computes, and its traffic."""
    blocks = mock.patch.multiple(functional, BLOCK=block, SOFT_BLOCK=block)
    received = mock.patch.object(ranks, "received_entries", wraps=ranks.received_entries)
    with sequence(group, **options) as ours, blocks, received as held, mock.patch.object(ranks, "SAMPLES", samples):
        at = positions(ours, case.seq_len)
        tensors = own_tensors(case, at)
        out, losses = hashed_attention(*tensors, **case.settings(), sequence=ours)
        results = {"out": out, **{name: getattr(losses, name) for name in LOSSES}}
        loss = 0
        for i, (name, x) in enumerate(results.items()):
            if name in SHARED:  # rank 0 adds the losses that all ranks have
                loss = loss + (x.double() * weights(x.shape, i)).sum() * (rank == 0)
            else:
                loss = loss + (x.double() * weights((x.shape[0], case.seq_len, *x.shape[2:]), i)[:, at]).sum()
        grads = torch.autograd.grad(loss, tensors)
        results |= {f"d {name}": x for name, x in zip(NAMES, grads, strict=True)}
        results = {name: x.detach().double() for name, x in (results | {"rows": losses.rows}).items()}
        traffic = [(x.sent, x.received) for x in (ours.forward_traffic, ours.backward_traffic)]
        return at, results, [tuple(map(len, x.args)) for x in held.call_args_list], traffic


def joined(answers):
    """Return the results of all ranks as one rank has them."""
    order = torch.tensor([p for answer in answers for p in answer[0]], dtype=torch.int64).argsort()
    results = {}
    for name, first in answers[0][1].items():
        parts = [answer[1][name] for answer in answers]
        if name in SHARED:
            assert all(torch.equal(x, first) for x in parts)
            results[name] = first
        else:
            results[name] = sum(parts) if name == "d null" else torch.cat(parts, 1)[:, order]
    return results


def check(pool, size, case, samples=ranks.SAMPLES, block=functional.BLOCK, **options):
    """Check that the ranks together give one rank's results; return the answers of `attend`."""
    with mock.patch.multiple(functional, BLOCK=block, SOFT_BLOCK=block):
        want = case.run()
    answers = pool.run(size, attend, case, options, samples, block)
    compare(joined(answers), want, TOLERANCES[case.dtype])
    return answers


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@given(
    case=cases(), layout=st.sampled_from(LAYOUTS), samples=st.sampled_from([1, ranks.SAMPLES]), block=st.integers(1, 9)
)
@settings(max_examples=examples(60), deadline=None)
def test_any_call(pool, size, case, layout, samples, block):
    check(pool, size, case, samples, block, layout=layout)


@pytest.mark.parametrize(
    "case",
    [
        Case((9,), kv_heads=1, group=1),  # with 4 ranks: 3, 3, 3, 0 tokens
        Case((1,), probes=3),
        Case((0,)),
        Case((2, 3), kv_heads=3),
        Case((0, 0), padding=5),
        Case((0, 37, 5), padding=3, kv_heads=3, group=3, probes=2),
        Case((10, 0, 23, 1), packed=True, latest=100),
        Case((21, 30), soft=True, code_scores=False),
        Case((21, 30), packed=True, soft=True),
        Case((60,), groups=1, codes=1, latest=7),  # all codes are equal
        Case((60,), groups=4, codes=215, probes=5),  # 2,136,750,625 codes
        Case((1,) * 90, packed=True),
    ],
    ids=str,
)
def test_four_ranks(pool, case):
    for layout in LAYOUTS:
        check(pool, 4, case, layout=layout)
    check(pool, 4, case, 1, layout="chunked", stream=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(pool, dtype):
    case = Case((90,), dim=16, kv_heads=2, groups=2, codes=4, latest=20, probes=2, dtype=dtype)
    check(pool, 3, case, layout="zigzag")


@pytest.mark.parametrize("case", [
    Case((600,), dim=16, kv_heads=2, codes=4, latest=64, probes=3, dtype=torch.bfloat16),  # ranks share queries
    Case((600,), dim=16, kv_heads=2, codes=1, latest=500, dtype=torch.bfloat16),  # ranks share rows
], ids=str)  # fmt: skip
def test_gradients_in_bf16(pool, case, monkeypatch):
    """Gradients travel in bf16 and are added in fp32. Their error is at most 1.5 times the error on one rank."""
    rounded = [x.detach().double() for x in case.tensors()]
    monkeypatch.setattr(Case, "tensors", lambda self: tuple(x.to(self.dtype).requires_grad_() for x in rounded))
    want, one = replace(case, dtype=torch.float64).run(), case.run()
    monkeypatch.undo()
    got = joined(pool.run(4, attend, case, {"layout": "zigzag"}))
    for name in ("d q", "d k", "d v"):
        error, usual = ((x[name] - want[name]).square().mean().sqrt() for x in (got, one))
        assert 0 < error <= 1.5 * usual, name


def extreme(rank, group, equal, latest, samples):
    """Return the numbers of rows and lookups that this rank computes, of 400 tokens with equal or many codes."""
    case = Case((400,), kv_heads=2, group=1, groups=3, codes=1 if equal else 7, latest=latest, probes=1 if equal else 3)
    return attend(rank, group, case, {"layout": "zigzag"}, samples)[2]


@pytest.mark.parametrize("latest", [1, 30, 1000])
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("samples", [1, 4096])
def test_parts_are_even(pool, equal, latest, samples):
    entries = 400 * 2 * (2 if equal else 4)
    for size in (2, 4):
        step = max(1, entries // max(4 * size**2, samples))
        for ((rows, lookups),) in pool.run(size, extreme, equal, latest, samples):
            assert rows + lookups <= entries / size + (size + 2) * step + 1 + min(latest, 400)
            assert rows + lookups <= 1.5 * entries / size + 3 + min(latest, 400)


def moved(case, size, layout):
    """Count the rows and lookups that each rank sends to each rank, by Python's sort. Every entry is a sample."""
    shard = Shard(case.seq_len, size, layout)
    _, _, _, z_q, z_k, _ = (x.detach() for x in case.tensors())
    starts = [sum(case.documents[:i]) for i in range(len(case.documents))]
    entries = []  # (key, position, whether it is a lookup)
    for (number, length), head in product(enumerate(case.documents), range(case.kv_heads)):
        for i in range(length):
            b, p = (0, starts[number] + i) if case.packed else (number, i)
            # the digit of group 0 counts least
            code = lambda z, n, at=(b, p, head): [x[::-1] for x in looked_up(z[at].tolist(), n)]  # noqa: E731
            entries += [((number, head, *code(z_k, 1)[0]), p, False)]
            entries += [((number, head, *x), p, True) for x in code(z_q, case.probes)]
    entries.sort()
    places = [e[:2] for e in entries]
    cuts = [places.index(places[d * len(entries) // size]) for d in range(1, size)] if entries else []
    edges = [0, *cuts, len(entries)]
    latest = min(case.latest, max(case.documents))
    rows, lookups = Counter(), Counter()
    for owner, (start, stop) in enumerate(pairwise(edges)):
        key = entries[start][0] if start < len(entries) else None
        before = [e for e in entries[:start] if e[0] == key and not e[2]][-latest:]
        for _, p, is_lookup in before + entries[start:stop]:
            (lookups if is_lookup else rows)[shard.owner(p)[0], owner] += 1
    return entries, shard, rows, lookups


@given(case=cases(), size=st.integers(2, 4), layout=st.sampled_from(LAYOUTS))
@settings(max_examples=examples(40), deadline=None)
def test_bytes(pool, case, size, layout):
    """Ranks send the planned bytes, for the rows and lookups that a plain sort finds."""
    case = replace(case, soft=False, code_scores=True)
    check_bytes(case, size, layout, check(pool, size, case, layout=layout))


def check_bytes(case, size, layout, answers, kernels=False):
    entries, shard, rows, lookups = moved(case, size, layout)
    q, k, v, z_q, z_k, _ = (x.detach().to("meta") for x in case.tensors())
    inputs = Inputs(q.unflatten(2, (case.kv_heads, -1)).flatten(0, 2), *(x.flatten(0, 2) for x in (k, v, z_q, z_k)))
    latest = min(case.latest, max(case.documents), shard.longest)
    for rank, (*_, held, traffic) in enumerate(answers):
        if not entries:
            assert traffic == [(0, 0), (0, 0)]
            continue
        others = [peer for peer in range(size) if peer != rank]
        sent = tuple(sum(counts[rank, peer] for peer in others) for counts in (rows, lookups))
        received = tuple(sum(counts[peer, rank] for peer in others) for counts in (rows, lookups))
        assert kernels or held == [(received[0] + rows[rank, rank], received[1] + lookups[rank, rank])]
        samples = sum(shard.owner(p)[0] == rank for _, p, _ in entries)
        planned = ranks.planned_bytes(inputs, size, samples, latest, sent, received, kernels)
        assert tuple(n for n, _ in traffic) == planned
    for run in range(2):
        assert sum(answer[3][run][0] for answer in answers) == sum(answer[3][run][1] for answer in answers)


def refused(rank, group):
    """Return the errors of calls that are wrong on one rank or differ between ranks."""
    case = Case((8,), codes=3, kv_heads=2)
    changes = [
        {"latest": 3 + rank},
        {"latest": 0 if rank else 3},
        {"probes": 1 + rank},
        {"scale": 1.0 + rank},
        {"soft": bool(rank)},
        {"lengths": [8 - rank]},
        {"lengths": [9]},
        {"cu_seqlens": [0, 4 + rank, 8]},
        {"z_q": torch.zeros(1, 4, 2, 2, 3 + rank), "z_k": torch.zeros(1, 4, 2, 2, 3 + rank)},
        {"null": torch.zeros(4, dtype=torch.float32 if rank else torch.float64)},
        {"v": None} if rank else {},
    ]
    messages = []
    for layout, change in (("strided", {}), *(("contiguous", x) for x in changes)):
        with sequence(group, layout=layout) as ours, ours.active():
            arguments = dict(zip(NAMES, own_tensors(case, positions(ours, 8)), strict=True))
            try:
                hashed_attention(**{**arguments, **change})
            except (TypeError, ValueError) as error:
                messages.append(str(error))
            assert not ours.forward_traffic.sent
    return messages


def test_refusals_reach_every_rank(pool):
    words = (
        "layout='strided' has no hashed attention: set layout='contiguous' or 'zigzag'",
        "latest: rank 0 has 3, rank 1 has 4",
        "latest must be at least 1",
        "probes: rank 0 has 1",
        "scale: rank 0 has 1.0",
        "soft: rank 0 has False",
        "lengths: rank 0 has",
        r"lengths must lie in 0..8 (the padded length), got [9]",
        "cu_seqlens: rank 0 has",
        "shapes: rank 0 has",
        "dtypes: rank 0 has",
        "v must be a torch.Tensor",
    )
    for messages in pool.run(2, refused):
        for message, word in zip(messages, words, strict=True):
            assert word in message


def tied(rank, group, name):
    """Take a loss of one result on rank 0 only. The backward must not hang on any rank."""
    case = Case((5,), kv_heads=1)
    with sequence(group) as ours, ours.active():
        tensors = own_tensors(case, positions(ours, 5))
        out, losses = hashed_attention(*tensors, **case.settings())
        result = out if name == "out" or rank else getattr(losses, name)
        grads = torch.autograd.grad(result.sum() * (rank == 0), tensors, allow_unused=True, materialize_grads=True)
        return [tuple(x.shape) for x in grads]


@pytest.mark.parametrize("name", ["out", *LOSSES])
def test_every_backward_takes_part(pool, name):
    assert [shapes[0][1] for shapes in pool.run(4, tied, name)] == [2, 2, 1, 0]


def padded(rank, group, value):
    """Return the results of a call with `value` in the padding."""
    case = Case((5, 0, 9), padding=4, probes=2)
    with sequence(group, layout="zigzag") as ours:
        at = positions(ours, case.seq_len)
        *rows, null = (x.detach().clone() for x in case.tensors())
        for x in rows:
            x[0, 5:], x[1], x[2, 9:] = value, value, value
        tensors = [x.requires_grad_() for x in (*(x[:, at] for x in rows), null)]
        out, losses = hashed_attention(*tensors, **case.settings(), sequence=ours)
        results = [out, *(getattr(losses, name) for name in LOSSES)]
        grads = torch.autograd.grad(sum(x.sum() for x in results), tensors)
        return [x.detach() for x in (*results, *grads)]


def test_padding_may_hold_anything(pool):
    clean, dirty = (pool.run(3, padded, value) for value in (0.0, torch.nan))
    for want, got in zip(clean, dirty, strict=True):
        for x, y in zip(want, got, strict=True):
            torch.testing.assert_close(y, x, rtol=0, atol=1e-12)


def test_two_runs_give_equal_bits(pool):
    case = Case((300,), latest=200, probes=2, dtype=torch.float32)
    first, again = (joined(pool.run(4, attend, case, {"layout": "zigzag"})) for _ in range(2))
    assert all(torch.equal(x, again[name]) for name, x in first.items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_thousands_of_documents(pool, layout):
    check(pool, 4, Case((1, 3, 0, 2) * 500, packed=True, kv_heads=1, group=1, latest=2), layout=layout)


def compiled_step(rank, group, compiled, tokens):
    """Return a rank's share of the loss and the gradients of a step."""
    torch._dynamo.reset()
    model = lm(hashed={"groups": 2, "codes": 3, "soft_until": 37, "latest": 3}, depth=1).train()
    batch = text(tokens)
    with sequence(group, layout="zigzag") as ours, ours.active():
        for block in model.transformer.blocks if compiled else ():
            block.compile(fullgraph=True, backend="eager")
        loss, _ = model.token_mean(model.sequence_spec.cut(batch, ours.place))
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("tokens", [37, 38])
def test_compiled_blocks_are_soft_by_the_length_of_the_sequence(pool, tokens):
    """Two ranks have 17 and 20 of 37 tokens."""
    ((want, grads),) = pool.run(1, compiled_step, False, tokens)
    parts = pool.run(2, compiled_step, True, tokens)
    torch.testing.assert_close(sum(x[0] for x in parts), want, rtol=1e-12, atol=1e-12)
    for key, grad in grads.items():
        torch.testing.assert_close(sum(x[1][key] for x in parts), grad, rtol=1e-10, atol=1e-10, msg=key)
