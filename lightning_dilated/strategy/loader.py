"""Sharding along the data loader: each worker yields this rank's tokens only, in the loader's own order.

Datasets that can read ranges (`read_ranges`) read nothing else; samples of others are cut when a batch was collated, still
in the worker, before it is pinned and copied.
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
from lightning_dilated.strategy.preemption import IgnoresSignals


def keep_order(trainer: pl.Trainer) -> None:
    """Have the samplers that Lightning puts into training loaders shuffle only where the loader did.

    With several processes Lightning passes shuffle=True for every training loader, also for one that was made with
    shuffle=False or with a sampler of its own.
    """
    replace_sampler_choice(trainer, lambda choose: functools.partial(_choose, choose))


def _choose(choose: Callable[..., Any], dataloader: DataLoader, shuffle: bool, mode: RunningStage | None = None) -> Any:
    wanted = shuffles(dataloader) if mode == RunningStage.TRAINING else shuffle
    return choose(dataloader, shuffle=wanted, mode=mode)


def shuffles(dataloader: DataLoader) -> bool:
    """Whether a loader was made with shuffle=True, or an equal sampler.

    Samplers of other kinds have an order of their own, which is kept. A batch sampler without a `sampler` may have any
    order: it counts as shuffling.
    """
    if dataloader.batch_sampler is None:
        return isinstance(dataloader.sampler, RandomSampler)
    return isinstance(getattr(dataloader.batch_sampler, "sampler", RandomSampler([0])), RandomSampler)


@runtime_checkable
class RangeDataset(Protocol):
    """A map-style dataset of sequences of `seq_len` tokens that can read some positions of one."""

    seq_len: int

    def read_ranges(self, index: int, ranges: tuple[range, ...]) -> Any:
        """Sample `index` with its sequences at these positions only, in this order; labels already shifted."""
        ...


@runtime_checkable
class RaggedDataset(Protocol):
    """A map-style dataset of sequences of unequal lengths that can read some positions of one.

    A rank requests positions of the longest sample of its batch: beyond a sample's own length they are padding, which
    `read_ranges` fills in. So the samples of a batch are equally long on a rank.
    """

    def length_of(self, index: int) -> int:
        """Tokens of sample `index`, without reading it."""
        ...

    def read_ranges(self, index: int, ranges: tuple[range, ...]) -> Any:
        """As that of `RangeDataset`."""
        ...


class RankDataset(Dataset):
    """A RangeDataset or RaggedDataset as one rank sees it. Everything but the samples is the dataset's own."""

    def __init__(self, dataset: RangeDataset | RaggedDataset, place: Place) -> None:
        self.dataset, self.place = dataset, place

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """The samples of a batch, which torch's loaders ask for at once where a dataset offers that."""
        if isinstance(self.dataset, RaggedDataset):
            seq_len = max(self.dataset.length_of(index) for index in indices)
        else:
            seq_len = self.dataset.seq_len
        ranges = self.place.ranges(seq_len)
        return [sendable(self.dataset.read_ranges(index, ranges)) for index in indices]

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "__setstate__"):  # not there yet while being unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


class RankCollate:
    """A collate function, and then the cut to one rank."""

    def __init__(self, collate: Callable[[Any], Any], spec: SequenceSpec, place: Place) -> None:
        self.collate, self.spec, self.place = collate, spec, place

    def __call__(self, samples: Any) -> Any:
        return sendable(self.spec.cut(self.collate(detached(samples)), self.place))


class RankIterable:
    """Any other iterable of batches, cut as they come."""

    def __init__(self, batches: Any, spec: SequenceSpec, place: Place) -> None:
        self.batches, self.spec, self.place = batches, spec, place

    def __iter__(self) -> Iterator[Any]:
        return (self.spec.cut(batch, self.place) for batch in self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Loaders:
    """Shards the loaders of a run, and restores them at its end."""

    def __init__(self, place: Place, data_rank: int) -> None:
        self.place, self.data_rank = place, data_rank
        self._before: list[tuple[DataLoader, dict[str, Any]]] = []

    def shard(self, loader: Any, spec: SequenceSpec | None) -> Any:
        """The loader (the same object, for a DataLoader), which now yields this rank's part.

        Raises:
            ValueError: if it is not known which entries are sequences.
        """
        if isinstance(loader, DataLoader):
            return self._shard_loader(loader, spec)
        if isinstance(loader, list) and not loader:  # no loader: Lightning's way to leave out validation
            return loader
        if isinstance(loader, RankIterable):
            loader = loader.batches
        return RankIterable(loader, _known(spec), self.place)

    def _shard_loader(self, loader: DataLoader, spec: SequenceSpec | None) -> DataLoader:
        if not any(loader is x for x, _ in self._before):
            names = ("dataset", "collate_fn", "worker_init_fn")
            self._before.append((loader, {name: vars(loader)[name] for name in names}))
        else:
            self._restore(loader)  # the same loader again, in fit and then in validate
        if isinstance(loader.dataset, (RangeDataset, RaggedDataset)) and not isinstance(
            loader.dataset, IterableDataset
        ):
            set_dataset(loader, RankDataset(loader.dataset, self.place))
        else:
            loader.collate_fn = RankCollate(loader.collate_fn, _known(spec), self.place)
        if int(os.environ.get("PL_SEED_WORKERS", 0)) and loader.worker_init_fn is None:
            # Lightning would seed by the global rank: one sequence's ranks would then augment it differently
            loader.worker_init_fn = functools.partial(pl_worker_init_function, rank=self.data_rank)
        loader.worker_init_fn = IgnoresSignals(loader.worker_init_fn)
        return loader

    def _restore(self, loader: DataLoader) -> None:
        for changed, before in self._before:
            if changed is loader:
                vars(loader).update(before)

    def restore(self) -> None:
        """Undo everything: outside of the strategy a loader yields whole sequences again."""
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
