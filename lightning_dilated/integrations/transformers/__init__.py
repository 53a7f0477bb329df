"""Decoders of Hugging Face's transformers with `attn_implementation="ring_dilated"`."""

from typing import Any

from lightning_dilated.integrations.transformers.lm import HFCausalLM
from lightning_dilated.integrations.transformers.patterns import set_pattern
from lightning_dilated.integrations.transformers.registration import register

__all__ = ["DilatedCache", "HFCausalLM", "register", "set_pattern"]


def __getattr__(name: str) -> Any:
    """`DilatedCache`, which imports transformers."""
    if name == "DilatedCache":
        from lightning_dilated.integrations.transformers.cache import DilatedCache

        return DilatedCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
