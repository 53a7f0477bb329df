"""LongNetMLM: both directions of attention, the loss of masked tokens, learning, and checkpoints."""

import functools
import math

import pytest
import torch
from torch import nn

from lightning_dilated import DilatedPattern, LongNetMLM
from lightning_dilated.memory.settings import MemorySettings

from ...models import PATTERN, SIZES, loader, trainer


def tiny(pattern=PATTERN, dtype=torch.float64, **options):
    torch.manual_seed(0)
    model = LongNetMLM(pattern, **{**SIZES, **options})
    model.configure_model()
    return model.to(dtype).eval()


def batch(rows=2, length=40, first=0, vocab_size=11):
    rng = torch.Generator().manual_seed(first)
    tokens = torch.randint(vocab_size, (rows, length), generator=rng)
    return {"tokens": tokens, "labels": tokens.roll(-1, 1), "index": torch.arange(first, first + rows)}


# -- what it sees ------------------------------------------------------------------------------------------------------
def test_every_token_sees_both_sides():
    model, data = tiny(DilatedPattern.dense()), batch(1, 12)
    want = model(data["tokens"])
    for t in (0, 6, 11):
        changed = data["tokens"].clone()
        changed[0, t] = (changed[0, t] + 1) % 11
        assert ((model(changed) - want).abs().amax(-1) > 0).all()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("mask_token, rows", [(None, 12), (3, 11)])
def test_mask_token(mask_token, rows, tied):
    """A new mask token is embedded and trained and is never predicted. A mask token from the data stays ordinary."""
    model, data = tiny(mask_token=mask_token, tie_embeddings=tied, keep_fraction=0.0, random_fraction=0.0), batch()
    inputs, chosen = model.masked(data)
    assert model.embedding.weight.shape[0] == rows and (inputs[chosen] == (3 if mask_token else 11)).all()
    assert not (chosen & (data["tokens"] == mask_token)).any()
    assert model(inputs).shape == (2, 40, 11) and model(inputs, at=chosen).shape == (int(chosen.sum()), 11)
    torch.testing.assert_close(model(inputs, at=chosen), model(inputs)[chosen], rtol=0, atol=1e-12)
    model.loss_terms(data)[0].backward()
    assert model.embedding.weight.grad[model.mask_token].any()
    assert (model.head.weight is model.embedding.weight) == tied


# -- the loss ----------------------------------------------------------------------------------------------------------
def test_loss_is_cross_entropy_of_masked_tokens():
    model, data = tiny(), batch()
    inputs, chosen = model.masked(data)
    total, count = model.loss_terms(data)
    want = nn.functional.cross_entropy(model(inputs)[chosen], data["tokens"][chosen], reduction="sum")
    torch.testing.assert_close(total, want, rtol=1e-12, atol=0)
    assert count == chosen.sum() > 0
    torch.testing.assert_close(model.training_step(data, 0).double(), want / count, rtol=1e-6, atol=0)


def test_labels_do_not_matter():
    model, data = tiny(), batch()
    want = model.loss_terms(data)[0]
    data["labels"].fill_(-100)
    assert torch.equal(model.loss_terms(data)[0], want)
    assert torch.equal(model.loss_terms({k: v for k, v in data.items() if k != "labels"})[0], want)


def test_padded_batch_equals_single_samples():
    model, lengths, data = tiny(mask_fraction=0.4), [40, 23, 1], batch(3)
    total, count = model.loss_terms({**data, "lengths": torch.tensor(lengths)})
    singles = [
        model.loss_terms({"tokens": data["tokens"][i : i + 1, :n], "index": data["index"][i : i + 1]})
        for i, n in enumerate(lengths)
    ]
    torch.testing.assert_close(total, sum(x for x, _ in singles), rtol=1e-12, atol=0)
    assert count == sum(n for _, n in singles)


def test_packed_documents_do_not_see_each_other():
    """If only the first document has masks, changes in the second one do not change its loss."""
    model, data = tiny(), {**batch(1), "cu_seqlens": torch.tensor([0, 17, 40], dtype=torch.int32)}
    losses, _, _ = model.masked_terms(data)
    first = int(model.masked(data)[1][0, :17].sum())
    data["tokens"][0, 17:] = (data["tokens"][0, 17:] + 1) % 11
    again, _, _ = model.masked_terms(data)
    torch.testing.assert_close(again[:first], losses[:first], rtol=1e-12, atol=0)
    assert first and not torch.equal(again[first:], losses[first:])


def test_nothing_masked_is_a_loss_of_zero():
    model = tiny(ignore_tokens=[2]).train()
    loss = model.training_step({"tokens": torch.full((1, 9), 2), "index": torch.tensor([0])}, 0)
    loss.backward()
    assert loss == 0 and all(p.grad is None or not p.grad.any() for p in model.parameters())


