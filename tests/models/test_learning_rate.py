"""`model.lr` can be read and set in Python. Lightning's finder uses it, and its suggestion takes effect."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner import Tuner

import lightning_dilated as ld
from lightning_dilated.models import WarmupCosine

from . import PATTERN, SIZES, trainer


def adamw(groups):
    return torch.optim.AdamW(groups, lr=0.003)


def model(cls=ld.LongNetLM, **options):
    return cls(PATTERN, **SIZES, optimizer=adamw, **options)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        tokens = torch.randint(11, (16,), generator=torch.Generator().manual_seed(i))
        return {"tokens": tokens, "labels": tokens}


def loader():
    return torch.utils.data.DataLoader(Data(), 2)


class Rates(pl.Callback):
    """Records the learning rates of all groups in each step."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.append([group["lr"] for group in trainer.optimizers[0].param_groups])


def test_lr_is_the_optimizers_until_it_is_set():
    m = model()
    assert m.lr == 0.003
    m.lr = 0.01
    assert m.lr == 0.01 and {g["lr"] for g in m.configure_optimizers().param_groups} == {0.01}
    m.lr = None
    assert m.lr == 0.003 and {g["lr"] for g in m.configure_optimizers().param_groups} == {0.003}


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "0.1", True])
def test_what_is_no_rate(value):
    with pytest.raises(ValueError, match="lr must be a finite number"):
        model().lr = value


def test_layer_decay_is_kept():
    sizes = {**SIZES, "task": "classification", "num_classes": 2, "layer_decay": 0.5}
    m = ld.LongNetClassifier(PATTERN, **sizes, optimizer=adamw)
    before = [g["lr"] for g in m.configure_optimizers().param_groups]
    m.lr = 0.006
    assert [g["lr"] for g in m.configure_optimizers().param_groups] == pytest.approx([2 * lr for lr in before])
    assert len(set(before)) > 1


def test_tuner_suggests_a_rate_and_the_next_fit_has_it(tmp_path):
    m, rates = model(), Rates()
    run = trainer(default_root_dir=tmp_path, max_steps=2, callbacks=[rates])
    suggestion = Tuner(run).lr_find(m, loader(), num_training=20, early_stop_threshold=None).suggestion()
    assert suggestion and m.lr == suggestion != 0.003
    rates.seen.clear()
    run.fit(m, loader())
    assert rates.seen[0] == [suggestion] * len(rates.seen[0])


@pytest.mark.parametrize("scheduled", [False, True])
def test_finder_callback_takes_effect_in_its_own_fit(tmp_path, scheduled):
    schedule = {"lr_scheduler": lambda o: WarmupCosine(o, warmup_steps=2)} if scheduled else {}
    sizes = {**SIZES, "task": "classification", "num_classes": 2, "layer_decay": 0.5}
    m, rates = ld.LongNetClassifier(PATTERN, **sizes, optimizer=adamw, **schedule), Rates()
    plain = m.configure_optimizers() if not scheduled else None
    finder = LearningRateFinder(num_training_steps=20, early_stop_threshold=None)
    batches = [{**b, "label": b["tokens"][:, 0] % 2} for b in loader()]
    trainer(default_root_dir=tmp_path, max_steps=6, callbacks=[finder, rates]).fit(
        m, torch.utils.data.DataLoader(batches, None)
    )
    suggestion = finder.optimal_lr.suggestion()
    assert suggestion and m.lr == suggestion
    own = rates.seen[-6:]
    if plain is not None:
        scales = [g["lr"] / 0.003 for g in plain.param_groups]
        assert own[0] == pytest.approx([suggestion * x for x in scales]) and own[-1] == pytest.approx(own[0])
        return
    peak = max(own[2])
    assert peak == pytest.approx(suggestion)  # the highest rate of the head's group is reached after the warm-up
    assert own[0] == pytest.approx([lr / 3 for lr in own[2]]) and own[5] < own[2]
