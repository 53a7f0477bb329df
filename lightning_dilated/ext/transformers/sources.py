"""Read the arguments that name a decoder's parts: its config and its folders of weights, adapters and tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_info

from lightning_dilated._validation import known_keys, text_of
from lightning_dilated.data.tokenizer_files import read_files
from lightning_dilated.ext.transformers import adapter_folders, lora
from lightning_dilated.ext.transformers.patterns import ENTRY
from lightning_dilated.pattern.rows import cycle_to, shortest_cycle


@dataclass(frozen=True)
class Source:
    """The parts of a decoder.

    Attributes:
        config: a copy of the transformers config.
        weights: the folder or repository of the weights; None: random weights.
        adapters: the folder of the adapters' weights; None: new adapters, or none.
        lora: options of the adapters; None: no adapters.
        tokenizer: contents of the tokenizer's files by name; None without a tokenizer.
    """

    config: Any
    weights: str | None
    adapters: str | None
    lora: dict[str, Any] | None
    tokenizer: dict[str, str] | None

    @classmethod
    def read(cls, model: Any, adapters: str | Path | None, options: Mapping[str, Any] | None) -> Source:
        """Read the arguments `model`, `adapters` and `lora` of HFCausalLM.

        Raises: TypeError, ValueError, ModuleNotFoundError, FileNotFoundError or NotADirectoryError; the message names the
            argument.
        """
        if isinstance(model, (str, Path)) and adapter_folders.is_folder(model):
            if adapters is not None:
                raise ValueError(
                    f"model={str(model)!r} and adapters={str(adapters)!r} are both folders of adapters. Give the base model "
                    "of the latter as model, or leave adapters out."
                )
            model, adapters = adapter_folders.base_of(model), model
        if adapters is None:
            weights, config = _read_config(model)
            return cls(
                config, weights, None, None if options is None else lora.read_options(options), _tokenizer(weights)
            )
        if not isinstance(adapters, (str, Path)):
            raise TypeError(f"adapters must be a folder of adapters or None, got {adapters!r:.200}.")
        stored = adapter_folders.stored_options(adapters, options)
        weights, config = _read_config(model)
        values = adapter_folders.stored_config(adapters)
        if values is not None:
            adapter_folders.check_base(adapters, values, config)
            config = type(config).from_dict(values)
        return cls(config, weights, str(adapters), stored, _tokenizer(str(adapters)) or _tokenizer(weights))


def _tokenizer(folder: str | None) -> dict[str, str] | None:
    return None if folder is None else read_files(Path(folder))


def _read_config(model: Any) -> tuple[str | None, Any]:
    """Return the folder or repository of the weights, or None for random weights; and the config."""
    from transformers import AutoConfig, PreTrainedConfig

    if isinstance(model, (str, Path)):
        _check_folder(model)
        adapter_folders.check_plain(model)
        return str(model), _without_its_code(model)
    if isinstance(model, Mapping):
        if "model_type" not in model:
            raise ValueError(
                f"model as a mapping is a config of transformers and needs model_type, such as llama; got {sorted(model)}."
            )
        _check_names(model)
        model = AutoConfig.for_model(**model)
    if not isinstance(model, PreTrainedConfig):
        raise TypeError(f"model must be a folder, a hub repository or a config of transformers, got {model!r:.200}.")
    return None, type(model).from_dict(model.to_dict())  # copy, because transformers sets attn_implementation in it


def is_of_package(folder: str | Path) -> bool:
    """Return whether a folder was written by this package's `consolidate` or `save_pretrained`, not by transformers."""
    return "class_path" in stored_values(folder)


