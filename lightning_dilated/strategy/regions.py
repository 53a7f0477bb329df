"""Training in regions: a mixin of a Lightning strategy, which asks `ext/regions` in the hooks that outer steps concern."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn

from lightning_dilated._extensions import hook
from lightning_dilated._validation import integer
from lightning_dilated.strategy.mesh import MeshSizes
from lightning_dilated.strategy.outer import OuterSteps
from lightning_dilated.strategy.preemption import Preemption

#: regions, as users give them
Regions: TypeAlias = int | Literal["auto"]


def check_regions(regions: Any, outer: Any) -> None:
    """Raise for regions without outer steps, and for what is no number of regions and no OuterSteps.

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
    _regions: Any = None  # a `RegionTraining` of `ext/regions`, from a run with outer steps on
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
        """Return whether the latest step ended without an outer step: nothing may then wait for other regions."""
        return self._regions is not None and self._regions.apart

    @property
    def _fitting(self) -> bool:
        module = self.lightning_module
        return module is not None and module.trainer.state.fn == TrainerFn.FITTING

    @property
    def _region_group(self) -> dist.ProcessGroup | None:
        """The ranks of this region; None where there is one."""
        return None if self._regions is None else self._regions.group

    def _check_precision(self) -> None:
        """Raise ValueError, in `Trainer(...)`, where regions would differ in what checkpoints hold once."""
        precision = getattr(self.precision_plugin, "precision", None)  # type: ignore[attr-defined]
        if self._options.regions != 1 and precision == "16-mixed":
            raise ValueError(
                f"regions={self._options.regions!r} take no precision='16-mixed': each would have a scaler of its own, and "
                "a checkpoint holds one. Take 'bf16-mixed'."
            )

    def _make_regions(self) -> None:
        """Begin a run: process groups of this region and over regions; every rank calls."""
        self._regions = None if self._options.outer is None else hook("training in regions")(self)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's, and the outer steps that are due after it.

        Raises:
            RuntimeError: for parameters that are trained and were not when the fit began.
        """
        output = super().optimizer_step(*args, **kwargs)  # type: ignore[misc]
        if self._regions is not None:
            self._regions.after_step()
        return output

    def on_validation_start(self) -> None:
        """Lightning's; validates the mean of the regions."""
        super().on_validation_start()  # type: ignore[misc]
        if self._regions is not None and self._fitting:
            self._regions.show_mean()

    def on_validation_end(self) -> None:
        """Lightning's; training continues with the region's own parameters."""
        super().on_validation_end()  # type: ignore[misc]
        if self._regions is not None and self._fitting:
            self._regions.show_local()

    def on_train_end(self) -> None:
        """Lightning's; the module is left with the mean of the regions."""
        if self._regions is not None:
            self._regions.show_mean(on_host=True)
        super().on_train_end()  # type: ignore[misc]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Lightning's, of the mean over regions; every rank calls."""
        state = super().lightning_module_state_dict()  # type: ignore[misc]
        return state if self._regions is None else self._regions.mean_of(state)

    def local_state_dict(self) -> dict[str, Any]:
        """Lightning's, of this region's own parameters."""
        state = super().lightning_module_state_dict()  # type: ignore[misc]
        return state if self._regions is None else self._regions.local_of(state)

    def outer_state(self) -> dict[str, Any] | None:
        """The state of outer steps in a checkpoint, equal in all regions; None without."""
        return None if self._regions is None else self._regions.state()

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Lightning's; with outer steps the file holds their state, and the own parameters and optimizer of each region."""
        if self._regions is not None:
            self._regions.add_to(checkpoint)
        super().save_checkpoint(checkpoint, *args, **kwargs)  # type: ignore[misc]

    def _of_this_region(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """The state of this region in a loaded checkpoint.

        Raises:
            ValueError: for a checkpoint that lacks this region's state.
        """
        if self._regions is not None:
            return self._regions.of_this_region(checkpoint)
        if "outer_steps" in checkpoint and self._fitting:
            hook("checkpoint of regions")(checkpoint["outer_steps"], self.sizes.regions)
        checkpoint.pop("regions", None)
        return checkpoint
