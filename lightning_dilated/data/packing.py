"""Packing of samples with different lengths into rows of up to `budget` tokens: a sampler of packs, and their dataset.

A pack is a tuple of sample numbers. Packs are filled in the order of the epoch: each sample is added to the current pack if
the pack stays within the budget; otherwise it starts a new pack.

Shape letters: N tokens of a pack, D samples of a pack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from lightning_dilated.data.sampler import ResumableSampler

#: entries of this package's samples that have one value for each token
ALONG = ("tokens", "labels", "features", "coords")
#: losses ignore labels with this value
IGNORE = -100


def pack_bounds(lengths: np.ndarray, budget: int, start: int = 0) -> np.ndarray:
    """Return bounds (P + 1,) int64 of P packs: pack p has samples bounds[p] to bounds[p + 1] - 1 of the epoch's order.

    Args:
        lengths: number of tokens of each sample, in the epoch's order; a sample above the budget is a pack of its own.
        budget: maximum number of tokens in a pack.
    """
    ends, bounds = np.cumsum(lengths, dtype=np.int64), [start]
    while bounds[-1] < len(lengths):
        at = bounds[-1]
        tokens_before = int(ends[at - 1]) if at else 0
        bounds.append(max(at + 1, int(np.searchsorted(ends, tokens_before + budget, side="right"))))
    return np.array(bounds, dtype=np.int64)


class PackedSamples(Dataset):
    """A dataset that is indexed by packs: an item is one row of D samples with their bounds `cu_seqlens` (D + 1,).

    It has the length and the other attributes of `dataset`. An index that is a number means a pack of one sample.

    Args:
        dataset: has `length_of(index)` or `lengths`, and has `read_ranges(index, ranges)`, which returns a mapping.
        budget: maximum number of tokens in a pack.
        along: names of entries with a value for each token; other entries have one value for each sample.
    """

    def __init__(self, dataset: Any, budget: int, along: Sequence[str] = ALONG) -> None:
        self.dataset, self.budget, self.along = dataset, budget, tuple(along)
        self._lengths: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each sample, (samples,) int64; no sample is read."""
        if self._lengths is None:
            known = getattr(self.dataset, "lengths", None)
            each = known if known is not None else [self.dataset.length_of(i) for i in range(len(self.dataset))]
            self._lengths = np.asarray(each, dtype=np.int64)
        return self._lengths

    def length_of(self, pack: int | tuple[int, ...]) -> int:
        """Return N, the number of tokens of a pack."""
        return int(self.lengths[list(_members(pack))].sum())

    def __getitem__(self, pack: int | tuple[int, ...]) -> dict[str, Any]:
        return self.read_ranges(pack, (range(self.length_of(pack)),))

    def read_ranges(self, pack: int | tuple[int, ...], ranges: tuple[range, ...]) -> dict[str, Any]:
        """Return a pack's row at the positions in `ranges`; only these positions of each sample are read.

        Entries with one value for each token are tensors (N, ...); other entries are lists of D values.
        """
        members = _members(pack)
        bounds = np.concatenate([[0], np.cumsum(self.lengths[list(members)])])
        along: dict[str, list[torch.Tensor]] = {}
        whole: list[dict[str, Any] | None] = [None] * len(members)
        for x in ranges:
            for i, inside in _by_sample(x, bounds):
                whole[i] = self._read(members[i], (inside,), along)
        for i, number in enumerate(members):  # samples that have no requested position
            if whole[i] is None:
                whole[i] = self._read(number, (), along)
        row: dict[str, Any] = {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in along.items()}
        row |= {name: [sample[name] for sample in whole] for name in whole[0]}  # type: ignore[index, union-attr]
        return {**row, "cu_seqlens": torch.from_numpy(bounds.astype(np.int32))}

    def _read(self, number: int, ranges: tuple[range, ...], along: dict[str, list[torch.Tensor]]) -> dict[str, Any]:
        """Read a sample, append its entries with a value for each token to `along`, and return its other entries."""
        sample = self.dataset.read_ranges(number, ranges)
        for name in self.along:
            if name in sample:
                along.setdefault(name, []).append(sample[name])
        return {name: value for name, value in sample.items() if name not in (*self.along, "length")}

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "__setstate__"):  # not set yet during unpickling
            raise AttributeError(name)
        return getattr(self.dataset, name)


def _members(pack: int | tuple[int, ...]) -> tuple[int, ...]:
    return pack if isinstance(pack, tuple) else (pack,)


