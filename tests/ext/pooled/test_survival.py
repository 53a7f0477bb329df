"""Survival: both likelihoods and the concordance against their definitions, and models trained on event times."""

import itertools
import math
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated import LongNetClassifier, SlideEncoder
from lightning_dilated.data import SlideDataModule, write_synthetic_slides
from lightning_dilated.ext.pooled import survival
from lightning_dilated.ext.pooled.survival import HazardHead, concordance_index, cox_losses, quantile_edges

from ...examples import examples
from ...models import PATTERN, trainer
from ..slides.test_slides import table

#: few different values, so that many times and risks are equal
cohorts = st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 5), st.booleans()), min_size=1, max_size=14).map(
    lambda rows: [torch.tensor(x, dtype=torch.float64) for x in zip(*rows, strict=True)]
)


# -- Cox ---------------------------------------------------------------------------------------------------------------
def efron(risk, time, event) -> float:
    """Compute Efron's formula (1977), a sum over the distinct times of events."""
    total = 0.0
    for t in sorted({t for t, e in zip(time, event, strict=True) if e}):
        dead = [math.exp(r) for r, s, e in zip(risk, time, event, strict=True) if s == t and e]
        at_risk = sum(math.exp(r) for r, s in zip(risk, time, strict=True) if s >= t)
        total -= sum(map(math.log, dead))
        total += sum(math.log(at_risk - k / len(dead) * sum(dead)) for k in range(len(dead)))
    return total


@settings(max_examples=examples(100), deadline=None)
@given(cohorts, st.sampled_from([1, 3, 1024]))
def test_the_partial_likelihood_is_efrons(cohort, rows):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(survival, "ROWS", rows)  # in blocks, as for many samples
        losses = cox_losses(*cohort)
    assert losses.sum().item() == pytest.approx(efron(*(x.tolist() for x in cohort)), abs=1e-9)
    assert (losses[cohort[2] == 0] == 0).all()


def test_its_gradient_and_extreme_risks():
    _, time, event = torch.tensor([[0.0, 0, 0, 0, 0], [2, 1, 1, 3, 1], [1, 1, 1, 0, 0]], dtype=torch.float64)
    risk = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r: cox_losses(r, time, event).sum(), risk)
    for values in ([900.0, -900, 0, 3, 900], [-900.0] * 5):
        risk = torch.tensor(values, requires_grad=True)
        loss = cox_losses(risk, time.float(), event.float()).sum()
        loss.backward()
        assert loss.isfinite() and risk.grad.isfinite().all()


def test_a_batch_without_events_is_no_loss():
    risk = torch.randn(3, requires_grad=True)
    loss = cox_losses(risk, torch.tensor([1.0, 2, 3]), torch.zeros(3)).sum()
    loss.backward()
    assert loss == 0 and (risk.grad == 0).all()


# -- discrete hazards --------------------------------------------------------------------------------------------------
def test_the_hazard_likelihood():
    head, logits = HazardHead(4, 4, [1.0, 2.5, 7.0]), torch.randn(7, 4, dtype=torch.float64)
    time = torch.tensor([0.0, 0.99, 1.0, 2.4, 2.5, 6.0, 800.0])
    bins = [0, 0, 1, 1, 2, 2, 3]
    assert head.bins(time).tolist() == bins
    hazard = logits.sigmoid()
    for event in (0.0, 1.0):
        losses = head.losses(logits, torch.stack([time, torch.full_like(time, event)], 1))
        for i, k in enumerate(bins):
            chance = math.prod(1 - hazard[i, j].item() for j in range(k)) * (hazard[i, k].item() if event else 1)
            assert losses[i].item() == pytest.approx(-math.log(chance), rel=1e-6, abs=1e-9)


def test_hazards_recover_the_share_of_each_bin():
    """The best constant hazard of a bin is its number of events divided by the number of samples at risk."""
    head = HazardHead(1, 3, [1.0, 2.0])
    time = torch.tensor([0.5] * 2 + [1.5] * 3 + [2.5] * 3)
    event = torch.tensor([1.0, 1, 1, 1, 1, 1, 1, 0])
    logits = torch.zeros(3, requires_grad=True)
    best = torch.optim.LBFGS([logits], max_iter=100, line_search_fn="strong_wolfe")

    def closure():
        best.zero_grad()
        loss = head.losses(logits.expand(8, 3), torch.stack([time, event], 1)).sum()
        loss.backward()
        return loss

    best.step(closure)
    # a sample censored in the last bin is at risk in the first two bins only
    assert logits.sigmoid().tolist() == pytest.approx([2 / 8, 3 / 6, 1.0], abs=1e-3)


