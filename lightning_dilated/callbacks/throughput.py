"""ThroughputMonitor: tokens, sequences and batches a second, right where several ranks share a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch import callbacks
from lightning.pytorch.trainer.states import RunningStage
from typing_extensions import override

from lightning_dilated.models.blocks import TransformerBlock
from lightning_dilated.models.flops import step_flops

#: FLOP/s of dense products in 16 bits that Lightning's table lacks, or gives for sparse ones
PEAKS = {"NVIDIA H200": 989.4e12}


class ThroughputMonitor(callbacks.ThroughputMonitor):
    """Logs `train/items_per_sec` (tokens), `train/samples_per_sec` (sequences) and `train/batches_per_sec`, also of the
    other stages, and each `device/...`: the same divided by the ranks.

    Tokens are those of whole sequences, padding included. Lightning's own multiplies what one rank sees by all ranks, and so
    counts a sequence once for each rank that holds a part of it.

    With blocks of this package also `device/flops_per_sec`, from counted pairs (see `models.flops`), and on a GPU whose peak
    is known `device/mfu`, model FLOPs utilisation; a LightningModule with `flops_per_batch` says its own.

    Args:
        window_size: batches that an average runs over.

    Raises:
        ValueError: when a run starts without a `sequence_spec` on the LightningModule or the LightningDataModule.
    """

    def __init__(self, window_size: int = 10) -> None:
        super().__init__(batch_size_fn=self.samples_of, length_fn=self.tokens_of, window_size=window_size)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Lightning's, with a sequence counted once."""
        super().setup(trainer, pl_module, stage)
        found = [getattr(x, "sequence_spec", None) for x in (trainer.datamodule, pl_module)]  # type: ignore[attr-defined]
        spec = next((x for x in found if x is not None), None)
        if spec is None:
            raise ValueError(
                "ThroughputMonitor counts tokens by `sequence_spec`: set it on the LightningModule, such as "
                'SequenceSpec({"tokens": 1}).'
            )
        self._dims = spec.dims
        self._sequence = getattr(trainer.strategy, "sequence", None)
        self._own_flops = hasattr(pl_module, "flops_per_batch")
        ranks = 1 if self._sequence is None else self._sequence.ranks
        for name in self._throughputs:
            self._throughputs[name] = _Shared(
                ranks,
                available_flops=_peak(trainer) or self.available_flops,
                world_size=trainer.world_size // ranks,
                **self.kwargs,
            )

    @override
    def _update(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, iter_num: int) -> None:
        """Lightning's, which asks the module for the FLOPs of a batch."""
        blocks = not self._own_flops and any(isinstance(m, TransformerBlock) for m in pl_module.modules())
        self._module_has_flops = self._own_flops or blocks
        if blocks:
            tokens, training = self.tokens_of(batch), trainer.state.stage == RunningStage.TRAINING
            pl_module.flops_per_batch = step_flops(pl_module, tokens, self._documents(batch, tokens), training)
        try:
            super()._update(trainer, pl_module, batch, iter_num)
        finally:
            if blocks:
                del pl_module.flops_per_batch

    def _documents(self, batch: Any, tokens: int) -> list[int]:
        """Tokens of each document or unpadded sample."""
        given = batch if isinstance(batch, Mapping) else {}
        if given.get("cu_seqlens") is not None:
            return given["cu_seqlens"].diff().tolist()
        if given.get("lengths") is not None:
            return torch.as_tensor(given["lengths"]).tolist()
        samples = self.samples_of(batch)
        return [tokens // samples] * samples if samples else []

    def _entry(self, batch: Any) -> tuple[torch.Tensor, int]:
        """(an entry that runs over the tokens, its dimension that does)."""
        entries = dict(enumerate(batch)) if isinstance(batch, (list, tuple)) else batch
        for name, dim in self._dims.items():
            if name in entries:
                return entries[name], dim % entries[name].ndim
        raise ValueError(f"ThroughputMonitor finds none of {list(self._dims)} in a batch with {list(entries)}.")

    def samples_of(self, batch: Any) -> int:
        """Sequences of a batch."""
        x, dim = self._entry(batch)
        return x.shape[0] if dim else x.shape[1] if x.ndim > 1 else 1

    def tokens_of(self, batch: Any) -> int:
        """Tokens of the whole sequences that a batch holds a part of."""
        x, dim = self._entry(batch)
        length = x.shape[dim]
        if self._sequence is not None and self._sequence.ranks > 1:
            agreed = self._sequence.agreed  # of the step's last call: exact for ragged sequences, too
            mine = agreed is not None and agreed.lengths[self._sequence.rank] == length
            length = agreed.seq_len if mine else length * self._sequence.ranks
        return self.samples_of(batch) * length


class _Shared(Throughput):
    """Counts of one data rank whose sequences `ranks` devices share."""

    def __init__(self, ranks: int, **options: Any) -> None:
        super().__init__(**options)
        self.ranks = ranks

    def compute(self) -> dict[str, float]:
        """Lightning's rates of all data ranks; what is a device's own is a part of its sequence's."""
        found = super().compute()
        own = f"device{self.separator}"
        for name in [x for x in found if x.startswith(own)]:
            if self.world_size == 1 and name != f"{own}mfu":  # Lightning leaves these out for a world of one
                found[name.removeprefix(own)] = found[name]
            found[name] /= self.ranks
        return found


def _peak(trainer: pl.Trainer) -> float | None:
    """FLOP/s of the device in 16 bits, where that is what the run computes in and Lightning's own number is wrong."""
    device, precision = trainer.strategy.root_device, str(getattr(trainer.precision_plugin, "precision", ""))
    narrow = device.type == "cuda" and precision.startswith(("bf16", "16"))
    return PEAKS.get(torch.cuda.get_device_name(device)) if narrow else None
