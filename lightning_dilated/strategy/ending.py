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
        self._trainer, self._told = trainer, False
        loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
        if hasattr(loop, "_broadcast_sigterm_tensor"):
            self._quiet = Quiet(dist.group.WORLD, timeout, "endings")
            loop._broadcast_sigterm_tensor, connector._sigterm_notifier_fn = self.ask, self.note

    def note(self, signum: int, frame: Any) -> None:
        """The signal handler: passes it on to the processes that this one started, as Lightning's does.

        A batch of training is finished, so that all ranks end after it; elsewhere the rank ends when its batch does.
        """
        trainer, connector = self._trainer, self._trainer._signal_connector
        _log.info("rank %d was told to end by signal %d", trainer.global_rank, signum)
        if not (self._told or connector.received_sigterm) and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signum)
        self._told = True
        connector.received_sigterm = connector.received_sigterm or not trainer.training

    def ask(self) -> None:
        """Before each batch of training.

        Raises:
            SIGTERMException: on every rank, if one was told to end.
            RuntimeError: where the others do not come.
        """
        connector = self._trainer._signal_connector
        try:
            told = self._quiet.gather(torch.tensor([int(self._told or connector.received_sigterm)]))
        except RuntimeError as error:
            rank = dist.get_rank()
            others = [r for r in range(dist.get_world_size()) if r != rank]
            raise RuntimeError(
                f"rank {rank} of the job waited in vain for the others, ranks {others} of the job, before a batch. One of "
                "them died, raised, or had fewer batches."
            ) from error
        ranks = [r for r, x in enumerate(told) if int(x)]
        if ranks:
            _log.info("ranks %s were told to end: all do, before the next batch", ranks)
            connector.received_sigterm = True
            raise SIGTERMException
