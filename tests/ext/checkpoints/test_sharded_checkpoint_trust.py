"""Checkpoint folders from strangers: no reader runs code from their files, or hangs."""

import json
import os
import pickle
import shutil
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_dilated import LongNetLM
from lightning_dilated.callbacks import ShardedCheckpoint
from lightning_dilated.checkpoint.folder import read_tensors, read_whole
from lightning_dilated.checkpoint.manifest import MANIFEST, file_entries, manifest_digest
from lightning_dilated.checkpoint.reader import read_metadata
from lightning_dilated.data import ByteDataModule
from lightning_dilated.ext.export.consolidate import run as consolidate

from ...models import PATTERN, trainer
from .checkpoint_runs import STEPS, run

pytestmark = pytest.mark.full

STRATEGIES = ("ring_dilated", "ring_dilated_fsdp")


class Payload:
    """Creates a folder when it is unpickled."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def saved_bytes(value):
    """Return a pickle in torch's format, padded to more bytes than any entry has."""
    return pickle.dumps(value, 2) + bytes(50_000)


def edit(folder, change):
    """Change the contents of `.metadata`."""
    data = pickle.loads((folder / ".metadata").read_bytes())
    data = change(data) or data
    (folder / ".metadata").write_bytes(pickle.dumps(data))


def replace_entries(folder, kind, data):
    """Replace all entries of a kind with the same bytes."""

    def change(record):
        keys = [index for index in record.storage_data if isinstance(record.state_dict_metadata[index.fqn], kind)]
        assert keys
        (folder / "__9_0.distcp").write_bytes(data * len(keys))
        for number, index in enumerate(keys):
            info = record.storage_data[index]
            info.relative_path, info.offset, info.length = "__9_0.distcp", number * len(data), len(data)

    edit(folder, change)


#: name -> (function that puts a payload into a folder, stages that read it)
HOSTILE = {
    ".metadata": (lambda folder, load: (folder / ".metadata").write_bytes(pickle.dumps(load)), "all"),
    "in .metadata": (lambda folder, load: edit(folder, lambda x: x.planner_data.update(more=load)), "all"),
    "meta.pt": (lambda folder, load: torch.save({"callbacks": load}, folder / "meta.pt"), "all"),
    "raw meta.pt": (lambda folder, load: (folder / "meta.pt").write_bytes(pickle.dumps(load, 2)), "all"),
    "values": (lambda folder, load: replace_entries(folder, BytesStorageMetadata, saved_bytes(load)), "fit"),
    "tensors": (lambda folder, load: replace_entries(folder, TensorStorageMetadata, saved_bytes(load)), "all"),
}


def reseal(folder):
    """Write a manifest for the current files."""
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest.pop("blake2b")
    manifest["files"] = file_entries(folder, [p.name for p in folder.iterdir() if p.name != MANIFEST])
    (folder / MANIFEST).write_text(json.dumps({**manifest, "blake2b": manifest_digest(manifest)}))


@pytest.fixture
def one(copied):
    """A folder with one checkpoint."""
    for name in ("step-00000002", "step-00000003"):
        shutil.rmtree(copied / name)
    return copied / "step-00000004"


def stage(name, strategy, text, path, weights_only):
    """Run a stage (fit, validate, ...) from a checkpoint."""
    if name in ("fit", "resume"):
        saver = ShardedCheckpoint(str(path.parent), resume="auto" if name == "resume" else "never")
        ckpt_path = path if name == "fit" else None
        run(text, STEPS, saver, strategy=strategy, ckpt_path=ckpt_path)
        return
    built = trainer(strategy=strategy, devices=1, limit_test_batches=1, limit_predict_batches=1)
    data = ByteDataModule(text, seq_len=64, batch_size=2, val_fraction=0.25, test_fraction=0.25, val_limit=1)
    model = LongNetLM(PATTERN, dim=16, depth=1).double()
    getattr(built, name)(model, data, ckpt_path=path, weights_only=weights_only)


