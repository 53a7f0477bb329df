"""A rank of a trial: the recipe's model, strategy and memory settings on random samples, two steps.

Run by `find_max.trials`: python -m lightning_dilated.find_max.worker JSON --config RECIPE ...
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_dilated.callbacks import ActivationRecompute
from lightning_dilated.callbacks.memory.host import host_memory
from lightning_dilated.find_max.samples import Samples

#: how torch, CUDA, NCCL and cuBLAS say, besides by torch.OutOfMemoryError, that a GPU's or the host's memory is at its end
WORDS = (
    "can't allocate memory",
    "cannot allocate memory",
    "cudaerrormemoryallocation",
    "out of memory",
    "alloc_failed",
)


class _Steps(pl.Callback):
    """Seconds of the last step; on a GPU it waits for the device."""

    seconds = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, *unused: Any) -> None:
        """The clock starts."""
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *unused: Any) -> None:
        """The clock stops."""
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self.began


def train(told: dict[str, Any], arguments: list[str]) -> dict[str, Any]:
    """Two steps, what they took, and what a recipe says of the length."""
    from lightning_dilated.cli import DilatedCLI

    steps = _Steps()
    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options |= {
        "max_steps": 2,
        "max_epochs": None,
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
            return super().instantiate_trainer(**{**kwargs, **options, "callbacks": [*kept, steps]})

        def check_data(self) -> None:
            """The recipe's own are not read, and may be too short for its sequences."""

    cli = Attempt(run=False, args=arguments, save_config_callback=None)
    data = Samples(cli.model, told["tokens"])
    cli.trainer.fit(cli.model, DataLoader(data, batch_size=1))
    found = {"seconds": steps.seconds, "allocated": 0, "reserved": 0, "line": data.line}
    host = host_memory()
    found |= {"host": host["host_peak"], "pinned": host["pinned"] or 0}
    if cli.trainer.strategy.root_device.type == "cuda":
        found |= {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    return found


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
    """Train, and leave a file that says how it went."""
    if told["limit"] is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (int(told["limit"] * 2**30),) * 2)
    try:
        said = train(told, arguments)
    except (torch.OutOfMemoryError, MemoryError) as error:
        said = {"missing": str(error).splitlines()[0] if str(error) else type(error).__name__}
    except RuntimeError as error:
        if not any(words in str(error).lower() for words in WORDS):
            raise
        said = {"missing": f"{str(error).splitlines()[0]} (in {_where(error)}{_free()})"}
    place = Path(told["folder"]) / f"{os.environ.get('RANK', 0)}.json"
    place.with_suffix(".part").write_text(json.dumps(said))
    place.with_suffix(".part").rename(place)
    sys.stdout.flush()
    os._exit(0)  # past destructors that would wait for ranks which are no longer there


if __name__ == "__main__":
    given, sys.argv = sys.argv, sys.argv[:1]  # LightningCLI is told its arguments, and warns of any others
    asked = json.loads(given[1])
    threading.Thread(target=_end_with, args=(asked["parent"],), daemon=True).start()
    main(asked, given[2:])
