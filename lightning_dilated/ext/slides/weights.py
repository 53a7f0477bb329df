"""Read weight files of slide encoders, with names as in releases (GigaPath) or in this package, and check shapes.

Shape letters: E embedding dim, F features of a tile.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_dilated.checkpoint.reader import load_file
from lightning_dilated.ext.slides.backbone import GridPositions, released_pattern
from lightning_dilated.models.pretrained import check_finite, layers_of
from lightning_dilated.pattern.layers import read_patterns

#: {name in a release: our name} of a layer's parameters, except q, k and v, which we join
LAYER = {
    "self_attn.inner_attn_ln": "attention.sub_norm",
    "self_attn.out_proj": "attention.out_proj",
    "self_attn_layer_norm": "attention_norm",
    "ffn.fc1": "ffn.fc1",
    "ffn.fc2": "ffn.fc2",
    "ffn.ffn_layernorm": "ffn.norm",
    "final_layer_norm": "ffn_norm",
}
QKV = tuple(f"self_attn.{x}_proj" for x in "qkv")
OUTER = {"patch_embed.proj": "patch_embed", "encoder.layer_norm": "transformer.norm", "norm": "norm"}
OWN = re.compile(r"(cls_token$|patch_embed\.|transformer\.|norm\.)")
_LAYERS = re.compile(r"encoder\.layers\.([0-9]+)\.")
_OWN_LAYERS = re.compile(r"transformer\.blocks\.([0-9]+)\.")
#: {(features, width): number of layers} of GigaPath's published slide encoders
PUBLISHED = {(1536, 768): 12, (1536, 1024): 24, (1536, 1536): 12, (384, 384): 12}


def missing_file(path: str | Path, what: str) -> str:
    """Return the message for a missing file; for a Hugging Face repository, with instructions to download it."""
    name = str(path).removeprefix("hf_hub:").removeprefix("hf-hub:")
    if name == str(path) and not re.fullmatch(r"[\w-]+/[\w-]+", name):
        return f"{path}: no such file of {what}."
    return (
        f"{path} is not a file of {what}, and nothing is downloaded. Download it first (for GigaPath: accept the terms on "
        "huggingface.co/prov-gigapath/prov-gigapath, then huggingface_hub.hf_hub_download("
        '"prov-gigapath/prov-gigapath", "slide_encoder.pth")), and pass its path.'
    )


def read_file(path: str | Path) -> Any:
    """Read a torch.save file; tensors are memory-mapped, and no code in the file is run.

    Raises: FileNotFoundError or ValueError for a file that is missing or cannot be read.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(missing_file(path, "slide encoder weights"))
    try:
        return load_file(path, mapped=True)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"{path} cannot be read as torch weights ({lines[0][:240]}).") from None


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Return the state dict of a file: `{"model": ...}`, `{"state_dict": ...}` or bare. Raises as `read_file` does."""
    stored = read_file(path)
    for name in ("model", "state_dict"):
        if isinstance(stored, Mapping) and isinstance(stored.get(name), Mapping):
            stored = stored[name]
    if not isinstance(stored, Mapping) or not all(isinstance(x, Tensor) for x in stored.values()):
        raise ValueError(f'{path} holds no weights: expected a state dict, bare or as {{"model": state_dict}}.')
    check_names(stored, path)
    return dict(stored)


def released_parameters(depth: int) -> dict[str, tuple[str, ...]]:
    """Return {our name: names in a release} for `depth` layers; weights of several names are concatenated."""
    modules = {ours: (theirs,) for theirs, ours in OUTER.items()}
    for i in range(depth):
        old, new = f"encoder.layers.{i}", f"transformer.blocks.{i}"
        modules |= {f"{new}.{ours}": (f"{old}.{theirs}",) for theirs, ours in LAYER.items()}
    names = {f"{ours}.{kind}": (f"{x}.{kind}",) for ours, (x,) in modules.items() for kind in ("weight", "bias")}
    for i in range(depth):
        for kind in ("weight", "bias"):
            theirs = tuple(f"encoder.layers.{i}.{x}.{kind}" for x in QKV)
            names[f"transformer.blocks.{i}.attention.in_proj_{kind}"] = theirs
    return {"cls_token": ("cls_token",), **names}


def own_weights(stored: Mapping[str, Tensor], where: str, grid: int, report: bool = False) -> dict[str, Tensor]:
    """Return the encoder's part of a state dict, with this package's names.

    Args:
        stored: a state dict of a release, alone or in a larger model (`slide_encoder.norm.bias`), or of this package.
        where: the file, for messages.
        grid: cells along an axis, to check a stored table of positions.
        report: log unused entries of the file in one line.

    Raises: ValueError for missing parameters, with names, or for a different table of positions.
    """
    if any(".lora_" in name or ".base_layer." in name for name in stored):
        raise ValueError(
            f"{where} holds LoRA's updates apart from the weights: call merge_lora() on the model and save it again."
        )
    prefixes = [name.removesuffix("cls_token") for name in stored if re.search(r"(^|\.)cls_token$", name)]
    if len(prefixes) != 1:
        raise ValueError(f"{where} is no slide encoder with a class token: no single cls_token among {few(stored)}.")
    prefix = prefixes[0]
    inside = {name.removeprefix(prefix): x for name, x in stored.items() if name.startswith(prefix)}
    extra = [name for name in stored if not name.startswith(prefix)]
    layers = [m[1] for m in map(_LAYERS.match, inside) if m]
    if layers or not any(name.startswith("transformer.") for name in inside):
        names = released_parameters(layers_of(layers, len(inside), where))
        check_layer_shapes(inside, where)
        expected = [name for theirs in names.values() for name in theirs]
        missing = [name for name in expected if name not in inside]
        if missing:
            raise ValueError(
                f"{where} lacks {len(missing)} of {len(expected)} parameters of a slide encoder: {few(missing)}."
            )
        encoder = {
            ours: torch.cat([inside[x] for x in theirs]) if len(theirs) > 1 else inside[theirs[0]]
            for ours, theirs in names.items()
        }
        if "pos_embed" in inside:
            _check_table(inside["pos_embed"], grid, where)
            expected = [*expected, "pos_embed"]
        extra += [name for name in inside if name not in expected]
    else:
        encoder = {name: x for name, x in inside.items() if OWN.match(name)}
        extra += [name for name in inside if name not in encoder]
        _check_own(encoder, where)
    if extra and report:
        rank_zero_info(f"{where}: {len(extra)} entries besides the encoder's are not used: {few(extra)}")
    return encoder


def to_released(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the encoder's part of our state dict with the names of a release; the inverse of `own_weights`."""
    names, released = released_parameters(_own_depth(state)), {}
    for name, x in state.items():
        if OWN.match(name):
            released |= zip(names[name], x.chunk(len(names[name])) if x.ndim else (x,), strict=True)
    return released


