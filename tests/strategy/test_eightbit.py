"""torchao's AdamW with 8-bit states on several ranks: with and without offloading, in a second start, and resumed."""

import functools
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch._functorch import config as functorch_config

from lightning_dilated import LongNetLM, RingDilatedFSDPStrategy, RingDilatedStrategy
from lightning_dilated.callbacks import ShardedCheckpoint
from lightning_dilated.data import ByteDataModule

from .runs import PATTERN, Record, Run, full, launched, make, trainer

pytestmark = pytest.mark.full

optim = pytest.importorskip("torchao.optim", reason="needs the extra eightbit")

#: 11 rows of the token table cannot be sharded evenly; half of a 512 x 128 matrix still has 8-bit states
MODEL = {"dim": 128, "depth": 1, "optimizer": functools.partial(optim.AdamW8bit, lr=3e-3)}
RUN = Run(fsdp=True, precision="32-true", steps=3, batch_size=2, clip=0.5, model=MODEL)


def fit(rank, group, run, cache):
    """Return (losses, parameters, kinds of states, devices of states, whether torch's graph cache was enabled)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", cache)
        torch._dynamo.reset()  # as if in a new process
        built, model, data, record = make(run, launched(rank))
        step, caches = model.training_step, []
        model.training_step = lambda *x: caches.append(functorch_config.enable_autograd_cache) or step(*x)
        with functorch_config.patch(enable_autograd_cache=True):
            built.fit(model, data)
    states = [t for s in built.optimizers[0].state.values() for t in s.values()]
    kinds = {type(t.to_local() if hasattr(t, "to_local") else t).__name__ for t in states}
    parameters = [full(p).detach().clone() for p in model.parameters()]
    return record.losses, parameters, kinds, {t.device.type for t in states}, set(caches)


@pytest.mark.slow
def test_sharded_parameters(pools, tmp_path):
    """Results are equal bit by bit with and without cpu_offload. The second start reuses compiled code."""
    losses, want, *_ = pools(2).run(2, fit, RUN, str(tmp_path))[0]
    for run in (RUN, RUN.but(strategy={"cpu_offload": True})):
        for got, parameters, kinds, places, cached in pools(2).run(2, fit, run, str(tmp_path)):
            assert "OptimState8bit" in kinds and places == {"cpu"} and cached == {True}
            assert got == losses
            torch.testing.assert_close(parameters, want, rtol=0, atol=0)


class Telling(optim.AdamW8bit):
    """Records in each step whether torch's graph cache is enabled."""

    def step(self, closure=None):
        self.cached = {functorch_config.enable_autograd_cache, *getattr(self, "cached", ())}
        return super().step(closure)


def part_of_run(rank, group, folder, strategy, stop, ckpt, compiled=False, saved=None):
    """Train up to step `stop` and save. Return (losses, kinds of states, path, whether the graph cache was enabled)."""
    pl.seed_everything(1, verbose=False)
    torch._dynamo.reset()  # as if in a new process
    world, record = launched(rank), Record()
    data = ByteDataModule(folder, seq_len=40, batch_size=1, val_fraction=0, test_fraction=0)
    model = LongNetLM(PATTERN, dim=128, depth=1, vocab_size=263, optimizer=functools.partial(Telling, lr=3e-3))
    savers = [] if saved is None else [ShardedCheckpoint(saved, resume="auto")]
    built = trainer(strategy, world, max_steps=stop, callbacks=[record, *savers], enable_checkpointing=bool(savers))
    stance = torch.compiler.set_stance("default" if compiled else "force_eager")  # compilation takes long
    with pytest.MonkeyPatch.context() as patch, functorch_config.patch(enable_autograd_cache=True), stance:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{folder}.cache")
        built.fit(model, data, ckpt_path=ckpt)
    path = f"{folder}.{stop}.ckpt"
    built.save_checkpoint(path)
    states = [t for s in built.optimizers[0].state.values() for t in s.values()]
    kinds = {type(t.to_local() if hasattr(t, "to_local") else t).__name__ for t in states}
    return record.losses, kinds, path, built.optimizers[0].cached


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a").write_bytes(bytes(97 + (i * i) % 26 for i in range(1000)))
    return str(folder)


