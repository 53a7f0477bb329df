"""Compute index tables of a rank's tokens and chunks. A run, the part of a document in one piece, is cut into chunks.

Shape letters: B batch, L tokens of this rank, m tokens of a memory segment, C slots of a chunk, T chunks of all runs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_dilated._compat.torch import real_tensors
from lightning_dilated._device import send

#: number of tokens of a chunk for kinds without memory segments
CHUNK = 64


class Document(NamedTuple):
    """Tokens start to stop - 1 of a sample; `before`: number of tokens of its open memory segment in earlier calls."""

    sample: int
    start: int
    stop: int
    before: int = 0


@dataclass(frozen=True)
class Call:
    """One call, described by integers that are the same on all ranks.

    Attributes:
        documents: all documents, including empty ones; the documents of a sample are consecutive.
        batch: B.
        pieces: (rank, positions) of each non-empty range of consecutive positions, in the order of the sequence.
        segment: m; None if the state changes with every token.
        pending_rows: whether states store tokens of the open segment as rows (delta), not as sums (linear).
        after: whether a piece that ends inside a memory segment needs the segment's later tokens (if not causal).
    """

    documents: tuple[Document, ...]
    batch: int
    pieces: tuple[tuple[int, range], ...]
    segment: int | None = None
    pending_rows: bool = False
    after: bool = False

    def runs(self) -> Iterator[tuple[int, int, range]]:
        """Yield the piece's number, the document's number, and positions, for each part of a document in one piece."""
        for (number, (_, piece)), (index, doc) in itertools.product(enumerate(self.pieces), enumerate(self.documents)):
            start, stop = max(piece.start, doc.start), min(piece.stop, doc.stop)
            if start < stop:
                yield number, index, range(start, stop)

    def seen(self, document: int, position: int) -> int:
        """Return the number of tokens before a position that are in the same memory segment."""
        doc = self.documents[document]
        return 0 if self.segment is None else (doc.before + position - doc.start) % self.segment

    def unseen(self, document: int, position: int) -> int:
        """Return the number of tokens from a position on that are in the previous token's segment; 0 unless `after`."""
        seen = self.seen(document, position)
        if not (self.after and seen and self.segment):
            return 0
        return min(self.segment - seen, self.documents[document].stop - position)

    @functools.cached_property
    def halo(self) -> tuple[int, int]:
        """The maximum numbers of tokens before and after a piece that a rank needs to complete memory segments."""
        left = right = 0
        for _, doc, part in self.runs():
            left = max(left, min(self.seen(doc, part.start), part.start - self.documents[doc].start))
            right = max(right, self.unseen(doc, part.stop))
        return left, right


class Run(NamedTuple):
    """A part of a document in one of the rank's pieces.

    Attributes:
        piece: index of the piece among the rank's pieces.
        skipped: number of leading slots in the first chunk that are empty or have tokens before `start`.
        trail: number of tokens from `stop` on that complete the last memory segment.
    """

    document: int
    piece: int
    start: int
    stop: int
    skipped: int
    trail: int

    @property
    def slots(self) -> int:
        return self.skipped + self.stop - self.start + self.trail


