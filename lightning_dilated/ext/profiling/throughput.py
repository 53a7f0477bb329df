"""Measure tokens, sequences and batches a second; each sequence counts once, even if several ranks share it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch import callbacks
from lightning.pytorch.trainer.states import RunningStage
from typing_extensions import override

from lightning_dilated._compat.lightning import logs_this_step
from lightning_dilated.memory.block_memory import StackMemory
from lightning_dilated.models.blocks import TransformerBlock
from lightning_dilated.models.transformer import step_flops

#: peak FLOP/s of dense 16-bit products, for GPUs that Lightning's table lacks or lists with sparse products
PEAKS = {"NVIDIA H200": 989.4e12}


class ThroughputMonitor(callbacks.ThroughputMonitor):
    """Log `train/items_per_sec` (tokens), `train/samples_per_sec` (sequences) and `train/batches_per_sec`.

    Other stages have the same metrics, and each is also logged as `device/...`, divided by the number of ranks. Tokens
    are counted in whole sequences, including padding. Lightning's monitor multiplies one rank's counts by the number of
    ranks, so it counts a sequence once for each rank that shares it. On a GPU, events time the batches, and the host
    waits only for batches that are logged; Lightning's monitor waits for every batch.

    For blocks of this package, and for decoders in `HFCausalLM`, the callback also logs `device/flops_per_sec`, counted
    by `models.transformer.step_flops`, and on a GPU with a known peak `device/mfu`, the model FLOPs utilisation. Keys
    from earlier stream steps or truncated chunks get no gradients, so no FLOPs are counted for these gradients. A
    LightningModule may define `flops_per_batch`; it must do so if it calls `model.stream` in its own step.

    Args:
        window_size: number of batches in an average.

    Raises:
        ValueError: at the start of a run, if neither LightningModule nor LightningDataModule has a `sequence_spec`.
    """

    def __init__(self, window_size: int = 10) -> None:
        super().__init__(batch_size_fn=self.samples_of, length_fn=self.tokens_of, window_size=window_size)
        #: on a GPU: batches that have not ended, and the end of the batch before them as (event, seconds)
        self._under_way: deque[tuple[RunningStage, torch.cuda.Event, dict[str, Any]]] = deque()
        self._last: tuple[torch.cuda.Event, float] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the group of ranks and the GPU events, because they belong to this process."""
        return {**self.__dict__, "_sequence": None, "_under_way": deque(), "_last": None}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Set up meters that count each sequence once."""
        super().setup(trainer, pl_module, stage)
        self._under_way.clear()  # batches of an earlier run have a different time origin
        specs = [getattr(x, "sequence_spec", None) for x in (trainer.datamodule, pl_module)]  # type: ignore[attr-defined]
        spec = next((x for x in specs if x is not None), None)
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
            self._throughputs[name] = _SequenceThroughput(
                ranks,
                available_flops=_peak(trainer) or self.available_flops,
                world_size=trainer.world_size // ranks,
                **self.kwargs,
            )

    @override
    def _start(self, trainer: pl.Trainer) -> None:
        """Start the clock after all earlier batches have ended."""
        self._note(wait=True)
        super()._start(trainer)
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
            self._last = _now(), time.perf_counter()

    @override
    def _update(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, iter_num: int) -> None:
        """Update the meters with a batch. Unlike Lightning's method, this does not wait for the GPU."""
        stage = cast(RunningStage, trainer.state.stage)
        self._samples[stage] += self.samples_of(batch)
        self._lengths[stage] += self.tokens_of(batch)
        self._batches[stage] += 1
        counts: dict[str, Any] = {
            "batches": self._batches[stage],
            "samples": self._samples[stage],
            "lengths": self._lengths[stage],
            "flops": self._flops(trainer, pl_module, batch),
        }
        if trainer.strategy.root_device.type != "cuda":
            self._throughputs[stage].update(time=time.perf_counter() - self._t0s[stage], **counts)
            return
        self._under_way.append((stage, _now(), counts))
        self._note(wait=logs_this_step(trainer))

    @override
    def on_validation_end(self, trainer: pl.Trainer, *unused: Any) -> None:
        """Wait for all batches, because Lightning subtracts the time of validation from the time of training."""
        self._note(wait=True)
        super().on_validation_end(trainer, *unused)

    def _note(self, wait: bool) -> None:
        """Update the meters with batches that have ended on the GPU; `wait`: wait for all batches."""
        while self._under_way and (wait or self._under_way[0][1].query()):
            stage, end, counts = self._under_way.popleft()
            end.synchronize()
            before, at = self._last  # type: ignore[misc]  # `_start` noted it
            self._last = end, at + before.elapsed_time(end) / 1000
            self._throughputs[stage].update(time=self._last[1] - self._t0s[stage], **counts)

    def _flops(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any) -> int | None:
        if self._own_flops:
            return pl_module.flops_per_batch  # type: ignore[return-value]  # a number set by the user
        if not any(isinstance(m, (TransformerBlock, StackMemory)) for m in pl_module.modules()):
            return None
        tokens, training = self.tokens_of(batch), trainer.state.stage == RunningStage.TRAINING
        truncated = getattr(pl_module, "truncated_parts", None)
        parts = truncated(batch) if truncated else None
        return step_flops(pl_module, tokens, parts or self._documents(batch, tokens), training)

    def _documents(self, batch: Any, tokens: int) -> list[int]:
        """Return the number of tokens of each document, or of each sample without padding."""
        entries = batch if isinstance(batch, Mapping) else {}
        if entries.get("cu_seqlens") is not None:
            return entries["cu_seqlens"].diff().tolist()
        if entries.get("lengths") is not None:
            return torch.as_tensor(entries["lengths"]).tolist()
        samples = self.samples_of(batch)
        return [tokens // samples] * samples if samples else []

    def _entry(self, batch: Any) -> tuple[torch.Tensor, int]:
        """Return (an entry of the batch with a dimension of tokens, the index of that dimension)."""
        entries = dict(enumerate(batch)) if isinstance(batch, (list, tuple)) else batch
        for name, dim in self._dims.items():
            if name in entries:
                return entries[name], dim % entries[name].ndim
        raise ValueError(f"ThroughputMonitor finds none of {list(self._dims)} in a batch with {list(entries)}.")

    def samples_of(self, batch: Any) -> int:
        """Return the number of sequences in a batch."""
        x, dim = self._entry(batch)
        return x.shape[0] if dim else x.shape[1] if x.ndim > 1 else 1

    def tokens_of(self, batch: Any) -> int:
        """Return the number of tokens in a batch's whole sequences, even if this rank has only a part of each."""
        x, dim = self._entry(batch)
        length = x.shape[dim]
        if self._sequence is not None and self._sequence.ranks > 1:
            agreed = self._sequence.agreed  # from the step's last call, so it is exact even if shards differ in length
            fits = agreed is not None and agreed.lengths[self._sequence.rank] == length
            length = agreed.seq_len if fits else length * self._sequence.ranks
        return self.samples_of(batch) * length


class _SequenceThroughput(Throughput):
    """Compute Lightning's rates for one data rank; `ranks`: number of devices that share its sequences."""

    def __init__(self, ranks: int, **options: Any) -> None:
        super().__init__(**options)
        self.ranks = ranks

    def compute(self) -> dict[str, float]:
        """Return Lightning's rates, with device rates divided by the number of ranks that share a sequence."""
        rates = super().compute()
        prefix = f"device{self.separator}"
        for name in [x for x in rates if x.startswith(prefix)]:
            if self.world_size == 1 and name != f"{prefix}mfu":  # Lightning omits these rates for one rank
                rates[name.removeprefix(prefix)] = rates[name]
            rates[name] /= self.ranks
        return rates


def _now() -> torch.cuda.Event:
    """Record an event on the GPU's stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _peak(trainer: pl.Trainer) -> float | None:
    """Return the device's peak FLOP/s if the run computes in 16 bits and Lightning's number is wrong, else None."""
    device, precision = trainer.strategy.root_device, str(getattr(trainer.precision_plugin, "precision", ""))
    narrow = device.type == "cuda" and precision.startswith(("bf16", "16"))
    return PEAKS.get(torch.cuda.get_device_name(device)) if narrow else None
