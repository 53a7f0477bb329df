"""The base classes of the DataModules: splits, loaders that resume exactly, and batches that a worker can send.

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
from lightning_dilated.data.opener import FileOpener
from lightning_dilated.data.packing import ALONG, PackedSamples, PackingSampler, collate_pack
from lightning_dilated.data.sampler import ResumableLoader, ResumableSampler

SPLITS = ("train", "val", "test")
#: default share of the data for validation; the default share for test is the same
SHARE = 0.05


class SplitDataModule(pl.LightningDataModule):
    """The base class of the DataModules; a subclass defines `check`, `dataset` and `wanted`.

    The training order depends only on `seed` and the epoch, and continues exactly from a checkpoint. Validation and
    test have the dataset's order. No sample is used twice in an epoch, unless training draws classes equally often
    (`balanced_classes`).

    Args:
        batch_size: B, the number of samples in a batch on each device.
        seed: seed of the training order.
        num_workers: number of processes that load batches; 0 loads in the main process.
        pin_memory: copy batches to page-locked memory, so that copies to a GPU are asynchronous; null: if there is a GPU.
        pack_tokens: maximum tokens of a batch on each device. Instead of `batch_size` padded rows, a batch is one row of
            D samples in the order of the epoch, with their bounds `cu_seqlens` (D + 1,) int32 on the CPU. Entries with
            one value for each sample are (D,). A sample with more tokens is a separate batch. null: do not pack.

    Raises: TypeError or ValueError for values outside these ranges.
    """

    #: the function that makes a batch from samples; None: torch's default
    collate: Callable[[list[Any]], Any] | None = None
    #: names of entries with a value for each token, which packs concatenate; others have one value for each sample
    along: tuple[str, ...] = ALONG
    #: whether each epoch shuffles the training samples
    shuffles = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Raise TypeError for an argument that was removed; the error names its replacement."""
        for message in filter(None, map(removed, kwargs)):
            raise TypeError(message)
        return super().__new__(cls)

    @restricted_classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load as Lightning does, but pass the file's hyperparameters directly to the constructor, not to a parser.

        Raises: ValueError for a fifo or device, and for a URL that `check_address` refuses.
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
        # a rank may get no sample of a short validation split, because no sample is used twice
        self.allow_zero_length_dataloader_with_multiple_devices = True
        #: the object that opens files by path or URL
        self.opener = FileOpener()
        self._train_loader: ResumableLoader | None = None
        self._resume_state: dict[str, Any] | None = None

    # -- defined by subclasses ------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Check the data on disk, once for each run; raise OSError or ValueError with the problem and a remedy."""
        raise TypeError(f"{type(self).__name__} must define check(), which looks at its files.")

    def dataset(self, split: str) -> Dataset:
        """Return the samples of "train", "val" or "test". Raises ValueError for another name."""
        raise TypeError(f"{type(self).__name__} must define dataset(split).")

    def wanted(self, split: str) -> str | None:
        """Return None if the settings include the split, else a description of the setting that leaves it out."""
        return None

    def balanced_classes(self) -> list[int] | None:
        """Return each training sample's class, to draw classes equally often; None: draw each sample once an epoch."""
        return None

    def per_rank(self, replicas: int) -> int:
        """Return the number of samples in a batch on each of `replicas` data-parallel ranks."""
        return self.batch_size

    def too_few(self, count: int, needed: int, replicas: int) -> str:
        """Return the error message for a train split with fewer samples than one batch needs."""
        return (
            f"the train split has {count} samples, but one batch takes {needed} (data.batch_size = {self.batch_size} on "
            f"{replicas} data-parallel ranks): lower data.batch_size, use fewer ranks, or pass more data"
        )

    # -- called by Lightning -------------------------------------------------------------------------------------------
    def setup(self, stage: str | None = None) -> None:
        """Check the data; before a fit, also reset the training position. The Trainer calls this before each run."""
        self.check()
        self.opener.check_workers(self.num_workers)
        if stage == "fit":
            self._check_trains()
        if stage in (None, "fit"):
            self._resume_state = None
            self._train_loader = None

    def train_dataloader(self) -> ResumableLoader:
        """Return a loader of this rank's whole batches in the epoch's order; raise ValueError for too few samples."""
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
        # needed because Lightning does not restore loaders if the checkpoint is from the end of an epoch, or if
        # configure_optimizers read trainer.estimated_stepping_batches
        if self._resume_state is not None:
            loader.load_state_dict(self._resume_state)
            self._resume_state = None
        self._train_loader = loader
        return loader

    def val_dataloader(self) -> DataLoader | list[DataLoader]:
        """Return a loader of the validation split in the dataset's order, or [] if there is no such split."""
        return self._eval_loader("val")

    def test_dataloader(self) -> DataLoader | list[DataLoader]:
        """Return a loader of the test split in the dataset's order, or [] if there is no such split."""
        return self._eval_loader("test")

    def predict_dataloader(self) -> DataLoader | list[DataLoader]:
        """Return a loader of `predict_dataset` in the dataset's order, or [] if there is no test split."""
        return self._eval_loader("test", self.predict_dataset)

    def predict_dataset(self) -> Dataset:
        """Return the samples for `predict`: the test split."""
        return self.dataset("test")

    def state_dict(self) -> dict[str, Any]:
        """Return the training position to store in a checkpoint; {} before training."""
        return {} if self._train_loader is None else {"train": self._train_loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Store a checkpoint's training position for the next `train_dataloader`; do nothing outside of a fit."""
        state = state_dict.get("train")
        if self.trainer is None:
            self._resume_state = state
        elif self.trainer.state.fn == TrainerFn.FITTING:
            # the loader exists if a module requested it in configure_optimizers, which may run before this method
            if state is not None and self._train_loader is not None:
                self._train_loader.load_state_dict(state)
            else:
                self._resume_state = state

    def check_batch(self, count: int, replicas: int) -> None:
        """Raise ValueError if `count` training samples do not fill one batch on every replica."""
        needed = self.per_rank(replicas) * replicas
        if count < needed:
            raise ValueError(self.too_few(count, needed, replicas))

    def _loading(self, replicas: int) -> dict[str, Any]:
        """Return the arguments that all loaders share."""
        collate = SendableCollate(self.collate if self.pack_tokens is None else collate_pack)
        options = {"num_workers": self.num_workers, "pin_memory": self._pins()}
        return {"batch_size": self.per_rank(replicas), "collate_fn": collate, **options}

    def _check_trains(self) -> None:
        missing = self.wanted("train")
        if missing is not None:
            raise ValueError(f"there is no train split to fit on: {missing}")

    def _sampled(self, dataset: Dataset, rank: int, replicas: int, **order: Any) -> tuple[Dataset, ResumableSampler]:
        """Return the dataset, packed if `pack_tokens` is set, and this rank's sampler over it."""
        if self.pack_tokens is None:
            return dataset, ResumableSampler(dataset, replicas, rank, **order)
        packed = PackedSamples(dataset, self.pack_tokens, self.along)
        return packed, PackingSampler(packed, replicas, rank, **order)

    def _check_packs(self, sampler: PackingSampler) -> None:
        """Raise ValueError if there are fewer packs than replicas; log how many samples are too long to pack."""
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
                f"{self.pack_tokens:,} tokens, up to {int(lengths.max()):,}: each is a separate batch"
            )

    def _replica(self) -> tuple[int, int]:
        options = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        return (0, 1) if not options else (options["rank"], options["num_replicas"])

    def _pins(self) -> bool:
        if self.pin_memory is not None or self.trainer is None:
            return bool(self.pin_memory)
        return self.trainer.strategy.root_device.type == "cuda"

    def _eval_loader(self, split: str, make: Callable[[], Dataset] | None = None) -> DataLoader | list[DataLoader]:
        """Return a loader that yields a split, or the dataset that `make` returns, in the dataset's order."""
        missing = self.wanted(split)
        if missing is not None:
            if self.trainer is not None and self.trainer.state.fn not in (None, TrainerFn.FITTING):
                raise ValueError(f"there is no {split} split to run on: {missing}")
            # the settings leave the split out on purpose, so hide Lightning's warning
            warnings.filterwarnings("ignore", message="Total length of `list` across ranks is zero")
            return []
        rank, replicas = self._replica()
        samples = self.dataset(split) if make is None else make()
        dataset, sampler = self._sampled(samples, rank, replicas, shuffle=False)
        return DataLoader(dataset, sampler=sampler, **self._loading(replicas))


