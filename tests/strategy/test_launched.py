"""Errors before training: a wrong environment of the launcher, and impossible numbers of sequences per step."""

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_dilated import DilatedPattern, LongNetLM, RingDilatedStrategy
from lightning_dilated.data import ByteDataModule
from lightning_dilated.strategy import launched_nodes

from .runs import trainer

TORCHRUN = {"TORCHELASTIC_RUN_ID": "job", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "3"}
TORCHRUN |= {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
SLURM = {"SLURM_NTASKS": "8", "SLURM_NNODES": "4", "SLURM_JOB_NAME": "train", "SLURM_PROCID": "0"}


@pytest.fixture
def launcher(monkeypatch):
    """Return a function that sets a launcher's environment variables."""

    def set_all(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_all


@pytest.mark.parametrize("variables, nodes", [({}, 1), (TORCHRUN, 3), (SLURM, 4)])
def test_nodes(launcher, variables, nodes):
    launcher(variables)
    assert launched_nodes() == nodes


def test_a_trainer_of_as_many_ranks_as_torchrun_started(launcher):
    launcher(TORCHRUN)
    strategy = trainer(RingDilatedStrategy(sequence_size=[4, 2]), 2, num_nodes=launched_nodes()).strategy
    assert strategy.sizes.shape == (3, 2, 1)


@pytest.mark.parametrize("devices, nodes", [(2, 1), (4, 3), (6, 2)])
def test_a_trainer_of_other_ranks(launcher, devices, nodes):
    launcher(TORCHRUN)
    words = rf"6 ranks, 2 on each of 3 nodes, .*devices={devices} and num_nodes={nodes}. Take devices=2"
    with pytest.raises(ValueError, match=words):
        trainer("ring_dilated", devices, num_nodes=nodes)


class Numbers(IterableDataset):
    seq_len = 16

    def __iter__(self):
        return iter([{"tokens": torch.zeros(16, dtype=torch.int64), "labels": torch.zeros(16, dtype=torch.int64)}] * 4)


def fit(strategy, batch_size=1, loader=None, kind=LongNetLM, ckpt=None, **options):
    """Fit one step, unless the options contain a number of steps or epochs."""
    model = kind(DilatedPattern.longnet([8], [1]), dim=8, depth=1, num_heads=1)
    data = ByteDataModule(seq_len=16, batch_size=batch_size) if loader is None else loader
    long = {} if {"max_epochs", "max_steps"} & {*options} else {"max_steps": 1}
    run = trainer(strategy, 1, limit_val_batches=0, **long, **options)
    run.fit(model, data, ckpt_path=ckpt)
    return run


def test_batches_of_a_step():
    run = fit(RingDilatedStrategy(global_batch=6), batch_size=2)
    assert run.accumulate_grad_batches == 3 and run.fit_loop.total_batch_idx == 2
    run.fit_loop.epoch_loop.max_steps = 2  # the Trainer continues, still with the accumulation of its first fit
    run.fit(run.lightning_module, ByteDataModule(seq_len=16, batch_size=3))
    assert run.accumulate_grad_batches == 2


def samples(count):
    return [{"tokens": torch.arange(16), "labels": torch.arange(16)} for _ in range(count)]


class Manual(LongNetLM):
    automatic_optimization = False


TWO = [DataLoader(samples(4)), DataLoader(samples(4), batch_size=2)]
#: (global_batch, options of `fit`, part of the error)
REFUSED = [
    (6, {"batch_size": 4}, r"1 sequence\(s\) at a time in batches of 4: make batch_size one of \[1, 2, 3, 6\]"),
    (6, {"batch_size": 2, "accumulate_grad_batches": 2}, r"so does Trainer\(accumulate_grad_batches=2\)"),
    (2, {"loader": DataLoader(Numbers(), batch_size=None)}, "needs a DataLoader with a batch size"),
    (4, {"loader": TWO}, "of one training loader, but there are 2"),
    (4, {"loader": dict(zip("ab", TWO, strict=True))}, "of one training loader, but there are 2"),
    (
        1,
        {"callbacks": [pl.callbacks.GradientAccumulationScheduler({0: 1, 3: 2})]},
        "so does the callback GradientAccumulationScheduler",
    ),
    (1, {"kind": Manual}, "no effect on Manual, which steps its optimizers itself"),
]


@pytest.mark.parametrize("sequences, options, words", REFUSED)
def test_steps_that_cannot_be(sequences, options, words):
    with pytest.raises(ValueError, match=words):
        fit(RingDilatedStrategy(global_batch=sequences), **options)


def test_an_epoch_ends_with_a_whole_step():
    """With five batches and two per step, the fifth batch is dropped, because its step would have half a gradient."""
    run = fit(RingDilatedStrategy(global_batch=4), loader=DataLoader(samples(10), batch_size=2), max_epochs=3)
    assert run.global_step == 6 and run.fit_loop.total_batch_idx == 11
    assert run.limit_train_batches == 1.0, "the Trainer has its own limit again"


def test_a_reloaded_loader_of_another_length():
    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(samples(7 + 4 * self.trainer.current_epoch))

    run = fit(RingDilatedStrategy(global_batch=4), loader=Data(), max_epochs=3, reload_dataloaders_every_n_epochs=1)
    assert run.global_step == 1 + 2 + 3


def test_packed_epochs_end_with_a_whole_step(tmp_path):
    """With packed data, each epoch has a different number of packs, which is known only when the epoch begins."""
    for i in range(30):
        (tmp_path / f"{i}.bin").write_bytes(b"a" * (3 + 7 * i % 23))
    data = ByteDataModule(str(tmp_path), seq_len=32, pack_tokens=32, val_fraction=0, test_fraction=0)
    ends = []

    class Count(pl.Callback):
        def on_train_epoch_end(self, trainer, module):
            ends.append((trainer.num_training_batches, len(trainer.train_dataloader)))

    run = fit(RingDilatedStrategy(global_batch=4), loader=data, max_epochs=4, callbacks=[Count()])
    assert [batches for batches, _ in ends] == [packs // 4 * 4 for _, packs in ends]
    assert any(packs % 4 for _, packs in ends) and 4 * run.global_step == sum(batches for batches, _ in ends)


def test_less_than_a_step(tmp_path):
    with pytest.raises(ValueError, match="takes 4 batches of each rank, and an epoch has 3"):
        fit(RingDilatedStrategy(global_batch=4), loader=DataLoader(samples(3)))
    for i in range(3):
        (tmp_path / f"{i}.bin").write_bytes(b"a" * 20)
    data = ByteDataModule(str(tmp_path), seq_len=32, pack_tokens=32, val_fraction=0, test_fraction=0)
    with pytest.raises(ValueError, match="takes 4 batches of each rank, and an epoch has 3"):
        fit(RingDilatedStrategy(global_batch=4), loader=data)
    fit(RingDilatedStrategy(global_batch=4), loader=DataLoader(samples(3)), fast_dev_run=True)


def test_a_checkpoint_within_a_step(tmp_path):
    """If a loader cannot resume, the interrupted step is completed with different batches, which causes a warning."""
    run = fit(RingDilatedStrategy(), loader=DataLoader(samples(8)))
    run.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.warns(UserWarning, match="saved after 1 of the 4 batches of a step with global_batch=4"):
        fit(RingDilatedStrategy(global_batch=4), loader=DataLoader(samples(8)), max_steps=2, ckpt=tmp_path / "a.ckpt")


def test_nodes_with_different_numbers_of_ranks(launcher):
    launcher({**TORCHRUN, "WORLD_SIZE": "8"})
    with pytest.raises(ValueError, match="8 ranks on 3 nodes, 2 of them on this one"):
        trainer("ring_dilated", 2, num_nodes=4)


def test_the_command_line_takes_the_launchers_nodes(launcher, monkeypatch):
    from lightning_dilated.cli.lightning_cli import Trainer

    launcher(SLURM)
    calls = []
    monkeypatch.setattr(pl.Trainer, "__init__", lambda self, **options: calls.append(options["num_nodes"]))
    Trainer(num_nodes="auto"), Trainer(num_nodes=2), Trainer()
    assert calls == [4, 2, 1]
