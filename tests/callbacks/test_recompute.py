"""ActivationRecompute: the same training, blocks told and untold, and who it refuses."""

import lightning.pytorch as pl
import pytest
import torch

from lightning_dilated.callbacks import ActivationRecompute
from lightning_dilated.models.blocks import TransformerBlock

from ..models import batch, loader, tiny, trainer


@pytest.mark.parametrize("policy", ["block", "attention-kept"])
def test_the_same_weights_come_out(policy, monkeypatch):
    seen, real, weights = [], TransformerBlock.forward, []
    monkeypatch.setattr(
        TransformerBlock, "forward", lambda self, *a, **k: seen.append(self.recompute) or real(self, *a, **k)
    )
    for callbacks in ([], [ActivationRecompute(policy)]):
        pl.seed_everything(3)
        model, batches = tiny().train(), [batch(2, 24) for _ in range(3)]
        trainer(max_epochs=1, callbacks=callbacks).fit(model, loader(*batches))
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        assert {b.recompute for b in model.transformer.blocks} == {"none"}  # left as it was
    assert set(seen) == {"none", policy}
    torch.testing.assert_close(*weights)


def test_a_module_without_blocks():
    class Other(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

        def training_step(self, batch, batch_idx):
            return self.layer(batch).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    with pytest.raises(ValueError, match="Other has none"):
        trainer(max_epochs=1, callbacks=[ActivationRecompute()]).fit(Other(), loader(torch.ones(1, 2)))


def test_policy():
    with pytest.raises(ValueError, match="got 'blocks'"):
        ActivationRecompute("blocks")
