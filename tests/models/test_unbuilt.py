"""A model without a Trainer: the first use builds the layers, and earlier calls such as `eval()` apply to them."""

import pytest
import torch

import lightning_dilated as ld

from . import PATTERN

TOKENS = torch.arange(20)[None] % 32


def make(**options) -> ld.LongNetLM:
    return ld.LongNetLM(PATTERN, vocab_size=32, dim=16, depth=2, num_heads=2, **options)


def test_eval_before_the_first_call_turns_dropout_off():
    model = make(dropout=0.5, attention_dropout=0.5).eval()
    assert torch.equal(model(TOKENS), model(TOKENS))
    assert not any(m.training for m in model.modules())


def test_generate_draws_without_dropout():
    torch.manual_seed(0)
    model = make(dropout=0.5)
    first = model.generate(TOKENS, 20, temperature=0)
    assert torch.equal(first, model.eval().generate(TOKENS, 20, temperature=0))


@pytest.mark.parametrize(
    "use",
    {
        "parameters": lambda m: sum(p.numel() for p in m.parameters()) > 1000,
        "optimizer": lambda m: bool(torch.optim.AdamW(m.parameters()).param_groups[0]["params"]),
        "own optimizer": lambda m: len(m.configure_optimizers().param_groups) == 2,
        "dtype": lambda m: m.double()(TOKENS).dtype == torch.float64,
        "frozen": lambda m: not m.requires_grad_(False)(TOKENS).requires_grad,
        "state": lambda m: "embedding.weight" in m.state_dict(),
    }.items(),
    ids=lambda item: item[0],
)
def test_asking_for_weights_builds(use):
    assert use[1](make())


def test_weights_load_into_a_new_model():
    one, two = make(), make()
    two.load_state_dict(one.state_dict())
    assert torch.equal(one.eval()(TOKENS), two.eval()(TOKENS))
