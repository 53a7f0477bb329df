"""Show in Lightning's progress bars which chunk of a long sequence is being computed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from lightning.pytorch.trainer.states import RunningStage

#: minimum time between two updates of a bar, in seconds
SECONDS = 0.5
#: names of Lightning's attributes by stage: (the TQDM bar, the Rich task's index without its suffix "_id")
BARS = {
    RunningStage.TRAINING: ("train_progress_bar", "train_progress_bar"),
    RunningStage.SANITY_CHECKING: ("val_progress_bar", "val_sanity_progress_bar"),
    RunningStage.VALIDATING: ("val_progress_bar", "val_progress_bar"),
    RunningStage.TESTING: ("test_progress_bar", "test_progress_bar"),
    RunningStage.PREDICTING: ("predict_progress_bar", "predict_progress_bar"),
}


class BarText(NamedTuple):
    """A bar's current text, the separator before an addition, and a function that replaces the text."""

    now: str
    joint: str
    write: Callable[[str], Any]


def bar_text(bar: ProgressBar | None, stage: RunningStage | None) -> BarText | None:
    """Return the text after the numbers of a stage's TQDM bar, or before its Rich bar; None without such a bar."""
    if stage is None or not isinstance(bar, (TQDMProgressBar, RichProgressBar)) or not bar.is_enabled:
        return None
    if isinstance(bar, TQDMProgressBar):
        line = getattr(bar, BARS[stage][0])
        return BarText(getattr(line, "postfix", None) or "", ", ", line.set_postfix_str)
    return None if bar.progress is None else _task_text(bar, bar.progress, getattr(bar, f"{BARS[stage][1]}_id"))


def _task_text(bar: RichProgressBar, progress: Any, number: int | None) -> BarText | None:
    task = next((x for x in progress.tasks if x.id == number), None)

    def write(text: str) -> None:
        progress.update(number, description=text, visible=True)
        bar.refresh()

    return None if task is None else BarText(task.description, " ", write)


class ChunkProgress:
    """Write progress such as "forward 12/1000" into the bar of the Trainer's stage; set it as `Stream.watch`.

    It works with enabled bars (on rank 0) of `RichProgressBar`, `TQDMProgressBar` and their subclasses. It does not
    wait for a GPU, so the shown chunk may be a few chunks ahead. Passes shorter than `SECONDS` are not shown.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer, self._drawn = trainer, 0.0
        self._text: BarText | None = None

    def __call__(self, name: str, done: int, total: int) -> None:
        """Show that `done` of `total` chunks of a pass are computed; `done` is 0 at the start of the pass."""
        now = time.monotonic()
        if done in (0, total):
            self._restore()
        elif now - self._drawn < SECONDS:
            return
        else:
            self._write(f"{name} {done:{len(str(total))}}/{total}")
        self._drawn = now

    def _write(self, chunk: str) -> None:
        if self._text is None:
            self._text = bar_text(self._trainer.progress_bar_callback, self._trainer.state.stage)
        if self._text is not None:
            self._text.write(self._text.joint.join(filter(None, (self._text.now.rstrip(), chunk))))

    def _restore(self) -> None:
        text, self._text = self._text, None
        if text is not None:
            text.write(text.now)
