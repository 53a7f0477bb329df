"""Private APIs of Lightning, each behind a name that says what it uses and for which versions that is known to hold."""

from __future__ import annotations

import lightning.pytorch as pl


# -- the memory profiler -----------------------------------------------------------------------------------------------
def logged_step(trainer: pl.Trainer) -> int:
    """The step that Lightning logs this batch's values with: `_TrainingEpochLoop._batches_that_stepped`; 2.6.6."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped
