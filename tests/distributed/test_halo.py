"""sequence_halo, SequenceConv1d and kv_conv give one rank's results and gradients on several ranks in any layout."""

import pytest
import torch

from lightning_dilated import DilatedPattern, MultiheadDilatedAttention
from lightning_dilated.ext.convolution.convolution import ShortConvolution
from lightning_dilated.ext.convolution.halo import halo_route
from lightning_dilated.sequence import SequenceConv1d, sequence_halo
from lightning_dilated.sequence.shard import Shard

from .calls import positions, sequence

PATTERN = DilatedPattern.longnet([4, 16], [1, 2])


def numbers(seed, *shape):
    """Draw numbers that are equal on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def surrounded(rank, group, seq_len, left, right, layout):
    """Return ([(first position, rows) of each chunk], positions of this rank, its gradient, transferred bytes)."""
    with sequence(group, layout=layout) as ours:
        x = numbers(0, 2, seq_len, 3)[:, positions(ours, seq_len)].requires_grad_()
        chunks = sequence_halo(x, left, right, sequence=ours)
        loss = sum((y * numbers(100 * rank + i, *y.shape)).sum() for i, y in enumerate(chunks))
        (grad,) = torch.autograd.grad(loss, x)
        held = ours.shard(seq_len).ranges(rank) or (range(seq_len, seq_len),)
        firsts = [h.start for h in held]
        moved = ours.forward_traffic.received, ours.backward_traffic.sent
        return [(p, y.detach()) for p, y in zip(firsts, chunks, strict=True)], positions(ours, seq_len), grad, moved


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("seq_len, left, right", [(37, 3, 0), (9, 2, 3), (9, 7, 1), (2, 1, 1), (37, 0, 0), (0, 2, 1)])
def test_rows_and_gradients(pool, seq_len, left, right, ranks, layout):
    padded = torch.nn.functional.pad(numbers(0, 2, seq_len, 3), (0, 0, left, right))
    total = torch.zeros_like(padded)
    results = pool.run(ranks, surrounded, seq_len, left, right, layout)
    for rank, (chunks, _, _, moved) in enumerate(results):
        for i, (first, rows) in enumerate(chunks):
            if rows.shape[1] > left + right:
                torch.testing.assert_close(rows, padded[:, first : first + rows.shape[1]], rtol=0, atol=0)
                total[:, first : first + rows.shape[1]] += numbers(100 * rank + i, *rows.shape)
            else:
                assert not rows.any() and rows.shape == (2, left + right, 3)
        assert moved[0] == moved[1]
    for _, at, grad, _ in results:
        torch.testing.assert_close(grad, total[:, left : left + seq_len][:, at])


def other_axes(rank, group):
    """Return halos along the last dimension, and halos of integers."""
    with sequence(group) as ours:
        x = numbers(3, 2, 5, 10)[..., positions(ours, 10)]
        last = sequence_halo(x, 2, 1, dim=-1, sequence=ours)
        ints = sequence_halo(torch.tensor(positions(ours, 10)), 1, dim=0, sequence=ours)
        return last, ints


def test_other_dimensions_and_dtypes(pool):
    padded = torch.nn.functional.pad(numbers(3, 2, 5, 10), (2, 1))
    for rank, ((last,), (ints,)) in enumerate(pool.run(2, other_axes)):
        assert torch.equal(last, padded[..., 5 * rank : 5 * rank + 8])
        assert ints.tolist() == [max(0, 5 * rank - 1), *range(5 * rank, 5 * rank + 5)]


def refused(rank, group):
    messages = []
    for layout, call in (
        ("strided", lambda ours: sequence_halo(torch.zeros(1, 5, 2), 1, sequence=ours)),
        ("contiguous", lambda ours: sequence_halo(torch.zeros(1, 5, 2), -1 if rank else 1, sequence=ours)),
        ("contiguous", lambda ours: sequence_halo(torch.zeros(1, 5, 2 + rank), 1, sequence=ours)),
        ("contiguous", lambda ours: sequence_halo(torch.zeros(1, 5, 2), 1, dim=3, sequence=ours)),
    ):
        with sequence(group, layout=layout) as ours:
            try:
                messages.append(call(ours))
            except ValueError as error:
                messages.append(str(error))
    return messages


def test_refusals_reach_every_rank(pool):
    for strided, negative, shapes, dim in pool.run(2, refused):
        assert "layout='strided' has no halo" in strided and "'zigzag'" in strided
        assert "left must be at least 0" in negative and "shape" in shapes and "dim=3 lies outside" in dim


def test_route_of_many_ranks_is_short():
    shard = Shard(1 << 20, 128, "zigzag")
    for rank in (0, 63, 127):
        route = halo_route(shard, rank, 3, 0)
        assert len(route.sends) <= 3 and len(route.receives) <= 3 and route.rows in (3, 6)


# -- modules -----------------------------------------------------------------------------------------------------------
CONVOLUTIONS = {
    "causal": (4, {"causal": True}),
    "centred": (5, {}),
    "even, dilated, grouped": (4, {"dilation": 2, "groups": 3}),
    "one tap": (1, {"bias": False}),
}


def convolved(rank, group, name, seq_len, layout):
    with sequence(group, layout=layout) as ours, ours.active():
        return answer(name, seq_len, positions(ours, seq_len))


def answer(name, seq_len, at):
    """Return the result, and the gradients of x and the parameters, for a loss at the given positions."""
    torch.manual_seed(2)
    size, options = CONVOLUTIONS[name]
    module = SequenceConv1d(6, 9, size, dtype=torch.float64, **options)
    x = numbers(4, 2, seq_len, 6)[:, at].requires_grad_()
    y = module(x)
    grads = torch.autograd.grad((y * numbers(5, 2, seq_len, 9)[:, at]).sum(), (x, *module.parameters()))
    return y.detach(), at, grads


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ranks, seq_len", [(2, 23), (4, 9), (3, 2)])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_sequence_conv1d(pool, name, ranks, seq_len, layout):
    compare(pool.run(ranks, convolved, name, seq_len, layout), answer(name, seq_len, list(range(seq_len))))


def compare(parts, want):
    for y, at, (dx, *_) in parts:
        torch.testing.assert_close(y, want[0][:, at])
        torch.testing.assert_close(dx, want[2][0][:, at])
    for each in zip(*(part[2][1:] for part in parts), strict=True):
        assert len(each) == len(parts)
    sums = [sum(each) for each in zip(*(part[2][1:] for part in parts), strict=True)]
    torch.testing.assert_close(sums, list(want[2][1:]))


def test_sequence_conv1d_is_conv1d():
    for name, (size, options) in CONVOLUTIONS.items():
        y, _, _ = answer(name, 11, list(range(11)))
        torch.manual_seed(2)
        conv_options = {k: v for k, v in options.items() if k != "causal"}
        plain = torch.nn.Conv1d(6, 9, size, dtype=torch.float64, padding="same", **conv_options)
        x = numbers(4, 2, 11, 6).transpose(1, 2)
        if "causal" in options:
            x = torch.nn.functional.pad(x, (size - 1, 0))
            plain.padding = (0,)
        torch.testing.assert_close(y, plain(x).transpose(1, 2), msg=name)
    with pytest.raises(ValueError, match="takes no padding, stride"):
        SequenceConv1d(2, 2, 3, stride=2, padding=1)


SHAPES = {"one row": (1, None), "documents": (1, [0, 1, 8, 9, 23]), "padded": (3, [23, 4, 0])}


def layered(rank, group, shape, causal, settings):
    with sequence(group, **settings) as ours, ours.active():
        return attended(shape, causal, positions(ours, 23))


def attended(shape, causal, at):
    """Return the result and gradients of a layer with kv_conv, for a loss at the given positions."""
    torch.manual_seed(7)
    module = MultiheadDilatedAttention(
        12, 3, PATTERN, causal=causal, position_encoding="rotary", kv_conv=4, dtype=torch.float64
    )
    torch.nn.init.normal_(module.kv_conv.weight, std=0.5)
    batch, documents = SHAPES[shape]
    x = numbers(8, batch, 23, 12)[:, at].requires_grad_()
    kind = "lengths" if shape == "padded" else "cu_seqlens"
    limits = {} if documents is None else {kind: torch.tensor(documents, dtype=torch.int32)}
    y, _ = module(x, **limits)
    grads = torch.autograd.grad((y * numbers(9, batch, 23, 12)[:, at]).sum(), (x, *module.parameters()))
    return y.detach(), at, grads


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "ranks, settings",
    [
        (2, {}),
        (2, {"layout": "zigzag"}),
        (4, {"layout": "zigzag", "head_size": 2}),
        (4, {"exchange": "switch", "head_size": 4}),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES)
def test_layer_with_kv_conv(pool, shape, ranks, settings, causal):
    compare(pool.run(ranks, layered, shape, causal, settings), attended(shape, causal, list(range(23))))


def on_strided(rank, group):
    with sequence(group, layout="strided") as ours, ours.active():
        with pytest.raises(ValueError, match=r"layout='strided' has no halo.*kv_conv"):
            ShortConvolution(2, 3, True)(torch.zeros(1, 4, 2))
        return True


def test_kv_conv_refuses_the_strided_layout(pool):
    assert pool.run(2, on_strided) == [True, True]
