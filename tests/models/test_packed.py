"""Samples packed into one row have the loss, gradients and predictions of the separate samples, in float64."""

import numpy as np
import pytest
import torch

from lightning_dilated import DilatedPattern, LongNetClassifier, LongNetLM, LongNetMLM, SlidePretrainer
from lightning_dilated.data import ByteDataModule, GenomeDataModule
from lightning_dilated.memory.block_memory import set_memory
from lightning_dilated.memory.settings import MemorySettings

from ..ext.slides.slides import batch, encoder
from . import loader, trainer
from .rows import packed, slides, texts

PATTERN = DilatedPattern.longnet([4, 8, 32], [1, 2, 4])
SLIDES = {"task": "classification", "num_classes": 2}


def built(cls, *args, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = cls(*args, dim=16, depth=2, **options)
        model.configure_model()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.05 * torch.randn_like(p))
    return model.double()


def gradients(model, terms):
    """Return (mean loss, {name: gradient}) of a list of (sum, count) pairs."""
    loss = sum(total for total, _ in terms) / sum(int(count) for _, count in terms)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return loss.detach(), dict(zip(named, grads, strict=True))


CASES = {
    "slides, class token": lambda: (encoder(**SLIDES), slides(40, 23, 1)),
    "slides, mean": lambda: (encoder(**SLIDES, pool="mean"), slides(40, 23, 1)),
    "slides, attended": lambda: (encoder(**SLIDES, padding="attended"), slides(37, 30, 5)),
    "slides, attended, mean": lambda: (encoder(**SLIDES, padding="attended", pool="mean"), slides(2, 61)),
    "slides, embeddings": lambda: (encoder(), slides(9, 12)),
    "one slide": lambda: (encoder(**SLIDES), slides(7)),
    "pretraining": lambda: (encoder(SlidePretrainer, decoder_dim=8), slides(40, 23, 1)),
    "regression": lambda: (encoder(task="ordinal", num_classes=3), slides(20, 9)),
    "classifier, mean": lambda: (
        built(LongNetClassifier, PATTERN, vocab_size=11, num_classes=2, kv_conv=3),
        texts(37, 12, 3, 1, label=True),
    ),
    "classifier, first": lambda: (
        built(LongNetClassifier, PATTERN, vocab_size=11, num_classes=2, pool="first"),
        texts(37, 12, label=True),
    ),
    "text": lambda: (built(LongNetLM, PATTERN, 11, kv_conv=4), texts(37, 12, 1, 20)),
    "text, recurrence": lambda: (built(LongNetLM, PATTERN, 11, recurrence={}, num_kv_heads=2), texts(37, 12, 1, 20)),
    "text, delta": lambda: (
        built(LongNetLM, PATTERN, 11, recurrence={"kind": "delta", "segment": 5}),
        texts(37, 12, 9),
    ),
    "classifier, recurrence": lambda: (
        built(LongNetClassifier, PATTERN, vocab_size=11, num_classes=2, recurrence={"kind": "linear", "segment": 5}),
        texts(37, 12, 3, 1, label=True),
    ),
    "masked, recurrence": lambda: (
        built(LongNetMLM, PATTERN, 11, recurrence={"kind": "linear", "segment": 4, "conv": 3}, mask_fraction=0.4),
        texts(37, 12, 2, 20),
    ),
    "text, xpos": lambda: (built(LongNetLM, PATTERN, 11, position_encoding="xpos"), texts(37, 12)),
    "text, shifted": lambda: (built(LongNetLM, PATTERN, 11, shift_layers="odd", num_kv_heads=2), texts(17, 32, 5)),
    "masked": lambda: (built(LongNetMLM, PATTERN, 11, kv_conv=3, mask_fraction=0.4), texts(37, 12, 2, 20)),
    "masked spans": lambda: (built(LongNetMLM, PATTERN, 11, mask_span=3, mask_fraction=0.4), texts(37, 12, 60)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_row_is_its_samples_one_by_one(name):
    model, samples = CASES[name]()
    row = packed(samples)
    if name != "slides, embeddings":
        want_loss, want = gradients(model, [model.loss_terms(s) for s in samples])
        loss, grads = gradients(model, [model.loss_terms(row)])
        torch.testing.assert_close(loss, want_loss, rtol=1e-12, atol=0)
        assert any(g is not None and g.any() for g in grads.values())
        for key, g in want.items():
            torch.testing.assert_close(grads[key], g, rtol=0, atol=1e-11, msg=lambda m, key=key: f"{key}: {m}")
    if not isinstance(model, SlidePretrainer):
        model.eval()
        with torch.no_grad():
            alone = [model.predict_step(s, 0) for s in samples]
            together = model.predict_step(row, 0)
        for key, value in together.items():
            each = torch.cat([x[key] for x in alone])
            torch.testing.assert_close(value, each, rtol=0, atol=1e-11, equal_nan=True)


SIZES = (25, 4, 10, 21, 33, 9, 40, 17)
HELD = {"seq_len": 10, "pack_tokens": 30, "val_fraction": 0.6, "test_fraction": 0}


def genome(folder):
    rng = np.random.default_rng(1)
    records = [f">r{i}\n{''.join(rng.choice(list('ACGT'), n))}\n" for i, n in enumerate(SIZES)]
    (folder / "genome.fa").write_text("".join(records))
    return GenomeDataModule(
        str(folder / "genome.fa"), short="skip", reverse_complement=0.5, cache_dir=str(folder), **HELD
    )


def files_of_bytes(folder):
    rng = np.random.default_rng(1)
    for i, n in enumerate(SIZES):
        (folder / f"{i}.txt").write_bytes(rng.bytes(n))
    return ByteDataModule(str(folder), **HELD)


@pytest.mark.parametrize("cls", [LongNetLM, LongNetMLM])
@pytest.mark.parametrize("make", [genome, files_of_bytes])
def test_metrics_of_a_data_modules_packs(tmp_path, make, cls):
    """In a validation by a Trainer, loss and metrics of packed genomes and bytes equal the separate samples."""
    module = make(tmp_path)
    model, data = built(cls, PATTERN, module.vocab_size), module.dataset("val")
    alone = [
        {k: v[None] if isinstance(v, torch.Tensor) else torch.tensor([v]) for k, v in data[i].items()}
        for i in range(len(data))
    ]
    metrics = []
    for batches in (loader(*alone), module.val_dataloader()):
        validation = trainer(precision="64-true")
        validation.validate(model, batches, verbose=False)
        metrics.append({k: float(v) for k, v in validation.callback_metrics.items()})
    assert 1 < len(batches) < len(alone)
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-6) and len(metrics[0]) == 3
    # an untrained model predicts no byte of 256 correctly
    assert metrics[0]["val_loss"] > 0 and (metrics[0].get("val_accuracy") != 0 or make is files_of_bytes)


def test_stochastic_depth_drops_documents_as_samples():
    model = encoder(**SLIDES, drop_path=0.6, depth=3).train()
    whole = batch(10, 23, 4, 17)
    for memory in (MemorySettings(), MemorySettings(policy="block", tile=8), MemorySettings(head_chunks=2, tile=16)):
        set_memory(model, memory)
        torch.manual_seed(4)
        want_loss, want = gradients(model, [model.loss_terms(whole)])
        torch.manual_seed(4)
        loss, grads = gradients(model, [model.loss_terms(packed(slides(10, 23, 4, 17)))])
        torch.testing.assert_close(loss, want_loss, rtol=1e-12, atol=0)
        for key, g in want.items():
            torch.testing.assert_close(grads[key], g, rtol=0, atol=1e-11)


def test_what_does_not_count_may_be_nan():
    """The mean over tiles ignores the hidden state of the class token, even if it is nan."""
    model, row = encoder(pool="mean"), packed(slides(5, 3))
    documents = model._documents(row)
    x = torch.ones(1, 10, 4)
    x[0, [0, 6]] = torch.nan
    assert torch.equal(documents.mean(x, start=1), torch.ones(2, 4))


def test_documents_of_a_window_stay_one_sample():
    """A row with one number in `index` is one sample, even if it has several documents, as a window of a text may."""
    row = packed(texts(9, 5))
    model = built(LongNetLM, PATTERN, 11).eval()
    with torch.no_grad():
        out = model.predict_step({**row, "index": torch.tensor([3])}, 0)
    assert out["tokens"].tolist() == [12] and out["bits_per_byte"].shape == (1,)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            {"cu_seqlens": torch.tensor([0, 1, 10], dtype=torch.int32)},
            "document 0 of cu_seqlens has 1 tokens; a slide has",
        ),
        ({"label": torch.tensor([0])}, r"packs 2 samples \(cu_seqlens\), but has 1 labels"),
        ({"lengths": torch.tensor([10])}, "leave one out"),
        ({"cu_seqlens": torch.tensor([0, 5, 10], dtype=torch.int32)}, "one blank row in front"),
    ],
)
def test_refused(change, error):
    model, row = encoder(**SLIDES), packed(slides(5, 3))
    with pytest.raises(ValueError, match=error):
        model.loss_terms({**row, **change})


def test_models_without_packing_refuse_it():
    model, row = encoder(SlidePretrainer, decoder_dim=8), packed(slides(5, 3))
    with pytest.raises(ValueError, match="packs 2 slides"):
        model.loss_terms({**row, "index": torch.tensor([1])})
