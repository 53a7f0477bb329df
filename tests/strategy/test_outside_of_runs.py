"""A Trainer can be pickled outside of fit, validate, test and predict. Its loops raise clear errors there."""

import pickle
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from torch.utils.data import DataLoader

from lightning_dilated import RingDilatedStrategy, callbacks
from lightning_dilated.sequence import SequenceSpec, loss_share

from .runs import VOCAB, Run, Tokens, launched, make, trainer

pytestmark = pytest.mark.full


class Bigram(pl.LightningModule):
    """A minimal module that can train on a sequence shared by ranks."""

    sequence_spec = SequenceSpec({"tokens": 1, "labels": 1}, whole=["index"])

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(VOCAB, VOCAB)

    def training_step(self, batch, batch_idx):
        logits, labels = self.table(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
        loss = loss_share(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"), labels.numel())
        self.log("loss", loss, sync_dist=True, reduce_fx="sum")
        return loss

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


OWN = [callbacks.ThroughputMonitor, partial(callbacks.MemoryProfiler, timeline=False), callbacks.CommunicationProfiler]


def pickled(rank, group, classes):
    """Return (steps of a Trainer's copy after a fit, its progress bars, whether its validation results are equal)."""
    options = {
        "max_steps": 2,
        "enable_progress_bar": True,
        "enable_checkpointing": True,
        "callbacks": [cls() for cls in classes],
    }
    built, data = trainer(RingDilatedStrategy(), launched(rank), **options), DataLoader(Tokens(Run()))
    built.fit(Bigram(), data)
    copy = pickle.loads(pickle.dumps(built))
    bars = [x for x in built.callbacks if isinstance(x, pl.callbacks.ProgressBar) and pickle.loads(pickle.dumps(x))]
    with pytest.raises(RuntimeError, match="made when the Trainer runs"):
        _ = copy.strategy.sequence
    losses = [x.validate(x.lightning_module, data, verbose=False)[0]["loss"] for x in (copy, built)]
    return copy.global_step, len(bars), losses[0] == losses[1]


@pytest.mark.parametrize("classes", [[TQDMProgressBar], [RichProgressBar, *OWN]])
def test_the_trainer_can_be_pickled_after_a_fit(pools, classes, tmp_path):
    classes = [*classes, partial(callbacks.ShardedCheckpoint, str(tmp_path))]
    assert pools(2).run(2, pickled, classes) == [(2, 1, True)] * 2


def outside(rank, group, run, ran):
    """Return the errors of calls on a Trainer that has not run yet, or that has run."""
    built, model, data, _ = make(run, launched(rank))
    data.trainer = built
    if ran:
        built.fit(model, data)
    else:
        built.strategy.connect(model)
        built._data_connector.attach_data(model, datamodule=data)
    words = []
    for call in (
        lambda: built.strategy.process_dataloader(data.train_dataloader()),
        lambda: built.strategy.training_step({}, 0),
        lambda: built.strategy.validation_step({}, 0),
        lambda: built.estimated_stepping_batches,
    ):
        try:
            words.append(call())
        except RuntimeError as error:
            words.append(str(error))
    return words


WITHIN, ASK = "only within trainer.fit, validate, test or predict", "configure_optimizers or a later hook"


@pytest.mark.parametrize("fsdp", [False, True])
def test_loops_of_a_trainer_that_never_ran(pools, fsdp):
    (loop_errors,) = pools(1).run(1, outside, Run(steps=2, fsdp=fsdp, double=fsdp), False)
    loader, training, validation, batches = loop_errors
    for words in (loader, batches):
        assert WITHIN in words and ASK in words
    for words in (training, validation):
        assert "made when the Trainer runs" in words or WITHIN in words


@pytest.mark.parametrize("fsdp", [False, True])
def test_loops_after_a_run(pools, fsdp):
    (loop_errors,) = pools(1).run(1, outside, Run(steps=2, fsdp=fsdp, double=fsdp), True)
    *steps, batches = loop_errors
    assert all(WITHIN in words and ASK in words for words in steps)
    assert batches == 2  # the loaders still exist, so their number can be read