# -- masks in training and evaluation ----------------------------------------------------------------------------------
class Watched(LongNetMLM):
    """Records the masks it makes."""

    def masked(self, batch):
        inputs, chosen = super().masked(batch)
        self.__dict__.setdefault("kept", []).append((self.training, int(batch["index"][0]), chosen.clone()))
        return inputs, chosen


def test_new_masks_every_step_and_fixed_ones_in_validation():
    model, data = Watched(PATTERN, **SIZES), [batch(first=0), batch(first=2)]
    trainer(max_epochs=2).fit(model, loader(*data), loader(*data))
    training = [chosen for training, index, chosen in model.kept if training and index == 0]
    validation = [chosen for training, index, chosen in model.kept if not training and index == 2]
    assert len(training) == len(validation) == 2
    assert not torch.equal(*training) and torch.equal(*validation)


def test_epoch_metrics_are_exact():
    """The batches have different numbers of masked tokens. The mean is over all of them."""
    model, batches = tiny(dtype=torch.float32), [batch(2), batch(1, 7, first=2), batch(3, 33, first=3)]
    with torch.no_grad():
        losses, right, _ = (torch.cat(x) for x in zip(*(model.masked_terms(b) for b in batches), strict=True))
    for _ in range(2):
        (metrics,) = trainer().validate(model, loader(*batches), verbose=False)
        assert metrics["val_loss"] == pytest.approx(losses.mean().item(), rel=1e-6)
        assert metrics["val_accuracy"] == pytest.approx(right.float().mean().item(), rel=1e-6)
        assert metrics["val_bits_per_token"] == pytest.approx(losses.mean().item() / math.log(2), rel=1e-6)
        assert "val_bits_per_byte" not in metrics


def test_predict_step():
    model, data = tiny(), batch(3, first=7)
    data["lengths"] = torch.tensor([40, 30, 0])
    got = model.predict_step(data, 0)
    for i in range(2):
        alone = {k: v[i : i + 1] for k, v in data.items()}
        losses, right, _ = model.masked_terms({**alone, "index": torch.tensor([0])})
        assert got["masked"][i] == len(losses)
        assert got["bits_per_token"][i].item() == pytest.approx(losses.mean().item() / math.log(2))
        assert got["accuracy"][i].item() == pytest.approx(right.double().mean().item())
    assert got["masked"][2] == 0 and got["bits_per_token"][2].isnan() and got["index"].tolist() == [7, 8, 9]
    with pytest.raises(ValueError, match="a batch needs index"):
        model.predict_step({"tokens": data["tokens"]}, 0)
    with pytest.raises(TypeError, match="index must hold integers"):
        model.predict_step({**data, "index": torch.zeros(3)}, 0)


@pytest.mark.parametrize("span", [1, 3])
def test_predict_gives_a_sequence_the_same_numbers_everywhere(span):
    """Row, batch and padding do not change results. If one token changes, the number of masks stays the same."""
    model, data = tiny(mask_span=span), batch(3, 60)
    tokens, short = data["tokens"], data["tokens"][1, :33]
    padded = tokens.clone()
    padded[2, :33] = short
    batches = [
        ({"tokens": short[None], "index": torch.tensor([5])}, 0),
        ({"tokens": torch.stack([short, short.flip(0), short]), "index": torch.tensor([8, 9, 1000])}, 2),
        ({"tokens": padded, "index": torch.arange(3), "lengths": torch.tensor([60, 41, 33])}, 2),
    ]
    with torch.no_grad():
        predicted = [model.predict_step(x, 0) for x, _ in batches]
        for name in ("masked", "bits_per_token", "accuracy"):
            same = [got[name][row].item() for got, (_, row) in zip(predicted, batches, strict=True)]
            assert same == pytest.approx([same[0]] * 3, rel=1e-9)
        assert predicted[1]["bits_per_token"][0] == pytest.approx(predicted[1]["bits_per_token"][2].item(), rel=1e-9)
        other = short.clone()
        other[16] = (other[16] + 1) % 11
        near = model.predict_step({"tokens": other[None], "index": torch.tensor([3])}, 0)
        assert near["masked"] == predicted[0]["masked"] > 0


def turns(first):
    """Return four rows of three repeating letters. Each row starts one letter later."""
    index = torch.arange(first, first + 4)
    return {"tokens": (torch.arange(32) + index[:, None]) % 3, "index": index}


def test_learns_a_rule():
    """Neighbours determine a masked letter. A guess has the loss log 3 = 1.1, and is right one time in three."""
    torch.manual_seed(0)
    make = functools.partial(torch.optim.AdamW, lr=0.003)
    model, run = LongNetMLM(PATTERN, 3, dim=32, depth=2, mask_fraction=0.3, optimizer=make), trainer(max_epochs=1)
    run.fit(model, loader(*map(turns, range(120))), loader(turns(500), turns(502)))
    assert run.callback_metrics["val_loss"] < 0.4 and run.callback_metrics["val_accuracy"] > 0.85


