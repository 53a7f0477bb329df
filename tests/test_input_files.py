"""Every reader refuses a fifo, a device or a folder in place of a file, without blocking."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_dilated import DilatedPattern, LongNetLM, SlideEncoder
from lightning_dilated.callbacks import ShardedCheckpoint
from lightning_dilated.checkpoint.reader import load_file
from lightning_dilated.cli.load_model import load_any, read_checkpoint
from lightning_dilated.data import ByteDataModule, Genome, SlideDataModule, TokenDataModule, read_variants
from lightning_dilated.data.opener import FileOpener
from lightning_dilated.ext.decoding.command import parsed
from lightning_dilated.ext.decoding.load import stored_tokenizer
from lightning_dilated.ext.explain import command as explain
from lightning_dilated.ext.export.torchscale import read_state_dict
from lightning_dilated.ext.genomes.regions import read_bed
from lightning_dilated.ext.planning import plan_request
from lightning_dilated.ext.pooled import folds
from lightning_dilated.ext.slides.files import SlideReader
from lightning_dilated.ext.slides.heat_maps import _open_thumbnail
from lightning_dilated.ext.slides.labels import Columns, read_rows
from lightning_dilated.ext.text.records import open_rows
from lightning_dilated.ext.text.template import template_text
from lightning_dilated.ext.text.tokenizer import load_tokenizer
from lightning_dilated.sequence.links import Links


def model() -> LongNetLM:
    return LongNetLM(DilatedPattern.longnet([8], [1]), dim=16, depth=1, num_heads=2)


READERS: dict[str, Callable[[str], Any]] = {
    "load_from_checkpoint": LongNetLM.load_from_checkpoint,
    "a trusted checkpoint": lambda path: LongNetLM.load_from_checkpoint(path, weights_only=False),
    "from_pretrained": LongNetLM.from_pretrained,
    "load_file": load_file,
    "a command's checkpoint": read_checkpoint,
    "a command's model": load_any,
    "a checkpoint's tokenizer": stored_tokenizer,
    "slide weights": lambda path: SlideEncoder(pretrained=path).configure_model(),
    "torchscale": read_state_dict,
    "text": lambda path: ByteDataModule(path, 8).check(),
    "tokens": lambda path: TokenDataModule(path, 8, 256).check(),
    "slides": lambda path: SlideDataModule(path).check(),
    "a slide": lambda path: SlideReader().inspect(path),
    "labels": lambda path: read_rows(path, Columns()),
    "genome": lambda path: Genome([path]),
    "vcf": read_variants,
    "bed": lambda path: read_bed(path, []),
    "rows": lambda path: open_rows([path], "paths"),
    "opened": lambda path: FileOpener().open(path),
    "tokenizer": load_tokenizer,
    "thumbnail": _open_thumbnail,
    "links": Links.load,
    "explain": lambda path: explain.sizes_of_recipe(Path(path)),
    "plan": lambda path: plan_request._recipe(Path(path)),
    "generate": lambda path: parsed(["--config", path]),
    "metrics": lambda path: folds.read_metrics(Path(path)),
    "template": template_text,
}


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    """Make a test fail if it blocks on a fifo."""

    def late(*args: Any) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("suffix", ["", ".h5", ".pt", ".npy"])
def test_a_fifo_is_refused_at_once(name: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"fifo{suffix}"
    os.mkfifo(path)
    with pytest.raises((ValueError, OSError), match=r"fifo"):
        READERS[name](str(path))


@pytest.mark.parametrize("name", [x for x in READERS if x not in ("text", "tokens", "slides", "rows", "genome")])
def test_a_device_is_refused_at_once(name: str) -> None:
    with pytest.raises((ValueError, OSError), match=r"/dev/zero"):
        READERS[name]("/dev/zero")


@pytest.mark.parametrize("strategy", ["auto", "ring_dilated", "ring_dilated_fsdp"])
@pytest.mark.parametrize("task", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize("callback", [False, True])
def test_a_trainer_refuses_a_fifo(strategy: str, task: str, callback: bool, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    os.mkfifo(path)
    (tmp_path / "a.txt").write_text("hello " * 500)
    callbacks = [ShardedCheckpoint(tmp_path / "out")] if callback else []
    options = {"logger": False, "enable_progress_bar": False, "max_steps": 1, "enable_checkpointing": callback}
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, callbacks=callbacks, **options)
    with pytest.raises(ValueError, match=r"x\.ckpt is neither a regular file nor a directory"):
        getattr(trainer, task)(
            model(), ByteDataModule(str(tmp_path / "a.txt"), 32, 1, test_fraction=0.2), ckpt_path=str(path)
        )


@pytest.mark.parametrize("strategy", ["auto", "ring_dilated"])
def test_a_trainer_refuses_a_folder(strategy: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello " * 500)
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_progress_bar=False)
    (tmp_path / "folder").mkdir()
    with pytest.raises((ValueError, OSError), match="folder"):
        trainer.validate(model(), ByteDataModule(str(tmp_path / "a.txt"), 32, 1), ckpt_path=str(tmp_path / "folder"))
