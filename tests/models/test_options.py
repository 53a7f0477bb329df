"""Options that models share: every one on the command line, with its text, and refused where a class settles it."""

import pytest
from jsonargparse import ArgumentParser

from lightning_dilated import LongNetLM, models
from lightning_dilated.models.transformer_model import NOT_SAVED, options_of

from . import PATTERN

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


def test_a_misspelt_option_is_named_with_the_nearest():
    with pytest.raises(TypeError, match=r"LongNetLM has no argument 'dropuot'\. Did you mean 'dropout'"):
        LongNetLM(PATTERN, dropuot=0.1)
