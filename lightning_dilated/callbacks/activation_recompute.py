"""ActivationRecompute saves activation memory by computing a part of the forward twice."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn

from lightning_dilated._device import leave_room
from lightning_dilated._extensions import hook
from lightning_dilated.memory.block_memory import HasMemorySettings, StackMemory, set_memory
from lightning_dilated.memory.settings import MemorySettings, check_shared
from lightning_dilated.sequence.group import SequenceGroup


class ActivationRecompute(pl.Callback):
    """Saves fewer activations of transformer blocks for the backward, and recomputes the others; gradients are the same.

    Args:
        policy: "block" saves only a block's input. "attention-kept" also saves the attention's output, log-sum-exp and
            exchanged rows, so that neither attention nor communication is repeated. "none" saves all activations.
        every: with "block", save only the input of every n-th block. The backward recomputes a group of n blocks, and
            then each of its blocks again, so most blocks run forward three times.
        offload: the part of the saved block inputs to store in pinned host memory, by copies during the computation. A
            value up to 1 is a fraction of the inputs; a value above 1 is a limit in GiB on each rank.
        tile: number of tokens for which norms, feed-forward, and the loss of models over tokens are computed at a time, with
            explicit gradients, so that no tensor of tokens x hidden features or tokens x vocabulary exists. The feed-forward
            is then computed twice with every policy.
        head_chunks: number of chunks of heads that attend one by one, so that q, k, v and their gradients exist for
            one chunk at a time. The backward projects them again: once with policy "none", else twice. Not with LoRA.
        stream: number of tokens in a chunk. Longer sequences are computed chunk by chunk, forward and again in the
            backward. Memory holds one chunk, and the keys and values that later chunks read. Other settings apply to a
            chunk. Loss and gradients are as in one pass, except that hidden dropout draws different masks. Only for
            LongNetLM. Each rank streams its own sequences (sequence_size=1), or ranks share every chunk (the strategy's
            layout="chunked"). Validation, test and predict also stream. Progress bars show the current chunk.
        truncate: with `stream`, stop gradients at the boundaries of chunks (truncated back-propagation through time),
            and compute each chunk once. The loss is the same as in one pass, but the gradients differ.

    Raises:
        ValueError: for other values. When a run starts, also for a model without a TransformerBlock, for `every` and
            `offload` without a DilatedTransformer, and for `stream` without a causal language model.
    """

    def __init__(
        self,
        policy: str = "block",
        every: int = 1,
        offload: float = 0.0,
        tile: int | None = None,
        head_chunks: int = 1,
        stream: int | None = None,
        truncate: bool = False,
    ) -> None:
        self.settings = MemorySettings(policy, every, offload, tile, head_chunks, stream, truncate)
        self._before: list[tuple[HasMemorySettings, MemorySettings]] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Raise if the Trainer has two of these callbacks."""
        if sum(isinstance(x, ActivationRecompute) for x in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError("ActivationRecompute is given twice: put all settings into one.")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Apply the settings to the model."""
        self._set(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stream long sequences in an evaluation; during a fit the settings are already applied."""
        if self.settings.stream is not None and trainer.state.fn != TrainerFn.FITTING:
            self._set(trainer, pl_module)

    on_test_start = on_predict_start = on_validation_start

    def _set(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._refuse_shared(trainer)
        self.teardown(trainer, pl_module, "")  # Lightning does not call teardown after a failed run
        self._before = set_memory(pl_module, self.settings)
        streams = self.settings.stream is not None
        self._watch(hook("progress of chunks")(trainer) if streams and trainer.is_global_zero else None)

    def _watch(self, progress: Any) -> None:
        for m, _ in self._before:
            if isinstance(m, StackMemory) and self.settings.stream is not None:
                m.stream.watch = progress

    def _refuse_shared(self, trainer: pl.Trainer) -> None:
        """Raise ValueError for a stream if ranks share sequences without sharing its chunks, or if they share weights."""
        stream, strategy = self.settings.stream, getattr(trainer, "strategy", None)
        if stream is None:
            return
        sizes = getattr(strategy, "sizes", None)
        if sizes is not None and sizes.sequence_size > 1:
            group: SequenceGroup = trainer.strategy.sequence  # type: ignore[attr-defined]
            check_shared(stream, group.layout, group.stream)
        if isinstance(strategy, (ModelParallelStrategy, FSDPStrategy)):
            raise ValueError(
                f"stream={stream} is not offered with {type(strategy).__name__}, which would gather all weights for every "
                'chunk. Take RingDilatedStrategy (layout="chunked", or sequence_size=1): its ranks hold all weights. Or '
                "leave stream out."
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave some GPU memory for other libraries; otherwise torch would allocate all of it."""
        leave_room(trainer.strategy.root_device)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Free host memory before Lightning moves model, gradients and optimizer states there."""
        for m, _ in self._before:
            if isinstance(m, StackMemory):
                m.free_host_memory()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Free host memory, so that a failed job ends with its own error instead of running out of memory."""
        self.on_train_end(trainer, pl_module)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restore the model's earlier settings."""
        self._watch(None)
        for m, settings in self._before:
            m.memory = settings
        self._before = []
