"""Background: one job at a time in a thread, whose failure is raised where it is waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


class Background:
    """Runs jobs beside the training, one after the other.

    The thread is a daemon: a job that waits for ranks that are gone does not keep a process from ending.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a job was started and not waited for."""
        return self._thread is not None

    @property
    def running(self) -> bool:
        """Whether a job is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], None], device: torch.device) -> None:
        """Begin `job`, with `device` as the thread's GPU if it is one; the one before has to have been waited for."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._run, args=(job, device), name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self, job: Callable[[], None], device: torch.device) -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # threads begin with the first one
            job()
        except BaseException as error:
            self._error = error

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the job, if there is one; False where it is still running after `seconds`.

        Raises:
            BaseException: what the job raised, once.
        """
        if self._thread is None:
            return True
        self._thread.join(seconds)
        if self._thread.is_alive():
            return False
        error, self._thread, self._error = self._error, None, None
        if error is not None:
            raise error
        return True
