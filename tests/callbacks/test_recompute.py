"""ActivationRecompute: training is unchanged, blocks have the settings only during a fit, some models are refused."""

import lightning.pytorch as pl
import pytest
import torch

from lightning_dilated.callbacks import ActivationRecompute
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.models.blocks import TransformerBlock

from ..models import batch, loader, tiny, trainer

pytestmark = pytest.mark.full


@pytest.mark.parametrize("policy", ["block", "attention-kept"])
def test_the_same_weights_come_out(policy, monkeypatch):
    calls, real, weights = [], TransformerBlock.forward, []
    monkeypatch.setattr(
        TransformerBlock, "forward", lambda self, *a, **k: calls.append(self.recompute) or real(self, *a, **k)
    )
    for callbacks in ([], [ActivationRecompute(policy)]):
        pl.seed_everything(3)
        model, batches = tiny().train(), [batch(2, 24) for _ in range(3)]
        trainer(max_epochs=1, callbacks=callbacks).fit(model, loader(*batches))
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        assert {b.recompute for b in model.transformer.blocks} == {"none"}  # the setting from before the fit
    assert set(calls) == {"none", policy}
    torch.testing.assert_close(*weights)


class Names(pl.Callback):
    """Records names and shapes of the state dict and names of parameters during training."""

    def on_train_batch_end(self, trainer, module, *unused):
        self.seen = [(name, x.shape) for name, x in module.state_dict().items()], list(dict(module.named_parameters()))


@pytest.mark.parametrize("compiled", [False, True])
def test_names_of_the_state_stay(compiled):
    """With all settings together, compiled or not, a model keeps the names of its state and parameters."""
    calls = []
    for callbacks in ([], [ActivationRecompute("block", every=2, offload=1, tile=9, head_chunks=2)]):
        model = tiny(compile_blocks=compiled)
        with torch.compiler.set_stance("default", force_backend="aot_eager"):  # Inductor is slow, and also keeps names
            trainer(max_steps=1, callbacks=[*callbacks, names := Names()]).fit(model, loader(batch(2, 24)))
        calls.append(names.seen)
    assert calls[0] == calls[1] and len(calls[0][0]) > 10


@pytest.mark.parametrize("options", [{}, {"tile": 9, "head_chunks": 2, "offload": 1}])
def test_groups_run_again_under_the_dtype_of_the_forward(options, monkeypatch):
    """The recomputation sees the same default dtype as the forward. bf16-true sets it only around the training step."""
    seen, real, weights = [], TransformerBlock.forward, []
    monkeypatch.setattr(
        TransformerBlock, "forward", lambda self, *a, **k: seen.append(torch.get_default_dtype()) or real(self, *a, **k)
    )
    for callbacks in ([], [ActivationRecompute("block", every=2, **options)]):
        pl.seed_everything(3)
        model, batches = tiny(dtype=torch.bfloat16).train(), [batch(2, 24) for _ in range(3)]
        trainer(max_epochs=1, callbacks=callbacks, precision="bf16-true").fit(model, loader(*batches))
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    # two blocks: 2 forwards; with the callback 3, because the recomputed group stops at the second block's input
    assert len(seen) >= 3 * (2 + 3) and set(seen) == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32
    assert (weights[0] - weights[1]).float().norm() < 1e-2 * weights[0].float().norm()


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


class Room(pl.Callback):
    """Records the bytes of block inputs in host memory: in training, and when Lightning moves the model to the host."""

    def __init__(self, fail=False):
        self.fail, self.had, self.left = fail, None, None

    def on_train_batch_end(self, trainer, module, *unused):
        self.had = module.transformer._host.bytes
        self.losses = module.token_losses(batch(2, 24))  # this graph keeps its block inputs: no backward follows
        self.waiting = module.transformer._host.bytes
        trainer.strategy.teardown = lambda: setattr(self, "left", module.transformer._host.bytes)
        if self.fail:
            raise RuntimeError("a failed step")


@pytest.mark.parametrize("fail", [False, True])
def test_host_memory_is_given_back_before_the_model_comes(fail):
    """Host memory is freed before the model moves to the host, even if a step failed and its graph still exists."""
    room, model = Room(fail), tiny().train()
    training = trainer(max_steps=1, callbacks=[ActivationRecompute(offload=1), room])
    if fail:
        with pytest.raises(RuntimeError, match="a failed step"):
            training.fit(model, loader(batch(2, 24)))
    else:
        training.fit(model, loader(batch(2, 24)))
    assert room.waiting >= room.had > 0 == room.left
    with pytest.raises(RuntimeError, match="freed at the end of training"):
        room.losses.sum().backward()
    if fail:  # a failed fit leaves the settings for an error report, and the next fit restores the earlier ones
        assert model.transformer.memory.offload == 1
        training = trainer(max_steps=1, callbacks=training.callbacks[:1])
        training.fit(model, loader(batch(2, 24)))
    assert model.transformer.memory == MemorySettings()
