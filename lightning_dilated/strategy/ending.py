"""A signal to end (SIGTERM, as schedulers send it) to any rank ends a fit on all ranks before the same batch.

Lightning 2.6 has every rank read a number from its GPU before each batch, so that hosts wait for their GPUs between steps,
and its signal handler broadcasts that number whatever the rank is doing, which another rank may take for a collective of a
step. Here hosts tell each other.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_dilated.sequence.quiet import Quiet

_log = logging.getLogger(__name__)


class Ending:
    """Whether some rank of the job was told to end; takes the place of Lightning's own way where it has one.

    Args:
        trainer: whose fits end; before it registers its signal handlers.
        timeout: for which a rank waits for the others before a batch.
    """

    def __init__(self, trainer: Any, timeout: timedelta) -> None:
        self._trainer, self._told, self._quiet = trainer, False, None
        loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
        if trainer.world_size > 1 and hasattr(loop, "_broadcast_sigterm_tensor"):
            self._quiet = Quiet(dist.group.WORLD, timeout, "endings")
            loop._broadcast_sigterm_tensor, connector._sigterm_notifier_fn = self.ask, self.note

    def __getstate__(self) -> dict[str, Any]:
        """Without the connection, which belongs to this process: a copy elsewhere asks nobody."""
        return {**self.__dict__, "_quiet": None}

    def note(self, signum: int, frame: Any) -> None:
        """The signal handler: passes it on to the processes that this one started, as Lightning's does.

        In a fit what is under way, a batch of training or a validation, is finished, so that all ranks end after it.
        """
        first, self._told = not self._told, True
        if first and self._trainer.strategy.launcher is not None:
            self._trainer.strategy.launcher.kill(signum)
        if not self._fitting:
            self._trainer._signal_connector.received_sigterm = True

    @property
    def _fitting(self) -> bool:
        return self._trainer.state.fn == TrainerFn.FITTING

    def ask(self) -> None:
        """Before each batch of training, before a validation, and at the end; outside of fits nothing.

        Raises:
            SIGTERMException: on every rank, if one was told to end.
            RuntimeError: where the others do not come.
        """
        if self._quiet is None or not self._fitting:
            return
        try:
            told = self._quiet.gather(torch.tensor([int(self._told)], device="cpu"))
        except RuntimeError as error:
            rank = dist.get_rank()
            others = [r for r in range(dist.get_world_size()) if r != rank]
            raise RuntimeError(
                f"rank {rank} of the job waited in vain for the others, ranks {others} of the job, before a batch. One of "
                "them died, raised, or had fewer batches."
            ) from error
        if ranks := [r for r, x in enumerate(told) if int(x)]:
            _log.warning("ranks %s were told to end (SIGTERM): all do, after step %d", ranks, self._trainer.global_step)
            self._trainer._signal_connector.received_sigterm = True
            raise SIGTERMException


class EndsTogether:
    """To be inherited by a strategy, before Lightning's: asks where Lightning's loops do not."""

    _ending: Ending | None = None

    def on_validation_start(self) -> None:
        """Told in the batch before it."""
        if self._ending is not None:
            self._ending.ask()
        super().on_validation_start()

    def on_train_end(self) -> None:
        """Told in the last batch; after callbacks have saved."""
        super().on_train_end()
        if self._ending is not None:
            self._ending.ask()