def _own_depth(state: Mapping[str, Tensor]) -> int:
    return 1 + max((int(m[1]) for m in map(_OWN_LAYERS.match, state) if m), default=-1)


def _check_own(state: Mapping[str, Tensor], where: str) -> None:
    """Raise ValueError if layers are missing or shapes do not fit each other; `state` has this package's names."""
    layers_of([m[1] for m in map(_OWN_LAYERS.match, state) if m], len(state), where)
    try:
        check_layer_shapes(to_released(state), where)
    except (KeyError, ValueError) as error:
        raise ValueError(f"{where} is no slide encoder ({error}).") from None


def sizes_of(state: Mapping[str, Tensor], where: str = "the weights") -> dict[str, int]:
    """Return feature_dim, dim, depth and ffn_dim of weights with our names; the number of heads is not determined.

    Raises: ValueError with `where`, for weights of anything but an encoder.
    """
    depth = _own_depth(state)
    embed, first = state.get("patch_embed.weight"), state.get("transformer.blocks.0.ffn.fc1.weight")
    if (
        depth < 1
        or embed is None
        or first is None
        or embed.ndim != 2
        or first.ndim != 2
        or len(embed) != first.shape[1]
    ):
        raise ValueError(f"patch_embed.weight and the first layer of {where} are missing, or do not fit each other.")
    (dim, feature_dim), ffn_dim = embed.shape, first.shape[0]
    return {"feature_dim": feature_dim, "dim": dim, "depth": depth, "ffn_dim": ffn_dim}


def load_backbone(model: Any, path: str | Path) -> None:
    """Copy the encoder's weights of a file into `model`; its head or decoder does not change.

    Raises: FileNotFoundError or ValueError; if the model's sizes differ from the file's, the message lists both.
    """
    _check_settings(model, path)
    weights = own_weights(read_weights(path), str(path), model.grid, report=True)
    theirs, ours = sizes_of(weights, str(path)), sizes_of(dict(model.named_parameters()))
    wrong = [f"{name}={theirs[name]} there and {ours[name]} here" for name in theirs if theirs[name] != ours[name]]
    if wrong:
        raise ValueError(f"{path} does not fit this model: {', '.join(wrong)}. Set the model's sizes to the file's.")
    named = {name: x for name, x in model.named_parameters() if OWN.match(name)}
    missing = [name for name in named if name not in weights]
    if missing:
        raise ValueError(f"{path} lacks {len(missing)} parameters of the encoder: {few(missing)}.")
    check_finite({name: weights[name] for name in named}, path)
    with torch.no_grad():
        for name, parameter in named.items():
            if weights[name].shape != parameter.shape:
                raise ValueError(
                    f"{path}: {name} is {tuple(weights[name].shape)}, but here it is {tuple(parameter.shape)}."
                )
            parameter.copy_(weights[name])


