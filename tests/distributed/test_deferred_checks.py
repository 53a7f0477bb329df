"""Deferred checks of calls: results are equal, known calls do not wait, and ranks raise before results are used."""

import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lightning_dilated import LongNetLM
from lightning_dilated.attention import dilated_attention
from lightning_dilated.ext.planning.counting.memory_tracker import Meter
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.sequence import SequenceGroup, consensus
from lightning_dilated.sequence.consensus import ControlGroup

from .calls import sequence

WIDE = DilatedPattern.geometric(4, 32)
#: crosses no shard of 16 tokens, so ranks that disagree do not wait for each other's rows
NARROW, OTHER = DilatedPattern([(8, 1)]), DilatedPattern([(4, 1)])


def call(ours, pattern, tokens=16, seed=0, causal=False):
    torch.manual_seed(seed + ours.rank)
    q, k, v = (torch.randn(1, tokens, 2, 8, requires_grad=True) for _ in range(3))
    out = dilated_attention(q, k, v, pattern, causal=causal, sequence=ours)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]


def as_on_gpus(ours):
    """Defer checks and gather them on a separate connection, as on GPUs."""
    ours._consensus.may_defer, ours._consensus.control = True, ControlGroup(ours.group, ours.timeout, "as on gpus")


def deferred_checks(ours):
    return len(ours._consensus.deferred)


def equal_calls(rank, group):
    """Return (checks deferred outside and within `trusting`, whether results are equal, checks left after `settle`)."""
    with sequence(group) as ours:
        as_on_gpus(ours)
        plain = [call(ours, WIDE, seed=i) for i in range(3)]
        before = deferred_checks(ours)
        with ours.trusting():
            results = [call(ours, WIDE, seed=i) for i in range(3)]
        within = deferred_checks(ours)
        ours.settle()
        same = all(torch.equal(a, b) for x, y in zip(plain, results, strict=True) for a, b in zip(x, y, strict=True))
        return before, within, same, deferred_checks(ours)


def test_equal_calls(pool):
    assert pool.run(2, equal_calls) == [(0, 6, True, 0)] * 2


def calls_without_gradients(rank, group):
    """Return whether results in inference_mode (as in validate, test and predict) equal a plain call."""
    with sequence(group) as ours:
        as_on_gpus(ours)
        q = torch.randn(1, 16, 2, 8, generator=torch.Generator().manual_seed(rank))
        want = dilated_attention(q, q, q, WIDE, sequence=ours)
        with torch.inference_mode(), ours.trusting():
            results = [dilated_attention(q, q, q, WIDE, sequence=ours) for _ in range(3)]
            ours.settle()
        return [torch.equal(x, want) for x in results]


def test_inference_mode(pool):
    assert pool.run(2, calls_without_gradients) == [[True] * 3] * 2


def new_calls(rank, group):
    """Return counts of deferred checks after new calls: with a new pattern, new tokens, dropout with rank 0's seed."""
    with sequence(group) as ours:
        as_on_gpus(ours)
        counts = []
        with ours.trusting():
            for pattern, tokens in ((NARROW, 16), (OTHER, 16), (NARROW, 8)):
                call(ours, pattern, tokens)
                counts.append(deferred_checks(ours))  # a new forward waits; its backward differs only in the pass
            q = torch.randn(1, 16, 2, 8, requires_grad=True)
            for _ in range(2):
                dilated_attention(q, q, q, NARROW, dropout=0.5, sequence=ours)
                counts.append(deferred_checks(ours))
            with torch.no_grad():
                dilated_attention(q, q, q, NARROW, sequence=ours)
        return [*counts, deferred_checks(ours)]


def test_new_calls_wait(pool):
    assert pool.run(2, new_calls) == [[0] * 6] * 2


