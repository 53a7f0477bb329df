"""Decoders of Hugging Face's transformers with `attn_implementation="ring_dilated"`."""

from lightning_dilated.ext.transformers.lm import HFCausalLM
from lightning_dilated.ext.transformers.patterns import set_pattern
from lightning_dilated.ext.transformers.registration import dilated_cache, register

__all__ = ["HFCausalLM", "dilated_cache", "register", "set_pattern"]
