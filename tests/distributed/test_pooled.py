"""Pooled models and slide pretraining on ranks give one rank's loss, gradients and predictions, in any layout."""

import pytest
import torch

from lightning_dilated import LongNetClassifier, LongNetLM, LongNetMLM, SlidePretrainer
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.sequence import Place, loss_share, loss_sum

from ..ext.slides.slides import batch as slide_batch
from ..ext.slides.slides import encoder
from ..models.rows import packed, slides, texts
from .calls import sequence
from .strategies import LAYOUTS

PATTERN = DilatedPattern.longnet([4, 8, 32], [1, 2, 4])
SLIDES = {"task": "classification", "num_classes": 2}
LABELS = torch.tensor([0, 1, 1])


def classifier(**options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        net = LongNetClassifier(PATTERN, dim=16, depth=2, **options)
        net.configure_model()
    return net.double()


def text(cls, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        net = cls(PATTERN, 11, dim=16, depth=2, **options)
        net.configure_model()
    return net.double()


def tokens(kind, *lengths):
    rng, n = torch.Generator().manual_seed(1), max(lengths)
    x = torch.randn(len(lengths), n, 5, generator=rng, dtype=torch.float64)
    x = {"features": x} if kind == "features" else {"tokens": torch.randint(7, x.shape[:2], generator=rng)}
    return {**x, "lengths": torch.tensor(lengths), "label": LABELS[: len(lengths)], "index": torch.arange(len(lengths))}


def unlabelled(*lengths):
    return {name: x for name, x in tokens("tokens", *lengths).items() if name != "label"}


#: functions that return (model, batch); ranks share 41 rows unevenly, and some ranks have no row of the other batches
CASES = {
    "slides, class token": lambda: (encoder(**SLIDES), slide_batch(40, 23, 1)),
    "slides, mean": lambda: (encoder(**SLIDES, pool="mean"), slide_batch(40, 23, 1)),
    "slides, attended": lambda: (encoder(**SLIDES, padding="attended"), slide_batch(37, 30)),
    "slides, drop path": lambda: (encoder(**SLIDES, drop_path=0.6, depth=3, pool="mean"), slide_batch(40, 23, 1)),
    "pretraining": lambda: (encoder(SlidePretrainer, decoder_dim=8), slide_batch(40, 23, 1)),
    "two tiles": lambda: (encoder(**SLIDES), slide_batch(2)),
    "ordinal": lambda: (encoder(task="ordinal", num_classes=3), slide_batch(20, 9)),
    "packed slides, class token": lambda: (encoder(**SLIDES), packed(slides(40, 23, 1))),
    "packed slides, attended, mean": lambda: (
        encoder(**SLIDES, pool="mean", padding="attended"),
        packed(slides(5, 37, 30)),
    ),
    "packed slides, drop path": lambda: (encoder(**SLIDES, drop_path=0.6, depth=3), packed(slides(10, 23, 1, 9))),
    "packed pretraining": lambda: (encoder(SlidePretrainer, decoder_dim=8), packed(slides(40, 23, 1))),
    "packed tokens": lambda: (classifier(vocab_size=11, num_classes=2), packed(texts(37, 12, 3, label=True))),
    "packed text": lambda: (text(LongNetLM), packed(texts(37, 12, 3))),
    "packed masked text": lambda: (text(LongNetMLM, mask_span=3, mask_fraction=0.4), packed(texts(37, 12, 20))),
    "masked text": lambda: (text(LongNetMLM, mask_fraction=0.4, ignore_tokens=[2]), unlabelled(37, 12, 20)),
    "masked spans": lambda: (text(LongNetMLM, mask_span=3, mask_fraction=0.4), unlabelled(37, 37)),
    "features, mean": lambda: (classifier(feature_dim=5, num_classes=2), tokens("features", 37, 12, 3)),
    "tokens, first": lambda: (classifier(vocab_size=7, num_classes=2, pool="first"), tokens("tokens", 37, 12)),
}


def run(model, data, rank=0):
    """Return (loss, predictions, {name: gradient}). Each rank gets a different random state on purpose."""
    torch.manual_seed(7 + rank)
    share = loss_share(*model.loss_terms(data))
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(share, list(named.values()))  # raises if a parameter is unused on a rank
    with torch.no_grad():
        predicted = {} if isinstance(model, SlidePretrainer) else model.eval().predict_step(data, 0)
        return loss_sum(share), predicted, dict(zip(named, grads, strict=True))


def part(rank, group, name, layout):
    model, data = CASES[name]()
    with sequence(group, layout=layout) as ours, ours.active():
        shard = model.sequence_spec.cut(data, Place(ours.ranks, ours.rank, layout))
        return run(model, shard, rank)


@pytest.mark.parametrize(
    "ranks, layout", [pytest.param(2, "contiguous", marks=pytest.mark.slow), *((4, layout) for layout in LAYOUTS)]
)
@pytest.mark.parametrize("name", CASES)
def test_many_ranks_are_one(pool, name, ranks, layout):
    loss, predicted, grads = run(*CASES[name]())
    parts = pool.run(ranks, part, name, layout)
    assert any(g.any() for g in grads.values())
    for outcome in parts:
        torch.testing.assert_close(outcome[0], loss, rtol=1e-12, atol=0)
        for key, value in predicted.items():
            torch.testing.assert_close(outcome[1][key], value, rtol=0, atol=1e-12)
    for key, want in grads.items():
        got = sum(outcome[2][key] for outcome in parts)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-11, msg=lambda m, key=key: f"{key}: {m}")


def refused(rank, group, name):
    """Compute a batch that is wrong only in the part of one rank."""
    model, data = CASES["slides, class token"]()
    if name == "coords":
        data["coords"][0, 35] = 256 * 100
    elif name == "blank":
        data["coords"][:, 0] = 0
    with sequence(group) as ours, ours.active():
        shard = model.sequence_spec.cut(data, Place(ours.ranks, ours.rank))
        if name == "tiles alone":
            model(shard["features"], shard["coords"])
        if name == "attention":
            model.eval().attention_map(shard["features"], shard["coords"])
        model.loss_terms(shard)


SAYS = {"coords": "cells along an axis", "blank": "one blank row in front", "tiles alone": "are encoded on one rank"}
SAYS["attention"] = "attention_map takes whole slides on one rank"


@pytest.mark.parametrize("name", SAYS)
def test_all_ranks_raise(pool, name):
    errors = pool.errors(ValueError, 3, refused, name)
    assert all(SAYS[name] in error for error in errors), errors
