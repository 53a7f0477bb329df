"""Recomputation on several ranks has exact gradients. A saved op sends no row twice; a missing sequence raises."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_dilated.attention import dilated_attention
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.sequence import SequenceGroup

from .calls import positions, sequence

N, PATTERN = 32, DilatedPattern.geometric(4, 32)
EXCHANGES = ("gather", "ring", "butterfly", "switch", "hierarchical_gather", "hierarchical_butterfly")
#: how the backward recomputes the block
KEEP, AGAIN, REENTRANT, PLAIN = "keep the op", "everything again", "everything again, reentrant", "nothing again"


def weights() -> tuple[Tensor, Tensor]:
    """Return (x (1, N, 8), projection (8, 48))."""
    rng = torch.Generator().manual_seed(0)
    return tuple(torch.randn(*shape, generator=rng, dtype=torch.float64) / 2 for shape in ((1, N, 8), (8, 48)))


def block(x: Tensor, weight: Tensor, **options) -> Tensor:
    """Apply a projection, attention, and a function that needs its input in the backward."""
    q, k, v = (x @ weight).unflatten(-1, (3, 4, 4)).unbind(2)
    return dilated_attention(q, k, v, PATTERN, causal=True, dropout=0.2, **options).flatten(2).sin()


def twice(x: Tensor, weight: Tensor, how: str, **options) -> Tensor:
    """Apply two blocks with the kind of checkpoint that `how` names."""
    run = partial(block, **options)
    for _ in range(2):
        if how == PLAIN:
            y = run(x, weight)
        elif how == KEEP:
            saved = [torch.ops.lightning_dilated.attention.default]
            contexts = partial(create_selective_checkpoint_contexts, saved)
            y = checkpoint(run, x, weight, use_reentrant=False, context_fn=contexts)
        else:
            y = checkpoint(run, x, weight, use_reentrant=how == REENTRANT)
        x = y[..., :8] + y[..., 8:]
    return x


def gradients(rank, group, how, settings, explicit=False):
    """Return ((dx, dweight), (forward bytes, backward bytes)). The group is active or, if `explicit`, an argument."""
    torch.manual_seed(1)
    with sequence(group, **settings) as ours:
        x, weight = weights()
        x = x[:, positions(ours, N)].requires_grad_()
        weight.requires_grad_()
        with nullcontext() if explicit else ours.active():
            loss = twice(x, weight, how, **({"sequence": ours} if explicit else {})).square().sum()
            loss.backward()
        return (x.grad, weight.grad), (ours.forward_traffic.sent, ours.backward_traffic.sent)


def on_one_rank() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, weight = (w.requires_grad_() for w in weights())
    return torch.autograd.grad(twice(x, weight, PLAIN).square().sum(), (x, weight))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_gradients_and_traffic(pool, exchange):
    settings = {"exchange": exchange, "ranks_per_node": 2}
    want = on_one_rank()
    sent = {}
    for how in (PLAIN, KEEP, AGAIN, REENTRANT):
        results = pool.run(4, gradients, how, settings)
        torch.testing.assert_close(torch.cat([f[0][0] for f in results], 1), want[0], rtol=0, atol=1e-10)
        torch.testing.assert_close(sum(f[0][1] for f in results), want[1], rtol=0, atol=1e-10)
        sent[how] = torch.tensor([f[1] for f in results])
    assert sent[PLAIN].sum(0).min() > 0
    assert torch.equal(sent[KEEP], sent[PLAIN])
    for how in (AGAIN, REENTRANT):  # the recomputed forward sends its rows again
        assert torch.equal(sent[how], sent[PLAIN] * torch.tensor([2, 1]))


@pytest.mark.parametrize("how", [PLAIN, KEEP, AGAIN, REENTRANT])
def test_head_groups(pool, how):
    want = on_one_rank()
    results = pool.run(4, gradients, how, {"head_size": 2})
    torch.testing.assert_close(torch.cat([f[0][0] for f in results], 1), want[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("how", [KEEP, AGAIN, REENTRANT])
def test_a_given_group_needs_no_active_one(pool, how):
    want = on_one_rank()
    results = pool.run(2, gradients, how, {}, True)
    torch.testing.assert_close(torch.cat([f[0][0] for f in results], 1), want[0], rtol=0, atol=1e-10)


def backward_outside(rank, group, how):
    """Return the error, or the gradient, of a backward after `active()` has ended."""
    torch.manual_seed(1)
    with sequence(group) as ours:
        x, weight = weights()
        x = x[:, positions(ours, N)].requires_grad_()
        with ours.active():
            loss = twice(x, weight, how).square().sum()
        try:
            return torch.autograd.grad(loss, x)[0] if how != REENTRANT else loss.backward() or x.grad
        except RuntimeError as error:
            return str(error)


@pytest.mark.parametrize("how", [KEEP, AGAIN, REENTRANT])
def test_recomputed_outside(pool, how):
    # the recomputation would run on the tokens of one rank only, which reentrant checkpoints would not notice
    for error in pool.run(2, backward_outside, how):
        assert isinstance(error, str) and "recomputed outside of SequenceGroup.active()" in error, error


def test_backward_outside(pool):
    # nothing is recomputed, and the backward of the op itself has stored the group
    want = on_one_rank()
    parts = pool.run(2, backward_outside, PLAIN)
    assert all(isinstance(p, Tensor) for p in parts), parts
    torch.testing.assert_close(torch.cat(parts, 1), want[0], rtol=0, atol=1e-10)


def after_closing(rank, group):
    """Recompute on one rank after a group was closed. The closed group must not make it raise."""
    with sequence(group) as ours, ours.active():
        assert isinstance(ours, SequenceGroup)
    x, weight = (w.requires_grad_() for w in weights())
    torch.manual_seed(1)
    return torch.autograd.grad(twice(x, weight, AGAIN).square().sum(), x)[0]


def test_one_rank_afterwards(pool):
    for grad in pool.run(2, after_closing):
        torch.testing.assert_close(grad, on_one_rank()[0], rtol=0, atol=1e-10)
