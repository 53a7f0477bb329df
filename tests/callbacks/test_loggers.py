"""The loggers in docs/loggers.md: each is built from the page's YAML and receives a run's logs without a network.

A test is skipped if its logger's package is missing, because loggers are neither dependencies nor extras.
"""

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.cli import instantiate_class
from torch.utils.data import DataLoader

import lightning_dilated as ld
from lightning_dilated.callbacks import MemoryProfiler, RunReport

from ..models import trainer

pytestmark = pytest.mark.full

PAGE = (Path(__file__).parents[2] / "docs/loggers.md").read_text()
SHOWN = [yaml.safe_load(text)["logger"] for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.S)]
METRICS = {"train_loss", "val_loss", "memory/peak_mb"}


def trained(logger: Any, folder: Path) -> pl.Trainer:
    """Return a Trainer after four steps on random bytes, with callbacks that log values and write files."""
    model = ld.LongNetLM(ld.DilatedPattern.dense(), dim=16, depth=1, num_heads=2, max_seq_len=64)
    samples = [{"tokens": x[:-1], "labels": x[1:]} for x in torch.randint(256, (4, 65))]
    callbacks = [MemoryProfiler(every_n_steps=1), RunReport()]
    options = {"strategy": "ring_dilated", "devices": 1, "logger": logger, "default_root_dir": folder}
    run = trainer(max_steps=4, log_every_n_steps=1, callbacks=callbacks, num_sanity_val_steps=None, **options)
    run.fit(model, DataLoader(samples), DataLoader(samples[:1]))
    return run


def logged_by_tensorboard(logger: Any) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(logger.log_dir)
    events.Reload()
    return set(events.Tags()["scalars"])


def logged_by_wandb(logger: Any) -> set[str]:
    return set(dict(logger.experiment.summary))


def logged_by_mlflow(logger: Any) -> set[str]:
    return set(logger.experiment.get_run(logger.run_id).data.metrics)


READERS = {"tensorboard": logged_by_tensorboard, "wandb": logged_by_wandb, "mlflow": logged_by_mlflow}


def test_page_shows_all() -> None:
    assert [shown["class_path"].split(".")[-1] for shown in SHOWN] == [
        "TensorBoardLogger",
        "WandbLogger",
        "MLFlowLogger",
    ]


@pytest.mark.slow  # these packages and their databases are slow to import
@pytest.mark.parametrize("shown, package", list(zip(SHOWN, READERS, strict=True)), ids=list(READERS))
def test_run_is_logged(shown: dict[str, Any], package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(package, exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    logger = instantiate_class((), shown)
    trainer = trained(logger, tmp_path)
    assert READERS[package](logger) >= METRICS
    assert (Path(trainer.log_dir or tmp_path) / "loss.png").is_file()