class SequenceDataModule(SplitDataModule):
    """The base class of the DataModules that cut a long stream into sequences of N tokens.

    Args:
        seq_len: N, tokens of a sequence.
        val_limit: maximum number of sequences that validation uses; null: all.
        batch_size, seed, num_workers, pin_memory, pack_tokens: see `SplitDataModule`.
    """

    #: the word for sequences in errors
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
                f"data.pack_tokens is {pack_tokens}, below data.seq_len = {seq_len}, the most tokens of a sample: "
                "raise data.pack_tokens or lower data.seq_len"
            )
        self.val_limit = None if val_limit is None else integer(val_limit, "data.val_limit", 1)

    def limit(self, split: str) -> int | None:
        """Return the maximum number of a split's sequences to use; None: use all."""
        return self.val_limit if split == "val" else None

    @property
    def kind(self) -> str:
        """A description of the samples, for messages."""
        return f"sequences of {self.seq_len:,}" if self.pack_tokens is None else f"documents of up to {self.seq_len:,}"

    def check_length(
        self, split: str, size: int, total: int, items: str, samples: Sized, change: str | None = None
    ) -> None:
        """Raise ValueError if a split with `size` items (such as bytes) is too small for a single sample."""
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
    """Return the shares of the "val" and "test" splits.

    Args:
        fractions: the user's `data.<split>_fraction` for each split. None means 0.05; but if any split has separate
            data, None means 0, so that all other data is for training.
        separate: for each split, whether it has separate data.
        option: the last part of the option for separate data, such as "paths" in `data.val_paths`.
        all_test: allow a test share of 1, which leaves no training data.

    Raises: TypeError or ValueError for a share outside [0, 1), for a share together with separate data, and for shares
        that leave no training data.
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
    """Return (start, stop) of each split in `total` items: training first, then validation, then test."""
    val, test = int(total * shares["val"]), int(total * shares["test"])
    train = total - val - test
    return {"train": (0, train), "val": (train, train + val), "test": (train + val, total)}


# -- batches that a worker can send ------------------------------------------------------------------------------------
# A thread of the worker sends a batch. An error in this thread is only printed, and the training process would wait
# forever. So the collate function detects entries that cannot be sent: its errors reach the training process.
class SendableCollate:
    """A collate function with `sendable` batches; it calls `collate`, or torch's default if `collate` is None."""

    def __init__(self, collate: Callable[[Any], Any] | None = None) -> None:
        self.collate = default_collate if collate is None else collate

    def __call__(self, samples: Any) -> Any:
        return sendable(self.collate(detached(samples)))


def sendable(batch: Any) -> Any:
    """Return the batch with its tensors detached from any graph, because data has no gradient.

    Raises:
        TypeError: in a worker, if an entry cannot be sent to another process; the error names the entry.
    """
    batch = detached(batch)
    if get_worker_info() is not None:
        _refuse_unsendable(batch)
    return batch


def detached(batch: Any) -> Any:
    """Return the batch with detached tensors; containers are copied only if a tensor in them requires a gradient."""
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
    """Return the entries as a mapping of the batch's class, or as a dict if the class cannot be made from a dict."""
    try:
        return type(batch)(entries)  # type: ignore[call-arg]
    except TypeError:
        return entries


class _WithoutArrays(pickle.Pickler):
    """A pickler that skips tensors and numeric arrays, which are large and can always be sent."""

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
        except Exception as error:  # the object's methods may raise any error
            where = "a batch" if name is None else f"the entry {name!r} of a batch"
            raise TypeError(
                f"{where} is a {type(x).__name__} that cannot be sent from a worker process ({error}): let the dataset or "
                "the collate function return tensors, numbers and strings, or set num_workers to 0"
            ) from error
