"""torchao's AdamW with 8-bit states learns about as well as AdamW, and resumes from a file or a ShardedCheckpoint."""

from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO

from lightning_dilated.callbacks import ShardedCheckpoint

from ..distributed.forked import run_ranks
from . import batch, loader, tiny, trainer

pytestmark = pytest.mark.full

optim = pytest.importorskip("torchao.optim", reason="needs the extra eightbit")


def fit(kind, steps, ckpt=None, **options):
    """Return (number of steps, loss, optimizer) of a run."""
    torch.manual_seed(0)
    model = tiny(dtype=torch.float32, dim=64, optimizer=partial(kind, lr=3e-3)).train()
    batches = [batch(4, 64)] * 100
    runs = trainer(max_steps=steps, **options)
    runs.fit(model, loader(*batches), ckpt_path=ckpt)
    return runs.global_step, float(runs.callback_metrics["train_loss"]), runs.optimizers[0]


@pytest.fixture(autouse=True)
def eager():
    """Disable compilation: torchao compiles a step for each shape, which is slow and not tested here."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("stance", ["force_eager", pytest.param("default", marks=pytest.mark.slow)])
def test_learns_like_adamw(stance):
    torch.compiler.set_stance(stance)
    _, want, _ = fit(torch.optim.AdamW, 20)
    _, loss, optimizer = fit(optim.AdamW8bit, 20)
    assert want < 1.5 and loss == pytest.approx(want, rel=0.05)
    assert any(type(x).__name__ == "OptimState8bit" for s in optimizer.state.values() for x in s.values())


@pytest.mark.parametrize("made", [optim.AdamW8bit, optim.AdamW4bit, optim.AdamWFp8])
def test_goes_on(tmp_path, made):
    """A run that resumes from a folder has the loss of an uninterrupted run; its optimizer states keep their types."""
    want, kinds = fit(made, 6)[1:]
    for steps in (3, 6):
        saved = ShardedCheckpoint(str(tmp_path), every_n_train_steps=3, resume="auto")
        done, loss, optimizer = fit(made, steps, enable_checkpointing=True, callbacks=[saved])
        assert done == steps
    types = lambda x: [type(t).__name__ for s in x.state.values() for t in s.values()]  # noqa: E731
    assert loss == want and types(optimizer) == types(kinds)
    assert any(name.startswith("OptimState") for name in types(optimizer))


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a ShardedCheckpoint"])
def test_goes_on_from_one_file(tmp_path, beside):
    """A resumed run has the same loss. torch could not read such states if Lightning passed a function as `map_location`."""
    _, want, _ = fit(optim.AdamW8bit, 6)
    fit(optim.AdamW8bit, 3, enable_checkpointing=True, callbacks=[ModelCheckpoint(str(tmp_path), save_last=True)])
    extra = {"enable_checkpointing": True, "callbacks": [ShardedCheckpoint(str(tmp_path / "folder"))]} if beside else {}
    done, loss, optimizer = fit(optim.AdamW8bit, 6, str(tmp_path / "last.ckpt"), **extra)
    assert done == 6 and loss == want
    assert any(type(x).__name__ == "OptimState8bit" for s in optimizer.state.values() for x in s.values())


def test_weights_of_one_file(tmp_path):
    """A process without torchao can read the weights to predict."""
    saved = ModelCheckpoint(str(tmp_path), save_last=True)
    fit(optim.AdamW8bit, 1, enable_checkpointing=True, callbacks=[saved])
    script = tmp_path / "reads.py"
    script.write_text(
        f"""import sys
from lightning_dilated.cli.load_model import load_module
assert "torchao" not in sys.modules
print(type(load_module({str(tmp_path / "last.ckpt")!r})))
"""
    )
    ended = run_ranks(1, script, cwd=tmp_path)
    assert "LongNetLM" in ended.stdout and ended.codes == [0], ended.stderr


class Odd(TorchCheckpointIO):
    """A reader that a user defines."""


@pytest.mark.parametrize("made", [TorchCheckpointIO, Odd])
def test_another_reader_is_left_alone(made):
    """Only Lightning's default reader is changed to load to the host."""
    io, passed = made(), {}
    runs = trainer(max_steps=1, plugins=[io])
    runs.fit(tiny(dtype=torch.float32), loader(batch(2, 32)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning.fabric.plugins.io.torch_io.pl_load", lambda _, **options: passed.update(options))
        io.load_checkpoint(__file__, weights_only=True)
    assert (passed.pop("map_location") == "cpu") == (made is TorchCheckpointIO) and passed == {"weights_only": True}
