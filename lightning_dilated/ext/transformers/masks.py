"""Masks of transformers as a window, padding and documents, in place of a (B, 1, N, N) tensor.

transformers describes a mask by a function of (sample, head, query, key). In a causal mask, dense or sliding, the keys
that a query sees are an interval that ends at the query, so the interval's first key defines it. A few values of the
function for each token distinguish these masks from the other masks of transformers (chunks, blocks, two-way).
Functions that a model adds are refused without being evaluated.

Shape letters: B batch, L tokens of this rank, N tokens of the sequence, D documents.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from lightning_dilated._compat.torch import ThreadStack, is_fake
from lightning_dilated.ext.transformers.padding import Padding
from lightning_dilated.sequence.collectives import sequence_gather
from lightning_dilated.sequence.group import SequenceGroup, active_sequence

SDPA = 'Load the model with attn_implementation="sdpa" for it.'

#: bounds of documents that a caller passed
_known = ThreadStack("known documents")


@contextlib.contextmanager
def known_documents(bounds: Tensor | None) -> Iterator[None]:
    """Make masks in this context for known documents: global bounds, int32 (D + 1,) on the CPU; None: one document.

    Positions must restart with each document and be global on ranks; documents are not derived from them.
    """
    with _known.with_top(bounds):
        yield


class VisibleKeys:
    """The causal mask of one forward with its restrictions; transformers passes it to each layer.

    Attributes:
        length: L.
        window: number of keys that a token sees, including itself; None: all earlier tokens.
        padding: padding of the samples, or None.
        has_padding_mask: whether the caller gave an `attention_mask`; transformers then ignores documents.
        starts: (D - 1,) this rank's tokens, after its first, that begin a document, as transformers finds them.
        known: whether `known_documents` set `bounds`; if True, `bounds` alone defines the documents.
        bounds: int32 (D + 1,) on the CPU, the global bounds of packed documents; None: one document.
        follows: whether the tokens continue the tokens of a `DilatedCache`.
    """

    def __init__(
        self,
        length: int,
        window: int | None,
        padding: Padding | None,
        has_padding_mask: bool,
        starts: Tensor,
        follows: bool = False,
    ) -> None:
        self.length, self.window, self.padding, self.starts = length, window, padding, starts
        self.has_padding_mask, self.follows = has_padding_mask, follows
        known = _known.of_backward()
        self.known, self.bounds = bool(known), known[-1] if known else None
        self._documents: tuple[Any, Any, Tensor | None] | None = None

    @property
    def lengths(self) -> Tensor | None:
        """Real tokens of padded samples, (B,) int32 on the CPU; None: no padding."""
        return None if self.padding is None else self.padding.lengths

    @torch.compiler.disable  # it reads values
    def documents(self, position_ids: Tensor | None, cu_seq_lens: Tensor | None) -> Tensor | None:
        """Return the global bounds of packed documents, int32 (D + 1,) on the CPU; None: one document.

        The first layer computes the bounds and the other layers reuse them. Collective if ranks share the sequence.

        Raises:
            ValueError: if `cu_seq_lens`, `position_ids` and the mask contradict each other; for documents in several
                rows, or with padding; for positions that count from 0 on each rank.
        """
        if self._documents is None or self._documents[0] is not position_ids or self._documents[1] is not cu_seq_lens:
            group = active_sequence()
            arguments = self, position_ids, cu_seq_lens
            bounds = _local_documents(*arguments) if group is None else _shared_documents(*arguments, group)
            self._documents = position_ids, cu_seq_lens, bounds
        return self._documents[2]


class CachedStep:
    """The mask of queries that follow a transformers cache; transformers makes it for "sdpa"."""

    def __init__(self, mask: Tensor | None) -> None:
        self.mask = mask


@torch.compiler.disable  # it reads values
def visible_keys(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0, **options: Any
) -> VisibleKeys | CachedStep:
    """Return the mask of a forward, with the signature of transformers' AttentionMaskInterface.

    Args:
        batch_size, q_length, kv_length: B, number of new tokens, and number of keys including cached keys.
        q_offset, kv_offset: positions of the first query and the first key.
        options: `mask_function`, `attention_mask`, `local_size`, `use_vmap`, `device`, and other options of "sdpa".

    Raises: ValueError for masks that are not causal windows of documents and padded samples.
    """
    if (group := active_sequence()) is not None:
        group.guard(_refuse_none, group, q_length)
    elif isinstance(q_offset, Tensor) or kv_length + kv_offset > q_length + q_offset:
        raise ValueError(
            f"got {kv_length} keys for {q_length} tokens: ring_dilated does not support a prefix or a cache of a fixed size "
            "(cache_implementation='static'). Leave it out, pass cache=dilated_cache(model.config, max_length=N), or load "
            "the model with attn_implementation='sdpa'."
        )
    offsets = cast(int, q_offset), kv_offset  # q_offset is a tensor only on ranks, where a cache is refused below
    if offsets != (0, 0) or kv_length != q_length:
        return _mask_after_cache(batch_size, (q_length, kv_length), offsets, **options)
    return _mask_of_whole(batch_size, q_length, **options)


def _mask_after_cache(
    batch: int,
    lengths: tuple[int, int],
    offsets: tuple[int, int],
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **options: Any,
) -> VisibleKeys | CachedStep:
    """Return the mask after a cache; `lengths` and `offsets` are the counts and first positions of queries and keys."""
    checked_on_all(_refuse_cache_on_ranks, active_sequence(), *lengths)
    if _follows(lengths, offsets) and local_size != 1:  # with a window of 1, transformers' own cache has these sizes
        padding = None if attention_mask is None else Padding.of(attention_mask)
        none = torch.empty(0, dtype=torch.int64)
        return VisibleKeys(lengths[0], local_size, padding, attention_mask is not None, none, follows=True)
    from transformers import AttentionMaskInterface

    options |= {"attention_mask": attention_mask, "local_size": local_size, "q_offset": offsets[0]}
    sizes = {"batch_size": batch, "q_length": lengths[0], "kv_length": lengths[1], "kv_offset": offsets[1]}
    return CachedStep(AttentionMaskInterface()["sdpa"](**sizes, **options))


def _mask_of_whole(
    batch: int,
    length: int,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **options: Any,
) -> VisibleKeys:
    """Return the mask of tokens without a cache."""
    group, none = active_sequence(), torch.empty(0, dtype=torch.int64)
    if is_fake(none):  # tensors of a plan have no values
        return VisibleKeys(length, local_size, None, attention_mask is not None, none)
    starts = checked_on_all(_intervals, mask_function, batch, length, local_size, device, use_vmap)
    if (known := _known.of_backward()) and group is None:
        _check_known(starts, known[-1])
    padding = None
    if attention_mask is not None:
        checked_on_all(_check_padding_mask, attention_mask, batch, length)
        padding = Padding.of(attention_mask, group)
    return VisibleKeys(length, local_size, padding, attention_mask is not None, starts)


def _follows(lengths: tuple[int, int], offsets: tuple[int, int]) -> bool:
    """Return whether a `DilatedCache` is in use: the keys are exactly the new tokens, and there are earlier tokens."""
    return offsets[0] == offsets[1] > 0 and lengths[0] == lengths[1]


def checked_on_all(check: Callable[..., Any], *args: Any) -> Any:
    """Run a check; if ranks share the sequence, its error is raised on all of them."""
    group = active_sequence()
    return check(*args) if group is None else group.guard(check, *args)


def _refuse_none(group: SequenceGroup, length: int) -> None:
    """Raise for a rank without tokens, before the code of transformers fails on that rank alone."""
    if not length:
        raise ValueError(
            f"rank {group.rank} of {group.ranks} holds no token of this sequence, but decoders of transformers need at "
            "least one. Give the sequence at least a token for each rank (pack several into a row), or use fewer ranks."
        )


def _refuse_cache_on_ranks(group: SequenceGroup | None, queries: int, keys: int) -> None:
    if group is not None:
        raise ValueError(
            f"ring_dilated on ranks that share a sequence supports no cache and no prefix: got {queries} queries and {keys} "
            "keys. Pass each rank's own part of attention_mask; generate outside of the sequence."
        )


def _intervals(
    mask_function: Callable[..., Any] | None,
    batch: int,
    length: int,
    window: int | None,
    device: torch.device | str,
    added: bool,
) -> Tensor:
    """Check that each token sees one interval of keys; return `VisibleKeys.starts`, (D - 1,) on the CPU.

    For each token p the function is evaluated at p + 1 (unseen), p, p - 1 (unseen if p starts a document), the first
    key of the interval, and the key before it (unseen). `added`: the model adds its own functions to the mask.
    """
    if added or mask_function is None:
        raise ValueError(
            "ring_dilated cannot compute the mask of this model: it adds a mask function of its own to the causal one, as "
            f"models of images and of two-way attention do. {SDPA}"
        )
    rows, p = torch.arange(batch, device=device)[:, None], torch.arange(length, device=device)[None]

    def sees(key: Tensor, valid: Tensor) -> Tensor:
        visible = mask_function(rows, 0, p.expand(batch, -1), key.clamp(0, max(0, length - 1)).expand(batch, -1))
        return torch.as_tensor(visible, device=device).expand(batch, length) & valid

    always = torch.ones_like(p, dtype=torch.bool)
    begins = ~sees(p - 1, p > 0) if window != 1 else p.expand(batch, -1) == 0
    first = torch.where(begins, p, 0).cummax(1).values if length else p.expand(batch, -1)
    if window is not None:
        first = torch.maximum(first, p - window + 1)
    wrong = sees(p + 1, p < length - 1) | ~sees(p, always) | ~sees(first, always) | sees(first - 1, first > 0)
    further = begins[:, 1:]
    if bool(wrong.any()):
        raise ValueError(
            "ring_dilated computes causal attention, dense or in a sliding window, but this model's mask is another one, "
            f"such as two-way attention, or blocks that see each other both ways. {SDPA}"
        )
    # ranks skip this check, because positions of their layout jump in every row
    if batch > 1 and active_sequence() is None and bool(further.any()):
        raise ValueError(_several_rows(batch) + " A model that attends within chunks of tokens is not supported.")
    return further.any(0).nonzero()[:, 0].cpu() + 1


def _check_padding_mask(mask: Tensor, batch: int, length: int) -> None:
    if mask.shape != (batch, length):
        raise ValueError(
            f"attention_mask must be {(batch, length)}, like the tokens; got {tuple(mask.shape)}. On ranks that share a "
            "sequence, pass each rank's own part."
        )


# -- documents ---------------------------------------------------------------------------------------------------------
def _local_documents(mask: VisibleKeys, position_ids: Tensor | None, cu_seq_lens: Tensor | None) -> Tensor | None:
    _check_starts(mask, position_ids)
    if cu_seq_lens is not None:
        return _checked_bounds(mask, cu_seq_lens, mask.starts)
    if position_ids is not None and not len(mask.starts) and not is_fake(position_ids):
        _refuse_ignored_documents(mask, position_ids.cpu())
    return _bounds(mask.starts, mask.length) if len(mask.starts) else None


def _shared_documents(
    mask: VisibleKeys, position_ids: Tensor | None, cu_seq_lens: Tensor | None, group: SequenceGroup
) -> Tensor | None:
    """Return the bounds of a sequence's documents from the positions of all ranks."""
    group.guard(_check_starts, mask, position_ids)
    if position_ids is None:
        error = ValueError(
            "a sequence on ranks needs position_ids, the global positions of each rank's tokens, but this model does not "
            "pass them to its attention. Train it on one rank."
        )
        group.refuse(error)
        raise error
    if cu_seq_lens is None:
        group.guard(_check_jumps, mask, position_ids)
    positions = sequence_gather(position_ids.to(torch.int64), 1, group).cpu()
    starts = _restarts(positions)
    if cu_seq_lens is not None:
        return _checked_bounds(mask, cu_seq_lens, starts)
    if group.ranks > 1 and _are_each_ranks_own(positions, group):
        raise ValueError(
            "position_ids count from 0 on every rank, as transformers' default positions do. Pass the global positions of "
            "this rank's tokens, group.positions(length)[None]; if documents really begin at each rank's first token, pass "
            "their global bounds as cu_seq_lens_q, too."
        )
    if mask.has_padding_mask:
        _refuse_ignored_documents(mask, positions)
    if mask.has_padding_mask or not len(starts):
        return None
    if len(positions) > 1:
        raise ValueError(_several_rows(len(positions)))
    return _bounds(starts, positions.shape[1])


