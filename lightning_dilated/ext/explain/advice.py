"""Advise changes to a model's patterns at the run's length, and to the layout of ranks, at the start of a fit."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from lightning_dilated.ext.explain.explanation import explain, sight, sight_hints, walls
from lightning_dilated.ext.explain.model import beyond_in_words, hashed_heads
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import pairs_of_part
from lightning_dilated.sequence import SequenceGroup
from lightning_dilated.sequence.ranges import clip
from lightning_dilated.sequence.shard import Shard

#: maximum number of tokens in which dead residues and uncovered rows are searched; walls are searched in all tokens
SHORT = 1 << 14
#: propose a different layout if the busiest rank computes more than the mean times this factor
UNBALANCED = 1.1


def advice(module: Any, seq_len: int) -> str | None:
    """Return hints on changes of `module.pattern` for sequences of N tokens; None if there are no problems."""
    patterns, heads = getattr(module, "patterns", ()), getattr(module, "num_heads", None)
    if not patterns or not isinstance(heads, int) or seq_len < 1:
        return None
    causal, kv_heads = getattr(module, "causal", False), getattr(module, "num_kv_heads", None)
    hashed = getattr(module, "hashed", ())
    by_code = hashed_heads(hashed, heads, kv_heads or heads)
    base = explain(patterns, min(seq_len, SHORT), heads, len(patterns), causal, kv_heads, by_code)
    # full reach is not checked here, because it depends on the depth; `lightning-dilated explain` reports it
    dead = dict(list(base.dead_residues.items())[:1])
    at_length = replace(base, seq_len=seq_len, walls=walls(patterns, seq_len), reach=None, dead_residues=dead, sight=())
    hints, taps = at_length.hints, getattr(getattr(module, "options", None), "kv_conv", None)
    if at_length.walls and taps:
        reach = taps - 1 if causal else taps // 2
        hints += (f"Only kv_conv={taps} carries {reach} token(s) over a wall, in each layer.",)
    recurrences = getattr(module, "recurrences", ())
    if any((*recurrences, *hashed)) and (at_length.walls or dead):
        hints += (f"But {beyond_in_words(recurrences, hashed, module.dim // heads)}",)
    further = len(base.dead_residues) - 1
    if further > 0:
        hints += (f"Likewise residues of {further} more branch{'es' if further > 1 else ''}.",)
    if not module.released_pattern and not any(hashed):  # hashed heads look up tokens at any distance
        hints += sight_hints(sight(patterns, seq_len, heads, kv_heads or heads))
    return f"{type(module).__name__}.pattern at {seq_len} tokens: {' '.join(hints)}" if hints else None


def balance_hint(module: Any, group: SequenceGroup, batch: Any) -> str | None:
    """Return a hint to set a different layout if contiguous shards give ranks unequal numbers of pairs; else None.

    Args:
        module: a model that has run on the ranks of the group.
        group: the ranks of the sequence.
        batch: this rank's part of a batch; if it is a mapping, its documents and lengths are used.
    """
    plan, patterns = group.plan, Counter(getattr(module, "patterns", ()))
    if plan is None or group.agreed is None or group.layout != "contiguous" or not getattr(module, "causal", False):
        return None
    ranks = group.ranks // plan.head_size
    if ranks == 1 or not patterns or plan.exchange == "switch":  # "switch" already balances work
        return None
    parts = _documents(batch, group.agreed.seq_len)
    heads = module.num_heads, getattr(module, "num_kv_heads", None)
    busiest = {}
    for layout in ("contiguous", "zigzag"):
        shard = Shard(group.agreed.seq_len, ranks, layout)
        each = [sum(_pairs(x, shard.ranges(r), parts, heads) * n for x, n in patterns.items()) for r in range(ranks)]
        busiest[layout] = max(each) * ranks / max(1, sum(each))
    if busiest["contiguous"] < UNBALANCED or busiest["zigzag"] > busiest["contiguous"] / UNBALANCED:
        return None
    return (
        f"the busiest of {ranks} ranks with layout='contiguous' computes {busiest['contiguous']:.2f} times the mean rank's "
        "(query, key) pairs, because late queries of a causal sequence see most keys. Other ranks wait for it. With "
        f"layout='zigzag' each rank has an early and a late part, and the busiest computes {busiest['zigzag']:.2f} times "
        "the mean. Set it as the strategy's layout, in YAML trainer.strategy.init_args.layout: zigzag."
    )


def _documents(batch: Any, seq_len: int) -> list[range]:
    """Return the positions of each document, or of each sample, in a batch."""
    entries = batch if isinstance(batch, Mapping) else {}
    if isinstance(bounds := entries.get("cu_seqlens"), Tensor):
        return [range(a, b) for a, b in itertools.pairwise(bounds.tolist()) if a < b]
    if isinstance(lengths := entries.get("lengths"), Tensor):
        return [range(n) for n in lengths.tolist() if n]
    return [range(seq_len)]


def _pairs(
    pattern: DilatedPattern, pieces: Iterable[range], documents: Iterable[range], heads: tuple[int, int | None]
) -> int:
    """Count the causal (query, key) pairs of the queries at the positions in `pieces`."""
    total = 0
    for piece, document in itertools.product(pieces, documents):
        if part := clip(piece, document.start, document.stop):
            positions = range(part.start - document.start, part.stop - document.start)
            total += sum(pairs_of_part(pattern, positions, *heads))
    return total
