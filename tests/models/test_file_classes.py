"""Classes that a file names: no module is imported because a checkpoint or a config.json says so."""

import json
import sys

import pytest
import torch

from lightning_dilated import LongNetLM, SlideEncoder
from lightning_dilated.cli.load_model import load_module
from lightning_dilated.models.pretrained import check_classes

from . import PATTERN


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """A module beside the file, which leaves a mark when it is imported."""
    (tmp_path / "evilmod.py").write_text("import pathlib\npathlib.Path(__file__).with_name('mark').touch()\nX = dict\n")
    (tmp_path / "namespace").mkdir()
    (tmp_path / "namespace" / "evilmod.py").write_text((tmp_path / "evilmod.py").read_text())
    (tmp_path / "evil.yaml").write_text("class_path: evilmod.X\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    yield tmp_path
    assert not list(tmp_path.rglob("mark")) and "evilmod" not in sys.modules


def checkpoint(folder, **hparams):
    """A checkpoint as the command line writes it, with further hyperparameters."""
    model = LongNetLM(PATTERN, dim=16, depth=1)
    stored = {"state_dict": model.state_dict(), "pytorch-lightning_version": "2.6.0"}
    model.on_save_checkpoint(stored)
    plain = {**{k: v for k, v in model.hparams.items() if k != "pattern"}, "pattern": PATTERN.to_dict()}
    stored["hyper_parameters"] = {**plain, "_instantiator": "lightning.pytorch.cli.instantiate_module", **hparams}
    torch.save(stored, folder / "x.ckpt")
    return folder / "x.ckpt"


EVIL = {"class_path": "evilmod.X"}
NAMED = {
    "class_path": EVIL,
    "nested": {"a": [{"b": {"class_path": "torch.nn.Linear", "init_args": {"c": EVIL}}}]},
    "a string": "evilmod.X",
    "in a folder": "namespace.evilmod.X",
    "YAML": "{class_path: evilmod.X}",
    "a file of YAML": "evil.yaml",
    "not there": {"class_path": "nowhere.X"},
    "below an imported one": {"class_path": "tests.nowhere.X"},
}


@pytest.mark.parametrize("name", NAMED)
def test_refused(evil, name):
    with pytest.raises(ValueError, match=r"x\.ckpt names (\w+\.)+X .*not imported here.* import (\w+\.?)+ before"):
        check_classes({"loss": NAMED[name]}, "x.ckpt")


@pytest.mark.parametrize("value", [
    {"class_path": "torch.optim.AdamW"}, {"class_path": "lightning_dilated.WarmupCosine"}, "weights.pth", "a.b.c", "0.1",
    {"class_path": "tests.models.test_file_classes.Loss"}, {"class_path": "SGD"}, [1.5, None, True], "namespace.v1",
])  # fmt: skip
def test_let_in(evil, value):
    check_classes({"x": value}, "x.ckpt")


class Loss:
    """Imported already."""


@pytest.mark.parametrize("key", ["optimizer.class_path", "a=b", "", 3])
def test_names_of_hyperparameters(key):
    with pytest.raises(ValueError, match=r"x\.ckpt: .* is not the name of a hyperparameter"):
        check_classes({key: "evilmod.X"}, "x.ckpt")


@pytest.mark.parametrize("value", [{0: 1.0, 1: 2.0}, {"benign tissue": 1.0, "tumour": 3}, {0.5: {"a b": None}}])
def test_keys_of_a_mapping(value):
    check_classes({"class_weights": value}, "x.ckpt")


@pytest.mark.parametrize("value", [
    {"a b": {"class_path": "evilmod.X"}}, {"a.class_path": "evilmod.X"}, {"evilmod.X": 1}, {"class_path": " evilmod.X"},
    {"class_path": "!!str evilmod.X"}, {"class_path": "evil-mod.X"}, "!!str evilmod.X", "'evilmod.X'",
])  # fmt: skip
def test_other_spellings(evil, value):
    with pytest.raises(ValueError, match=r"evil-?mod\.X"):
        check_classes({"x": value}, "x.ckpt")


def test_a_list_that_holds_itself():
    value = []
    value.append(value)
    with pytest.raises(ValueError, match="endlessly nested"):
        check_classes({"a": value}, "x.ckpt")


def test_known_to_the_caller(evil):
    check_classes(EVIL, "x.ckpt", known={"evilmod"})


# -- who reads ---------------------------------------------------------------------------------------------------------
def test_load_module_takes_no_optimizer(evil):
    """Nor a scheduler: it has the class's own."""
    model = load_module(checkpoint(evil, optimizer=EVIL, lr_scheduler=EVIL))
    assert isinstance(model.configure_optimizers(), torch.optim.AdamW)
    with pytest.raises(ValueError, match=r"x\.ckpt names evilmod\.X \(class_path\)"):
        load_module(checkpoint(evil, engine=EVIL))


@pytest.mark.parametrize("how", ["path", "open file"])
def test_load_from_checkpoint(evil, how):
    path = checkpoint(evil, optimizer=EVIL)
    with pytest.raises(ValueError, match=r"names evilmod\.X"), path.open("rb") as file:
        LongNetLM.load_from_checkpoint(path if how == "path" else file)
    own = LongNetLM.load_from_checkpoint(path, optimizer=torch.optim.SGD)
    assert isinstance(own.configure_optimizers(), torch.optim.SGD)
    path = checkpoint(evil, optimizer={"class_path": "torch.optim.SGD", "init_args": {"lr": 0.125}})
    with path.open("rb") as file:
        kept = LongNetLM.load_from_checkpoint(path if how == "path" else file)
    assert kept.configure_optimizers().param_groups[0]["lr"] == 0.125
    with pytest.raises(ValueError, match=r"names evilmod\.X \(_class_path\)"):
        LongNetLM.load_from_checkpoint(checkpoint(evil, _class_path="evilmod.X"))


def test_from_pretrained(evil):
    pytest.importorskip("safetensors")
    LongNetLM(PATTERN, dim=16, depth=1).save_pretrained(evil / "m")
    config = json.loads((evil / "m" / "config.json").read_text())
    for change, refused in (({"optimizer": EVIL, "lr_scheduler": EVIL}, False), ({"engine": EVIL}, True)):
        changed = {**config, "init_args": {**config["init_args"], **change}}
        (evil / "m" / "config.json").write_text(json.dumps(changed))
        if refused:
            with pytest.raises(ValueError, match=r"config\.json names evilmod\.X"):
                LongNetLM.from_pretrained(evil / "m")
        else:
            assert isinstance(LongNetLM.from_pretrained(evil / "m").configure_optimizers(), torch.optim.AdamW)
    (evil / "m" / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config\.json is not JSON .*download it again"):
        LongNetLM.from_pretrained(evil / "m")


def test_from_pretrained_mae(evil):
    from .slides import SIZES, encoder

    model = encoder()
    torch.save({"state_dict": model.state_dict(), "hyper_parameters": {**SIZES, "optimizer": EVIL}}, evil / "x.ckpt")
    made = SlideEncoder.from_pretrained_mae(evil / "x.ckpt")
    assert isinstance(made.configure_optimizers(), torch.optim.AdamW)