def _check_settings(model: Any, path: str | Path) -> None:
    """Raise ValueError if our checkpoint has different heads, tile size or grid, because shapes do not show these."""
    stored = read_file(path)
    settings = stored.get("hyper_parameters") if isinstance(stored, Mapping) else None
    for name in ("num_heads", "tile_size", "grid") if isinstance(settings, Mapping) else ():
        if name in settings and settings[name] != getattr(model, name):
            raise ValueError(
                f"{path} was trained with {name}={settings[name]}, but this model has {name}={getattr(model, name)}, which "
                f"its weights do not fit. Set the model's {name} to {settings[name]}."
            )
    if not isinstance(settings, Mapping) or not {"pattern", "segment_lengths"} & settings.keys():
        return
    theirs = settings.get("pattern") or released_pattern(
        settings.get("segment_lengths"), settings.get("dilation_rates"), settings.get("max_wsi_size"),
        settings.get("tile_size", model.tile_size), settings.get("padding", "masked"),
        settings.get("global_class_token", False),
    )  # fmt: skip
    theirs = read_patterns(theirs, model.depth, model.num_heads)
    if theirs != model.pattern:
        rank_zero_warn(f"{path} was trained with {theirs}, and this model attends by {model.pattern}.")


def _check_table(table: Tensor, grid: int, where: str) -> None:
    """Raise ValueError unless a release's stored table of positions equals the fixed table that is computed here."""
    rows, dim = table.shape[-2:]
    side = round((rows - 1) ** 0.5)
    if rows != 1 + side * side or side != grid:
        raise ValueError(
            f"{where} has {rows} positions, for a {side} x {side} grid, but grid is {grid}; set grid={side}."
        )
    # sample the rows: the whole table would take gigabytes
    index = torch.linspace(0, side * side - 1, min(side * side, 4096), dtype=torch.float64).long()
    cells = torch.stack([index // side, index % side], -1)[None]
    stored, expected = table.reshape(rows, dim), GridPositions(dim, grid)(cells)[0]
    if bool(stored[0].any()) or not torch.allclose(stored[1 + index].float(), expected, rtol=0, atol=2e-3):
        raise ValueError(
            f"{where}: pos_embed is not the fixed sin-cos table, so its positions are learned, or of another kind."
        )


def few(names: Iterable[str], most: int = 6) -> str:
    """Return the first names in alphabetical order, and the number of further names."""
    names = sorted(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def check_names(state: Mapping[Any, Any], where: str | Path) -> None:
    """Raise ValueError for tensors without values, and for names that are not strings."""
    wrong = next((name for name in state if not isinstance(name, str)), None)
    if wrong is not None:
        raise ValueError(f"{where} names a tensor {wrong!r:.40}, but names are strings: save a module's state_dict().")
    empty = next((name for name, x in state.items() if isinstance(x, Tensor) and x.is_meta), None)
    if empty is not None:
        raise ValueError(f"{where}: {empty} is on the meta device and has no values. Save the weights themselves.")


def check_depth(depth: int, requested: int | None, published: int | None, where: str | Path, what: str = "") -> None:
    """Raise ValueError if a file does not have the requested number of layers, or has fewer than the published model.

    Args:
        depth: number of layers of the file.
        requested: the argument `depth`, if it was passed.
        published: number of layers of the published model of these sizes, if any; errors call the model `what`.
    """
    if requested is not None and requested != depth:
        raise ValueError(f"{where} has {depth} layers, and depth={requested} was asked for: is the file complete?")
    if requested is None and published is not None and depth < published:
        raise ValueError(
            f"{where} has {depth} layers, and {what} of its width has {published}: its last layers are missing. Download it "
            f"again; for a model that has no more, pass depth={depth}."
        )


def layer_shapes(dim: int, ffn_dim: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of a layer, by torchscale's names; a bias has the first dim."""
    square = {f"self_attn.{x}_proj": (dim, dim) for x in ("q", "k", "v", "out")}
    norms = {"self_attn.inner_attn_ln": (dim,), "self_attn_layer_norm": (dim,), "final_layer_norm": (dim,)}
    ffn = {"ffn.fc1": (ffn_dim, dim), "ffn.fc2": (dim, ffn_dim), "ffn.ffn_layernorm": (ffn_dim,)}
    return {**square, **norms, **ffn}


def check_layer_shapes(state: Mapping[str, Tensor], where: str | Path) -> None:
    """Raise ValueError for the first layer with tensors that do not fit each other.

    `state` has torchscale's names, with any prefix; other tensors are ignored.
    """
    layers = [(m, x) for name, x in state.items() if (m := re.match(r"(.*\blayers\.\d+)\.(.+)\.(weight|bias)$", name))]
    first = next((x for m, x in layers if m[2] == "ffn.fc1" and m[3] == "weight"), None)
    if first is None:
        return
    if first.ndim != 2:
        raise ValueError(f"{where}: ffn.fc1.weight is {tuple(first.shape)}, not a matrix.")
    shapes = layer_shapes(first.shape[1], first.shape[0])
    for m, x in layers:
        shape = shapes.get(m[2])
        shape = shape[:1] if shape is not None and m[3] == "bias" else shape
        if shape is not None and tuple(x.shape) != shape:
            raise ValueError(f"{where}: {m[0]} is {tuple(x.shape)}, but the other tensors say that it is {shape}.")