def _check_known(starts: Tensor, bounds: Tensor | None) -> None:
    """Raise if a mask restarts at a token that is not a bound of the known documents."""
    unknown = set(starts.tolist()) - set([] if bounds is None else bounds[1:-1].tolist())
    if unknown:
        raise ValueError(_chunks(sorted(unknown)))


def _check_starts(mask: VisibleKeys, position_ids: Tensor | None) -> None:
    """Raise if the mask restarts at a token where this rank's position_ids (B, L) do not."""
    if position_ids is not None and position_ids.ndim != 2:
        raise ValueError(f"position_ids must be (1, N) or (B, N); this model has {tuple(position_ids.shape)}. {SDPA}")
    restarts = [] if position_ids is None or not len(mask.starts) else _restarts(position_ids).tolist()
    if not set(mask.starts.tolist()) <= set(restarts):
        raise ValueError(_chunks(mask.starts.tolist()))


def _check_jumps(mask: VisibleKeys, position_ids: Tensor) -> None:
    """Raise if transformers built the mask without reading this rank's position_ids."""
    if not mask.has_padding_mask and len(_restarts(position_ids)) != len(mask.starts):
        raise ValueError(
            "position_ids of this rank's tokens restart or jump, but transformers ignores them with a cache, so it is "
            "unknown whether they mark documents. Pass use_cache=False."
        )


