"""A user's DilatedModule with its own __init__, batches, and a head that this package does not have."""

import torch
from torch import nn

import lightning_dilated as ld
from lightning_dilated.models.blocks import BlockOptions
from lightning_dilated.models.transformer import DilatedTransformer


class Signals(ld.DilatedModule):
    """Predicts the next value of a signal with several channels."""

    sequence_spec = ld.sequence.SequenceSpec({"signal": 1, "target": 1})

    def __init__(self, width_of_a_head: int = 8, channels: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.channels, self.depth, self.num_heads, self.dim = channels, 3, 2, 2 * width_of_a_head
        self.pattern = ld.DilatedPattern.longnet([64, 128], [1, 2])

    def build(self):
        self.enter = nn.Linear(self.channels, self.dim)
        options = BlockOptions("layernorm", position_encoding="none")  # layernorm has the same parts on all devices
        self.transformer = DilatedTransformer(self.dim, self.patterns, self.num_heads, causal=True, options=options)
        self.leave = nn.Linear(self.dim, self.channels)

    def example_batch(self, tokens):
        signal = torch.randn(1, tokens, self.channels)
        return {"signal": signal, "target": signal.roll(-1, 1)}

    def loss_terms(self, batch):
        self.configure_model()
        x = self.leave(self.transformer(self.enter(batch["signal"])))
        return (x - batch["target"]).square().mean(-1).sum(), batch["target"][..., 0].numel()


class OwnInit(ld.LongNetLM):
    """A model of the package with an __init__ that has none of its argument names."""

    def __init__(self, size: int = 1) -> None:
        pattern = {"segment_lengths": [64, 128], "dilation_rates": [1, 2]}
        super().__init__(pattern, dim=32 * size, depth=3, num_heads=4, norm="layernorm", position_encoding="none")
