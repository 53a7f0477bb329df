"""Workers send batches without a graph. A batch that cannot be sent raises an error, where torch would wait forever."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_dilated.data import SlideDataModule, SplitDataModule
from lightning_dilated.data.module import SendableCollate, detached
from lightning_dilated.sequence.shard import Place, SequenceSpec
from lightning_dilated.strategy.loader import Loaders

from ..ext.slides.test_slides import grid

pytestmark = pytest.mark.full

Pair = namedtuple("Pair", "x y")
#: timeout of a worker in seconds; torch's default is none
PATIENCE = 60


@dataclass
class Holder:
    """A batch of a custom class."""

    x: Any


def grown() -> torch.Tensor:
    """Return a tensor with a graph, which torch refuses to send to another process."""
    return torch.ones(4, 2, requires_grad=True) * 2


def test_slides_saved_with_a_gradient_leave_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(4):
        values = {"features": torch.randn(30, 4, requires_grad=True), "coords": torch.from_numpy(grid(30))}
        torch.save(values, tmp_path / f"s{i}.pt")
    data = SlideDataModule(str(tmp_path), val_fraction=0, test_fraction=0, num_workers=1, batch_size=2)
    assert not data.dataset("train")[0]["features"].requires_grad
    loader = data.train_dataloader()
    loader.timeout = PATIENCE
    assert [batch["features"].requires_grad for batch in loader] == [False, False]


BATCHES = {
    "a dict": lambda: {"x": grown(), "y": 1},
    "a list": lambda: [grown(), grown()],
    "a named tuple": lambda: Pair(grown(), "b"),
    "another mapping": lambda: OrderedDict(x=grown()),
    "nested": lambda: {"x": [{"y": (grown(),)}]},
}


def tensors(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else []
    return [x for part in parts for x in tensors(part)]


@pytest.mark.parametrize("name", BATCHES)
def test_every_tensor_is_detached(name: str) -> None:
    batch = BATCHES[name]()
    out = detached(batch)
    assert type(out) is type(batch) and len(tensors(out)) == len(tensors(batch)) > 0
    assert not any(x.requires_grad for x in tensors(out)) and all(x.requires_grad for x in tensors(batch))
    assert detached(out) is out  # a batch without graphs is not copied


class Samples(Dataset):
    """Eight samples that a function returns."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.make()


class Module(SplitDataModule):
    """A user's data module."""

    def __init__(self, make: Any, collate: Any = None, workers: int = 1) -> None:
        super().__init__(batch_size=2, num_workers=workers)
        self.make, self.collate = make, collate

    def check(self) -> None:
        pass

    def dataset(self, split: str) -> Samples:
        return Samples(self.make)


def test_own_datasets_with_a_gradient() -> None:
    for loader in (Module(lambda: {"x": grown()}).train_dataloader(), Module(lambda: {"x": grown()}).val_dataloader()):
        loader.timeout = PATIENCE
        assert not next(iter(loader))["x"].requires_grad


UNSENDABLE = {
    "a function": (lambda x: {"f": lambda: x}, "the entry 'f' of a batch is a function that cannot be sent"),
    "a generator": (lambda x: [i for i in ()] or (i for i in x), "a batch is a generator that cannot be sent"),
    "a graph": (lambda x: Holder(grown()), "a batch is a Holder that cannot be sent .*has a graph: detach it"),
}


@pytest.mark.parametrize("name", UNSENDABLE)
def test_what_cannot_be_sent_is_an_error(name: str) -> None:
    make, message = UNSENDABLE[name]
    collate = Module(lambda: 1, make).train_dataloader().collate_fn
    loader = DataLoader(Samples(lambda: 1), batch_size=8, collate_fn=collate, num_workers=1, timeout=PATIENCE)
    batches = iter(loader)
    with pytest.raises(TypeError, match=f"(?s){message}.*num_workers to 0"):
        next(batches)
    batches._shutdown_workers()  # the error refers to the iterator, and a worker forked later would wait for it
    next(iter(Module(lambda: 1, make, workers=0).train_dataloader()))  # without workers, nothing is sent


class Ranges(Samples):
    """The same samples from a dataset with `read_ranges`."""

    seq_len = 4

    def read_ranges(self, index: int, ranges: tuple[range, ...]) -> Any:
        return {"x": self.make()["x"][[p for r in ranges for p in r]]}


@pytest.mark.parametrize("kind", [Samples, Ranges])
def test_sharded_loaders(kind: type) -> None:
    """The strategy replaces a user's DataLoader by one that returns this rank's tokens."""
    loader = DataLoader(kind(lambda: {"x": grown()}), batch_size=2, num_workers=1, timeout=PATIENCE)
    Loaders(Place(2, 0), 0).shard(loader, SequenceSpec({"x": 1}))
    batch = next(iter(loader))
    assert batch["x"].shape == (2, 2, 2) and not batch["x"].requires_grad


def test_collate_without_workers_gives_the_same() -> None:
    assert SendableCollate()([{"x": torch.ones(2)}] * 3)["x"].shape == (3, 2)
