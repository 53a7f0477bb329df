"""Run a strategy's outer steps, compute the mean over regions, and store the regions' states in checkpoints."""

from __future__ import annotations

import itertools
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_dilated.ext.regions.optimizer import OuterOptimizer
from lightning_dilated.strategy.mesh import nccl_options


class RegionTraining:
    """A strategy's outer steps, and their part of checkpoints. Every rank creates one at the start of a run.

    Args:
        strategy: a `RegionMixin`.

    Attributes:
        group: the ranks of this region; None: there is one region, or the run ended.
        outer: the outer optimizer of a fit.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy, self.sizes = strategy, strategy.sizes
        self._timeout = strategy._options.rank_timeout
        self.outer: OuterOptimizer | None = None
        self.group: dist.ProcessGroup | None = None
        self._peers: dist.ProcessGroup | None = None  # the ranks that have this rank's index in their regions
        self._peers_on_host: dist.ProcessGroup | None = None  # a gloo group of the same ranks
        self._loaded_outer: dict[str, Any] | None = None  # state in the checkpoint that this fit continues
        self._loaded_local = False  # whether the checkpoint had this region's state
        self._applied = True
        if self.sizes.regions > 1:
            self.group = self.sizes.new_group("region", self._timeout)
            self._peers = self._peers_on_host = self.sizes.new_group("peers", self._timeout, "gloo")
            if dist.get_backend() == "nccl":
                self._peers = self.sizes.new_group("peers", self._timeout, "nccl", nccl_options(overlapped=True))

    @property
    def apart(self) -> bool:
        """True if the latest inner step was not followed by an outer step."""
        return self.sizes.regions > 1 and self.outer is not None and not self._applied

    def leave(self, failed: bool) -> None:
        """Drop the groups at the end of a run; the state of outer steps is kept for checkpoints."""
        self.group = self._peers = self._peers_on_host = None
        if self.outer is not None:
            self.outer.leave(failed)

    def copy_first_region(self, module: nn.Module) -> None:
        """Give all regions the first region's parameters and buffers."""
        if self._peers is not None and not self._loaded_local:
            for tensor in itertools.chain(module.parameters(), module.buffers()):
                dist.broadcast(tensor.detach(), group=self._peers, group_src=0)

    def start(self) -> None:
        """Create the outer optimizer of a fit.

        Raises:
            ValueError: for manual optimization or several optimizers; `OuterOptimizer` raises more.
        """
        strategy = self._strategy
        module, optimizers = strategy.lightning_module, strategy.optimizers
        if not strategy._fitting:
            return
        if not module.automatic_optimization or len(optimizers) != 1:
            raise ValueError(
                f"outer steps count the steps of one optimizer, and {type(module).__name__} has {len(optimizers)}, "
                f"automatic_optimization={module.automatic_optimization}: let the Trainer step one optimizer, or leave out "
                "regions and outer."
            )
        self.outer = OuterOptimizer(_trained(module), strategy._options.outer, self._peers)
        self._applied = True
        if self._loaded_outer is not None:
            dropped = self.outer.load(self._loaded_outer)
            self._loaded_outer = None
            if dropped:
                rank_zero_warn(dropped)

    # -- steps ---------------------------------------------------------------------------------------------------------
    def after_step(self) -> None:
        """Take the outer steps that are due after an inner step.

        Raises:
            RuntimeError: if a parameter is trained now but was not at the start of the fit.
        """
        if self.outer is None:
            return
        known, preemption = self.outer.parameters, self._strategy._preemption
        new = [name for name, _ in _trained(self._strategy.lightning_module) if name not in known]
        if new:
            raise RuntimeError(
                f"{new[:3]} are trained since this step, but outer steps synchronise only parameters that were trained "
                "at the start of the fit. Unfreeze them before the fit, or start another fit from here."
            )
        signalled = preemption is not None and preemption.is_region_signalled
        self._applied, any_signalled = self.outer.step(signalled)
        if preemption is not None:
            preemption.all_meet = any_signalled

    def show_mean(self, on_host: bool = False) -> None:
        """Set the module to the mean over regions."""
        if self.outer is not None:
            self.outer.show_mean(on_host=on_host)

    def show_local(self) -> None:
        """Set the module to this region's parameters again."""
        if self.outer is not None:
            self.outer.show_local()

    # -- checkpoints ---------------------------------------------------------------------------------------------------
    def mean_of(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the module's state dict with the mean of its parameters over regions; every rank has to call this."""
        if self.outer is None or self.outer.local is not None:  # the module already has the mean
            return state
        return self._with_parameters(state, self.outer.mean())

    def local_of(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the module's state dict with this region's parameters."""
        return state if self.outer is None else self._with_parameters(state, self.outer.local or {})

    def _with_parameters(self, state: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """Replace parameters in a state dict, under all of their names."""
        module = self._strategy.lightning_module
        by_id = {id(p): values[name] for name, p in module.named_parameters() if name in values}
        named = module.named_parameters(remove_duplicate=False)
        return {**state, **{name: by_id[id(p)] for name, p in named if name in state and id(p) in by_id}}

    def state(self) -> dict[str, Any] | None:
        """Return the state of outer steps for a checkpoint, equal in all regions; None outside of a fit."""
        return None if self.outer is None else {"regions": self.sizes.regions, **self.outer.state()}

    def add_to(self, checkpoint: dict[str, Any]) -> None:
        """Add the state of outer steps to a checkpoint, and each region's parameters and optimizer state."""
        outer = self.state() if "optimizer_states" in checkpoint else None
        if outer is None:
            return
        checkpoint["outer_steps"] = outer
        local = {"state_dict": self._strategy.local_state_dict(), "optimizer_states": checkpoint["optimizer_states"]}
        if self.sizes.regions > 1:
            checkpoint["regions"] = self._gather_regions(local)

    def _gather_regions(self, local: dict[str, Any]) -> dict[str, Any]:
        """Return {number of a region: its state} on rank 0. This also works after a run, without the groups."""
        size, rank = self.sizes.region_size, self._strategy.global_rank
        group = self._peers_on_host or self.sizes.new_group("peers", self._timeout, "gloo")
        regions: list[Any] | None = [None] * self.sizes.regions if rank == 0 else None
        if rank % size == 0:
            dist.gather_object(_on_host(local), regions, group=group, group_dst=0)
        if self._peers_on_host is None:
            dist.barrier()  # a rank that destroys the group early might break another rank's read
            dist.destroy_process_group(group)
        return {str(number): state for number, state in enumerate(regions or ())}

    def of_this_region(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a loaded checkpoint with this region's state; warn if the numbers of regions differ.

        Raises:
            ValueError: if the checkpoint lacks this region's state.
        """
        outer, regions, count = checkpoint.get("outer_steps"), checkpoint.pop("regions", {}), self.sizes.regions
        self._loaded_outer, self._loaded_local = None, False
        if not self._strategy._fitting:
            return checkpoint
        if outer is None:
            rank_zero_info("the checkpoint has no outer steps: all regions start from its parameters and optimizer.")
            return checkpoint
        self._loaded_outer = outer
        if outer["regions"] != count:
            warn_of_other_regions(outer, count, True)
        elif count > 1:
            region = self._strategy.region
            if str(region) not in regions:
                raise ValueError(f"the checkpoint lacks the state of region {region}. Use an earlier checkpoint.")
            self._loaded_local = True
            checkpoint |= regions[str(region)]
        return checkpoint


def warn_of_other_regions(outer: dict[str, Any], count: int, outer_steps: bool = False) -> None:
    """Warn about how `count` regions continue from a checkpoint with outer steps.

    Args:
        outer: the checkpoint's "outer_steps".
        outer_steps: whether this run also has outer steps.
    """
    saved = outer["regions"]
    words = [
        f"the checkpoint is of {saved} region(s) with outer steps, this run has {count}{'' if outer_steps else ' without'}."
    ]
    if saved > 1:
        words.append("Each continues from the mean of their parameters, with the inner optimizer's state of the first.")
    if outer_steps:
        words.append("Shared parameters and outer momentum continue.")
    else:
        words.append("The outer momentum is dropped: to keep it, set outer=OuterSteps(...), also for one region.")
    rank_zero_warn(" ".join(words))


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def _on_host(value: Any) -> Any:
    """Copy a nested value, with its tensors on the host."""
    if isinstance(value, dict):
        return {key: _on_host(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_on_host(x) for x in value])
    return value.detach().cpu() if isinstance(value, Tensor) else value
