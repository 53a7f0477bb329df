"""--model.help and --data.help list the keys of one class. --help lists them if a recipe chooses the class."""

import pytest
import yaml

from lightning_dilated.cli.parsing.class_help import names

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    "argv, keys",
    [
        (["--model.help", "SlideEncoder"], ["--model.feature_dim", "--model.num_classes", "--model.optimizer"]),
        (["--model.help=lightning_dilated.SlideEncoder"], ["--model.feature_dim"]),
        (["--data.help", "SlideDataModule"], ["--data.labels_csv", "--data.group_column"]),
        (["--config", "slide_finetune.yaml", "--model.help"], ["--model.feature_dim"]),
        (["--config", "slide_finetune.yaml", "--data.help"], ["--data.labels_csv"]),
        (["--config", "quickstart.yaml", "--model.help", "LongNetMLM"], ["--model.mask_fraction"]),
        (["--model", "SlideEncoder", "--model.help"], ["--model.feature_dim"]),
        (
            ["--model.help", "LongNetLM", "--data.help", "TokenDataModule"],
            ["--model.vocab_size", "--data.vocab_size", "--data.dtype"],
        ),
    ],
)
def test_keys_of_a_class(cli, argv, keys):
    result = cli("fit", *argv).ok()
    assert not [key for key in keys if f"{key} " not in result.out]
    assert len(result.out.splitlines()) < 300  # the keys of the Trainer are not in the output
    assert "--trainer." not in result.out
    assert ".help" not in result.out  # `fit` has no .help options for nested classes


def test_help_lists_the_keys_of_the_chosen_classes(cli):
    out = cli("fit", "--config", "slide_finetune.yaml", "--help").out
    assert "--trainer.max_steps " in out
    assert "--model.feature_dim FEATURE_DIM" in out and "--data.labels_csv LABELS_CSV" in out
    alone = cli("fit", "--help").out
    assert "fit --model.help CLASS` lists the keys" in alone and "SlideEncoder" in alone and "GenomeDataModule" in alone
    assert "--model.feature_dim FEATURE_DIM" not in alone


def test_a_key_before_its_class(cli):
    argv = ["--data.labels_csv", "x", "--data", "SlideDataModule"]
    result = cli("fit", "--model", "SlideEncoder", *argv)
    assert result.code == 2 and "give --data CLASS first; one of ByteDataModule" in result.err, result.err


def test_helps_of_the_trainers_classes_need_no_model(cli):
    result = cli("fit", "--trainer.logger.help", "CSVLogger")
    assert result.code == 0 and "save_dir" in result.out, result.err


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--model.help", "SlideEncodr"], "Did you mean SlideEncoder?"),
        (["--model.help", "SlideDataModule"], "no DilatedModule of that name"),
        (["--model.help"], "needs a class: one of LongNetClassifier, LongNetLM"),
        (["--data.help", "no.such.Class"], "cannot be imported"),
    ],
)
def test_no_such_class(cli, argv, says):
    result = cli("fit", *argv)
    assert result.code == 2 and says in result.err and "Traceback" not in result.err, result.err


def test_names_are_those_that_a_user_chooses_from():
    assert {"LongNetLM", "LongNetMLM", "SlideEncoder"} <= set(names("model")) and "DilatedModule" not in names("model")
    assert {"ByteDataModule", "SlideDataModule", "GenomeDataModule"} <= set(names("data"))


def test_test_names_the_recipe_of_the_run(cli, fitted):
    """A checkpoint contains no data settings. The error suggests the recipe in the folder of its run."""
    checkpoint, recipe = fitted.ckpt, fitted.log / "config.yaml"
    assert yaml.safe_load(recipe.read_text())["data"]
    said = cli("fit", "--ckpt_path", str(checkpoint)).err
    assert f"add --config {recipe}" in " ".join(said.split())
