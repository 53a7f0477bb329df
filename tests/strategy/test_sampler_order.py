"""Lightning would shuffle whatever a loader says; with its distributed sampler, samples keep the loader's order."""

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler, WeightedRandomSampler

from lightning_dilated import LongNetLM, RingDilatedFSDPStrategy, RingDilatedStrategy
from lightning_dilated.sequence.shard import SequenceSpec
from lightning_dilated.strategy.loader import shuffles

from .runs import PATTERN, VOCAB, Run, Tokens, launched, trainer

pytestmark = pytest.mark.full

#: the order of the custom sampler below
BACKWARDS = list(range(11, -1, -1))


class Backwards(Sampler):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        return iter(BACKWARDS)


class Plain(pl.LightningDataModule):
    """Data with a loader as users write it."""

    sequence_spec = SequenceSpec({"tokens": 1, "labels": 1}, whole=["index"])

    def __init__(self, options):
        super().__init__()
        self.options = options

    def train_dataloader(self):
        return self.loader()

    def loader(self):
        data = Tokens(Run())
        return DataLoader(data, **({"sampler": Backwards(data)} if self.options == "backwards" else self.options))


class Read(pl.Callback):
    """Records the samples of each batch."""

    def __init__(self):
        self.read = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.read.append(batch["index"].tolist())


def read(rank, group, strategy, options, direct, distributed=True):
    """Return the samples of each batch of two epochs on this rank. Strategy None means one device without strategy."""
    world, reader, data = launched(rank), Read(), Plain(options)
    pl.seed_everything(3, verbose=False)
    sampled = {"use_distributed_sampler": distributed}
    built = trainer("auto" if strategy is None else strategy, world, max_epochs=2, callbacks=[reader], **sampled)
    model = LongNetLM(pattern=PATTERN, vocab_size=VOCAB, dim=8, depth=1)
    if direct:
        model.sequence_spec = Plain.sequence_spec
        built.fit(model, data.loader())
    else:
        built.fit(model, datamodule=data)
    return reader.read


@pytest.mark.parametrize(
    "options, direct",
    [
        ({"shuffle": False}, True),
        ({"shuffle": False, "batch_size": 2}, False),
        ("backwards", False),
        ("backwards", True),
    ],
)
def test_one_data_rank_reads_as_one_device_does(pools, options, direct):
    """A sequence on two ranks has the same samples as one device without a strategy."""
    (alone,) = pools(1).run(1, read, None, options, direct)
    assert pools(2).run(2, read, RingDilatedStrategy(), options, direct) == [alone] * 2
    assert sorted(x for batch in alone for x in batch) == sorted([*range(12), *range(12)])


@pytest.mark.parametrize("kind, distributed", [(RingDilatedFSDPStrategy, True), (RingDilatedStrategy, False)])
def test_sharded_parameters_and_no_distributed_sampler(pools, kind, distributed):
    results = pools(2).run(2, read, kind(), {"shuffle": False}, False, distributed)
    assert results == [[[x] for x in (*range(12), *range(12))]] * 2


def test_two_data_ranks_share_the_order(pools):
    results = pools(2).run(2, read, RingDilatedStrategy(sequence_size=1), {"shuffle": False}, False)
    assert results == [[[x] for x in (*range(r, 12, 2), *range(r, 12, 2))] for r in range(2)]


@pytest.mark.parametrize("size", [1, 2])
def test_a_loader_that_shuffles_is_shuffled(pools, size):
    """Each epoch has a new order, which is the same on all ranks of a sequence."""
    results = pools(2).run(2, read, RingDilatedStrategy(sequence_size=size), {"shuffle": True}, False)
    orders = [[x for batch in rank for x in batch] for rank in results]
    half = len(orders[0]) // 2
    for order in orders:
        assert order[:half] != sorted(order[:half]) and order[:half] != order[half:]
    if size == 2:
        assert orders[0] == orders[1] and sorted(orders[0][:half]) == list(range(12))
    else:
        assert sorted(orders[0][:half] + orders[1][:half]) == list(range(12))


def test_what_shuffles():
    data = torch.arange(12)
    assert shuffles(DataLoader(data, shuffle=True)) and shuffles(DataLoader(data, sampler=RandomSampler(data)))
    assert shuffles(DataLoader(data, batch_size=None, shuffle=True))
    assert shuffles(DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 2, False)))
    assert shuffles(DataLoader(data, batch_sampler=[[1, 2], [3]]))  # a list of batches has no sampler to inspect
    assert not shuffles(DataLoader(data)) and not shuffles(DataLoader(data, batch_size=None))
    assert not shuffles(DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 2, False)))
    assert not shuffles(DataLoader(data, sampler=WeightedRandomSampler([1.0] * 12, 12)))
