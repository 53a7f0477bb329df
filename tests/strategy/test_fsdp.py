"""ring_dilated_fsdp: behaviour that only occurs with sharded parameters."""

import shutil
from pathlib import Path
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
from torch.distributed.tensor import DTensor

from lightning_dilated import LongNetLM, RingDilatedFSDPStrategy, RingDilatedStrategy

from .runs import PATTERN, Data, Record, Run, full, launched, make, trainer

pytestmark = pytest.mark.full

RUN = Run(fsdp=True, double=True, steps=2)


def test_16_mixed_is_refused():
    """Lightning does not check strategies given by name, and uses bf16 on a CPU, so the test sets the plugin."""
    strategy = RingDilatedFSDPStrategy()
    strategy.precision_plugin = mock.Mock(precision="16-mixed")
    with pytest.raises(ValueError, match="takes no precision='16-mixed'"):
        strategy._configure_launcher()


def reductions(rank, group, accumulate):
    """Return (number of reduce-scatters in two optimizer steps, whether every parameter was sharded)."""
    built, model, data, _ = make(RUN.but(accumulate=accumulate), launched(rank))
    real, calls = param_group.foreach_reduce, []
    with mock.patch.object(param_group, "foreach_reduce", lambda *a, **k: calls.append(1) or real(*a, **k)):
        built.fit(model, data)
    return len(calls), all(isinstance(p, DTensor) for p in model.parameters())


def test_accumulation_reduces_once(pools):
    """With accumulation, gradients are reduced once per step. Lightning's own strategy reduces every micro-batch."""
    (once, sharded), _ = pools(2).run(2, reductions, 1)
    (twice, _), _ = pools(2).run(2, reductions, 2)
    assert sharded and once == twice > 0


class HalfSharded(LongNetLM):
    """Shards its blocks, but not its other modules."""

    def configure_model(self):
        super().configure_model()
        for block in self.transformer.blocks:
            if not isinstance(next(block.parameters()), DTensor):
                fully_shard(block, mesh=self.device_mesh._flatten("everyone"))


def half_sharded(rank, group):
    model = HalfSharded(pattern=PATTERN, vocab_size=11, dim=16, depth=2)
    trainer(RingDilatedFSDPStrategy(), launched(rank), max_steps=1).fit(model, Data(RUN))


def test_parameters_that_were_forgotten(pools):
    """Unsharded parameters, here of embedding and head, would diverge between ranks without an error."""
    for error in pools(2).errors(ValueError, 2, half_sharded):
        assert "not ['embedding.weight'" in error and "every rank would train these on its own" in error


def with_decays(rank, group):
    """Train recurrences in bf16-true. Return (dtypes of decays, other dtypes, whether the decays changed, losses)."""
    pl.seed_everything(4, verbose=False)
    model = LongNetLM(pattern=PATTERN, vocab_size=11, dim=16, depth=2, recurrence={"gate_init": 1.0})
    record, starts = Record(), {}
    built = trainer(RingDilatedFSDPStrategy(), launched(rank), max_steps=3, callbacks=[record], precision="bf16-true")
    model.on_train_start = lambda: starts.update({n: full(p).detach().clone() for n, p in model.named_parameters()})
    built.fit(model, Data(RUN.but(double=False)))
    decays = {n: p for n, p in model.named_parameters() if ".decay." in n}
    dtypes = [{p.dtype for n, p in model.named_parameters() if (n in decays) == own} for own in (True, False)]
    return *dtypes, all(not torch.equal(full(p), starts[n]) for n, p in decays.items()), record.losses


def test_decays_of_recurrences_stay_in_fp32(pools):
    """`fully_shard` requires parameters of one dtype, so fp32 decays are sharded separately."""
    for wide, narrow, moved, losses in pools(2).run(2, with_decays):
        assert wide == {torch.float32} and narrow == {torch.bfloat16} and moved
        assert len(losses) == 3 and all(torch.isfinite(torch.as_tensor(x)).all() for x in losses)


def unlike(rank, group):
    """Validate five samples on two data ranks."""
    built, model, data, _ = make(RUN.but(strategy={"sequence_size": 1}, batch_size=2), launched(rank))
    with mock.patch("tests.strategy.runs.Tokens.__len__", lambda self: 5):
        built.validate(model, data, verbose=False)


def test_unlike_numbers_of_batches(pools):
    """The data rank with more batches would wait for parameters that the other rank does not gather."""
    for error in pools(2).errors(ValueError, 2, unlike):
        assert "the ranks have [3, 2] batches" in error


FOLDER, WHOLE_FILE = RingDilatedFSDPStrategy(), RingDilatedFSDPStrategy(save_distributed_checkpoint=False)


