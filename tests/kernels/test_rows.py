"""Kernels that move or rotate rows, in the interpreter and on a GPU: bit-equal to torch, or equal up to rounding."""

import random

import pytest
import torch

from lightning_dilated import kernels
from lightning_dilated.attention.rotary import Rotary, rotate, turn
from lightning_dilated.sequence.exchange import row_ops as exchanged

from ..attention.reference import close
from ..examples import few_and_many


def rotated(rank, group, number, examples, device="cpu"):
    """Compare q, k and the projection's gradient for tables with and without a batch axis, with and without xPos."""
    torch.use_deterministic_algorithms(True)
    from lightning_dilated.kernels import rows

    chosen, generator = random.Random(number), torch.Generator(device).manual_seed(number)
    for _ in range(examples):
        rows.ROTARY_ELEMENTS = chosen.choice([8, 64])
        batch, n, group, kv_heads = (chosen.randint(1, 3) for _ in range(4))
        heads, unrotated = group * kv_heads, chosen.choice([[], [0], [kv_heads - 1], list(range(kv_heads))])
        n, dim = chosen.choice([1, n * 7]), 2 * chosen.choice([1, 3, 8, 9])
        positions = torch.randint(
            0, 500, (batch, n) if chosen.random() < 0.5 else (n,), generator=generator, device=device
        )
        table = Rotary(dim, 10000.0, chosen.choice([None, 512.0]))(positions)
        flat = torch.randn(batch, n, (heads + kv_heads) * dim + 3, generator=generator, device=device)
        joint = flat[..., : (heads + kv_heads) * dim].unflatten(-1, (-1, dim)).requires_grad_()
        tensors = table.cos, table.sin, table.scale
        got = turn(joint, *tensors, heads, unrotated)
        want = rotate(joint[:, :, :heads], joint[:, :, heads:], *tensors, unrotated)
        grads = [
            torch.randn(x.shape, generator=generator, device=device).transpose(1, 2).contiguous().transpose(1, 2)
            for x in got
        ]
        pairs = list(zip(got, want, strict=True))
        pairs.append([torch.autograd.grad(x, joint, grads)[0] for x in (got, want)])
        for a, b in pairs:
            close(f"{tuple(joint.shape)}, {heads} heads", a, b, 1e-6, 1.0)


def broadcast(rank, group):
    """Tables for one sample or one token broadcast as in torch, with any strides. Tables of other lengths raise."""
    joint = torch.randn(3, 16, 4, 8)
    for positions in (torch.arange(16)[None], torch.arange(1), torch.arange(16).expand(3, 16)):
        table = Rotary(8)(positions)
        for a, b in zip(
            turn(joint, table.cos, table.sin, None, 3, []), table.rotate(*joint.split((3, 1), 2)), strict=True
        ):
            close(str(tuple(positions.shape)), a, b, 1e-6, 1.0)
    table, turned_over = Rotary(8)(torch.arange(16)), torch.randn(3, 16, 8, 4).transpose(2, 3)
    for a, b in zip(
        turn(turned_over, table.cos, table.sin, None, 3, []), table.rotate(*turned_over.split((3, 1), 2)), strict=True
    ):
        close("columns apart", a, b, 1e-6, 1.0)
    for wrong in (32, 15):
        table = Rotary(8)(torch.arange(wrong))
        with pytest.raises(RuntimeError, match="expanded size"):
            turn(joint, table.cos, table.sin, None, 3, [])


def test_tables_of_other_shapes(interpreter):
    interpreter.run(1, broadcast)


def packed(rank, group, number, examples, device="cpu"):
    """Copy rows of views of one projection to arbitrary positions, or one after another."""
    torch.use_deterministic_algorithms(True)
    from lightning_dilated.kernels import rows as kernel

    chosen, generator = random.Random(number), torch.Generator(device).manual_seed(number)
    for _ in range(examples):
        kernel.ELEMENTS = chosen.choice([16, 64])
        batch, n, heads = (chosen.randint(1, most) for most in (3, 9, 3))
        dim = chosen.choice([3, 8, 20])
        dtype = chosen.choice([torch.float32, torch.float16, torch.bfloat16])
        a, b = torch.randn(batch, n, 2 * heads, dim, generator=generator, device=device).to(dtype).split(heads, 2)
        rows = torch.randint(0, batch * n * heads, (chosen.randint(0, 40),), generator=generator, device=device)
        want = torch.stack([x.reshape(-1, dim)[rows] for x in (a, b)], 1)
        assert exchanged._kernel_takes_both(a, b)
        assert torch.equal(exchanged.pair(a, b, rows), want)
        at, buffer = (
            torch.randperm(len(rows) + 5, generator=generator, device=device)[: len(rows)],
            a.new_zeros(len(rows) + 5, 2, dim),
        )
        exchanged.pack_rows(a, b, rows, at, buffer)
        assert torch.equal(buffer[at], want)
        assert int(buffer.flatten(1).any(1).sum()) <= len(rows)  # no other memory was written


