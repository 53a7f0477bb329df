"""A rank of a trial: the recipe's model, strategy and memory settings on random samples, two steps.

Run by `find_max.trials`: python -m lightning_dilated.cli.find_max.worker JSON --config RECIPE ...
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_dilated.callbacks import ActivationRecompute
from lightning_dilated.callbacks.memory.host import host_memory
from lightning_dilated.cli.find_max.samples import Samples

#: how torch, CUDA, NCCL and cuBLAS say, besides by torch.OutOfMemoryError, that a GPU's or the host's memory is at its end
WORDS = (
    "can't allocate memory",
    "cannot allocate memory",
    "cudaerrormemoryallocation",
    "out of memory",
    "alloc_failed",
)
#: of a trial: the first has no optimizer states yet
STEPS = 2


class _Steps(pl.Callback):
    """Seconds of each step; on a GPU they wait for the device. After the second, or where memory is at its end, the process
    leaves: past Lightning's teardown, which moves model, gradients and optimizer states to the host.

    Args:
        leave: is told how it went.
    """

    def __init__(self, leave: Callable[[dict[str, Any]], None]) -> None:
        self.leave = leave

    def on_train_batch_start(self, trainer: pl.Trainer, *unused: Any) -> None:
        """The clock starts."""
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *unused: Any) -> None:
        """The clock stops."""
        on_gpu = trainer.strategy.root_device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self.began
        if trainer.global_step < STEPS:
            return
        host = host_memory()
        found = {"seconds": seconds, "host": host["host_peak"], "pinned": host["pinned"] or 0}
        found |= {"allocated": torch.cuda.max_memory_allocated() if on_gpu else 0}
        found |= {"reserved": torch.cuda.max_memory_reserved() if on_gpu else 0}
        trainer.strategy.barrier()  # a rank that is gone would end those which still compute
        self.leave(found)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Say what was missing."""
        if (words := _missing(exception)) is not None:
            self.leave({"missing": words})


def train(told: dict[str, Any], arguments: list[str]) -> None:
    """Two steps; what they took, and what a recipe says of the length, is left in a file."""
    from lightning_dilated.cli.lightning_cli import DilatedCLI

    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options |= {
        "max_steps": STEPS,
        "max_epochs": None,
        "max_time": None,
        "fast_dev_run": False,
        "limit_train_batches": None,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "devices": told["ranks"],
    }

    class Attempt(DilatedCLI):
        """The recipe's classes, its Trainer with these options and no other callbacks than those of memory."""

        def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
            """Without what writes files."""
            callbacks = self._get(self.config_init, "trainer", default={}).get("callbacks") or []
            kept = [c for c in callbacks if isinstance(c, ActivationRecompute)]
            return super().instantiate_trainer(**{**kwargs, **options, "callbacks": [steps, *kept]})

        def check_data(self) -> None:
            """The recipe's own are not read, and may be too short for its sequences."""

    steps = _Steps(lambda said: _leave(told, {"line": data.line, **said}))
    cli = Attempt(run=False, args=arguments, save_config_callback=None)
    data = Samples(cli.model, told["tokens"])
    cli.trainer.fit(cli.model, DataLoader(data, batch_size=1))


def _leave(told: dict[str, Any], said: dict[str, Any]) -> None:
    """Leave a file that says how it went, and this process."""
    place = Path(told["folder"]) / f"{os.environ.get('RANK', 0)}.json"
    place.with_suffix(".part").write_text(json.dumps(said))
    place.with_suffix(".part").rename(place)
    sys.stdout.flush()
    os._exit(0)  # past destructors that would wait for ranks which are no longer there


def _missing(error: BaseException) -> str | None:
    """What an error says of memory at its end; None of any other."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, RuntimeError) and any(words in str(error).lower() for words in WORDS):
        return f"{str(error).splitlines()[0]} (in {_where(error)}{_free()})"
    return None


def _where(error: BaseException) -> str:
    """The last line of ours that an error passed: torch's own words do not say what was being done."""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [f for f in frames if "lightning_dilated" in Path(f.filename).parts] or frames
    return f"{Path(mine[-1].filename).name}:{mine[-1].lineno}, {mine[-1].name}"


def _free() -> str:
    """What the GPU had left; torch's allocator says so by itself, others do not."""
    if not torch.cuda.is_initialized():
        return ""
    try:
        free, held = torch.cuda.mem_get_info()[0] / 2**30, torch.cuda.memory_reserved() / 2**30
    except RuntimeError:  # after some errors CUDA answers nothing but the same error
        return ""
    return f"; {free:.2f} GiB of the GPU were free, {held:.2f} GiB were with torch's allocator"


def _end_with(parent: int) -> None:
    """Leave when the process that started this one is gone, however it went: a GPU would stay full for nobody."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main(told: dict[str, Any], arguments: list[str]) -> None:
    """Train; a file says how it went."""
    if told["limit"] is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (int(told["limit"] * 2**30),) * 2)
    try:
        train(told, arguments)
    except (RuntimeError, MemoryError) as error:
        if (words := _missing(error)) is None:
            raise
        _leave(told, {"missing": words})
    raise RuntimeError(f"training ended before {STEPS} steps were done.")


if __name__ == "__main__":
    given, sys.argv = sys.argv, sys.argv[:1]  # LightningCLI is told its arguments, and warns of any others
    asked = json.loads(given[1])
    threading.Thread(target=_end_with, args=(asked["parent"],), daemon=True).start()
    main(asked, given[2:])