def part(rank, group, folder, strategy, stop, ckpt, recurrence=None):
    """Train up to step `stop`. Return (parameters, path of the new checkpoint, number of steps)."""
    pl.seed_everything(4, verbose=False)
    world, record = launched(rank), Record()
    built = trainer(strategy, world, max_steps=stop, callbacks=[record])
    model = LongNetLM(pattern=PATTERN, vocab_size=11, dim=16, depth=2, recurrence=recurrence).double()
    built.fit(model, Data(RUN), ckpt_path=ckpt)
    path = str(Path(folder) / f"{stop}.{world}.ckpt")
    built.save_checkpoint(path)
    return torch.cat([full(p).detach().flatten() for p in model.parameters()]), path, len(record.losses)


@pytest.mark.parametrize(
    "after, strategy",
    [
        pytest.param(1, WHOLE_FILE, id="1-file"),
        pytest.param(4, FOLDER, id="4-folder"),
        pytest.param(1, FOLDER, id="1-folder", marks=pytest.mark.slow),
        pytest.param(4, WHOLE_FILE, id="4-file", marks=pytest.mark.slow),
    ],
)
def test_resumes_on_other_ranks(pools, tmp_path, after, strategy):
    """Weights and optimizer states resume, even on one rank, where Lightning refuses unsharded parameters.

    The position in the data is restored by the loader (see test_resume).
    """
    _, path, _ = pools(2).run(2, part, str(tmp_path), strategy, 2, None)[0]
    assert Path(path).is_file() == (strategy is WHOLE_FILE)
    want, _, steps = pools(2).run(2, part, str(tmp_path), strategy, 4, path)[0]
    got, _, again = pools(after).run(after, part, str(tmp_path), strategy, 4, path)[0]
    assert steps == again == 2
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "recurrence",
    [pytest.param(None, id="two groups", marks=pytest.mark.slow), pytest.param({"gate_init": 1.0}, id="three groups")],
)
@pytest.mark.parametrize("before, after", [(RingDilatedStrategy(), FOLDER), (WHOLE_FILE, RingDilatedStrategy())])
def test_one_file_of_another_strategy(pools, tmp_path, before, after, recurrence):
    """Each optimizer state is assigned to its parameter, even if the order of parameter groups differs."""
    _, path, _ = pools(2).run(2, part, str(tmp_path), before, 2, None, recurrence)[0]
    assert Path(path).is_file()
    want, *_ = pools(2).run(2, part, str(tmp_path), before, 4, path, recurrence)[0]
    got, _, steps = pools(2).run(2, part, str(tmp_path), after, 4, path, recurrence)[0]
    assert steps == 2
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def replacing(rank, group, path):
    """Write a file, a folder and again a file to `path`. Return (kind after each write, this rank's removals)."""
    model = LongNetLM(pattern=PATTERN, vocab_size=11, dim=16, depth=2).double()
    kinds, removed = [], []
    unlink, rmtree = Path.unlink, shutil.rmtree
    for strategy in (RingDilatedStrategy(), FOLDER, WHOLE_FILE):
        built = trainer(strategy, launched(rank), max_steps=1)
        built.fit(model, Data(RUN))
        with (
            mock.patch.object(Path, "unlink", lambda p, *a, **k: (removed.append(p), unlink(p, *a, **k))),
            mock.patch.object(shutil, "rmtree", lambda p, *a, **k: (removed.append(p), rmtree(p, *a, **k))),
        ):
            built.save_checkpoint(path)
        dist.barrier()
        kinds.append("folder" if Path(path).is_dir() else "file")
        dist.barrier()
    return kinds, len(removed)


def test_one_form_replaces_the_other(pools, tmp_path):
    """Only one rank removes the old form. With Lightning, each rank would, and the second removal would fail."""
    (kinds, first), (other_kinds, second) = pools(2).run(2, replacing, str(tmp_path / "last.ckpt"))
    assert kinds == other_kinds == ["file", "folder", "file"]
    assert first == 2 and second == 0


def with_frozen_embedding(rank, group, path):
    """Resume from one file that was saved with more trained parameters."""
    model = LongNetLM(pattern=PATTERN, vocab_size=11, dim=16, depth=2).double()
    model.embedding.requires_grad_(False)
    trainer(RingDilatedFSDPStrategy(), launched(rank), max_steps=4).fit(model, Data(RUN), ckpt_path=path)


def test_one_file_of_another_optimizer(pools, tmp_path):
    _, path, _ = pools(2).run(2, part, str(tmp_path), RingDilatedStrategy(), 2, None)[0]
    for error in pools(2).errors(ValueError, 2, with_frozen_embedding, path):
        assert "AdamW has groups of" in error and "train the same parameters" in error
