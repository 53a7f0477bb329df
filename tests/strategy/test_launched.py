"""What the launcher started, and steps of so many sequences: errors before anything is trained."""

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
    """Sets the variables of a launcher."""

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
    made = trainer(RingDilatedStrategy(sequence_size=[4, 2]), 2, num_nodes=launched_nodes()).strategy
    assert made.sizes.shape == (3, 2, 1)


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


def fit(strategy, batch_size=1, loader=None, **options):
    """A fit of one step."""
    model = LongNetLM(DilatedPattern.longnet([8], [1]), dim=8, depth=1, num_heads=1)
    data = ByteDataModule(seq_len=16, batch_size=batch_size) if loader is None else None
    made = trainer(strategy, 1, max_steps=1, limit_val_batches=0, **options)
    made.fit(model, loader if data is None else data)
    return made


def test_batches_of_a_step():
    made = fit(RingDilatedStrategy(global_batch=6), batch_size=2)
    assert made.accumulate_grad_batches == 3 and made.fit_loop.total_batch_idx == 2
    made.fit_loop.epoch_loop.max_steps = 2  # the same Trainer goes on, with an accumulation that it was given before
    made.fit(made.lightning_module, ByteDataModule(seq_len=16, batch_size=3))
    assert made.accumulate_grad_batches == 2


@pytest.mark.parametrize(
    "sequences, batch_size, options, words",
    [
        (
            6,
            4,
            {},
            r"6 sequences a step .* 1 sequence\(s\) at a time in batches of 4: make batch_size one of \[1, 2, 3, 6\]",
        ),
        (6, 2, {"accumulate_grad_batches": 2}, r"so does Trainer\(accumulate_grad_batches=2\)"),
    ],
)
def test_steps_that_cannot_be(sequences, batch_size, options, words):
    with pytest.raises(ValueError, match=words):
        fit(RingDilatedStrategy(global_batch=sequences), batch_size, **options)


def test_a_loader_without_batches_of_its_own():
    with pytest.raises(ValueError, match="needs a DataLoader with a batch size"):
        fit(RingDilatedStrategy(global_batch=2), loader=DataLoader(Numbers(), batch_size=None))


def test_the_command_line_takes_the_launchers_nodes(launcher, monkeypatch):
    from lightning_dilated.cli.trainer import Trainer

    launcher(SLURM)
    seen = []
    monkeypatch.setattr(pl.Trainer, "__init__", lambda self, **options: seen.append(options["num_nodes"]))
    Trainer(num_nodes="auto"), Trainer(num_nodes=2), Trainer()
    assert seen == [4, 2, 1]
