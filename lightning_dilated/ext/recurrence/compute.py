"""Compute recurrent attention from checked arguments: the chunks of this rank's runs, and the exchange of states.

Shape letters: B batch, L tokens of this rank, H query heads, K kv heads, D head dim, E value dim, S documents, n runs,
T chunks, m tokens of a memory segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_dilated._device import send
from lightning_dilated.ext.convolution.halo import sequence_halo
from lightning_dilated.ext.recurrence.chunks import (
    SegmentChunks,
    Transition,
    delta_transition,
    gated_chunks,
    pass_states,
    put,
    read_normalized,
    segment_chunks,
    take,
)
from lightning_dilated.ext.recurrence.rules import positive
from lightning_dilated.ext.recurrence.runs import CHUNK, Call, Tables, tables
from lightning_dilated.ext.recurrence.scan import Scan
from lightning_dilated.ext.recurrence.state import RecurrentState
from lightning_dilated.ext.recurrence.triton_chunks import gated_delta, layout
from lightning_dilated.sequence.collectives import sequence_sum


class Output(Enum):
    """The output of a call: its values (READ), a differentiable tensor without valid values (UNREAD), or NONE."""

    READ = "read"
    UNREAD = "unread"
    NONE = "none"


@dataclass(frozen=True)
class Inputs:
    """This rank's tensors: q (B, L, H, D), k (B, L, K, D), v (B, L, K, E), log_decay and beta (B, L, K).

    log_decay and beta are None for kinds other than gated_delta. All tensors have the dtype of the state; but if
    `kernels` is True, Triton kernels compute the call, and q, k and v keep their own dtype.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    beta: Tensor | None
    kernels: bool = False

    @property
    def all(self) -> tuple[Tensor, ...]:
        return tuple(x for x in (self.q, self.k, self.v, self.log_decay, self.beta) if x is not None)


