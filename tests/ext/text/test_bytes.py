"""ByteDataModule: samples, splits, batches, its loaders in a Trainer, errors before any work, and the bigram baseline."""

import math
import multiprocessing
import warnings
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import lightning_dilated as ld
from lightning_dilated.data import ByteDataModule, ByteStream
from lightning_dilated.ext.text.bytes import bigram_counts, bits_per_byte

from ...examples import examples
from ...models import trainer


def write(folder: Path, size: int, seed: int = 0) -> tuple[str, np.ndarray]:
    """Write three files with `size` bytes in total. Return their directory and the bytes."""
    values = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    for name, part in zip("abc", np.array_split(values, 3), strict=True):
        (folder / name).write_bytes(part.tobytes())
    return str(folder), values


@settings(max_examples=examples(40), deadline=None)
@given(
    size=st.integers(60, 200),
    seq_len=st.integers(1, 9),
    batch_size=st.integers(1, 3),
    limit=st.one_of(st.none(), st.integers(1, 3)),
)
def test_samples_lie_end_to_end_within_their_split(
    tmp_path_factory: pytest.TempPathFactory, size: int, seq_len: int, batch_size: int, limit: int | None
) -> None:
    folder, values = write(tmp_path_factory.mktemp("bytes"), size)
    module = ByteDataModule(folder, seq_len, batch_size, 0.25, 0.25, val_limit=limit)
    module.setup("fit")
    share = int(size * 0.25)
    bounds = {"train": (0, size - 2 * share), "val": (size - 2 * share, size - share), "test": (size - share, size)}
    loaders = {"train": module.train_dataloader, "val": module.val_dataloader, "test": module.test_dataloader}
    for split, (start, stop) in bounds.items():
        part = values[start:stop].astype(np.int64)
        count = (len(part) - 1) // seq_len if split != "val" or limit is None else limit
        count = min(count, (len(part) - 1) // seq_len)
        served = []
        for batch in loaders[split]():
            assert {key: value.dtype for key, value in batch.items()} == dict.fromkeys(batch, torch.int64)
            assert batch["tokens"].shape == batch["labels"].shape == (len(batch["index"]), seq_len)
            for tokens, labels, index in zip(batch["tokens"], batch["labels"], batch["index"].tolist(), strict=True):
                begin = index * seq_len
                assert tokens.tolist() == part[begin : begin + seq_len].tolist()
                assert labels.tolist() == part[begin + 1 : begin + seq_len + 1].tolist()
                served.append(index)
        if split == "train":
            assert len(served) == count // batch_size * batch_size
            assert len(set(served)) == len(served)
            assert set(served) <= set(range(count))
        else:
            assert served == list(range(count))


def test_a_sample_reads_its_own_bytes_only(tmp_path: Path) -> None:
    folder, values = write(tmp_path, 1000)
    module = ByteDataModule(folder, seq_len=32, batch_size=2)
    module.check()
    assert module.stream.bytes_read == 0
    dataset = module.dataset("val")
    assert dataset[0]["tokens"].tolist() == values[900:932].tolist()
    assert module.stream.bytes_read == 33
    next(iter(module.train_dataloader()))
    assert module.stream.bytes_read == 33 * 3
    assert dataset.read(0, 5, 9).tolist() == values[905:909].tolist()
    assert dataset.read(0, 32, 33).tolist() == [values[932]]
    assert module.stream.bytes_read == 33 * 3 + 5


@pytest.mark.parametrize("arguments", [(1, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 3, 2), (0, 0, 34)])
def test_reads_outside_a_sample(tmp_path: Path, arguments: tuple[int, int, int]) -> None:
    folder, _ = write(tmp_path, 1000)
    module = ByteDataModule(folder, seq_len=32)
    with pytest.raises(IndexError, match=r"were asked for|was asked for"):
        module.dataset("val").read(*arguments)
    with pytest.raises(ValueError, match="split must be one of train, val, test; got 'dev'"):
        module.dataset("dev")


@pytest.mark.full
def test_spawned_workers_read_the_same(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, 300)
    dataset = ByteDataModule(folder, seq_len=8).dataset("train")
    dataset[0]
    alone = list(DataLoader(dataset, batch_size=16))
    spawned = DataLoader(dataset, batch_size=16, num_workers=1, multiprocessing_context="spawn")
    for left, right in zip(alone, spawned, strict=True):
        assert all(torch.equal(left[key], right[key]) for key in left)


def test_description_and_vocabulary(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, 2000)
    (tmp_path / "empty").touch()
    module = ByteDataModule(folder, seq_len=10, val_limit=3)
    assert module.describe() == "3 files, 2,000 bytes; sequences of 10: 179 train, 3 val, 9 test"
    assert module.vocab_size == 256


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        *[
            ({name: 0}, ValueError, f"data.{name} must be at least 1, got 0")
            for name in ("seq_len", "batch_size", "val_limit")
        ],
        *[
            ({name: -3}, ValueError, f"data.{name} must be at least ., got -3")
            for name in ("seq_len", "batch_size", "seed", "num_workers")
        ],
        *[
            ({name: value}, TypeError, f"data.{name} must be an integer, got .*{value!r}")
            for name in ("seq_len", "batch_size", "val_limit", "seed", "num_workers")
            for value in (2.0, True, "8")
        ],
        ({"seq_len": None}, TypeError, "data.seq_len must be an integer, got None"),
        *[
            ({name: value}, ValueError, f"data.{name} must be a number in .0, 1., got {value}")
            for name in ("val_fraction", "test_fraction")
            for value in (-0.1, 1, 1.5, float("nan"), float("inf"))
        ],
        *[
            ({"val_fraction": value}, TypeError, "data.val_fraction must be a number, got")
            for value in (True, "0.1", None)
        ],
        ({"val_fraction": 0.5, "test_fraction": 0.5}, ValueError, "add up to 1 or more.*lower one"),
        ({"pin_memory": 1}, TypeError, "data.pin_memory must be True or False, got 1"),
        ({"suffixes": ".txt"}, TypeError, "data.suffixes must be a list .* got '.txt'"),
        ({"suffixes": [3]}, TypeError, "data.suffixes"),
        ({"suffixes": []}, ValueError, "data.suffixes must hold at least one ending"),
        ({"suffixes": [""]}, ValueError, "data.suffixes must hold at least one ending"),
    ],
)
def test_wrong_values(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ByteDataModule("never looked at", **options)


def test_suffixes_with_and_without_dot(tmp_path: Path) -> None:
    for name in ("a.txt", "b.md", "txt"):
        (tmp_path / name).write_bytes(b"x" * 100)
    for suffix in ("txt", ".txt"):
        module = ByteDataModule(str(tmp_path), seq_len=3, suffixes=[suffix])
        assert [Path(file).name for file in module.stream.files] == ["a.txt"]


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (0, {}, "all files of data.paths are empty"),
        (10, {}, "train split has 10 of the 10 bytes.* needs 11: pass more data.*lower data.seq_len to at most 9"),
        (1, {}, "train split has 1 of the 1 bytes, .* needs 11: pass more data, or lower"),
        (100, {"val_fraction": 0.1}, "val split has 10 of the 100 bytes.* 11: .* or raise data.val_fraction, or set"),
        (100, {"test_fraction": 0.001}, "test split has 0 of the 100 bytes.* raise data.test_fraction, or set it to 0"),
        (100, {"val_fraction": 0.45, "test_fraction": 0.45}, "train split has 10 of the 100 bytes.* lower data.val_fr"),
        (100, {"batch_size": 10}, "train split has 9 sequences .* one batch takes 10 .*lower data.batch_size"),
    ],
)
def test_too_little_data(tmp_path: Path, size: int, options: dict, message: str) -> None:
    folder, _ = write(tmp_path, size)
    module = ByteDataModule(folder, **{"seq_len": 10, "val_fraction": 0, "test_fraction": 0, **options})
    for look in (module.check, lambda: module.setup("fit"), module.train_dataloader):  # every call must raise
        with pytest.raises(ValueError, match=message):
            look()


