"""Short runs with a ShardedCheckpoint, in this process or in workers. They return losses, parameters and messages."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_dilated import LongNetLM
from lightning_dilated.data import ByteDataModule
from lightning_dilated.ext.checkpoints.sharded_checkpoint import ShardedCheckpoint

from ...models import PATTERN
from ...strategy.runs import Record, full, launched


def write_text(folder: Path) -> str:
    """Write a folder with one file of 4000 random bytes."""
    (folder / "text").mkdir()
    rng = torch.Generator().manual_seed(0)
    (folder / "text" / "a").write_bytes(bytes(torch.randint(0, 256, (4000,), generator=rng).tolist()))
    return str(folder / "text")


def halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a learning rate schedule that changes the rate visibly within three steps."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def run(
    text: str,
    steps: int,
    *callbacks: pl.Callback,
    strategy: str = "auto",
    world: int = 1,
    ckpt_path: Any = None,
    begun: int = 1,
    model: type = LongNetLM,
    accelerator: str = "cpu",
    keep: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Fit in float64 up to a step. `begun` seeds the initial weights. Return the results."""
    pl.seed_everything(1, verbose=False)
    torch.manual_seed(begun)  # a resumed run uses another seed: otherwise equal parameters could be the initial ones
    record = Record()
    module = model(PATTERN, dim=16, depth=1, lr_scheduler=halved).double()
    data = ByteDataModule(text, seq_len=64, batch_size=2, val_fraction=0, test_fraction=0)
    options.setdefault("enable_checkpointing", any(isinstance(c, ShardedCheckpoint) for c in callbacks))
    trainer = pl.Trainer(
        accelerator=accelerator, devices=world, strategy=strategy, max_steps=steps, callbacks=[record, *callbacks],
        logger=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, **options,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(module, data, ckpt_path=ckpt_path)
    if keep is not None:
        keep.update(trainer=trainer, module=module, data=data)
    return {
        "losses": record.losses,
        "step": trainer.global_step,
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "parameters": torch.cat([full(p).detach().flatten().cpu().clone() for p in module.parameters()]),
        "said": [str(w.message) for w in said],
    }


def on_rank(rank: int, group: Any, text: str, steps: int, saved: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """Call `run` on a worker, with a ShardedCheckpoint unless `saved`, its arguments, is None."""
    callbacks = [] if saved is None else [ShardedCheckpoint(**saved)]
    return run(text, steps, *callbacks, world=launched(rank), **more)


def with_options(rank: int, group: Any, text: str, steps: int, saved: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Call `on_rank` with positional arguments only, because the pool passes no keywords."""
    return on_rank(rank, group, text, steps, saved, **options)


#: number of optimizer steps of the reference run on one device
STEPS = 6


def names(folder):
    """List the names in a folder."""
    return sorted(p.name for p in folder.iterdir())


def check_equal(whole, *parts):
    """Assert that the parts of an interrupted run equal the uninterrupted run bit by bit."""
    assert [x for part in parts for x in part["losses"]] == pytest.approx(whole["losses"], rel=1e-12)
    torch.testing.assert_close(parts[-1]["parameters"], whole["parameters"], rtol=0, atol=0)
    assert (parts[-1]["step"], parts[-1]["rate"]) == (whole["step"], whole["rate"])
