"""A removed name raises an error that contains its replacement: in Python, on the command line, and in files."""

import importlib
import json

import pytest
import torch
import yaml

from lightning_dilated import LongNetLM, _removed
from lightning_dilated.cli import main
from lightning_dilated.cli.load_model import load_module

#: removed names of models and DataModules
CLASSES = {"model": ["LongViT"], "data": ["ListOpsDataModule", "StrainPairsDataModule"]}
SECTION = [(section, name) for section, names in CLASSES.items() for name in names]


@pytest.mark.parametrize("folder", ["lightning_dilated", "lightning_dilated.models", "lightning_dilated.data"])
@pytest.mark.parametrize("name", _removed.NAMES)
def test_names(name, folder):
    face = importlib.import_module(folder)
    with pytest.raises(ImportError, match=f"^{name} was taken out of lightning_dilated. "):
        getattr(face, name)
    with pytest.raises(ImportError, match=f"^{name} was taken out of lightning_dilated. "):
        exec(f"from {folder} import {name}")
    assert name not in dir(face)


def refused(capsys, *argv):
    """Return the error of the command line with these arguments, as one line."""
    with pytest.raises(SystemExit) as ended:
        main([str(x) for x in argv])
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("command", _removed.COMMANDS)
def test_commands(command, capsys):
    assert f"{command} was taken out of lightning_dilated. " in refused(capsys, *command.split(), "--out", "x")


@pytest.mark.parametrize("section, name", SECTION)
def test_recipes(section, name, capsys, tmp_path, monkeypatch):
    config = {section: {"class_path": name, "init_args": {"dim": 16}}}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(config))
    model = ["--model", "LongNetLM"] if section == "data" else []
    for argv in (["--config", tmp_path / "x.yaml"], [f"--{section}", name], [f"--{section}.help", name]):
        monkeypatch.setattr("sys.argv", ["lightning-dilated", "fit", *model, *map(str, argv)])
        assert f"{name} was taken out of lightning_dilated. " in refused(capsys, "fit", *model, *argv)


@pytest.mark.parametrize("path", ["lightning_dilated.{}", "lightning_dilated.models.old.place.{}"])
@pytest.mark.parametrize("name", CLASSES["model"])
def test_files(name, path, tmp_path):
    stored = {"class_path": path.format(name), "init_args": {}}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    torch.save({"state_dict": {}, "hyper_parameters": {}, "class_path": path.format(name)}, tmp_path / "x.ckpt")
    for load in (LongNetLM.from_pretrained, load_module):
        with pytest.raises(ValueError, match=f"{name} was taken out of lightning_dilated. "):
            load(tmp_path)
    with pytest.raises(ValueError, match=f"{name} was taken out of lightning_dilated. "):
        load_module(tmp_path / "x.ckpt")


@pytest.mark.parametrize("name", [key for key in _removed.KEYS if key.endswith(".yaml")])
def test_names_of_recipes(name, capsys):
    assert f"{name} was taken out of lightning_dilated. " in refused(capsys, "fit", "--config", name)


def test_other_names():
    assert _removed.removed_name("mine.LongViT") is None and _removed.removed_name("LongNetLM") is None
