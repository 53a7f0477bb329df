"""A tiny language model, bytes to train it on, and a Trainer that writes no files, for all tests of models."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_dilated import DilatedPattern, LongNetLM
from lightning_dilated.data import ByteDataModule

PATTERN = DilatedPattern.longnet([4, 16], [1, 2])
SIZES = {"vocab_size": 11, "dim": 16, "depth": 2, "num_heads": 4}


def tiny(pattern: Any = PATTERN, dtype: torch.dtype = torch.float64, **options: Any) -> LongNetLM:
    """Build a LongNetLM in eval mode."""
    model = LongNetLM(pattern, **{**SIZES, **options})
    model.configure_model()
    return model.to(dtype).eval()


def batch(*shape: int, vocab_size: int = 11) -> dict[str, torch.Tensor]:
    """Draw random tokens (B, N) and their next tokens."""
    tokens = torch.randint(vocab_size, (shape[0], shape[1] + 1))
    return {"tokens": tokens[:, :-1].clone(), "labels": tokens[:, 1:].clone()}  # so that tests may change either one


def trainer(**options: Any) -> pl.Trainer:
    """Return a quiet Trainer, on the CPU by default."""
    quiet = {
        "accelerator": "cpu",
        "enable_model_summary": False,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(**{**quiet, **options})


def loader(*batches: Any) -> torch.utils.data.DataLoader:
    """Return a loader that yields these batches unchanged."""
    return torch.utils.data.DataLoader(list(batches), batch_size=None)


def text(folder: Path, size: int = 3000) -> ByteDataModule:
    """Write a file of `size` letters. Return a data module of 32-byte sequences."""
    path = folder / "text.txt"
    path.write_bytes(bytes(97 + (i * i) % 26 for i in range(size)))
    return ByteDataModule(str(path), seq_len=32, batch_size=2, val_limit=3)
