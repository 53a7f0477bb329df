"""Training in regions: a mixin that gives a Lightning strategy outer steps, the mean of the regions where a model is
evaluated or saved, and each region's own state in checkpoints.
"""

from __future__ import annotations

import itertools
from typing import Any, Literal, TypeAlias

import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from lightning_dilated._extensions import hook
from lightning_dilated._validation import integer
from lightning_dilated.strategy.mesh import MeshSizes, nccl_options
from lightning_dilated.strategy.outer import OuterSteps
from lightning_dilated.strategy.preemption import Preemption

#: regions, as users give them
Regions: TypeAlias = int | Literal["auto"]


def check_regions(regions: Any, outer: Any) -> None:
    """Raise for regions that nothing keeps together, and for what is no number of regions and no OuterSteps.

    Raises:
        TypeError, ValueError: naming the option, with what to set.
    """
    if isinstance(regions, str) and regions != "auto":
        raise ValueError(f'regions must be "auto" (each node is one) or a number, got {regions!r}.')
    if regions != "auto":
        integer(regions, "regions", 1)
    if outer is not None and not isinstance(outer, OuterSteps):
        raise TypeError(f"outer must be lightning_dilated.OuterSteps(every=...) or None, got {outer!r}.")
    if regions != 1 and outer is None:
        raise ValueError(
            f"regions={regions!r} train apart, and nothing would bring them together: set outer=OuterSteps(every=100, ...)."
        )