def _by_sample(x: range, bounds: np.ndarray) -> Iterator[tuple[int, range]]:
    """For each sample with positions in x, in order, yield its index in the pack and these positions in the sample."""
    at = x.start
    while at < x.stop:
        i = int(np.searchsorted(bounds, at, side="right")) - 1
        inside = range(at, min(x.stop, int(bounds[i + 1])), x.step)
        yield i, range(inside.start - int(bounds[i]), inside.stop - int(bounds[i]), x.step)
        at += len(inside) * x.step


def collate_pack(packs: list[dict[str, Any]]) -> dict[str, Any]:
    """Make a batch of one pack: `cu_seqlens` (D + 1,), token entries (1, N, ...) and other entries (D,) or lists."""
    (pack,) = packs
    batch: dict[str, Any] = {"cu_seqlens": pack["cu_seqlens"]}
    for name, value in pack.items():
        if isinstance(value, list):
            batch[name] = value if isinstance(value[0], str) else _numbers(name, value)
        elif name != "cu_seqlens":
            batch[name] = value[None]
    return batch


def _numbers(name: str, values: list[Any]) -> torch.Tensor:
    if all(isinstance(x, torch.Tensor) for x in values):
        shapes = sorted({tuple(x.shape) for x in values})
        if len(shapes) > 1:
            raise ValueError(
                f"the samples of a pack have {name!r} of the shapes {shapes}. If it has a value for each token, name "
                f"it in the DataModule's `along`: along = (*SplitDataModule.along, {name!r}). If it has one value for "
                "each sample, give all values the same shape."
            )
        return torch.stack(values)
    whole = all(isinstance(x, int | np.integer) for x in values)
    return torch.tensor(values, dtype=torch.int64 if whole else torch.float32)


class PackingSampler(ResumableSampler):
    """Yields one rank's packs, in an order that depends only on (seed, epoch), from any position of the epoch.

    The packs of an epoch are the same on any number of ranks: rank r of R takes packs r, r + R, r + 2R, ... So after n
    batches on each rank, exactly the samples of the first n R packs are used. The number of packs differs between
    epochs, because the order differs. `len` counts this rank's packs of the current epoch; between epochs, of the next.

    Args:
        dataset: `PackedSamples`.
        num_replicas, rank, shuffle, seed: see `ResumableSampler`.
        drop_last: leave out up to R - 1 packs, so that all ranks get the same number.
    """

    dataset: PackedSamples
    epochs_differ = True

    def __init__(self, dataset: PackedSamples, *args: Any, **options: Any) -> None:
        super().__init__(dataset, *args, **options)
        self._known: dict[tuple[int, int], np.ndarray] = {}

    def bounds(self, start: int = 0) -> np.ndarray:
        """Return the bounds (P + 1,) of the packs in the current epoch's order from the sample `start` on."""
        for (epoch, first), known in self._known.items():
            if epoch == self.epoch and first <= start:
                at = int(np.searchsorted(known, start))
                if at < len(known) and known[at] == start:  # equal starts give equal packs
                    return known[at:]
        if any(epoch != self.epoch for epoch, _ in self._known):
            self._known.clear()
        bounds = pack_bounds(self.dataset.lengths[self.order()], self.dataset.budget, start)
        self._known[self.epoch, start] = bounds
        return bounds

    def packs(self, start: int = 0) -> int:
        """Return the number of all ranks' packs from index `start` of the current epoch's order to the epoch's end."""
        count = len(self.bounds(start)) - 1
        return count // self.num_replicas * self.num_replicas if self.drop_last else count

    def __iter__(self) -> Iterator[Any]:
        order, bounds = self.order(), self.bounds(self.consumed)
        for i in range(self.rank, self.packs(self.consumed), self.num_replicas):
            yield tuple(order[bounds[i] : bounds[i + 1]].tolist())

    def __len__(self) -> int:
        """Return the number of this rank's packs in the whole epoch, independent of the current position."""
        return len(range(self.rank, self.packs(), self.num_replicas))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch as in `ResumableSampler`; after a resumed epoch enter the next one, so that `len` counts it."""
        super().set_epoch(epoch)
        if self._resumed and not self._positioned and self.consumed > 0:
            self.restore(self.epoch + 1, 0)
        if self.after_set_epoch is not None:
            self.after_set_epoch()

    def position_after(self, samples: int, batches: int, batch_size: int) -> int:
        bounds = self.bounds(samples)
        return int(bounds[min(batches * self.num_replicas, len(bounds) - 1)])

    def batches_after(self, samples: int, batch_size: int, drop_last: bool) -> int:
        packs = len(self.bounds(samples)) - 1
        return packs // self.num_replicas if drop_last else -(-packs // self.num_replicas)

    def batch_identity(self, batch_size: int) -> dict[str, Any]:
        return {"global_batch_size": 0, "pack_tokens": self.dataset.budget, "pack_ranks": self.num_replicas}
