"""Work of blocks without compilation, counted by hand: bytes of operators, and products that FLOPs limit."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from lightning_dilated.ext.planning.counting.dry_run import RIDGE, TOKENS, Work, WorkTape

pytestmark = pytest.mark.full
PART = ("forward", 1)


def work_of(run, *shapes):
    with FakeTensorMode():
        tensors = [torch.zeros(*shape) for shape in shapes]
        tape = WorkTape()
        with tape:
            tape.enter(*PART)
            run(*tensors)
    return tape.work(PART)


ELEMENT = 4


@pytest.mark.parametrize("run, passes", [
    (lambda x: x * 2, 2),
    (lambda x: x.view(-1, 2).transpose(0, 1), 0),
    (lambda x: x.t().contiguous(), 2),
    (lambda x: x.add_(x), 3),
    (lambda x: torch.empty_like(x), 0),
    (lambda x: torch.zeros_like(x), 2),
    (lambda x: x.bfloat16(), 1.5),
    (lambda x: (x * 2).sin(), 4),
])  # fmt: skip
def test_passes(run, passes):
    assert work_of(run, (TOKENS, 8)) == Work(0, passes * 8 * ELEMENT)


def test_products():
    """Products of wide matrices count by their FLOPs. Narrow products with an adapter count by the bytes they move."""
    assert work_of(lambda x, w: x @ w, (TOKENS, 2048), (2048, 1024)) == Work(2 * 2048 * 1024, 0)
    narrow = work_of(lambda x, w: x @ w, (TOKENS, 2048), (2048, 16))
    assert narrow == Work(0, ELEMENT * (2048 + 16 + 2048 * 16 / TOKENS)) and RIDGE * narrow.moved > 2 * 2048 * 16


def test_seconds():
    assert Work(6e12, 8e9).seconds(3e12, 4e9) == 4
