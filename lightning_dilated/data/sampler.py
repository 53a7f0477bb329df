"""A sampler and a loader whose position within an epoch is saved in checkpoints and continued from there.

Why the loader counts epochs itself after a resume: Lightning's own counter can drift then (a checkpoint written after
`max_steps` stopped an epoch half way counts that epoch as done), so its `set_epoch` calls are followed only in runs
that started from the beginning.

A curriculum over the length of sequences: shorter ones first, with as many tokens in every step.

A sample of N tokens is cut into N / n sequences of n tokens, which take N / n rows of the batch. So neither the order of
samples, nor the tokens of a step, nor the position in the data depends on the schedule.

Shape letters: N tokens of a sample (`seq_len`), n tokens of a sequence now, K = N / n sequences of a sample.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

from lightning_dilated._validation import integer
from lightning_dilated.data.files import same_fingerprint, tells_content


class SeqLenSchedule:
    """The length of training sequences by optimizer step.

    Args:
        lengths: {step: n}: from this step on (counted from 0) sequences have n tokens. Step 0 is there; every n divides N,
            and the last one is N.
        seq_len: N, the length of validation and test sequences.

    Raises: TypeError or ValueError for other schedules.
    """

    def __init__(self, lengths: Mapping[int, int], seq_len: int) -> None:
        name = "data.seq_len_schedule"
        if not isinstance(lengths, Mapping):
            raise TypeError(
                f"{name} is {lengths!r}; it must be a mapping from steps to lengths, such as {{0: {seq_len}}}"
            )
        for entry in (*lengths, *lengths.values()):
            integer(entry, f"each step and length of {name}")
        self.steps = sorted(lengths)
        self.lengths = [lengths[step] for step in self.steps]
        if not self.steps or self.steps[0] != 0:
            raise ValueError(
                f"{name} starts at step {self.steps[0] if self.steps else None}; it must say the length from step 0 on"
            )
        wrong = [n for n in self.lengths if n < 1 or seq_len % n]
        if wrong:
            raise ValueError(
                f"{name} has sequences of {wrong[0]:,} tokens, which do not divide data.seq_len = {seq_len:,}: a sample is "
                "cut into equal sequences, so take a length that divides it"
            )
        if self.lengths[-1] != seq_len:
            raise ValueError(
                f"{name} ends with sequences of {self.lengths[-1]:,} tokens, but validation uses data.seq_len = "
                f"{seq_len:,}: end the schedule with that length, or set data.seq_len to the last one"
            )

    def at(self, step: int) -> int:
        """n, the tokens of a sequence in the batches of optimizer step `step` (counted from 0)."""
        return self.lengths[bisect_right(self.steps, step) - 1]

    def state(self) -> dict[int, int]:
        """The mapping, for checkpoints."""
        return dict(zip(self.steps, self.lengths, strict=True))


class ScheduledSequences(Dataset):
    """A dataset of sequences whose samples are cut: sample (i, n) holds sequence i as K sequences of n tokens.

    Args:
        dataset: has `seq_len` N, and `read_ranges(index, ranges)` that gives "tokens" and "labels" of (N,), and "index".
            Where it gives "cu_seqlens", which allows one row only, the sequences of n tokens become documents of that row.
        schedule: for the sampler.

    Everything but the samples is the dataset's own.
    """

    def __init__(self, dataset: Any, schedule: SeqLenSchedule) -> None:
        self.dataset, self.schedule = dataset, schedule
        self._packed = getattr(dataset, "eos_token", None) is not None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int | tuple[int, int]) -> dict[str, Any]:
        """{"tokens": (K, n), "labels": (K, n), "index": (K,)}; a whole number for `index` is one sequence of N tokens."""
        return self.read_ranges(index, (range(self.length_of(index)),))

    def length_of(self, index: int | tuple[int, int]) -> int:
        """Tokens of a row of a sample."""
        return self.dataset.seq_len if self._packed else self._place(index)[1]

    def read_ranges(self, index: int | tuple[int, int], ranges: tuple[range, ...]) -> dict[str, Any]:
        """The sample at some positions of each of its rows only."""
        number, length = self._place(index)
        if self._packed:
            sample = self.dataset.read_ranges(number, ranges)
            walls = torch.arange(0, self.dataset.seq_len + 1, length, dtype=torch.int32)
            return {**sample, "cu_seqlens": torch.unique(torch.cat([sample["cu_seqlens"], walls]))}
        rows = []
        for start in range(0, self.dataset.seq_len, length):
            moved = tuple(range(start + x.start, start + x.stop, x.step) for x in ranges)
            rows.append(self.dataset.read_ranges(number, moved))
        return default_collate(rows)

    def _place(self, index: int | tuple[int, int]) -> tuple[int, int]:
        return index if isinstance(index, tuple) else (index, self.dataset.seq_len)

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "__setstate__"):  # not there yet while being unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


def collate_rows(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch of the rows of all samples: (B K, n), and "index" (B K,)."""
    return {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}


