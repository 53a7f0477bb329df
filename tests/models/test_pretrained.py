"""Folders with config.json and model.safetensors: a saved model loads again, files are readable, misfits raise."""

import json
import sys

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lightning_dilated import DilatedModule, DilatedPattern, LongNetLM
from lightning_dilated.data import tokenizer_files

from . import PATTERN, SIZES, tiny
from .test_longnet_lm import MADE, plain

TOKENS = torch.randint(11, (2, 20))


class Own(DilatedModule):
    """A user's module that saves its hyperparameters itself."""

    def __init__(
        self, width: int = 3, pattern: DilatedPattern | None = None, kinds: tuple = ("a", "b"), **extra
    ) -> None:
        super().__init__(**extra)
        self.save_hyperparameters(ignore=["optimizer", "lr_scheduler"])
        self.width = width

    def build(self) -> None:
        self.layer = nn.Linear(self.width, self.width)
        self.other = nn.ModuleDict({"same": self.layer})
        self.register_buffer("steps", torch.tensor([self.width, 7]))


# -- there and back ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MADE)
def test_round_trip(name, dtype, tmp_path):
    model = MADE[name]().to(dtype).eval()
    assert model.save_pretrained(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert {x.name for x in (tmp_path / "a" / "b").iterdir()} == {"config.json", "model.safetensors"}
    twin = type(model).from_pretrained(str(tmp_path / "a" / "b"))
    assert twin.training and twin.pattern == model.pattern and twin.patterns == model.patterns
    assert torch.equal(twin.eval()(TOKENS), model(TOKENS)) and twin(TOKENS).dtype == dtype


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_tied_embeddings_are_saved_once(tied, tmp_path):
    model = tiny(tie_embeddings=tied)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "embedding.weight" in stored and ("head.weight" in stored) == (not tied)
    twin = LongNetLM.from_pretrained(tmp_path)
    assert (twin.head.weight is twin.embedding.weight) == tied


def test_config_is_readable(tmp_path):
    LongNetLM(PATTERN, **SIZES, shift_layers="odd").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["class_path"] == "lightning_dilated.LongNetLM"
    assert config["init_args"]["pattern"] == PATTERN.to_dict() and config["init_args"]["shift_layers"] == "odd"
    assert (
        config["init_args"]["dim"] == 16
        and plain(config)
        and not {"optimizer", "lr_scheduler"} & set(config["init_args"])
    )


def test_any_module(tmp_path):
    """A user's module with a shared layer, a buffer, and a tuple as an argument."""
    model = Own(4, pattern=PATTERN)
    model.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == {"layer.weight", "layer.bias", "steps"}
    for cls in (Own, DilatedModule):
        twin = cls.from_pretrained(tmp_path)
        assert type(twin) is Own and twin.other["same"] is twin.layer and twin.steps.tolist() == [4, 7]
        assert torch.equal(twin.layer.weight, model.layer.weight)


def test_changes(tmp_path):
    tiny(dropout=0.25).save_pretrained(tmp_path)
    created = []
    twin = LongNetLM.from_pretrained(
        tmp_path, dropout=0.5, optimizer=lambda p: created.append(p) or torch.optim.SGD(p, 0.1)
    )
    twin.configure_optimizers()
    assert twin.dropout.p == 0.5 and created
    with pytest.raises(TypeError, match="LongNetLM has no argument 'widht'"):
        LongNetLM.from_pretrained(tmp_path, widht=3)


def test_from_a_checkpoint_of_training(tmp_path):
    """A .ckpt file is converted to a folder."""
    from . import batch, loader, trainer

    run, model = trainer(max_steps=1), LongNetLM(PATTERN, **SIZES)
    run.fit(model, loader(batch(2, 20)))
    run.save_checkpoint(tmp_path / "x.ckpt")
    LongNetLM.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True).save_pretrained(tmp_path / "y")
    assert torch.equal(LongNetLM.from_pretrained(tmp_path / "y").eval()(TOKENS), model.eval()(TOKENS))


# -- what does not fit -------------------------------------------------------------------------------------------------
def edit(**changes):
    """Return a function that changes config.json in a folder."""

    def act(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return act


def sizes(**changes):
    def act(folder):
        config = json.loads((folder / "config.json").read_text())
        edit(init_args={**config["init_args"], **changes})(folder)

    return act


def weights(change):
    def act(folder):
        stored = load_file(folder / "model.safetensors")
        save_file(change(stored), folder / "model.safetensors")

    return act


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-40])


