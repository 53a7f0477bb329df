"""StreamedLosses: a language model's losses over sequences chunk by chunk, and over endless ones call by call.

Shape letters: B batch, N tokens, L tokens of this rank, n tokens of a call, C tokens of a chunk, R ranks, E embedding dim.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from lightning_dilated._compat.lightning import attached_trainer, batches_finished
from lightning_dilated._device import send
from lightning_dilated._validation import integer
from lightning_dilated.attention.functional import autocast
from lightning_dilated.attention.stream import ChunkLayer
from lightning_dilated.attention.stream_state import StreamState
from lightning_dilated.attention.views import spans
from lightning_dilated.checkpoint.ranks import Peers
from lightning_dilated.memory.chunked_loss import IGNORE
from lightning_dilated.memory.streaming import Chunks, check_streamed, sharing, streamed, streamed_sum
from lightning_dilated.models.blocks import working
from lightning_dilated.models.longnet.carried_streams import CarriedStreams
from lightning_dilated.models.module import DilatedModule
from lightning_dilated.recurrence.description import plain_recurrences, without_starts
from lightning_dilated.sequence.exchange.switch import windows
from lightning_dilated.sequence.shard import ChunkShard

#: tokens of a call that are computed at a time
CHUNK = 1 << 16


class StreamedLosses(DilatedModule):
    """Base of a causal language model that `MemorySettings.stream` computes chunk by chunk.

    A subclass has a `transformer` and an output projection `head`, and defines what it does with a sequence at once:

        _checked(batch): (tokens, labels), or an error.
        _hidden(tokens, **options): (B, N, E) before the last norm.
        _losses(x, labels, summed=False): nats of the labels of hidden states.
        _predictions(x, labels): the likeliest tokens.
    """

    #: whether `memory.stream` computes long sequences chunk by chunk
    streams = True
    host_entries = (*DilatedModule.host_entries, "stream", "position", "starts")
    watch_losses: Callable[[Mapping[str, Any], Tensor], None] | None = None
    watch_predictions: Callable[[Mapping[str, Any], Tensor], None] | None = None

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """As `DilatedModule`; sequences that are computed chunk by chunk stay on the CPU, and each chunk is copied."""
        if isinstance(batch, Mapping) and {"tokens", "labels"} <= batch.keys() and self._stays_on_host(batch):
            return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    # -- a batch chunk by chunk ----------------------------------------------------------------------------------------
    def _in_chunks(self, batch: Mapping[str, Any]) -> bool:
        """Whether the batch's sequences are longer than the chunks of `memory.stream`; a collective call."""
        self.configure_model()
        chunk = self.transformer.memory.stream
        return chunk is not None and _seq_len(self._checked(batch)[0]) > chunk

    def _stays_on_host(self, batch: Mapping[str, Any]) -> bool:
        """Whether it is certain that `_in_chunks`: by this rank's tokens, more than its piece of a chunk has."""
        self.configure_model()
        chunk = self.transformer.memory.stream
        return chunk is not None and self._checked(batch)[0].shape[1] > -(-chunk // self._sharing_ranks())

    def _sharing_ranks(self) -> int:
        """How many ranks of the Trainer's strategy share a sequence."""
        group = getattr(getattr(attached_trainer(self), "strategy", None), "sequence", None)
        return 1 if group is None else group.ranks

    def _chunks(self, batch: Mapping[str, Any]) -> Chunks:
        """How the batch is streamed, after the checks; a collective call."""
        truncate = self.transformer.memory.truncate
        chunk = integer(self.transformer.memory.stream, "stream", 1)
        check_streamed([self], self._product_dtype(), chunk)
        drops = self.training and self.options.attention_dropout > 0
        return Chunks(_seq_len(batch["tokens"]), chunk, self.depth, drops, truncate, group=sharing())

    def _chunk(self, batch: Mapping[str, Any], number: int, layers: list[ChunkLayer]) -> tuple[Tensor, Tensor]:
        """`_states` of this rank's tokens of a chunk; the batch (B, L) may wait on the host."""
        stream = self.transformer.stream
        at, local = stream.tokens(number), stream.local(number)
        device, entries = self.head.weight.device, (batch["tokens"], batch["labels"])
        tokens, labels = (send(x[:, local], device) for x in entries)
        positions = torch.arange(at.start, at.stop, device=device)
        documents = {name: batch.get(name) for name in ("lengths", "cu_seqlens")}
        return self._hidden(tokens, positions=positions, chunk=layers, **documents), labels

    def _chunk_states(self, batch: Mapping[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """`_states` of each chunk, without gradients."""
        if torch.is_grad_enabled():
            raise ValueError(
                f"with stream={self.transformer.memory.stream} gradients are made with the sum of losses (loss_terms), not "
                "with each token's. Call token_losses under torch.no_grad(), or leave stream out."
            )
        return streamed(self.transformer.stream, partial(self._chunk, batch), self._chunks(batch))

    def _streamed_terms(self, batch: Mapping[str, Any], redefined: bool) -> tuple[Tensor, Tensor]:
        """`loss_terms`, with gradients where they are enabled."""
        if redefined:
            raise ValueError(
                f"{type(self).__name__} redefines token_losses, which takes whole sequences: leave out "
                f"stream={self.transformer.memory.stream}."
            )
        count = (batch["labels"] != IGNORE).sum()
        if self.watch_losses is None and self.watch_predictions is None:
            run = lambda i, layers: self._losses(*self._chunk(batch, i, layers), summed=True)  # noqa: E731
            return streamed_sum(self.transformer.stream, run, self._chunks(batch), [self], self.head.weight), count
        losses, likeliest, device = [], [], batch["labels"].device
        for states in self._chunk_states(batch):
            losses.append(self._losses(*states).to(device))
            likeliest += [self._predictions(*states).to(device)] if self.watch_predictions is not None else []
        if self.watch_predictions is not None:
            self.watch_predictions(batch, torch.cat(likeliest, 1))
        whole = torch.cat(losses, 1)
        if self.watch_losses is not None:
            self.watch_losses(batch, whole)
        return whole.sum(), count

    def _product_dtype(self) -> torch.dtype:
        """The dtype in which the output projection multiplies."""
        weight = self.head.weight
        return autocast(working(weight.new_empty(0, dtype=torch.float32), weight))[0].dtype

    # -- endless sequences ---------------------------------------------------------------------------------------------
    def stream(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        state: StreamState | None = None,
        *,
        chunk: int = CHUNK,
        starts: Tensor | None = None,
        per_token: bool = False,
    ) -> tuple[Tensor, StreamState]:
        """Nats of the next tokens of endless sequences, and what the next call continues from.

        Memory is that of a chunk and of the keys and values that later tokens read, whatever the number of calls; branches
        over the whole sequence keep theirs. With gradients enabled this is truncated back-propagation through time:
        gradients end at the bounds of chunks.

        Args:
            tokens: (B, n) that follow those of earlier calls.
            labels: (B, n), -100 where none counts. None: the tokens themselves, each predicted by those before it; without
                gradients only.
            state: from the call before; None: nothing came before.
            chunk: tokens that are computed at a time.
            starts: (B, n) bool, where a document begins, before which nothing is seen; None: nowhere. The first token of a
                sequence always does.
            per_token: return (B, n) nats without gradients, and not their sum.

        Returns:
            (sum of nats, or (B, n); the new state). The old state stays as it was.

        Raises:
            ValueError: for shapes that do not fit, without labels where gradients are enabled, for a state of other
                `head_chunks`, and where ranks share sequences.
        """
        self.configure_model()
        if sharing() is not None:
            raise ValueError(
                "endless streams are computed on one rank each, and here ranks share sequences: set sequence_size=1, so "
                "that every rank has streams of its own."
            )
        own = self._stream_owner()
        state = state or StreamState(starts=[0] * len(tokens), owner=own)
        if state.position and state.owner != own:
            raise ValueError(
                f"the state was left by a model of {state.owner}, and this one is of {own}: begin without state."
            )
        trains = torch.is_grad_enabled() and not per_token
        begins = _check_call(tokens, labels, state, starts, trains)
        check_streamed([self], self._product_dtype(), chunk)
        self._check_heads(state)
        drops = self.training and self.options.attention_dropout > 0
        chunks = Chunks(tokens.shape[1], integer(chunk, "chunk", 1), self.depth, drops, True, state, begins)
        batch = {"tokens": tokens, "labels": _following(tokens, starts) if labels is None else labels}
        last: list[Tensor] = []

        def run(number: int, layers: list[ChunkLayer]) -> tuple[Tensor, Tensor]:
            x, y = self._chunk(batch, number, layers)
            last[:] = [x[:, -1:].detach()]
            return x, y

        if trains:
            summed = lambda i, layers: self._losses(*run(i, layers), summed=True)  # noqa: E731
            nats = streamed_sum(self.transformer.stream, summed, chunks, [self], self.head.weight)
        else:
            nats = torch.cat([self._losses(*states) for states in streamed(self.transformer.stream, run, chunks)], 1)
            if labels is None:
                nats = torch.cat([self._first_nats(tokens, state, starts), nats[:, :-1]], 1)
            nats = nats if per_token else nats.sum()
        after = self.transformer.stream.take_left()
        after.hidden, after.owner = last[0], own
        return nats, after

    def _stream_owner(self) -> str:
        """What a state depends on: layers, heads, convolution, patterns."""
        kv_heads, taps = self.num_kv_heads or self.num_heads, self.options.kv_conv
        patterns = hashlib.blake2b("".join(x.code for x in self.patterns).encode(), digest_size=4).hexdigest()
        heads = f"{self.num_heads} heads ({kv_heads} kv)"
        layers = without_starts(self.recurrences)
        memory = f", recurrence={plain_recurrences(layers)}" if any(layers) else ""
        return f"{self.depth} layers of {self.dim}, {heads}, kv_conv={taps}, patterns {patterns}{memory}"

    def _check_heads(self, state: StreamState) -> None:
        """Raise ValueError for a state of other `head_chunks`: layers would not find its rows."""
        held = sorted({head for _, head in state.rows})
        chunks = self.transformer.memory.head_chunks
        first = [window[0] for window in windows(self.num_heads, self.num_kv_heads or self.num_heads, chunks)]
        if held and held != first:
            raise ValueError(
                f"the state was left with head_chunks={len(held)}, and the memory settings say {chunks}: set the former, or "
                "let the sequences begin."
            )

    @torch.no_grad()
    def _first_nats(self, tokens: Tensor, state: StreamState, starts: Tensor | None) -> Tensor:
        """(B, 1) nats of the first tokens, 0 where a sequence or document begins."""
        weight, first = self.head.weight, tokens[:, :1]
        if state.hidden is None:
            return torch.zeros_like(first, dtype=torch.float32, device=weight.device)
        first = first if starts is None else first.masked_fill(starts[:, :1], IGNORE)
        return self._losses(state.hidden.to(weight.device), first.to(weight.device))

    # -- batches of streams, whose states are carried from one to the next ---------------------------------------------
    @cached_property
    def carried(self) -> CarriedStreams:
        """The states of training streams."""
        return CarriedStreams()

    @cached_property
    def carried_in_evaluation(self) -> CarriedStreams:
        """The states of streams in validation, test or prediction; none outside of such a run."""
        return CarriedStreams()

    def _carried_nats(self, batch: Mapping[str, Any], per_token: bool = False) -> Tensor:
        """Nats of a batch of streams, (B, n) or their sum; each stream goes on after the batch before.

        Raises:
            ValueError: see `CarriedStreams.take` and `stream`; for gradients of each token's, and other packing.
        """
        if per_token and torch.is_grad_enabled():
            raise ValueError(
                "the gradients of streams are made with the sum of losses: call loss_terms, or use no_grad."
            )
        packed = sorted({"lengths", "cu_seqlens"} & batch.keys())
        if packed:
            raise ValueError(
                f"a batch of streams has {packed}: leave it out, and let `starts` say where documents begin."
            )
        tokens, labels = self._checked(batch)
        trainer, carried = attached_trainer(self), self._carried_here()
        trains = trainer is not None and trainer.training
        number = batches_finished(trainer) if trains else None
        starts = batch["starts"].cpu()
        streams, positions = (
            [int(x) for x in batch[name]] if name in batch else None for name in ("stream", "position")
        )
        state = carried.take(streams, positions, starts[:, 0].tolist(), number).to(self.head.weight.device)
        chunk = self.transformer.memory.stream or tokens.shape[1]
        nats, after = self.stream(tokens, labels, state, chunk=chunk, starts=starts, per_token=per_token)
        carried.put(streams, after)
        return nats

    def _carried_here(self) -> CarriedStreams:
        """The states that the current stage of a run goes on from; outside of a run, those of the model's mode."""
        trainer = attached_trainer(self)
        outside = trainer is None or trainer.state.stage is None
        return self.carried if (self.training if outside else trainer.training) else self.carried_in_evaluation

    def truncated_parts(self, batch: Any) -> list[range] | None:
        """The tokens of the batch computed last, in the parts at whose bounds gradients end, as positions in their document.

        None where gradients reach whole documents: for a batch that is none of streams, unless the memory settings truncate.
        Where ranks share chunks it is None as well, so that FLOPs of truncated training are counted too high there.
        """
        if not isinstance(batch, Mapping) or "tokens" not in batch:
            return None
        memory, n = self.transformer.memory, batch["tokens"].shape[1]
        if "stream" in batch:
            position, started = self._carried_here().begun
            begins = _begins(position, started, batch["starts"].cpu())
            every = [x for at in begins for x in itertools.pairwise([*at, position + n])]
        elif memory.truncate and self._sharing_ranks() == 1 and self._in_chunks(batch):
            alike = spans(len(batch["tokens"]), n, batch.get("lengths"), batch.get("cu_seqlens"))
            position, every = 0, [(x.start, x.start + x.length) for x in alike for _ in range(x.batches)]
        else:
            return None
        shard = ChunkShard(position, position + n, memory.stream or n)
        bounds = [shard.begin(chunk) for chunk in range(shard.chunks + 1)]
        inner = lambda a, b: bounds[bisect.bisect_right(bounds, a) : bisect.bisect_left(bounds, b)]  # noqa: E731
        cuts = [[x - a for x in (max(a, position), *inner(max(a, position), b), b)] for a, b in every]
        return [range(*part) for at in cuts for part in itertools.pairwise(at)]

    def _longest(self, batch: Any) -> int:
        """As `DilatedModule`; of documents in streams, which grow, a power of two that the longest one has reached."""
        parts = self.truncated_parts(batch) if isinstance(batch, Mapping) and "stream" in batch else None
        return 1 << max(x.stop for x in parts).bit_length() - 1 if parts else super()._longest(batch)

    def _carried_terms(self, batch: Mapping[str, Any], redefined: bool) -> tuple[Tensor, Tensor]:
        """`loss_terms` of a batch of streams."""
        if redefined:
            raise ValueError(
                f"{type(self).__name__} redefines token_losses, which knows of no streams: define loss_terms."
            )
        if self.watch_losses is not None or self.watch_predictions is not None:
            raise ValueError(
                "a callback (LossByPosition, RecallByDistance) looks at losses by position in a sequence, which steps of "
                "streams are not: leave it out, or take a DataModule of separate sequences."
            )
        return self._carried_nats(batch), (batch["labels"] != IGNORE).sum()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """As `DilatedModule`; adds the states of training streams of all ranks, which therefore call it together."""
        super().on_save_checkpoint(checkpoint)
        trainer = attached_trainer(self)
        if not self.carried:
            return
        own, loaded = self.carried.state_dicts(None if trainer is None else batches_finished(trainer))
        peers = Peers() if trainer is None else Peers(trainer.global_rank, trainer.world_size)
        for states in peers.gather(own):
            loaded |= states
        checkpoint["streams"] = dict(sorted(loaded.items()))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """As `DilatedModule`; restores the states of training streams, on any number of ranks."""
        super().on_load_checkpoint(checkpoint)
        self.carried.load_state_dicts(checkpoint.get("streams", {}))

    def on_fit_start(self) -> None:
        """As `DilatedModule`; batches are numbered anew."""
        super().on_fit_start()
        self.carried.finish()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """As `DilatedModule`; what streams had before the batch is freed."""
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.carried.finish()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """As `DilatedModule`; states of streams follow the model to the host, as after a run, until they go on."""
        moved = super()._apply(*args, **kwargs)
        if self._built and self.head.weight.device.type == "cpu":
            self.carried.to("cpu")
            self.carried_in_evaluation.to("cpu")
        return moved

    def on_validation_epoch_start(self) -> None:
        self.carried_in_evaluation.clear()

    def on_validation_epoch_end(self) -> None:
        self.carried_in_evaluation.clear()
        super().on_validation_epoch_end()

    def on_test_epoch_start(self) -> None:
        self.carried_in_evaluation.clear()

    def on_test_epoch_end(self) -> None:
        self.carried_in_evaluation.clear()
        super().on_test_epoch_end()

    def on_predict_epoch_start(self) -> None:
        self.carried_in_evaluation.clear()

    def on_predict_epoch_end(self) -> None:
        self.carried_in_evaluation.clear()


def _seq_len(tokens: Tensor) -> int:
    """N of this rank's tokens (B, L); a collective call where ranks share the sequence."""
    group = sharing()
    return tokens.shape[1] if group is None else group.agree({"call": "stream"}, tokens.shape[1]).seq_len


def _following(tokens: Tensor, starts: Tensor | None) -> Tensor:
    """(B, n) the next token of each, -100 where it is not there or begins a document."""
    labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORE)
    return labels if starts is None else labels.masked_fill(torch.nn.functional.pad(starts[:, 1:], (0, 1)), IGNORE)


def _check_call(
    tokens: Tensor, labels: Tensor | None, state: StreamState, starts: Tensor | None, trains: bool
) -> list[list[int]]:
    """Of each sample, the positions at which the document that goes on, and those of this call, begin."""
    if tokens.ndim != 2 or 0 in tokens.shape or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise ValueError(f"tokens must be (B, n) integers, at least one; got {tuple(tokens.shape)}, {tokens.dtype}.")
    for name, x in (("labels", labels), ("starts", starts)):
        if x is not None and x.shape != tokens.shape:
            raise ValueError(f"{name} must be {tuple(tokens.shape)} as tokens are; got {tuple(x.shape)}.")
    if starts is not None and starts.dtype != torch.bool:
        raise ValueError(f"starts must be bool, True where a document begins; got {starts.dtype}.")
    if len(state.starts) != len(tokens):
        raise ValueError(
            f"the state belongs to {len(state.starts)} sequences, and tokens has {len(tokens)}. Sequences keep their order."
        )
    if trains and labels is None:
        raise ValueError("training needs labels, the next token of each, -100 where none counts; of the last one, too.")
    return _begins(state.position, state.starts, starts)


def _begins(position: int, started: Sequence[int], starts: Tensor | None) -> list[list[int]]:
    """Of each sample, the positions at which documents begin: `started` before this call, or where `starts` (B, n) says."""
    begins = [[at] for at in started]
    for sample, at in [] if starts is None else starts.nonzero().tolist():
        begins[sample] = [position] if at == 0 else [*begins[sample], position + at]
    return begins
