"""Report a run: what its pattern sees, its validation next to a bigram baseline, and pictures of pattern and loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.table import Table
from torch import Tensor

#: metrics to report instead of the loss, in order of preference
UNITS = ("bits_per_byte", "bits_per_token")
#: maximum number of tokens of a drawn pattern
LONGEST_DRAWN = 1 << 17


class RunReport(pl.Callback):
    """Write `pattern.png` and `loss.png` into the run folder, and print validation next to a baseline.

    `pattern.png` shows the pattern of layer 0. Other patterns are in `pattern_layer_I.png`; I is their first layer.

    The baseline is the DataModule's `bigram_bits_per_byte("val")`, if it has this method: a bigram model counted on
    the training bytes and scored on the validation bytes.

    Args:
        pattern_picture: draw the model's pattern at the start of fit.
        loss_picture: draw the loss curves at the end of fit.
    """

    def __init__(self, pattern_picture: bool = True, loss_picture: bool = True) -> None:
        self.pattern_picture, self.loss_picture = pattern_picture, loss_picture
        self.train: list[tuple[int, Tensor]] = []
        self.val: list[tuple[int, float]] = []
        self.baseline: float | None = None
        self.unit = "loss"
        self.folder = Path()
        self._console = Console()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Set the folder to the logger's, or to the Trainer's root if there is no logger. Every rank must call this."""
        self.folder = Path(trainer.log_dir or trainer.default_root_dir)

    @rank_zero_only
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print what the pattern sees at the data's length, and draw it."""
        self.train, self.val = [], []
        self.folder.mkdir(parents=True, exist_ok=True)
        m: Any = pl_module
        causal = getattr(m, "causal", True)
        seq_len = getattr(getattr(trainer, "datamodule", None), "seq_len", None)
        if seq_len is None or not getattr(m, "patterns", None):
            return
        explanation = m.explain(seq_len)
        self._console.print(str(explanation), highlight=False)
        if self.pattern_picture:
            length = min(seq_len, LONGEST_DRAWN)
            for layer, pattern in enumerate(explanation.patterns):
                if pattern not in explanation.patterns[:layer]:
                    target = self.folder / (f"pattern_layer_{layer}.png" if layer else "pattern.png")
                    pattern.plot(length, m.num_heads, causal, str(target), num_kv_heads=m.num_kv_heads)

    @rank_zero_only
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Store the step's loss without waiting for the device; its value is read when the curve is drawn."""
        metrics = trainer.callback_metrics
        name = next((x for x in UNITS if f"train_{x}" in metrics), "loss")
        self.unit, value = name.replace("_", " "), metrics.get(f"train_{name}")
        if value is not None:
            self.train.append((trainer.global_step, value.detach().clone()))

    @rank_zero_only
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print bits per byte next to the baseline, or bits per token."""
        name = next((x for x in UNITS if f"val_{x}" in trainer.callback_metrics), "loss")
        value = trainer.callback_metrics.get(f"val_{name}") if name in UNITS else None
        if trainer.sanity_checking or value is None:
            return
        training = trainer.state.fn == "fit"
        if training:
            self.val.append((trainer.global_step, float(value)))
        data: Any = getattr(trainer, "datamodule", None)
        if self.baseline is None and name == UNITS[0] and hasattr(data, "bigram_bits_per_byte"):
            self.baseline = data.bigram_bits_per_byte("val")
        title = f"validation after step {trainer.global_step}" if training else "validation"
        table = Table(title=title, title_justify="left")
        table.add_column("model")
        table.add_column(name.replace("_", " "), justify="right")
        table.add_row(type(pl_module).__name__, f"{float(value):.3f}")
        if self.baseline is not None:
            table.add_row("bigram of the training bytes", f"{self.baseline:.3f}")
        self._console.print(table)

    @rank_zero_only
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw the loss curves, and print the paths of the folder and the best checkpoint."""
        if self.loss_picture and self.train:
            draw_loss(self.train, self.val, self.baseline, self.unit, self.folder / "loss.png")
        self._console.print(f"run folder: {self.folder}", highlight=False)
        best = getattr(trainer.checkpoint_callback, "best_model_path", "")
        if best:
            self._console.print(f"checkpoint: {best}", highlight=False)


def draw_loss(train: list[Any], val: list[Any], baseline: float | None, unit: str, path: Path) -> None:
    """Draw a PNG of the training curve, the validation points and the baseline."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained", dpi=120)
    axes = figure.subplots()
    axes.plot([s for s, _ in train], [float(x) for _, x in train], lw=0.8, alpha=0.7, label="training batch")
    if val:
        axes.plot([s for s, _ in val], [x for _, x in val], "o-", label="validation")
    if baseline is not None:
        axes.axhline(baseline, ls="--", c="gray", label="bigram baseline")
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path)
