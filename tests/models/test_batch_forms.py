"""A model refuses batches in a wrong form. The error names this form, the accepted forms, and the remedy."""

import pytest
import torch

import lightning_dilated as ld

PATTERN = ld.DilatedPattern.dense()
TOKENS = torch.randint(0, 11, (2, 8))
INDEX = torch.arange(2)


def lm():
    return ld.LongNetLM(PATTERN, vocab_size=11, dim=16, depth=1)


def mlm():
    return ld.LongNetMLM(PATTERN, vocab_size=11, dim=16, depth=1)


def classifier():
    return ld.LongNetClassifier(PATTERN, task="classification", num_classes=2, vocab_size=11, dim=16, depth=1)


def slides():
    return ld.SlideEncoder(feature_dim=4, dim=16, depth=1, num_heads=2, task="classification", num_classes=2)


MODELS = {"lm": lm, "mlm": mlm, "classifier": classifier, "slides": slides}
STEPS = ("training_step", "validation_step", "test_step", "predict_step", "loss_terms")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "batch", [(TOKENS, TOKENS), [TOKENS, TOKENS], TOKENS, None], ids=["tuple", "list", "tensor", "none"]
)
@pytest.mark.parametrize("kind", MODELS)
def test_no_mapping(kind, batch, step):
    model, number = MODELS[kind](), [] if step == "loss_terms" else [0]
    with pytest.raises(TypeError, match=r"takes batches that are mappings with .*, got a .*return \{"):
        getattr(model, step)(batch, *number)


WRONG = {
    "no tokens": (lm, {"input_ids": TOKENS, "labels": TOKENS}, ValueError, r"has \['input_ids', 'labels'\] and no 'tok"),
    "no labels": (lm, {"tokens": TOKENS}, ValueError, "no 'labels'"),
    "float tokens": (lm, {"tokens": TOKENS.float(), "labels": TOKENS}, TypeError, "int64 or int32, got torch.float32"),
    "byte tokens": (lm, {"tokens": TOKENS.byte(), "labels": TOKENS}, TypeError, "int64 or int32, got torch.uint8"),
    "float labels": (lm, {"tokens": TOKENS, "labels": TOKENS.float()}, TypeError, "labels must hold integers, got"),
    "one row": (lm, {"tokens": TOKENS[0], "labels": TOKENS[0]}, ValueError, r"must both be \(B, N\), got \(8,\)"),
    "lists": (lm, {"tokens": TOKENS.tolist(), "labels": TOKENS}, TypeError, "must be a tensor .* got list"),
    "none": (lm, {"tokens": None, "labels": TOKENS}, TypeError, "must be a tensor .* got NoneType"),
    "mlm, no tokens": (mlm, {"labels": TOKENS, "index": INDEX}, ValueError, "no 'tokens'"),
    "mlm, floats": (mlm, {"tokens": TOKENS.half(), "index": INDEX}, TypeError, "int64 or int32, got torch.float16"),
    "mlm, one row": (mlm, {"tokens": TOKENS[0], "index": INDEX}, ValueError, r"tokens must be \(B, N\)"),
    "classifier, lists": (classifier, {"tokens": TOKENS.tolist(), "label": INDEX}, TypeError, "tokens must be a tensor"),
    "classifier, floats": (classifier, {"tokens": TOKENS.float(), "label": INDEX}, ValueError, "tokens must be integers"),
    "slides, 2 dims": (
        slides, {"features": torch.randn(2, 4), "coords": torch.zeros(2, 3, 2), "label": INDEX}, ValueError,
        r"features must be \(B, N, F\)",
    ),
    "slides, integers": (
        slides, {"features": torch.ones(2, 3, 4).long(), "coords": torch.zeros(2, 3, 2), "label": INDEX}, TypeError,
        "features must hold floating numbers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("step", ["training_step", "validation_step"])
@pytest.mark.parametrize("name", WRONG)
def test_other_entries(name, step):
    make, batch, error, words = WRONG[name]
    with pytest.raises(error, match=words):
        getattr(make(), step)(batch, 0)


def test_int32_tokens_are_taken():
    model = lm()
    batch = {"tokens": TOKENS.int(), "labels": TOKENS}
    torch.testing.assert_close(
        model.training_step(batch, 0), model.training_step({"tokens": TOKENS, "labels": TOKENS}, 0)
    )
