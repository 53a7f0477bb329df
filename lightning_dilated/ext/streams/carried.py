"""Store the states of streams between batches. A stream may continue on any rank and in any batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_dilated.ext.streams.state import StreamState

#: states of batches; the key is the indices of a batch's streams, in the order of the batch
Groups = dict[tuple[int, ...], StreamState]


class CarriedStreams:
    """The states of streams, by stream index. The states of a batch stay joined while batches have the same streams.

    A batch may be computed more than once before it is finished. Each time it starts from the same states, and a
    checkpoint of an unfinished batch contains the states before it.

    Attributes:
        begun: before the last batch: the number of tokens, and the start of each stream's unfinished document.
    """

    def __init__(self) -> None:
        self._now: Groups = {}
        self._before: Groups = {}
        self._batch: int | None = None
        self._computed: set[int] = set()
        self.begun: tuple[int, list[int]] = (0, [])

    def take(
        self, streams: Sequence[int], positions: Sequence[int] | None, starts: Sequence[bool], batch: int | None
    ) -> StreamState:
        """Return the state before a batch of these streams.

        Args:
            positions: number of tokens of each stream so far, 0 if it begins. None: streams without a state begin.
            starts: for each stream, whether the first token of the batch begins a document.
            batch: number of the batch. Calls with equal numbers start from the same states. None: a new batch.

        Raises:
            ValueError: if a stream continues without a state, or its state belongs to a different position.
        """
        if len(set(streams)) < len(streams):
            raise ValueError(f"a batch may contain each stream only once; got streams {list(streams)}.")
        if batch is None or batch != self._batch:
            self._before, self._batch = dict(self._now), batch
        state = self._state_before(streams, positions, starts)
        self.begun = state.position, list(state.starts)
        return state

    def _state_before(
        self, streams: Sequence[int], positions: Sequence[int] | None, starts: Sequence[bool]
    ) -> StreamState:
        before = self._before
        known = {n: (group, i) for group in before for i, n in enumerate(group)}
        begins = [n not in known if positions is None else positions[i] == 0 for i, n in enumerate(streams)]
        ready = starts if positions is None else begins
        lost = [n for n, begin in zip(streams, ready, strict=True) if n not in known and not begin]
        if lost:
            raise ValueError(
                f"streams {lost} continue in the middle, but the model has no state of earlier tokens. Resume from a "
                "checkpoint with their states, or let the streams begin (starts[:, 0] True at their first token)."
            )
        self._check_positions(streams, positions, known)
        if tuple(streams) in before and not any(begins):
            return before[tuple(streams)]
        if len(set(positions or ())) > 1:
            raise ValueError(
                f"streams {list(streams)} are at tokens {list(positions or ())}, but streams of a batch must begin "
                "together. Put streams that begin into a separate batch, or leave `position` out."
            )
        continued_at = (before[known[n][0]].position for n, new in zip(streams, begins, strict=True) if not new)
        at = 0 if positions is not None else next(continued_at, 0)
        old = lambda n: before[known[n][0]].select(known[n][1])  # noqa: E731
        each = zip(streams, begins, strict=True)
        return StreamState.join([StreamState(at, [at]) if new else old(n) for n, new in each])

    def _check_positions(
        self, streams: Sequence[int], positions: Sequence[int] | None, known: Mapping[int, tuple[tuple[int, ...], int]]
    ) -> None:
        for n, position in zip(streams, positions or (), strict=False):
            carried = self._before[known[n][0]].position if position else 0
            if position != carried:
                raise ValueError(
                    f"stream {n} continues at its token {position}, but the model has read it to token {carried}: a "
                    "batch was skipped or repeated. Resume data and model from the same checkpoint."
                )

    def put(self, streams: Sequence[int], state: StreamState) -> None:
        """Store the state after a batch of these streams."""
        key = tuple(streams)
        for group in [g for g in self._now if g != key and not set(g).isdisjoint(key)]:
            old = self._now.pop(group)
            self._now |= {(n,): old.select(i) for i, n in enumerate(group) if n not in key}
        self._now[key] = state
        self._computed |= set(key)

    def finish(self) -> None:
        """Mark the last batch as finished, and free the states before it; the next `take` begins a new batch."""
        self._before, self._batch = {}, None

    def to(self, device: torch.device | str) -> None:
        """Move all states to a device."""
        states = {id(x): x for group in (self._now, self._before) for x in group.values()}
        moved = {key: x.to(device) for key, x in states.items()}
        self._now, self._before = ({n: moved[id(x)] for n, x in group.items()} for group in (self._now, self._before))

    def clear(self) -> None:
        """Delete the states of all streams."""
        self._now, self._before, self._batch, self._computed = {}, {}, None, set()

    # -- checkpoints ---------------------------------------------------------------------------------------------------
    def __bool__(self) -> bool:
        return bool(self._now)

    def state_dicts(self, batch: int | None) -> tuple[dict[int, Any], dict[int, Any]]:
        """Return two dicts by stream, with values on the CPU: streams computed here, and streams that were only loaded.

        Args:
            batch: number of the current batch. If it is unfinished, its states before it are returned; else the latest.
        """
        groups = self._before if batch is not None and batch == self._batch else self._now
        plain = {
            n: state.select(i).to("cpu").state_dict() for group, state in groups.items() for i, n in enumerate(group)
        }
        computed = {n: x for n, x in plain.items() if n in self._computed}
        return computed, {n: x for n, x in plain.items() if n not in self._computed}

    def load_state_dicts(self, states: Mapping[int, Any]) -> None:
        """Delete all states, and load `states`, {stream: `state_dict` of its state}."""
        self.clear()
        self._now = {(int(n),): StreamState.of(x) for n, x in states.items()}