@pytest.mark.parametrize("size", [11, 20, 21])
def test_just_enough_data(tmp_path: Path, size: int) -> None:
    folder, _ = write(tmp_path, size)
    module = ByteDataModule(folder, seq_len=10, val_fraction=0, test_fraction=0)
    assert len(list(module.train_dataloader())) == (size - 1) // 10


class Ranked(pl.Trainer):
    """A Trainer with a strategy that claims to be one of several ranks."""

    distributed_sampler_kwargs: dict[str, int] | None = None

    @classmethod
    def make(cls, rank: int, replicas: int) -> "Ranked":
        runner = cls(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
        runner.distributed_sampler_kwargs = {"rank": rank, "num_replicas": replicas}
        return runner


@pytest.mark.parametrize("device, given, pins", [("cuda", None, True), ("cuda", False, False), ("cpu", None, False)])
def test_batches_are_pinned_where_there_is_a_gpu(tmp_path: Path, device: str, given: bool | None, pins: bool) -> None:
    folder, _ = write(tmp_path, 2000)
    module = ByteDataModule(folder, seq_len=10, pin_memory=given)
    assert not module.train_dataloader().pin_memory  # no Trainer is attached yet
    strategy = SimpleNamespace(root_device=torch.device(device))
    module.trainer = SimpleNamespace(strategy=strategy, distributed_sampler_kwargs=None)
    assert module.train_dataloader().pin_memory == module.val_dataloader().pin_memory == pins


@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_ranks_read_different_samples(tmp_path: Path, replicas: int) -> None:
    folder, _ = write(tmp_path, 2000)
    modules = []
    for rank in range(replicas):
        modules.append(ByteDataModule(folder, seq_len=10, batch_size=4))
        modules[-1].trainer = Ranked.make(rank, replicas)
    train = [[batch["index"].tolist() for batch in module.train_dataloader()] for module in modules]
    assert {len(batches) for batches in train} == {179 // (4 * replicas)}
    used = [index for batches in train for batch in batches for index in batch]
    assert len(used) == len(set(used)) == 179 // (4 * replicas) * 4 * replicas
    evaluated = [index for module in modules for batch in module.val_dataloader() for index in batch["index"].tolist()]
    assert sorted(evaluated) == list(range(9))  # 100 bytes: every sequence exactly once
    modules[0].trainer = Ranked.make(0, 1000)
    with pytest.raises(ValueError, match=r"one batch takes 4000 \(.* on 1000 data-parallel ranks"):
        modules[0].train_dataloader()


class Collector(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: dict[str, list[int]] = {"train": [], "val": [], "test": [], "predict": []}

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.seen["train"] += batch["index"].tolist()
        return self.weight.sum()

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.seen["val"] += batch["index"].tolist()

    def test_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.seen["test"] += batch["index"].tolist()

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.seen["predict"] += batch["index"].tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_all_loaders_in_a_trainer(tmp_path: Path, share: float) -> None:
    folder, _ = write(tmp_path, 500)
    module = ByteDataModule(folder, seq_len=10, batch_size=4, val_fraction=share, test_fraction=share)
    model, runner = Collector(), trainer(max_epochs=1)
    runner.fit(model, module)  # training also works without a validation split
    for run in (runner.test, runner.predict):
        # if a run needs a missing split, it raises, and does not succeed without any data
        with nullcontext() if share else pytest.raises(ValueError, match=r"no test split.*data\.test_fraction is 0"):
            run(model, module)
    assert len(model.seen["train"]) == (28 if share else 48)
    evaluated = list(range(9)) if share else []
    assert model.seen["val"] == model.seen["test"] == model.seen["predict"] == evaluated


def test_overfit_batches(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, 500)
    module = ByteDataModule(folder, seq_len=10, batch_size=2, val_fraction=0, test_fraction=0)
    model = Collector()
    trainer(overfit_batches=2, max_epochs=2).fit(model, module)
    assert model.seen["train"] == [0, 1, 2, 3] * 2


def test_reloaded_loaders_go_on_with_the_next_epoch(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, 500)
    batches = []
    for options in ({}, {"reload_dataloaders_every_n_epochs": 1}):
        model = Collector()
        trainer(max_epochs=3, **options).fit(model, ByteDataModule(folder, seq_len=10, batch_size=2))
        batches.append(model.seen["train"])
    assert batches[0] == batches[1]
    assert len(set(map(tuple, (batches[0][:44], batches[0][44:88], batches[0][88:])))) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_order_is_the_same_with_workers(tmp_path: Path, workers: int) -> None:
    assert all(process.name.startswith("pool ") for process in multiprocessing.active_children())  # no loader's workers
    folder, _ = write(tmp_path, 500)
    module = ByteDataModule(folder, seq_len=10, batch_size=3, num_workers=workers, seed=1)
    order = np.random.default_rng([1, 0]).permutation(44).tolist()
    assert [index for batch in module.train_dataloader() for index in batch["index"].tolist()] == order[:42]


def test_default_corpus() -> None:
    module = ByteDataModule(seq_len=1024, batch_size=2, val_limit=8)
    module.check()
    assert len(module.stream) > 1_000_000
    batch = next(iter(module.train_dataloader()))
    assert batch["tokens"].shape == (2, 1024)
    assert (batch["tokens"][:, 1:] == batch["labels"][:, :-1]).all()
    assert 0 <= batch["tokens"].min() <= batch["tokens"].max() <= 255
    assert len(module.val_dataloader()) == 4 < len(module.test_dataloader()) == len(module.predict_dataloader())
    assert 2 < module.bigram_bits_per_byte() < 5


@pytest.mark.parametrize("strategy", ["auto", "ring_dilated"])
def test_no_validation_is_no_warning(tmp_path, strategy):
    """Without a validation split there is no warning. Lightning would warn about a list or wrapper of length zero."""
    data = ByteDataModule(write(tmp_path, 300)[0], seq_len=10, val_fraction=0, test_fraction=0)
    model = ld.LongNetLM(ld.DilatedPattern.dense(), dim=8, depth=1, num_heads=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(max_steps=1, devices=1, strategy=strategy, num_sanity_val_steps=None).fit(model, data)
    assert not [w for w in caught if "Total length" in str(w.message)]


# -- the bigram baseline -----------------------------------------------------------------------------------------------
def plain(train: bytes, pairs: list[tuple[int, int]]) -> float:
    counts: dict[tuple[int, int], int] = {}
    rows: dict[int, int] = {}
    for first, second in pairwise(train):
        counts[first, second] = counts.get((first, second), 0) + 1
        rows[first] = rows.get(first, 0) + 1
    bits = [-math.log2((counts.get(pair, 0) + 1) / (rows.get(pair[0], 0) + 256)) for pair in pairs]
    return sum(bits) / len(bits)


@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_agrees_with_a_plain_loop(tmp_path: Path, split: str, limit: int | None) -> None:
    values = np.random.default_rng(0).integers(0, 40, 3000, dtype=np.uint8) ** 2
    (tmp_path / "a").write_bytes(values[:1100].tobytes())
    (tmp_path / "b").write_bytes(values[1100:].tobytes())
    module = ByteDataModule(str(tmp_path), seq_len=16, val_fraction=0.2, test_fraction=0.1, val_limit=limit)
    loader = getattr(module, f"{split}_dataloader")()
    pairs = [
        pair
        for batch in loader
        for pair in zip(batch["tokens"].flatten().tolist(), batch["labels"].flatten().tolist(), strict=True)
    ]
    assert len(pairs) == len(module.dataset(split)) * 16
    assert module.bigram_bits_per_byte(split) == pytest.approx(plain(values[:2100].tobytes(), pairs), rel=1e-12)


def test_is_cached(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(256)) * 4)
    module = ByteDataModule(str(tmp_path), seq_len=8)
    first = module.bigram_bits_per_byte()
    read = module.stream.bytes_read
    assert module.bigram_bits_per_byte() == first
    assert module.stream.bytes_read == read
    module.bigram_bits_per_byte("test")
    assert module.stream.bytes_read < read + 60  # the counts of the training bytes are reused


@pytest.mark.parametrize("chunk", [1, 7, 99, 100, 1000])
def test_counts_do_not_depend_on_the_chunk(tmp_path: Path, chunk: int) -> None:
    values = np.random.default_rng(1).integers(0, 3, 100, dtype=np.uint8)
    (tmp_path / "a").write_bytes(values.tobytes())
    counts = bigram_counts(ByteStream([str(tmp_path / "a")]), 10, 90, chunk)
    expected = np.zeros((256, 256), dtype=np.int64)
    np.add.at(expected, (values[10:89], values[11:90]), 1)
    assert (counts == expected).all()


def test_known_values() -> None:
    nothing = np.zeros((256, 256), dtype=np.int64)
    one = nothing.copy()
    one[1, 2] = 1
    assert bits_per_byte(nothing, one) == pytest.approx(8)
    assert bits_per_byte(one * 255, one) == pytest.approx(math.log2(511 / 256))
    with pytest.raises(ValueError, match="no byte pairs"):
        bits_per_byte(one, nothing)


def test_a_split_without_sequences(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc" * 100)
    module = ByteDataModule(str(tmp_path), seq_len=8, val_fraction=0)
    with pytest.raises(ValueError, match=r"the val split has no sequences: set data\.val_fraction above 0"):
        module.bigram_bits_per_byte()
    with pytest.raises(ValueError, match="split must be one of"):
        module.bigram_bits_per_byte("dev")
