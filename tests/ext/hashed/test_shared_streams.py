"""Hashed heads in streams that ranks share: results, losses, gradients, carried rows and bytes."""

from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import lightning_dilated as ld
from lightning_dilated.callbacks import ActivationRecompute
from lightning_dilated.data import ByteDataModule
from lightning_dilated.ext.hashed import ranks
from lightning_dilated.ext.hashed.lookup import Inputs
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.strategy import RingDilatedStrategy

from ...distributed.calls import sequence
from ...distributed.test_deferred_checks import as_on_gpus, deferred_checks
from ...examples import examples
from ...strategy.conftest import pools  # noqa: F401
from ...strategy.runs import PATTERN, Record, launched, trainer
from ..streams.test_streaming import lm, text
from .cases import Case, cases, compare, weights
from .test_streams import CASES, LOOKUPS, Chunks, by_definition, hashed_layers
from .test_streams import step as step_alone

TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2}


def attend(rank, group, case, chunk, samples=ranks.SAMPLES):
    """Return the positions of this rank's tokens, and their results."""
    with sequence(group, layout="chunked", stream=chunk) as ours, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "SAMPLES", samples)
        chunks = Chunks(case, chunk, group=ours if ours.ranks > 1 else None)
        tensors = case.tensors()
        return chunks.positions, chunks.run(tensors, weights(tensors[0].shape, 0))


def check(pool, size, case, chunk, samples=ranks.SAMPLES, run=attend):
    """Check that the ranks together give the results of the oracle."""
    case = replace(case, code_scores=not case.soft)
    tensors, labelled = case.tensors(), Chunks(case, chunk).labelled
    want = by_definition(case, tensors, weights(tensors[0].shape, 0), labelled)
    parts = pool.run(size, run, case, chunk, samples)
    order = torch.tensor([p for at, _ in parts for p in at]).argsort()
    got = {name: torch.cat([x[name].double() for _, x in parts], 1)[:, order] for name in want if name != "d null"}
    compare(got | {"d null": sum(x["d null"] for _, x in parts)}, want, TOLERANCES[case.dtype])


def any_call(pool, size, case, chunk, samples):
    """Documents and padding, several kv heads, ties, soft lookups; some ranks have no tokens of a chunk."""
    assume(case.seq_len)
    check(pool, size, case, chunk, samples)


random_calls = given(case=cases(), chunk=st.integers(1, 12), samples=st.sampled_from([1, ranks.SAMPLES]))
sizes = pytest.mark.parametrize("size", [1, 2, 3, 4])
test_any_call = sizes(settings(max_examples=examples(12), deadline=None)(random_calls(any_call)))
test_any_call_often = pytest.mark.slow(
    sizes(settings(max_examples=examples(80), deadline=None)(random_calls(any_call)))
)


@pytest.mark.parametrize(
    ("size", "case", "chunk"),
    [
        (4, Case((9,), kv_heads=2), 8),  # chunks of 2, 2, 2, 2 and 1, 0, 0, 0 tokens
        (3, Case((7, 30, 1), padding=4, latest=3, kv_heads=2, probes=2), 7),  # no sample has tokens of the last chunk
        (4, Case((17, 1, 1, 30), packed=True, latest=5), 11),
        (2, Case((60,), groups=1, codes=1, latest=7), 16),  # all codes are equal
        (3, Case((60,), groups=1, codes=1, latest=100), 16),
        (2, Case((60,), groups=4, codes=9, probes=5), 16),
        (3, Case((33, 20), soft=True, kv_heads=2), 10),
        (3, Case((60,), dim=8, codes=3, latest=5, probes=2, dtype=torch.float32), 16),
        (3, Case((60,), dim=8, codes=3, latest=5, probes=2, dtype=torch.bfloat16), 16),
    ],
    ids=str,
)
def test_calls(pool, size, case, chunk):
    check(pool, size, case, chunk)


def test_two_runs_give_equal_bits(pool):
    case = Case((120,), latest=20, probes=2, dtype=torch.float32)
    first, again = (pool.run(3, attend, case, 25) for _ in range(2))
    for (_, results), (_, others) in zip(first, again, strict=True):
        assert all(torch.equal(x, others[name]) for name, x in results.items())


