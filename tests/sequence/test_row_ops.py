"""Operations on rows of tensors, addressed by row number, for any strides."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dilated.sequence.exchange.row_ops import Rows, add_rows

STRIDES = {
    "tokens first": lambda x: x.contiguous(),
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "apart": lambda x: x.repeat_interleave(2, 1)[:, ::2],
}


@given(st.data(), st.integers(1, 2), st.integers(1, 4), st.integers(1, 3), st.sampled_from([(), (1,), (4,)]))
def test_taken_and_put(data, batch, length, heads, rest):
    count = batch * length * heads
    flat = torch.tensor(data.draw(st.lists(st.integers(0, count - 1), unique=True)), dtype=torch.int64)
    rows, whole = (
        Rows.of(flat, length, heads),
        torch.arange(float(count * (rest or (1,))[0])).reshape(batch, length, heads, *rest),
    )
    for restride in STRIDES.values():
        x, want = restride(whole.clone()), whole.flatten(0, 2)[flat]
        assert torch.equal(rows.take(x), want)
        rows.put(x, want.double() + 0.5)
        written = whole.clone().flatten(0, 2)
        written[flat] += 0.5
        assert torch.equal(x, written.view_as(whole))
        if rest:
            add_rows(rows, x, torch.full(want.shape, 0.25, dtype=torch.float64))
            assert torch.equal(x.flatten(0, 2)[flat], want + 0.75)
