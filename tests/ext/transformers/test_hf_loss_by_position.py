"""LossByPosition with HFCausalLM equals sums computed by hand, on one rank and on several."""

import math

import pytest
import torch

import lightning_dilated as ld
from lightning_dilated.callbacks import LossByPosition

pytest.importorskip("transformers", reason="needs the extra transformers", minversion="5.24")
from ...models import loader, trainer
from ..evaluation.test_loss_by_position import batch, by_hand
from .decoders import config
from .test_hf_causal_lm import HYBRID


@pytest.mark.parametrize("tile", [None, 7])
@pytest.mark.parametrize("kind", ["whole", "lengths", "documents"])
def test_equals_sums_by_hand(kind, tile, tmp_path):
    torch.manual_seed(1)
    model, data = ld.integrations.transformers.HFCausalLM(config("gemma3"), HYBRID, tile=tile), [batch(kind)]
    callback = LossByPosition(table=False, picture=False)
    run = trainer(callbacks=[callback], default_root_dir=tmp_path, precision="64-true")
    run.validate(model, loader(*data), verbose=False)
    with torch.no_grad():
        want = by_hand(model, data)
    assert {(r["part"], r["first"]) for r in callback.rows} == set(want)
    for row in callback.rows:
        nats, labels = want[row["part"], row["first"]]
        assert row["tokens"] == labels and row["bits"] == pytest.approx(nats / labels / math.log(2), rel=1e-5)
    octaves = [r for r in callback.rows if r["part"] == "octave"]
    mean = sum(r["bits"] * r["tokens"] for r in octaves) / sum(r["tokens"] for r in octaves)
    assert mean == pytest.approx(float(run.callback_metrics["val_bits_per_token"]), rel=1e-6)
    assert model.watch_losses is None
    torch.testing.assert_close(model.token_losses(data[0]).sum(), model.loss_terms(data[0])[0])