def unlike_calls(rank, group, mode):
    """Make different calls on the ranks."""
    with sequence(group) as ours:
        as_on_gpus(ours)
        for pattern in (NARROW, OTHER):
            call(ours, pattern)
        with ours.trusting():
            if mode == "known":  # all ranks have made both calls before, so all defer the checks
                call(ours, NARROW if rank else OTHER)
            elif mode == "new":  # rank 1 makes a new call, which waits for its check
                call(ours, NARROW, causal=bool(rank))
            elif mode == "refused":
                q = torch.randn(1, 16, 2, 8, requires_grad=True)
                dilated_attention(q, q, q, NARROW, scale=float("nan") if rank else None, sequence=ours)
            for _ in range(3):
                call(ours, NARROW)
        ours.settle()


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("known", "pattern: rank 0 has {"),
        ("new", "causal: rank 0 has False, rank 1 has True"),
        ("refused", "rank 1 of the sequence refused the call with ValueError: scale must be a finite number"),
    ],
)
def test_unlike_calls(pool, mode, text):
    messages = pool.errors(ValueError, 2, unlike_calls, mode)
    assert text in messages[0] and ("scale must be" if mode == "refused" else text) in messages[1]


def gloo_never_defers(rank, group):
    with sequence(group) as ours, ours.trusting():
        call(ours, NARROW), call(ours, NARROW)
        return deferred_checks(ours)


def test_gloo_never_defers(pool):
    assert pool.run(2, gloo_never_defers) == [0, 0]


def recorded(rank, group):
    """Make a call while the rank records a CUDA graph."""
    with sequence(group) as ours, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        ours.agree({"call": "test"}, 4)


def test_no_cuda_graph(pool):
    assert all("a CUDA graph cannot record" in x for x in pool.errors(RuntimeError, 2, recorded))


def other_lengths(rank, group):
    """Return counts of deferred checks for sequences of 32 and 31 tokens. Rank 0 has equal parts of both."""
    with sequence(group) as ours:
        as_on_gpus(ours)
        counts = []
        for tokens in (32, 31, 32):
            with ours.trusting():
                call(ours, WIDE, ours.shard(tokens).length(rank))
                counts.append((deferred_checks(ours), ours.agreed.seq_len))
                call(ours, WIDE, ours.shard(tokens).length(rank))
                counts.append((deferred_checks(ours), ours.agreed.seq_len))
            ours.settle()
        return counts


def test_other_lengths(pool):
    """The first call of a step waits for its check: a rank's number of tokens does not determine the others' numbers.

    All ranks defer the same calls, also rank 0, which has equal parts of both sequences. In the third step, the first
    backward is known and deferred.
    """
    assert pool.run(2, other_lengths) == [[(0, 32), (2, 32), (0, 31), (2, 31), (1, 32), (3, 32)]] * 2


def unlike_numbers(rank, group, mode):
    """Return (error, number of the next call) of a rank if lengths change in a step, or if rank 1 makes fewer calls."""
    with sequence(group) as ours:
        as_on_gpus(ours)
        call(ours, NARROW), call(ours, NARROW, 16 - rank), ours.settle()
        try:
            with ours.trusting():
                call(ours, NARROW)
                for _ in range(3 - rank):
                    call(ours, NARROW, 16 - rank if mode == "lengths" else 16)
            ours.settle()
        except ValueError as error:
            call(ours, NARROW)
            return str(error), ours.agreed.number


def test_lengths_that_change_within_a_step(pool):
    """Rank 0 has the same number of tokens as before and defers the check. Rank 1 has another number. Both raise."""
    first, second = pool.run(2, unlike_numbers, "lengths")
    assert first == second and "hold [16, 15] tokens in a call, but [16, 16] in the call before it" in first[0]


def test_unlike_numbers_of_calls(pool):
    first, second = pool.run(2, unlike_numbers, "numbers")
    assert first == second and "number of calls: rank 0 has 7, rank 1 has 5" in first[0]


def many_calls(rank, group):
    """Return counts of deferred checks while there are more calls than are deferred."""
    with sequence(group) as ours, pytest.MonkeyPatch.context() as patch:
        patch.setattr(consensus, "DEFERRED", 4)
        as_on_gpus(ours)
        call(ours, NARROW)
        with ours.trusting():
            return [(call(ours, NARROW), deferred_checks(ours))[1] for _ in range(4)]


def test_many_calls(pool):
    assert pool.run(2, many_calls) == [[2, 0, 2, 0]] * 2


def other_settings(rank, group):
    """Return the error of ranks with groups of different settings."""
    with sequence(group, exchange="ring" if rank else "gather") as ours, pytest.raises(ValueError) as error:
        call(ours, WIDE)
    return str(error.value)


def test_other_settings(pool):
    assert all("exchange: rank 0 has gather, rank 1 has ring" in x for x in pool.run(2, other_settings))