BROKEN = {
    "no config": (lambda f: (f / "config.json").unlink(), FileNotFoundError, "has no config.json"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), FileNotFoundError, "has no model.safetensors"),
    "no json": (lambda f: (f / "config.json").write_text("{"), ValueError, "config.json is not JSON"),
    "another json": (lambda f: (f / "config.json").write_text("[]"), ValueError, "needs class_path and init_args"),
    "no arguments": (edit(init_args=3), ValueError, "needs class_path and init_args"),
    "cut short": (cut, ValueError, "model.safetensors cannot be read .*cut short"),
    "another class": (
        edit(class_path="lightning_dilated.models.module.DilatedModule"),
        ValueError,
        "holds a .*DilatedModule, which is not a known LongNetLM.*call DilatedModule.from_pretrained",
    ),
    "an unknown class": (edit(class_path="else.where.Model"), ValueError, "import Model and call its from_pretrained"),
    "other sizes": (sizes(dim=32), ValueError, "does not fit config.json. (.|\n)*size mismatch"),
    "more layers": (sizes(depth=3), ValueError, "does not fit the LongNetLM .*missing: transformer.blocks.2"),
    "fewer layers": (sizes(depth=1), ValueError, "does not fit the LongNetLM .*too many: transformer.blocks.1"),
    "no embedding": (
        weights(lambda x: {k: v for k, v in x.items() if k != "embedding.weight"}),
        ValueError,
        "missing: embedding.weight, head.weight",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_folder(name, tmp_path):
    act, error, text = BROKEN[name]
    tiny().save_pretrained(tmp_path)
    act(tmp_path)
    with pytest.raises(error, match=text):
        LongNetLM.from_pretrained(tmp_path)


def test_no_folder(tmp_path):
    (tmp_path / "x.ckpt").touch()
    with pytest.raises(ValueError, match=r"is a file; .* use load_from_checkpoint"):
        LongNetLM.from_pretrained(tmp_path / "x.ckpt")
    with pytest.raises(FileNotFoundError, match=r"no such folder, and not the name of a repository \(owner/name\)"):
        LongNetLM.from_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize("value", [nn.GELU(), {1: "a"}, [torch.float32]], ids=str)
def test_what_json_cannot_hold(value, tmp_path):
    """JSON would turn a mapping's keys from numbers into strings, so such a mapping is refused."""
    with pytest.raises(TypeError, match=r"hyperparameter kinds=.* of Own cannot be written .*ignore=\['kinds'\]"):
        Own(kinds=value).save_pretrained(tmp_path / "x")
    assert not (tmp_path / "x").exists()


# -- the hub, without a network ----------------------------------------------------------------------------------------
def test_from_the_hub(tmp_path, monkeypatch):
    model, calls = tiny(), []
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda repo, **o: calls.append((repo, o)) or str(tmp_path)
    )
    twin = LongNetLM.from_pretrained("some-one/longnet.v1", revision="main", token="t")
    assert torch.equal(twin.eval()(TOKENS), model(TOKENS))
    files = ["config.json", "model.safetensors", *tokenizer_files.PATTERNS]
    assert calls == [
        ("some-one/longnet.v1", {"allow_patterns": files, "revision": "main", "token": "t", "cache_dir": None})
    ]


def test_not_on_the_hub(monkeypatch):
    def offline(*args, **options):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no outgoing traffic\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(
        FileNotFoundError, match=r"runs/mine: no such folder here, .*LocalEntryNotFoundError: no outgoing"
    ):
        LongNetLM.from_pretrained("runs/mine")


def test_push_to_hub(monkeypatch):
    calls, model = [], tiny()

    class Api:
        def __init__(self, token=None):
            calls.append(("api", token))

        def create_repo(self, repo, **options):
            calls.append(("create", repo, options))

        def upload_folder(self, *, folder_path, **options):
            twin = LongNetLM.from_pretrained(folder_path).eval()
            calls.append(("upload", options, torch.equal(twin(TOKENS), model(TOKENS))))
            return "commit"

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    assert model.push_to_hub("me/model", private=True, token="t") == "commit"
    assert calls == [
        ("api", "t"),
        ("create", "me/model", {"private": True, "exist_ok": True}),
        ("upload", {"repo_id": "me/model", "commit_message": "Upload LongNetLM"}, True),
    ]


@pytest.mark.parametrize("library", ["safetensors.torch", "huggingface_hub"])
def test_without_the_extra(library, tmp_path, monkeypatch):
    """The error names the extra. tests/test_package.py tests that `import lightning_dilated` needs neither library."""
    model = tiny()
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf"{library} is missing: pip install 'lightning-dilated\[hub\]'"):
        model.save_pretrained(tmp_path / "x") if library.startswith("safe") else LongNetLM.from_pretrained("some/one")
