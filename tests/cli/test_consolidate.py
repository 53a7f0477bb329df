"""`consolidate` writes the same weights from every kind of checkpoint to a labelled file, or raises one clear error."""

import json
import pickle
import shutil
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from lightning_dilated import DilatedModule, LongNetLM, RingDilatedFSDPStrategy
from lightning_dilated.ext.checkpoints.sharded_checkpoint import ShardedCheckpoint

from ..distributed.pool import Pool
from ..models import PATTERN, batch, loader, text, tiny, trainer
from ..strategy.runs import full, launched

pytestmark = pytest.mark.full

SIZES = {"dim": 16, "depth": 1, "num_heads": 4}


def fit(folder, model=None, **options):
    """Fit two steps, with a sharded checkpoint after each and a .ckpt at the end. Return the model."""
    pl.seed_everything(0, verbose=False)
    model = model or LongNetLM(PATTERN, **SIZES)
    saver = ShardedCheckpoint(str(folder / "parts"), every_n_train_steps=1)
    options = {"limit_val_batches": 0, "devices": 1, **options}
    run = trainer(max_steps=2, callbacks=[saver], enable_checkpointing=True, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.fit(model, text(folder))
        run.save_checkpoint(folder / "lightning.ckpt")
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder with parts/ and lightning.ckpt, the tensors in them). It is read-only."""
    folder = tmp_path_factory.mktemp("made")
    model = fit(folder)
    return folder, {k: v.clone() for k, v in model.state_dict().items()}


def fit_on_rank(rank, group, folder):
    """Call `fit` with sharded parameters. Return the unsharded tensors."""
    strategy = RingDilatedFSDPStrategy()
    model = fit(Path(folder), devices=launched(rank), strategy=strategy)
    return {k: full(v).detach().clone() for k, v in model.state_dict().items()}


@pytest.fixture(scope="module")
def distributed(tmp_path_factory):
    """The same as `made`, from ring_dilated_fsdp on two ranks, where Lightning's lightning.ckpt is a folder."""
    folder = tmp_path_factory.mktemp("distributed")
    pool = Pool(2)
    tensors = pool.run(2, fit_on_rank, str(folder))[0]
    pool.close()
    return folder, tensors


def check_file(path, want):
    tensors = load_file(path)
    assert all(torch.equal(tensors[k], want[k]) for k in tensors)
    assert set(want) - set(tensors) == {"head.weight"}  # tied to the embedding, so only the embedding is stored
    return tensors


