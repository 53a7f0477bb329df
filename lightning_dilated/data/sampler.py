"""A sampler and a loader that store their position in an epoch in checkpoints, and continue from this position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import lightning.pytorch as pl
import numpy as np
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_dilated._compat import lightning as compat

_STATE_KEYS = ("epoch", "samples", "seed", "num_samples", "seq_len", "shuffle")
#: text before the content's digest in a data fingerprint; fingerprints of old checkpoints end before this text
MARK = "; content "


class ResumableSampler(DistributedSampler):
    """Yields one rank's sample indices, in an order that depends only on (seed, epoch), from any position of the epoch.

    Rank r of R takes the samples r, r + R, r + 2R, ... of the epoch's order. So after n batches of B on each rank,
    exactly the first n * B * R samples of the order are used, for any R. The class derives from DistributedSampler, so
    that Lightning does not replace it.

    With `classes` the order draws all C classes equally often: from the start of training, each group of C consecutive
    samples has every class once. All samples of a class are drawn before one is repeated, in a new order each time.
    Over epochs, the numbers of draws of two classes, or of two samples of a class, differ by at most one. An epoch has
    the same length as without `classes`, and may contain a sample several times or not at all.

    Args:
        dataset: a dataset with a length; its `seq_len` and `fingerprint()`, if it has them, become part of the saved state.
        num_replicas, rank: R, the number of data-parallel replicas, and this replica's number.
        shuffle: permute the samples in each epoch; False: keep their order.
        seed: the seed of the permutations.
        drop_last: leave out up to R - 1 samples, so that all ranks get the same number; False: the last ranks may get
            one sample fewer. Without `classes` no sample is used twice in an epoch.
        classes: the class of each sample, (samples,) integers, to draw classes equally often; needs `shuffle`. None:
            draw each sample once.

    Raises: ValueError for a rank outside [0, num_replicas), and for `classes` of a wrong length or without `shuffle`.
    """

    #: whether epochs have different numbers of batches
    epochs_differ = False

    def __init__(
        self,
        dataset: Dataset,
        num_replicas: int = 1,
        rank: int = 0,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        classes: Sequence[int] | np.ndarray | None = None,
    ) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
        self._members: list[np.ndarray] | None = None  # the samples of each class
        if classes is not None:
            numbers, size = np.asarray(classes), len(dataset)  # type: ignore[arg-type]
            if numbers.shape != (size,) or not shuffle:
                raise ValueError(
                    f"classes must be one number for each of the {size} samples, and needs shuffle=True; got shape "
                    f"{numbers.shape} and shuffle={shuffle}"
                )
            self._members = [np.flatnonzero(numbers == c) for c in np.unique(numbers)]
        self.consumed = 0  # samples of this epoch that all ranks together have used
        self._positioned = True  # True: the next pass starts at (epoch, consumed), not in the next epoch
        self._resumed = False
        self.on_set_epoch: Callable[[], None] | None = None  # called before Lightning sets the epoch
        self.after_set_epoch: Callable[[], None] | None = None  # called afterwards if `epochs_differ`

    @property
    def balanced(self) -> bool:
        """True if all classes are drawn equally often."""
        return self._members is not None

    def order(self) -> np.ndarray:
        """Return the current epoch's order of all samples, (num_samples,) int64."""
        size = len(self.dataset)  # type: ignore[arg-type]
        if not self.shuffle:
            return np.arange(size)
        if self._members is not None:
            return balanced_order(self._members, self.seed, self.epoch * size, size)
        return np.random.default_rng([self.seed, self.epoch]).permutation(size)

    def __iter__(self) -> Iterator[Any]:
        remaining = self.order()[self.consumed :]
        if self.drop_last:
            remaining = remaining[: len(remaining) // self.num_replicas * self.num_replicas]
        yield from map(int, remaining[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        """Return the number of this rank's samples in a whole epoch, independent of the current position."""
        size = len(self.dataset)  # type: ignore[arg-type]
        return size // self.num_replicas if self.drop_last else len(range(self.rank, size, self.num_replicas))

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; do nothing after `restore`, because then this object counts epochs itself.

        Lightning's counter is wrong after a resume: if `max_steps` stopped an epoch half way, the checkpoint counts the
        epoch as finished.
        """
        if self.on_set_epoch is not None:
            self.on_set_epoch()
        if not self._resumed:
            self.epoch, self.consumed, self._positioned = epoch, 0, True

    def restore(self, epoch: int, consumed: int) -> None:
        """Let the next pass start in `epoch`, after the `consumed` samples that all ranks together have used."""
        self.epoch, self.consumed, self._positioned, self._resumed = epoch, consumed, True, True

    def position_after(self, samples: int, batches: int, batch_size: int) -> int:
        """Return how many of the epoch's samples all ranks will have used after `batches` more batches on each rank."""
        return min(samples + batches * batch_size * self.num_replicas, len(self.dataset))  # type: ignore[arg-type]

    def batches_after(self, samples: int, batch_size: int, drop_last: bool) -> int:
        """Return how many batches this rank still has in an epoch after all ranks have used `samples` samples."""
        remaining, step = len(self.dataset) - samples, batch_size * self.num_replicas  # type: ignore[arg-type]
        return remaining // step if drop_last else -(-remaining // step)

    def batch_identity(self, batch_size: int) -> dict[str, Any]:
        """Return the global batch size for checkpoints; if it changes between runs, batch counts are translated."""
        return {"global_batch_size": batch_size * self.num_replicas}

    def start_pass(self) -> None:
        """Enter the next epoch, unless the position was set or no sample of the current epoch was used."""
        if not self._positioned and self.consumed > 0:
            self.epoch, self.consumed = self.epoch + 1, 0
        self._positioned = False


#: number of rounds for which the class orders are drawn in one call
_ROUNDS = 1024


def balanced_order(members: Sequence[np.ndarray], seed: int, start: int, count: int) -> np.ndarray:
    """Return `count` samples, from index `start` on, of an endless order that draws all C classes equally often.

    Each round of C samples has every class once, in random order. A round takes the next sample of each class; after
    all samples of a class were used, they are shuffled again. The order depends only on `members` and `seed`.

    Args:
        members: the samples of each class; no class may be empty.
        seed: the seed for the orders of classes and of samples.
    """
    places = np.arange(start, start + count)
    rounds, at = np.divmod(places, max(1, len(members)))
    drawn = np.empty(count, np.int64)
    for part in np.unique(rounds // _ROUNDS):
        rng = np.random.default_rng([seed, 1, part])
        turns = rng.permuted(np.tile(np.arange(len(members)), (_ROUNDS, 1)), axis=1)
        in_part = rounds // _ROUNDS == part
        drawn[in_part] = turns[rounds[in_part] % _ROUNDS, at[in_part]]
    order = np.empty(count, np.int64)
    for c, samples in enumerate(members):
        class_places = np.flatnonzero(drawn == c)
        times, number = np.divmod(rounds[class_places], len(samples))
        for time in np.unique(times):
            shuffled = np.random.default_rng([seed, 2, c, time]).permutation(samples)
            order[class_places[times == time]] = shuffled[number[times == time]]
    return order


class ResumableLoader(DataLoader):
    """A DataLoader over a `ResumableSampler` with `state_dict` and `load_state_dict`, which Lightning calls.

    The state counts the samples of all yielded batches on all ranks, without prefetched batches. So it can be loaded
    with a different number of ranks or workers, or batch size. After loading, the first pass yields the rest of the
    epoch; each later pass yields a whole epoch. `len` counts a whole epoch, as Lightning adds finished batches itself.

    Set `trainer` if a Trainer runs the loader. Then a batch that was yielded but not finished (because training_step
    raised an error) is not counted, an epoch cut by `limit_train_batches` counts as complete, and Lightning's batch
    counter is translated if the batch size or the number of ranks has changed.

    If the dataset has `set_epoch(epoch)`, it is called in every process before the first sample of a pass is read. So
    augmentation can be a function of (seed, epoch, index), which a resumed run repeats.

    Args: as in `torch.utils.data.DataLoader`, with a `ResumableSampler` as `sampler`.
    """

    trainer: pl.Trainer | None = None
    _handed_out: tuple[int, int] = (-1, 0)  # before the last yield: (Lightning's finished batches, used samples)
    _loaded_samples: int | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # a generator, which starts later than iter(): Lightning sets the epoch in between, before workers may prefetch
        sampler = self.sampler
        if not isinstance(sampler, ResumableSampler):  # Trainer(overfit_batches=...) sets its own sampler
            yield from super().__iter__()
            return
        sampler.start_pass()
        if hasattr(self.dataset, "set_epoch"):  # before workers copy the dataset
            self.dataset.set_epoch(sampler.epoch)
        for batch in super().__iter__():
            self._handed_out = (self._processed(), sampler.consumed)
            sampler.consumed = self._position_after(sampler.consumed, 1)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position (after a whole epoch, the next epoch's start) and the data's identity as plain values."""
        if not isinstance(self.sampler, ResumableSampler):
            return {}
        epoch, samples = self.sampler.epoch, self.sampler.consumed
        if self._handed_out[0] == self._processed() >= 0:  # Lightning has not finished the last batch
            samples = self._handed_out[1]
        if samples >= self._position_after(0, self._epoch_batches()) or self._batches_after(samples) == 0:
            epoch, samples = epoch + 1, 0
        return {**self._identity(), "epoch": epoch, "samples": samples, **self._batch_identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of `state`.

        A state without a fingerprint, or with a fingerprint of names and sizes only, is accepted with a warning.

        Raises: ValueError if `state` lacks keys, or if seed, number of samples, sequence length or fingerprint differ.
        """
        if not isinstance(self.sampler, ResumableSampler):
            return
        self._check_identity(state)
        if state.get("seq_len_schedule") is not None:
            rank_zero_warn(
                f"the checkpoint was written with data.seq_len_schedule {state['seq_len_schedule']}, which this version "
                "lacks: training continues with sequences of data.seq_len tokens."
            )
        epoch, samples = int(state["epoch"]), int(state["samples"])
        self.sampler.restore(epoch, samples)
        if samples > 0 and self._batches_after(samples) == 0:  # less than a batch of the new size remains
            epoch, samples = epoch + 1, 0
            self.sampler.restore(epoch, samples)
        self._handed_out = (-1, 0)
        size = self._batch_identity()["global_batch_size"]
        if self.sampler.epochs_differ or state.get("global_batch_size", size) != size:
            # translate when Lightning sets the epoch, because it may restore its counters after this call
            self._loaded_samples = samples
            self.sampler.on_set_epoch = self._translate_progress

    def tell_length(self) -> None:
        """Set the Trainer's number of batches at the start of an epoch, if it differs between epochs."""
        if self.trainer is not None:
            whole = getattr(self.trainer.strategy, "takes_whole_steps", False)
            compat.set_epoch_batches(
                self.trainer, self, len(self), self.trainer.accumulate_grad_batches if whole else 1
            )

    def _check_identity(self, state: dict[str, Any]) -> None:
        """Raise ValueError if a state belongs to other data; warn if the state is too old to compare everything."""
        state = {"balanced": False, **state}  # states without this key are older than balanced orders
        missing = [key for key in _STATE_KEYS if key not in state]
        if missing:
            raise ValueError(
                f"the checkpoint's data state lacks {', '.join(missing)}: it was written by other data code"
            )
        identity = self._identity()
        if "fingerprint" not in state and identity["fingerprint"] is not None:
            rank_zero_warn(
                "the checkpoint has no fingerprint of the training data that it was written with: check yourself that it "
                "is the same now, or start a new run from the weights only."
            )
        stored = state.get("fingerprint")
        if not covers_content(stored, identity["fingerprint"]) and same_fingerprint(stored, identity["fingerprint"]):
            rank_zero_warn(
                "the checkpoint's fingerprint of the training data covers names and sizes only: check yourself that "
                "the contents of the files are the same now."
            )
        for key, current in identity.items():
            if not same_fingerprint(state.get(key, current), current):
                raise ValueError(
                    f"the checkpoint was written with {key} = {state[key]} of the training data, but it is {current} now: "
                    "resume with the same data (files with the same names and content), data.seed and data.seq_len, or "
                    "start a new run from the weights only"
                )

    def _identity(self) -> dict[str, Any]:
        sampler, size = cast(ResumableSampler, self.sampler), len(self.dataset)  # type: ignore[arg-type]
        fingerprint = getattr(self.dataset, "fingerprint", None)
        return {
            "seed": sampler.seed,
            "num_samples": size,
            "seq_len": getattr(self.dataset, "seq_len", None),
            "shuffle": sampler.shuffle,
            "balanced": sampler.balanced,
            "fingerprint": fingerprint() if callable(fingerprint) else None,
        }

    def _position_after(self, samples: int, batches: int) -> int:
        """Return how many samples all ranks have used after `samples` samples and `batches` more batches on each rank."""
        return cast(ResumableSampler, self.sampler).position_after(samples, batches, int(self.batch_size or 1))

    def _batches_after(self, samples: int) -> int:
        """Return how many batches this rank still has in an epoch after all ranks have used `samples` samples."""
        sampler = cast(ResumableSampler, self.sampler)
        return sampler.batches_after(samples, int(self.batch_size or 1), self.drop_last)

    def _batch_identity(self) -> dict[str, Any]:
        return cast(ResumableSampler, self.sampler).batch_identity(int(self.batch_size or 1))

    def _processed(self) -> int:
        """Return the number of training batches that Lightning has finished, or -1 without a Trainer."""
        return -1 if self.trainer is None else compat.batches_finished(self.trainer)

    def _epoch_batches(self) -> int:
        """Return the number of this rank's batches in an epoch, limited by the Trainer's `limit_train_batches`."""
        return len(self) if self.trainer is None else int(min(len(self), self.trainer.num_training_batches))

    def _translate_progress(self) -> None:
        """Translate Lightning's count of batches finished in the resumed epoch to the new batch size, only once."""
        samples, self._loaded_samples = self._loaded_samples, None
        if samples is None or self.trainer is None:
            return
        if samples:
            compat.set_batches_finished(self.trainer, len(self) - self._batches_after(samples))
        elif compat.epoch_batches_finished(self.trainer):
            compat.set_batches_finished(self.trainer, self._epoch_batches())


def same_fingerprint(stored: object, current: object) -> bool:
    """Return True if a checkpoint's fingerprint matches the data's; content is compared only if both include it."""
    if isinstance(stored, str) and isinstance(current, str) and (MARK in stored) != (MARK in current):
        return stored.split(MARK)[0] == current.split(MARK)[0]
    return stored == current


def covers_content(stored: object, current: object) -> bool:
    """Return False if the data's fingerprint includes content but the checkpoint's fingerprint does not."""
    return not (isinstance(stored, str) and isinstance(current, str) and MARK in current and MARK not in stored)
