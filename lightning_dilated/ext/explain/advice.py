"""advice: what to change about a model's patterns for the length that it trains at."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_dilated.ext.explain.explanation import explain, sight, sight_hints, walls
from lightning_dilated.recurrence.description import reach_in_words

#: dead residues and uncovered rows are looked for up to this length; walls at the whole one
SHORT = 1 << 14


def advice(module: Any, seq_len: int) -> str | None:
    """Hints on changing `module.pattern` for sequences of N tokens; None if nothing is wrong."""
    patterns, heads = getattr(module, "patterns", ()), getattr(module, "num_heads", None)
    if not patterns or not isinstance(heads, int) or seq_len < 1:
        return None
    causal, kv_heads = getattr(module, "causal", False), getattr(module, "num_kv_heads", None)
    seen = explain(patterns, min(seq_len, SHORT), heads, len(patterns), causal, kv_heads)
    # whether all tokens are reached depends on the depth, and is left to `lightning-dilated explain`
    dead = dict(list(seen.dead_residues.items())[:1])
    at_length = replace(seen, seq_len=seq_len, walls=walls(patterns, seq_len), reach=None, dead_residues=dead, sight=())
    hints, taps = at_length.hints, getattr(getattr(module, "options", None), "kv_conv", None)
    if at_length.walls and taps:
        reach = taps - 1 if causal else taps // 2
        hints += (f"Only kv_conv={taps} carries {reach} token(s) over a wall, in each layer.",)
    recurrences = getattr(module, "recurrences", ())
    if any(recurrences) and (at_length.walls or dead):
        hints += (f"But {reach_in_words(recurrences, module.dim // heads)}",)
    others = len(seen.dead_residues) - 1
    if others > 0:
        hints += (f"Likewise residues of {others} more branch{'es' if others > 1 else ''}.",)
    if not module.released_pattern:
        hints += sight_hints(sight(patterns, seq_len, heads, kv_heads or heads))
    return f"{type(module).__name__}.pattern at {seq_len} tokens: {' '.join(hints)}" if hints else None
