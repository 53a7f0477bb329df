"""Classes of `ext/` can be given by their short names. Saved configs contain their public paths."""

import subprocess
import sys

import pytest
import yaml
from torch.utils.data import DataLoader

import lightning_dilated as ld

from .conftest import TINY

pytestmark = pytest.mark.full

CLASSES = {
    "model": {"LongNetClassifier": ["--model.num_classes", "2"], "SlideEncoder": [], "LongNetMLM": []},
    "data": {
        "SlideDataModule": ["--data.paths", "x", "--data.labels", "y.csv"],
        "GenomeDataModule": ["--data.paths", "x"],
        "ChatDataModule": ["--data.paths", "x"],
        "LongContextDataModule": ["--data.task", "needle"],
    },
}


def printed(cli, *argv):
    result = cli("fit", *argv, "--print_config").ok()
    assert ".ext." not in result.out
    return yaml.safe_load(result.out)


@pytest.mark.parametrize("section, name", [(section, name) for section in CLASSES for name in CLASSES[section]])
def test_short_names(cli, section, name):
    own = [x.replace("--model", f"--{section}") for x in CLASSES[section][name]]
    config = printed(cli, f"--{section}", name, *own)
    public = {"model": "lightning_dilated", "data": "lightning_dilated.data"}[section]
    assert config[section]["class_path"] == f"{public}.{name}"


def test_short_names_of_callbacks(cli):
    names = ["LossByPosition", "MemoryProfiler", "AttentionWriter", "ShardedCheckpoint"]
    added = [word for name in names for word in ("--trainer.callbacks+", name)]
    config = printed(cli, *TINY, *added, "--trainer.callbacks.folder", "x")
    paths = [x["class_path"] for x in config["trainer"]["callbacks"]]
    assert paths[-4:] == [f"lightning_dilated.callbacks.{name}" for name in names]


def test_a_saved_config_is_read_in_a_new_process(cli, tmp_path):
    config = printed(cli, *TINY, "--trainer.callbacks+", "RecallByDistance")
    (tmp_path / "saved.yaml").write_text(yaml.safe_dump(config))
    argv = [sys.executable, "-m", "lightning_dilated", "fit", "--config", "saved.yaml", "--print_config"]
    result = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-1000:]
    assert yaml.safe_load(result.stdout) == config


@pytest.mark.parametrize("section, name", [("model", "SlideEncoder"), ("data", "SlideDataModule")])
def test_help_of_a_class(cli, section, name):
    result = cli("fit", f"--{section}.help", name)
    assert result.code == 0 and f"keys of {name}" in result.out


def test_data_of_an_extension_reach_a_spawned_worker():
    data = ld.data.LongContextDataModule("needle", lengths=[48], depths=[0], form="tokens", vocabulary=8, batch_size=2)
    data.setup("fit")
    samples = data.dataset("train")
    (first,) = DataLoader(samples, batch_size=None, sampler=[0], num_workers=1, multiprocessing_context="spawn")
    assert first["tokens"].tolist() == samples[0]["tokens"].tolist()