def carried(rank, group, case, chunk):
    """Return the keys of the rows that this rank carries after each chunk, and of the rows that it stores."""
    with sequence(group, layout="chunked", stream=chunk) as ours, torch.no_grad():
        chunks, keys = Chunks(case, chunk, group=ours), []
        for i in range(chunks.stream.chunks):
            chunks.attend(case.tensors(), i)
            keys.append(chunks.stream.hashed_of(0).rows.keys)
        return keys, sum(len(gone) for _, gone, _ in chunks.stream.hashed_of(0)._replaced)


@pytest.mark.parametrize("latest", [1, 7])
def test_ranks_together_carry_what_one_rank_carries(pool, latest):
    case = Case((240, 230), kv_heads=2, latest=latest)
    ((want, stored),) = pool.run(1, carried, case, 24)
    parts = pool.run(3, carried, case, 24)
    for i, keys in enumerate(want):
        assert torch.equal(torch.cat([x[i] for x, _ in parts]).sort()[0], keys.sort()[0])
    assert len(want[-1]) == 2 * 2 * 4 * latest and sum(n for _, n in parts) == stored


def traffic(rank, group, case, chunk):
    """Return the bytes that this rank sends in a forward and in a backward of each chunk, and the planned bytes."""
    with sequence(group, layout="chunked", stream=chunk) as ours, pytest.MonkeyPatch.context() as patch:
        calls, find = [], ranks.find_routes
        patch.setattr(ranks, "find_routes", lambda *args: calls.append((*args, find(*args))) or calls[-1][-1])
        chunks, tensors = Chunks(case, chunk, group=ours), case.tensors()
        chunks.terms.labelled = chunks.labelled[:, chunks.positions]
        others = lambda counts: sum(n for peer, n in counts.items() if peer != rank)  # noqa: E731
        q, k, v, z_q, z_k = (x.detach().to("meta") for x in tensors[:5])
        inputs = Inputs(q.unflatten(2, (case.kv_heads, -1)).flatten(0, 2), *(x.flatten(0, 2) for x in (k, v, z_q, z_k)))
        keys = case.batch * case.kv_heads * case.codes**case.groups
        totals = case.batch * (1 + 2 * (case.kv_heads * case.codes * case.groups + 1))
        counts, losses = (ranks.planned_sums(n, size, ours.ranks) for n, size in ((keys, 4), (totals, 8)))
        sent, planned = [], []

        def note(more, runs_back):
            place, _, reach, (routes, _) = calls[-1]
            moved = [[others(x) for x in (routes.rows[i], routes.lookups[i])] for i in (1, 2)]
            samples, latest = -(-place.entries[rank] // place.step), min(reach, place.longest)
            forward, backward = ranks.planned_bytes(
                inputs, ours.ranks, samples, latest, *moved, kernels=case.dtype == torch.float32
            )
            planned.append((forward + 8 * (ours.ranks - 1) + more, backward * runs_back))
            sent.append((ours.forward_traffic.sent, ours.backward_traffic.sent))
            ours.forward_traffic.clear()
            ours.backward_traffic.clear()

        last = chunks.stream.chunks - 1
        for i in range(last):
            with torch.no_grad():
                chunks.attend(tensors, i)
            note(2 * counts + losses, False)
        chunks.stream.descend()
        for i in range(last, -1, -1):
            out, leaves = chunks.attend(tensors, i)
            note(counts + losses, False)
            torch.autograd.grad(out.sum(), leaves)
            note(counts, True)
        return sent, planned


def check_traffic(pool, size, case):
    for sent, planned in pool.run(size, traffic, case, 16):
        assert sent == planned and any(backward for _, backward in sent)


def test_bytes_are_planned(pool):
    check_traffic(pool, 3, Case((60, 51), latest=5, kv_heads=2, probes=2))


# -- models ------------------------------------------------------------------------------------------------------------
def step(rank, group, options, batch, chunk, memory):
    """Return (this rank's share of the loss, gradients, statistics of each layer's lookups) of a training step."""
    model = lm(**options).train()
    with sequence(group, layout="chunked", stream=chunk) as ours, ours.active():
        part = model.sequence_spec.cut(batch, ours.place)
        model.transformer.memory = MemorySettings(stream=chunk, **memory)
        loss, _ = model.token_mean(part)
        loss.backward()
        latest = [layer.terms.latest for layer in hashed_layers(model)]
        return loss.detach(), {name: p.grad for name, p in model.named_parameters()}, latest


#: number of ranks in each case
SIZES = {
    "plain": 2, "chunks of one token": 2, "padded, in some layers": 3, "three heads": 3, "packed": 4,
    "a document begins with a chunk": 3, "soft, packed": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_a_step_equals_one_pass_of_one_rank(pool, name):
    options, memory, batch, chunk = CASES[name]
    model = lm(**options).train()
    want, grads = step_alone(model, batch)
    parts = pool.run(SIZES[name], step, options, batch, chunk, memory)
    torch.testing.assert_close(sum(x[0] for x in parts), want, rtol=1e-12, atol=1e-12)
    for key, grad in grads.items():
        torch.testing.assert_close(sum(x[1][key] for x in parts), grad, rtol=1e-10, atol=1e-10, msg=key)
    for i, layer in enumerate(hashed_layers(model)):
        torch.testing.assert_close(sum(x[2][i] for x in parts), layer.terms.latest, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("policy", ["none", "block"])
def test_truncated_gradients_are_those_of_one_rank(pool, policy):
    memory, batch = {"truncate": True, "policy": policy}, text(61)
    want, grads = step_alone(lm(**LOOKUPS).train(), batch, stream=16, **memory)
    parts = pool.run(3, step, LOOKUPS, batch, 16, memory)
    torch.testing.assert_close(sum(x[0] for x in parts), want, rtol=1e-12, atol=1e-12)
    for key, grad in grads.items():
        torch.testing.assert_close(sum(x[1][key] for x in parts), grad, rtol=1e-10, atol=1e-10, msg=key)


def deferring(rank, group, options, batch, chunk):
    """Return (this rank's share of the loss, checks deferred in the second step), as if gathers ran on GPUs."""
    model = lm(**options).train()
    with sequence(group, layout="chunked", stream=chunk) as ours, ours.active(), ours.trusting():
        as_on_gpus(ours)
        model.transformer.memory = MemorySettings(stream=chunk)
        for _ in range(2):
            loss, _ = model.token_mean(model.sequence_spec.cut(batch, ours.place))
            loss.backward()
            deferred = deferred_checks(ours)
            ours.settle()
        return loss.detach(), deferred


def test_deferred_checks(pool):
    batch = text(47)
    parts = pool.run(2, deferring, LOOKUPS, batch, 16)
    torch.testing.assert_close(sum(x[0] for x in parts), lm(**LOOKUPS).train().token_mean(batch)[0].detach())
    assert parts[0][1] == parts[1][1] > 0


# -- runs --------------------------------------------------------------------------------------------------------------
def part_of_run(rank, group, folder, steps, path, ckpt):
    """Train up to step `steps`, from a checkpoint if given, and save; return losses and parameters."""
    pl.seed_everything(1, verbose=False)
    world, record = launched(rank), Record()
    layout = {} if world == 1 else {"layout": "chunked"}
    data = ByteDataModule(folder, seq_len=60, batch_size=2, val_fraction=0, test_fraction=0)
    model = ld.LongNetLM(pattern=PATTERN, dim=16, depth=1, num_heads=4, **LOOKUPS)
    callbacks = [record, ActivationRecompute(stream=9)]
    built = trainer(RingDilatedStrategy(**layout), world, max_steps=steps, callbacks=callbacks, precision="64-true")
    built.fit(model, data, ckpt_path=ckpt)
    built.save_checkpoint(path)
    return record.losses, torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_run_resumes_on_another_number_of_ranks(pools, tmp_path):  # noqa: F811
    folder, generator = tmp_path / "text", torch.Generator().manual_seed(0)
    folder.mkdir()
    (folder / "a").write_bytes(bytes(torch.randint(0, 256, (1000,), generator=generator).tolist()))
    whole, parameters = pools(1).run(1, part_of_run, str(folder), 3, tmp_path / "whole.ckpt", None)[0]
    losses, path = [], None
    for steps, size in ((1, 4), (2, 1), (3, 2)):
        before, path = path, tmp_path / f"{steps}.ckpt"
        more, got = pools(size).run(size, part_of_run, str(folder), steps, path, before)[0]
        losses += more
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(whole), rtol=1e-9, atol=0)
    torch.testing.assert_close(got, parameters, rtol=1e-9, atol=1e-12)
