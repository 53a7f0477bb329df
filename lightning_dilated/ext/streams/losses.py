"""Compute a language model's losses over long sequences chunk by chunk, and over endless sequences call by call.

Shape letters: B batch, N tokens, L tokens of this rank, n tokens of a call, C tokens of a chunk, R ranks, E model dim.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_dilated._compat.lightning import attached_trainer, batches_finished
from lightning_dilated._device import send
from lightning_dilated._validation import integer
from lightning_dilated.attention.context import LayerPlace
from lightning_dilated.attention.functional import autocast
from lightning_dilated.attention.spans import spans
from lightning_dilated.checkpoint.ranks import RankGroup
from lightning_dilated.ext.streams.carried import CarriedStreams
from lightning_dilated.ext.streams.shard import ChunkShard
from lightning_dilated.ext.streams.state import StreamState
from lightning_dilated.ext.streams.training import Chunks, check_streamed, sharing, streamed, streamed_sum
from lightning_dilated.memory.chunked_loss import IGNORE
from lightning_dilated.models.blocks import working
from lightning_dilated.recurrence.description import plain_recurrences, without_starts
from lightning_dilated.sequence.exchange.all_to_all import windows

if TYPE_CHECKING:
    from lightning_dilated.models.longnet.lm import LongNetLM


class ModelStreams:
    """Losses of a LongNetLM chunk by chunk, and the states of its endless sequences.

    Attributes:
        carried: states of training streams.
        carried_in_evaluation: states of streams in validation, test or prediction; empty at other times.
    """

    def __init__(self) -> None:
        self.carried, self.carried_in_evaluation = CarriedStreams(), CarriedStreams()

    # -- a batch chunk by chunk ----------------------------------------------------------------------------------------
    def in_chunks(self, model: LongNetLM, batch: Mapping[str, Any]) -> bool:
        """Return whether `memory.stream` is set and the batch's sequences are longer. This is a collective call."""
        model.configure_model()
        chunk = model.transformer.memory.stream
        return chunk is not None and _seq_len(model._checked(batch)[0]) > chunk

    def stays_on_host(self, model: LongNetLM, batch: Mapping[str, Any]) -> bool:
        """Return whether this rank has more tokens than its piece of a chunk, so that `in_chunks` is certainly True."""
        model.configure_model()
        chunk = model.transformer.memory.stream
        return chunk is not None and model._checked(batch)[0].shape[1] > -(-chunk // self._sharing_ranks(model))

    def _sharing_ranks(self, model: LongNetLM) -> int:
        """Return the number of ranks that share a sequence in the Trainer's strategy."""
        group = getattr(getattr(attached_trainer(model), "strategy", None), "sequence", None)
        return 1 if group is None else group.ranks

    def chunks(self, model: LongNetLM, batch: Mapping[str, Any]) -> Chunks:
        """Check the model and the ranks, and return the settings of the batch's stream. This is a collective call."""
        truncate = model.transformer.memory.truncate
        chunk = integer(model.transformer.memory.stream, "stream", 1)
        check_streamed([model], self._product_dtype(model), chunk)
        drops = model.training and model.options.attention_dropout > 0
        return Chunks(_seq_len(batch["tokens"]), chunk, model.depth, drops, truncate, group=sharing())

    def chunk(
        self, model: LongNetLM, batch: Mapping[str, Any], number: int, layers: list[LayerPlace]
    ) -> tuple[Tensor, Tensor]:
        """Return (hidden states, labels) of this rank's tokens of a chunk; the batch (B, L) may be on the host."""
        stream = model.transformer.stream
        at, local = stream.tokens(number), stream.local(number)
        device, entries = model.head.weight.device, (batch["tokens"], batch["labels"])
        tokens, labels = (send(x[:, local], device) for x in entries)
        positions = torch.arange(at.start, at.stop, device=device)
        documents = {name: batch.get(name) for name in ("lengths", "cu_seqlens")}
        return model._hidden(tokens, positions=positions, chunk=layers, **documents), labels

    def chunk_states(self, model: LongNetLM, batch: Mapping[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (hidden states, labels) of each chunk, without gradients."""
        if torch.is_grad_enabled():
            raise ValueError(
                f"with stream={model.transformer.memory.stream} gradients are computed with the sum of losses "
                "(loss_terms), not for single losses. Call token_losses under torch.no_grad(), or leave stream out."
            )
        return streamed(model.transformer.stream, partial(self.chunk, model, batch), self.chunks(model, batch))

    def loss_terms(self, model: LongNetLM, batch: Mapping[str, Any], redefined: bool) -> tuple[Tensor, Tensor]:
        """Return the model's `loss_terms` of a batch, computed chunk by chunk."""
        if redefined:
            raise ValueError(
                f"{type(model).__name__} redefines token_losses, which needs whole sequences: leave out "
                f"stream={model.transformer.memory.stream}."
            )
        count = (batch["labels"] != IGNORE).sum()
        if model.watch_losses is None and model.watch_predictions is None:
            run = lambda i, layers: model._losses(*self.chunk(model, batch, i, layers), summed=True)  # noqa: E731
            return streamed_sum(
                model.transformer.stream, run, self.chunks(model, batch), [model], model.head.weight
            ), count
        losses, likeliest, device = [], [], batch["labels"].device
        for states in self.chunk_states(model, batch):
            losses.append(model._losses(*states).to(device))
            likeliest += [model._predictions(*states).to(device)] if model.watch_predictions is not None else []
        if model.watch_predictions is not None:
            model.watch_predictions(batch, torch.cat(likeliest, 1))
        whole = torch.cat(losses, 1)
        if model.watch_losses is not None:
            model.watch_losses(batch, whole)
        return whole.sum(), count

    def _product_dtype(self, model: LongNetLM) -> torch.dtype:
        weight = model.head.weight
        return autocast(working(weight.new_empty(0, dtype=torch.float32), weight))[0].dtype

    # -- endless sequences ---------------------------------------------------------------------------------------------
    def stream(
        self,
        model: LongNetLM,
        tokens: Tensor,
        labels: Tensor | None = None,
        state: StreamState | None = None,
        *,
        chunk: int,
        starts: Tensor | None = None,
        per_token: bool = False,
    ) -> tuple[Tensor, StreamState]:
        """See `LongNetLM.stream`."""
        model.configure_model()
        if sharing() is not None:
            raise ValueError(
                "endless streams are computed on one rank each, but here ranks share sequences: set sequence_size=1, "
                "so that each rank computes different streams."
            )
        owner = self._stream_owner(model)
        state = state or StreamState(starts=[0] * len(tokens), owner=owner)
        if state.position and state.owner != owner:
            raise ValueError(
                f"the state was left by a model of {state.owner}, but this model is of {owner}: begin without a state."
            )
        trains = torch.is_grad_enabled() and not per_token
        begins = _check_call(tokens, labels, state, starts, trains)
        check_streamed([model], self._product_dtype(model), chunk)
        self._check_heads(model, state)
        drops = model.training and model.options.attention_dropout > 0
        chunks = Chunks(tokens.shape[1], integer(chunk, "chunk", 1), model.depth, drops, True, state, begins)
        batch = {"tokens": tokens, "labels": _following(tokens, starts) if labels is None else labels}
        last: list[Tensor] = []

        def run(number: int, layers: list[LayerPlace]) -> tuple[Tensor, Tensor]:
            x, y = self.chunk(model, batch, number, layers)
            last[:] = [x[:, -1:].detach()]
            return x, y

        if trains:
            summed = lambda i, layers: model._losses(*run(i, layers), summed=True)  # noqa: E731
            nats = streamed_sum(model.transformer.stream, summed, chunks, [model], model.head.weight)
        else:
            nats = torch.cat([model._losses(*states) for states in streamed(model.transformer.stream, run, chunks)], 1)
            if labels is None:
                nats = torch.cat([self._first_nats(model, tokens, state, starts), nats[:, :-1]], 1)
            nats = nats if per_token else nats.sum()
        after = model.transformer.stream.take_left()
        after.hidden, after.owner = last[0], owner
        return nats, after

    def _stream_owner(self, model: LongNetLM) -> str:
        """Describe the layers, heads, convolution and patterns with which a state must match."""
        kv_heads, taps = model.num_kv_heads or model.num_heads, model.options.kv_conv
        patterns = hashlib.blake2b("".join(x.code for x in model.patterns).encode(), digest_size=4).hexdigest()
        heads = f"{model.num_heads} heads ({kv_heads} kv)"
        layers = without_starts(model.recurrences)
        memory = f", recurrence={plain_recurrences(layers)}" if any(layers) else ""
        if any(model.hashed):
            memory += f", hashed={[x and x.read_rows for x in model.hashed]}"
        return f"{model.depth} layers of {model.dim}, {heads}, kv_conv={taps}, patterns {patterns}{memory}"

    def _check_heads(self, model: LongNetLM, state: StreamState) -> None:
        """Raise ValueError if the state was left with other `head_chunks`: layers would not find its rows."""
        held = sorted({head for _, head in state.rows})
        chunks = model.transformer.memory.head_chunks
        first = [window[0] for window in windows(model.num_heads, model.num_kv_heads or model.num_heads, chunks)]
        if held and held != first:
            raise ValueError(
                f"the state was left with head_chunks={len(held)}, but the memory settings have {chunks}: set "
                f"head_chunks={len(held)}, or begin without a state."
            )

    @torch.no_grad()
    def _first_nats(self, model: LongNetLM, tokens: Tensor, state: StreamState, starts: Tensor | None) -> Tensor:
        """Return the losses of the first tokens in nats, (B, 1); 0 if the token begins a sequence or document."""
        weight, first = model.head.weight, tokens[:, :1]
        if state.hidden is None:
            return torch.zeros_like(first, dtype=torch.float32, device=weight.device)
        first = first if starts is None else first.masked_fill(starts[:, :1], IGNORE)
        return model._losses(state.hidden.to(weight.device), first.to(weight.device))

    # -- batches of streams, with states that are carried from batch to batch ------------------------------------------
    def nats(self, model: LongNetLM, batch: Mapping[str, Any], per_token: bool = False) -> Tensor:
        """Return the sum of losses in nats, or per-token losses (B, n); each stream continues from the previous batch.

        Raises:
            ValueError: for `per_token` with gradients, and for batches with `lengths` or `cu_seqlens`; see `stream`.
        """
        if per_token and torch.is_grad_enabled():
            raise ValueError("per-token losses of streams have no gradients: call loss_terms, or use torch.no_grad().")
        packed = sorted({"lengths", "cu_seqlens"} & batch.keys())
        if packed:
            raise ValueError(
                f"a batch of streams has {packed}: leave it out, and set `starts` to True where documents begin."
            )
        tokens, labels = model._checked(batch)
        trainer, carried = attached_trainer(model), self._carried_here(model)
        trains = trainer is not None and trainer.training
        number = batches_finished(trainer) if trains else None
        starts = batch["starts"].cpu()
        streams, positions = (
            [int(x) for x in batch[name]] if name in batch else None for name in ("stream", "position")
        )
        state = carried.take(streams, positions, starts[:, 0].tolist(), number).to(model.head.weight.device)
        chunk = model.transformer.memory.stream or tokens.shape[1]
        nats, after = model.stream(tokens, labels, state, chunk=chunk, starts=starts, per_token=per_token)
        carried.put(streams, after)
        return nats

    def _carried_here(self, model: LongNetLM) -> CarriedStreams:
        """Return the states for the current stage of a run; outside a run, for the model's training or eval mode."""
        trainer = attached_trainer(model)
        outside = trainer is None or trainer.state.stage is None
        return self.carried if (model.training if outside else trainer.training) else self.carried_in_evaluation

    def truncated_parts(self, model: LongNetLM, batch: Mapping[str, Any]) -> list[range] | None:
        """See `LongNetLM.truncated_parts`."""
        memory, n = model.transformer.memory, batch["tokens"].shape[1]
        if "stream" in batch:
            position, started = self._carried_here(model).begun
            begins = _begins(position, started, batch["starts"].cpu())
            every = [x for at in begins for x in itertools.pairwise([*at, position + n])]
        elif memory.truncate and self._sharing_ranks(model) == 1 and self.in_chunks(model, batch):
            document_spans = spans(len(batch["tokens"]), n, batch.get("lengths"), batch.get("cu_seqlens"))
            position, every = 0, [(x.start, x.start + x.length) for x in document_spans for _ in range(x.batches)]
        else:
            return None
        shard = ChunkShard(position, position + n, memory.stream or n)
        bounds = [shard.begin(chunk) for chunk in range(shard.chunks + 1)]
        inner = lambda a, b: bounds[bisect.bisect_right(bounds, a) : bisect.bisect_left(bounds, b)]  # noqa: E731
        cuts = [[x - a for x in (max(a, position), *inner(max(a, position), b), b)] for a, b in every]
        return [range(*part) for at in cuts for part in itertools.pairwise(at)]

    def carried_terms(self, model: LongNetLM, batch: Mapping[str, Any], redefined: bool) -> tuple[Tensor, Tensor]:
        """Return `loss_terms` of a batch of streams."""
        if redefined:
            raise ValueError(
                f"{type(model).__name__} redefines token_losses, which is not called for streams: define loss_terms."
            )
        if model.watch_losses is not None or model.watch_predictions is not None:
            raise ValueError(
                "a callback (LossByPosition, RecallByDistance) needs losses by position in a sequence, which steps of "
                "streams do not have: leave it out, or take a DataModule of separate sequences."
            )
        return self.nats(model, batch), (batch["labels"] != IGNORE).sum()

    # -- hooks of the model --------------------------------------------------------------------------------------------
    def save(self, model: LongNetLM, checkpoint: dict[str, Any]) -> None:
        """Add the states of all ranks' training streams to a checkpoint; all ranks must call this together."""
        if not self.carried:
            return
        trainer = attached_trainer(model)
        computed, loaded = self.carried.state_dicts(None if trainer is None else batches_finished(trainer))
        peers = RankGroup() if trainer is None else RankGroup(trainer.global_rank, trainer.world_size)
        for states in peers.gather(computed):
            loaded |= states
        checkpoint["streams"] = dict(sorted(loaded.items()))

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Restore the states of training streams; the number of ranks may have changed."""
        self.carried.load_state_dicts(checkpoint.get("streams", {}))

    def finish_batch(self) -> None:
        """Free the states from before the finished batch."""
        self.carried.finish()

    def finish_evaluation(self) -> None:
        """Delete the states of streams in validation, test or prediction."""
        self.carried_in_evaluation.clear()

    def to_host(self) -> None:
        """Move all states to the CPU."""
        self.carried.to("cpu")
        self.carried_in_evaluation.to("cpu")


def _seq_len(tokens: Tensor) -> int:
    """Return N, from this rank's tokens (B, L). This is a collective call if ranks share the sequence."""
    group = sharing()
    return tokens.shape[1] if group is None else group.agree({"call": "stream"}, tokens.shape[1]).seq_len


def _following(tokens: Tensor, starts: Tensor | None) -> Tensor:
    """Return the next token of each token, (B, n); -100 if there is no next token or it begins a document."""
    labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORE)
    return labels if starts is None else labels.masked_fill(torch.nn.functional.pad(starts[:, 1:], (0, 1)), IGNORE)


def _check_call(
    tokens: Tensor, labels: Tensor | None, state: StreamState, starts: Tensor | None, trains: bool
) -> list[list[int]]:
    """Check the arguments of `stream`, and return the starts of documents from `_begins`."""
    if tokens.ndim != 2 or 0 in tokens.shape or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise ValueError(f"tokens must be integers (B, n), not empty; got {tuple(tokens.shape)}, {tokens.dtype}.")
    for name, x in (("labels", labels), ("starts", starts)):
        if x is not None and x.shape != tokens.shape:
            raise ValueError(f"{name} must be {tuple(tokens.shape)} as tokens are; got {tuple(x.shape)}.")
    if starts is not None and starts.dtype != torch.bool:
        raise ValueError(f"starts must be bool, True where a document begins; got {starts.dtype}.")
    if len(state.starts) != len(tokens):
        raise ValueError(
            f"the state is of {len(state.starts)} sequences, but tokens has {len(tokens)}; keep the sequences in order."
        )
    if trains and labels is None:
        raise ValueError("training needs labels: the next token of each token, also of the last one; -100: no loss.")
    return _begins(state.position, state.starts, starts)


def _begins(position: int, started: Sequence[int], starts: Tensor | None) -> list[list[int]]:
    """List the starts of each sample's documents: the unfinished one, unless token 0 begins one, and `starts`."""
    begins = [[at] for at in started]
    for sample, at in [] if starts is None else starts.nonzero().tolist():
        begins[sample] = [position] if at == 0 else [*begins[sample], position + at]
    return begins
