"""Two threads do not affect each other, although each has its own model and active sequence."""

import threading

import torch
from torch.utils.checkpoint import checkpoint

import lightning_dilated as ld
from lightning_dilated.sequence import SequenceGroup, active_sequence, no_sequence

PATTERN = ld.DilatedPattern.longnet([8, 16], [1, 2])


def work(seed, layout, group, barrier, results):
    """Compute logits, recomputed gradients, generated tokens and a call of the op, in step with the other thread."""
    model = ld.LongNetLM(PATTERN, vocab_size=11, dim=16, depth=1, num_heads=2).double().eval()
    rng = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data.copy_(torch.randn(p.shape, generator=rng))
    tokens, q = torch.randint(0, 11, (1, 24), generator=rng), torch.randn(1, 24, 2, 8, generator=rng).double()
    ours = SequenceGroup(group, layout=layout)
    q.requires_grad_()
    barrier.wait()
    before = active_sequence()
    with ours.active():
        barrier.wait()
        active = active_sequence()
        logits = model(tokens).detach()
        barrier.wait()
        out = checkpoint(lambda x: ld.dilated_attention(x, x, x, PATTERN, causal=True), q, use_reentrant=False)
        barrier.wait()
        (grad,) = torch.autograd.grad(out.square().sum(), q)
        drawn = model.generate(tokens, 4, temperature=0)
        barrier.wait()
    barrier.wait()
    results[seed] = (before is None, active is ours, logits, out.detach(), grad, drawn)
    ours.close()


def run_both(rank, group):
    """Return the results of two threads that run together, and of each thread alone."""
    together, alone, errors = {}, {}, []

    def guarded(*args):
        try:
            work(*args)
        except BaseException as error:
            errors.append(repr(error))
            args[3].abort()

    barrier = threading.Barrier(2)
    plans = [(1, "contiguous"), (2, "zigzag")]
    threads = [threading.Thread(target=guarded, args=(*x, group, barrier, together)) for x in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for plan in plans:
        guarded(*plan, group, threading.Barrier(1), alone)
    return together, alone, errors


def test_each_thread_has_its_own_sequence(pool):
    ((together, alone, errors),) = pool.run(1, run_both)
    assert not errors
    for seed in (1, 2):
        assert together[seed][:2] == (True, True)
        torch.testing.assert_close(together[seed][2:], alone[seed][2:], rtol=0, atol=1e-12)


def outside(rank, group):
    """Return the active sequence that another thread sees, and the active sequence within `no_sequence`."""
    sequences = []
    ours = SequenceGroup(group)
    with ours.active():
        thread = threading.Thread(target=lambda: sequences.append(active_sequence()))
        thread.start()
        thread.join()
        with no_sequence():
            sequences.append(active_sequence())
        sequences.append(active_sequence() is ours)
    ours.close()
    return sequences


def test_a_thread_without_a_sequence(pool):
    assert pool.run(1, outside) == [[None, None, True]]