_STATE_KEYS = ("epoch", "samples", "seed", "num_samples", "seq_len", "shuffle")


class ResumableSampler(DistributedSampler):
    """Sample indices of one rank, in an order fixed by (seed, epoch) alone, from any position of the epoch on.

    Of the epoch's order, rank r of R takes places r, r + R, r + 2R, ...; so after n batches of B on each rank exactly
    the first n * B * R samples of the order are used, whatever R is. It subclasses DistributedSampler so that
    Lightning does not replace it.

    Args:
        dataset: a dataset with a length; its `seq_len` and `fingerprint()`, if it has them, become part of the saved state.
        num_replicas, rank: number of data-parallel replicas and this one's number.
        shuffle: permute the samples anew in each epoch; otherwise they come in order.
        seed: the seed of the permutations.
        drop_last: leave out up to R - 1 samples so that all ranks get equally many; otherwise the last ranks may get
            one fewer. No sample is ever served twice.

    Raises: ValueError for a rank outside [0, num_replicas).
    """

    def __init__(
        self,
        dataset: Dataset,
        num_replicas: int = 1,
        rank: int = 0,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
        self.consumed = 0  # samples of this epoch used up, over all ranks
        self._positioned = True  # the next pass starts at (epoch, consumed) and not at the next epoch
        self._resumed = False
        self.on_set_epoch: Callable[[], None] | None = None  # called first, each time Lightning sets the epoch
        #: the length of the n-th sample of the next pass, where lengths follow a schedule
        self.length_of: Callable[[int], int] | None = None

    def order(self) -> np.ndarray:
        """The current epoch's order of all samples: (num_samples,) int64."""
        size = len(self.dataset)  # type: ignore[arg-type]
        if not self.shuffle:
            return np.arange(size)
        return np.random.default_rng([self.seed, self.epoch]).permutation(size)

    def __iter__(self) -> Iterator[Any]:
        """Indices; with `length_of`, (index, length)."""
        rest = self.order()[self.consumed :]
        if self.drop_last:
            rest = rest[: len(rest) // self.num_replicas * self.num_replicas]
        for place, index in enumerate(rest[self.rank :: self.num_replicas]):
            yield int(index) if self.length_of is None else (int(index), self.length_of(place))

    def __len__(self) -> int:
        """Samples of this rank in a whole epoch, wherever the current position is."""
        size = len(self.dataset)  # type: ignore[arg-type]
        return size // self.num_replicas if self.drop_last else len(range(self.rank, size, self.num_replicas))

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; without effect after `restore`, from where epochs are counted here."""
        if self.on_set_epoch is not None:
            self.on_set_epoch()
        if not self._resumed:
            self.epoch, self.consumed, self._positioned = epoch, 0, True

    def restore(self, epoch: int, consumed: int) -> None:
        """Let the next pass start in `epoch` after `consumed` of its samples (counted over all ranks)."""
        self.epoch, self.consumed, self._positioned, self._resumed = epoch, consumed, True, True

    def start_pass(self) -> None:
        """Enter the next epoch, unless the position was set since the last pass or nothing was used since."""
        if not self._positioned and self.consumed > 0:
            self.epoch, self.consumed = self.epoch + 1, 0
        self._positioned = False


class ResumableLoader(DataLoader):
    """A DataLoader over a `ResumableSampler` with `state_dict` and `load_state_dict`, which Lightning calls.

    The state counts batches handed out (not those that workers prefetched), in samples over all ranks, so it may be
    loaded with another number of ranks, workers or another batch size. After loading, the first pass gives the rest
    of the epoch; each later pass gives the whole next epoch. `len` is always that of a whole epoch, as Lightning adds
    its own count of finished batches.

    Set `trainer` where a Trainer drives the loader: then a batch that was handed out but not finished (an exception
    in training_step) is not counted, an epoch cut by `limit_train_batches` counts as complete, and Lightning's batch
    counter is translated if the batch size or the number of ranks changed.

    A dataset that has `set_epoch(epoch)` is told the epoch of each pass before its first sample is read, in whichever
    process: augmentation can then be a function of (seed, epoch, index), which a resumed run repeats.

    A dataset that has a `schedule` (`ScheduledSequences`) is asked for samples of the length of the optimizer step that
    they are for, also ahead of it, by workers. Without a Trainer each batch counts as a step of its own.
    """

    trainer: pl.Trainer | None = None
    _handed_out: tuple[int, int] = (-1, 0)  # when the last batch was: batches Lightning had finished, samples used
    _loaded_samples: int | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # a generator, as Lightning calls iter() before it sets the epoch: workers must not prefetch until the first
        # batch is asked for
        sampler = self.sampler
        if not isinstance(sampler, ResumableSampler):  # Trainer(overfit_batches=...) puts its own sampler here
            yield from super().__iter__()
            return
        sampler.start_pass()
        if hasattr(self.dataset, "set_epoch"):  # before workers copy it
            self.dataset.set_epoch(sampler.epoch)
        if self._schedule is not None:
            sampler.length_of = partial(self._schedule_at, self._schedule, *self._progress())
        for batch in super().__iter__():
            self._handed_out = (self._processed(), sampler.consumed)
            sampler.consumed = min(sampler.consumed + self._step(), len(self.dataset))  # type: ignore[arg-type]
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Position and identity of the data as plain values; an epoch that is used up gives the next one's start."""
        if not isinstance(self.sampler, ResumableSampler):
            return {}
        epoch, samples = self.sampler.epoch, self.sampler.consumed
        if self._handed_out[0] == self._processed() >= 0:  # the last batch was not finished
            samples = self._handed_out[1]
        if samples >= self._epoch_batches() * self._step() or self._batches_after(samples) == 0:
            epoch, samples = epoch + 1, 0
        schedule = {} if self._schedule is None else {"seq_len_schedule": self._schedule.state()}
        return {**self._identity(), **schedule, "epoch": epoch, "samples": samples, "global_batch_size": self._step()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises: ValueError if it lacks keys or was taken with another seed, number of samples, sequence length or
            fingerprint of the data. A state that has no fingerprint yet, or one that tells nothing of content, is taken with
            a warning.
        """
        if not isinstance(self.sampler, ResumableSampler):
            return
        missing = [key for key in _STATE_KEYS if key not in state]
        if missing:
            raise ValueError(
                f"the checkpoint's data state lacks {', '.join(missing)}: it was written by other data code"
            )
        identity = self._identity()
        if "fingerprint" not in state and identity["fingerprint"] is not None:
            rank_zero_warn(
                "the checkpoint does not tell by a fingerprint which training data it was written with: see yourself that "
                "it is the same now, or start a new run from the weights only."
            )
        stored = state.get("fingerprint")
        if not tells_content(stored, identity["fingerprint"]) and same_fingerprint(stored, identity["fingerprint"]):
            rank_zero_warn(
                "the checkpoint's fingerprint of the training data tells of names and sizes only: see yourself that files "
                "of equal names and sizes hold what they did."
            )
        for key, here in identity.items():
            if not same_fingerprint(state.get(key, here), here):
                raise ValueError(
                    f"the checkpoint was written with {key} = {state[key]} of the training data, but it is {here} now: "
                    "resume with the same data (of files, their names and content count), data.seed and data.seq_len, or "
                    "start a new run from the weights only"
                )
        before, now = state.get("seq_len_schedule"), None if self._schedule is None else self._schedule.state()
        if before != now:
            rank_zero_warn(
                f"the checkpoint was written with data.seq_len_schedule {before}; training goes on with {now}."
            )
        epoch, samples = int(state["epoch"]), int(state["samples"])
        if samples > 0 and self._batches_after(samples) == 0:  # the rest is less than one batch of the new size
            epoch, samples = epoch + 1, 0
        self.sampler.restore(epoch, samples)
        self._handed_out = (-1, 0)
        if state.get("global_batch_size", self._step()) != self._step():
            # not now: Lightning may restore its counters later, but always before it sets the epoch
            self._loaded_samples = samples
            self.sampler.on_set_epoch = self._translate_progress

    def _identity(self) -> dict[str, Any]:
        sampler, size = cast(ResumableSampler, self.sampler), len(self.dataset)  # type: ignore[arg-type]
        fingerprint = getattr(self.dataset, "fingerprint", None)
        return {
            "seed": sampler.seed,
            "num_samples": size,
            "seq_len": getattr(self.dataset, "seq_len", None),
            "shuffle": sampler.shuffle,
            "fingerprint": fingerprint() if callable(fingerprint) else None,
        }

    @property
    def _schedule(self) -> SeqLenSchedule | None:
        schedule = getattr(self.dataset, "schedule", None)
        return schedule if isinstance(schedule, SeqLenSchedule) else None  # a user's dataset may mean something else

    def _progress(self) -> tuple[int, int, int]:
        """(optimizer steps so far, batches of this epoch so far, batches of a step), where a pass begins."""
        if self.trainer is None:
            return 0, 0, 1
        module = self.trainer.lightning_module
        if not module.automatic_optimization:
            raise ValueError(
                f"data.seq_len_schedule counts optimizer steps, which {type(module).__name__} takes by itself "
                "(automatic_optimization = False): leave the schedule out"
            )
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        return self.trainer.global_step, progress.ready, self.trainer.accumulate_grad_batches

    def _schedule_at(self, schedule: SeqLenSchedule, steps: int, batches: int, every: int, place: int) -> int:
        """The length of this rank's sample at `place` of a pass: all samples of a step have the same."""
        batch = batches + place // int(self.batch_size or 1)
        return schedule.at(steps + batch // every - batches // every)

    def _step(self) -> int:
        """Samples in one batch of all ranks."""
        return int(self.batch_size or 1) * cast(ResumableSampler, self.sampler).num_replicas

    def _batches_after(self, samples: int) -> int:
        """Batches of this rank in the rest of an epoch of which `samples` are used up."""
        rest = len(self.dataset) - samples  # type: ignore[arg-type]
        return rest // self._step() if self.drop_last else -(-rest // self._step())

    def _processed(self) -> int:
        """Training batches that Lightning finished in all, or -1 without a Trainer."""
        if self.trainer is None:
            return -1
        total: Any = self.trainer.fit_loop.epoch_loop.batch_progress.total  # declared as a class that counts less
        return total.processed

    def _epoch_batches(self) -> int:
        """Batches that an epoch gives this rank, where Trainer(limit_train_batches=...) counts."""
        return len(self) if self.trainer is None else int(min(len(self), self.trainer.num_training_batches))

    def _translate_progress(self) -> None:
        """Put Lightning's count of the resumed epoch's finished batches into batches of the present size, once."""
        samples, self._loaded_samples = self._loaded_samples, None
        if samples is None or self.trainer is None:
            return
        current: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current  # as in `_processed`
        if current.processed == 0 and samples == 0:
            return
        done = len(self) - self._batches_after(samples) if samples else self._epoch_batches()
        shift = done - current.processed
        current.ready += shift
        current.started += shift
        current.processed += shift
        current.completed += shift
