"""Sharding of data loaders: each worker yields only this rank's tokens, in the loader's order.

Datasets with `read_ranges` read only these tokens. Batches of other datasets are cut to these tokens in the worker,
after collation and before pinning.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from lightning_dilated._compat.lightning import replace_sampler_choice
from lightning_dilated._compat.torch import set_dataset
from lightning_dilated.data.module import detached, sendable
from lightning_dilated.sequence.shard import Place, SequenceSpec
from lightning_dilated.strategy.preemption import WorkerWithoutSignals


def keep_order(trainer: pl.Trainer) -> None:
    """Make Lightning's samplers shuffle only if the training loader itself shuffles.

    With several processes Lightning passes shuffle=True for every training loader, even if the loader was created with
    shuffle=False or with its own sampler.
    """
    replace_sampler_choice(trainer, lambda choose: functools.partial(_choose, choose))


def _choose(choose: Callable[..., Any], dataloader: DataLoader, shuffle: bool, mode: RunningStage | None = None) -> Any:
    shuffle = shuffles(dataloader) if mode == RunningStage.TRAINING else shuffle
    return choose(dataloader, shuffle=shuffle, mode=mode)


def shuffles(dataloader: DataLoader) -> bool:
    """Return True if a loader was created with shuffle=True or a RandomSampler.

    Other samplers keep their own order. A batch sampler without a `sampler` may have any order and counts as shuffling.
    """
    if dataloader.batch_sampler is None:
        return isinstance(dataloader.sampler, RandomSampler)
    return isinstance(getattr(dataloader.batch_sampler, "sampler", RandomSampler([0])), RandomSampler)


@runtime_checkable
class RangeDataset(Protocol):
    """A map-style dataset of sequences of `seq_len` tokens that can read selected positions of a sequence."""

    seq_len: int

    def read_ranges(self, index: int, ranges: tuple[range, ...]) -> Any:
        """Return only the positions in `ranges` of sample `index`, in their order; labels are already shifted."""
        ...


@runtime_checkable
class RaggedDataset(Protocol):
    """A map-style dataset of sequences with different lengths that can read selected positions of a sequence.

    A rank requests the same positions of all samples of a batch, up to the longest sample. `read_ranges` pads positions
    beyond a sample's length, so that the rank's parts of the samples have equal lengths.
    """

    def length_of(self, index: int) -> int:
        """Return the number of tokens of sample `index` without reading it."""
        ...

    def read_ranges(self, index: int, ranges: tuple[range, ...]) -> Any:
        """Return only the positions in `ranges` of sample `index`, as in `RangeDataset`."""
        ...


class RankDataset(Dataset):
    """A dataset that reads only one rank's part of each sample of `dataset`, and has the attributes of `dataset`."""

    def __init__(self, dataset: RangeDataset | RaggedDataset, place: Place) -> None:
        self.dataset, self.place = dataset, place

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Return the samples of a batch; torch's loaders call this method once for each batch."""
        if isinstance(self.dataset, RaggedDataset):
            seq_len = max(self.dataset.length_of(index) for index in indices)
        else:
            seq_len = self.dataset.seq_len
        ranges = self.place.ranges(seq_len)
        return [sendable(self.dataset.read_ranges(index, ranges)) for index in indices]

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "__setstate__"):  # not set yet during unpickling
            raise AttributeError(name)
        return getattr(self.dataset, name)


class RankCollate:
    """A collate function that cuts the collated batch to one rank's part."""

    def __init__(self, collate: Callable[[Any], Any], spec: SequenceSpec, place: Place) -> None:
        self.collate, self.spec, self.place = collate, spec, place

    def __call__(self, samples: Any) -> Any:
        return sendable(self.spec.cut(self.collate(detached(samples)), self.place))


class RankIterable:
    """An iterable of batches other than a DataLoader, with each batch cut to one rank's part."""

    def __init__(self, batches: Any, spec: SequenceSpec, place: Place) -> None:
        self.batches, self.spec, self.place = batches, spec, place

    def __iter__(self) -> Iterator[Any]:
        return (self.spec.cut(batch, self.place) for batch in self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Loaders:
    """Shards the loaders of a run and restores them at its end."""

    def __init__(self, place: Place, data_rank: int) -> None:
        self.place, self.data_rank = place, data_rank
        self._before: list[tuple[DataLoader, dict[str, Any]]] = []

    def shard(self, loader: Any, spec: SequenceSpec | None) -> Any:
        """Return a loader that yields this rank's part of each batch; a DataLoader is changed in place.

        Raises:
            ValueError: if it is unknown which entries of a batch are sequences.
        """
        if isinstance(loader, DataLoader):
            return self._shard_loader(loader, spec)
        if isinstance(loader, list) and not loader:  # an empty list: Lightning skips validation
            return loader
        if isinstance(loader, RankIterable):
            loader = loader.batches
        return RankIterable(loader, _known(spec), self.place)

    def _shard_loader(self, loader: DataLoader, spec: SequenceSpec | None) -> DataLoader:
        if not any(loader is x for x, _ in self._before):
            names = ("dataset", "collate_fn", "worker_init_fn")
            self._before.append((loader, {name: vars(loader)[name] for name in names}))
        else:
            self._restore(loader)  # an earlier stage used this loader, as in validate after fit
        if isinstance(loader.dataset, (RangeDataset, RaggedDataset)) and not isinstance(
            loader.dataset, IterableDataset
        ):
            set_dataset(loader, RankDataset(loader.dataset, self.place))
        else:
            loader.collate_fn = RankCollate(loader.collate_fn, _known(spec), self.place)
        if int(os.environ.get("PL_SEED_WORKERS", 0)) and loader.worker_init_fn is None:
            # Lightning's seeds differ on every rank, but all ranks of a sequence must augment it in the same way
            loader.worker_init_fn = functools.partial(pl_worker_init_function, rank=self.data_rank)
        loader.worker_init_fn = WorkerWithoutSignals(loader.worker_init_fn)
        return loader

    def _restore(self, loader: DataLoader) -> None:
        for changed, before in self._before:
            if changed is loader:
                vars(loader).update(before)

    def restore(self) -> None:
        """Undo the changes of all loaders, which then yield whole sequences again."""
        for loader, before in self._before:
            vars(loader).update(before)
        self._before.clear()


def _known(spec: SequenceSpec | None) -> SequenceSpec:
    if spec is None:
        raise ValueError(
            "it is not known which entries of a batch are sequences. Set `sequence_spec` on the LightningModule or the "
            'LightningDataModule, such as SequenceSpec({"tokens": 1, "labels": 1}, whole=["index"]), or give the dataset '
            "`seq_len` (or `length_of(index)`) and `read_ranges(index, ranges)`."
        )
    return spec