def test_predictions():
    head, logits = HazardHead(4, 3, [30.0, 365.5]), torch.randn(2, 3)
    predicted = head.predictions(logits)
    hazard = logits.double().sigmoid()
    assert list(predicted) == ["risk", "survival_at_30", "survival_at_365.5"]
    torch.testing.assert_close(predicted["survival_at_30"], 1 - hazard[:, 0])
    torch.testing.assert_close(predicted["survival_at_365.5"], (1 - hazard[:, 0]) * (1 - hazard[:, 1]))
    torch.testing.assert_close(predicted["risk"], -(1 - hazard).cumprod(1).sum(1))


def test_edges_are_quantiles_of_the_events():
    labels = [(float(t), 1.0) for t in range(1, 102)] + [(1000.0, 0.0)] * 50
    assert quantile_edges(labels, 4) == [26.0, 51.0, 76.0]
    with pytest.raises(ValueError, match="1 events at 1 times: set a smaller num_classes, or time_bins"):
        quantile_edges([(3.0, 1.0), (4.0, 0.0)], 4)


# -- concordance -------------------------------------------------------------------------------------------------------
def harrell(risk, time, event) -> float:
    known = agreeing = 0.0
    for i, j in itertools.permutations(range(len(risk)), 2):
        if event[i] and (time[i] < time[j] or (time[i] == time[j] and not event[j])):
            known += 1
            agreeing += 1.0 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0.0
    return agreeing / known if known else math.nan


@settings(max_examples=examples(100), deadline=None)
@given(cohorts, st.sampled_from([1, 3, 1024]))
def test_concordance_is_harrells(cohort, rows):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(survival, "ROWS", rows)
        concordance = concordance_index(*cohort).item()
    assert concordance == pytest.approx(harrell(*(x.tolist() for x in cohort)), nan_ok=True)


