"""Values in a file are plain: no class that a checkpoint or config.json names is imported, created or called."""

import builtins
import contextlib
import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_dilated import Branch, DilatedModule, DilatedPattern, LongNetLM, Recurrence, SlideEncoder
from lightning_dilated._compat.lightning import argument_types
from lightning_dilated.cli.lightning_cli import with_checkpoint
from lightning_dilated.cli.load_model import load_any, load_module
from lightning_dilated.cli.parsing.parser import check_texts
from lightning_dilated.data import ByteDataModule
from lightning_dilated.ext.decoding.load import load_language_model
from lightning_dilated.ext.evaluation.evaluate import load_causal_model
from lightning_dilated.ext.export import consolidate
from lightning_dilated.ext.genomes.score import genome_model
from lightning_dilated.models.pretrained import file_arguments, make_values

from . import PATTERN, text, trainer

INSTANTIATOR = "lightning.pytorch.cli.instantiate_module"
MARK = "a mark of test_file_classes"
MARKS: list[Any] = []


class Touched:
    """Leaves a mark when an instance is created."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        MARKS.append((args, kwargs))


#: callable that a file names -> arguments that would leave a mark
TARGETS = {
    "os.system": {"command": MARK},
    "subprocess.Popen": {"args": MARK},
    "torch.hub.load": {"repo_or_dir": MARK, "model": MARK},
    "torch.load": {"f": MARK},
    "builtins.eval": {"source": MARK},
    f"{__name__}.Touched": {},
}
OWNERS = {"os.system": os, "subprocess.Popen": subprocess, "torch.hub.load": torch.hub, "torch.load": torch}


def call(target):
    return {"class_path": target, "init_args": TARGETS[target]}


def nested(target):
    """Return a call of `target` nested in the arguments of another class, which a parser would create first."""
    return {"class_path": "torch.optim.SGD", "init_args": {"lr": call(target)}}


FORMS = {
    "mapping": call,
    "nested": nested,
    "in a list": lambda target: [{"a": call(target)}],
    "JSON": lambda target: json.dumps(call(target)),
    "YAML": lambda target: yaml.safe_dump(nested(target)),
}


@pytest.fixture
def calls(monkeypatch):
    """Replace the targets by functions that only leave marks, and yield the marks. At the end there must be none."""
    MARKS.clear()

    def recorder(own):
        @functools.wraps(own)
        def record(*args, **kwargs):
            if MARK in (*args, *kwargs.values()):
                MARKS.append((own, args, kwargs))
                return 0
            return own(*args, **kwargs)

        return record

    for target, owner in OWNERS.items():
        name = target.rpartition(".")[2]
        monkeypatch.setattr(owner, name, recorder(getattr(owner, name)))
    monkeypatch.setattr(builtins, "eval", recorder(eval))
    yield MARKS
    assert not MARKS


@functools.cache
def saved():
    return dict(LongNetLM(PATTERN, dim=16, depth=1).hparams)


def hyperparameters(**extra):
    """Return the hyperparameters of a LongNetLM in the form that the command line saves."""
    return {**saved(), "pattern": PATTERN.to_dict(), "_instantiator": INSTANTIATOR, **extra}


@functools.cache
def weights():
    return LongNetLM(PATTERN, dim=16, depth=1).state_dict()


def checkpoint(folder, _without=(), _empty=False, **extra):
    """Write a checkpoint as the command line does, but with additional hyperparameters."""
    stored = {
        "state_dict": {} if _empty else weights(),
        "pytorch-lightning_version": "2.6.0",
        "class_path": "lightning_dilated.LongNetLM",
    }
    stored["hyper_parameters"] = {k: v for k, v in hyperparameters(**extra).items() if k not in _without}
    torch.save(stored, folder / "x.ckpt")
    return folder / "x.ckpt"


def from_file(path):
    with path.open("rb") as file:
        return LongNetLM.load_from_checkpoint(file)


def from_hparams(path):
    """Load from a YAML file with the hyperparameters, next to an unmodified checkpoint."""
    hparams = torch.load(path, weights_only=True)["hyper_parameters"]
    path.with_suffix(".yaml").write_text(yaml.safe_dump(hparams))
    good = path.parent / "good"
    if not good.exists():
        good.mkdir()
        checkpoint(good)
    return LongNetLM.load_from_checkpoint(good / "x.ckpt", hparams_file=path.with_suffix(".yaml"))


def from_folder(path):
    """Load from a folder of save_pretrained with these hyperparameters."""
    hparams = torch.load(path, weights_only=True)["hyper_parameters"]
    if not (path.parent / "m").exists():
        LongNetLM(PATTERN, dim=16, depth=1).save_pretrained(path.parent / "m")
    config = {"class_path": "lightning_dilated.LongNetLM", "init_args": hparams}
    (path.parent / "m" / "config.json").write_text(json.dumps(config))
    return LongNetLM.from_pretrained(path.parent / "m")


def by_command(name):
    def read(path):
        recipe = ["--config", "recipe.yaml"] if name == "fit" else []
        (path.parent / "recipe.yaml").write_text("model: {class_path: lightning_dilated.LongNetLM}\n")
        with contextlib.chdir(path.parent):
            words = with_checkpoint([name, *recipe, "--ckpt_path", "x.ckpt"])
        assert not any(word.startswith(("--model.optimizer", "--model.lr_scheduler")) for word in words)

    return read


READERS = {
    "load_from_checkpoint": lambda path: LongNetLM.load_from_checkpoint(path),
    "of the base class": lambda path: DilatedModule.load_from_checkpoint(path, weights_only=True),
    "trusted pickle": lambda path: LongNetLM.load_from_checkpoint(path, weights_only=False),
    "open file": from_file,
    "hparams_file": from_hparams,
    "from_pretrained": from_folder,
    "export": load_module,
    "generate": load_language_model,
    "evaluate": load_causal_model,
    "load_any": load_any,
    "consolidate": lambda path: consolidate.described(*consolidate.weights(path)),
    **{name: by_command(name) for name in ("validate", "test", "predict", "fit")},
}
NAMES = [*argument_types(LongNetLM), "unknown"]


def refused(reader, path, name, capsys):
    with pytest.raises((ValueError, SystemExit)) as error:
        READERS[reader](path)
    message = f"{error.value} {capsys.readouterr().err}"
    assert f"({name})" in message and "a file does not decide which class is made" in message


@pytest.mark.parametrize("name", NAMES)
def test_no_reader_calls_what_a_file_names(calls, tmp_path, capsys, name):
    """Test every reader with every name. The call that a file contains, and its form, vary from case to case.

    The optimizer and the scheduler are ignored. All other hyperparameters are refused.
    """
    dropped, forms, number = name in ("optimizer", "lr_scheduler"), list(FORMS.values()), NAMES.index(name)
    for i, target in enumerate(TARGETS):
        evil = {"_class_path": "lightning_dilated.LongNetLM", name: forms[(i + number) % len(forms)](target)}
        path = checkpoint(tmp_path, ("_instantiator", "_class_path") if i % 2 else (), not dropped, **evil)
        for j, reader in enumerate(READERS):
            if (i + j + number) % 3 or (reader == "of the base class" and i % 2):  # these files do not name the class
                continue
            if dropped:
                model = READERS[reader](path)
                assert not isinstance(model, LongNetLM) or type(model.configure_optimizers()) is torch.optim.AdamW
            else:
                refused(reader, path, name, capsys)
            assert not calls, (reader, evil)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("target", TARGETS)
def test_every_form_of_a_hyperparameter(calls, tmp_path, target, form):
    for name in ("pattern", "recurrence", "engine"):
        path = checkpoint(tmp_path, **{name: FORMS[form](target)})
        for reader in (LongNetLM.load_from_checkpoint, load_module, from_hparams):
            with pytest.raises(ValueError, match=rf"\({name}\), and a file does not decide which class is made"):
                reader(path)


def test_score(calls, tmp_path):
    with pytest.raises(ValueError, match="and a file does not decide"):
        genome_model(str(checkpoint(tmp_path, recurrence=nested("os.system"))))


#: hyperparameters that the model compares with its own when a run resumes
READ_IN_A_RUN = ("pattern", "recurrence", "hashed", "rotary_base", "max_seq_len")


@pytest.mark.parametrize("target", TARGETS)
def test_a_trainer_reads_no_hyperparameters(calls, tmp_path, target):
    """A Trainer that resumes uses its existing model, not the hyperparameters of the file."""
    run, data = trainer(max_steps=1, limit_val_batches=0), text(tmp_path)
    run.fit(LongNetLM(PATTERN, dim=16, depth=1), data)
    run.save_checkpoint(tmp_path / "x.ckpt")
    stored = torch.load(tmp_path / "x.ckpt", weights_only=True)
    extra = {name: call(target) for name in NAMES if name not in READ_IN_A_RUN}
    stored["hyper_parameters"] |= {**extra, "_instantiator": INSTANTIATOR, "_class_path": target}
    stored["datamodule_hyper_parameters"] = {"_instantiator": INSTANTIATOR, "paths": call(target)}
    torch.save(stored, tmp_path / "x.ckpt")
    again = trainer(max_steps=2, limit_val_batches=1)
    again.fit(LongNetLM(PATTERN, dim=16, depth=1), data, ckpt_path=tmp_path / "x.ckpt", weights_only=True)
    assert again.global_step == 2
    again.validate(LongNetLM(PATTERN, dim=16, depth=1), data, ckpt_path=tmp_path / "x.ckpt", weights_only=True)


@pytest.mark.parametrize("target", TARGETS)
def test_data_of_a_checkpoint(calls, tmp_path, target):
    """load_from_checkpoint of a data module has no parser that could create classes."""
    hparams = {"_instantiator": INSTANTIATOR, "paths": nested(target), "seq_len": call(target)}
    torch.save({"datamodule_hyper_parameters": hparams, "pytorch-lightning_version": "2.6.0"}, tmp_path / "x.ckpt")
    with contextlib.suppress(ValueError, TypeError):
        ByteDataModule.load_from_checkpoint(tmp_path / "x.ckpt")


# -- what a file may say -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [
    {"class_path": "evilmod.X"}, {"nested": {"a": [{"b": {"class_path": "torch.nn.Linear", "init_args": {}}}]}},
    "{class_path: evilmod.X}", "evil.yaml", {"a.class_path": "evilmod.X"}, {"class_path": " evilmod.X"},
    {"class_path ": "x"},
    {"_class_path": "lightning_dilated.DilatedPattern"}, {"class_path": "lightning_dilated.LongNetLM"},
    {"class_path": "lightning_dilated.cli.main"}, {"class_path": "SGD"}, {"class_path": 3}, {"class_path": "DilatedPattern"},
    {"class_path": "lightning_dilated.DilatedPattern", "init_args": {"branches": {"class_path": "os.system"}}},
    {"class_path": "lightning_dilated.Branch", "dict_kwargs": {}}, "'{class_path: evilmod.X}'", {"<<: {class_path: a.b}": 1},
    ({"class_path": "evilmod.X"},), '{\t"class_path":\t"evilmod.X"}', "{2001-99-99: {class_path: evilmod.X}}",
    "{? !!str {=: class_path} : evilmod.X}", "{? {=: class_path} : evilmod.X}",
    {"a": ["{? !!str {=: class_path} : evilmod.X}"]},
    '{"\\u0063lass_path": "evilmod.X"}', "a: &a {class_path: evilmod.X}\nb: {<<: *a}",
])  # fmt: skip
def test_refused(tmp_path, monkeypatch, value):
    (tmp_path / "evil.yaml").write_text("class_path: evilmod.X\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=r"x\.ckpt names .* \(loss\), and a file does not decide .* give loss yourself"
    ):
        file_arguments({"loss": value}, "x.ckpt")
    assert file_arguments({"loss": value}, "x.ckpt", but=["loss"]) == {}


@pytest.mark.parametrize("value", [
    "weights.pth", "a.b.c", "0.1", "os.system", "SGD", [1.5, None, True], (1, "a"), {0: 1.0, 1: 2.0}, {0.5: {"a b": None}},
    {"benign tissue": 1.0, "tumour": 3}, {}, torch.float32,
])  # fmt: skip
def test_let_in(value):
    arguments = file_arguments({"x": value, "optimizer": call("os.system"), "_instantiator": "os.system"}, "x.ckpt")
    assert arguments == {"x": value} and type(arguments["x"]) is type(value)


@pytest.mark.parametrize("key", ["optimizer.class_path", "a=b", "", 3, "class_path", "init_args", "dict_kwargs"])
def test_names_of_hyperparameters(key):
    with pytest.raises(ValueError, match=r"x\.ckpt: .* is not the name of a hyperparameter"):
        file_arguments({key: "evilmod.X"}, "x.ckpt")


def test_endless_values():
    value = []
    value += [value, value]
    doubled = "".join(f"c{i}: &c{i} [*c{i - 1}, *c{i - 1}]\n" for i in range(1, 30))
    for endless in (value, f"c0: &c0 [x, x]\n{doubled}"):
        with pytest.raises(ValueError, match="endlessly nested"):
            file_arguments({"a": endless}, "x.ckpt")


def test_classes_of_values(tmp_path):
    """A pattern and a recurrence given by class_path, as the command line may save them for a user's model."""
    branch = {
        "class_path": "lightning_dilated.pattern.branch.Branch",
        "init_args": {"segment_length": 8, "dilation_rate": 2},
    }
    pattern = {"class_path": "lightning_dilated.pattern.pattern.DilatedPattern", "init_args": {"branches": [branch]}}
    recurrence = {"class_path": "lightning_dilated.Recurrence", "init_args": {"conv": 2}}
    checked = file_arguments({"pattern": pattern, "recurrence": [recurrence, None]}, "x.ckpt")
    assert checked["pattern"]["class_path"] == "lightning_dilated.DilatedPattern"
    loaded = make_values(checked)
    assert loaded == {"pattern": DilatedPattern([Branch(8, 2)]), "recurrence": [Recurrence(conv=2), None]}
    model = LongNetLM.load_from_checkpoint(checkpoint(tmp_path, pattern=pattern))
    assert model.pattern == DilatedPattern([Branch(8, 2)])


