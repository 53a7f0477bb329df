"""What the DataModules share: splits, loaders that resume exactly, and batches that a worker can send.

Shape letters: B batch, N tokens of a sequence (`seq_len`).
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Mapping, Sized
from typing import Any, Self

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from lightning_dilated._compat.lightning import restricted_classmethod
from lightning_dilated._removed import removed
from lightning_dilated._validation import check_input, flag, integer, real
from lightning_dilated.data.opener import Opener
from lightning_dilated.data.packing import ALONG, PackedSamples, PackingSampler, collate_pack
from lightning_dilated.data.sampler import ResumableLoader, ResumableSampler

SPLITS = ("train", "val", "test")
#: default share of validation, and of test
SHARE = 0.05


class SplitDataModule(pl.LightningDataModule):
    """Base of the DataModules; a subclass defines `check`, `dataset` and `wanted`.

    Training order depends on `seed` and the epoch alone and is continued exactly from a checkpoint; validation and test
    come in the dataset's order. No sample is served twice in an epoch, unless training draws classes equally often
    (`balanced_classes`).

    Args:
        batch_size: B, samples of a batch on each device.
        seed: fixes the training order.
        num_workers: processes that load batches; 0 loads in the main process.
        pin_memory: copy batches to page-locked memory, so that copies to a GPU are asynchronous; null: if there is a GPU.
        pack_tokens: the most tokens of a batch on each device: samples are filled into one row up to here, in the order of
            the epoch, with `cu_seqlens` (D + 1,) int32 on the CPU where they begin and end, in place of `batch_size` padded
            rows; null does not pack. A sample with more tokens is a batch by itself. Entries with a value a sample are (D,).

    Raises: TypeError or ValueError for values outside these ranges.
    """

    #: makes a batch of samples; None is torch's default
    collate: Callable[[list[Any]], Any] | None = None
    #: entries of a sample that run over its tokens, which packs join; of the others a pack has a value a sample
    along: tuple[str, ...] = ALONG
    #: whether training samples come in an order of their own in each epoch, or as they lie
    shuffles = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Name what does the work of an argument that was taken out."""
        for said in filter(None, map(removed, kwargs)):
            raise TypeError(said)
        return super().__new__(cls)

    @restricted_classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Lightning's, but no parser reads the file's hyperparameters: the constructor takes them as they are.

        Raises: ValueError for a fifo or device, and for an address that `check_address` refuses.
        """
        check_input(checkpoint_path)
        return super().load_from_checkpoint(checkpoint_path, *args, **{**kwargs, "_instantiator": None})

    def __init__(
        self,
        batch_size: int = 1,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        pack_tokens: int | None = None,
    ) -> None:
        super().__init__()
        self.batch_size = integer(batch_size, "data.batch_size", 1)
        self.pack_tokens = None if pack_tokens is None else integer(pack_tokens, "data.pack_tokens", 1)
        if pack_tokens is not None and batch_size != 1:
            raise ValueError(
                f"data.batch_size is {batch_size}, but with data.pack_tokens = {pack_tokens} a batch is one row of as many "
                "samples as fit: leave data.batch_size at 1, or leave data.pack_tokens out"
            )
        self.seed = integer(seed, "data.seed", 0)
        self.num_workers = integer(num_workers, "data.num_workers", 0)
        self.pin_memory = None if pin_memory is None else flag(pin_memory, "data.pin_memory")
        # no sample is served twice, so a rank may have none of a short validation split
        self.allow_zero_length_dataloader_with_multiple_devices = True
        #: opens the files, by path or URL
        self.opener = Opener()
        self._train_loader: ResumableLoader | None = None
        self._resume_state: dict[str, Any] | None = None

    # -- what a subclass defines ----------------------------------------------------------------------------------------
    def check(self) -> None:
        """Look at the data on disk, once; raise OSError or ValueError with what is wrong and what to change."""
        raise TypeError(f"{type(self).__name__} must define check(), which looks at its files.")

    def dataset(self, split: str) -> Dataset:
        """The samples of "train", "val" or "test". Raises ValueError for another name."""
        raise TypeError(f"{type(self).__name__} must define dataset(split).")

    def wanted(self, split: str) -> str | None:
        """None if a split was requested, else the setting that left it out."""
        return None

    def balanced_classes(self) -> list[int] | None:
        """The class of each training sample, to draw all classes equally often; None draws each sample once an epoch."""
        return None

    def per_rank(self, replicas: int) -> int:
        """Samples of a batch on each of so many data-parallel ranks."""
        return self.batch_size

    def too_few(self, count: int, needed: int, replicas: int) -> str:
        """The error where a batch needs more training samples than there are."""
        return (
            f"the train split has {count} samples, but one batch takes {needed} (data.batch_size = {self.batch_size} on "
            f"{replicas} data-parallel ranks): lower data.batch_size, use fewer ranks, or pass more data"
        )

    # -- what Lightning calls ------------------------------------------------------------------------------------------
    def setup(self, stage: str | None = None) -> None:
        """Called by the Trainer before each run: checks the data and forgets an earlier run's position."""
        self.check()
        self.opener.check_workers(self.num_workers)
        if stage == "fit":
            self._check_trains()
        if stage in (None, "fit"):
            self._resume_state = None
            self._train_loader = None

    def train_dataloader(self) -> ResumableLoader:
        """Whole batches in the epoch's order, this rank's share; raises ValueError if there are too few samples."""
        self._check_trains()
        rank, replicas = self._replica()
        order = {"shuffle": self.shuffles, "seed": self.seed, "drop_last": True, "classes": self.balanced_classes()}
        dataset, sampler = self._sampled(self.dataset("train"), rank, replicas, **order)
        self.check_batch(len(dataset), replicas)  # type: ignore[arg-type]  # torch's Dataset declares no length
        loader = ResumableLoader(dataset, sampler=sampler, drop_last=True, **self._loading(replicas))
        loader.trainer = self.trainer
        if isinstance(sampler, PackingSampler):
            self._check_packs(sampler)
            sampler.after_set_epoch = loader.tell_length
        # Lightning itself restores loaders only in some resumed runs: not if the checkpoint ends an epoch, nor if
        # configure_optimizers asked for trainer.estimated_stepping_batches
        if self._resume_state is not None:
            loader.load_state_dict(self._resume_state)
            self._resume_state = None
        self._train_loader = loader
        return loader

    def val_dataloader(self) -> DataLoader | list[DataLoader]:
        """The validation split in order; an empty list where there is none."""
        return self._eval_loader("val")

    def test_dataloader(self) -> DataLoader | list[DataLoader]:
        """The test split in order; an empty list where there is none."""
        return self._eval_loader("test")

    def predict_dataloader(self) -> DataLoader | list[DataLoader]:
        """The samples of `predict_dataset` in order; an empty list where there is no test split."""
        return self._eval_loader("test", self.predict_dataset)

    def predict_dataset(self) -> Dataset:
        """What `predict` runs on: the test split."""
        return self.dataset("test")

    def state_dict(self) -> dict[str, Any]:
        """The training position, for checkpoints; empty before training."""
        return {} if self._train_loader is None else {"train": self._train_loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a checkpoint's training position for the next `train_dataloader`; of no effect outside fit."""
        state = state_dict.get("train")
        if self.trainer is None:
            self._resume_state = state
        elif self.trainer.state.fn == TrainerFn.FITTING:
            # a module may ask for the loader in configure_optimizers, before some strategies restore the data state
            if state is not None and self._train_loader is not None:
                self._train_loader.load_state_dict(state)
            else:
                self._resume_state = state

    def check_batch(self, count: int, replicas: int) -> None:
        """Raise ValueError where `count` training samples do not make one batch for every replica."""
        needed = self.per_rank(replicas) * replicas
        if count < needed:
            raise ValueError(self.too_few(count, needed, replicas))

    def _loading(self, replicas: int) -> dict[str, Any]:
        """Arguments of every loader."""
        collate = SendableCollate(self.collate if self.pack_tokens is None else collate_pack)
        options = {"num_workers": self.num_workers, "pin_memory": self._pins()}
        return {"batch_size": self.per_rank(replicas), "collate_fn": collate, **options}

    def _check_trains(self) -> None:
        """Raise ValueError where the settings leave no training data."""
        missing = self.wanted("train")
        if missing is not None:
            raise ValueError(f"there is no train split to fit on: {missing}")

    def _sampled(self, dataset: Dataset, rank: int, replicas: int, **order: Any) -> tuple[Dataset, ResumableSampler]:
        """The samples, or packs of them, and this rank's order."""
        if self.pack_tokens is None:
            return dataset, ResumableSampler(dataset, replicas, rank, **order)
        packed = PackedSamples(dataset, self.pack_tokens, self.along)
        return packed, PackingSampler(packed, replicas, rank, **order)

    def _check_packs(self, sampler: PackingSampler) -> None:
        """Raise ValueError where training samples make fewer packs than replicas; one line for samples too long to pack."""
        lengths, replicas = sampler.dataset.lengths, sampler.num_replicas
        if len(sampler) == 0:
            raise ValueError(
                f"the train split has {len(lengths)} samples of {int(lengths.sum()):,} tokens, which data.pack_tokens = "
                f"{self.pack_tokens} packs into fewer batches than there are data-parallel ranks ({replicas}): lower "
                "data.pack_tokens, use fewer ranks, or pass more data"
            )
        longer = int((lengths > sampler.dataset.budget).sum())
        if longer:
            rank_zero_info(
                f"data: {longer:,} of {len(lengths):,} training samples have more than data.pack_tokens = "
                f"{self.pack_tokens:,} tokens, up to {int(lengths.max()):,}: each is a batch by itself"
            )

    def _replica(self) -> tuple[int, int]:
        """This process's data-parallel rank and the number of ranks."""
        options = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        return (0, 1) if not options else (options["rank"], options["num_replicas"])

    def _pins(self) -> bool:
        if self.pin_memory is not None or self.trainer is None:
            return bool(self.pin_memory)
        return self.trainer.strategy.root_device.type == "cuda"

    def _eval_loader(self, split: str, make: Callable[[], Dataset] | None = None) -> DataLoader | list[DataLoader]:
        """A split in order, or what `make` gives in its place."""
        missing = self.wanted(split)
        if missing is not None:
            if self.trainer is not None and self.trainer.state.fn not in (None, TrainerFn.FITTING):
                raise ValueError(f"there is no {split} split to run on: {missing}")
            # Lightning asks whether this was intended: the settings say so
            warnings.filterwarnings("ignore", message="Total length of `list` across ranks is zero")
            return []
        rank, replicas = self._replica()
        samples = self.dataset(split) if make is None else make()
        dataset, sampler = self._sampled(samples, rank, replicas, shuffle=False)
        return DataLoader(dataset, sampler=sampler, **self._loading(replicas))


class SequenceDataModule(SplitDataModule):
    """Base of the DataModules that cut a long stream into sequences of N tokens.

    Args:
        seq_len: N, tokens of a sequence.
        val_limit: use at most this many sequences of the validation split; null for all.
        batch_size, seed, num_workers, pin_memory, pack_tokens: see `SplitDataModule`.
    """

    #: what errors call a sequence
    unit = "sequences"

    def __init__(
        self,
        seq_len: int,
        val_limit: int | None,
        batch_size: int,
        seed: int,
        num_workers: int,
        pin_memory: bool | None,
        pack_tokens: int | None = None,
    ) -> None:
        super().__init__(batch_size, seed, num_workers, pin_memory, pack_tokens)
        self.seq_len = integer(seq_len, "data.seq_len", 1)
        if pack_tokens is not None and pack_tokens < self.seq_len:
            raise ValueError(
                f"data.pack_tokens is {pack_tokens}, below data.seq_len = {seq_len}, the most tokens of a sample: raise the "
                "former or lower the latter"
            )
        self.val_limit = None if val_limit is None else integer(val_limit, "data.val_limit", 1)

    def limit(self, split: str) -> int | None:
        """The most sequences of a split; None for all."""
        return self.val_limit if split == "val" else None

    @property
    def kind(self) -> str:
        """What the samples are, in words."""
        return f"sequences of {self.seq_len:,}" if self.pack_tokens is None else f"documents of up to {self.seq_len:,}"

    def check_length(
        self, split: str, size: int, total: int, items: str, samples: Sized, change: str | None = None
    ) -> None:
        """Raise ValueError where the `size` items of a split, such as bytes, make no sample and its label."""
        if len(samples):
            return
        if change is None:
            change = f"raise data.{split}_fraction, or set it to 0 to do without"
            if split == "train":
                change = "lower data.val_fraction or data.test_fraction"
        if self.pack_tokens is not None:
            raise ValueError(
                f"the {split} split has {size} of the {total} {items}, and no document of two or more: pass more data, or "
                f"{change}"
            )
        shorter = f", lower data.seq_len to at most {size - 1}" if size > 1 else ""
        raise ValueError(
            f"the {split} split has {size} of the {total} {items}, but one sequence of data.seq_len = {self.seq_len} needs "
            f"{self.seq_len + 1}: pass more data{shorter}, or {change}"
        )

    def too_few(self, count: int, needed: int, replicas: int) -> str:
        if self.pack_tokens is not None:
            return (
                f"the train split has {count} samples, but {replicas} data-parallel ranks take one each: use fewer ranks, "
                "or pass more data in data.paths"
            )
        return (
            f"the train split has {count} {self.unit} of data.seq_len = {self.seq_len}, but one batch takes {needed} "
            f"(data.batch_size = {self.batch_size} on {replicas} data-parallel ranks): lower data.batch_size or "
            "data.seq_len, use fewer ranks, or pass more data in data.paths"
        )


# -- splits by share ---------------------------------------------------------------------------------------------------
def split_fractions(
    fractions: dict[str, float | None], separate: dict[str, bool], option: str, all_test: bool = False
) -> dict[str, float]:
    """The shares of the "val" and "test" split.

    Args:
        fractions: of each split the user's `data.<split>_fraction`, or None: then 0.05, but 0 if any split has separate
            data, so that nothing is taken from the training data unasked.
        separate: whether a split has data of its own.
        option: the option that named them, such as "paths" for `data.val_paths`.
        all_test: whether a test share of 1 is allowed, which leaves nothing to train on.

    Raises: TypeError or ValueError for a share outside [0, 1), for both a share and own data, and for shares that leave
        nothing to train on.
    """
    if all_test and fractions["test"] == 1 and fractions["val"] in (None, 0) and not any(separate.values()):
        return {"val": 0.0, "test": 1.0}
    default = 0.0 if any(separate.values()) else SHARE
    shares = {
        x: real(default if share is None else share, f"data.{x}_fraction", least=0, below=1)
        for x, share in fractions.items()
    }
    for split, share in shares.items():
        if separate[split] and share > 0:
            raise ValueError(
                f"data.{split}_fraction is {share} and data.{split}_{option} is set too: a split is either a share of the "
                "data or has data of its own; leave one of them out"
            )
    if sum(shares.values()) >= 1:
        raise ValueError(
            f"data.val_fraction {shares['val']} and data.test_fraction {shares['test']} add up to 1 or more, which leaves "
            "nothing to train on: lower one of them"
        )
    return shares


def split_bounds(total: int, shares: dict[str, float]) -> dict[str, tuple[int, int]]:
    """[start, stop) of each split in `total` items: training first, then validation, then test."""
    val, test = int(total * shares["val"]), int(total * shares["test"])
    train = total - val - test
    return {"train": (0, train), "val": (train, train + val), "test": (train + val, total)}


# -- batches that a worker can send ------------------------------------------------------------------------------------
# A thread of the worker sends a batch. An error there is only printed, and the training process would wait forever; so
# what cannot be sent is detected before, where the error still reaches the training process.
class SendableCollate:
    """A collate function (None: torch's default) whose batches can leave a worker, see `sendable`."""

    def __init__(self, collate: Callable[[Any], Any] | None = None) -> None:
        self.collate = default_collate if collate is None else collate

    def __call__(self, samples: Any) -> Any:
        return sendable(self.collate(detached(samples)))


def sendable(batch: Any) -> Any:
    """The batch with its tensors detached from any graph: data has no gradient, in a worker or not.

    Raises:
        TypeError: in a worker, for what cannot be sent to another process, naming the entry.
    """
    batch = detached(batch)
    if get_worker_info() is not None:
        _refuse_unsendable(batch)
    return batch


def detached(batch: Any) -> Any:
    """The batch, or a copy of its containers where a tensor in mappings, lists or tuples has to be detached."""
    if isinstance(batch, Tensor):
        return batch.detach() if batch.requires_grad else batch
    if isinstance(batch, Mapping):
        new = {name: detached(x) for name, x in batch.items()}
        if all(new[name] is x for name, x in batch.items()):
            return batch
        return new if type(batch) is dict else rebuilt(batch, new)
    if isinstance(batch, list | tuple):
        parts = [detached(x) for x in batch]
        if all(new is old for new, old in zip(parts, batch, strict=True)):
            return batch
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def rebuilt(batch: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    """A mapping of the batch's class; a plain dict if that class cannot be made from one."""
    try:
        return type(batch)(entries)  # type: ignore[call-arg]
    except TypeError:
        return entries


class _WithoutArrays(pickle.Pickler):
    """Pickles everything but tensors and plain arrays, which can be sent and are large."""

    def persistent_id(self, x: Any) -> str | None:
        if isinstance(x, Tensor) and not x.is_leaf:
            raise TypeError("a tensor in it has a graph: detach it")
        large = isinstance(x, Tensor) or (isinstance(x, np.ndarray) and not x.dtype.hasobject)
        return "array" if large else None


def _refuse_unsendable(batch: Any) -> None:
    entries = batch.items() if isinstance(batch, Mapping) else [(None, batch)]
    for name, x in entries:
        try:
            _WithoutArrays(io.BytesIO()).dump(x)
        except Exception as error:  # pickle passes on whatever the object's methods raise
            where = "a batch" if name is None else f"the entry {name!r} of a batch"
            raise TypeError(
                f"{where} is a {type(x).__name__} that cannot be sent from a worker process ({error}): let the dataset or "
                "the collate function return tensors, numbers and strings, or set num_workers to 0"
            ) from error
