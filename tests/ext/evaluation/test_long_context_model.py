"""Models trained on the needle: a dense pattern answers at every depth, a window only within its reach."""

import pytest
import torch

from lightning_dilated import DilatedPattern, LongNetLM, Window
from lightning_dilated.callbacks import AccuracyByDepth
from lightning_dilated.data import LongContextDataModule

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
