"""Explain a model's patterns, and describe how its layers connect tokens beyond them: by recurrences and hashed heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_dilated.ext.explain.explanation import Explanation, explain
from lightning_dilated.pattern import Hashed
from lightning_dilated.recurrence import Recurrence


def explain_model(model: Any, seq_len: int) -> Explanation:
    """Explain the layers of a `DilatedModule` for sequences of N tokens; see `DilatedModule.explain`."""
    heads, kv_heads = model.num_heads, getattr(model, "num_kv_heads", None) or model.num_heads
    hashed, causal = getattr(model, "hashed", ()), getattr(model, "causal", False)
    reach = explain(
        model.patterns, seq_len, heads, model.depth, causal, kv_heads, hashed_heads(hashed, heads, kv_heads)
    )
    head_dim = int(getattr(model, "dim", heads)) // heads
    return replace(reach, beyond=beyond_in_words(getattr(model, "recurrences", ()), hashed, head_dim))


def hashed_heads(layers: Sequence[Hashed | None], num_heads: int, num_kv_heads: int) -> tuple[int, ...]:
    """Return the number of hashed query heads in each layer."""
    return tuple(0 if x is None else x.heads * num_heads // num_kv_heads for x in layers)


def beyond_in_words(
    recurrences: Sequence[Recurrence | None], hashed: Sequence[Hashed | None], head_dim: int
) -> str | None:
    """Return sentences about the layers that connect tokens beyond their patterns; None if there are no such layers."""
    sentences = []
    if any(recurrences):
        kinds = " and ".join(dict.fromkeys(x.kind for x in recurrences if x is not None))
        sentences.append(
            f"{_which(recurrences)} reach everything through a memory ({kinds}) of {head_dim} x {head_dim} numbers a kv "
            "head, across walls and from positions that no head uses: compressed, so single keys of long texts may be lost."
        )
    if any(hashed):
        x = next(filter(None, hashed))
        sentences.append(
            f"in {_which(hashed)}, queries of the last {x.heads} kv head(s) read up to {x.probes} x {x.latest} rows by "
            "learned code, anywhere before them in the document and without positions: walls do not stop them."
        )
    return " ".join(sentences) or None


def _which(layers: Sequence[Any]) -> str:
    numbers = [str(i) for i, x in enumerate(layers) if x is not None]
    return "all layers" if len(numbers) == len(layers) else f"layer(s) {', '.join(numbers)}"