@pytest.mark.parametrize("made", [RingDilatedStrategy, RingDilatedFSDPStrategy])
def test_resumed(pools, text, made):
    """A run resumes exactly, from one file, or from a folder with uneven shards."""
    want, *_ = pools(2).run(2, part_of_run, text, made(), 4, None)[0]
    first, _, path, _ = pools(2).run(2, part_of_run, text, made(), 2, None)[0]
    assert Path(path).is_file() == (made is RingDilatedStrategy)
    for resumed, kinds, _, cached in pools(2).run(2, part_of_run, text, made(), 4, path):
        assert first + resumed == want and "OptimState8bit" in kinds
        assert cached == {made is RingDilatedStrategy}


@pytest.mark.parametrize("made", [pytest.param(RingDilatedStrategy, marks=pytest.mark.slow), RingDilatedFSDPStrategy])
def test_resumed_from_a_sharded_checkpoint(pools, text, made):
    want, *_ = pools(2).run(2, part_of_run, text, made(), 4, None)[0]
    run = lambda stop: pools(2).run(2, part_of_run, text, made(), stop, None, False, f"{text}.saved")  # noqa: E731
    first = run(2)[0][0]
    for resumed, kinds, *_ in run(4):
        assert first + resumed == want and "OptimState8bit" in kinds


def validated(rank, group, folder, ckpt):
    """Return the validation loss with the weights of a folder, sharded over ranks."""
    data = ByteDataModule(folder, seq_len=40, batch_size=1, val_fraction=0.2, test_fraction=0)
    model = LongNetLM(PATTERN, dim=128, depth=1, vocab_size=263, optimizer=functools.partial(Telling, lr=3e-3))
    built = trainer(RingDilatedFSDPStrategy(), launched(rank), max_steps=1)
    return built.validate(model, data, ckpt_path=ckpt, verbose=False)[0]["val_loss"]


def test_whole_states_are_not_sharded(pools, text):
    """Sharded training refuses 8-bit states of unsharded parameters at the start. The weights alone can be loaded."""
    saved = f"{text}.saved"
    pools(2).run(2, part_of_run, text, RingDilatedStrategy(), 1, None, False, saved)
    for error in pools(2).errors(ValueError, 2, part_of_run, text, RingDilatedFSDPStrategy(), 2, None, False, saved):
        assert "holds OptimState8bit of whole parameters" in error
    first, second = pools(2).run(2, validated, text, saved)
    assert first == second and first < 6


@pytest.mark.slow
def test_sharded_parameters_resumed_twice(pools, text):
    """The optimizer compiles before the first step to create the states to load. The second start reuses the code."""
    _, _, path, _ = pools(2).run(2, part_of_run, text, RingDilatedFSDPStrategy(), 1, None)[0]
    runs = [pools(2).run(2, part_of_run, text, RingDilatedFSDPStrategy(), 2, path, True)[0][0] for _ in range(2)]
    assert len(runs[0]) == 1 and runs[0] == runs[1]


def test_sharded_parameters_and_one_file(pools, text):
    """Writing or reading one file is refused before training."""
    _, _, path, _ = pools(2).run(2, part_of_run, text, RingDilatedStrategy(), 1, None)[0]
    whole = RingDilatedFSDPStrategy(save_distributed_checkpoint=False)
    for strategy, ckpt, says in (
        (whole, None, "save_distributed_checkpoint=False writes one file, and"),
        (RingDilatedFSDPStrategy(), path, "1.ckpt is one file, and the states of torchao's AdamW8bit"),
    ):
        for error in pools(2).errors(ValueError, 2, part_of_run, text, strategy, 1, ckpt):
            assert says in error and "folder" in error
