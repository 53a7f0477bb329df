"""Training in regions: a strategy mixin that calls `ext/regions` in Lightning's hooks."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn

from lightning_dilated._extensions import hook
from lightning_dilated._validation import integer
from lightning_dilated.strategy.mesh import MeshSizes
from lightning_dilated.strategy.outer import OuterSteps
from lightning_dilated.strategy.preemption import Preemption

#: values of the option `regions`
Regions: TypeAlias = int | Literal["auto"]


def check_regions(regions: Any, outer: Any) -> None:
    """Check the options `regions` and `outer`: several regions need outer steps.

    Raises:
        TypeError, ValueError: naming the option and a remedy.
    """
    if isinstance(regions, str) and regions != "auto":
        raise ValueError(f'regions must be "auto" (each node is one) or a number, got {regions!r}.')
    if regions != "auto":
        integer(regions, "regions", 1)
    if outer is not None and not isinstance(outer, OuterSteps):
        raise TypeError(f"outer must be lightning_dilated.OuterSteps(every=...) or None, got {outer!r}.")
    if regions != 1 and outer is None:
        raise ValueError(
            f"regions={regions!r} train apart and would never be synchronized: set outer=OuterSteps(every=100, ...)."
        )


class RegionMixin:
    """A strategy mixin, placed before Lightning's class: regions train separately, and outer steps synchronize them.

    During a fit the module has the region's own parameters. In validations, in checkpoints and after the fit it has the
    mean over regions. Right after an outer step without `delay` and `mix`, the region's parameters equal the mean.
    """

    _options: Any  # SequenceOptions
    _regions: Any = None  # a `RegionTraining` of `ext/regions` during a run with outer steps
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
        """Return True if the latest step was not followed by an outer step; then no rank may wait for other regions."""
        return self._regions is not None and self._regions.apart

    @property
    def _fitting(self) -> bool:
        module = self.lightning_module
        return module is not None and module.trainer.state.fn == TrainerFn.FITTING

    @property
    def _region_group(self) -> dist.ProcessGroup | None:
        """The process group of this region; None if the job has one region."""
        return None if self._regions is None else self._regions.group

    def _check_precision(self) -> None:
        """Raise ValueError in `Trainer(...)` for 16-mixed: a checkpoint stores one scaler, but each region has its own."""
        precision = getattr(self.precision_plugin, "precision", None)  # type: ignore[attr-defined]
        if self._options.regions != 1 and precision == "16-mixed":
            raise ValueError(
                f"regions={self._options.regions!r} take no precision='16-mixed': each has its own loss scaler, but a "
                "checkpoint stores one. Take 'bf16-mixed'."
            )

    def _make_regions(self) -> None:
        """Make the process groups of this region and over regions for a run; every rank must call this."""
        self._regions = None if self._options.outer is None else hook("training in regions")(self)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Take Lightning's optimizer step, and then the outer steps that are due.

        Raises:
            RuntimeError: if a parameter is trained that was frozen when the fit began.
        """
        output = super().optimizer_step(*args, **kwargs)  # type: ignore[misc]
        if self._regions is not None:
            self._regions.after_step()
        return output

    def on_validation_start(self) -> None:
        """Put the mean of the regions' parameters into the module."""
        super().on_validation_start()  # type: ignore[misc]
        if self._regions is not None and self._fitting:
            self._regions.show_mean()

    def on_validation_end(self) -> None:
        """Put the region's own parameters back."""
        super().on_validation_end()  # type: ignore[misc]
        if self._regions is not None and self._fitting:
            self._regions.show_local()

    def on_train_end(self) -> None:
        """Leave the mean of the regions in the module."""
        if self._regions is not None:
            self._regions.show_mean(on_host=True)
        super().on_train_end()  # type: ignore[misc]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state dict of the mean over regions; every rank must call this."""
        state = super().lightning_module_state_dict()  # type: ignore[misc]
        return state if self._regions is None else self._regions.mean_of(state)

    def local_state_dict(self) -> dict[str, Any]:
        """Return the state dict of this region's own parameters."""
        state = super().lightning_module_state_dict()  # type: ignore[misc]
        return state if self._regions is None else self._regions.local_of(state)

    def outer_state(self) -> dict[str, Any] | None:
        """Return the state of outer steps for a checkpoint, equal in all regions; None without outer steps."""
        return None if self._regions is None else self._regions.state()

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save; with outer steps, also save their state and each region's parameters and optimizer."""
        if self._regions is not None:
            self._regions.add_to(checkpoint)
        super().save_checkpoint(checkpoint, *args, **kwargs)  # type: ignore[misc]

    def _of_this_region(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return this region's state in a loaded checkpoint; raise ValueError if the checkpoint lacks it."""
        if self._regions is not None:
            return self._regions.of_this_region(checkpoint)
        if "outer_steps" in checkpoint and self._fitting:
            hook("checkpoint of regions")(checkpoint["outer_steps"], self.sizes.regions)
        checkpoint.pop("regions", None)
        return checkpoint
