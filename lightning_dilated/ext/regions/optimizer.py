"""Synchronise the parameters of regions that train separately, by an outer optimizer and its schedule.

The code needs parameters and a process group, but not Lightning. Shape letters: P elements of a fragment.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dilated.strategy.outer import OuterSteps


class Fragment:
    """Parameters that are synchronised together, as one vector (P,) in fp32, or in float64 if a parameter is float64.

    Args:
        named: the parameters, on one device.
        settings: settings of the outer optimizer.
        peers: the ranks with the same parameters in all regions; None: there is one region.

    Attributes:
        shared: (P,) the parameters after the last outer step, equal in all regions.
        momentum: (P,) momentum of the outer optimizer.
        sent: (P,) the mean over regions of `shared` minus parameters, if it was received but not applied; else None.
        flagged: whether a region had set its flag when `sent` was sent.
    """

    def __init__(
        self, named: Mapping[str, nn.Parameter], settings: OuterSteps, peers: dist.ProcessGroup | None
    ) -> None:
        self.named, self._settings, self._peers = dict(named), settings, peers
        self._regions = 1 if peers is None else dist.get_world_size(peers)
        self.dtype = functools.reduce(torch.promote_types, (p.dtype for p in named.values()), torch.float32)
        self._home = torch.device("cpu") if settings.offload else self.device
        self.shared = self.local().to(self._home)
        self.momentum = torch.zeros_like(self.shared)
        self.sent: Tensor | None = None
        self.flagged = False
        self._message: Tensor | None = None  # the vector that is being averaged, and the flag
        self._work: dist.Work | None = None

    @property
    def device(self) -> torch.device:
        """The parameters' present device."""
        return next(iter(self.named.values())).device

    def local(self) -> Tensor:
        """Return a copy of this region's parameters, (P,)."""
        return torch.cat([p.detach().flatten().to(self.dtype) for p in self.named.values()])

    def by_name(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the parts of a vector by parameter name, as views with the parameters' shapes."""
        parts = vector.split([p.numel() for p in self.named.values()])
        return {name: part.view(p.shape) for (name, p), part in zip(self.named.items(), parts, strict=True)}

    @torch.no_grad()
    def write(self, vector: Tensor) -> None:
        """Set this region's parameters to the values of a vector (P,)."""
        for name, values in self.by_name(vector).items():
            self.named[name].copy_(values)

    def send(self, flagged: bool) -> None:
        """Start to average `shared` minus parameters over regions. A flag that one region sets reaches all regions."""
        moved = self.shared.to(self.device) - self.local()
        self._message = torch.cat([moved, torch.full((1,), float(flagged), dtype=self.dtype, device=self.device)])
        if self._peers is not None:
            self._work = dist.all_reduce(self._message, group=self._peers, async_op=True)

    @property
    def under_way(self) -> bool:
        """True if a vector was sent and not applied."""
        return self.sent is not None or self._message is not None

    def receive(self) -> None:
        """Wait for the mean if it is being computed, and store it in `sent`."""
        if self._message is None:
            return
        if self._work is not None:
            self._work.wait()
        message, self._message, self._work = self._message, None, None
        self.sent = (message[:-1] / self._regions).to(self._home)
        self.flagged = bool(message[-1] > 0)

    def meet(self) -> None:
        """Set this region's parameters to the mean over regions, from the vector that was sent."""
        self.receive()
        assert self.sent is not None
        self.shared.sub_(self.sent)
        self.sent = None
        self.write(self.shared.to(self.device))

    def apply(self) -> None:
        """Take an outer step with the vector that was sent, and update this region's parameters."""
        self.receive()
        assert self.sent is not None
        self.momentum.mul_(self._settings.momentum).add_(self.sent)
        self.shared.sub_(self.sent.add_(self.momentum, alpha=self._settings.momentum), alpha=self._settings.lr)
        self.sent, shared = None, self.shared.to(self.device)
        self.write(torch.lerp(shared, self.local(), self._settings.mix) if self._settings.mix else shared)

    def leave(self, failed: bool) -> None:
        """Wait for a message that was sent, and drop the group of peers.

        If the run `failed`, other regions may not have sent their part; then the message is dropped.
        """
        if failed and self._work is not None and not self._work.is_completed():
            self._message = self._work = None
        self.receive()
        self._peers = None

    def mean(self) -> Tensor:
        """Return the mean of the regions' parameters, (P,); every rank has to call this.

        Raises:
            RuntimeError: if the run ended before the mean was taken.
        """
        if self._peers is None and self._regions > 1:
            raise RuntimeError(
                "the run ended with an exception, so the regions can no longer compute the mean of their parameters. "
                "Start a fit from the latest checkpoint."
            )
        mean = self.local()
        if self._peers is not None:
            dist.all_reduce(mean, group=self._peers)
        return mean.div_(self._regions)


class OuterOptimizer:
    """Take the outer steps of a model's parameters. Every rank of every region has one.

    Args:
        named: the trained parameters by name, with equal initial values in all regions.
        settings: schedule and options of the outer steps.
        peers: the ranks that have this rank's index in their regions, and the same parameters; None: one region.

    Attributes:
        steps: number of inner steps so far.
        local: this region's parameters while the model has the mean over regions; else None.

    Raises:
        ValueError: for more fragments than the model has blocks.
    """

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], settings: OuterSteps, peers: dist.ProcessGroup | None = None
    ) -> None:
        self.settings, self.steps = settings, 0
        self.local: dict[str, Tensor] | None = None
        self.fragments = [Fragment(part, settings, peers) for part in split(dict(named), settings.fragments)]

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """All synchronised parameters, by name."""
        return {name: p for fragment in self.fragments for name, p in fragment.named.items()}

    def leave(self, failed: bool) -> None:
        """Drop the groups of all fragments at the end of a run."""
        for fragment in self.fragments:
            fragment.leave(failed)

    def step(self, flagged: bool = False) -> tuple[bool, bool]:
        """Send and apply the fragments that are due. Every rank must call this after each inner step.

        Args:
            flagged: a flag that this region sends to all others, for example after a signal; equal on its ranks.

        Returns:
            (True if a fragment was applied, True if a region had set its flag when it was sent), equal on all ranks.
        """
        self.steps += 1
        applied = any_flagged = False
        for number, fragment in enumerate(self.fragments):
            warmup = self.steps <= self.settings.warmup
            phase = (self.steps - self.settings.start(number)) % self.settings.every
            if warmup or phase == 0:
                fragment.send(flagged)
            if warmup or (phase == self.settings.delay and fragment.under_way):
                fragment.meet() if warmup else fragment.apply()
                applied, any_flagged = True, any_flagged or fragment.flagged
        return applied, any_flagged

    # -- the mean of the regions, for evaluation and files -------------------------------------------------------------
    def mean(self) -> dict[str, Tensor]:
        """Return the mean of the regions' parameters by name, in the parameters' dtypes; every rank must call this."""
        parts = [(x, x.by_name(x.mean())) for x in self.fragments]
        return {name: value.to(x.named[name].dtype) for x, values in parts for name, value in values.items()}

    @torch.no_grad()
    def show_mean(self, on_host: bool = False) -> None:
        """Set the model to the mean over regions, and store this region's parameters; `on_host`: in host memory."""
        if self.local is None:
            device = "cpu" if on_host or self.settings.offload else None
            local = {name: p.detach().to(device, copy=True) for name, p in self.parameters.items()}
            for fragment in self.fragments:
                fragment.write(fragment.mean())
            self.local = local

    @torch.no_grad()
    def show_local(self) -> None:
        """Set the model to this region's parameters again."""
        local, self.local = self.local, None
        for name, p in self.parameters.items() if local is not None else ():
            p.copy_(local[name])

    # -- checkpoints ---------------------------------------------------------------------------------------------------
    def state(self) -> dict[str, Any]:
        """Wait for messages, and return the state, equal in all regions; "tensors" maps kinds to tensors by name."""
        tensors: dict[str, dict[str, Tensor]] = {}
        for fragment in self.fragments:
            fragment.receive()
            for kind in KINDS:
                if (vector := getattr(fragment, kind)) is not None:
                    tensors.setdefault(kind, {}).update(fragment.by_name(vector))
        return {"steps": self.steps, "settings": asdict(self.settings), "tensors": tensors}

    def load(self, state: Mapping[str, Any]) -> str | None:
        """Continue from a state; settings may differ.

        Returns:
            A description of the dropped part of the state; None if nothing is dropped.

        Raises:
            ValueError: if the state lacks parameters; the message names them.
        """
        tensors, settings = state["tensors"], state["settings"]
        missing = [name for name in self.parameters if name not in tensors["shared"]]
        if missing:
            raise ValueError(
                f"the checkpoint has no outer state of {missing[:3]}, because its run trained other parameters. Start "
                "a new run from its weights, or train the same parameters."
            )
        self.steps, sent = int(state["steps"]), tensors.get("sent", {})
        same = all(settings.get(name, getattr(OuterSteps, name)) == getattr(self.settings, name) for name in SCHEDULE)
        for fragment in self.fragments:
            if same and all(name in sent for name in fragment.named):
                fragment.sent = torch.empty_like(fragment.shared)
            for kind in KINDS:
                vector = getattr(fragment, kind)
                for name, part in fragment.by_name(vector).items() if vector is not None else ():
                    part.copy_(tensors[kind][name])
        if same or not sent:
            return None
        return "fragments that were under way between regions are dropped: every, fragments, delay or warmup changed."


#: the vectors of a fragment that checkpoints contain
KINDS = ("shared", "momentum", "sent")
#: the settings that decide when fragments are sent and applied
SCHEDULE = ("every", "fragments", "delay", "warmup")


def split(named: Mapping[str, nn.Parameter], count: int) -> list[dict[str, nn.Parameter]]:
    """Distribute blocks (entries of module lists) and other modules over `count` fragments, round-robin.

    Raises:
        ValueError: if there are more fragments than blocks and other modules.
    """
    units: dict[str, dict[str, nn.Parameter]] = {}
    for name, p in named.items():
        block = re.match(r"(.*?\.)?\d+\.", name)
        units.setdefault(block[0] if block else name.rpartition(".")[0], {})[name] = p
    if len(units) < count:
        raise ValueError(
            f"fragments={count}, but the model has only {len(units)} trained blocks and other modules: lower fragments."
        )
    parts: list[dict[str, nn.Parameter]] = [{} for _ in range(count)]
    for number, unit in enumerate(units.values()):
        parts[number % count] |= unit
    return parts
