"""The strategy's hooks guard against pitfalls of splitting one sequence over several ranks."""

import copy
import os

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_dilated import MultiheadDilatedAttention, RingDilatedStrategy, SequenceSpec, loss_share
from lightning_dilated.data import ByteDataModule
from lightning_dilated.sequence import SequenceConv1d, active_sequence

from .runs import PATTERN, Run, launched, make, trainer

pytestmark = pytest.mark.full

N = 40


class Numbers(Dataset):
    """Samples that draw noise when they are read, like augmentation."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"x": torch.full((N, 1), float(index)), "noise": torch.rand(N, 1)}


class Plain(pl.LightningModule):
    """A LightningModule that is not a DilatedModule, and records its batches."""

    sequence_spec = SequenceSpec({"x": 1, "noise": 1})

    def __init__(self, attention_dropout=0.0, hidden_dropout=0.0, share=True):
        super().__init__()
        self.attention = MultiheadDilatedAttention(8, 2, PATTERN, dropout=attention_dropout)
        self.project, self.dropout, self.share = nn.Linear(1, 8), nn.Dropout(hidden_dropout), share
        self.seen = []

    def training_step(self, batch, batch_idx):
        x = self.dropout(self.project(batch["x"] + 1))
        out = self.attention(x)[0]
        self.seen.append({"noise": batch["noise"].clone(), "mask": (x == 0).float().detach(), "out": out.detach()})
        total, count = out.square().sum(), batch["x"].shape[0] * batch["x"].shape[1]
        self.log("one", 1.0, sync_dist=True, batch_size=3 + self.global_rank)
        return loss_share(total, count) if self.share else total / max(count, 1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def seeded(rank, seed):
    """Give each rank a different random state or, with `seed`, the same one. Return the number of ranks."""
    os.environ.pop("PL_GLOBAL_SEED", None)
    os.environ["PL_SEED_WORKERS"] = "1"
    torch.manual_seed(100 + rank)
    if seed:
        pl.seed_everything(3, workers=True, verbose=False)
    return launched(rank)


def plain(rank, group, options, settings, workers=0, seed=True):
    """Return what the module recorded on this rank, including the logged constant."""
    world = seeded(rank, seed)
    model = Plain(**options)
    built = trainer(RingDilatedStrategy(**settings), world, max_steps=2)
    built.fit(model, DataLoader(Numbers(), num_workers=workers))
    return model.seen, float(built.callback_metrics["one"]), model.project.weight.detach()


def whole(parts, name, step=0, dim=1):
    return torch.cat([batches[step][name] for batches, *_ in parts], dim)


@pytest.mark.parametrize(
    "workers, seed", [(0, True), (0, False), *(pytest.param(1, x, marks=pytest.mark.slow) for x in (True, False))]
)
def test_augmentation_is_that_of_the_sample(pools, workers, seed):
    """All ranks of a sequence draw the same augmentation, in the main process and in workers, even without a seed."""
    parts = pools(2).run(2, plain, {}, {"layout": "contiguous"}, workers, seed)
    again = pools(2).run(2, noise_of_whole, workers, seed)
    assert torch.equal(*again[:2])
    if seed:
        assert torch.equal(whole(parts, "noise"), again[0])


def noise_of_whole(rank, group, workers, seed):
    """Return the noise of the first batch for the whole sequence, as drawn on this rank."""
    world = seeded(rank, seed)

    class Whole(Plain):
        sequence_spec = SequenceSpec({"x": 1}, whole=["noise"])

    model = Whole()
    trainer(RingDilatedStrategy(), world, max_steps=1).fit(model, DataLoader(Numbers(), num_workers=workers))
    return model.seen[0]["noise"]


def test_hidden_dropout_differs_between_ranks(pools):
    """With equal masks on all ranks, hidden dropout would drop the same tokens in every shard."""
    parts = pools(2).run(2, plain, {"hidden_dropout": 0.5}, {})
    (a, *_), (b, *_) = parts
    assert not torch.equal(a[0]["mask"], b[0]["mask"]) and not torch.equal(a[0]["mask"], a[1]["mask"])
    again = pools(2).run(2, plain, {"hidden_dropout": 0.5}, {})
    for step in range(2):
        assert torch.equal(whole(parts, "mask", step), whole(again, "mask", step))


def test_attention_dropout_does_not_depend_on_the_ranks(pools):
    results = [whole(pools(r).run(r, plain, {"attention_dropout": 0.5}, {}), "out") for r in (1, 2, 4)]
    none = whole(pools(1).run(1, plain, {}, {}), "out")
    assert not torch.allclose(results[0], none)
    for got in results[1:]:
        torch.testing.assert_close(got, results[0], rtol=1e-5, atol=1e-6)


def test_a_logged_constant_stays_itself(pools):
    """Lightning rounds down the mean of the ranks' batch sizes, so a logged 1.0 would become larger."""
    assert [one for _, one, _ in pools(2).run(2, plain, {}, {})] == [1.0, 1.0]


