"""AdamW with states of 8 bits, from torchao: learns about as AdamW does, and goes on from a ShardedCheckpoint."""

from functools import partial

import pytest
import torch

from lightning_dilated.callbacks import ShardedCheckpoint

from . import batch, loader, tiny, trainer

optim = pytest.importorskip("torchao.optim", reason="needs the extra eightbit")


def fit(made, steps, **options):
    """(steps done, loss, optimizer) of a run."""
    torch.manual_seed(0)
    model = tiny(dtype=torch.float32, dim=64, optimizer=partial(made, lr=3e-3)).train()
    given = [batch(4, 64)] * 100
    runs = trainer(max_steps=steps, **options)
    runs.fit(model, loader(*given))
    return runs.global_step, float(runs.callback_metrics["train_loss"]), runs.optimizers[0]


def test_learns_like_adamw():
    _, want, _ = fit(torch.optim.AdamW, 20)
    _, found, optimizer = fit(optim.AdamW8bit, 20)
    assert want < 1.5 and found == pytest.approx(want, rel=0.05)
    assert any(type(x).__name__ == "OptimState8bit" for s in optimizer.state.values() for x in s.values())


def test_goes_on(tmp_path):
    """torch does not load such states from a plain .ckpt, but from a folder it does."""
    _, want, _ = fit(optim.AdamW8bit, 20)
    for steps in (10, 20):
        saved = ShardedCheckpoint(str(tmp_path), every_n_train_steps=10, resume="auto")
        done, loss, _ = fit(optim.AdamW8bit, steps, enable_checkpointing=True, callbacks=[saved])
        assert done == steps
    # the learning rate comes back as a number of 64 bits where torchao had one of 32
    assert loss == pytest.approx(want, rel=1e-3)
