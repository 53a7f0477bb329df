"""Shards of a sequence: global position <-> (rank, local index) as ranges, and a rank's part of a batch.

Shape letters: N tokens of the sequence, R ranks, L the most tokens of a rank, B batch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from lightning_dilated._validation import integer, one_of, real
from lightning_dilated.sequence.ranges import join

LAYOUTS = ("contiguous", "zigzag", "strided", "chunked")
#: names of `exchange.EXCHANGES`, listed here so that a check of a name need not import all exchanges
EXCHANGE_NAMES = ("gather", "butterfly", "switch", "ring", "hierarchical_gather", "hierarchical_butterfly")
GIB = 1 << 30


def cut(start: int, stop: int, part: int, parts: int) -> range:
    """Return piece `part` of [start, stop). A piece has ceil((stop - start) / parts) positions, or fewer at the end."""
    size = -(-(stop - start) // parts)
    return range(min(start + part * size, stop), min(start + (part + 1) * size, stop))


@dataclass(frozen=True)
class Shard:
    """The assignment of `seq_len` positions to `ranks` ranks.

    Args:
        seq_len: N, any number; ranks may be left empty (N = 9 on 4 ranks: 3, 3, 3, 0).
        ranks: R.
        layout: "contiguous": rank s holds [s L, (s + 1) L), L = ceil(N / R);
            "zigzag": the sequence has 2 R chunks of ceil(N / 2R), and rank s holds chunks s and 2 R - 1 - s;
            "strided": rank s holds the positions p with p mod R = s;
            "chunked": each chunk of `stream` positions (the last may be shorter) is cut into R pieces, and rank s holds
            piece s of each chunk.
        members: ranks of a head-parallel group. These are neighbours and hold their positions together; `ranks` then
            counts groups, and a group has the positions of its members, one member after another.
        stream: C, the tokens of a chunk in the chunked layout.

    Raises:
        ValueError, TypeError: if an argument is invalid. The message names it.
    """

    seq_len: int
    ranks: int
    layout: str = "contiguous"
    members: int = 1
    stream: int | None = None

    def __post_init__(self) -> None:
        integer(self.seq_len, "seq_len", 0)
        integer(self.ranks, "ranks", 1)
        integer(self.members, "members", 1)
        check_layout(self.layout)
        check_stream(self.layout, self.stream)

    @functools.cached_property
    def total(self) -> int:
        """T = R * members."""
        return self.ranks * self.members

    @functools.cached_property
    def interleaved(self) -> bool:
        """True if neighbouring positions are on different ranks or members everywhere (strided)."""
        return self.layout == "strided" and self.total > 1

    @functools.cached_property
    def chunk(self) -> int:
        """Tokens of a full chunk of one member: ceil(N / T), or ceil(N / 2T) in zigzag, or ceil(C / T) in chunked."""
        whole = self.seq_len if self.stream is None else min(self.stream, self.seq_len)
        return -(-whole // (self.total * (2 if self.layout == "zigzag" else 1)))

    @functools.lru_cache(maxsize=65536)  # noqa: B019 - shards are small values, equal ones share their entries
    def ranges(self, rank: int) -> tuple[range, ...]:
        """Return the positions of a rank in local order, without empty ranges."""
        if not 0 <= rank < self.ranks:
            raise IndexError(f"rank {rank} lies outside the {self.ranks} ranks of the sequence.")
        members = range(rank * self.members, (rank + 1) * self.members)
        return join(x for member in members for x in self._member_ranges(member))

    def peers(self, rank: int) -> range | None:
        """Return None: any rank with tokens of a rank's documents may exchange rows with it (see `partners`)."""
        return None

    def held(self, rank: int) -> tuple[range, ...]:
        """Return the positions of the rows that a rank can send: its own positions."""
        return self.ranges(rank)

    def _member_ranges(self, member: int) -> list[range]:
        if self.layout == "strided":
            return [range(member, self.seq_len, self.total)]
        if self.layout == "contiguous":
            return [self._chunk_range(member)]
        if self.stream is not None:
            starts = range(0, self.seq_len, self.stream)
            return [cut(at, min(at + self.stream, self.seq_len), member, self.total) for at in starts]
        return [self._chunk_range(member), self._chunk_range(2 * self.total - 1 - member)]

    def _chunk_range(self, index: int) -> range:
        return range(min(index * self.chunk, self.seq_len), min((index + 1) * self.chunk, self.seq_len))

    def _member(self, position: int) -> int:
        if self.layout == "strided":
            return position % self.total
        if self.stream is not None:
            start = position // self.stream * self.stream
            return (position - start) // len(cut(start, min(start + self.stream, self.seq_len), 0, self.total))
        chunk = position // self.chunk
        return min(chunk, 2 * self.total - 1 - chunk)

    def length(self, rank: int) -> int:
        """Return the number of a rank's tokens."""
        return sum(map(len, self.ranges(rank)))

    @property
    def longest(self) -> int:
        """L, the largest number of tokens on a rank: rank 0, or R - 1 in zigzag, where rank 0 has the last chunk."""
        return max(self.length(0), self.length(self.ranks - 1))

    def owner(self, position: int) -> tuple[int, int]:
        """Return (rank, local index) of a global position.

        Raises:
            IndexError: for a position outside the sequence.
        """
        if not 0 <= position < self.seq_len:
            raise IndexError(f"position {position} lies outside the sequence of {self.seq_len} tokens.")
        rank, before = self._member(position) // self.members, 0
        for piece in self.ranges(rank):
            if position in piece:
                return rank, before + piece.index(position)
            before += len(piece)
        raise AssertionError(f"{self} lost position {position}")

    def local(self, rank: int, position: int) -> int:
        """Return the local index of a position on the rank that holds it.

        Raises:
            IndexError: if `rank` does not hold the position.
        """
        owner, index = self.owner(position)
        if owner != rank:
            raise IndexError(f"position {position} lies on rank {owner}, not on rank {rank}.")
        return index

    def holders(self, start: int, stop: int) -> list[int]:
        """Return the ranks that hold some position of [start, stop), in rising order."""
        start, stop = max(start, 0), min(stop, self.seq_len)
        if self.layout == "strided":
            if stop - start >= self.total:
                return list(range(self.ranks))
            return sorted({p % self.total // self.members for p in range(start, stop)})
        if self.stream is not None:
            overlaps = lambda x: x.start < stop and start < x.stop  # noqa: E731
            return [rank for rank in range(self.ranks) if start < stop and any(map(overlaps, self.ranges(rank)))]
        # one position of every chunk is enough
        ranks = {self._member(p) // self.members for p in range(start, stop, max(self.chunk, 1))}
        return sorted(ranks | {self._member(stop - 1) // self.members} if start < stop else ranks)


def check_layout(layout: str) -> str:
    """Return `layout`, or raise an error that lists the layouts."""
    return one_of(layout, "layout", LAYOUTS)


def check_exchange(name: str) -> str:
    """Return `name`, or raise an error that lists the exchanges."""
    return one_of(name, "exchange", ("auto", *EXCHANGE_NAMES))


def check_exchange_memory(gib: float | None) -> int | None:
    """Return a limit in GiB as bytes."""
    return None if gib is None else int(real(gib, "exchange_memory_gib", above=0, hint=" It is in GiB.") * GIB)


def check_stream(layout: str, stream: int | None) -> None:
    """Raise TypeError or ValueError unless `stream` is set with the chunked layout, and None with other layouts."""
    if layout == "chunked":
        hint = " layout='chunked' cuts a sequence in chunks of this number of tokens."
        integer(0 if stream is None else stream, "stream", 1, hint)
    elif stream is not None:
        raise ValueError(f"stream={stream} goes with layout='chunked', not with layout={layout!r}.")


def check_head_size(size: int | str) -> int | Literal["auto"]:
    """Return `size`, or raise an error that says which sizes are allowed."""
    if isinstance(size, str):
        if size != "auto":
            raise ValueError(f'head_size must be "auto" or a number of ranks, got {size!r}.')
        return "auto"
    return integer(size, "head_size", 1)


def check_chunked(layout: str, exchange: str, head_size: int | str, exchange_memory_gib: float | None = None) -> None:
    """Raise ValueError for settings that the chunked layout does not support."""
    if layout != "chunked":
        return
    if head_size not in (1, "auto"):
        raise ValueError(f"layout='chunked' is not offered with head_size={head_size}: set head_size=1.")
    if exchange not in ("auto", "gather"):
        raise ValueError(
            f"layout='chunked' exchanges rows by gather, not by exchange={exchange!r}: set exchange='auto'."
        )
    if exchange_memory_gib is not None:
        raise ValueError(
            f"layout='chunked' is not offered with exchange_memory_gib={exchange_memory_gib}: leave it out, and take "
            "shorter chunks (ActivationRecompute(stream=...)) to exchange fewer rows at a time."
        )


@dataclass(frozen=True)
class Place:
    """One rank's place among the ranks of a sequence, and their layout: picklable, for loaders and their workers.

    Attributes:
        ranks, rank: number of ranks that share the sequence, and number of this rank.
        layout: "contiguous", "zigzag", "strided" or "chunked".
        stream: tokens of a chunk in the layout "chunked", otherwise None.

    Raises:
        TypeError, ValueError: for an unknown layout, or a `stream` that does not fit the layout.
    """

    ranks: int = 1
    rank: int = 0
    layout: str = "contiguous"
    stream: int | None = None

    def __post_init__(self) -> None:
        check_layout(self.layout)
        check_stream(self.layout, self.stream)

    def ranges(self, seq_len: int) -> tuple[range, ...]:
        """Return the global positions of this rank's tokens, in local order."""
        return Shard(seq_len, self.ranks, self.layout, stream=self.stream).ranges(self.rank)


@dataclass(frozen=True)
class SequenceSpec:
    """Declares which entries of a batch are sequences, by name (or by number, for batches that are tuples).

    Args:
        dims: {entry: dimension of its tokens}; these entries are cut.
        whole: entries that every rank gets whole: `lengths`, `cu_seqlens`, an index, a label of the sequence.
        shift: {entry: fill} for labels that are the tokens themselves. Before the cut, each position gets the next
            token; the last position of the sequence, of each sample (`lengths`) and of each document gets `fill` (the
            loss ignores -100). Entries that are not named here must be shifted already.

    Raises:
        TypeError, ValueError: if an entry is invalid. The message names it.
    """

    dims: Mapping[Any, int]
    whole: Sequence[Any] = ()
    shift: Mapping[Any, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", dict(self.dims))
        object.__setattr__(self, "whole", tuple(self.whole))
        object.__setattr__(self, "shift", dict(self.shift))
        if not self.dims:
            raise ValueError("SequenceSpec.dims names no entry: say which entries of a batch run over the tokens.")
        for name, dim in self.dims.items():
            integer(dim, f"SequenceSpec.dims[{name!r}]")
        twice = [name for name in self.whole if name in self.dims]
        if twice:
            raise ValueError(f"SequenceSpec names {twice} both in dims and in whole; an entry is either cut or whole.")
        lost = [name for name in self.shift if name not in self.dims]
        if lost:
            raise ValueError(f"SequenceSpec.shift names {lost}, which dims does not: only sequences can be shifted.")

    def cut(self, batch: Any, place: Place) -> Any:
        """Return this rank's part of a batch, as a batch of the same kind.

        Raises:
            ValueError: if an entry is not declared, no sequence is found, or sequences have different lengths.
        """
        entries = self._entries(batch)
        seq_len = self._seq_len(entries)
        out = dict(entries)
        for name in self.dims:
            if name in entries:
                x = self._shifted(name, entries) if name in self.shift else entries[name]
                out[name] = _take(x, self.dims[name], place.ranges(seq_len))
        if isinstance(batch, Mapping):
            return out
        return type(batch)(*out.values()) if hasattr(batch, "_fields") else type(batch)(out.values())

    def _entries(self, batch: Any) -> dict[Any, Any]:
        if isinstance(batch, Mapping):
            entries = dict(batch)
        elif isinstance(batch, (tuple, list)):
            entries = dict(enumerate(batch))
        else:
            raise ValueError(
                f"a batch must be a mapping or a tuple for its sequences to be cut, got {type(batch).__name__}; "
                'let the dataset return {"tokens": ...}.'
            )
        unknown = [name for name in entries if name not in self.dims and name not in self.whole]
        if unknown:
            shapes = {
                name: tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for name, x in entries.items()
            }
            raise ValueError(
                f"the batch holds {unknown}, which the sequence_spec does not declare, so it is not known whether to cut "
                f"them. Name each in SequenceSpec.dims (cut along a dimension) or SequenceSpec.whole. The batch: {shapes}."
            )
        return entries

    def _seq_len(self, entries: Mapping[Any, Any]) -> int:
        sizes = {}
        for name, dim in self.dims.items():
            if name in entries:
                x = entries[name]
                if not isinstance(x, Tensor) or not -x.ndim <= dim < x.ndim:
                    shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
                    raise ValueError(f"batch entry {name!r} should be a tensor with dimension {dim}, got {shape}.")
                sizes[name] = x.shape[dim]
        if not sizes:
            raise ValueError(
                f"the batch holds none of {list(self.dims)}, which the sequence_spec declares as sequences, but "
                f"{list(entries)}: let the dataset return what is to be cut, or train without a strategy that cuts."
            )
        if len(set(sizes.values())) > 1:
            raise ValueError(
                f"the sequences of a batch have different numbers of tokens: {sizes}. Entries that are cut must agree; "
                "an entry with one value a sample belongs in SequenceSpec.whole."
            )
        return next(iter(sizes.values()))

    def _shifted(self, name: Any, entries: Mapping[Any, Any]) -> Tensor:
        """Return the next token of each position, over the whole sequence."""
        x, dim, fill = entries[name], self.dims[name] % entries[name].ndim, self.shift[name]
        out = torch.full_like(x, fill)
        if x.shape[dim] > 1:
            out.narrow(dim, 0, x.shape[dim] - 1).copy_(x.narrow(dim, 1, x.shape[dim] - 1))
        moved = out.movedim(dim, 0)
        if entries.get("cu_seqlens") is not None:
            ends = entries["cu_seqlens"][1:].long() - 1
            moved[ends[ends >= 0]] = fill
        if entries.get("lengths") is not None:
            position = torch.arange(x.shape[dim])[:, None] + 1
            last = position >= torch.as_tensor(entries["lengths"])[None]
            moved[last] = fill  # (N, B) of a (B, N, ...) entry
        return out


def _take(x: Tensor, dim: int, ranges: tuple[range, ...]) -> Tensor:
    """Copy the positions along a dimension to new storage, so that a worker sends only these bytes.

    A page-locked tensor that is taken whole is not copied, because a copy to a GPU from ordinary memory is slow and
    makes the host wait.
    """
    if ranges == (range(x.shape[dim]),) and _page_locked(x):
        return x
    parts = [x.narrow(dim, r.start, len(r)) if r.step == 1 else _strided(x, dim, r) for r in ranges]
    if not parts:
        return x.narrow(dim, 0, 0).clone()
    return parts[0].clone(memory_format=torch.contiguous_format) if len(parts) == 1 else torch.cat(parts, dim)


def _page_locked(x: Tensor) -> bool:
    """Return True if x is a plain tensor that fills its page-locked memory; False in a worker, which uses no GPU."""
    if get_worker_info() is not None or type(x) is not Tensor or x.device.type != "cpu" or x.layout != torch.strided:
        return False
    plain = x.is_contiguous() and not x.is_conj() and not x.is_neg()
    return plain and x.is_pinned() and x.untyped_storage().nbytes() == x.nbytes


def _strided(x: Tensor, dim: int, r: range) -> Tensor:
    slices = [slice(None)] * x.ndim
    slices[dim] = slice(r.start, r.stop, r.step)
    return x[tuple(slices)]