# -- what a parser reads from texts ------------------------------------------------------------------------------------
@dataclass
class Sizes:
    kind: str = "a"
    width: int = 3


class Own(DilatedModule):
    def __init__(
        self,
        norm: torch.nn.Module | None = None,
        layer: type | None = None,
        make: Any = None,
        sizes: Sizes | None = None,
        name: str = "own",
        folder: Path | None = None,
        pattern: DilatedPattern | list[DilatedPattern] | None = None,
        **extra: Any,
    ) -> None:
        super().__init__(**extra)
        self.save_hyperparameters(ignore=["optimizer", "lr_scheduler"])

    def build(self) -> None:
        self.layer = torch.nn.Linear(3, 3)


@pytest.mark.parametrize("arguments", [
    {"norm": "torch.nn.Identity"}, {"norm": "x.yaml"}, {"norm": "https://x.org/y.yaml"}, {"norm": {"a": ["os.system"]}},
    {"layer": "os.system"}, {"pattern": "x.txt"}, {"pattern": ["DilatedPattern"]}, {"sizes": "x.txt"},
])  # fmt: skip
def test_texts_that_a_parser_would_follow(arguments):
    with pytest.raises(ValueError, match=rf"x\.ckpt has {next(iter(arguments))}='.*give \w+ yourself"):
        check_texts(arguments, argument_types(Own), "x.ckpt")


