"""Masking: the shares, whole spans, parts of a sequence, and errors."""

import pytest
import torch

from lightning_dilated.ext.masked.mlm import Masking

N, B, V = 20000, 3, 11
TOKENS = torch.randint(V, (B, N), generator=torch.Generator().manual_seed(0))
INDEX = torch.tensor([5, 0, 10**12])


def masking(**changes):
    plain = {"fraction": 0.15, "span": 1, "keep": 0.1, "random": 0.1, "mask_token": V, "vocab_size": V}
    return Masking(**{**plain, **changes})


def apply(masker, tokens=TOKENS, stream=(1, 7), index=INDEX, positions=None, lengths=None):
    positions = torch.arange(tokens.shape[1]) if positions is None else positions
    return masker.apply(tokens, stream, index, positions, lengths)


def runs(chosen):
    """Return the lengths of the runs of masked tokens in a row."""
    edges = torch.diff(
        chosen.int(), prepend=torch.zeros(1, dtype=torch.int32), append=torch.zeros(1, dtype=torch.int32)
    )
    return (edges == -1).nonzero()[:, 0] - (edges == 1).nonzero()[:, 0]


@pytest.mark.parametrize("span", [1, 2.5, 8])
@pytest.mark.parametrize("fraction", [0.15, 0.5])
def test_shares(fraction, span):
    """Shares are right within 5 standard deviations, which assume that each span is an independent draw."""
    inputs, chosen = apply(masking(fraction=fraction, span=span))
    within = lambda p, n: pytest.approx(p, abs=5 * (p * (1 - p) * 2 * span / n) ** 0.5)  # noqa: E731
    assert chosen.float().mean().item() == within(fraction, B * N)
    n = int(chosen.sum())
    hidden, unchanged = inputs == V, chosen & (inputs == TOKENS)
    assert not (hidden & ~chosen).any() and torch.equal(inputs[~chosen], TOKENS[~chosen])
    assert hidden.sum().item() / n == within(0.8, n)
    assert unchanged.sum().item() / n == within(0.1 + 0.1 / V, n)  # a random token may equal the original
    lengths = torch.cat([runs(row) for row in chosen]).double()
    assert lengths.mean().item() == pytest.approx(span / (1 - fraction), rel=0.1)


def test_random_tokens_are_uniform():
    inputs, chosen = apply(masking(random=1.0, keep=0.0, fraction=0.9, never=(4,)))
    assert not (chosen & (TOKENS == 4)).any() and not (inputs[chosen] == 4).any()
    share = torch.bincount(inputs[chosen], minlength=V).double() / int(chosen.sum())
    assert share[4] == 0 and ((share[torch.arange(V) != 4] - 1 / (V - 1)).abs() < 0.01).all()


@pytest.mark.parametrize("span", [1, 3])
@pytest.mark.parametrize("cut", ["contiguous", "strided", "backwards"])
def test_any_part_of_a_sequence_knows_its_own_masks(span, cut):
    masker = masking(span=span, never=(2,))
    whole = apply(masker)
    at = {
        "contiguous": torch.arange(7001, 12345),
        "strided": torch.arange(3, N, 4),
        "backwards": torch.arange(N).flip(0),
    }
    part = apply(masker, TOKENS[1:2, at[cut]], index=INDEX[1:2], positions=at[cut])
    for got, want in zip(part, whole, strict=True):
        assert torch.equal(got, want[1:2, at[cut]])


@pytest.mark.parametrize("span", [1, 3])
def test_uses_differ(span):
    """Masks with another step, seed or sample overlap like independent masks."""
    _, want = apply(masking(span=span))
    masks = [apply(masking(span=span), stream=(1, 8)), apply(masking(span=span), stream=(0, 7))]
    masks += [apply(masking(span=span, seed=1)), apply(masking(span=span), index=INDEX + 1)]
    for _, chosen in masks:
        assert (chosen & want).float().mean().item() == pytest.approx(0.15**2, rel=0.2)
    rows = apply(masking(span=span))[1]
    assert (rows[0] & rows[1]).float().mean().item() == pytest.approx(0.15**2, rel=0.3)


def test_padding_is_never_masked():
    lengths = torch.tensor([N, 100, 0])
    _, chosen = apply(masking(fraction=0.5), lengths=lengths)
    assert not chosen[torch.arange(N) >= lengths[:, None]].any() and chosen[0].any() and chosen[1].any()
    assert torch.equal(chosen[1, :100], apply(masking(fraction=0.5))[1][1, :100])


REFUSED = {
    "nothing": ({"fraction": 0}, "mask_fraction must be a number in"),
    "everything": ({"fraction": 1.0}, r"mask_fraction must be a number in \(0, 1\)"),
    "text": ({"fraction": "0.1"}, "mask_fraction must be a number, got '0.1'"),
    "negative": ({"keep": -0.1}, "keep_fraction must be a number in"),
    "too much": ({"keep": 0.6, "random": 0.6}, "add up to more than 1"),
    "span": ({"span": 0.5}, "mask_span must be a number in"),
    "nan": ({"span": float("nan")}, "mask_span must be a number in"),
    "no token left": ({"never": tuple(range(V))}, "leaves none of the 11 tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    changes, says = REFUSED[name]
    with pytest.raises(TypeError if name == "text" else ValueError, match=says):
        masking(**changes)