class Computation:
    """One call on one rank. `scan` exchanges states with other ranks; it is None if there is only one rank."""

    def __init__(self, kind: str, inputs: Inputs, call: Call, state: RecurrentState, scan: Scan | None) -> None:
        self.kind, self.inputs, self.call, self.state, self.scan = kind, inputs, call, state, scan
        self.rank = 0 if scan is None else scan.group.rank
        cpu_tables, device = tables(call, self.rank, CHUNK), inputs.q.device
        self.tables: Tables = cpu_tables.states_to(device) if inputs.kernels else cpu_tables.to(device)

    def run(self, return_state: bool, output: Output = Output.READ) -> tuple[Tensor, RecurrentState | None]:
        """Return the output (B, L, H, E), and with `return_state` the state after the call, else None."""
        if self.kind == "gated_delta":
            out, state = self._gated(return_state, output)
        elif self.call.after:
            out, state = self._both_sides(), None
        else:
            out, state = self._segments(return_state)
        return self._tied(out.unflatten(0, self.inputs.q.shape[:2])), state

    def _tied(self, x: Tensor) -> Tensor:
        return x if self.scan is None else self.scan.tie(x)

    # -- kinds ------------------------------------------------------------------------------------------------------
    def _gated(self, return_state: bool, output: Output) -> tuple[Tensor, RecurrentState | None]:
        rows = [x.flatten(0, 1) for x in self.inputs.all]
        if self.inputs.kernels:
            out, after = self._by_kernels(*rows, output)
        else:
            chunks = gated_chunks(*rows, self.tables)
            before, after = self._states(chunks.transition, chunks.added, self.state.matrix)
            out = put(chunks.read @ before[:, :, None] + chunks.own, self.tables)
        if not return_state:
            return out, None
        return out, RecurrentState(self._final(after, self.state.matrix), self._seen())

    def _by_kernels(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, output: Output
    ) -> tuple[Tensor, Tensor]:
        """Return the output (B L, H, E) and the state after each run."""
        rows, places = (k, v, log_decay, beta), layout(self.call, self.rank, k.shape[1])
        begin = self._begins(self.state.matrix, lambda states: gated_delta(None, *rows, states, places)[1], False)
        query = None if output is Output.NONE else q
        out, after = gated_delta(query, *rows, begin, places, read=output is Output.READ)
        return q.new_zeros(len(q), 0, v.shape[2]) if out is None else out, after

    def _segments(self, return_state: bool) -> tuple[Tensor, RecurrentState | None]:
        chunks = self._chunks()
        initial = torch.cat([self.state.matrix, self.state.normalizer[..., None]], -1)
        closed = self.tables.closed[:, None, None, None]
        if self.kind == "linear":
            chunks = chunks._replace(sums=self._with_pending(chunks.sums))
            before, after = self._states(Transition(), chunks.sums * closed, initial)
        else:
            sums = chunks.sums * closed
            past, total = self._states(Transition(), sums[..., -1:], initial[..., -1:])
            transition = delta_transition(chunks, past, self.tables.closed)
            before, after = self._states(transition, sums[..., :-1], initial[..., :-1])
            before, after = torch.cat([before, past], -1), torch.cat([after, total], -1)
        out = put(read_normalized(self.inputs.q.flatten(0, 1), before, self.tables), self.tables)
        if not return_state:
            return out, None
        final = self._final(after, initial)
        pending = self._pending_sums(chunks) if self.kind == "linear" else self._pending_rows(chunks)
        return out, RecurrentState(final[..., :-1], self._seen(), final[..., -1], pending)

    def _both_sides(self) -> Tensor:
        """Return the output of a non-causal call: each segment reads the sums of its document's other segments."""
        chunks = self._chunks()
        local = (self.tables.queries < len(self.inputs.q) * self.inputs.q.shape[1])[:, None, :, None]
        keys = chunks.keys * local  # exclude the halo, because other ranks count it
        sums = torch.cat([keys.mT @ chunks.values, keys.sum(-2)[..., None]], -1)
        documents = send(self.tables.documents, sums.device)
        every = sums.new_zeros(len(self.call.documents), *sums.shape[1:]).index_add(0, documents, sums)
        if self.scan is not None:
            every = sequence_sum(self._anchored(every), self.scan.group)
            self.scan.rows.append(every.flatten()[:0])
        single = self.tables.single[:, None, None, None]
        other_sums = torch.where(single, 0, every[documents] - chunks.sums)
        return put(read_normalized(self.inputs.q.flatten(0, 1), other_sums, self.tables), self.tables)

    def _anchored(self, x: Tensor) -> Tensor:
        """Return x; it requires a gradient if the call's inputs do, even on a rank without tokens."""
        return x if self.scan is None else x + self.scan.anchor.sum()

    # -- memory segments --------------------------------------------------------------------------------------------
    def _chunks(self) -> SegmentChunks:
        rows = torch.cat([positive(self.inputs.k), self.inputs.v], -1)
        left, right = self.call.halo
        if self.scan is None or not left + right:
            flat = rows.flatten(0, 1)
        else:
            parts = sequence_halo(self._anchored(rows), left, right, sequence=self.scan.group)
            self.scan.rows.extend(part.flatten()[:0] for part in parts)
            flat = torch.cat([part.flatten(0, 1) for part in parts])
            if not rows.shape[1]:
                flat = flat[:0]
        features, values = flat.split([self.inputs.k.shape[-1], self.inputs.v.shape[-1]], -1)
        if self.kind == "delta":
            carried = (x.transpose(1, 2).flatten(0, 1) for x in self.state.pending)
            features, values = (torch.cat(x) for x in zip((features, values), carried, strict=True))
        return segment_chunks(features, values, self.tables)

    def _with_pending(self, sums: Tensor) -> Tensor:
        """Add the sums of the state's open segment to the first chunk of each run that continues this segment."""
        matrix, normalizer = self.state.pending
        pending = take(torch.cat([matrix, normalizer[..., None]], -1), self.tables.started)
        return torch.cat([sums[: len(pending)] + pending, sums[len(pending) :]])

    def _pending_sums(self, chunks: SegmentChunks) -> tuple[Tensor, Tensor]:
        last = self.tables.last
        opened = chunks.sums[last] * ~self.tables.closed[last][:, None, None, None]
        matrix, normalizer = self.state.pending
        final = self._final(opened, torch.cat([matrix, normalizer[..., None]], -1))
        return final[..., :-1], final[..., -1]

    def _pending_rows(self, chunks: SegmentChunks) -> tuple[Tensor, Tensor]:
        last, width = self.tables.last, self.call.segment - self.tables.width
        opened = ~self.tables.closed[last][:, None, None, None]
        rows = (pad(x[last] * opened, (0, 0, 0, width)) for x in (chunks.keys, chunks.values))
        keys, values = (self._final(x, y) for x, y in zip(rows, self.state.pending, strict=True))
        return keys, values

    # -- states -----------------------------------------------------------------------------------------------------
    def _states(self, transition: Transition, added: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states before chunks and after runs; `initial` (S, K, D, E): states before documents."""

        def after(states: Tensor) -> Tensor:
            missing = states.shape[3] - added.shape[3]
            columns = pad(added, (missing, 0)) if missing else added
            return pass_states(transition, columns, states, self.tables.counts)[1]

        begins = self._begins(initial, after, transition.right is None)
        return pass_states(transition, added, begins, self.tables.counts)

    def _begins(self, initial: Tensor, after: Callable[[Tensor], Tensor], sums: bool) -> Tensor:
        """Return the state before each run, (n, K, D, E); `initial` (S, K, D, E): the state before each document.

        Args:
            after: maps states before runs (n, K, D, W) to states after them; it adds values to the last E columns only.
            sums: whether the state changes only by addition.
        """
        incoming = initial.new_zeros(self.tables.outgoing.numel(), *initial.shape[1:])
        if self.scan is not None:
            incoming = self._incoming(initial, after, sums).flatten(0, 1)
        return torch.cat([incoming, initial])[self.tables.begins]

    def _incoming(self, initial: Tensor, after: Callable[[Tensor], Tensor], sums: bool) -> Tensor:
        """Return the state before each of this rank's pieces, (pieces, B, K, D, E); see `_begins` for the arguments."""
        number, columns = len(self.tables.runs), initial.shape[-1]
        sizes, dim = initial.shape[1:3], initial.shape[2]
        continued = self.tables.continued[:, None, None, None].to(initial.dtype)
        documents = (self.tables.begins - self.tables.outgoing.numel()).clamp(min=0)
        begin = initial[documents] * (1 - continued) if number else initial.new_zeros(0, *initial.shape[1:])
        unchanged = initial.new_zeros(1, *initial.shape[1:])
        if sums:  # the matrix A of a map is a number, 0 or 1
            maps = torch.cat([continued.expand(number, *sizes, 1), after(begin)], -1)
            through = torch.cat([initial.new_ones(1, *sizes, 1), unchanged], -1)
        else:
            eye = torch.eye(dim, dtype=initial.dtype, device=initial.device).expand(*sizes, dim)
            maps = after(torch.cat([eye * continued, begin], -1))
            through = torch.cat([eye[None], unchanged], -1)
        return self.scan.before(torch.cat([maps, through])[self.tables.outgoing], columns)

    def _final(self, after: Tensor, initial: Tensor) -> Tensor:
        """Return the state after each document's last run, (S, ...), on every rank."""
        final = take(torch.cat([after, initial]), self.tables.finals[None])[0]
        if self.scan is None:
            return final
        return sequence_sum(self._tied(self._anchored(final)), self.scan.group)

    def _seen(self) -> Tensor:
        lengths = [doc.stop - doc.start for doc in self.call.documents]
        return self.state.tokens + torch.tensor(lengths, dtype=torch.int64)


def pieces(ranges: Sequence[Sequence[range]]) -> tuple[tuple[int, range], ...]:
    """Return the rank and the positions of each non-empty piece, in the order of the sequence."""
    every = [(rank, piece) for rank, rank_pieces in enumerate(ranges) for piece in rank_pieces if piece]
    return tuple(sorted(every, key=lambda pair: pair[1].start))