@pytest.mark.parametrize("arguments", [
    {"norm": None}, {"pattern": {"branches": [[8, 1]], "padding": "masked"}}, {"sizes": {"kind": "b"}},
    {"name": "os.system"}, {"folder": "a/b"}, {"make": "os.system"},
])  # fmt: skip
def test_texts_that_it_takes(arguments):
    check_texts(arguments, argument_types(Own), "x.ckpt")


# -- the model's own class ---------------------------------------------------------------------------------------------
@pytest.fixture
def evil(tmp_path, monkeypatch):
    """A module beside the file that leaves a mark when it is imported."""
    source = "import pathlib\npathlib.Path(__file__).with_name('mark').touch()\nX = LongNetLM = dict\n"
    (tmp_path / "evilmod.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    yield tmp_path
    assert not list(tmp_path.rglob("mark")) and "evilmod" not in sys.modules


def own_checkpoint(folder, **extra):
    model = Own(name="mine")
    stored = {"state_dict": model.state_dict(), "pytorch-lightning_version": "2.6.0"}
    model.on_save_checkpoint(stored)
    stored["hyper_parameters"] = {
        **model.hparams,
        "_class_path": f"{__name__}.Own",
        "_instantiator": INSTANTIATOR,
        **extra,
    }
    torch.save(stored, folder / "own.ckpt")
    return folder / "own.ckpt"


def test_a_subclass_that_is_imported(tmp_path):
    path = own_checkpoint(
        tmp_path, pattern={"class_path": "lightning_dilated.DilatedPattern", "init_args": {"branches": []}}
    )
    with pytest.raises(ValueError, match="branch"):  # DilatedPattern itself refuses it
        Own.load_from_checkpoint(path)
    for cls in (Own, DilatedModule):
        model = cls.load_from_checkpoint(own_checkpoint(tmp_path))
        assert type(model) is Own and model.hparams.name == "mine"
    assert type(load_module(own_checkpoint(tmp_path))) is Own
    with pytest.raises(
        ValueError, match=r"holds a .*\.Own, which is not a known LongNetLM: call Own.load_from_checkpoint"
    ):
        LongNetLM.load_from_checkpoint(own_checkpoint(tmp_path))


def test_a_class_that_the_caller_gives(tmp_path):
    """An argument that the caller gives is used; the class that the file names for it is not read."""
    path = own_checkpoint(tmp_path, norm={"class_path": "torch.nn.Identity"}, optimizer=call("os.system"))
    with pytest.raises(
        ValueError, match=r"own\.ckpt names torch\.nn\.Identity \(norm\).* as a keyword of load_from_check"
    ):
        Own.load_from_checkpoint(path)
    norm = torch.nn.Identity()
    model = Own.load_from_checkpoint(path, norm=norm, optimizer=torch.optim.SGD)
    assert model.hparams.norm is norm and type(model.configure_optimizers()) is torch.optim.SGD


@pytest.mark.parametrize(
    "path", ["evilmod.X", "torch.nn.Linear", "os.system", "json.tool.main", "lightning_dilated.cli"]
)
def test_other_classes(evil, path):
    for reader in (LongNetLM.load_from_checkpoint, DilatedModule.load_from_checkpoint, from_hparams, load_module):
        with pytest.raises(ValueError, match=rf"holds a {path}, which is not"):
            reader(checkpoint(evil, _class_path=path))
    with pytest.raises(ValueError, match=r"config\.json holds a evilmod\.X|holds a evilmod\.X"):
        folder = evil / "m"
        LongNetLM(PATTERN, dim=16, depth=1).save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "class_path": "evilmod.X"}))
        DilatedModule.from_pretrained(folder)


