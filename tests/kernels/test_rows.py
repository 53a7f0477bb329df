"""Kernels that move or turn rows, in the interpreter and on a GPU: to the bit, or to rounding, what plain torch gives."""

import random

import pytest
import torch

from lightning_dilated.attention.rotary import Rotary
from lightning_dilated.attention.turn import rotate, turn
from lightning_dilated.sequence.exchange import rows as exchanged

from ..attention.reference import close


def turned(rank, group, number, examples, device="cpu"):
    """q and k and the gradient of the projection, for tables with and without a batch, with xPos and without."""
    torch.use_deterministic_algorithms(True)
    from lightning_dilated.kernels import rotary

    chosen, made = random.Random(number), torch.Generator(device).manual_seed(number)
    for _ in range(examples):
        rotary.ELEMENTS = chosen.choice([8, 64])
        batch, n, heads, kv_heads = (chosen.randint(1, 3) for _ in range(4))
        n, dim = chosen.choice([1, n * 7]), 2 * chosen.choice([1, 3, 8, 9])
        positions = torch.randint(0, 500, (batch, n) if chosen.random() < 0.5 else (n,), generator=made, device=device)
        table = Rotary(dim, 10000.0, chosen.choice([None, 512.0]))(positions)
        flat = torch.randn(batch, n, (heads + kv_heads) * dim + 3, generator=made, device=device)
        joint = flat[..., : (heads + kv_heads) * dim].unflatten(-1, (-1, dim)).requires_grad_()
        given = table.cos, table.sin, table.scale
        got = turn(joint, *given, heads)
        want = rotate(joint[:, :, :heads], joint[:, :, heads:], *given)
        grads = [
            torch.randn(x.shape, generator=made, device=device).transpose(1, 2).contiguous().transpose(1, 2)
            for x in got
        ]
        pairs = list(zip(got, want, strict=True))
        pairs.append([torch.autograd.grad(x, joint, grads)[0] for x in (got, want)])
        for a, b in pairs:
            close(f"{tuple(joint.shape)}, {heads} heads", a, b, 1e-6, 1.0)


def broadcast(rank, group):
    """Tables of one sample or one token, as torch broadcasts them; a table of another length is refused; any strides."""
    joint = torch.randn(3, 16, 4, 8)
    for positions in (torch.arange(16)[None], torch.arange(1), torch.arange(16).expand(3, 16)):
        table = Rotary(8)(positions)
        for a, b in zip(turn(joint, table.cos, table.sin, None, 3), table.rotate(*joint.split((3, 1), 2)), strict=True):
            close(str(tuple(positions.shape)), a, b, 1e-6, 1.0)
    table, turned_over = Rotary(8)(torch.arange(16)), torch.randn(3, 16, 8, 4).transpose(2, 3)
    for a, b in zip(
        turn(turned_over, table.cos, table.sin, None, 3), table.rotate(*turned_over.split((3, 1), 2)), strict=True
    ):
        close("columns apart", a, b, 1e-6, 1.0)
    for wrong in (32, 15):
        table = Rotary(8)(torch.arange(wrong))
        with pytest.raises(RuntimeError, match="expanded size"):
            turn(joint, table.cos, table.sin, None, 3)


def test_tables_of_other_shapes(interpreter):
    interpreter.run(1, broadcast)


@pytest.mark.parametrize("number, examples", [(0, 12), pytest.param(1, 150, marks=pytest.mark.slow)])
def test_turn(interpreter, number, examples):
    interpreter.run(1, turned, number, examples)


@pytest.mark.gpu
def test_turn_on_a_gpu():
    turned(0, None, 2, 20, "cuda")


def packed(rank, group, number, examples, device="cpu"):
    """Rows of views of one projection, to given places and one after another."""
    torch.use_deterministic_algorithms(True)
    from lightning_dilated.kernels import rows as kernel

    chosen, made = random.Random(number), torch.Generator(device).manual_seed(number)
    for _ in range(examples):
        kernel.ELEMENTS = chosen.choice([16, 64])
        batch, n, heads = (chosen.randint(1, most) for most in (3, 9, 3))
        dim = chosen.choice([3, 8, 20])
        dtype = chosen.choice([torch.float32, torch.float16, torch.bfloat16])
        a, b = torch.randn(batch, n, 2 * heads, dim, generator=made, device=device).to(dtype).split(heads, 2)
        rows = torch.randint(0, batch * n * heads, (chosen.randint(0, 40),), generator=made, device=device)
        want = torch.stack([x.reshape(-1, dim)[rows] for x in (a, b)], 1)
        assert exchanged._packs(a, b)
        assert torch.equal(exchanged.pair(a, b, rows), want)
        at, buffer = (
            torch.randperm(len(rows) + 5, generator=made, device=device)[: len(rows)],
            a.new_zeros(len(rows) + 5, 2, dim),
        )
        exchanged.pack_rows(a, b, rows, at, buffer)
        assert torch.equal(buffer[at], want)
        assert int(buffer.flatten(1).any(1).sum()) <= len(rows)  # nothing was written elsewhere


@pytest.mark.parametrize("number, examples", [(0, 15), pytest.param(1, 200, marks=pytest.mark.slow)])
def test_pack(interpreter, number, examples):
    interpreter.run(1, packed, number, examples)


@pytest.mark.gpu
def test_pack_on_a_gpu():
    packed(0, None, 2, 20, "cuda")
