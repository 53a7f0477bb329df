"""Modules with exactly known memory: blocks of a Linear of 8 without bias and a Tanh, on batches of (4, 8) floats.

The weight of a block has 256 bytes, its input and output 128 each. Tanh saves its output for the backward.
"""

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from torch.utils.checkpoint import checkpoint

ROWS, WEIGHT, ACTIVATION = 4, 256, 128
#: upper bound in bytes of the loss, and of the scalars that Lightning stores of it
SCALARS = 64


class Block(nn.Module):
    """Computes tanh(W x). The forward calls `fails` with the output of the block."""

    def __init__(self):
        super().__init__()
        self.linear, self.fails = nn.Linear(8, 8, bias=False), None

    def forward(self, x):
        out = torch.tanh(self.linear(x))
        return out if self.fails is None else self.fails(out)


class Stack(pl.LightningModule):
    """`depth` blocks. `again`: kind of checkpoint with which the module recomputes them, "reentrant" or "other", or None."""

    def __init__(self, depth=2, again=None):
        super().__init__()
        torch.manual_seed(3)
        self.layers, self.again = nn.ModuleList(Block() for _ in range(depth)), again

    def forward(self, x):
        x = x.detach().requires_grad_(self.again == "reentrant")
        for layer in self.layers:
            x = layer(x) if self.again is None else checkpoint(layer, x, use_reentrant=self.again == "reentrant")
        return x

    def training_step(self, batch, batch_idx):
        return self(batch).sum()

    def validation_step(self, batch, batch_idx):
        self(batch.repeat(1000, 1))

    def on_validation_model_zero_grad(self):
        """Keep the gradients, which Lightning's method would free."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class Kept(DummyLogger):
    """Stores the numbers that a profiler logs under a prefix."""

    def __init__(self, prefix="memory/"):
        super().__init__()
        self.prefix, self.steps = prefix, {}

    def log_metrics(self, metrics, step=None):
        numbers = {name: x for name, x in metrics.items() if name.startswith(self.prefix)}
        assert not (numbers and step in self.steps)
        self.steps.update({step: numbers} if numbers else {})


class Losses(pl.Callback):
    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, module, outputs, *args):
        self.losses.append(outputs["loss"].item())


def batches(n, rows=ROWS):
    """Return n batches: ones, times 1, 2, ..."""
    return [torch.ones(rows, 8) * (i + 1) for i in range(n)]
