"""One line at the start of a fit about what a module's pattern cannot do at the data's length, with the fix.

Shape letters: N tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from lightning_dilated.models.rotary_bases import rotary_hint
from lightning_dilated.pattern.explain import explain, walls
from lightning_dilated.pattern.sight import sight, sight_hints
from lightning_dilated.sequence import SequenceSpec

#: residues and uncovered rows show at this length; only walls need the whole one
SHORT = 1 << 14


def advice(module: Any, seq_len: int) -> str | None:
    """What to change about `module.pattern` for sequences of N tokens; None where nothing is wrong."""
    patterns, heads = getattr(module, "patterns", ()), getattr(module, "num_heads", None)
    if not patterns or not isinstance(heads, int) or seq_len < 1:
        return None
    causal, kv_heads = getattr(module, "causal", False), getattr(module, "num_kv_heads", None)
    seen = explain(patterns, min(seq_len, SHORT), heads, len(patterns), causal, kv_heads)
    # whether all tokens are reached is a question of depth, and left to `lightning-dilated explain`
    dead = dict(list(seen.dead_residues.items())[:1])
    at_length = replace(seen, seq_len=seq_len, walls=walls(patterns, seq_len), reach=None, dead_residues=dead, sight=())
    hints, taps = at_length.hints, getattr(getattr(module, "options", None), "kv_conv", None)
    if at_length.walls and taps:
        reach = taps - 1 if causal else taps // 2
        hints += (f"Only kv_conv={taps} carries {reach} token(s) over a wall, in each layer.",)
    others = len(seen.dead_residues) - 1
    if others > 0:
        hints += (f"Likewise residues of {others} more branch{'es' if others > 1 else ''}.",)
    if not module.released_pattern:
        hints += sight_hints(sight(patterns, seq_len, heads, kv_heads or heads))
    return f"{type(module).__name__}.pattern at {seq_len} tokens: {' '.join(hints)}" if hints else None


def position_advice(module: Any, seq_len: int) -> str | None:
    """What to change about the rotary bases for sequences of N tokens; None where nothing is wrong."""
    bases, made_for = getattr(module, "rotary_bases", ()), getattr(module, "max_seq_len", None)
    if getattr(getattr(module, "options", None), "position_encoding", "none") != "rotary":
        return None
    hint = rotary_hint(bases, module.patterns, seq_len, made_for)
    return f"{type(module).__name__} at {seq_len} tokens: {hint}" if hint else None


def longest(batch: Any, spec: SequenceSpec | None, group: Any) -> int:
    """N of the longest sample or document of a batch; 0 where it is not known.

    Args:
        batch: this rank's part.
        spec: which entries are sequences.
        group: the ranks of the sequence, None for one: what they agreed on in the latest call tells N.
    """
    if not isinstance(batch, Mapping):
        return 0
    bounds, lengths = batch.get("cu_seqlens"), batch.get("lengths")
    if isinstance(bounds, Tensor) and bounds.numel() > 1:
        return int(bounds.diff().max())
    if isinstance(lengths, Tensor) and lengths.numel():
        return int(lengths.max())
    if group is not None:
        return 0 if group.agreed is None else group.agreed.seq_len
    sizes = [batch[name].shape[dim] for name, dim in (spec.dims if spec else {}).items() if name in batch]
    return sizes[0] if sizes else 0