# -- models ------------------------------------------------------------------------------------------------------------
SIZES = {"feature_dim": 8, "dim": 16, "depth": 1, "num_heads": 4, "segment_lengths": [16], "dilation_rates": [1]}
SIZES |= {"dropout": 0.0, "drop_path": 0.0, "task": "survival"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Sixteen slides and survival.csv. The event times depend on the class."""
    path = tmp_path_factory.mktemp("survival")
    write_synthetic_slides(path, slides=16, tiles=(8, 16), features=8, signal=6.0)
    rng = np.random.default_rng(0)
    lines = [f"slide_{i:03},{(20 if i % 2 else 60) + rng.integers(0, 30)},{int(i % 5 > 0)}" for i in range(16)]
    table(path / "survival.csv", "slide_id,time,event", *lines)
    return str(path)


def data(folder, **options) -> SlideDataModule:
    defaults = {"labels": "survival", "val_fraction": 0.25, "test_fraction": 0.25, "batch_size": 4}
    return SlideDataModule(folder, f"{folder}/survival.csv", **{**defaults, **options})


@pytest.mark.parametrize("loss", ["discrete", "cox"])
def test_it_learns_and_comes_back(folder, tmp_path, loss):
    pl.seed_everything(0)
    bins = {"num_classes": 3} if loss == "discrete" else {}
    model = SlideEncoder(**SIZES, survival_loss=loss, **bins, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))
    run = trainer(max_steps=25)
    run.fit(model, data(folder))
    run.save_checkpoint(tmp_path / "x.ckpt")
    everyone = {"val_fraction": 0, "test_fraction": 1}
    (metrics,) = trainer().test(model, data(folder, **everyone), verbose=False)
    assert metrics["test_concordance"] > 0.7 and math.isfinite(metrics["test_loss"])
    loaded = SlideEncoder.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    for model in (loaded, SlideEncoder(**SIZES, survival_loss=loss, **bins)):
        path = None if model is loaded else str(tmp_path / "x.ckpt")
        (again,) = trainer().test(
            model, data(folder, **everyone), ckpt_path=path, verbose=False, weights_only=True if path else None
        )
        assert again == pytest.approx(metrics)
    if loss == "discrete":
        events = [t for t, e in data(folder).training_survival if e]
        assert loaded.time_bins == np.quantile(events, [1 / 3, 2 / 3]).tolist()


def test_coxs_loss_of_an_epoch_does_not_depend_on_batches(folder):
    pl.seed_everything(0)
    model = SlideEncoder(**SIZES, survival_loss="cox")
    options = {"val_fraction": 0, "test_fraction": 1}
    one, many = (trainer().test(model, data(folder, batch_size=b, **options), verbose=False) for b in (16, 3))
    assert one[0] == pytest.approx(many[0], rel=1e-5)
    batches = list(data(folder, batch_size=16, **options).test_dataloader())
    with torch.no_grad():
        risk = model.head(model.embed(batches[0]))[:, 0]
    time, event = batches[0]["label"].unbind(1)
    want = efron(risk.tolist(), time.tolist(), event.tolist()) / event.sum()
    assert one[0]["test_loss"] == pytest.approx(want.item(), rel=1e-4)


def test_predictions_of_slides(folder):
    model = SlideEncoder(**SIZES, time_bins=[30, 60], predict_embeddings=True)
    predicted = trainer().predict(model, data(folder, val_fraction=0, test_fraction=1))[0]
    assert list(predicted) == [
        "index",
        "slide_id",
        "time",
        "event",
        "risk",
        "survival_at_30",
        "survival_at_60",
        "embedding",
    ]
    assert predicted["embedding"].shape == (4, 16)


REFUSED = {
    "cox one by one": ({"survival_loss": "cox"}, {"batch_size": 1}, "compares the samples of a batch.*batch_size is 1"),
    "bins": ({"num_classes": 12}, {}, "12 bins of time need as many groups of events"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_training(folder, name):
    options, settings, says = REFUSED[name]
    with pytest.raises(ValueError, match=says):
        trainer(max_steps=1).fit(SlideEncoder(**SIZES, **options), data(folder, **settings))


OPTIONS = {
    "bins of cox": ({"survival_loss": "cox", "num_classes": 3}, "leave num_classes and time_bins out"),
    "other loss": ({"survival_loss": "weibull"}, "survival_loss must be one of discrete, cox"),
    "falling": ({"time_bins": [3.0, 2.0]}, r"time_bins must be 2 rising times.*got \[3.0, 2.0\]"),
    "number": ({"time_bins": [3.0], "num_classes": 4}, "time_bins must be 3 rising times"),
    "zero": ({"time_bins": [0.0, 2.0]}, r"time_bins\[0\] must be a number in \(0"),
    "another task": ({"task": "classification", "num_classes": 2, "time_bins": [3.0]}, "are for task='survival'"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    options, says = OPTIONS[name]
    with pytest.raises(ValueError, match=says):
        LongNetClassifier(PATTERN, feature_dim=3, **{"task": "survival", **options})


@pytest.mark.parametrize("label, error, says", [
    (torch.tensor([[1.0, 2.0]]), ValueError, "events of 0 or 1"),
    (torch.tensor([[-1.0, 1.0]]), ValueError, "times of at least 0"),
    (torch.tensor([1.0, 2.0]), ValueError, r"must be \(B, 2\)"),
    (torch.tensor([[1.0, 1.0]]).bfloat16(), TypeError, "rounded"),
])  # fmt: skip
def test_labels(label, error, says):
    with pytest.raises(error, match=says):
        HazardHead(4, 2, [1.0]).check(label)
    with pytest.raises(ValueError, match="the bins of time are not known"):
        HazardHead(4, 2).check(label)


CSV = {
    "negative": ("s,-3,1", "line 2: 'time' is '-3', but a time must be a finite number of at least 0"),
    "word": ("s,soon,1", "'time' is 'soon'"),
    "event": ("s,3,2", "line 2: 'event' is '2', but it must be 1"),
    "no event": ("s,3,0", "'event' is 0 everywhere"),
    "empty": ("s,,1", "line 2: the value of 'time' is empty"),
}


@pytest.mark.parametrize("name", CSV)
def test_tables(tmp_path, name):
    line, says = CSV[name]
    write_synthetic_slides(tmp_path, slides=1, tiles=(4, 4), features=2)
    path = table(tmp_path / "s.csv", "slide_id,time,event", line.replace("s,", "slide_000,", 1))
    with pytest.raises(ValueError, match=says):
        SlideDataModule(str(tmp_path), path, labels="survival", val_fraction=0, test_fraction=0).check()


def test_columns_and_strata(folder, tmp_path):
    text = Path(f"{folder}/survival.csv").read_text().replace("time,event", "os_months,dead")
    (tmp_path / "s.csv").write_text(text)
    module = SlideDataModule(
        folder, str(tmp_path / "s.csv"), labels="survival", time_column="os_months", event_column="dead",
        val_fraction=0.25, test_fraction=0.25,
    )  # fmt: skip
    events = [sum(event for _, event in module.dataset(split).labels) for split in ("val", "test")]
    assert events == [3, 3]  # a quarter of the slides with an event, and a quarter of the slides without
    with pytest.raises(ValueError, match=r"has no column 'time'; its columns are .*set data.time_column"):
        SlideDataModule(folder, str(tmp_path / "s.csv"), labels="survival").check()
