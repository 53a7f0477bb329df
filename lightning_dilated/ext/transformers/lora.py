"""Low-rank updates (LoRA, arXiv 2106.09685) of a decoder's projections, made by peft."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn

from lightning_dilated._validation import integer, known_keys, real

#: options of peft.LoraConfig that this package sets, or that would change the decoder's structure
REFUSED = {
    "auto_mapping": "the decoder is known",
    "megatron_config": "peft would import the module that megatron_core names",
    "megatron_core": "peft would import the module that it names",
    "task_type": "it is always CAUSAL_LM",
    "peft_type": "it is always LORA",
    "inference_mode": "adapters are trained",
    "layer_replication": "the decoder keeps its layers; build it from a config with more of them",
}


def peft_library() -> ModuleType:
    """Import peft. Raises ModuleNotFoundError that names the extra that installs it."""
    try:
        import peft
    except ImportError as error:
        raise ModuleNotFoundError(
            f'lora needs peft: pip install "lightning-dilated[lora]". Importing it failed: {error}', name="peft"
        ) from error
    return peft


def read_options(lora: Any) -> dict[str, Any]:
    """Check the mapping of `HFCausalLM(lora=...)` and return it as plain values.

    Raises: ModuleNotFoundError without peft; TypeError or ValueError that names the option.
    """
    if not isinstance(lora, Mapping):
        raise TypeError(
            "lora must be a mapping of options of peft.LoraConfig, such as {'r': 8, 'lora_alpha': 16, 'target_modules': "
            f"['q_proj', 'v_proj']}}, or None; got {lora!r:.200} of type {type(lora).__name__}."
        )
    peft = peft_library()
    for name, why in REFUSED.items():
        if name in lora:
            raise ValueError(f"lora takes no {name}: {why}. Leave it out.")
    allowed = [n for n in peft.LoraConfig.__dataclass_fields__ if n not in REFUSED]
    known_keys(lora, "lora", allowed)
    options = {name: _plain(value) for name, value in lora.items()}
    integer(options.get("r", 8), "lora.r", 1)
    real(options.get("lora_alpha", 8), "lora.lora_alpha", above=0)
    real(options.get("lora_dropout", 0.0), "lora.lora_dropout", least=0, below=1)
    return options


def _plain(value: Any) -> Any:
    """Convert a value to plain types for YAML and checkpoints."""
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def check_targets(options: dict[str, Any], decoder: Any) -> None:
    """Add adapters to a decoder to check that the options fit it; parameters may be on the meta device.

    Raises: ValueError for options that do not fit, such as a module that the decoder does not have.
    """
    for key in ("target_modules", "modules_to_save", "exclude_modules"):
        names = options.get(key)
        for name in names if isinstance(names, list) else ():
            if not any(path == name or path.endswith(f".{name}") for path, _ in decoder.named_modules()):
                raise ValueError(
                    f"lora.{key} has {name!r}, and {type(decoder).__name__} has no such module. Its linear layers are: "
                    f"{', '.join(_linear_names(decoder))}."
                )
    try:
        add_adapters(decoder, {**options, "init_lora_weights": False})
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ValueError(
            f"lora does not fit {type(decoder).__name__}: {error} Its linear layers are: "
            f"{', '.join(_linear_names(decoder))}."
        ) from error
    ends = decoder.get_input_embeddings(), decoder.get_output_embeddings()
    if options.get("ensure_weight_tying") and any(hasattr(x, "lora_A") or hasattr(x, "modules_to_save") for x in ends):
        raise ValueError(
            "lora.ensure_weight_tying makes embedding and output projection share their adapters or copies, which cannot be "
            "copied, merged and loaded for every decoder. Leave it out: the embedding and the output projection then have "
            "separate adapters or copies."
        )


def _linear_names(decoder: nn.Module) -> list[str]:
    names = (name.rpartition(".")[2] for name, m in decoder.named_modules() if isinstance(m, nn.Linear))
    return list(dict.fromkeys(name for name in names if name != "default"))  # peft's name for layers in adapters


def add_adapters(decoder: Any, options: dict[str, Any]) -> Any:
    """Add adapters to a decoder in place, freeze all other weights, and return peft's wrapper of the decoder.

    New adapters do not change outputs. They have the dtype of the weights, or fp32 if weights have 16 bits.
    """
    peft = peft_library()
    with warnings.catch_warnings():  # peft reads a deprecated attribute
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return peft.get_peft_model(decoder, peft.LoraConfig(task_type="CAUSAL_LM", **copy.deepcopy(options)))


def wide_adapters(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the values of a module's fp32 adapters by name."""
    named = ((name, p) for name, p in module.named_parameters() if ".lora_" in name)
    return {name: p.data for name, p in named if p.dtype == torch.float32}


def keep_wide(module: nn.Module, before: dict[str, torch.Tensor]) -> None:
    """Restore `before`, the values that `wide_adapters` returned, in adapters that have since been cast to 16 bits."""
    for name, values in before.items():
        p = module.get_parameter(name)
        if p.dtype in (torch.bfloat16, torch.float16):
            p.data = values.to(p.device)
