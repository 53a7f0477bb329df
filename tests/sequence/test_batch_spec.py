"""SequenceSpec splits batches among ranks and joins them again. An undeclared entry is an error."""

from collections import namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dilated.sequence import Place, SequenceSpec
from lightning_dilated.sequence.shard import LAYOUTS

SPEC = SequenceSpec({"tokens": 1, "features": -2}, whole=["index"])


@given(st.integers(0, 20), st.integers(1, 5), st.sampled_from(LAYOUTS), st.integers(1, 25))
def test_parts_make_the_whole(n, ranks, layout, stream):
    batch = {"tokens": torch.arange(2 * n).view(2, n), "features": torch.randn(2, n, 3), "index": [4, 5]}
    places = [Place(ranks, rank, layout, stream if layout == "chunked" else None) for rank in range(ranks)]
    parts = [SPEC.cut(batch, place) for place in places]
    order = torch.tensor([p for place in places for r in place.ranges(n) for p in r], dtype=torch.int64)
    for name, dim in (("tokens", 1), ("features", 1)):
        assert torch.equal(torch.cat([p[name] for p in parts], dim)[:, order.argsort()], batch[name])
    assert all(p["index"] == [4, 5] for p in parts)
    for part in parts:  # each part has its own storage: a worker process sends whole storages
        assert part["tokens"].untyped_storage().nbytes() == part["tokens"].numel() * 8


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_part_is_a_copy(ranks):
    """A part is a copy on any number of ranks: loaders may reuse their memory, and a step may change its batch."""
    signs = torch.view_as_complex(torch.ones(2, 4, 2)).conj()
    entries = [torch.ones(2, 4), torch.ones(4, 2).t(), torch.arange(4.0)[:2, None].expand(2, 4), signs, signs.imag]
    for x in entries:
        part = SPEC.cut({"tokens": x}, Place(ranks, 0))["tokens"]
        assert torch.equal(part, x[:, : 4 // ranks]) and part.is_contiguous()
        assert not part.is_conj() and not part.is_neg()
        assert part.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.gpu
def test_what_is_page_locked_is_not_copied():
    """Pinned memory is not copied, unless a part belongs to a larger storage, or two ranks share the entry."""
    whole = torch.arange(8).view(2, 4).pin_memory()
    for layout in LAYOUTS:
        place = Place(1, 0, layout, 4 if layout == "chunked" else None)
        assert SPEC.cut({"tokens": whole}, place)["tokens"] is whole
        part = SPEC.cut({"tokens": whole[:1]}, place)["tokens"]
        assert torch.equal(part, whole[:1]) and part.untyped_storage().nbytes() == 32
        assert SPEC.cut({"tokens": whole}, Place(2, 0))["tokens"].tolist() == [[0, 1], [4, 5]]


def test_tuples():
    Pair = namedtuple("Pair", "x y")
    x, y = torch.arange(6).view(1, 6), torch.tensor([1])
    spec = SequenceSpec({0: 1}, whole=[1])
    for batch in ((x, y), [x, y], Pair(x, y)):
        got = spec.cut(batch, Place(2, 1))
        assert type(got) is type(batch) and got[0].tolist() == [[3, 4, 5]] and got[1] is y


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shift_is_global(ranks):
    tokens = torch.arange(1, 9).view(1, 8)
    spec = SequenceSpec({"tokens": 1, "labels": 1}, whole=["lengths", "cu_seqlens"], shift={"labels": -100})

    def labels(**options):
        batch = {"tokens": tokens, "labels": tokens, **options}
        return torch.cat([spec.cut(batch, Place(ranks, r))["labels"] for r in range(ranks)], 1)[0].tolist()

    assert labels() == [2, 3, 4, 5, 6, 7, 8, -100]
    assert labels(lengths=torch.tensor([6])) == [2, 3, 4, 5, 6, -100, -100, -100]
    cuts = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    assert labels(cu_seqlens=cuts) == [2, 3, -100, 5, 6, 7, 8, -100]


@pytest.mark.parametrize(
    "batch, text",
    [
        (
            {"tokens": torch.zeros(1, 4), "mask": torch.zeros(1, 4)},
            r"the batch holds \['mask'\], which the sequence_spec",
        ),
        ({"index": 3}, "the batch holds none of"),
        ({"tokens": torch.zeros(1, 4), "features": torch.zeros(1, 5, 2)}, "different numbers of tokens"),
        ({"tokens": torch.zeros(4)}, "should be a tensor with dimension 1"),
        ({"tokens": [1, 2]}, "should be a tensor with dimension 1, got list"),
        (torch.zeros(1, 4), "must be a mapping or a tuple"),
    ],
)
def test_ambiguous_batches(batch, text):
    with pytest.raises(ValueError, match=text):
        SPEC.cut(batch, Place(2, 0))


@pytest.mark.parametrize(
    "arguments, text",
    [
        (({},), "names no entry"),
        (({"x": "1"},), r"dims\['x'\] must be"),
        (({"x": 1}, ["x"]), "both in dims and in whole"),
        (({"x": 1}, [], {"y": 0}), "shift names"),
    ],
)
def test_wrong_specs(arguments, text):
    with pytest.raises((ValueError, TypeError), match=text):
        SequenceSpec(*arguments)
