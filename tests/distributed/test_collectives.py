"""sequence_sum, sequence_mean and sequence_gather, and gradients of the sum of all ranks' losses, equal one rank's."""

import pytest
import torch

from lightning_dilated.sequence import sequence_gather, sequence_mean, sequence_sum

from .calls import positions, sequence

N = 9  # with 4 ranks, one rank has no token


def numbers(seed, *shape):
    """Draw numbers that are equal on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def helpers(rank, group, layout):
    """Return the largest errors of results and gradients of all three functions on this rank."""
    with sequence(group, layout=layout) as ours:
        x, mask = numbers(0, 2, N, 3), numbers(1, 2, N) > -0.5
        at = positions(ours, N)
        local, full = x[:, at].clone().requires_grad_(), x.clone().requires_grad_()
        weights = [numbers(10 + r, 2, N, 3) for r in range(ours.ranks)]
        out = {}

        def check(name, got, loss, want, want_loss):
            (mine_grad,) = torch.autograd.grad(loss, local)
            (want_grad,) = torch.autograd.grad(want_loss, full)
            worst = [(got - want).abs().max(), (mine_grad - want_grad[:, at]).abs().amax() if len(at) else 0.0]
            out[name] = max(map(float, worst))

        got = sequence_gather(local, 1, ours)
        check("gather", got, (got * weights[rank]).sum(), full, (full * sum(weights)).sum())
        for name, m in (("mean", None), ("masked mean", mask)):
            got = sequence_mean(local, 1, None if m is None else m[:, at], ours)
            want = full.mean(1) if m is None else (full * m[..., None]).sum(1) / m.sum(1)[:, None]
            check(name, got, (got**2).sum() / ours.ranks, want, (want**2).sum())
        got = sequence_sum(local.sum(1), ours)
        check("sum", got, (got**2).sum() / ours.ranks, full.sum(1), (full.sum(1) ** 2).sum())
        return out


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "strided"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_equal_to_one_rank(pool, ranks, layout):
    for errors in pool.run(ranks, helpers, layout):
        assert errors.keys() == {"gather", "mean", "masked mean", "sum"} and max(errors.values()) < 1e-12, errors


def corners(rank, group, layout):
    """Check corner cases: integers too large for float32, NaN with weight 0, no samples, and wrong dimensions."""
    with sequence(group, layout=layout) as ours:
        messages = []
        for call in (
            lambda: sequence_gather(torch.zeros(2, 3, 5), 3, ours),
            lambda: sequence_gather(torch.zeros(()), 0, ours),
            lambda: sequence_mean(torch.zeros(2, 3), -3, sequence=ours),
            lambda: sequence_mean(torch.zeros(2, 3, dtype=torch.int64), sequence=ours),
            lambda: sequence_mean(torch.zeros(2, 3), mask=torch.ones(2, 4 if rank == 0 else 3), sequence=ours),
        ):
            try:
                messages.append(call())
            except (ValueError, TypeError) as error:
                messages.append(str(error))
        count = sequence_sum(torch.tensor([2**24 + 1 if rank == 0 else 0]), ours)
        hole = sequence_mean(torch.tensor([[1.0, torch.nan]]), mask=torch.tensor([[True, False]]), sequence=ours)
        none = sequence_gather(torch.zeros(0, len(positions(ours, N)), 5), 1, ours)
        return messages, count.item(), hole.item(), none.shape


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_corners(pool, layout):
    for messages, count, hole, none in pool.run(2, corners, layout):
        assert "dim=3 lies outside" in messages[0] and "dim=0 lies outside" in messages[1] and "dim=-3" in messages[2]
        assert "takes floating tensors" in messages[3] and "mask must have shape" in messages[4]
        assert (count, hole, none) == (2**24 + 1, 1.0, (0, N, 5))


def changed(rank, group):
    """Return a leaf after its sum was modified in place, and the sum."""
    with sequence(group) as ours:
        x = torch.tensor([0.0, 2.0], requires_grad=True)
        total = sequence_sum(x, ours).clamp_(min=1)
        return x.tolist(), total.tolist()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sum_may_be_changed(pool, ranks):
    assert pool.run(ranks, changed) == [([0, 2], [1, 2 * ranks])] * ranks


def test_one_rank_without_a_group():
    x = torch.randn(2, 5, 3)
    assert sequence_sum(x) is x and sequence_gather(x) is x
    torch.testing.assert_close(sequence_mean(x), x.mean(1))
    with pytest.raises(ValueError, match=r"mask must have shape \(2, 5\)"):
        sequence_mean(x, mask=torch.ones(2, 4))
