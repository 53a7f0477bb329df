"""Several loaders: a CombinedLoader for training, and validation and test loaders in sequence or combined."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler

import lightning_dilated as ld

from .runs import PATTERN, VOCAB, Losses, Run, Tokens, launched, trainer

pytestmark = pytest.mark.full
TEXTS, MORE = Run(seq_len=40), Run(seq_len=24)


def loader(run, batch_size=2, **options):
    return DataLoader(Tokens(run), batch_size=batch_size, **options)


def model(kind="lm"):
    pl.seed_everything(3, verbose=False)
    if kind == "classifier":
        return ld.LongNetClassifier(PATTERN, task="classification", num_classes=2, vocab_size=VOCAB, dim=16, depth=1)
    return ld.LongNetLM(PATTERN, vocab_size=VOCAB, dim=16, depth=1, optimizer=torch.optim.SGD)


class Labelled(Tokens):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return {"tokens": sample["tokens"], "label": int(sample["tokens"].sum()) % 2, "index": index}


def evaluated(rank, group, kind):
    """Return metrics of two loaders: each alone, both in validate, both in test, and combined in validate."""
    data = Labelled if kind == "classifier" else Tokens
    first, second = lambda: DataLoader(data(TEXTS), batch_size=2), lambda: DataLoader(data(MORE), batch_size=3)
    world, net = launched(rank), model(kind)
    run = trainer("ring_dilated", world, max_steps=3, precision="64-true", num_sanity_val_steps=2)
    alone = [run.validate(net, x(), verbose=False)[0] for x in (first, second)]
    run.validate(net, [first(), second()], verbose=False)
    together = {name: float(x) for name, x in run.callback_metrics.items()}
    run.test(net, [first(), second()], verbose=False)
    tested = {name: float(x) for name, x in run.callback_metrics.items()}
    mixed = CombinedLoader({"a": first(), "b": second()}, "max_size")
    run.validate(net, mixed, verbose=False)
    pooled = {name: float(x) for name, x in run.callback_metrics.items()}
    return alone, together, tested, pooled


@pytest.mark.parametrize("kind", ["lm", "classifier"])
def test_metrics_by_loader(pools, kind):
    answers = [pools(ranks).run(ranks, evaluated, kind) for ranks in (1, 2)]
    for alone, together, tested, pooled in (*answers[0], *answers[1]):
        for number, metrics in enumerate(alone):
            for name, value in metrics.items():
                assert together[f"{name}/dataloader_idx_{number}"] == pytest.approx(value, rel=1e-6), name
                there = tested[f"{name.replace('val', 'test')}/dataloader_idx_{number}"]
                assert there == pytest.approx(value, rel=1e-6)
        assert "val_loss" not in together and "val_loss" in pooled
        losses = sorted(metrics["val_loss"] for metrics in alone)
        assert losses[0] < pooled["val_loss"] < losses[1]
    one, two = answers[0][0], answers[1][0]
    assert two[1] == pytest.approx(one[1], rel=1e-6)


def fitted(rank, group, loaders, strategy, validates=False):
    """Train on these loaders. Return (losses, final parameters, validation metrics, number of steps)."""
    net, losses = model(), Losses()
    run = trainer(strategy, launched(rank), max_epochs=1, precision="64-true", callbacks=[losses])
    run.fit(net, loaders(), [loader(TEXTS), loader(MORE)] if validates else None)
    values = {name: float(x) for name, x in run.callback_metrics.items() if name.startswith("val")}
    return losses.losses, [p.detach().clone() for p in net.parameters()], values, run.global_step


def mapping():
    return CombinedLoader({"a": loader(TEXTS), "b": loader(MORE, 1)})


def ended():
    return CombinedLoader([loader(TEXTS, 6), loader(MORE, 2)], "max_size")


def nested():
    return {"texts": loader(TEXTS), "more": [loader(MORE), loader(TEXTS, 1)]}


@pytest.mark.parametrize("loaders", [mapping, ended, nested])
def test_training_on_several_loaders(pools, loaders):
    """Losses and parameters are the same on one rank without the strategy, with it, and on two ranks."""
    usual = pools(1).run(1, fitted, loaders, "auto", True)[0]
    assert usual[0] and sorted(usual[2])[-1].endswith("/dataloader_idx_1")
    for ranks in (1, 2):
        for losses, parameters, values, _ in pools(ranks).run(ranks, fitted, loaders, "ring_dilated", True):
            assert losses == pytest.approx(usual[0], rel=1e-9)
            torch.testing.assert_close(parameters, usual[1], rtol=1e-9, atol=1e-12)
            assert values == pytest.approx(usual[2], rel=1e-6)


def sum_of_parts(rank, group):
    """Return (logged loss of two batches together, mean over all their tokens)."""
    launched(rank)
    net, parts = model().double(), [next(iter(loader(run))) for run in (TEXTS, MORE)]
    terms = [net.loss_terms(part) for part in parts]
    run = trainer("auto", 1, max_steps=1, precision="64-true", callbacks=[losses := Losses()])
    run.fit(net, CombinedLoader({"a": loader(TEXTS), "b": loader(MORE)}))
    return losses.losses[0], float(sum(x for x, _ in terms) / sum(n for _, n in terms))


def test_batches_that_come_together_are_one_mean_over_tokens(pools):
    ((logged, want),) = pools(1).run(1, sum_of_parts)
    assert logged == pytest.approx(want)


# -- torch's BatchSampler ----------------------------------------------------------------------------------------------
def in_order():
    return DataLoader(Tokens(TEXTS), batch_sampler=BatchSampler(SequentialSampler(Tokens(TEXTS)), 4, False))


def dropping():
    return DataLoader(Tokens(TEXTS), batch_sampler=BatchSampler(SequentialSampler(Tokens(TEXTS)), 5, True))


class Module(pl.LightningDataModule):
    """Creates its loaders in a hook. Lightning records their arguments there, to rebuild them."""

    def train_dataloader(self):
        return in_order()


def samples(rank, group, make, strategy, sequence_size="auto"):
    """Return the samples that the steps on this rank read."""
    taken = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            taken.append(batch["index"].tolist())

    launching = launched(rank)
    chosen = strategy if strategy == "auto" else ld.RingDilatedStrategy(sequence_size=sequence_size)
    run = trainer(chosen, launching, max_epochs=1, callbacks=[Watch()], limit_train_batches=9)
    run.fit(model(), make())
    return taken


def weighted():
    weights = [0.0] * 6 + [1.0] * 6
    return DataLoader(Tokens(TEXTS), batch_sampler=BatchSampler(WeightedRandomSampler(weights, 12), 4, False))


def shuffled():
    return DataLoader(Tokens(TEXTS), batch_sampler=BatchSampler(RandomSampler(Tokens(TEXTS)), 4, False))


@pytest.mark.parametrize("make", [in_order, dropping, Module])
def test_a_batch_sampler_keeps_its_batches(pools, make):
    usual = pools(1).run(1, samples, make, "auto")[0]
    assert len(usual) >= 2 and len(usual[0]) in (4, 5)
    assert pools(1).run(1, samples, make, "ring_dilated") == [usual]
    assert pools(2).run(2, samples, make, "ring_dilated") == [usual] * 2


def test_a_batch_sampler_is_shared_by_data_ranks(pools):
    first, second = pools(2).run(2, samples, in_order, "ring_dilated", 1)
    assert first == [[0, 2, 4, 6], [8, 10]] and second == [[1, 3, 5, 7], [9, 11]]


def test_a_batch_sampler_s_own_sampler(pools):
    """The order of a batch sampler's inner sampler is kept: random, and only over the samples that it draws."""
    (drawn,) = pools(1).run(1, samples, weighted, "ring_dilated")
    assert {i for batch in drawn for i in batch} <= set(range(6, 12)) and [len(x) for x in drawn] == [4, 4, 4]
    (order,) = pools(1).run(1, samples, shuffled, "ring_dilated")
    flat = [i for batch in order for i in batch]
    assert sorted(flat) == list(range(12)) != flat