def numbers(rank, group):
    """Return the number of the next call after a caught error, when ranks had deferred different numbers of checks."""
    with sequence(group) as ours:
        as_on_gpus(ours)
        call(ours, NARROW)
        with pytest.raises(ValueError), ours.trusting():
            call(ours, NARROW, causal=bool(rank))
            for _ in range(3):
                call(ours, NARROW)
            ours.settle()
        call(ours, NARROW)
        return ours.agreed.number


def test_numbers_after_a_difference(pool):
    first, second = pool.run(2, numbers)
    assert first == second


def kept_by_calls(rank, group):
    """Return (deferred checks, inputs of recomputed pieces that are still allocated) after the backward of a step."""
    with sequence(group) as ours:
        as_on_gpus(ours)
        q = torch.randn(1, 16, 2, 8, requires_grad=True)
        storages = []

        def piece(x):
            y = dilated_attention(x, x, x, NARROW, sequence=ours)
            return dilated_attention(y, y, y, NARROW, sequence=ours)

        def step():
            x = q * 2
            for _ in range(4):
                storages.append(weakref.ref(x.untyped_storage()))
                x = checkpoint(piece, x, use_reentrant=False)
            x.sum().backward()

        with ours.trusting():
            step()
            storages.clear()
            step()
            counts = deferred_checks(ours), sum(storage() is not None for storage in storages)
        ours.settle()
        return counts


def test_deferred_checks_keep_no_memory(pool):
    """Recomputation runs in autograd's hooks. A pending gather must not keep references to hooks and their inputs."""
    calls = 3 * 2 * 4  # forward, recomputed forward, backward
    for count, alive in pool.run(2, kept_by_calls):
        assert count >= calls and alive == 0, (count, alive)


SETTINGS = [
    MemorySettings("block", every=2, offload=1, tile=128, head_chunks=2),
    MemorySettings("block", offload=0.5),
    MemorySettings("attention-kept"),
]


def model_with(settings):
    torch.manual_seed(0)
    model = LongNetLM(DilatedPattern([(128, 1), (256, 2)]), dim=32, depth=8, num_heads=4)
    model.configure_model()
    model.transformer.memory = settings
    return model


def train(model):
    tokens = torch.arange(512)[None] % 256
    loss, _ = model.token_mean({"tokens": tokens, "labels": tokens})
    loss.backward()
    model.zero_grad(set_to_none=True)


def peak(model):
    """Return the peak bytes of the second step."""
    train(model)
    with Meter() as meter:
        train(model)
    return meter.peak


def ranks_peak(rank, group, settings):
    model, ours = model_with(settings), SequenceGroup(group)
    as_on_gpus(ours)
    try:
        with ours.active(), ours.trusting():
            highest = peak(model)
            ours.settle()
    finally:
        ours.close()
    return highest


@pytest.mark.parametrize("settings", SETTINGS, ids=["tiled", "block", "attention-kept"])
def test_ranks_hold_what_one_does(pool, settings):
    """A rank's peak equals one device's peak for the same tokens, because no segment crosses ranks."""
    alone = peak(model_with(settings))
    for rank_peak in pool.run(2, ranks_peak, settings):
        assert abs(rank_peak - alone) < 0.01 * alone, (rank_peak, alone)


def gathers_alone(rank, group):
    """A group of one rank does not wait, and opens no connection."""
    control = ControlGroup(group, None, "alone")
    pending = control.start_gather(torch.tensor([1, 2]))
    return (
        control.backend is None,
        pending.done(),
        [x.tolist() for x in pending.wait()],
        control.gather_text({"a": "b"}),
    )


def test_one_rank_asks_itself(pool):
    assert pool.run(1, gathers_alone) == [(True, True, [[1, 2]], [{"a": "b"}])]


def shared_connection(rank, group):
    """Return (gathers by two users of a channel, whether these share a connection, whether two channels do not)."""
    first, second, other = (ControlGroup(group, None, channel) for channel in ("shared", "shared", "other"))
    values = [int(x) for control in (first, second) for x in control.gather(torch.tensor([rank]))]
    return values, first.backend is second.backend, first.backend is not other.backend


def test_users_of_a_channel_share_its_connection(pool):
    assert pool.run(2, shared_connection) == [([0, 1, 0, 1], True, True)] * 2