def _refuse_ignored_documents(mask: VisibleKeys, positions: Tensor) -> None:
    """Raise for positions (B, N) that restart among real tokens, because transformers' mask assumes one document."""
    restarts = positions.diff(dim=1) < 1
    if mask.padding is not None:
        real = mask.padding.real()
        restarts = restarts & real[:, :-1] & real[:, 1:]
    if bool(restarts.any()):
        why = "an attention_mask" if mask.has_padding_mask else "a cache"
        remedy = (
            "Leave attention_mask out, and pass use_cache=False" if mask.has_padding_mask else "Pass use_cache=False"
        )
        raise ValueError(
            "position_ids restart, as for packed documents, but transformers makes a mask of one document: "
            f"with {why} it ignores position_ids, and tokens would attend across documents. {remedy}."
        )


def _are_each_ranks_own(positions: Tensor, group: SequenceGroup) -> bool:
    """Return whether positions (B, N) count from 0 on each rank."""
    shard = group.shard(positions.shape[1])
    columns = [torch.cat([torch.arange(x.start, x.stop, x.step) for x in shard.ranges(r)]) for r in range(group.ranks)]
    return all(bool((positions[:, at] == torch.arange(len(at))).all()) for at in columns)


def _chunks(starts: list[int]) -> str:
    return (
        f"this model's mask restarts at tokens {starts[:8]}, where position_ids do not: it attends within chunks of "
        f"tokens, as Llama 4 does, which ring_dilated does not compute. {SDPA}"
    )


