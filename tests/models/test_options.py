"""Options that several models share are on the command line with help. A class that sets one itself refuses it."""

import pytest
import torch
from jsonargparse import ArgumentParser

from lightning_dilated import LongNetLM, models
from lightning_dilated._compat import lightning as compat_lightning
from lightning_dilated._compat import torch as compat_torch
from lightning_dilated.ext._compat import torch as ext_torch
from lightning_dilated.models.transformer_model import NOT_SAVED, options_of
from lightning_dilated.pattern import DilatedPattern

from . import trainer

PATTERN = DilatedPattern.longnet([4, 16], [1, 2])
MODELS = ("LongNetLM", "LongNetMLM", "LongNetClassifier", "SlideEncoder", "SlidePretrainer")


@pytest.mark.parametrize("name", MODELS)
def test_the_command_line_has_every_option(name):
    cls, parser = getattr(models, name), ArgumentParser()
    parser.add_class_arguments(cls, "model")
    options = [action for action in parser._actions if action.dest.startswith("model.") and "help" not in action.dest]
    names = {action.dest.split(".")[1]: action for action in options}
    assert names.keys() == options_of(cls).keys() and len(names) > 20
    assert "--model.depth" in parser.format_help() and all((action.help or "").strip() for action in options)


@pytest.mark.parametrize(
    "name, option", [("LongNetMLM", "bytes_per_token"), ("SlideEncoder", "norm"), ("LongNetLM", "drop_path")]
)
def test_settled_options_are_refused_by_name(name, option):
    with pytest.raises(TypeError, match=f"{name} has no argument '{option}'"):
        getattr(models, name)(**{option: 1})


def test_a_checkpoint_keeps_defaults_and_no_settled_option():
    encoder = models.SlideEncoder(feature_dim=4, dim=16, depth=2, num_heads=2)
    assert set(encoder.hparams) == options_of(models.SlideEncoder).keys() - set(NOT_SAVED)
    assert encoder.hparams.dropout == 0.25 and encoder.hparams.pool == "class"
    assert "pattern" in models.LongNetLM(PATTERN, dim=16, depth=1).hparams


def test_private_apis_that_models_use():
    """A failure names the function of `_compat` that has to be adapted."""
    layer, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    assert ext_torch.compiled_call(layer) is None and not compat_torch.has_hooks(layer)
    compat_torch.set_compiled_call(layer, lambda *unused: "compiled")
    assert layer(x) == "compiled"
    compat_torch.set_compiled_call(layer, None)
    calls = []
    layer.weight.register_hook(calls.append)
    with compat_torch.hooks_paused([layer.weight]):
        torch.autograd.grad(layer(x).sum(), layer.weight)
    assert not calls and len(torch.autograd.grad(layer(x).sum(), layer.weight)) == len(calls) == 1
    layer.register_full_backward_hook(lambda *unused: None)
    assert compat_torch.has_hooks(layer) and compat_torch.has_backward_hooks(layer)
    before = ext_torch.version_of(x)
    x.add_(1)
    assert ext_torch.version_of(x) == before + 1
    limit = torch._dynamo.config.recompile_limit
    compat_torch.allow_recompiles(limit - 1)
    assert torch._dynamo.config.recompile_limit == limit
    assert compat_lightning.attached_trainer(models.LongNetLM(PATTERN, dim=16, depth=1)) is None


@pytest.mark.parametrize("retain", [False, True])
def test_a_backward_knows_whether_its_graph_is_retained(retain):
    needs, x = [], torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: needs.append(compat_torch.backward_is_retained()))
    y.backward(retain_graph=retain)
    assert needs == [retain]


class SetsItsSizes(LongNetLM):
    def __init__(self, width: int = 32, **options):
        super().__init__(PATTERN, 64, dim=width, depth=2, num_heads=4, max_seq_len=64, **options)


class PassesAllOn(LongNetLM):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)


@pytest.mark.parametrize(
    "make",
    [lambda: SetsItsSizes(width=16, dropout=0.1), lambda: PassesAllOn(PATTERN, 64, 32, 2, 4)],
    ids=["sets some", "passes all on by position"],
)
def test_a_subclass_loads_from_its_own_checkpoint(make, tmp_path):
    model = make()
    one = trainer(max_steps=0)
    one.strategy.connect(model)
    one.save_checkpoint(tmp_path / "x.ckpt")
    twin = type(model).load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    assert twin.dim == model.dim and twin.options == model.options and twin.patterns == model.patterns
    for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_a_misspelt_option_is_named_with_the_nearest():
    with pytest.raises(TypeError, match=r"LongNetLM has no argument 'dropuot'\. Did you mean 'dropout'"):
        LongNetLM(PATTERN, dropuot=0.1)
