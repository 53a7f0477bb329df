"""Decoders of Hugging Face's transformers with `attn_implementation="ring_dilated"`."""

from typing import TYPE_CHECKING

from lightning_dilated._extensions import lazy_names

if TYPE_CHECKING:
    from lightning_dilated.ext.transformers import HFCausalLM, dilated_cache, register, set_pattern

__getattr__, __dir__ = lazy_names(__name__)

__all__ = ["HFCausalLM", "dilated_cache", "register", "set_pattern"]