def moved(rank, group, number, examples, device="cpu"):
    """Gather rows with any strides, split them, add them at repeated and at unique indices, and merge them."""
    from lightning_dilated.kernels import rows as kernel

    before, exchanged.MIN_KERNEL_ROWS = (exchanged.MIN_KERNEL_ROWS, kernel.ELEMENTS), 1
    try:
        move(number, examples, device)
    finally:
        exchanged.MIN_KERNEL_ROWS, kernel.ELEMENTS = before


def move(number, examples, device):
    from lightning_dilated.attention.executors import remote as rowwise
    from lightning_dilated.kernels import rows as kernel

    chosen, generator = random.Random(number), torch.Generator(device).manual_seed(number)
    torch.use_deterministic_algorithms(False)  # else torch, not the kernel, adds at repeated indices
    normal = lambda *shape: torch.randn(*shape, generator=generator, device=device)  # noqa: E731
    for _ in range(examples):
        kernel.ELEMENTS = chosen.choice([16, 64] if device == "cpu" else [64, 2048])
        large = device != "cpu" and kernel.ELEMENTS == 2048  # the default size
        batch, n, heads = (chosen.randint(1, most) for most in ((3, 50000, 3) if large else (3, 9, 3)))
        dim = chosen.choice([64, 128] if large else [1, 3, 8])
        dtype, total = chosen.choice([torch.float32, torch.bfloat16]), batch * n * heads
        groups = chosen.randint(1, 2)
        some_rows = chosen.randint(1, 2 * total if large else 20)
        numbers = torch.randint(0, total, (groups, some_rows), generator=generator, device=device)
        x = normal(batch, heads, n, 2 * dim)[..., :dim].to(dtype).transpose(1, 2)
        assert torch.equal(exchanged.take(x, numbers), x.reshape(-1, dim)[numbers])
        store = normal(total, 2, dim).to(dtype)
        for i, half in enumerate(exchanged.take_apart(store, numbers)):
            assert torch.equal(half, store[:, i][numbers])
            assert half.is_contiguous() or not kernels.available(half.device)
        once = torch.randperm(total, generator=generator, device=device)[: total - total % groups].view(groups, -1)
        for rows, distinct in ((numbers, False), (once, False), (once, True)):
            parts = [normal(groups, rows.shape[1], 2, dim).to(dtype)[:, :, i] for i in range(2)]
            for source, shape in ((parts, (total, 2, dim)), (parts[:1], (total, dim))):
                got = normal(*shape)
                want, given_once = got.double(), got.clone()
                wide = torch.stack([p.double() for p in source], 2) if len(source) == 2 else source[0].double()
                want.index_add_(0, rows.flatten(), wide.flatten(0, 1))
                exchanged.add_at(got, rows, source, distinct)
                close(f"{tuple(rows.shape)}, distinct {distinct}", got, want.float(), 1e-6, 1.0)
                assert torch.equal(got, given_once) == (not rows.numel())
        merged(rowwise.merge_rows, once, normal, (batch, n, heads, dim), dtype)


def merged(merge_rows, rows, normal, shape, dtype):
    """Compare with the sums written out in fp64, including rows that had no key before."""
    batch, n, heads, dim = shape
    out, lse = normal(*shape), normal(batch, heads, n) * 3
    out[:, :1], lse[:, :, :1] = 0, -torch.inf
    part, part_lse = normal(*rows.shape, dim + 1)[..., :dim].to(dtype), normal(*rows.shape) * 3
    part_lse[:, ::3] = -torch.inf  # some of them where the running result has no key either
    before = lse.transpose(1, 2).reshape(-1).double()
    weights = [before.exp(), torch.zeros_like(before)]
    weights[1][rows.flatten()] = part_lse.flatten().double().exp()
    coming = torch.zeros(len(before), dim, dtype=torch.float64, device=out.device)
    coming[rows.flatten()] = part.flatten(0, 1).double()
    total = sum(weights)
    want = (out.reshape(-1, dim).double() * weights[0][:, None] + coming * weights[1][:, None]) / total[:, None]
    reached = total > 0
    merge_rows(rows, part, part_lse, out, lse)
    close("merged", out.view(-1, dim)[reached], want[reached].float(), 1e-5, 1.0)
    close("log-sum-exp", lse.transpose(1, 2).reshape(-1)[reached], total[reached].log().float(), 1e-5, 1.0)
    assert not out.view(-1, dim)[~reached].any()
    assert (lse.transpose(1, 2).reshape(-1)[~reached] == -torch.inf).all()


RANDOM = {rotated: (12, 150), packed: (15, 200), moved: (8, 100)}


@pytest.mark.parametrize("calls, number, examples", few_and_many(RANDOM))
def test_random(interpreter, calls, number, examples):
    interpreter.run(1, calls, number, examples)


@pytest.mark.gpu
@pytest.mark.parametrize("calls", RANDOM)
def test_random_on_a_gpu(calls):
    calls(0, None, 2, 20, "cuda")


def test_moved_without_kernels():
    moved(0, None, 3, 20)