def test_the_file_of_hyperparameters(evil):
    """A file of hyperparameters may be YAML with plain values and tuples, or a CSV of literals."""
    path, file = checkpoint(evil), evil / "h.yaml"
    hparams = {k: v for k, v in hyperparameters().items() if k != "_instantiator"}
    file.write_text(yaml.dump({**hparams, "dropout": 0.25, "class_weights": (1, 2)}))
    with pytest.raises(TypeError, match="no argument 'class_weights'"):
        LongNetLM.load_from_checkpoint(path, hparams_file=file)
    file.write_text(yaml.dump({**hparams, "dropout": 0.25}))
    assert LongNetLM.load_from_checkpoint(path, hparams_file=str(file)).dropout.p == 0.25
    rows = "".join(f'{k},"{v}"\n' for k, v in hparams.items())
    (evil / "h.csv").write_text(f"key,value\n{rows}")
    assert LongNetLM.load_from_checkpoint(path, hparams_file=evil / "h.csv").pattern == PATTERN
    for wrong in ("optimizer: !!python/name:os.system\n", "a: !!python/object/apply:os.system [x]\n", "[1]\n", "{"):
        file.write_text(wrong)
        with pytest.raises(ValueError, match=r"hparams_file .*h\.yaml"):
            LongNetLM.load_from_checkpoint(path, hparams_file=file)
    with pytest.raises(ValueError, match=r"must be a \.csv, \.yml or \.yaml"):
        LongNetLM.load_from_checkpoint(path, hparams_file=path)