# -- checkpoints -------------------------------------------------------------------------------------------------------
class Short(LongNetMLM):
    """A user's subclass with other argument names."""

    def __init__(self, width: int = 4) -> None:
        super().__init__(PATTERN, 11, mask_span=3, dim=4 * width, depth=1, num_heads=4)


MADE = {
    "LongNetMLM": lambda: LongNetMLM(PATTERN.shifted(), **SIZES, bias=True, mask_span=2, ignore_tokens=[4]),
    "mapping": lambda: LongNetMLM({"segment_lengths": [4, 16], "dilation_rates": [1, 2]}, **SIZES, mask_token=0),
    "subclass": lambda: Short(width=8),
}


@pytest.mark.parametrize("name", MADE)
def test_checkpoint_gives_the_model_back(name, tmp_path):
    model, data = MADE[name](), batch()
    run = trainer(max_steps=1)
    run.fit(model, loader(data))
    run.save_checkpoint(tmp_path / "x.ckpt")
    twin = type(model).load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True).eval()
    assert twin.pattern == model.pattern and twin.options == model.options and twin.masking == model.masking
    assert torch.equal(twin.loss_terms(data)[0], model.eval().loss_terms(data)[0])


# -- what it refuses ---------------------------------------------------------------------------------------------------
def make(**options):
    return lambda: LongNetMLM(PATTERN, **{**SIZES, **options})


REFUSED = {
    "mask_token": (make(mask_token=11), ValueError, "mask_token: 11 is not one of the vocab_size=11 tokens"),
    "mask_token type": (make(mask_token=1.5), TypeError, "mask_token must be an integer"),
    "ignore_tokens": (make(ignore_tokens=[0, -1]), ValueError, "ignore_tokens must be at least 0"),
    "mask_fraction": (make(mask_fraction=15), ValueError, "mask_fraction must be a number in .0, 1., got 15"),
    "xpos": (make(position_encoding="xpos"), ValueError, "use rotary or none"),
    "of LongNetLM": (make(bytes_per_token=2), TypeError, "bytes_per_token"),
    "unknown": (make(mask_spam=2), TypeError, "mask_spam"),
    "no index": (
        lambda: tiny().loss_terms({"tokens": batch()["tokens"]}),
        ValueError,
        "got none. Let the dataset return",
    ),
    "short index": (lambda: tiny().loss_terms({**batch(), "index": torch.tensor([1])}), ValueError, r"got \(1,\)"),
    "float index": (
        lambda: tiny().loss_terms({**batch(), "index": batch()["index"] + 0.5}),
        TypeError,
        "index must hold integers, .* got torch.float32",
    ),
    "1-D": (lambda: tiny().loss_terms({k: v[0] for k, v in batch().items()}), ValueError, r"tokens must be \(B, N\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("vocab_size", [8, 40])  # below dim: logits of all tokens; above: only of masked ones
@pytest.mark.parametrize("tile", [None, 5])
def test_the_loss_is_that_of_the_masked_terms(vocab_size, tile):
    """`loss_terms` has the value, count and gradients of the losses of `masked_terms`."""
    torch.manual_seed(0)
    model = LongNetMLM(
        {"segment_lengths": [16], "dilation_rates": [1]}, vocab_size, dim=16, depth=1, num_heads=2
    ).double()
    model.transformer.memory = MemorySettings(tile=tile)
    data = {
        "tokens": torch.randint(0, vocab_size, (2, 30)),
        "index": torch.arange(2),
        "lengths": torch.tensor([30, 17]),
    }
    losses, right, _ = model.masked_terms(data)
    total, count = model.loss_terms(data)
    assert count == len(right) > 0 and count.dtype == torch.int64
    with_grads = lambda x: [x, *torch.autograd.grad(x, list(model.parameters()))]  # noqa: E731
    for a, b in zip(with_grads(total), with_grads(losses.sum()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_the_loss_of_a_subclass_is_its_own():
    class Half(LongNetMLM):
        def masked_terms(self, batch):
            losses, *terms = super().masked_terms(batch)
            return losses / 2, *terms

    data, loss_results = {"tokens": torch.randint(0, 8, (2, 30)), "index": torch.arange(2)}, []
    for kind in (LongNetMLM, Half):
        torch.manual_seed(0)
        model = kind({"segment_lengths": [16], "dilation_rates": [1]}, 8, dim=16, depth=1, num_heads=2)
        loss_results.append(model.loss_terms(data)[0])
    torch.testing.assert_close(loss_results[1], loss_results[0] / 2)
