"""An invented device with round numbers, so that milliseconds can be added up by hand."""

from __future__ import annotations

from typing import Any

from lightning_dilated.ext.planning.machine import Line, Machine, Parts

MS = 1e-3


def parts(tokens: int, **other: float) -> Parts:
    """Return times proportional to `tokens`. The numbers below are milliseconds for 64 tokens."""
    names = {
        **{"attention_forward": 10.0, "attention_backward": 20.0, "wide_forward": 1.0, "wide_backward": 2.0},
        **{"rest_forward": 6.0, "rest_backward": 14.0, "edge_forward": 3.0, "edge_backward": 5.0},
    }
    return Parts(tokens, **{name: x * MS * tokens / 64 for name, x in {**names, **other}.items()})


def machine(**other: Any) -> Machine:
    """Build a machine: two blocks, two heads of 8. A batch of rows takes 1 + 2 ms, packing 0.5 ms, sums 0.25 ms."""
    defaults: dict[str, Any] = {
        **{
            "name": "made up",
            "dim": 16,
            "depth": 2,
            "heads": 2,
            "head_dim": 8,
            "kv_heads": 2,
            "hidden": 64,
            "vocab": 32,
        },
        **{"precision": "bf16-mixed", "causal": False, "first": 16, "block_parameters": 1000, "edge_parameters": 500},
        **{"parts": (parts(64), parts(128)), "optimizer": 7 * MS, "again": 0.5},
        **{"arrive_forward": Line(1 * MS, 0.0), "arrive_backward": Line(2 * MS, 0.0)},
        **{"pack": Line(0.5 * MS, 0.0), "add": Line(0.25 * MS, 0.0)},
        **{"few_forward": Line(0.125 * MS, 0.0), "few_backward": Line(0.375 * MS, 0.0)},
    }
    return Machine(**{**defaults, **other})
