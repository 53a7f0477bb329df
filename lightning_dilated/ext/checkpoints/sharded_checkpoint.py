"""ShardedCheckpoint: each rank writes its part of a checkpoint while training continues."""

from __future__ import annotations

import hashlib
import io
import shutil
import time
import uuid
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_dilated._compat.lightning import resume_from, writes_one_file
from lightning_dilated._validation import integer, one_of, real
from lightning_dilated.checkpoint.folder import (
    BackgroundJob,
    FolderIO,
    checked,
    load_folder_with,
    warn_of_skipped,
    write,
)
from lightning_dilated.checkpoint.manifest import clean, listed, name_of, newest_valid, none_valid
from lightning_dilated.checkpoint.ranks import RankGroup, reason
from lightning_dilated.checkpoint.reader import ALONE
from lightning_dilated.checkpoint.state import (
    HostStager,
    assign_writers,
    bits_by_name,
    equal_names,
    others_write,
    replicated_sizes,
    replication_digest,
    trainer_state,
    unlike_replicas,
)
from lightning_dilated.ext.checkpoints.folder_lock import FolderLock
from lightning_dilated.strategy.preemption import Preemption, requeue_job
from lightning_dilated.strategy.sequence_strategy import SequenceStrategy

#: time that ranks wait for the slowest rank's disk; they detect a dead rank earlier
_PATIENCE = timedelta(hours=1)
#: seconds that a failed run waits for an unfinished checkpoint
_LAST = 60.0


