"""The warning about walls or dead residues at the start of a fit: once, with a fix, and only if the pattern has any."""

import warnings

import pytest
import torch

from lightning_dilated import DilatedPattern, LongNetClassifier, LongNetLM, LongNetMLM

from . import SIZES, batch, loader, trainer
from .test_module import Line, points

FINE = DilatedPattern.longnet([4, 40], [1, 2])
WALLS = DilatedPattern.longnet([4, 16], [1, 2])
MANY = DilatedPattern.longnet([4, 40, 40, 80], [1, 8, 16, 20])
DEAD = DilatedPattern.longnet([4, 40], [1, 8])


def warned(model, *batches, epochs=1):
    """Return the warnings about the pattern in a fit."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(max_epochs=epochs).fit(model, loader(*batches))
    return [str(w.message) for w in caught if "pattern" in str(w.message)]


def shifted(pattern, **sizes):
    """Build a LongNetLM in which every other layer is shifted."""
    return LongNetLM(pattern, shift_layers="odd", **{**sizes, "depth": 2})


def convolving(pattern, **sizes):
    """Build a LongNetLM with a short convolution of keys and values."""
    return LongNetLM(pattern, kv_conv=4, **sizes)


CASES = {
    "fine": (LongNetLM, FINE, {}, None),
    "walls": (
        LongNetLM,
        WALLS,
        {},
        "2 wall(s): attention never crosses position 16, 32, ... at any depth. Add a branch",
    ),
    "walls, kv_conv": (convolving, WALLS, {}, "Only kv_conv=4 carries 3 token(s) over a wall, in each layer."),
    "walls, both directions": (LongNetMLM, WALLS, {}, "LongNetMLM.pattern at 40 tokens: 2 wall(s)"),
    "dead": (LongNetLM, DEAD, {}, "branches[1] leaves 4 of 8 residues to no head. Use a dilation rate of at most"),
    "dead in many": (
        LongNetLM,
        MANY,
        {},
        "branches[1] leaves 4 of 8 residues to no head. Use a dilation rate of at most the "
        "number of heads it serves. Likewise residues of 2 more branches.",
    ),
    "shifted walls": (shifted, WALLS, {}, "at 40 tokens: from a distance of 8 tokens on, one layer shows a query none"),
    "shifted dead": (shifted, DEAD, {}, "leaves 4 of 8"),
    "short documents": (LongNetLM, WALLS, {"cu_seqlens": torch.tensor([0, 16, 30, 40], dtype=torch.int32)}, None),
    "short lengths": (LongNetLM, WALLS, {"lengths": torch.tensor([16])}, None),
    "long lengths": (LongNetLM, WALLS, {"lengths": torch.tensor([17])}, "at 17 tokens: 1 wall(s)"),
}


@pytest.mark.parametrize("name", CASES)
def test_one_line(name):
    cls, pattern, extra, says = CASES[name]
    data = {**batch(1, 40), "index": torch.tensor([0]), **extra}
    if "lengths" in extra:
        data["labels"][:, int(extra["lengths"]) :] = -100
    texts = warned(cls(pattern, **SIZES), data, data, epochs=2)
    assert (texts == []) if says is None else (len(texts) == 1 and says in texts[0] and "\n" not in texts[0]), texts


def test_a_longer_batch_is_looked_at():
    messages = warned(LongNetLM(WALLS, **SIZES), batch(1, 16), batch(1, 40), batch(1, 50))
    assert len(messages) == 1 and "at 40 tokens" in messages[0]


@pytest.mark.parametrize("cls", [LongNetLM, LongNetMLM, LongNetClassifier])
def test_longer_than_max_seq_len(cls):
    """The first batch longer than max_seq_len warns once, even after a warning about a shorter batch."""
    sizes = {**SIZES, "vocab_size": 11}
    model = cls(
        WALLS, max_seq_len=20, rotary_base=10000, **sizes, **({"num_classes": 2} if cls is LongNetClassifier else {})
    )
    data = [batch(1, n) | {"label": torch.tensor([1]), "index": torch.tensor([0])} for n in (17, 20, 21, 40)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(max_epochs=2).fit(model, loader(*data))
    said = [str(w.message) for w in caught if "max_seq_len" in str(w.message)]
    assert (
        len(said) == 1
        and f"{cls.__name__} is made for max_seq_len=20, but trains on a sequence of 21 tokens" in said[0]
    )
    assert "Set the model's max_seq_len to 21 or more" in said[0]


def test_not_longer_than_max_seq_len():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(max_epochs=1).fit(LongNetLM(FINE, max_seq_len=40, **SIZES), loader(batch(1, 40)))
    assert not [w for w in caught if "max_seq_len" in str(w.message)]


def test_a_module_without_a_pattern_says_nothing():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(max_epochs=1).fit(Line(), points(32))
    assert not [w for w in caught if "pattern" in str(w.message)]
