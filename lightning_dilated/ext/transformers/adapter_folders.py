"""Folders of adapters in peft's format, plus the decoder's config at training time."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_dilated._validation import text_of
from lightning_dilated.ext.transformers.lora import peft_library, read_options

#: peft's file of options
_OPTIONS = "adapter_config.json"
#: the decoder's config, including patterns and changed values; peft does not read this file
_CONFIG = "decoder_config.json"
#: names of the file of weights; peft writes one of them
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
#: values of a decoder's config that determine the shapes of its weights; other values may change
_SHAPES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)
#: options of `lora` that may differ from the folder's when training continues
_FREE = ("lora_dropout", "init_lora_weights")


def is_folder(path: str | Path) -> bool:
    """Return whether a path is a folder of adapters without their base model."""
    return (Path(path) / _OPTIONS).is_file() and not (Path(path) / "config.json").is_file()


def check_plain(folder: str | Path) -> None:
    """Refuse options that make peft import a module; transformers reads peft's options from any folder that it loads.

    Raises: ValueError that names the option.
    """
    path = Path(folder) / _OPTIONS
    values = _read_values(path) if path.is_file() else {}
    if values.get("megatron_config"):
        raise ValueError(
            f"{path} has megatron_config, with which peft imports the module that megatron_core names. A file must not "
            "decide which module is imported: remove megatron_config from it if you trust the adapters."
        )


def base_of(folder: str | Path) -> str:
    """Return the folder or repository of the adapters' base model.

    Raises: ValueError if the folder does not name a model, or names a folder that does not exist.
    """
    base = _read_values(Path(folder) / _OPTIONS).get("base_model_name_or_path")
    remedy = f"Name it: HFCausalLM(base, adapters={str(folder)!r}), in YAML model.init_args.adapters."
    if not base or not isinstance(base, str):
        raise ValueError(f"{folder} holds adapters only, and does not name the model that they belong to. {remedy}")
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise ValueError(f"{folder} holds adapters only, of {base}, which does not exist. {remedy}")
    return base


def stored_config(folder: str | Path) -> dict[str, Any] | None:
    """Return the values of the config at training time, or None for a folder that this package did not write."""
    path = Path(folder) / _CONFIG
    return _read_values(path) if path.is_file() else None


def check_base(folder: str | Path, values: Mapping[str, Any], config: Any) -> None:
    """Check that adapters fit a model: compare `values`, the config of their training, with the model's `config`.

    Without this check, transformers would drop layers of a deeper base model, and add random ones to a shallower one.

    Raises: ValueError for a model of a different kind or size.
    """
    before, now = values.get("text_config", values), config.to_dict()
    now = now.get("text_config", now)
    pairs = {"model_type": (values.get("model_type"), config.model_type)}
    pairs |= {name: (before.get(name), now.get(name)) for name in _SHAPES}
    for name, (old, new) in pairs.items():
        if old != new and (name == "model_type" or None not in (old, new)):
            raise ValueError(
                f"the adapters in {folder} were trained on a model with {name}={old!r}, and this one has {new!r}. Give "
                "the model that they were trained with, as HFCausalLM(base, adapters=...)."
            )


def _read_values(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file. Raises ValueError with the path."""
    try:
        values = json.loads(text_of(path))
    except ValueError as error:  # bad JSON or a bad encoding
        raise ValueError(f"{path} is no JSON ({error}). It is damaged: write the folder again.") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no JSON object, but {type(values).__name__}. Write the folder again.")
    return values


