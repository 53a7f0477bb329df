"""Running a piece of the forward again in the backward as it ran first: the same autocast, the same random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states


def forget_casts() -> None:
    """Before torch 2.11 autocast hands a cast of a weight that was made without gradients out where these are needed."""
    if torch.is_autocast_cache_enabled():
        torch.clear_autocast_cache()


class Replay:
    """What a forward ran under, taken when this is made.

    Args:
        like: a tensor on the device that is computed on.
        random: whether the piece draws random numbers, whose state is then kept, too.
    """

    def __init__(self, like: Tensor, random: bool = False) -> None:
        self._device = like.device.type
        kind = self._device
        self._autocast = None
        if torch.amp.is_autocast_available(kind):
            self._autocast = {
                "enabled": torch.is_autocast_enabled(kind),
                "dtype": torch.get_autocast_dtype(kind),
                "cache_enabled": torch.is_autocast_cache_enabled(),  # compiled pieces look at that, too
            }
        self._states = (torch.get_rng_state(), *get_device_states(like)) if random else None

    @contextlib.contextmanager
    def again(self, grad: bool = True) -> Iterator[None]:
        """The forward's surroundings, with gradients enabled or not; random states are as they were afterwards."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(grad))
            if self._autocast is not None:
                stack.enter_context(torch.autocast(self._device, **self._autocast))
                forget_casts()
            if self._states is not None:
                cpu, devices, states = self._states
                kind = self._device if devices else "cuda"
                stack.enter_context(torch.random.fork_rng(devices=devices, device_type=kind))
                torch.set_rng_state(cpu)
                set_device_states(devices, states, device_type=kind)
            yield
