"""Trained models (slow): what a dense pattern, a window, a branch over both halves and shifted layers reach."""

import lightning.pytorch as pl
import pytest
import torch

from lightning_dilated import DilatedPattern, LongNetLM, Window
from lightning_dilated.callbacks import AccuracyByDepth
from lightning_dilated.data import FarRecallDataModule, LongContextDataModule
from lightning_dilated.models import WarmupCosine

from ...models import trainer

#: name -> (pattern, distractors, steps)
MODELS = {
    "dense": (DilatedPattern.dense(), 0, 300),
    "dense, with distractors": (DilatedPattern.dense(), 3, 600),
    "window": (DilatedPattern([Window(5)]), 0, 300),
}


@pytest.mark.slow  # in CI, test_accuracy_by_depth.py has fixed models with and without a reach
@pytest.mark.parametrize("name", MODELS)
def test_what_a_trained_model_uses(tmp_path, name):
    pattern, distractors, steps = MODELS[name]
    sizes = {"vocabulary": 8, "fillers": 4, "samples_per_cell": 60, "batch_size": 64, "train_size": 64 * steps}
    data = LongContextDataModule("needle", 32, [0, 25, 50, 100], form="tokens", distractors=distractors, **sizes)
    model = LongNetLM(
        pattern, data.vocab_size, 32, 2, 2, max_seq_len=32, kv_conv=2, tie_embeddings=False,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    )  # fmt: skip
    callback = AccuracyByDepth(tmp_path)
    run = trainer(max_steps=steps, limit_val_batches=0, callbacks=[callback], default_root_dir=tmp_path)
    run.fit(model, data)
    run.test(model, data, verbose=False)
    share = {r["depth"]: r["accuracy"] for r in callback.rows}
    if name != "window":
        assert min(share.values()) > 0.95
        return
    # two layers of five tokens reach back eight tokens, plus one per convolution; at 50 % the value is 15 tokens back
    assert share[100] > 0.95
    assert max(share[d] for d in (0, 25, 50)) < 0.3 and data.guess["blind"] == 1 / 8


# -- recall over walls -------------------------------------------------------------------------------------------------
WALLED = {"segment_lengths": [16, 64], "dilation_rates": [1, 4]}
#: bits of a guess among 8 values; half a bit less is significant with 512 samples of four queries
GUESS = 3.0
FAR = {"segment_lengths": [16, 64, 128], "dilation_rates": [1, 4, 8]}


def bits(pattern: dict, steps: int, *, pair_tokens: int, **options) -> float:
    """Train a model. Return the validation loss in bits per query."""
    pl.seed_everything(0)
    data = FarRecallDataModule(
        128, 4, 8, 32, pair_tokens, batch_size=32, train_size=32 * steps, val_size=512, test_size=0
    )
    model = LongNetLM(
        pattern, data.vocab_size, dim=64, depth=3, num_heads=8, **options,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.002, betas=(0.9, 0.98), weight_decay=0.01),
        lr_scheduler=lambda optimizer: WarmupCosine(optimizer, warmup_steps=100, total_steps=steps),
    )  # fmt: skip
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, datamodule=data)
    return float(trainer.callback_metrics["val_bits_per_byte"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_far_branch_beats_the_walled_control() -> None:
    far, walled = bits(FAR, 1500, pair_tokens=2), bits(WALLED, 1500, pair_tokens=2)
    assert walled > GUESS - 0.05, "nothing joins the halves, so this can only be a guess"
    assert far < GUESS - 0.5, f"{far:.2f} bits a query, the control {walled:.2f}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_recurrence_crosses_the_wall() -> None:
    """A loss below 1.64 bits needs the keys, not just the values that occur. The control needs at least 3 bits."""
    remembering = bits(WALLED, 400, pair_tokens=2, recurrence={"gate_init": 1.0})
    walled = bits(WALLED, 400, pair_tokens=2)
    assert walled > GUESS - 0.05
    assert remembering < 1.5, f"{remembering:.2f} bits a query, the control {walled:.2f}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_shifted_layers_beat_unshifted() -> None:
    shifted = bits(FAR, 1500, pair_tokens=1, shift_layers="odd", shift_below=128)
    unshifted = bits(FAR, 1500, pair_tokens=1)
    assert shifted < min(GUESS, unshifted) - 0.5, f"{shifted:.2f} bits a query shifted, {unshifted:.2f} unshifted"