def _several_rows(batch: int) -> str:
    return (
        f"documents are packed in a batch of {batch} rows (position_ids restart): packed documents need a batch of 1. "
        "Concatenate the rows to one, or pad each document to a row and give attention_mask."
    )


def _restarts(positions: Tensor) -> Tensor:
    """Return the sorted columns, on the CPU, at which transformers starts documents: positions do not rise by 1."""
    return (positions.diff(dim=-1) != 1).any(0).nonzero()[:, 0].cpu() + 1


def _bounds(starts: Tensor, length: int) -> Tensor:
    return torch.cat([torch.zeros(1), starts, torch.tensor([length])]).to(torch.int32)


def _checked_bounds(mask: VisibleKeys, cu_seq_lens: Tensor, starts: Tensor) -> Tensor:
    """Return `cu_seq_lens` on the CPU, after checking that positions restart at its bounds or not at all."""
    if mask.has_padding_mask:
        raise ValueError("give attention_mask (padded samples) or cu_seq_lens_q (packed documents), not both.")
    bounds = cu_seq_lens.to("cpu", torch.int32)
    inner = sorted(set(bounds[1:-1].tolist()) - {0, int(bounds[-1])})
    if len(starts) and starts.tolist() != inner:
        raise ValueError(
            f"position_ids start documents at {starts.tolist()} and cu_seq_lens_q at {inner}. Give equal ones, or one of "
            "them."
        )
    return bounds