#: (stage, `weights_only`, whether there is a manifest)
STAGES = (
    *(("fit", None, True), ("resume", None, True), ("fit", None, False)),
    *(("validate", True, False), ("test", False, True), ("predict", None, False), ("validate", False, True)),
)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("what", HOSTILE)
def test_no_entry_runs_code(text, one, tmp_path, strategy, what):
    """No entry runs code: at any stage, with the manifest resealed or missing, and for any `weights_only`."""
    mark = tmp_path / "mark"
    hurt, where = HOSTILE[what]
    hurt(one, Payload(mark))
    reseal(one)
    with suppress(ValueError):
        consolidate([str(one), "--out", str(tmp_path / "x.safetensors")])
    for name, weights_only, sealed in STAGES:
        manifest = (one / MANIFEST).read_text()
        if not sealed:
            (one / MANIFEST).unlink()
            one = one.rename(one.with_name("other"))
        try:
            reads = where == "all" or name in ("fit", "resume") or strategy == "ring_dilated"
            with pytest.raises(ValueError, match=r"mkdir") if reads else nullcontext():
                stage(name, strategy, text, one, weights_only)
        finally:
            assert not mark.exists(), (name, weights_only, sealed)
            one = one.rename(one.with_name("step-00000004"))
            (one / MANIFEST).write_text(manifest)


def test_every_value_is_read_so(one, tmp_path):
    """Replace one entry at a time with a payload, and read the checkpoint."""
    before = (one / ".metadata").read_bytes()
    names = list(pickle.loads(before).state_dict_metadata)
    assert len(names) > 10
    data = saved_bytes(Payload(tmp_path / "mark"))
    (one / "__9_0.distcp").write_bytes(data)
    for name in names:

        def change(record, name=name):
            (index,) = (x for x in record.storage_data if x.fqn == name)
            info = record.storage_data[index]
            info.relative_path, info.offset, info.length = "__9_0.distcp", 0, len(data)

        (one / ".metadata").write_bytes(before)
        edit(one, change)
        with pytest.raises(ValueError, match=f"{one} cannot be loaded .*mkdir"):
            read_tensors(one)
    assert not (tmp_path / "mark").exists()


class Sharded(LongNetLM):
    """Shards itself, as Lightning's strategy requires."""

    def configure_model(self):
        super().configure_model()
        block = self.transformer.blocks[0]
        if self.device_mesh is not None and not isinstance(next(block.parameters()), DTensor):
            fully_shard(block, mesh=self.device_mesh["data_parallel"])


@pytest.mark.parametrize("what", [".metadata", "values", "meta.pt"])
def test_under_lightnings_own_strategy(text, one, tmp_path, what):
    """ShardedCheckpoint also reads the folder under Lightning's own strategy."""
    HOSTILE[what][0](one, Payload(tmp_path / "mark"))
    reseal(one)
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
    with pytest.raises(ValueError, match="mkdir"):
        run(text, STEPS, ShardedCheckpoint(str(one.parent), resume="auto"), strategy=strategy, model=Sharded)
    assert not (tmp_path / "mark").exists()


def test_lightnings_own_strategy_goes_on(text, saved, whole, tmp_path):
    """Lightning's own strategy resumes from a folder of this package."""
    shutil.copytree(saved, tmp_path / "c")
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
    saver = ShardedCheckpoint(str(tmp_path / "c"), resume="must")
    resumed = run(text, STEPS, saver, strategy=strategy, model=Sharded, begun=2)
    assert resumed["losses"] == pytest.approx(whole["losses"][4:], rel=1e-12)


# -- .metadata ---------------------------------------------------------------------------------------------------------
def first(data, kind=TensorStorageMetadata):
    return next(index for index in data.storage_data if isinstance(data.state_dict_metadata[index.fqn], kind))


def set_entry(**values):
    return lambda data: vars(data.storage_data[first(data)]).update(values)


def set_size(data):
    about = data.state_dict_metadata[first(data).fqn]
    about.size = torch.Size([10**12])


