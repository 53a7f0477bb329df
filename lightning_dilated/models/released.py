"""Checks that all loaders of released weights share: names, layers, shapes and values, before a model is made."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def missing_file(path: str | Path, what: str) -> str:
    """The words for a path without a file; names of repositories on the Hugging Face hub are none."""
    name = str(path).removeprefix("hf_hub:").removeprefix("hf-hub:")
    if name == str(path) and not re.fullmatch(r"[\w-]+/[\w-]+", name):
        return f"{path}: no such file of {what}."
    return (
        f"{path} is no file of {what}, and nothing is downloaded. Download it first (for GigaPath: accept the terms on "
        "huggingface.co/prov-gigapath/prov-gigapath, then huggingface_hub.hf_hub_download("
        '"prov-gigapath/prov-gigapath", "slide_encoder.pth")), and pass its path.'
    )


def check_names(state: Mapping[Any, Any], where: str | Path) -> None:
    """Raise ValueError for names of tensors that are no strings, and for tensors without values."""
    odd = next((name for name in state if not isinstance(name, str)), None)
    if odd is not None:
        raise ValueError(f"{where} names a tensor {odd!r:.40}, but names are strings: save a module's state_dict().")
    empty = next((name for name, x in state.items() if isinstance(x, Tensor) and x.is_meta), None)
    if empty is not None:
        raise ValueError(f"{where}: {empty} is on the meta device and has no values. Save the weights themselves.")


def layers_of(numbers: Iterable[str], tensors: int, where: str | Path) -> int:
    """The number of layers of which a file names the last.

    Args:
        numbers: of the layers, as in the names.
        tensors: how many the file has.

    Raises:
        ValueError: for more layers than tensors; names of as many are not even listed.
    """
    found = set(numbers)
    last = max(found, key=lambda x: (len(x), x), default="0")
    if len(last) > 9 or int(last) >= tensors:
        raise ValueError(
            f"{where} names layer {last[:20]}, but has {tensors} tensors: layers before that one are missing."
        )
    return 1 + int(last)


def check_depth(found: int, asked: int | None, known: int | None, where: str | Path, what: str = "") -> None:
    """Raise ValueError where a file has other layers than were asked for, or fewer than the published model.

    Args:
        found: layers of the file.
        asked: the argument `depth`, if it was given.
        known: layers of the published model with these sizes, if there is one, called `what`.
    """
    if asked is not None and asked != found:
        raise ValueError(f"{where} has {found} layers, and depth={asked} was asked for: is the file complete?")
    if asked is None and known is not None and found < known:
        raise ValueError(
            f"{where} has {found} layers, and {what} of its width has {known}: its last layers are missing. Download it "
            f"again; for a model that has no more, pass depth={found}."
        )


def layer_shapes(dim: int, ffn_dim: int) -> dict[str, tuple[int, ...]]:
    """The shape of each weight of a layer, in torchscale's names; a bias has the first of the two."""
    square = {f"self_attn.{x}_proj": (dim, dim) for x in ("q", "k", "v", "out")}
    norms = {"self_attn.inner_attn_ln": (dim,), "self_attn_layer_norm": (dim,), "final_layer_norm": (dim,)}
    ffn = {"ffn.fc1": (ffn_dim, dim), "ffn.fc2": (dim, ffn_dim), "ffn.ffn_layernorm": (ffn_dim,)}
    return {**square, **norms, **ffn}


def check_layer_shapes(state: Mapping[str, Tensor], where: str | Path) -> None:
    """Raise ValueError for a layer whose tensors do not fit each other, naming the first.

    Args:
        state: in torchscale's names, prefixes included; other tensors are passed over.
    """
    layers = [(m, x) for name, x in state.items() if (m := re.match(r"(.*\blayers\.\d+)\.(.+)\.(weight|bias)$", name))]
    first = next((x for m, x in layers if m[2] == "ffn.fc1" and m[3] == "weight"), None)
    if first is None:
        return
    if first.ndim != 2:
        raise ValueError(f"{where}: ffn.fc1.weight is {tuple(first.shape)}, not a matrix.")
    shapes = layer_shapes(first.shape[1], first.shape[0])
    for m, x in layers:
        want = shapes.get(m[2])
        want = want[:1] if want is not None and m[3] == "bias" else want
        if want is not None and tuple(x.shape) != want:
            raise ValueError(f"{where}: {m[0]} is {tuple(x.shape)}, but the other tensors say that it is {want}.")


def check_finite(tensors: Mapping[str, Tensor], where: str | Path) -> None:
    """Raise ValueError for weights that are NaN or infinite, naming them."""
    with torch.no_grad():
        bad = [name for name, x in tensors.items() if x.is_floating_point() and not _finite(x)]
    if bad:
        few = ", ".join(bad[:4]) + (f" and {len(bad) - 4} more" if len(bad) > 4 else "")
        raise ValueError(
            f"{where} holds NaN or infinite values in {len(bad)} of {len(tensors)} tensors: {few}. The training that wrote "
            "it diverged, or the file is damaged: take an earlier checkpoint, or download it again."
        )


def _finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x if x.element_size() > 1 else x.float()).all())  # types of 8 bits have no such test