class ShardedCheckpoint(Checkpoint):
    """Saves Lightning's checkpoints into folders such as `FOLDER/step-00001000`, to which each rank writes its part.

    Training waits only for the copy to the host; a thread writes the files. If the next checkpoint is due before the
    thread has ended, training waits. A checkpoint gets its name when it is complete on disk. Its `manifest.json` has a
    checksum of each file. If a file is damaged, an older checkpoint is loaded, with a warning that names the file.

    Any number of ranks can load a checkpoint, with or without sharded parameters. `fit(ckpt_path=FOLDER)` loads the
    newest valid checkpoint; `fit(ckpt_path=FOLDER/step-00001000)` loads step 1000. All ranks must see the folder.

    **Preemption.** SIGTERM, SIGINT (Ctrl-C) or SLURM's requeue signal (SIGUSR1) to any rank, or to all ranks, ends a
    fit on all ranks after the same optimizer step. A running validation is finished first. Other regions receive the
    signal at an outer step. Then a checkpoint is written, and the process exits with 128 plus the signal's number:

    - 143 (SIGTERM), 130 (SIGINT), 138 (SIGUSR1): the last step is in a complete checkpoint. After SIGUSR1 rank 0 has called
      `scontrol requeue` once. (A second SIGINT kills a process, also with status 130; the last steps may not be saved.)
    - 1: the checkpoint could not be written, or SLURM refused; a warning says why. Older checkpoints are complete.
    - 0: the fit had ended before the signal arrived.

    Under torchrun these are the statuses of workers; torchrun gives workers 30 s, and has its own exit status. To
    continue a job that has ended, start it again with resume="auto".

    **One run at a time.** The file `.in-use` names the run that uses a folder. A second run raises an error before it
    changes anything, unless the first run is dead. It is dead if it ran on this host and its process has ended, or if
    it ran on another host and gave no sign of life while the second run waited for 60 s.

    Args:
        folder: folder of the checkpoints; None: `checkpoints` in the Trainer's `default_root_dir`.
        every_n_train_steps: optimizer steps between two checkpoints; None: not by steps.
        every_n_minutes: minutes between checkpoints by rank 0's clock (in regions, at outer steps); None: not by time.
        at_end: also save at the end of fit.
        keep: number of newest checkpoints to keep.
        resume: "never"; "auto": resume from the newest valid checkpoint in the folder, if any; "must": require one. A
            ckpt_path of fit takes precedence.
        asynchronous: False: training waits until the files are written.
        keep_finite: do not count checkpoints with NaN or infinite parameters among the `keep` newest: they never
            replace valid ones, and are kept only while they are the newest. A resumed run skips them with a warning,
            unless ckpt_path names one. The thread checks the copies on the host.

    Raises:
        TypeError, ValueError: in the constructor, for settings that are not allowed.
        OSError: in setup, if rank 0 cannot write the folder, a rank cannot read it, or another run uses it. At the next
            checkpoint or at the end, on every rank, if a checkpoint could not be written (if the disk is full, with the
            free and the needed space), or another run took over the folder.
        FileNotFoundError: in setup, for resume="must" without a checkpoint.
        ValueError: in setup, if no checkpoint in the folder is valid and finite, and unless the strategy is DDP, model
        parallel or one device. Before the first step, if the folder contains checkpoints of another run.
    """

    #: Lightning reads this attribute for ckpt_path="best"; there is no best checkpoint
    best_model_path = ""

    def __init__(
        self,
        folder: str | None = None,
        every_n_train_steps: int | None = 1000,
        every_n_minutes: float | None = None,
        at_end: bool = True,
        keep: int = 3,
        resume: Literal["never", "auto", "must"] = "never",
        asynchronous: bool = True,
        keep_finite: bool = True,
    ) -> None:
        if every_n_train_steps is not None:
            integer(every_n_train_steps, "every_n_train_steps", 1, " Or None.")
        if every_n_minutes is not None:
            real(every_n_minutes, "every_n_minutes", above=0, hint=" Or None.")
        integer(keep, "keep", 1)
        one_of(resume, "resume", ("never", "auto", "must"))
        if every_n_train_steps is None and every_n_minutes is None and not at_end:
            raise ValueError("nothing would be saved: give every_n_train_steps, every_n_minutes or at_end=True.")
        self.folder, self.keep, self.resume = folder, keep, resume
        self.every_n_train_steps, self.every_n_minutes, self.at_end = every_n_train_steps, every_n_minutes, at_end
        self.asynchronous, self.keep_finite = asynchronous, keep_finite
        self._init_process_state()
        self._resumed_from: Path | None = None
        self._wrote: Path | None = None  # the folder that this object has written checkpoints to
        self._saved_step = self._last_step = -1  # the last saved step; the step count after the previous batch
        self._clock = 0.0
        self._training = False

    def _init_process_state(self) -> None:
        """Set attributes that belong to one process and are not copied with the callback."""
        self._peers = self._writers = RankGroup()
        self._world: Any = None  # the default process group when the groups of `_peers` and `_writers` were made
        self._background, self._stager = BackgroundJob(), HostStager()
        self._lock: FolderLock | None = None  # held by rank 0 during a fit
        self._preemption: Preemption | None = None  # of the current fit

    def __getstate__(self) -> dict[str, Any]:
        """Leave out groups, thread and lock, which belong to this process; a copy makes its own in its fit."""
        local = ("_peers", "_writers", "_world", "_background", "_stager", "_lock", "_preemption")
        return {name: value for name, value in self.__dict__.items() if name not in local}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._init_process_state()

    # -- before training -----------------------------------------------------------------------------------------------
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Make the folder and check that it can be written; find the checkpoint to resume from."""
        warnings.filterwarnings("ignore", message=ALONE)
        strategy = trainer.strategy
        _refuse(strategy)
        self._make_groups(trainer)
        late = strategy.restore_checkpoint_after_setup
        if not isinstance(strategy, SequenceStrategy):  # this package's strategies already read folders
            self._add_folder_reading(strategy, late)
        if stage != "fit" or _is_dev_run(trainer):
            return
        folder = self._peers.gather(str(Path(self.folder or Path(trainer.default_root_dir) / "checkpoints")))[0]
        self._target, self._resumed_from, self._training = Path(folder).absolute(), None, False
        self._preemption = (
            strategy.preemption if isinstance(strategy, SequenceStrategy) else Preemption(trainer, _PATIENCE)
        )
        self._try_folder()
        if self.resume != "never":
            self._find_resumable()
            if self._resumed_from is not None and not late:
                resume_from(trainer, self._resumed_from)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Resume here, not in `setup`, if the strategy shards the parameters before it loads them."""
        if self._resumed_from is not None and trainer.strategy.restore_checkpoint_after_setup:
            resume_from(trainer, self._resumed_from)

    def _add_folder_reading(self, strategy: Any, late: bool) -> None:
        """Let Lightning's strategies read valid folders without running code in them, as this package's do."""
        if late:
            strategy.load_checkpoint = partial(load_folder_with, strategy, partial(checked, peers=self._peers))
        elif not isinstance(strategy.checkpoint_io, FolderIO):
            strategy.checkpoint_io = FolderIO(strategy.checkpoint_io, partial(checked, peers=self._peers))

    def _make_groups(self, trainer: pl.Trainer) -> None:
        """Make one process group for training and one for the writing thread: their collectives must not mix."""
        if trainer.world_size == 1:
            self._peers = self._writers = RankGroup()
        elif self._world is not dist.group.WORLD:
            self._world, rank, size = dist.group.WORLD, trainer.global_rank, trainer.world_size
            groups = [dist.new_group(backend="gloo", timeout=_PATIENCE) for _ in range(2)]
            self._peers, self._writers = (RankGroup(rank, size, group) for group in groups)

    def _make_folder(self) -> Path | None:
        """On rank 0, make and lock the folder, remove a killed job's unfinished files, and write a probe file."""
        if self._peers.rank > 0:
            return None
        self._target.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(self._target)
        self._lock.acquire()
        for name in clean(self._target):
            rank_zero_warn(
                f"{self._target / name} was still being written when its job ended: the incomplete files are removed."
            )
        probe = self._target / f".probe-{uuid.uuid4().hex}"
        probe.write_bytes(bytes(4096))
        return probe

    def _try_folder(self) -> None:
        what = f"ShardedCheckpoint cannot use the folder {self._target}"
        probe = self._peers.gather(self._peers.together(what, self._make_folder))[0]
        self._peers.together(what, _look, probe)
        if self._peers.rank == 0 and probe is not None:
            probe.unlink()

    def _find_resumable(self) -> None:
        saved, problems = newest_valid(self._target, self._peers)
        if saved is None and problems:
            raise ValueError(none_valid(self._target, problems))
        if saved is None and self.resume == "must":
            raise FileNotFoundError(
                f'resume="must", but there is no checkpoint in {self._target}. Take resume="auto" to start anew, or name '
                "the folder of the run."
            )
        if saved is not None:
            warn_of_skipped(problems, saved.path)
            self._resumed_from = saved.path

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse a folder with another run's checkpoints, and a disk with too little space for the parameters."""
        self._saved_step = self._last_step = trainer.global_step
        self._clock = time.monotonic()
        if _is_dev_run(trainer):
            return
        self._training = True
        if self._preemption is not None:
            self._preemption.saves = True
        existing = self._peers.gather([saved.path.name for saved in listed(self._target)])[0]
        loaded = self._resumed_from if trainer.ckpt_path is None else Path(trainer.ckpt_path)
        known = loaded is not None and self._target.resolve() in (loaded.resolve(), loaded.resolve().parent)
        if existing and not known and self._wrote != self._target:
            raise ValueError(
                f"{self._target} holds checkpoints of another run ({', '.join(existing[:3])}), which new ones would "
                "replace: "
                'choose another folder, continue from them with resume="auto", or remove them.'
            )
        if self._resumed_from is not None and trainer.ckpt_path is not None and loaded != self._resumed_from:
            rank_zero_warn(f"ckpt_path {trainer.ckpt_path} was loaded, so resume={self.resume!r} had no effect.")
        self._peers.together("training does not begin", self._check_room, sum(p.nbytes for p in pl_module.parameters()))

    def _check_room(self, needed: int) -> None:
        free = shutil.disk_usage(self._target).free
        if free < needed:
            raise OSError(
                f"{self._target} has {free / 2**30:.2f} GiB left, and the parameters alone take {needed / 2**30:.2f}; make "
                "room, or choose another folder"
            )

    # -- in training ---------------------------------------------------------------------------------------------------
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Save if due, but only after an optimizer step, because accumulated gradients are not saved."""
        step = trainer.global_step
        if step == self._last_step or _is_dev_run(trainer):
            return
        self._last_step = step
        due = self.every_n_train_steps is not None and step % self.every_n_train_steps == 0
        if self.every_n_minutes is not None and not getattr(trainer.strategy, "between_outer_steps", False):
            late = time.monotonic() - self._clock >= 60 * self.every_n_minutes
            due |= self._peers.gather(late)[0]
        if due:
            self._save(trainer, step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the last step, and wait until all files are written."""
        if _is_dev_run(trainer):
            return
        if self.at_end and trainer.global_step != self._saved_step:
            self._save(trainer, trainer.global_step)
        self._wait_for_files()
        self._stager = HostStager()  # frees the buffers
        self._end_if_signalled(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End the fit before the validation if a signal arrived during the last batch."""
        self._end_if_signalled(trainer)

    def _end_if_signalled(self, trainer: pl.Trainer) -> None:
        """With Lightning's strategies, end the fit if a signal arrived; this package's strategies do so themselves."""
        if self._preemption is not None and not isinstance(trainer.strategy, SequenceStrategy):
            self._preemption.end_if_signalled()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Release the folder."""
        self._release(trainer)

    def _release(self, trainer: pl.Trainer) -> None:
        if self._preemption is not None and not isinstance(trainer.strategy, SequenceStrategy):
            self._preemption.close()
        self._preemption, self._training = None, False
        # if a thread is still writing, the folder stays locked until the process ends
        if self._lock is not None and not self._background.running:
            self._lock.release()
            self._lock = None
        groups = [x.group for x in (self._peers, self._writers) if x.group is not None]
        if groups and isinstance(trainer.strategy, SequenceStrategy) and not self._background.running:
            trainer.strategy.run_groups.add(groups)  # other strategies have no hook at the end of a run
            self._peers = self._writers = RankGroup()
            self._world = None

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Save if a signal ended the fit on all ranks, and release the folder."""
        try:
            preemption = self._preemption if self._training else None
            if preemption is not None and preemption.signal is not None and isinstance(exception, SIGTERMException):
                self._save_last(trainer, preemption, exception)
            else:
                self._wait_a_while()
        finally:
            self._release(trainer)
            self._world = None  # the next run needs new groups, because ranks may still wait in the old ones

    def _save_last(self, trainer: pl.Trainer, preemption: Preemption, exception: SIGTERMException) -> None:
        """Save the step before the signal, and then requeue the job if the signal asks for it."""
        try:
            if trainer.global_step != self._saved_step:
                self._save(trainer, trainer.global_step)
            self._wait_for_files()
            rank_zero_info(f"a signal ended the fit; its last step is in {self._target / name_of(self._saved_step)}")
            if preemption.requeue and self._peers.rank == 0:
                requeue_job()
        except (OSError, RuntimeError) as error:
            exception.code = 1
            rank_zero_warn(f"a signal ended the fit, and the job will not continue by itself: {reason(error)}")

    def _wait_a_while(self) -> None:
        """Wait for an unfinished checkpoint, but only for a while, because other ranks may be dead."""
        try:
            if not self._background.wait(_LAST):
                rank_zero_warn("the run failed while a checkpoint was being written: this checkpoint is incomplete.")
        except BaseException as error:  # the run already ends with another exception
            rank_zero_warn(f"the run failed, and so did its last checkpoint: {reason(error)}")

    def _wait_for_files(self) -> None:
        """Wait for the files of the last checkpoint; raise an error on all ranks if a rank failed."""
        if self._background.busy:
            self._peers.together("training stops, as a checkpoint failed", self._background.wait)

    def _save(self, trainer: pl.Trainer, step: int) -> None:
        """Copy this rank's part of the state to the host, and start to write it."""
        self._wait_for_files()
        self._peers.together(f"training stops, as {self._target} is not this run's", self._check_lock)
        path = self._target / name_of(step)
        what = f"the checkpoint {path} could not be begun"
        module = trainer.lightning_module
        state, values, sizes, local_bits = self._peers.together(what, _read, trainer)
        # if all ranks hold the same tensors, each writes a part; otherwise torch.distributed.checkpoint chooses writers
        digests = self._peers.gather(replication_digest(sizes, state))
        replicated = digests[0] is not None and len(set(digests)) == 1
        if replicated:
            self._compare_replicas(local_bits, trainer.strategy)
        writers = assign_writers(sizes, self._peers.size, module) if replicated else []
        skipped = set().union(*(names for rank, names in enumerate(writers) if rank != self._peers.rank))
        skipped |= others_write(sizes, trainer.strategy)
        state, meta = self._peers.together(what, self._stage, state, values, skipped, trainer.strategy.root_device)
        names = [name for name, _ in module.named_parameters(remove_duplicate=False)] if self.keep_finite else []
        job = partial(write, state, meta, path, step, self.keep, self._writers, names)
        if self.asynchronous:
            self._background.start(job, trainer.strategy.root_device)
        else:
            job()
        self._saved_step, self._clock, self._wrote = step, time.monotonic(), self._target
        rank_zero_info(f"the checkpoint {path} is being written")

    def _compare_replicas(self, local_bits: dict[str, int], strategy: Any) -> None:
        """Raise on every rank if replicated tensors differ within a region, because parts of them would not match."""
        size = self._peers.size if not isinstance(strategy, SequenceStrategy) else strategy.sizes.region_size
        digests = self._peers.gather(hashlib.blake2b(repr(local_bits).encode(), digest_size=16).digest())
        unlike = [i for i in range(0, len(digests), size) if len(set(digests[i : i + size])) > 1]
        if unlike:
            ranks = range(unlike[0], unlike[0] + size)
            raise RuntimeError(unlike_replicas(self._peers.gather(local_bits)[ranks[0] : ranks[-1] + 1], ranks))

    def _check_lock(self) -> None:
        if self._lock is not None:
            self._lock.check()

    def _stage(self, state: Any, values: Any, skipped: set[str], device: torch.device) -> tuple[dict[str, Any], bytes]:
        """Return the state on the host without tensors that other ranks write, and on rank 0 the bytes of `meta.pt`."""
        staged = self._stager.stage(state, skipped)
        if device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        file = io.BytesIO()
        if self._peers.rank == 0:
            torch.save(values, file)
        return staged, file.getvalue()


def _read(trainer: pl.Trainer) -> tuple[dict[str, Any], dict[str, Any], dict[str, int], dict[str, int]]:
    """Return `trainer_state`'s two values, sizes of unsharded tensors, and bits of tensors that ranks must share."""
    state, meta = trainer_state(trainer)
    sizes = replicated_sizes(state)
    alike = equal_names(sizes, trainer.lightning_module) if trainer.world_size > 1 else set()
    return state, meta, sizes, bits_by_name(state, alike)


def _refuse(strategy: Any) -> None:
    if not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy)):
        raise ValueError(
            f"ShardedCheckpoint does not know how {type(strategy).__name__} stores its state. Take 'ring_dilated', "
            "'ring_dilated_fsdp', 'ddp' or one device; or Lightning's ModelCheckpoint."
        )
    if writes_one_file(strategy):
        raise ValueError(
            f"{type(strategy).__name__}(save_distributed_checkpoint=False) assembles every checkpoint on rank 0, where "
            "ShardedCheckpoint has each rank write its part: leave that option out. `lightning-dilated consolidate` makes "
            "one file of the parts."
        )


def _is_dev_run(trainer: pl.Trainer) -> bool:
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]  # Lightning sets it without declaring it


def _look(probe: Path) -> None:
    if not probe.exists():
        raise FileNotFoundError("rank 0 writes it, and this rank does not see it; choose one that all nodes share")
