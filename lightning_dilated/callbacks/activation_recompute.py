"""ActivationRecompute: less memory for activations, for some of the forward done twice."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn

from lightning_dilated._device import leave_room
from lightning_dilated._extensions import hook
from lightning_dilated.memory.block_memory import Adjustable, StackMemory, set_memory
from lightning_dilated.memory.settings import MemorySettings, check_shared
from lightning_dilated.sequence.group import SequenceGroup


class ActivationRecompute(pl.Callback):
    """Transformer blocks keep less for the backward, and compute it again; the gradients are the same.

    Args:
        policy: "block" keeps a block's input only; "attention-kept" also the output, log-sum-exp and exchanged rows of its
            attention, so that neither attention nor communication is done twice; "none" keeps all.
        every: with "block": keep the input of every so-many-th block only. A group is computed again before its blocks are,
            so most blocks run forward three times.
        offload: kept block inputs wait in pinned host memory, copied beside the computation: a fraction of them (up to 1),
            or as many as fit into so many GiB of each rank (above 1).
        tile: norms, feed-forward, and the loss of models over tokens run over so many tokens at a time, with explicit
            gradients, so that nothing of tokens x hidden features or tokens x vocabulary exists. The feed-forward is then
            computed twice with every policy.
        head_chunks: windows of heads that attend one after another, so that q, k and v (and gradients) of all never exist
            together. They are projected three times, four with a policy. Not with LoRA.
        stream: tokens of a chunk of each sequence. Sequences that are longer are computed chunk by chunk, once forward and
            once more with the backward; memory is then that of one chunk, and of the keys and values that later chunks
            read. Other settings act on a chunk. Loss and gradients are those of one pass; hidden dropout draws other masks
            than one pass would. LongNetLM only. Ranks stream sequences of their own (sequence_size=1), or share every chunk
            (the strategy's layout="chunked"). Validation, test and predict stream as well.
            Lightning's progress bars show the chunk that is computed.
        truncate: with `stream`: gradients end at the bounds of chunks (truncated back-propagation through time), which are
            then computed once. The loss is that of one pass, the gradients are not.

    Raises:
        ValueError: for other values; and when a run starts with a LightningModule that has no TransformerBlock, for
            `every` and `offload`, no DilatedTransformer, or for `stream`, is no causal language model.
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
        self._before: list[tuple[Adjustable, MemorySettings]] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Raise where two of these would change one model."""
        if sum(isinstance(x, ActivationRecompute) for x in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError("ActivationRecompute is given twice: put all settings into one.")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Hand the settings to the model."""
        self._set(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Long sequences are evaluated chunk by chunk, too; within a fit the settings are set."""
        if self.settings.stream is not None and trainer.state.fn != TrainerFn.FITTING:
            self._set(trainer, pl_module)

    on_test_start = on_predict_start = on_validation_start

    def _set(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._refuse_shared(trainer)
        self.teardown(trainer, pl_module, "")  # which Lightning does not call for a run that failed
        self._before = set_memory(pl_module, self.settings)
        streams = self.settings.stream is not None
        self._watch(hook("progress of chunks")(trainer) if streams and trainer.is_global_zero else None)

    def _watch(self, progress: Any) -> None:
        for m, _ in self._before:
            if isinstance(m, StackMemory) and self.settings.stream is not None:
                m.stream.watch = progress

    def _refuse_shared(self, trainer: pl.Trainer) -> None:
        """Raise where a stream would need rows that it has no way to, or weights, of other ranks."""
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
                'chunk. Take RingDilatedStrategy (layout="chunked", or sequence_size=1), whose ranks hold all weights, or '
                "leave stream out."
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave GPU memory for others than torch, which would otherwise take all of it."""
        leave_room(trainer.strategy.root_device)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Free host memory: Lightning is about to move model, gradients and optimizer states there."""
        for m, _ in self._before:
            if isinstance(m, StackMemory):
                m.free_host_memory()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Likewise, so that a failed job ends with its own error, and not for lack of host memory."""
        self.on_train_end(trainer, pl_module)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the model back the settings that it had."""
        self._watch(None)
        for m, settings in self._before:
            m.memory = settings
        self._before = []