def stored_options(folder: str | Path, lora: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the `peft.LoraConfig` options of a folder's adapters, updated by the options of `lora` that may differ.

    Raises:
        FileNotFoundError: for a folder without adapters or without their weights.
        ModuleNotFoundError: without peft.
        ValueError: for adapters that are not LoRA, or that differ from `lora` in a fixed option.
    """
    if not (Path(folder) / _OPTIONS).is_file():
        raise FileNotFoundError(
            f"adapters={str(folder)!r} holds no {_OPTIONS}. Give a folder that save_pretrained of an HFCausalLM with lora, "
            "or peft, wrote."
        )
    check_plain(folder)
    if not any((Path(folder) / name).is_file() for name in _WEIGHTS):
        raise FileNotFoundError(f"{folder} holds options of adapters, but no {_WEIGHTS[0]}. Write the folder again.")
    peft = peft_library()
    stored = peft.PeftConfig.from_pretrained(str(folder))
    if not isinstance(stored, peft.LoraConfig):
        kind = getattr(stored.peft_type, "value", stored.peft_type)
        raise ValueError(
            f"{folder} holds adapters of the kind {kind}, and HFCausalLM trains LoRA. Merge them by peft first."
        )
    default, ours = peft.LoraConfig(), ("base_model_name_or_path", "revision", "peft_version", "auto_mapping")
    names = [
        n for n in type(stored).__dataclass_fields__ if n not in (*ours, "task_type", "peft_type", "inference_mode")
    ]
    plain = lambda x: sorted(x) if isinstance(x, set) else x  # noqa: E731
    differ = {n: plain(getattr(stored, n)) for n in names if getattr(stored, n) != getattr(default, n, None)}
    options = read_options(differ)
    for name, value in ({} if lora is None else read_options(lora)).items():
        same = plain(getattr(stored, name)) == plain(set(value) if isinstance(value, list) else value)
        if name not in _FREE and not same:
            raise ValueError(
                f"lora.{name} is {value!r}, and the adapters in {folder} have {plain(getattr(stored, name))!r}. Leave lora "
                "out to continue their training, or leave adapters out to train new ones."
            )
        options[name] = value
    return options


def load(adapted: Any, folder: str | Path) -> None:
    """Load weights from a folder into the adapters of a decoder.

    Raises: ValueError for a damaged file, and for unexpected names or shapes of weights; the message names one of them.
    """
    import peft

    try:
        weights = peft.utils.load_peft_weights(str(folder), device="cpu")
    except Exception as error:
        raise ValueError(
            f"the weights of the adapters in {folder} cannot be read ({type(error).__name__}: {error!s:.200}). The file "
            "is damaged, or holds more than tensors, which is not loaded: write the folder again."
        ) from error
    ours = {name: tuple(x.shape) for name, x in peft.get_peft_model_state_dict(adapted).items()}
    theirs = {name: tuple(x.shape) for name, x in weights.items()}
    if differ := sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n)):
        name = differ[0]
        raise ValueError(
            f"the adapters in {folder} do not fit {type(adapted.get_base_model()).__name__}: {name} is "
            f"{theirs.get(name, 'absent')}, but must be {ours.get(name, 'absent')} ({len(differ)} weights differ). Give "
            "the model that the adapters were trained with."
        )
    peft.set_peft_model_state_dict(adapted, weights)


def save(adapted: Any, folder: str | Path, config: Any) -> None:
    adapted.save_pretrained(folder)
    (Path(folder) / _CONFIG).write_text(json.dumps(config.to_dict(), indent=2, default=str))


def save_merged(adapted: Any, folder: str | Path) -> None:
    """Add the updates to the weights in a copy of the decoder, and write the copy as a folder of transformers.

    If embedding and output projection share a weight and at least one has adapters, each gets its own weight.
    """
    with torch.no_grad():
        merged = copy.deepcopy(adapted)
        _untie(merged.get_base_model())
        merged.merge_and_unload(safe_merge=True).save_pretrained(folder)


def _untie(decoder: Any) -> None:
    """Give embedding and output projection separate weights if they share one and at least one has adapters."""
    ends = decoder.get_input_embeddings(), decoder.get_output_embeddings()
    layers = [getattr(x, "base_layer", x) for x in ends]
    if None not in ends and layers != list(ends) and layers[0].weight is layers[1].weight:
        layers[1].weight = torch.nn.Parameter(layers[1].weight.clone(), layers[1].weight.requires_grad)
        for config in (decoder.config, decoder.config.get_text_config(decoder=True)):
            config.tie_word_embeddings = False