class TrainsInRegions:
    """A mixin for a strategy, before Lightning's: regions train apart, and outer steps keep them one model.

    Within a fit the module holds the region's own parameters. In validations, in checkpoints and after the fit it holds the
    mean over regions, which after an outer step without `delay` and `mix` are the shared parameters themselves.
    """

    _options: Any  # SequenceOptions
    _outer: Any = None  # the outer optimizer of `ext/regions`
    _region_group: dist.ProcessGroup | None = None  # None: there is one region
    _peers: dist.ProcessGroup | None = None  # the ranks at this one's place in all regions
    _peers_on_host: dist.ProcessGroup | None = None  # the same over gloo
    _loaded_outer: dict[str, Any] | None = None  # of the checkpoint that this fit goes on from
    _loaded_local = False  # whether that had this region's own state
    _outer_applied = True
    _preemption: Preemption | None
    sizes: MeshSizes
    lightning_module: Any
    optimizers: list[Any]
    global_rank: int

    @property
    def region(self) -> int:
        """The number of this rank's region."""
        return self.global_rank // self.sizes.region_size

    @property
    def between_outer_steps(self) -> bool:
        """Whether regions went on without each other after the latest step, so that nothing may wait for all ranks."""
        return self.sizes.regions > 1 and self._outer is not None and not self._outer_applied

    @property
    def _fitting(self) -> bool:
        module = self.lightning_module
        return module is not None and module.trainer.state.fn == TrainerFn.FITTING

    def _check_precision(self) -> None:
        """Raise ValueError, in `Trainer(...)`, where regions would differ in what checkpoints hold once."""
        precision = getattr(self.precision_plugin, "precision", None)  # type: ignore[attr-defined]
        if self._options.regions != 1 and precision == "16-mixed":
            raise ValueError(
                f"regions={self._options.regions!r} take no precision='16-mixed': each would have a scaler of its own, and "
                "a checkpoint holds one. Take 'bf16-mixed'."
            )

    # -- set-up, called by `parallelize` ------------------------------------------------------------------------------
    def _make_region_groups(self) -> None:
        """Process groups of this region, and over regions; every rank calls."""
        self._outer, self._loaded_outer, self._loaded_local, self._outer_applied = None, None, False, True
        self._join_regions()

    def _join_regions(self) -> None:
        if self.sizes.regions > 1 and self._peers is None:
            timeout = self._options.rank_timeout  # type: ignore[attr-defined]
            self._region_group = self.sizes.new_group("region", timeout)
            self._peers_on_host = self.sizes.new_group("peers", timeout, "gloo")
            self._peers = self._peers_on_host
            if dist.get_backend() == "nccl":
                self._peers = self.sizes.new_group("peers", timeout, "nccl", nccl_options(overlapped=True))

    def _leave_regions(self, failed: bool) -> None:
        """The groups end with the run; the state of outer steps stays, for checkpoints."""
        self._region_group = self._peers = self._peers_on_host = None
        if self._outer is not None:
            self._outer.leave(failed)

    def _copy_first_region(self, module: nn.Module) -> None:
        """Begin with the same parameters and buffers in all regions."""
        if self._peers is not None and not self._loaded_local:
            for tensor in itertools.chain(module.parameters(), module.buffers()):
                dist.broadcast(tensor.detach(), group=self._peers, group_src=0)

    def _start_outer_steps(self) -> None:
        """Make the outer optimizer of a fit.

        Raises:
            ValueError: for a module that steps by itself or has several optimizers, and as `OuterOptimizer` does.
        """
        module, settings = self.lightning_module, self._options.outer
        if settings is None or not self._fitting:
            return
        if not module.automatic_optimization or len(self.optimizers) != 1:
            raise ValueError(
                f"outer steps count the steps of one optimizer, and {type(module).__name__} has {len(self.optimizers)}, "
                f"automatic_optimization={module.automatic_optimization}: let the Trainer step one optimizer, or leave out "
                "regions and outer."
            )
        self._outer = hook("outer optimizer")(_trained(module), settings, self._peers)
        self._outer_applied = True
        if self._loaded_outer is not None:
            dropped = self._outer.load(self._loaded_outer)
            self._loaded_outer = None
            if dropped:
                rank_zero_warn(dropped)

    # -- steps ---------------------------------------------------------------------------------------------------------
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's, and the outer steps that are due after it.

        Raises:
            RuntimeError: for parameters that are trained and were not when the fit began.
        """
        output = super().optimizer_step(*args, **kwargs)  # type: ignore[misc]
        if self._outer is not None:
            known = self._outer.parameters
            new = [name for name, _ in _trained(self.lightning_module) if name not in known]
            if new:
                raise RuntimeError(
                    f"{new[:3]} are trained since this step, and outer steps are of the parameters that were trained when "
                    "the fit began: regions would drift apart. Unfreeze them before, or begin another fit from here."
                )
            signalled = self._preemption is not None and self._preemption.is_region_signalled
            self._outer_applied, any_signalled = self._outer.step(signalled)
            if self._preemption is not None:
                self._preemption.all_meet = any_signalled
        return output

    def on_validation_start(self) -> None:
        """Lightning's; validates the mean of the regions."""
        super().on_validation_start()  # type: ignore[misc]
        if self._outer is not None and self._fitting:
            self._outer.show_mean()

    def on_validation_end(self) -> None:
        """Lightning's; training goes on with the region's own parameters."""
        super().on_validation_end()  # type: ignore[misc]
        if self._outer is not None and self._fitting:
            self._outer.show_local()

    def on_train_end(self) -> None:
        """Lightning's; the module is left with the mean of the regions."""
        if self._outer is not None:
            self._outer.show_mean(on_host=True)
        super().on_train_end()  # type: ignore[misc]

    # -- checkpoints -----------------------------------------------------------------------------------------------------
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Lightning's, of the mean over regions; every rank calls."""
        state = super().lightning_module_state_dict()  # type: ignore[misc]
        if self._outer is None or self._outer.local is not None:
            return state
        return self._with_parameters(state, self._outer.mean())

    def local_state_dict(self) -> dict[str, Any]:
        """Lightning's, of this region's own parameters."""
        state = super().lightning_module_state_dict()  # type: ignore[misc]
        return state if self._outer is None else self._with_parameters(state, self._outer.local or {})

    def _with_parameters(self, state: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """A state dict with other values of parameters, which it may hold under several names."""
        by_id = {id(p): values[name] for name, p in self.lightning_module.named_parameters() if name in values}
        named = self.lightning_module.named_parameters(remove_duplicate=False)
        return {**state, **{name: by_id[id(p)] for name, p in named if name in state and id(p) in by_id}}

    def outer_state(self) -> dict[str, Any] | None:
        """What a checkpoint holds of outer steps, equal in all regions; None without."""
        return None if self._outer is None else {"regions": self.sizes.regions, **self._outer.state()}

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Lightning's; with outer steps the file holds their state, and the own parameters and optimizer of each region."""
        outer = self.outer_state() if "optimizer_states" in checkpoint else None
        if outer is not None:
            checkpoint["outer_steps"] = outer
            own = {"state_dict": self.local_state_dict(), "optimizer_states": checkpoint["optimizer_states"]}
            if self.sizes.regions > 1:
                checkpoint["regions"] = self._gather_regions(own)
        super().save_checkpoint(checkpoint, *args, **kwargs)  # type: ignore[misc]

    def _gather_regions(self, own: dict[str, Any]) -> dict[str, Any]:
        """Each region's state by its number, on rank 0; also after a run, in whose end its groups ended."""
        size, first = self.sizes.region_size, self.global_rank == 0
        group = self._peers_on_host or self.sizes.new_group("peers", self._options.rank_timeout, "gloo")  # type: ignore[attr-defined]
        regions: list[Any] | None = [None] * self.sizes.regions if first else None
        if self.global_rank % size == 0:
            dist.gather_object(_on_host(own), regions, group=group, group_dst=0)
        if self._peers_on_host is None:
            dist.barrier()  # a rank that ended the group might break what another still reads
            dist.destroy_process_group(group)
        return {str(number): state for number, state in enumerate(regions or ())}

    def _of_this_region(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """A loaded checkpoint as this region goes on from it; says where that is not what was saved.

        Raises:
            ValueError: for a checkpoint that lacks this region's state.
        """
        outer, regions, count = checkpoint.get("outer_steps"), checkpoint.pop("regions", {}), self.sizes.regions
        self._loaded_outer, self._loaded_local = None, False
        if not self._fitting:
            return checkpoint
        if outer is None:
            if self._options.outer is not None:
                rank_zero_info(
                    "the checkpoint has no outer steps: all regions begin with its parameters and optimizer."
                )
            return checkpoint
        if self._options.outer is not None:
            self._loaded_outer = outer
        if outer["regions"] != count or self._options.outer is None:
            rank_zero_warn(_other_regions(outer["regions"], count, self._options.outer is not None))
        elif count > 1:
            if str(self.region) not in regions:
                raise ValueError(f"the checkpoint lacks the state of region {self.region}. Use an earlier checkpoint.")
            self._loaded_local = True
            checkpoint |= regions[str(self.region)]
        return checkpoint


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def _on_host(value: Any) -> Any:
    """A nested value with its tensors on the host."""
    if isinstance(value, dict):
        return {key: _on_host(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_on_host(x) for x in value])
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _other_regions(saved: int, count: int, outer: bool) -> str:
    """What of the state of `saved` regions `count` regions go on with, in words."""
    words = [
        f"the checkpoint is of {saved} region(s) with outer steps, this run has {count}{'' if outer else ' without'}."
    ]
    if saved > 1:
        words.append("Each goes on from the mean of their parameters, with the inner optimizer's state of the first.")
    if outer:
        words.append("Shared parameters and outer momentum go on.")
    else:
        words.append("The outer momentum is dropped: to keep it, set outer=OuterSteps(...), also for one region.")
    return " ".join(words)
