"""The mixin that lets a Lightning strategy shard a sequence over ranks: mesh, loaders, active sequence, loss, RNG.

`parallelize` lists the set-up in order; this file has the hooks of steps. The code is the same for a single rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_debug, rank_zero_warn
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ReduceOp
from typing_extensions import override

from lightning_dilated._compat.lightning import attached_trainer, end_runs, is_over, set_device_mesh
from lightning_dilated._extensions import hook
from lightning_dilated.sequence.group import SequenceGroup
from lightning_dilated.sequence.shard import SequenceSpec
from lightning_dilated.strategy import checks, mesh
from lightning_dilated.strategy.checks import computed_in
from lightning_dilated.strategy.elastic import GlobalBatch, check_launched
from lightning_dilated.strategy.loader import Loaders
from lightning_dilated.strategy.options import SequenceOptions
from lightning_dilated.strategy.parallelize import forget_gradient_options, lasting_groups, parallelize
from lightning_dilated.strategy.preemption import PreemptionMixin, RankLossMixin
from lightning_dilated.strategy.regions import RegionMixin
from lightning_dilated.strategy.replicas import Replicas


class SequenceStrategy(RegionMixin, PreemptionMixin, RankLossMixin):
    """A mixin for one of Lightning's multi-process strategies, placed before Lightning's class in the list of bases."""

    #: whether each rank holds only a shard of the parameters; then every step of every stage needs all ranks
    shards_parameters = False

    def _configure_sequence(self, options: SequenceOptions) -> None:
        if options.layout == "chunked" and self.shards_parameters:
            raise ValueError(
                f"layout='chunked' is not offered by {type(self).__name__}, which would gather all weights for every chunk. "
                "Take RingDilatedStrategy: its ranks hold all weights."
            )
        self._options = options
        self._mesh: DeviceMesh | None = None
        self._sequence: SequenceGroup | None = None
        self._loaders: Loaders | None = None
        self._why_unshared: dict[str, str] = {}  # {stage: reason why its losses cannot be added over ranks}
        self._first_step, self._shares, self._seed = True, 0, 0
        self._run_groups: mesh.RunGroups | None = None
        self._checks_first_batch = options.check_first_batch
        self._replicas: Replicas | None = None
        self._global_batch = None if options.global_batch is None else GlobalBatch(options.global_batch)

    # -- sizes and groups --------------------------------------------------------------------------------------------
    @property
    def sizes(self) -> mesh.MeshSizes:
        """The number of ranks along each axis of the mesh.

        Raises:
            ValueError: for sizes that do not divide the number of ranks.
        """
        options = self._options
        regions = self.num_nodes if options.regions == "auto" else options.regions
        return mesh.MeshSizes(self.num_nodes * self.num_processes, options.sequence_size, options.head_size, regions)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh (data, ring, head) of this rank's region.

        Raises:
            RuntimeError: before the Trainer runs.
        """
        if self._mesh is None:
            raise RuntimeError("the device mesh is made when the Trainer runs: read it in `setup` or later.")
        return self._mesh

    @property
    def sequence(self) -> SequenceGroup:
        """The ranks that share this rank's sequences.

        Raises:
            RuntimeError: before the Trainer runs.
        """
        if self._sequence is None:
            raise RuntimeError("the sequence's group is made when the Trainer runs: read it in `setup` or later.")
        return self._sequence

    @property
    def data_rank(self) -> int:
        """The index of this rank's sequence among the sequences that are computed at a time."""
        return self.global_rank // self.sizes.sequence_size

    @property
    def takes_whole_steps(self) -> bool:
        """True if every epoch ends with a whole step, because `global_batch` is set."""
        return self._global_batch is not None

    @property
    def is_first_of_sequence(self) -> bool:
        """True on the first rank of a sequence, which writes the data that is equal on all ranks of the sequence."""
        return self.global_rank % self.sizes.sequence_size == 0

    @override
    def _configure_launcher(self) -> None:
        check_launched(self.num_processes, self.num_nodes)
        self._check_precision()
        _ = self.sizes  # raises in Trainer(...), before a process is launched
        super()._configure_launcher()
        end_runs(self)

    @property
    def run_groups(self) -> mesh.RunGroups:
        """The process groups that end with the run; groups that a callback makes in `run_groups.making()` are added.

        Raises:
            RuntimeError: outside of a run.
        """
        if self._run_groups is None:
            raise RuntimeError("process groups of a run are made when the Trainer runs: read them in `setup` or later.")
        return self._run_groups

    @override
    def setup_environment(self) -> None:
        """Make process groups, mesh and sequence group; see `parallelize`."""
        self._count_run()
        self._first_step = True
        parallelize(self, "setup_environment", self._join_processes)
        rank_zero_debug(f"{type(self).__name__}: {self.sizes}")

    def _join_processes(self) -> None:
        self.accelerator.setup_device(self.root_device)
        mesh.join_under_torchrun(self._get_process_group_backend(), self._options.rank_timeout, self.root_device)
        self._start_process_group()
        self._run_groups = self._run_groups or mesh.RunGroups()

    def _start_process_group(self) -> None:
        """Let Lightning make the group, unless torchrun started the processes."""
        super().setup_environment()

    @override
    def setup(self, trainer: Any) -> None:
        """Set up parameters and optimizers; see `parallelize`."""
        parallelize(self, "setup", super().setup, trainer)

    @override
    def teardown(self) -> None:
        """Restore the loaders and free the routes; end the run if an exception or Lightning's Tuner stopped it."""
        if self._loaders is not None:
            self._loaders.restore()
        if self._global_batch is not None:
            self._global_batch.restore()
        self._replicas = None
        if self._sequence is not None:
            self._sequence.was_active = False  # so that recomputation under a different strategy raises no error
            self._sequence.forget()
        super().teardown()
        trainer = None if self.lightning_module is None else attached_trainer(self.lightning_module)
        if trainer is not None and is_over(trainer):
            self.end_run(failed=trainer.state.status == TrainerStatus.INTERRUPTED)

    def end_run(self, failed: bool = False) -> None:
        """Close process groups, their threads and connections, after the last hook of a run.

        If parameters stay sharded (`fully_shard`), their groups are destroyed with the module.
        """
        if self._run_groups is None:
            return
        if self._sequence is not None:
            self._sequence.close()
        groups, self._run_groups, module = self._run_groups, None, self.lightning_module
        if self._regions is not None:
            self._regions.leave(failed)
        forget_gradient_options(self)
        end = self._run, min(self._options.rank_timeout, mesh.AFTER_FAILURE if failed else mesh.AFTER_RUN), failed
        if module is not None and groups.hold(lasting_groups(module), *end):
            weakref.finalize(module, groups.end_now)
        else:
            self._mesh = None
            if module is not None:
                set_device_mesh(module, None)
            groups.end(*end)

    def _stage(self) -> str:
        """Return the run's stage: train, val, test or predict. Raise RuntimeError outside of a run."""
        stage = self.lightning_module.trainer.state.stage
        if stage is None or self._loaders is None:
            raise RuntimeError(
                f"{type(self).__name__} shards loaders and steps only within trainer.fit, validate, test or predict. "
                "Call these instead of the Trainer's loops, and read trainer.estimated_stepping_batches in "
                "configure_optimizers or a later hook."
            )
        return stage.dataloader_prefix

    def __getstate__(self) -> dict[str, Any]:
        """Leave out process groups and sharded loaders, which belong to this process."""
        local = ("_mesh", "_sequence", "_loaders", "_replicas", "_preemption", "_regions", "_run_groups")
        state = {**super().__getstate__(), **dict.fromkeys(local)}
        if "_ddp_kwargs" in state:
            state["_ddp_kwargs"] = {k: v for k, v in state["_ddp_kwargs"].items() if k != "process_group"}
        return state

    # -- data --------------------------------------------------------------------------------------------------------
    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of distributed samplers: all ranks of a sequence form one replica."""
        return {"num_replicas": self.sizes.data, "rank": self.data_rank}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Make a loader yield only this rank's tokens; see `parallelize`.

        Raises:
            ValueError: on every rank, if the ranks of a sequence read different data, or if ranks have different
                numbers of batches in a stage where each step needs all ranks.
            RuntimeError: outside of a run.
        """
        return parallelize(self, "process_dataloader", super().process_dataloader, dataloader)

    @override
    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Compare the unsharded entries of the batch over the ranks of the sequence, on the CPU, then move the batch.

        Raises:
            ValueError: on every rank of the sequence, naming the entry that differs.
        """
        spec = self._spec()
        if spec is not None and self.sequence.ranks > 1:
            for part in checks.batches_of_loaders(self.lightning_module.trainer, batch):
                facts = self.sequence.guard(checks.batch_facts, part, spec)
                self.sequence.agree({"call": "batch_to_device", **facts})
        return super().batch_to_device(batch, *args, **kwargs)

    def _spec(self) -> SequenceSpec | None:
        """The `sequence_spec` of the DataModule, or else of the LightningModule."""
        datamodule = getattr(self.lightning_module.trainer, "datamodule", None)
        specs = (getattr(owner, "sequence_spec", None) for owner in (datamodule, self.lightning_module))
        return next((spec for spec in specs if spec), None)

    # -- steps -------------------------------------------------------------------------------------------------------
    @contextmanager
    def _within(self, stage: str, batch_idx: int) -> Iterator[None]:
        """Activate the sequence, and seed the generators for this step and rank."""
        trainer, why_unshared = self.lightning_module.trainer, self._why_unshared.get(self._stage())
        step = trainer.fit_loop.total_batch_idx if stage == "training" else batch_idx
        seeds = mesh.step_seeds(self._seed, stage, step, self.data_rank, self.sequence.rank, self.root_device)
        self.sequence.unshared = why_unshared
        try:
            with self.sequence.active(), seeds:
                yield
        finally:
            self.sequence.unshared = None

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's training_step, with the sequence active and the step's seeds."""
        first, self._first_step = self._first_step, False
        batch = kwargs.get("batch", args[0] if args else None)
        if first:
            parallelize(self, "training_step", super().training_step, batch)
        self._shares = self.sequence.shares
        with self._within("training", _batch_idx(args, kwargs)), self._trusting():
            output = super().training_step(*args, **kwargs)
        if first and self.global_rank == 0:
            hint = hook("advice about layouts")(self.lightning_module, self.sequence, batch)
            if hint is not None:
                rank_zero_warn(hint)
        return output

    def _trusting(self) -> AbstractContextManager[None]:
        """Defer comparing ranks' attention calls until after the backward, if no code uses the gradients earlier."""
        module = self.lightning_module
        return self.sequence.trusting() if self.sizes.shape[0] == 1 and module.automatic_optimization else nullcontext()

    def _check_first_batch(self, batch: Any) -> None:
        """Check once, if `check_first_batch` is set, that all ranks together compute the same results as one rank."""
        if self._checks_first_batch:
            self._checks_first_batch = False
            with self.precision_plugin.train_step_context():
                dtype = computed_in(self.lightning_module, self.root_device.type)
                for part in checks.batches_of_loaders(self.lightning_module.trainer, batch):
                    hook("check of the first batch")(self.lightning_module, part, self._spec(), self.sequence, dtype)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's validation_step as in `training_step`."""
        with self._within("validation", _batch_idx(args, kwargs)):
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's test_step as in `training_step`."""
        with self._within("test", _batch_idx(args, kwargs)):
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's predict_step as in `training_step`."""
        with self._within("predict", _batch_idx(args, kwargs)):
            return super().predict_step(*args, **kwargs)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the gradient of the sum of the ranks' loss shares; raise RuntimeError if the loss is not a share."""
        if self.sequence.shares == self._shares:
            raise RuntimeError(
                f"the loss of {type(self.lightning_module).__name__}.training_step was not made by loss_share, so the "
                "number of losses on all ranks is unknown, and the gradient would be wrong. Return "
                "lightning_dilated.sequence.loss_share(sum of this rank's losses, number of this rank's losses)."
            )
        # DDP or FSDP averages gradients over the ranks of a region, but the loss is the sum of the ranks' shares
        with self.sequence.active(), self._trusting():
            loss = closure_loss if (ranks := self.sizes.region_size) == 1 else closure_loss * ranks
            super().backward(loss, optimizer, *args, **kwargs)
        self.sequence.settle()  # make the deferred comparison before the gradients are used
        return closure_loss

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Take the optimizer step, and compare the ranks' parameters every `check_replicas` steps."""
        output = super().optimizer_step(*args, **kwargs)
        if self._replicas is not None:
            self._replicas.step()
        return output

    @override
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save after comparing the ranks' parameters: a checkpoint must not mix parts of ranks that differ."""
        if self._replicas is not None:
            self._replicas.compare()
        super().save_checkpoint(*args, **kwargs)

    @override
    def on_train_end(self) -> None:
        """Read the last comparison of parameters."""
        if self._replicas is not None:
            self._replicas.settle()
        super().on_train_end()

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce as Lightning does, but compute means of integers in float64."""
        average = reduce_op in ("mean", "avg", ReduceOp.AVG) or reduce_op is None
        if isinstance(tensor, Tensor) and average and not tensor.is_floating_point() and not tensor.is_complex():
            # Lightning weights logged values by the ranks' mean count, and a mean of integers would be rounded down
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)


def _batch_idx(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    number = kwargs.get("batch_idx", args[1] if len(args) > 1 else 0)
    return number if isinstance(number, int) else 0
