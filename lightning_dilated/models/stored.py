"""Read Lightning's checkpoints and hyperparameter files as plain values; patterns are stored as mappings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.core.saving import load_hparams_from_tags_csv

from lightning_dilated._compat.lightning import map_to_known_devices, migrated, read_remote, read_trusted
from lightning_dilated._validation import check_input, text_of
from lightning_dilated.checkpoint.reader import load_file
from lightning_dilated.pattern import DilatedPattern


def plain_value(value: Any) -> Any:
    """Return a hyperparameter as a plain value: patterns, even inside lists, become mappings."""
    if isinstance(value, DilatedPattern):
        return value.to_dict()
    if isinstance(value, (list, tuple)) and any(isinstance(x, DilatedPattern) for x in value):
        return [plain_value(x) for x in value]
    return value


def read_model(source: Any, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
    """Read a Lightning checkpoint from a path, an open file or a URL that Lightning can read.

    Raises:
        ValueError: for a file that is not a checkpoint.
    """
    map_location = map_to_known_devices if map_location is None else map_location
    if weights_only is False:
        stored = read_trusted(source, map_location)
    elif not hasattr(source, "read") and "://" in str(source):
        stored = read_remote(source, map_location)
    else:
        stored = load_file(source, map_location=map_location)
    if not isinstance(stored, Mapping) or "state_dict" not in stored:
        raise ValueError(f"{source} is a torch file, but not a Lightning checkpoint: it has no state_dict.")
    return migrated(dict(stored), source)


def stored_hparams(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's hyperparameters in a checkpoint."""
    names = ("hparams", "module_arguments", "hyper_parameters")  # early versions of Lightning wrote the first two
    parts = [part for name in names if isinstance(part := stored.get(name), Mapping)]
    return {key: value for part in parts for key, value in part.items()}


class _PlainLoader(yaml.SafeLoader):
    """A SafeLoader that also reads tuples, which Lightning writes."""


_PlainLoader.add_constructor(
    "tag:yaml.org,2002:python/tuple", lambda loader, node: tuple(loader.construct_sequence(node))
)


def read_hparams(path: Path) -> dict[str, Any]:
    """Read hyperparameters with plain values from a csv or YAML file that Lightning's loggers wrote.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: for another suffix, and for YAML that is not a mapping of names to plain values.
    """
    check_input(path)
    if not path.is_file():
        raise FileNotFoundError(f"hparams_file {path}: no such file.")
    if path.suffix.lower() == ".csv":
        return dict(load_hparams_from_tags_csv(path))
    if path.suffix.lower() not in (".yml", ".yaml"):
        raise ValueError(f"hparams_file {path} must be a .csv, .yml or .yaml.")
    try:
        values = yaml.load(text_of(path), _PlainLoader) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"hparams_file {path} is not YAML of plain values ({error}).") from None
    if not isinstance(values, dict):
        raise ValueError(f"hparams_file {path} holds {type(values).__name__} instead of a mapping of hyperparameters.")
    return values
