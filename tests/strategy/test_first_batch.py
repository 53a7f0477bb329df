"""check_first_batch is silent if a module is correct on many ranks, and otherwise raises on every rank."""

import pytest
import torch
import torchmetrics
from torch.utils.data import DataLoader

from lightning_dilated import RingDilatedFSDPStrategy, RingDilatedStrategy
from lightning_dilated.ext.planning.counting.memory_tracker import Meter
from lightning_dilated.ext.profiling import first_batch
from lightning_dilated.sequence import Place, SequenceGroup, SequenceSpec, sequence_mean

from .runs import Run, launched, make, trainer
from .test_hooks import N, Numbers, Plain

pytestmark = pytest.mark.full


class Pooled(Plain):
    """Adds a mean over tokens to each token: a mean over the whole sequence or, wrongly, over this rank's tokens."""

    whole = True

    def training_step(self, batch, batch_idx):
        x = self.project(batch["x"] + batch["noise"])
        mean = sequence_mean(x) if self.whole else x.sum(1) / N
        return super().training_step({**batch, "x": batch["x"] + mean.mean(-1, keepdim=True)[:, None]}, batch_idx)


class PooledHere(Pooled):
    whole = False


class Placed(Plain):
    """Wrongly counts positions from this rank's first token."""

    def training_step(self, batch, batch_idx):
        at = torch.arange(batch["x"].shape[1], dtype=batch["x"].dtype)[None, :, None]
        return super().training_step({**batch, "x": batch["x"] + at}, batch_idx)


CLASSES = {c.__name__: c for c in (Plain, Pooled, PooledHere, Placed)}


def checked(rank, group, name, dropout, kind=RingDilatedStrategy, settings=None):
    """Return (error of one step with the check, whether the model is still in training mode)."""
    model = CLASSES[name](hidden_dropout=dropout, attention_dropout=dropout)
    sharded = kind is RingDilatedFSDPStrategy  # Lightning refuses 64-true for sharded parameters
    strategy = kind(check_first_batch=True, **(settings or {}))
    built = trainer(strategy, launched(rank), max_steps=1, precision="32-true" if sharded else "64-true")
    try:
        built.fit(model, DataLoader(Numbers()))
    except RuntimeError as error:
        return str(error), None
    return None, model.training and "one" in built.callback_metrics


KINDS = [RingDilatedStrategy, RingDilatedFSDPStrategy]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("name", ["Plain", "Pooled"])
def test_right_modules(pools, name, layout, kind):
    assert pools(2).run(2, checked, name, 0.5, kind, {"layout": layout}) == [(None, True)] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["PooledHere", "Placed"])
def test_wrong_modules(pools, name, kind):
    for error, _ in pools(2).run(2, checked, name, 0.0, kind):
        assert error and "2 ranks do not compute what one rank does" in error and name in error


@pytest.mark.parametrize("kind", KINDS)
def test_data_ranks(pools, kind):
    """Each sequence is checked separately. If one is wrong, all ranks of the job raise."""
    assert pools(4).run(4, checked, "Pooled", 0.0, kind, {"sequence_size": 2}) == [(None, True)] * 4
    for error, _ in pools(4).run(4, checked, "Placed", 0.0, kind, {"sequence_size": 2}):
        assert error and "Placed" in error


def language_model(rank, group, kind, fsdp, accumulate):
    """Return the losses of a run with and without the check, which must not have side effects."""
    results = []
    for check in (False, True):
        run = Run(kind=kind, steps=2, batch_size=2 if kind == "lengths" else 1, strategy={"check_first_batch": check})
        run = run.but(fsdp=fsdp, double=fsdp, accumulate=accumulate)
        built, model, data, record = make(run, launched(rank))
        built.fit(model, data)
        results.append((record.losses, record.norms))
    return results


TRACES = [("whole", 2, False), ("whole", 2, True), ("documents", 1, True), ("lengths", 1, False)]
MORE = [("whole", 1, False), ("whole", 1, True), ("documents", 1, False), ("lengths", 1, True)]


@pytest.mark.parametrize("kind, accumulate, fsdp", [*TRACES, *(pytest.param(*x, marks=pytest.mark.slow) for x in MORE)])
def test_leaves_no_trace(pools, kind, accumulate, fsdp):
    for without, with_check in pools(2).run(2, language_model, kind, fsdp, accumulate):
        assert without == with_check


class Counted(Plain):
    """Counts its steps in a metric. Its training_step has no batch_idx."""

    def __init__(self, **options):
        super().__init__(**options)
        self.steps = torchmetrics.SumMetric()

    def training_step(self, batch):
        self.steps.update(1)
        return super().training_step(batch, 0)


class Manual(Plain):
    def __init__(self, **options):
        super().__init__(**options)
        self.automatic_optimization = False


def of_class(rank, group, kind):
    model = kind()
    trainer(RingDilatedStrategy(check_first_batch=True), launched(rank), max_steps=1).fit(model, DataLoader(Numbers()))
    return float(model.steps.compute()), model.steps.update_count


def test_metrics_do_not_count_the_check(pools):
    """Each of two ranks makes a step, which compute() sums to 2; the check's steps do not count."""
    assert pools(2).run(2, of_class, Counted) == [(2.0, 1)] * 2


def test_manual_optimization_is_refused(pools):
    errors = pools(2).errors(ValueError, 2, of_class, Manual)
    assert all("manual optimization" in error for error in errors)


def heads(rank, group, layout, tokens, first):
    """Return (whether the head equals the start of the whole batch, bytes that were allocated for the head)."""
    rng = torch.Generator().manual_seed(0)
    whole = {
        "x": torch.randn(2, tokens, 3, generator=rng),
        "ids": torch.randint(0, 256, (2, tokens), generator=rng),
        "keep": torch.rand(2, tokens, generator=rng) < 0.5,
        "kind": torch.randint(0, 256, (2, tokens), generator=rng).to(torch.uint16),
        "last": torch.randn(2, 3, tokens, generator=rng),
    }
    spec, ours = SequenceSpec({**dict.fromkeys(whole, 1), "last": -1}), SequenceGroup(group, layout=layout)
    with pytest.MonkeyPatch.context() as patch, Meter() as meter:
        patch.setattr(first_batch, "HEAD", first)
        batch = spec.cut(whole, Place(ours.ranks, ours.rank, layout))
        meter.reset_peak()
        before = meter.live
        head = first_batch._head(batch, spec, ours)
        extra = meter.peak - before
    ours.close()
    want = {name: x[..., :first] if name == "last" else x[:, :first] for name, x in whole.items()}
    same = all(torch.equal(head[name], x) and head[name].dtype == x.dtype for name, x in want.items())
    return same, extra


@pytest.mark.parametrize("layout", ["contiguous", "strided", "zigzag"])
@pytest.mark.parametrize(("tokens", "first"), [(96, 40), (96, 8), (40, 64)])
def test_head(pools, layout, tokens, first):
    assert all(same for same, _ in pools(4).run(4, heads, layout, tokens, first))


def test_head_of_a_long_sequence(pools):
    """The memory of a head does not depend on the length of the sequence."""
    for _, extra in pools(4).run(4, heads, "zigzag", 1 << 20, 64):
        assert extra < 1 << 16
