"""Copies of built models, also after a fit: pickled, saved whole, deep copies, and weights loaded after `to_empty`."""

import copy
import io
import multiprocessing
import pickle

import pytest
import torch

import lightning_dilated as ld
from lightning_dilated.memory.offload import Host

from ..ext.slides.slides import SIZES as SLIDES
from ..ext.slides.slides import batch as slides
from . import PATTERN, SIZES, loader, trainer

TASK = {"task": "classification", "num_classes": 2}
TOKENS = torch.arange(40).view(2, 20) % 11
BATCH = {"tokens": TOKENS, "labels": TOKENS, "index": torch.arange(2), "label": torch.arange(2)}
SLIDE = {**slides(9, 5), "features": slides(9, 5)["features"].float()}

MODELS = {
    "LongNetLM": (lambda: ld.LongNetLM(PATTERN, **SIZES), BATCH),
    "LongNetLM of shifted layers": (lambda: ld.LongNetLM(PATTERN, **SIZES, shift_layers="odd"), BATCH),
    "LongNetMLM": (lambda: ld.LongNetMLM(PATTERN, **SIZES), BATCH),
    "LongNetClassifier": (lambda: ld.LongNetClassifier(PATTERN, **SIZES, **TASK), BATCH),
    "SlideEncoder": (lambda: ld.SlideEncoder(**SLIDES, **TASK), SLIDE),
}


@pytest.fixture(params=MODELS)
def case(request):
    """A pair: a function that builds a model, and a batch."""
    return MODELS[request.param]


def outputs(model, batch) -> list[torch.Tensor]:
    """Return predictions of the model for a batch, and the loss."""
    with torch.no_grad():
        predicted = model.eval().predict_step(batch, 0)
        return [torch.as_tensor(x) for x in (*(predicted[x] for x in sorted(predicted)), *model.loss_terms(batch))]


def equal(a, b) -> bool:
    """Return whether the outputs of two models are equal, where NaN equals NaN."""
    return all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(a, b, strict=True))


def saved(model):
    """Save a model with torch.save(model), and load it."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"pickle": lambda m: pickle.loads(pickle.dumps(m)), "save": saved, "deepcopy": copy.deepcopy}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copies_of_a_built_model(case, copied):
    make, batch = case
    model = make()
    model.configure_model()
    assert equal(outputs(copied(model), batch), outputs(model, batch))  # copied before its first forward
    twin = copied(model)
    assert equal(outputs(twin, batch), outputs(model, batch))
    assert {id(x) for x in twin.parameters()}.isdisjoint({id(x) for x in model.parameters()})


@pytest.mark.slow  # in a new process that imports torch first
def test_a_process_that_is_spawned_takes_a_built_model(case):
    make, batch = case
    model = make()
    model.configure_model()
    want = outputs(model, batch)
    with multiprocessing.get_context("spawn").Pool(1) as process:
        assert equal(process.apply(outputs, (model, batch)), want)


def test_copies_after_a_fit(case):
    make, batch = case
    model = make()
    trainer(max_steps=1).fit(model, loader(batch), loader(batch))
    want = outputs(model, batch)
    for copied in COPIES.values():
        assert equal(outputs(copied(model), batch), want)
    twin = pickle.loads(pickle.dumps(model))
    trainer(max_steps=1).fit(twin, loader(batch), loader(batch))  # the copy can be trained
    assert not equal(outputs(twin, batch), want)


def test_a_model_from_meta(case):
    make, batch = case
    model = make()
    model.configure_model()
    with torch.device("meta"):
        empty = make()
        empty.configure_model()
    assert all(x.is_meta for x in empty.parameters())
    empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    assert equal(outputs(empty, batch), outputs(model, batch))
    for metric in [*empty.mean_loss.values(), *getattr(empty, "accuracy", {}).values()]:
        assert metric.total == 0 and metric.tokens == 0 and metric.total.dtype == torch.float64
    (metrics,) = trainer().validate(empty, loader(batch), verbose=False)
    (want,) = trainer().validate(model, loader(batch), verbose=False)
    assert metrics == want


def test_a_copy_of_a_host_begins_empty():
    host = Host(1)
    x = torch.randn(4, 4, requires_grad=True)
    with host.offloading(x, 0, 1):
        y = (x * x).sum()
    assert host.bytes > 0
    for copied in (copy.deepcopy(host), pickle.loads(pickle.dumps(host))):
        assert copied.budget == 1 and copied.bytes == 0
    y.backward()
    assert torch.equal(x.grad, 2 * x)