def stored_values(folder: str | Path) -> dict[str, Any]:
    """Return the values of a folder's config.json, or an empty dict if it cannot be read."""
    try:
        values = json.loads(text_of(Path(folder) / "config.json"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _check_folder(model: str | Path) -> None:
    """Raise for an invalid folder before a request to the hub; a repository is `name` or `owner/name`."""
    path, name = Path(model), str(model)
    if path.is_dir():
        if is_of_package(path):
            raise ValueError(
                f"model={name!r} holds a model of this package, not of transformers. Load it by "
                f"HFCausalLM.from_pretrained({name!r})."
            )
        if not (path / "config.json").is_file():
            raise FileNotFoundError(
                f"model={name!r} is a folder without config.json. Give one that save_pretrained of transformers wrote."
            )
        return
    if path.exists():
        raise NotADirectoryError(f"model={name!r} is a file. Give a folder of transformers, or a hub repository.")
    is_folder = isinstance(model, Path) or name[:1] in (".", "~") or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)
    if is_folder or (path.parent != Path() and path.parent.is_dir()):
        raise FileNotFoundError(
            f"model={name!r}: no such folder. Give a folder of transformers, or the name of a hub repository (owner/name)."
        )
    from huggingface_hub import try_to_load_from_cache

    if not isinstance(try_to_load_from_cache(name, "config.json"), str):
        rank_zero_info(f"model={name!r}: no such folder here; the hub is asked for a repository of that name.")


def _without_its_code(model: str | Path) -> Any:
    """Return the config without running a repository's code, and without transformers' prompt at the terminal."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    except OSError as error:
        if Path(model).is_dir():
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise FileNotFoundError(
            f"model={str(model)!r}: no such folder, and no hub repository of that name can be read ({lines[0][:160]}). Give "
            "a folder of transformers, or the name of a repository that you may read."
        ) from error
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"model={str(model)!r} needs code of its own, which HFCausalLM does not run. Take a model that transformers "
            "has, or convert it to one."
        ) from None


#: old names of options, which transformers reads, but stores under new names
_FORMER_NAMES = ("rope_theta", "rope_scaling", "partial_rotary_factor", "torch_dtype", "transformers_version")


def _check_names(values: Mapping[str, Any]) -> None:
    """Raise ValueError for an unknown name in a config written by hand, which transformers would ignore."""
    from transformers import AutoConfig

    if "transformers_version" in values:  # a config from transformers may hold entries of other libraries
        return
    default = AutoConfig.for_model(values["model_type"])
    unknown = {x for x in values if not hasattr(default, x)} - {*_FORMER_NAMES, ENTRY}
    names = [x for x in values if x not in unknown]
    known_keys(values, f"model of model_type {values['model_type']}", [*names, *default.to_dict()])


def changed_config(config: Any, changes: Any) -> Any:
    if not isinstance(changes, Mapping):
        raise TypeError(f"config must be a mapping of values of the model's config, or None; got {changes!r:.200}.")
    values = config.to_dict()
    text = values.get("text_config", values)
    former = [x for x in ("rope_theta", "rope_scaling") if x in changes and x not in text]
    if former:
        raise ValueError(
            f"config has {former[0]}, which transformers keeps in rope_parameters: set config.rope_parameters, such as "
            "{'rope_type': 'default', 'rope_theta': 500000.0}."
        )
    known_keys(changes, f"config of {config.model_type}", text)
    fixed = [n for n in ("model_type", "num_hidden_layers", "layer_types") if n in changes]
    if fixed:
        raise ValueError(f"config cannot change {fixed[0]}: weights would not fit. Build a model of that config.")
    base = (text.get("rope_parameters") or {}).get("rope_theta")
    rope = changes.get("rope_parameters")
    if base is not None and isinstance(rope, Mapping) and "rope_theta" not in rope and rope.get("rope_type"):
        raise ValueError(
            f"config.rope_parameters has no rope_theta, so the model's rope_theta={base:g} would be lost. Add rope_theta: "
            f"{base:g}, or the base that you want."
        )
    text.update(changes)
    try:
        return type(config).from_dict(values)
    except KeyError as error:
        raise ValueError(f"config of {config.model_type}: {error.args[0]}. Add them.") from None


def with_depth(config: Any, depth: int) -> Any:
    """Return a config with `depth` layers that cycle through the same kinds; every kind is included if possible."""
    values = config.to_dict()
    text = values.get("text_config", values)
    if types := text.get("layer_types"):
        chosen = list(cycle_to(shortest_cycle(types), depth))
        missing = [x for x in dict.fromkeys(types) if x not in chosen]
        if len(missing) < depth:
            chosen[depth - len(missing) :] = missing
        text["layer_types"] = chosen
    text["num_hidden_layers"] = depth
    return type(config).from_dict(values)
