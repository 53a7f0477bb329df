"""AdamW with states of 8 bits, from torchao: learns about as AdamW does, and a checkpoint of it loads."""

from functools import partial

import pytest
import torch

from . import batch, loader, tiny, trainer

optim = pytest.importorskip("torchao.optim", reason="needs the extra eightbit")


def test_learns_like_adamw(tmp_path):
    losses = []
    for made in (torch.optim.AdamW, optim.AdamW8bit):
        torch.manual_seed(0)
        model = tiny(dtype=torch.float32, dim=64, optimizer=partial(made, lr=3e-3)).train()
        runs = trainer(max_epochs=1, enable_checkpointing=False)
        runs.fit(model, loader(*[batch(4, 64)] * 20))
        losses.append(float(runs.callback_metrics["train_loss"]))
    assert losses[0] < 1.5 and losses[1] == pytest.approx(losses[0], rel=0.05)
    states = [x for s in runs.optimizers[0].state.values() for x in s.values()]
    assert any(type(x).__name__ == "OptimState8bit" for x in states)
    path = tmp_path / "a.ckpt"
    runs.save_checkpoint(path)
    again = tiny(dtype=torch.float32, dim=64, optimizer=partial(optim.AdamW8bit, lr=3e-3)).train()
    more = trainer(max_epochs=2)
    more.fit(again, loader(*[batch(4, 64)] * 20), ckpt_path=path, weights_only=False)
    assert more.global_step == 40
