"""If a subclass has its own loss, the loss is not reported as bits per byte or perplexity; likelihoods stay exact."""

import types

import pytest
import torch

from lightning_dilated import DilatedPattern, LongNetLM

from . import trainer

PATTERN = DilatedPattern.dense()
SIZES = {"vocab_size": 64, "dim": 16, "depth": 1, "num_heads": 2, "max_seq_len": 32}


class Weighted(LongNetLM):
    def loss_terms(self, batch):
        total, count = super().loss_terms(batch)
        return 3 * total, count


class Smoothed(LongNetLM):
    def token_losses(self, batch):
        return 3 * super().token_losses(batch)


class Mean(LongNetLM):
    def token_mean(self, batch):
        share, count = super().token_mean(batch)
        return 3 * share, count


class Named(Weighted):
    """A subclass with its own loss and its own metrics of this loss."""

    def derived_metrics(self, loss):
        return super().derived_metrics(loss / 3)


class Same(LongNetLM):
    """A subclass that overrides training_step but uses the inherited loss."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)


class Below(Weighted):
    pass


def batches():
    rows = torch.randint(64, (4, 33), generator=torch.Generator().manual_seed(0))
    return torch.utils.data.DataLoader([{"tokens": x[:-1], "labels": x[1:], "index": i} for i, x in enumerate(rows)])


def run(model, tmp_path):
    """Return the metrics of a training step and of a validation."""
    one = trainer(max_steps=1, default_root_dir=tmp_path)
    one.fit(model, batches(), batches())
    trained = dict(one.callback_metrics)
    return {**trained, **one.validate(model, batches(), verbose=False)[0]}


@pytest.mark.parametrize("kind", [Weighted, Smoothed, Mean, Below])
def test_a_loss_of_ones_own_has_no_other_name(tmp_path, kind):
    metrics = run(kind(PATTERN, **SIZES), tmp_path)
    assert {"train_loss", "val_loss"} <= metrics.keys()
    assert not [x for x in metrics if "bits" in x or "perplexity" in x]


@pytest.mark.parametrize("kind", [LongNetLM, Named, Same])
def test_other_models_keep_them(tmp_path, kind):
    metrics, scale = run(kind(PATTERN, **SIZES), tmp_path), 3 if kind is Named else 1
    for stage in ("train", "val"):
        assert float(metrics[f"{stage}_bits_per_byte"]) == pytest.approx(
            float(metrics[f"{stage}_loss"]) / scale / 0.6931472, rel=1e-5
        )
        assert f"{stage}_perplexity" in metrics


def test_a_method_put_into_an_object_counts_as_well(tmp_path):
    model = LongNetLM(PATTERN, **SIZES)
    model.loss_terms = types.MethodType(lambda self, batch: (2 * LongNetLM.loss_terms(self, batch)[0], 32), model)
    assert "val_bits_per_byte" not in run(model, tmp_path)


def test_predictions_and_scores_are_likelihoods():
    torch.manual_seed(0)
    plain, own = LongNetLM(PATTERN, **SIZES).eval(), Smoothed(PATTERN, **SIZES).eval()
    own.load_state_dict(plain.state_dict())
    (batch,) = torch.utils.data.DataLoader(batches().dataset, batch_size=4)
    with torch.no_grad():
        bits = [x.predict_step(batch, 0)["bits_per_byte"] for x in (plain, own)]
        assert torch.equal(own.token_losses(batch), 3 * plain.token_losses(batch))
    assert torch.equal(*bits)
    assert torch.equal(plain.score(batch["tokens"]).log_likelihood, own.score(batch["tokens"]).log_likelihood)
