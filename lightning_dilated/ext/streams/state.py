"""Store the rows, convolution inputs and recurrent states that layers carry from call to call; their size is bounded.

Shape letters: B batch, D head dim, E embedding dim, C channels, W taps of `kv_conv`, n rows; a row is (2, D): K and V.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_dilated.ext.hashed.rows import HashedRows
from lightning_dilated.ext.recurrence.state import RecurrentState
from lightning_dilated.ext.streams.carried_rows import CarriedRows
from lightning_dilated.sequence.requirements import Document

#: the state of a recurrence, or the rows of hashed heads
Memory = RecurrentState | HashedRows
#: rows (n, 2, D) of keys and values, and their description
Carried = tuple[Tensor, tuple[CarriedRows, ...]]


@dataclass
class StreamState:
    """The state that a model carries from one call of its `stream` to the next. The pattern's segments limit its size.

    Attributes:
        position: number of tokens of each sample so far.
        starts: for each sample, the first position of its unfinished document.
        rows: by (layer, first head): rows (n, 2, D) of keys and values, and their description.
        tails: last inputs (B, W - 1, C) of convolutions: `kv_conv` of layer i at i, others as `LayerPlace.of_part`.
        memories: the state of layer i's recurrence at i, and the rows of its hashed heads at -1 - i.
        hidden: (B, 1, E) the last token's hidden state, which predicts the next token; None before the first token.
        owner: description of the model that computed the state.
    """

    position: int = 0
    starts: list[int] = field(default_factory=list)
    rows: dict[tuple[int, int], Carried] = field(default_factory=dict)
    tails: dict[int, Tensor] = field(default_factory=dict)
    hidden: Tensor | None = None
    owner: str = ""
    memories: dict[int, Memory] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = [x for x, _ in self.rows.values()] + [*self.tails.values(), self.hidden]
        return sum(x.nbytes for x in tensors if x is not None) + sum(x.nbytes for x in self.memories.values())

    def resumed(self, key: tuple[int, int], documents: Sequence[Document]) -> Carried | None:
        """Return the rows of a layer that `documents` still read; None if the layer has no rows."""
        if key not in self.rows:
            return None
        rows, pieces = self.rows[key]
        continued = {(d.sample, d.start): d for d in documents if d.stop > self.position}
        pieces_read, parts = [], []
        for x, part in zip(pieces, rows.split([x.count for x in pieces]), strict=True):
            document = continued.get((x.document.sample, x.document.start))
            if document is not None and min(x.last, document.stop - 1) >= self.position:
                pieces_read.append(x._replace(document=document, last=min(x.last, document.stop - 1)))
                parts.append(part)
        return torch.cat([rows[:0], *parts]), tuple(pieces_read)

    def select(self, sample: int) -> StreamState:
        """Copy the state of one sample."""
        rows: dict[tuple[int, int], Carried] = {}
        for key, (carried, pieces) in self.rows.items():
            split = zip(pieces, carried.detach().split([x.count for x in pieces]), strict=True)
            own_pieces = [(x, part) for x, part in split if x.document.sample == sample]
            numbered = tuple(x._replace(document=replace(x.document, sample=0)) for x, _ in own_pieces)
            rows[key] = torch.cat([carried[:0].detach(), *(part for _, part in own_pieces)]), numbered
        copy_sample = lambda x: x[sample : sample + 1].detach().clone()  # noqa: E731
        tails = {layer: copy_sample(x) for layer, x in self.tails.items()}
        return StreamState(
            self.position,
            [self.starts[sample]],
            rows,
            tails,
            None if self.hidden is None else copy_sample(self.hidden),
            self.owner,
            {layer: x.detach().select([sample]) for layer, x in self.memories.items()},
        )

    @classmethod
    def join(cls, states: Sequence[StreamState]) -> StreamState:
        """Join the samples of several states, in order. Some of the states may be empty.

        Raises:
            ValueError: if there are no states, or their positions differ.
        """
        positions = sorted({s.position for s in states})
        if len(positions) != 1:
            raise ValueError(f"joined states must be at one position; got {len(states)}, at positions {positions}.")
        rows: dict[tuple[int, int], list[Carried]] = {}
        for first, state in zip(itertools.accumulate([0, *(len(s.starts) for s in states)]), states, strict=False):
            for key, (carried, pieces) in state.rows.items():
                shifted = (replace(x.document, sample=x.document.sample + first) for x in pieces)
                moved = tuple(x._replace(document=d) for x, d in zip(pieces, shifted, strict=True))
                rows.setdefault(key, []).append((carried, moved))
        layers = {layer for s in states for layer in s.tails}
        remembering = {layer for s in states for layer in s.memories}
        return cls(
            positions[0],
            [at for s in states for at in s.starts],
            {key: (torch.cat([x for x, _ in parts]), sum((p for _, p in parts), ())) for key, parts in rows.items()},
            {layer: _stacked([(len(s.starts), s.tails.get(layer)) for s in states]) for layer in sorted(layers)},
            _stacked([(len(s.starts), s.hidden) for s in states]),
            next((s.owner for s in states if s.owner), ""),
            {layer: _joined([(len(s.starts), s.memories.get(layer)) for s in states]) for layer in sorted(remembering)},
        )

    def to(self, device: torch.device | str) -> StreamState:
        """Move the state's tensors to a device."""
        rows = {key: (x.to(device), pieces) for key, (x, pieces) in self.rows.items()}
        tails = {layer: x.to(device) for layer, x in self.tails.items()}
        memories = {layer: x.to(torch.device(device)) for layer, x in self.memories.items()}
        hidden = None if self.hidden is None else self.hidden.to(device)
        return replace(self, rows=rows, tails=tails, hidden=hidden, memories=memories)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a dict of tensors, numbers, lists and strings."""
        rows = [
            {"layer": layer, "head": head, "rows": x, "pieces": [_plain(p) for p in pieces]}
            for (layer, head), (x, pieces) in self.rows.items()
        ]
        numbers = {"position": self.position, "starts": list(self.starts), "owner": self.owner}
        memories = {layer: x.state_dict() for layer, x in self.memories.items()}
        return {**numbers, "rows": rows, "tails": dict(self.tails), "hidden": self.hidden, "memories": memories}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> StreamState:
        """Restore a state from its `state_dict`."""
        rows = {(x["layer"], x["head"]): (x["rows"], tuple(map(_piece, x["pieces"]))) for x in state["rows"]}
        numbers = int(state["position"]), list(state["starts"])
        kind = lambda x: HashedRows if "rows" in x else RecurrentState  # noqa: E731
        memories = {layer: kind(x).of(x) for layer, x in state.get("memories", {}).items()}
        return cls(*numbers, rows, dict(state["tails"]), state["hidden"], state["owner"], memories)


def _stacked(parts: Sequence[tuple[int, Tensor | None]]) -> Any:
    """Concatenate (B, ...) tensors, given as (B, tensor). None counts as zeros; if all are None, return None."""
    like = next((x for _, x in parts if x is not None), None)
    if like is None:
        return None
    return torch.cat([like.new_zeros(samples, *like.shape[1:]) if x is None else x for samples, x in parts])


def _joined(parts: Sequence[tuple[int, Any]]) -> Memory:
    """Join the states of a layer, given as (number of samples, state). None counts as an empty state."""
    like = next(x for _, x in parts if x is not None)
    empty = like.select([0]).zeros()
    return type(like).join([empty.select([0] * samples) if x is None else x for samples, x in parts])


def _plain(x: CarriedRows) -> list[int]:
    d = x.document
    return [d.sample, d.samples, d.start, d.stop, x.head, x.rows.start, x.rows.stop, x.rows.step, x.last]


def _piece(x: Sequence[int]) -> CarriedRows:
    return CarriedRows(Document(*x[:4]), x[4], range(*x[5:8]), x[8])
