"""`data` without class_path means text as bytes. If the model needs other data, the run is refused before any work."""

import lightning.pytorch as pl
import pytest
import yaml

import lightning_dilated as ld

pytestmark = pytest.mark.full

SIZES = {"dim": 16, "depth": 1, "num_heads": 2}
SLIDES = {**SIZES, "segment_lengths": [8], "dilation_rates": [1], "feature_dim": 8}
TASK = {"task": "classification", "num_classes": 2}
PATTERN = {"pattern": {"segment_lengths": [8], "dilation_rates": [1]}}
MODELS = {
    "SlideEncoder": ({**SLIDES, **TASK}, "takes features, coords, label. Set"),
    "SlidePretrainer": ({**SLIDES, "decoder_dim": 16}, "takes features, coords. Set"),
    "LongNetClassifier": ({**SIZES, **TASK, **PATTERN, "vocab_size": 256}, "takes features, tokens, label. Set"),
}
TRAINER = {"max_steps": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}


@pytest.mark.parametrize("data", [None, {"seq_len": 32}, {"batch_size": 1}])
@pytest.mark.parametrize("name", MODELS)
def test_refused(cli, tmp_path, name, data):
    model_config, says = MODELS[name]
    recipe = {"model": {"class_path": name, "init_args": model_config}, "trainer": TRAINER}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(recipe | ({"data": data} if data else {})))
    result = cli("fit", "--config", "x.yaml")
    said = " ".join(result.err.split())
    assert result.code == 2 and f"A {name} {says}" in said and "Traceback" not in said, result.err
    assert "Set data.class_path to a LightningDataModule" in said and "data names no class_path" in said.replace(
        "`", ""
    )
    assert "Total params" not in result.out + result.err  # the model was not built


class Labelled(ld.data.ByteDataModule):
    """A user's class for labelled text. It is accepted although it derives from ByteDataModule."""


def test_ones_own_data_are_not_refused(cli, tmp_path):
    model_config = {"class_path": "LongNetClassifier", "init_args": {**SIZES, **PATTERN, **TASK, "vocab_size": 256}}
    (tmp_path / "text.txt").write_bytes(b"abcdefgh" * 512)
    data = {"class_path": f"{__name__}.Labelled", "init_args": {"paths": "text.txt", "seq_len": 32}}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump({"model": model_config, "trainer": TRAINER, "data": data}))
    assert "Set data.class_path" not in cli("fit", "--config", "x.yaml").err  # it fails later: its batches lack labels


def test_predictions_of_texts(cli, tmp_path):
    """A token classifier needs labels for training, but not for prediction."""
    model_config = {"class_path": "LongNetClassifier", "init_args": {**SIZES, **PATTERN, **TASK, "vocab_size": 256}}
    (tmp_path / "text.txt").write_bytes(b"abcdefgh" * 512)
    data = {"paths": "text.txt", "seq_len": 32}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump({"model": model_config, "trainer": TRAINER, "data": data}))
    cli("predict", "--config", "x.yaml").ok()


def test_other_data_keep_their_own_defaults(cli, tmp_path):
    """A class_path without settings gets the defaults of its own class, not of the default data class."""
    (tmp_path / "x.yaml").write_text(yaml.safe_dump({"data": {"class_path": "FarRecallDataModule"}}))
    for words in (["--data", "FarRecallDataModule"], ["--config", "x.yaml"], ["--data=FarRecallDataModule"]):
        config = yaml.safe_load(cli("fit", *words, "--model", "LongNetLM", "--print_config").out)["data"]["init_args"]
        assert (config["seq_len"], config["batch_size"]) == (128, 32)
    own = yaml.safe_load(cli("fit", "--data.seq_len", "77", "--model", "LongNetLM", "--print_config").out)["data"]
    assert own["class_path"] == "lightning_dilated.data.ByteDataModule" and own["init_args"]["seq_len"] == 77


def test_a_checkpoint_alone_names_the_recipe_of_its_run(cli, tmp_path):
    model = ld.SlideEncoder(**SLIDES, **TASK)
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(model)
    checkpoint = tmp_path / "run" / "checkpoints" / "last.ckpt"
    trainer.save_checkpoint(checkpoint)
    assert "--config" not in cli("test", "--ckpt_path", str(checkpoint)).err
    recipe = tmp_path / "run" / "config.yaml"
    recipe.write_text(
        "{model: {class_path: SlideEncoder}, data: {class_path: SlideDataModule, init_args: {paths: nowhere.h5}}}"
    )
    result = cli("test", "--ckpt_path", str(checkpoint))
    assert result.code == 2 and f"add --config {recipe}" in result.err and "Traceback" not in result.err, result.err
    assert "nowhere.h5 does not exist" in cli("test", "--ckpt_path", str(checkpoint), "--config", str(recipe)).err