SOURCES = ["parts", "parts/step-00000002", "lightning.ckpt"]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", ["made", "distributed"])
def test_a_file(request, cli, tmp_path, kind, source):
    folder, want = request.getfixturevalue(kind)
    result = cli("consolidate", folder / source, "--out", tmp_path / "a" / "b.safetensors")
    assert result.code == 0 and "b.safetensors: lightning_dilated.LongNetLM" in result.out, result.err
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b.safetensors"]
    check_file(tmp_path / "a" / "b.safetensors", want)
    with safe_open(tmp_path / "a" / "b.safetensors", "pt") as file:
        metadata = file.metadata()
    assert (metadata["class_path"], metadata["global_step"]) == ("lightning_dilated.LongNetLM", "2")
    twin = LongNetLM(**json.loads(metadata["init_args"]))
    assert not twin.load_state_dict(load_file(tmp_path / "a" / "b.safetensors"), strict=False).unexpected_keys
    assert all(torch.equal(v, want[k]) for k, v in twin.state_dict().items())


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", ["made", "distributed"])
def test_a_folder(request, cli, tmp_path, kind, source):
    """The output folder equals the folder that save_pretrained writes."""
    folder, want = request.getfixturevalue(kind)
    assert cli("consolidate", folder / source, "--out", tmp_path / "out").code == 0
    check_file(tmp_path / "out" / "model.safetensors", want)
    twin = LongNetLM.from_pretrained(tmp_path / "out")
    assert twin.pattern == PATTERN and all(torch.equal(v, want[k]) for k, v in twin.state_dict().items())
    twin.save_pretrained(tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_generate_reads_the_folder(made, cli, tmp_path):
    assert cli("consolidate", made[0] / "parts", "--out", tmp_path / "out").code == 0
    result = cli("generate", "--ckpt_path", tmp_path / "out", "--prompt", "ab", "--max_new_bytes", "3")
    assert result.code == 0 and result.out.startswith("ab"), result.err


class Foreign(DilatedModule):
    """A user's module that is not imported by the command line."""

    def __init__(self, width: int = 3, **options):
        super().__init__(**options)
        self.save_hyperparameters()

    def build(self):
        self.layer = nn.Embedding(256, 256)
        self.same = nn.ModuleList([self.layer])

    def loss_terms(self, batch):
        logits, labels = self.layer(batch["tokens"]), batch["labels"]
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()


@pytest.mark.parametrize(
    "source, names", [("parts", ["layer.weight", "same.0.weight"]), ("lightning.ckpt", ["layer.weight"])]
)
def test_a_class_that_is_not_imported(cli, tmp_path, monkeypatch, source, names):
    model = fit(tmp_path, Foreign(5))
    monkeypatch.delitem(sys.modules, __name__)
    assert cli("consolidate", tmp_path / source, "--out", tmp_path / "out").code == 0
    monkeypatch.undo()
    assert sorted(load_file(tmp_path / "out" / "model.safetensors")) == names
    twin = Foreign.from_pretrained(tmp_path / "out")
    assert twin.hparams["width"] == 5 and torch.equal(twin.layer.weight, model.layer.weight)


# -- what is refused ---------------------------------------------------------------------------------------------------
def one_line(result, *words):
    assert result.code == 2 and result.err.startswith("lightning-dilated: error: ") and result.out == ""
    assert all(w in result.err for w in words), result.err


def test_a_damaged_one_is_passed_over_or_named(made, cli, tmp_path):
    shutil.copytree(made[0] / "parts", tmp_path / "c")
    hurt = tmp_path / "c" / "step-00000002" / "__0_0.distcp"
    data = bytearray(hurt.read_bytes())
    data[500] ^= 8
    hurt.write_bytes(data)
    with pytest.warns(UserWarning, match=r"__0_0.distcp has other bytes than were written"):
        result = cli("consolidate", tmp_path / "c", "--out", "a.safetensors")
    assert result.code == 0 and "step-00000001" in result.out
    result = cli("consolidate", tmp_path / "c" / "step-00000002", "--out", "b.safetensors")
    one_line(result, "__0_0.distcp has other bytes", f"newest undamaged one is {tmp_path}/c/step-00000001")
    assert not (tmp_path / "b.safetensors").exists()


class Harm:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return open, ("harmed", "w")


def test_a_folder_runs_no_code(made, distributed, cli, tmp_path):
    for name in (".metadata", "meta.pt"):
        shutil.copytree(distributed[0] / "lightning.ckpt", tmp_path / name)  # without a manifest, there is no checksum
        (tmp_path / name / name).write_bytes(pickle.dumps({"state_dict_metadata": Harm()}))
        one_line(
            cli("consolidate", tmp_path / name, "--out", "x.safetensors"),
            "cannot be read",
            name if name[0] == "." else "",
        )
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("source, words", [
    ("nothing", "no such file"), (".", "is no checkpoint, and contains no"), ("text.txt", "cannot be read as a checkpoint"),
])  # fmt: skip
def test_no_checkpoint(cli, source, words):
    one_line(cli("consolidate", source, "--out", "x.safetensors"), words)


def test_names(made, cli, tmp_path):
    one_line(cli("consolidate", made[0] / "parts", "--out", "x.pt"), "--out x.pt must end in .safetensors")


def test_without_the_library(made, cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    one_line(cli("consolidate", made[0] / "parts", "--out", "x.safetensors"), "pip install 'lightning-dilated[hub]'")


def test_weights_that_do_not_fit(cli, tmp_path):
    model = fit(tmp_path)
    stored = torch.load(tmp_path / "lightning.ckpt", weights_only=True)
    stored["hyper_parameters"]["depth"] = 2
    torch.save(stored, tmp_path / "odd.ckpt")
    one_line(
        cli("consolidate", tmp_path / "odd.ckpt", "--out", "x.safetensors"),
        "odd.ckpt do not fit the LongNetLM",
        "missing",
    )
    assert model.training


def test_dtypes_stay(cli, tmp_path):
    model = tiny(dtype=torch.bfloat16, vocab_size=256)
    saver = ShardedCheckpoint(str(tmp_path / "c"))
    run = trainer(max_steps=1, precision="bf16-true", callbacks=[saver], enable_checkpointing=True)
    run.fit(model, loader(batch(1, 20, vocab_size=256)))
    assert cli("consolidate", tmp_path / "c", "--out", "x.safetensors").code == 0
    tensors = load_file(tmp_path / "x.safetensors")
    assert {x.dtype for x in tensors.values()} == {torch.bfloat16} and "embedding.weight" in tensors