def set_chunk(data):
    about = data.state_dict_metadata[first(data).fqn]
    about.size = about.chunks[0].sizes = torch.Size([10**12])


def share(data):
    """Let all entries refer to one part of one file, so that it would be read again and again."""
    every = list(data.storage_data.values())
    longest = max(every, key=lambda info: info.length)
    for info in every:
        info.offset, info.length = longest.offset, longest.length


WRONG = {
    "None": (lambda data: [None][0], "it holds NoneType"),
    "a list": (lambda data: [1], "it holds list"),
    "no entries": (lambda data: setattr(data, "storage_data", None), "cannot be read"),
    "entries of another kind": (lambda data: setattr(data, "storage_data", {1: 2}), "cannot be read"),
    "tensors of another kind": (lambda data: setattr(data, "state_dict_metadata", {"a": 1}), "a is neither a tensor"),
    "no paths": (lambda data: setattr(data, "planner_data", None), "does not say where"),
    "other paths": (lambda data: setattr(data, "planner_data", {"a": (1.5,)}), "1.5 stands where a name belongs"),
    "a large tensor": (set_size, r"declares the shape \(1000000000000,\)"),
    "a large part": (set_chunk, "declares a part of [0-9,]+ elements, but the files hold"),
    "beyond the end": (set_entry(length=10**9), r"ends at byte [\d,]+ of __0_0.distcp, which has"),
    "before the beginning": (set_entry(offset=-1), "-1 stands where a count belongs"),
    "another folder": (set_entry(relative_path="../x"), "names the file '../x', which is not in this folder"),
    "of the system": (set_entry(relative_path="/etc/passwd"), "'/etc/passwd', which is not in this folder"),
    "no such file": (set_entry(relative_path="x"), "the file x is missing"),
    "a pipe": (set_entry(relative_path="pipe"), "pipe is no regular file"),
    "one part for all": (share, r"it lists [\d,]+ bytes in files of"),
    "compressed": (set_entry(transform_descriptors=["stream.zstd"]), "stored in a transformed way"),
}


@pytest.mark.parametrize("name", WRONG)
def test_metadata_that_lies(one, name):
    change, says = WRONG[name]
    os.mkfifo(one / "pipe")
    data = pickle.loads((one / ".metadata").read_bytes())
    changed = change(data)
    (one / ".metadata").write_bytes(pickle.dumps(data if changed is None and name != "None" else changed))
    with pytest.raises(ValueError, match=says) as raised:
        read_tensors(one)
    assert str(one / ".metadata") in str(raised.value) and "earlier checkpoint" in str(raised.value)


@pytest.mark.parametrize("named", [
    ("torch.distributed.checkpoint.filesystem", "FileSystemReader"), ("torch", "Tensor"), ("torch", "load"),
    ("torch.distributed.checkpoint.filesystem", "ExtensionRegistry"), ("torch.distributed.checkpoint.metadata", "Any"),
    ("builtins", "getattr"), ("torch.distributed.checkpoint.metadata", "Metadata.__init__"), ("collections", "deque"),
])  # fmt: skip
def test_metadata_names_only_what_a_checkpoint_needs(one, named):
    module, name = named
    parts = [pickle.PROTO + b"\x04"]
    parts += [pickle.SHORT_BINUNICODE + bytes([len(x)]) + x.encode() for x in (module, name)]
    (one / ".metadata").write_bytes(b"".join(parts) + pickle.STACK_GLOBAL + pickle.STOP)
    with pytest.raises(ValueError, match=rf"names {module}.{name}, which no checkpoint needs"):
        read_metadata(one)


