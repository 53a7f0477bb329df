"""Packed batches under the strategies: training and validation on two ranks have the same results as on one."""

import functools
import itertools

import lightning.pytorch as pl
import pytest
import torch

from lightning_dilated import DilatedPattern, LongNetLM, RingDilatedStrategy, SequenceSpec, SlideEncoder
from lightning_dilated.data import ByteDataModule, SlideDataModule, write_synthetic_slides
from lightning_dilated.data.packing import PackedSamples, PackingSampler
from lightning_dilated.ext.profiling.first_batch import _first_documents
from lightning_dilated.ext.slides.module import collate_slides

from ..ext.slides.slides import SIZES
from .runs import Record, launched, trainer

pytestmark = pytest.mark.full

PATTERN = DilatedPattern.longnet([4, 8, 32], [1, 2, 4])
SPLITS = {"val_fraction": 0.4, "test_fraction": 0}
SGD = functools.partial(torch.optim.SGD, lr=0.1)


def setup(kind, folder, **packing):
    """Return (model, data). The weights are the same in every call."""
    pl.seed_everything(4, verbose=False)
    if kind == "slides":
        sizes = {**SIZES, "feature_dim": 4, "grid": 32, "task": "classification", "num_classes": 3, "optimizer": SGD}
        model = SlideEncoder(**sizes)
        data = SlideDataModule(f"{folder}/slides", f"{folder}/slides/labels.csv", **SPLITS, **packing)
    else:
        model = LongNetLM(PATTERN, dim=16, depth=2, kv_conv=4, optimizer=SGD)
        data = ByteDataModule(f"{folder}/texts", seq_len=40, **SPLITS, **packing)
    model.configure_model()
    return model, data


def fit(rank, group, kind, folder, packing, sequence_size):
    """Return (losses, weights, validation metrics) of a fit of two epochs."""
    model, data = setup(kind, folder, **packing)
    record, strategy = Record(), RingDilatedStrategy(sequence_size=sequence_size, check_first_batch=True)
    built = trainer(
        strategy, launched(rank), max_epochs=2, precision="64-true", callbacks=[record], num_sanity_val_steps=0
    )
    built.fit(model, data)
    metrics = {name: float(x) for name, x in built.callback_metrics.items() if name.startswith("val")}
    return record.losses, {name: p.detach().clone() for name, p in model.named_parameters()}, metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("packed")
    write_synthetic_slides(path / "slides", slides=20, tiles=(3, 30), features=4, classes=3)
    (path / "texts").mkdir()
    for i, size in enumerate((30, 61, 7, 40, 2, 25, 90, 33, 11, 50, 64, 20)):
        (path / "texts" / f"{i:02}.txt").write_bytes(bytes((7 * i + 3 * j * j) % 256 for j in range(size)))
    return str(path)


def same(results, want):
    losses, weights, metrics = want
    for got in results:
        torch.testing.assert_close(got[0], losses, rtol=1e-6, atol=1e-6)  # Lightning logs in fp32
        for name, value in weights.items():
            torch.testing.assert_close(got[1][name], value, rtol=0, atol=1e-10)
        assert got[2] == pytest.approx(metrics, rel=1e-6)


@pytest.mark.parametrize("kind", ["slides", "text"])
def test_ranks_that_share_a_row(pools, folder, kind):
    options = kind, folder, {"pack_tokens": 64}, "auto"
    (want,) = pools(1).run(1, fit, *options)
    assert len(want[0]) > 4
    same(pools(2).run(2, fit, *options), want)


def test_two_data_ranks_are_one_padded_batch(pools, folder):
    """A step is the mean over all slides in the packs of both ranks. A validation counts each slide once."""
    results = pools(2).run(2, fit, "slides", folder, {"pack_tokens": 64}, 1)
    model, data = setup("slides", folder)
    model.double()
    optimizer, losses = SGD(model.parameters()), []
    dataset = data.dataset("train")
    for epoch in range(2):
        sampler = PackingSampler(PackedSamples(dataset, 64), seed=data.seed)
        sampler.restore(epoch, 0)
        packs = list(sampler)
        for a, b in zip(packs[::2], packs[1::2], strict=False):
            batch = collate_slides([dataset[i] for i in (*a, *b)])
            total, count = model.loss_terms({**batch, "features": batch["features"].double()})
            optimizer.zero_grad()
            (total / count).backward()
            optimizer.step()
            losses.append(float(total / count))
    model.eval()
    samples = [data.dataset("val")[i] for i in range(len(data.dataset("val")))]
    with torch.no_grad():
        val = [
            model.loss_terms({**b, "features": b["features"].double()})
            for b in map(collate_slides, zip(samples, strict=True))
        ]
    val_loss = float(sum(x for x, _ in val) / len(val))
    for all_losses, weights, metrics in results:
        assert all_losses == pytest.approx(losses, rel=1e-6)
        assert metrics["val_loss"] == pytest.approx(val_loss, rel=1e-6)
        for name, p in model.named_parameters():
            torch.testing.assert_close(weights[name], p.detach(), rtol=0, atol=1e-10)


def validated(rank, group, folder, packing):
    model, data = setup("slides", folder, **packing)
    built = trainer(RingDilatedStrategy(sequence_size=1), launched(rank), precision="64-true")
    built.validate(model, data, verbose=False)
    return {name: float(x) for name, x in built.callback_metrics.items()}


def test_metrics_of_an_epoch(pools, folder):
    """Metrics of an epoch, such as AUROC, are right if ranks have different numbers of packs."""
    (want,) = pools(1).run(1, validated, folder, {"batch_size": 3})
    for metrics in pools(2).run(2, validated, folder, {"pack_tokens": 40}):
        assert metrics == pytest.approx(want, rel=1e-6)
    assert "val_auroc" in want


def test_the_head_of_a_batch_keeps_whole_entries_in_step():
    spec = SequenceSpec({"tokens": 1}, whole=["cu_seqlens", "label", "slide_id"])
    bounds = torch.tensor([0, 4, 9, 20], dtype=torch.int32)
    for length, count, end in ((20, 3, 20), (12, 3, 12), (10, 2, 9), (9, 2, 9), (6, 2, 6)):
        head = {
            "tokens": torch.arange(length)[None],
            "cu_seqlens": bounds,
            "label": torch.arange(3),
            "slide_id": list("abc"),
        }
        out = _first_documents(head, spec, length)
        assert out["tokens"].shape[1] == end == out["cu_seqlens"][-1] and len(out["cu_seqlens"]) == count + 1
        assert all(b - a > 1 for a, b in itertools.pairwise(out["cu_seqlens"].tolist()))
        assert len(out["label"]) == len(out["slide_id"]) == count