def test_unseeded_ranks_start_equal(pools):
    (*_, first), (*_, second) = pools(2).run(2, plain, {}, {}, 0, False)
    assert torch.equal(first, second)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_is_no_share(pools, ranks):
    errors = pools(ranks).errors(RuntimeError, ranks, plain, {"share": False}, {})
    assert all("was not made by loss_share" in error for error in errors), errors


def groups_after(rank, group):
    """Return (process groups before and after validations, whether loaders are unchanged, the active sequence)."""
    built, model, data, _ = make(Run(steps=1), launched(rank))
    built.fit(model, data)
    before = len(dist.distributed_c10d._world.pg_map)
    for _ in range(3):
        built.validate(model, data, verbose=False)
    loader = DataLoader(Numbers())
    attributes = copy.copy(vars(loader))
    plain_model = Plain()
    again = trainer(RingDilatedStrategy(), dist.get_world_size(), max_steps=1)
    again.fit(plain_model, loader)
    same = loader.dataset is attributes["dataset"] and loader.collate_fn is attributes["collate_fn"]
    return before, len(dist.distributed_c10d._world.pg_map), same, active_sequence()


def test_groups_are_made_once(pools):
    """`setup_environment` runs in every fit, validate, test and predict, but groups are created only once."""
    for before, after, same, active in pools(2).run(2, groups_after):
        assert after - before <= 4  # only the second Trainer has created groups
        assert same and active is None


MIXERS = {
    "batch norm": (lambda: nn.BatchNorm1d(8), "takes statistics over tokens", "LayerNorm or RMSNorm"),
    "group norm": (lambda: nn.GroupNorm(2, 8), "takes statistics over tokens", "LayerNorm"),
    "attention": (
        lambda: nn.MultiheadAttention(8, 2),
        "attends to this rank's tokens only",
        "MultiheadDilatedAttention",
    ),
    "convolution": (lambda: nn.Conv1d(8, 8, 3), "reaches over the edge of a shard", "SequenceConv1d"),
    "lstm": (lambda: nn.LSTM(8, 8), "runs along the sequence", "sequence_gather"),
    "max pool": (lambda: nn.MaxPool1d(2), "pools neighbouring tokens", "sequence_gather"),
    "mean pool": (lambda: nn.AdaptiveAvgPool1d(1), "pools over this rank's tokens only", "sequence_mean"),
}


ALLOWED = {"pointwise": lambda: nn.Conv1d(8, 8, 1), "with halo": lambda: SequenceConv1d(8, 8, 3)}


def with_module(rank, group, name, allow):
    model = Plain()
    model.extra = nn.Sequential(nn.Linear(8, 8), (ALLOWED.get(name) or MIXERS[name][0])())
    for p in model.extra.parameters():
        p.requires_grad_(False)
    trainer(RingDilatedStrategy(allow=allow), launched(rank), max_steps=1).fit(model, DataLoader(Numbers()))


@pytest.mark.parametrize("name", MIXERS)
def test_modules_that_mix_tokens(pools, name):
    for error in pools(2).errors(ValueError, 2, with_module, name, []):
        assert f"extra.1 ({type(MIXERS[name][0]()).__name__})" in error
        assert MIXERS[name][1] in error and MIXERS[name][2] in error


def test_modules_that_may_mix(pools):
    pools(2).run(2, with_module, "convolution", ["extra"])
    pools(1).run(1, with_module, "convolution", [])
    for name in ALLOWED:
        pools(2).run(2, with_module, name, [])


def bytes_read(rank, group, folder, layout):
    """Return (bytes that this rank read in a fit of two steps, its number of tokens)."""
    data = ByteDataModule(folder, seq_len=1000, val_fraction=0, test_fraction=0)
    lengths = []

    class Count(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            lengths.append(batch["tokens"].shape[1])

    built, model, _, _ = make(
        Run(steps=2, strategy={"layout": layout}, model={"vocab_size": 256}), launched(rank), callbacks=[Count()]
    )
    built.fit(model, data)
    return data.stream.bytes_read, sum(lengths)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_nobody_reads_the_whole_sequence(pools, tmp_path, layout):
    (tmp_path / "text").write_bytes(bytes(range(256)) * 40)
    results = pools(4).run(4, bytes_read, str(tmp_path), layout)
    for rank, (read, tokens) in enumerate(results):
        # each stretch reads one more byte, for the last label; the two zigzag chunks of rank 3 are one stretch
        halo = 2 if layout == "zigzag" and rank < 3 else 1
        fetched = read // (250 + halo)  # Lightning may prefetch one batch
        assert tokens == 500 and read == fetched * (250 + halo) and fetched in (2, 3)


def ambiguous(rank, group):
    model = Plain()
    model.sequence_spec = None
    trainer(RingDilatedStrategy(), launched(rank), max_steps=1).fit(model, DataLoader(Numbers()))


def test_nothing_is_guessed(pools):
    assert all("Set `sequence_spec`" in error for error in pools(2).errors(ValueError, 2, ambiguous))