@dataclass(frozen=True)
class Tables:
    """Index tables between a rank's tokens and its chunks.

    Chunks are numbered step by step: first the first chunk of each run, then the second chunk of each run that has one,
    and so on. Runs are sorted by their number of chunks, the longest first.

    Attributes:
        runs: this rank's runs.
        width: C.
        counts: for each step i, the number of runs with an i-th chunk.
        queries: (T, C) for each slot, the row of its token among B L rows; B L for an empty slot.
        keys: (T, C) for each slot, the row of its key and value in a concatenation: tokens of pieces and halos, pending
            rows of the state, and a row of zeros.
        outputs: (B L,) the slot of each token; T C for a token without a document.
        closed: (T,) whether the chunk contains the end of a memory segment.
        last: (runs,) the last chunk of each run.
        started: (runs,) index of the document with pending sums for the run's first chunk; number of documents if none.
        begins: (runs,) index of the state before each run, among incoming states (pieces, B) and then initial states.
        outgoing: (pieces, B) index of the run that computes the state after the piece; number of runs if unchanged.
        continued: (runs,) whether a run continues a document of an earlier piece.
        finals: (documents,) index of the state after each document, among runs, initial states (of empty documents),
            and a row of zeros.
        single: (T,) whether the chunk's document has only one memory segment.
    """

    runs: tuple[Run, ...]
    width: int
    counts: tuple[int, ...]
    queries: Tensor
    keys: Tensor
    outputs: Tensor
    closed: Tensor
    last: Tensor
    started: Tensor
    begins: Tensor
    outgoing: Tensor
    continued: Tensor
    finals: Tensor
    single: Tensor

    def to(self, device: torch.device) -> Tables:
        values = {name: send(x, device) if isinstance(x, Tensor) else x for name, x in vars(self).items()}
        return Tables(**values)

    def states_to(self, device: torch.device) -> Tables:
        """Return a copy with the tables of states on `device`; tables of rows and chunks remain on the CPU."""
        names = ("begins", "outgoing", "continued", "finals")
        return replace(self, **{name: send(getattr(self, name), device) for name in names})

    @property
    def documents(self) -> Tensor:
        """The index of each chunk's document, (T,), on the CPU."""
        every = torch.tensor([run.document for run in self.runs], dtype=torch.int64)
        return torch.cat([every[:0], *(every[:n] for n in self.counts)])


