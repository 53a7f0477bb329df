"""ActivationRecompute: less memory for activations, for some of the forward done twice."""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_dilated.models.blocks import TransformerBlock
from lightning_dilated.models.recompute import check_policy


class ActivationRecompute(pl.Callback):
    """Every transformer block computes its activations again in the backward; the gradients are the same.

    Args:
        policy: "block" keeps a block's input only; "attention-kept" also the output, log-sum-exp and exchanged rows of its
            attention, so that neither attention nor communication is done twice; "none" keeps all.

    Raises:
        ValueError: for another policy; and when a fit starts with a LightningModule that has no TransformerBlock.
    """

    def __init__(self, policy: str = "block") -> None:
        self.policy = check_policy(policy)
        self._before: list[tuple[TransformerBlock, str]] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tell the blocks."""
        found = [m for m in pl_module.modules() if isinstance(m, TransformerBlock)]
        if not found:
            raise ValueError(
                f"ActivationRecompute recomputes TransformerBlocks, and {type(pl_module).__name__} has none. Build it of "
                "lightning_dilated.models.blocks, or call torch.utils.checkpoint in its own blocks."
            )

        self._before = [(block, block.recompute) for block in found]
        for block in found:
            block.recompute = self.policy

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave the blocks as they were."""
        for block, policy in self._before:
            block.recompute = policy
        self._before = []