def test_an_optimizer_of_a_file_is_not_taken(tmp_path):
    """Even a harmless optimizer of a file is ignored, because the caller chooses the optimizer."""
    path = checkpoint(tmp_path, optimizer={"class_path": "torch.optim.SGD", "init_args": {"lr": 0.125}})
    for model in (LongNetLM.load_from_checkpoint(path), from_file(path), load_module(path)):
        assert type(model.configure_optimizers()) is torch.optim.AdamW
    own = LongNetLM.load_from_checkpoint(path, optimizer=torch.optim.SGD)
    assert type(own.configure_optimizers()) is torch.optim.SGD


def test_functions_of_a_file_are_not_called(tmp_path):
    """A function named by `hparams_type` is ignored (Lightning would call it); one under a key of old files is refused."""
    stored = torch.load(checkpoint(tmp_path), weights_only=True)
    stored |= {"hparams_type": torch._utils._rebuild_parameter, "module_arguments": {"own": call("os.system")}}
    torch.save(stored, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=r"names os\.system \(own\)"):
        LongNetLM.load_from_checkpoint(tmp_path / "x.ckpt")
    torch.save({**stored, "module_arguments": {"engine": "none"}}, tmp_path / "x.ckpt")
    assert LongNetLM.load_from_checkpoint(tmp_path / "x.ckpt").pattern == PATTERN


def test_from_pretrained(evil):
    pytest.importorskip("safetensors")
    LongNetLM(PATTERN, dim=16, depth=1).save_pretrained(evil / "m")
    (evil / "m" / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config\.json is not JSON .*download it again"):
        LongNetLM.from_pretrained(evil / "m")


def test_from_pretrained_mae(calls, tmp_path):
    from ..ext.slides.slides import SIZES, encoder

    model = encoder()
    extra = {"optimizer": call("os.system"), "_instantiator": INSTANTIATOR}
    torch.save({"state_dict": model.state_dict(), "hyper_parameters": {**SIZES, **extra}}, tmp_path / "x.ckpt")
    loaded = SlideEncoder.from_pretrained_mae(tmp_path / "x.ckpt")
    assert isinstance(loaded.configure_optimizers(), torch.optim.AdamW)
    hparams = {**SIZES, "engine": nested("os.system")}
    torch.save({"state_dict": model.state_dict(), "hyper_parameters": hparams}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=r"\(engine\), and a file does not decide which class is made"):
        SlideEncoder.from_pretrained_mae(tmp_path / "x.ckpt")