@functools.lru_cache(maxsize=8)  # a small cache, because tables are as long as the sequence
@torch.inference_mode(False)  # no inference tensors, because a training call may reuse the cached tables
@real_tensors()
def tables(call: Call, rank: int, chunk: int) -> Tables:
    """Return the tables of one rank, on the CPU; `chunk`: C for calls without memory segments."""
    piece_numbers = [number for number, (owner, _) in enumerate(call.pieces) if owner == rank]
    runs = sorted(_runs(call, piece_numbers), key=lambda run: -run.slots)
    most = max((run.slots for run in runs), default=1)
    width = call.segment if call.segment is not None and most > call.segment else most
    width = min(width, chunk) if call.segment is None else width
    if width == most and call.segment is not None and not call.pending_rows:  # no empty slots are needed
        width, runs = _narrowed(call, runs)
    numbers = [-(-run.slots // width) for run in runs]
    counts = tuple(sum(n > step for n in numbers) for step in range(max(numbers, default=0)))
    lengths = [len(call.pieces[number][1]) for number in piece_numbers]
    rows = _Rows(call, tuple(call.pieces[number][1] for number in piece_numbers), sum(lengths))
    total = sum(counts)
    firsts = [0, *itertools.accumulate(counts)]
    queries = torch.full((total * width,), rows.local_rows)
    keys = torch.full((total * width,), rows.key_rows)
    outputs = torch.full((rows.local_rows,), total * width)
    closed, last = torch.zeros(total, dtype=torch.bool), torch.zeros(len(runs), dtype=torch.int64)
    for place, run in enumerate(runs):
        slots = torch.arange(run.slots)
        steps = slots // width
        at = (torch.tensor(firsts)[steps] + place) * width + slots % width
        here = slice(run.skipped, run.skipped + run.stop - run.start)
        local = rows.local(run, torch.arange(run.start, run.stop))
        queries[at[here]] = local
        outputs[local] = at[here]
        keys[at] = rows.keys(run)
        last[place] = firsts[numbers[place] - 1] + place
        if call.segment is not None:
            empty = call.seen(run.document, run.start) - run.skipped  # number of slots that `_narrowed` removed
            for step in range(numbers[place]):
                closed[firsts[step] + place] = run.slots - run.trail + empty >= (step + 1) * call.segment
    single = torch.tensor([_segments(call, run.document) == 1 for run in runs], dtype=torch.bool)
    return Tables(
        tuple(runs),
        width,
        counts,
        queries.view(total, width),
        keys.view(total, width),
        outputs,
        closed,
        last,
        *_states(call, piece_numbers, runs, rank),
        torch.cat([single[:0], *(single[:n] for n in counts)]),
    )


def _runs(call: Call, piece_numbers: Sequence[int]) -> Iterator[Run]:
    numbers = {number: local for local, number in enumerate(piece_numbers)}
    for piece, document, part in call.runs():
        if piece in numbers:
            skipped, trail = call.seen(document, part.start), call.unseen(document, part.stop)
            yield Run(document, numbers[piece], part.start, part.stop, skipped, trail)


def _narrowed(call: Call, runs: list[Run]) -> tuple[int, list[Run]]:
    """Remove leading slots that are empty in all runs, because the state has their sums; return C and the runs."""
    unused = min((run.skipped - _before(call, run) for run in runs), default=0)
    runs = [run._replace(skipped=run.skipped - unused) for run in runs]
    return max((run.slots for run in runs), default=1), runs


def _before(call: Call, run: Run) -> int:
    """Return how many tokens of this call precede the run in its first memory segment."""
    return min(call.seen(run.document, run.start), run.start - call.documents[run.document].start)


def _segments(call: Call, document: int) -> int:
    doc = call.documents[document]
    return -(-(doc.stop - doc.start) // (call.segment or 1))


class _Rows:
    """Compute the row indices of a run's positions."""

    def __init__(self, call: Call, pieces: tuple[range, ...], length: int) -> None:
        self.call, self.pieces, self.length = call, pieces, length
        self.before = [0, *itertools.accumulate(map(len, pieces))]
        self.around = sum(call.halo)
        self.local_rows = call.batch * length
        self.halo_rows = call.batch * (length + len(pieces) * self.around)
        self.key_rows = self.halo_rows
        if call.pending_rows:
            self.key_rows += len(call.documents) * (call.segment or 0)

    def local(self, run: Run, positions: Tensor) -> Tensor:
        """Return the rows among (B, L) of positions in the run's piece."""
        sample = self.call.documents[run.document].sample
        return sample * self.length + self.before[run.piece] + positions - self.pieces[run.piece].start

    def keys(self, run: Run) -> Tensor:
        """Return the rows of keys for all slots of a run."""
        positions = torch.arange(run.start - run.skipped, run.stop + run.trail)
        doc, piece = self.call.documents[run.document], self.pieces[run.piece]
        if not self.around:  # without a halo, the rows are in (B, L)
            rows = self.local(run, positions)
        else:
            start = self.call.batch * (self.before[run.piece] + run.piece * self.around)
            start += doc.sample * (len(piece) + self.around) + self.call.halo[0]
            rows = start + positions - piece.start
        if self.call.pending_rows:
            pending = self.halo_rows + run.document * (self.call.segment or 0) + torch.arange(len(positions))
        else:
            pending = torch.full_like(positions, self.key_rows)
        return torch.where(positions < doc.start, pending, rows)


def _states(call: Call, piece_numbers: Sequence[int], runs: Sequence[Run], rank: int) -> tuple[Tensor, ...]:
    """Return the tables `started`, `begins`, `outgoing`, `continued` and `finals` of `Tables`."""
    number = len(call.documents)
    started, begins, continued = [], [], []
    outgoing = torch.full((len(piece_numbers), call.batch), len(runs))
    latest: dict[tuple[int, int], int] = {}
    finals = [len(runs) + number] * number
    for place, run in enumerate(runs):
        doc = call.documents[run.document]
        carried = call.seen(run.document, run.start) > run.start - doc.start
        started.append(run.document if carried else number)
        continued.append(doc.start < run.start)
        incoming = run.piece * call.batch + doc.sample
        begins.append(incoming if doc.start < run.start else len(piece_numbers) * call.batch + run.document)
        if run.start >= latest.get((run.piece, doc.sample), 0):
            latest[run.piece, doc.sample] = run.start
            outgoing[run.piece, doc.sample] = place
        if run.stop == doc.stop:
            finals[run.document] = place
    for index, doc in enumerate(call.documents):
        if doc.start == doc.stop and rank == 0:
            finals[index] = len(runs) + index
    flags = torch.tensor(continued, dtype=torch.bool)
    return (
        torch.tensor(started, dtype=torch.int64),
        torch.tensor(begins, dtype=torch.int64),
        outgoing,
        flags,
        torch.tensor(finals, dtype=torch.int64),
    )
