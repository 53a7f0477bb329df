"""Calls of the public API as in users' code, for the type checker only: pytest does not collect this file.

The checker fails if the type of a result degrades, or if a wrong call is no longer reported.
"""

from __future__ import annotations

from typing import assert_type

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor

import lightning_dilated as ld
from lightning_dilated.callbacks import ActivationRecompute, MemoryProfiler, ShardedCheckpoint, ThroughputMonitor
from lightning_dilated.data import ByteDataModule, ResumableLoader
from lightning_dilated.ext.explain.explanation import Explanation
from lightning_dilated.sequence import Place, Shard


def patterns() -> ld.DilatedPattern:
    """Create patterns in every way."""
    assert_type(ld.DilatedPattern([(2048, 1), (None, 4)]), ld.DilatedPattern)
    assert_type(
        ld.DilatedPattern((ld.Branch(2048, 1, shift=8), {"segment_length": 64, "dilation_rate": 2})), ld.DilatedPattern
    )
    assert_type(ld.DilatedPattern.geometric(256, 4096, offsets="blocked"), ld.DilatedPattern)
    assert_type(ld.DilatedPattern.head_groups([64, 128], [1, 2], num_heads=4), ld.DilatedPattern)
    assert_type(ld.DilatedPattern.dense(), ld.DilatedPattern)
    assert_type(ld.DilatedPattern.from_dict({"segment_lengths": [64], "dilation_rates": [1]}), ld.DilatedPattern)
    pattern = ld.DilatedPattern.longnet([2048, 8192], [1, 4])
    assert_type(pattern, ld.DilatedPattern)
    assert_type(pattern.shifted(0.5), ld.DilatedPattern)
    assert_type(pattern.branches, tuple[ld.Branch | ld.Window | ld.Global, ...])
    explanation = pattern.explain(65536, num_heads=8, depth=12, causal=True)
    assert_type(explanation, Explanation)
    assert_type(explanation.reach, float | None)
    assert_type(explanation.hints, tuple[str, ...])
    assert_type(explanation.flops(64), int)
    return pattern


def attention(q: Tensor, k: Tensor, v: Tensor, pattern: ld.DilatedPattern, flag: bool) -> None:
    """Call the op. The type of its result depends on `return_lse`."""
    assert_type(ld.dilated_attention(q, k, v, pattern, causal=True, lengths=[3, 4]), Tensor)
    assert_type(ld.dilated_attention(q, k, v, pattern, return_lse=False), Tensor)
    assert_type(ld.dilated_attention(q, k, v, pattern, return_lse=True), tuple[Tensor, Tensor])
    assert_type(ld.dilated_attention(q, k, v, pattern, return_lse=flag), Tensor | tuple[Tensor, Tensor])
    # wrong calls: if the checker accepted one, it would report an unused ignore comment
    ld.dilated_attention(q, k, v, [(2048, 1)])  # type: ignore[call-overload]
    ld.DilatedPattern.longnet(2048, 1)  # type: ignore[arg-type]
    layer = ld.MultiheadDilatedAttention(256, 8, pattern, position_encoding="rotary")
    assert_type(layer.forward(q), tuple[Tensor, None])
    assert_type(ld.DilatedAttention(pattern).forward(q, k, v), Tensor)


def recurrence(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> None:
    """Call the op. The type of its result depends on `return_state`."""
    assert_type(ld.recurrent_attention(q, k, v, gate, gate), Tensor)
    out, state = ld.recurrent_attention(q, k, v, kind="linear", segment=64, return_state=True)
    assert_type(out, Tensor)
    assert_type(state.detach(), ld.RecurrentState)
    assert_type(state.nbytes, int)


class OwnModel(ld.DilatedModule):
    """A model that a user defines."""

    sequence_spec = ld.SequenceSpec({"x": 1})

    def build(self) -> None:
        """Build one layer."""
        self.layer = ld.DilatedAttention(ld.DilatedPattern.dense())

    def loss_terms(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses and their number."""
        out = self.layer(batch["x"], batch["x"], batch["x"])
        return out.square().sum(), torch.tensor(out.shape[1])


def models(pattern: ld.DilatedPattern, tokens: Tensor) -> LightningModule:
    """Build models from patterns and from mappings."""
    model = ld.LongNetLM(pattern, dim=64, depth=2, num_heads=4)
    assert_type(model, ld.LongNetLM)
    assert_type(model.forward(tokens), Tensor)
    assert_type(model.generate(tokens, 8, temperature=0.0), Tensor)
    assert_type(model.token_mean({"tokens": tokens, "labels": tokens}), tuple[Tensor, Tensor])
    assert_type(ld.LongNetMLM({"segment_lengths": [64], "dilation_rates": [1]}).masked({}), tuple[Tensor, Tensor])
    assert_type(ld.SlideEncoder(feature_dim=1536).embed({}), Tensor)
    own: LightningModule = OwnModel(optimizer=torch.optim.SGD)
    return own


def training(model: LightningModule) -> None:
    """Create a run with a strategy, callbacks and data."""
    strategy = ld.RingDilatedStrategy(sequence_size=4, exchange="ring", layout="strided", bucket_cap_mb=25)
    plain: DDPStrategy = strategy
    sharded: ModelParallelStrategy = ld.RingDilatedFSDPStrategy(cpu_offload=True)
    callbacks = [ActivationRecompute("block"), ShardedCheckpoint(), ThroughputMonitor(), MemoryProfiler()]
    trainer = Trainer(strategy=strategy, callbacks=callbacks)
    assert_type(trainer, Trainer)
    assert_type(Trainer(strategy=sharded), Trainer)
    assert_type(Trainer(strategy=plain), Trainer)
    assert_type(strategy.sequence, ld.sequence.SequenceGroup)
    data = ByteDataModule(paths=["a.txt"], seq_len=4096)
    assert_type(data.train_dataloader(), ResumableLoader)
    trainer.fit(model, datamodule=data)


def sequences(loss: Tensor, batch: dict[str, Tensor]) -> None:
    """Use a loss on this rank's tokens, and the positions of tokens."""
    assert_type(ld.loss_share(loss, 3), Tensor)
    assert_type(ld.sequence.active_sequence(), ld.sequence.SequenceGroup | None)
    assert_type(Shard(1024, 4, "strided").ranges(0), tuple[range, ...])
    assert_type(Place(4, 0).ranges(1024), tuple[range, ...])