def test_metadata_changes_no_class_of_torch(one):
    """A pickle may set attributes on classes that it names. Reading must not change the class."""
    text = pickle.SHORT_BINUNICODE
    words = [bytes([len(x)]) + x.encode() for x in ("torch.distributed.checkpoint.metadata", "Metadata", "spoilt")]
    named = text + words[0] + text + words[1] + pickle.STACK_GLOBAL
    state = pickle.NONE + pickle.EMPTY_DICT + text + words[2] + pickle.NEWTRUE + pickle.SETITEM + pickle.TUPLE2
    (one / ".metadata").write_bytes(pickle.PROTO + b"\x04" + named + state + pickle.BUILD + pickle.STOP)
    with pytest.raises(ValueError, match=r"\.metadata cannot be read"):
        read_metadata(one)
    assert not hasattr(TensorStorageMetadata, "spoilt")
    from torch.distributed.checkpoint.metadata import Metadata

    assert not hasattr(Metadata, "spoilt")


# -- the other files ---------------------------------------------------------------------------------------------------
def nested(depth=100_000):
    return "[" * depth + "]" * depth


def manifest(**values):
    """Return a sealed manifest with other values."""

    def change(folder):
        content = json.loads((folder / MANIFEST).read_text())
        content.pop("blake2b")
        content.update(values)
        (folder / MANIFEST).write_text(json.dumps({**content, "blake2b": manifest_digest(content)}))

    return change


def pipe(name):
    def change(folder):
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


OTHERS = {
    "nested": (lambda folder: (folder / MANIFEST).write_text(nested()), "manifest.json cannot be read .*nested"),
    "files: a list": (manifest(files=[1]), "manifest.json cannot be read .*files"),
    "files: of another kind": (manifest(files={"meta.pt": 3}), "manifest.json cannot be read .*meta.pt"),
    "files: of another size": (
        manifest(files={"meta.pt": {"size": "3", "blake2b": ""}}),
        "manifest.json cannot be read",
    ),
    "files: elsewhere": (
        manifest(files={"../x": {"size": 3, "blake2b": ""}}),
        r"manifest.json cannot be read .*\.\./x",
    ),
    "step": (manifest(step="4"), "manifest.json cannot be read .*step"),
    "written": (manifest(written=None), "manifest.json cannot be read .*written"),
    "a pipe: manifest": (pipe(MANIFEST), "manifest.json cannot be read .*it is no regular file"),
    "a pipe: meta.pt": (pipe("meta.pt"), "meta.pt is missing"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_files_that_lie(text, one, name):
    change, says = OTHERS[name]
    change(one)
    with pytest.raises(ValueError, match=says):
        run(text, STEPS, ShardedCheckpoint(str(one.parent), resume="auto"))


def test_pipes_without_a_manifest(one):
    (one / MANIFEST).unlink()
    for name in ("meta.pt", ".metadata"):
        pipe(name)(one)
        with pytest.raises(FileNotFoundError, match=f"it has no {name}"):
            read_whole(one)
        if name == "meta.pt":
            (one / name).unlink()
            torch.save({}, one / name)


def test_a_value_that_is_damaged(one, tmp_path):
    """`consolidate` and all other readers name the folder and the damaged entry."""
    replace_entries(one, BytesStorageMetadata, b"not a file of torch.save")
    with pytest.raises(ValueError, match=rf"{one} cannot be loaded .*the entry optimizer_0\.\S+: .*earlier checkpoint"):
        read_whole(one)


@pytest.mark.parametrize(
    "given, weights_only", [({}, True), ({"weights_only": None}, True), ({"weights_only": False}, False)]
)
def test_an_address_is_read_without_running_code(monkeypatch, given, weights_only):
    """Lightning reads an address that begins with http with weights_only=False by default."""
    passed = {}
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", lambda url, **options: passed.update(options) or {})
    monkeypatch.setattr(
        "lightning.fabric.plugins.io.torch_io.get_filesystem", lambda path: SimpleNamespace(exists=bool)
    )
    strategy = pl.Trainer(strategy="ring_dilated", accelerator="cpu", devices=1, logger=False).strategy
    assert strategy.load_checkpoint("http://somewhere/last.ckpt", **given) == {}
    assert passed == {"map_location": "cpu", "weights_only": weights_only}
