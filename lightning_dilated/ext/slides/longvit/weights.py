"""Released weights of LongViT (microsoft/torchscale, examples/longvit) in files: read, checked by name and copied.

Shape letters: E embedding dim, C channels, P pixels of a patch's side, S cells of the table's side.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_dilated.ext.slides.longvit.image_patches import resized_table
from lightning_dilated.ext.slides.weights import LAYER, QKV, check_layer_shapes, check_names, few, read_file
from lightning_dilated.models.pretrained import check_finite, layers_of

#: where a file may keep its state dict, in this order; DINO's teacher is what its authors fine-tune
ENTRIES = ("teacher", "model", "module", "state_dict")
#: layers of the published model, by channels, pixels of a patch's side and width
PUBLISHED = {(3, 32, 384): 12}
#: weights that would change the result and that a LongViT does not have
FOREIGN = re.compile(r"(cls_token$|encoder\.(layer_norm|layernorm_embedding|embed_positions)\b|.*\.moe_layer\.)")
_LAYERS = re.compile(r"encoder\.layers\.([0-9]+)\.")
_KINDS = ("weight", "bias")


@dataclass(frozen=True)
class LongViTFile:
    """The state dict of a file, and for each of our parameters the names of their tensors that it consists of.

    Attributes:
        where: the file.
        stored: all of its tensors, by their names.
        encoder: parameters that every LongViT has.
        norms: {"patches" or "mean": the last norm}, those that the file has.
        head: of a model fine-tuned for classification; otherwise empty.
    """

    where: str
    stored: Mapping[str, Tensor]
    encoder: dict[str, list[str]]
    norms: dict[str, dict[str, list[str]]]
    head: dict[str, list[str]]

    def sizes(self) -> dict[str, int]:
        """The arguments of `LongViT` that follow from tensors, which the number of heads does not."""
        dim, channels, patch = self._first("patch_embed.weight").shape[:3]
        depth = sum(name.endswith("ffn.fc1.weight") for name in self.encoder)
        side = math.isqrt(self._first("pos_embed").shape[1])
        sizes = {"image_size": side * patch, "patch_size": patch, "in_channels": channels, "dim": dim, "depth": depth}
        return {**sizes, "ffn_dim": len(self._first("transformer.blocks.0.ffn.fc1.bias"))}

    def _first(self, ours: str) -> Tensor:
        return self.stored[self.encoder[ours][0]]

    def tensor(self, names: list[str]) -> Tensor:
        """One of our parameters; the convolution over patches becomes a linear map of (C P P) values."""
        tensors = [self.stored[name] for name in names]
        if len(tensors) > 1:
            return torch.cat(tensors)
        return tensors[0].flatten(1) if tensors[0].ndim == 4 else tensors[0]


def read_longvit(path: str | Path) -> LongViTFile:
    """A file `{"model": state_dict}` (or "teacher", "module", "state_dict") or a bare state dict.

    It is loaded with `weights_only=True`, which also allows argparse.Namespace, the type of DINO's settings.

    Raises:
        FileNotFoundError, ValueError: naming what the file lacks, or what a LongViT does not have.
    """
    with torch.serialization.safe_globals([argparse.Namespace]):
        stored = read_file(path)
    if isinstance(stored, Mapping):
        stored = next((stored[x] for x in ENTRIES if isinstance(stored.get(x), Mapping)), stored)
    if not isinstance(stored, Mapping) or not all(isinstance(x, Tensor) for x in stored.values()):
        raise ValueError(f"{path} holds no weights: expected a state dict, bare or under one of {', '.join(ENTRIES)}.")
    check_names(stored, path)
    prefixes = [name.removesuffix("pos_embed") for name in stored if re.search(r"(^|\.)pos_embed$", name)]
    if len(prefixes) != 1:
        raise ValueError(f"{path} is no LongViT: no single pos_embed, its table of positions, among {few(stored)}.")
    inside = [name.removeprefix(prefixes[0]) for name in stored if name.startswith(prefixes[0])]
    _check_parts(inside, str(path))
    names = _names(layers_of([m[1] for m in map(_LAYERS.match, inside) if m], len(inside), path), prefixes[0])
    expected = [x for parts in names.values() for x in parts]
    missing = [x for x in expected if x not in stored]
    if missing:
        raise ValueError(f"{path} lacks {len(missing)} of {len(expected)} parameters of a LongViT: {few(missing)}.")
    check_layer_shapes({x: stored[x] for x in expected}, path)
    _check_shapes(stored[names["pos_embed"][0]], stored[names["patch_embed.weight"][0]], str(path))
    return LongViTFile(str(path), stored, names, *_outer(stored, prefixes[0]))


def _names(depth: int, prefix: str) -> dict[str, list[str]]:
    """Our name of each parameter of the encoder -> their names of its parts."""
    names = {"pos_embed": [f"{prefix}pos_embed"]}
    for kind in _KINDS:
        names[f"patch_embed.{kind}"] = [f"{prefix}patch_embed.proj.{kind}"]
        for i in range(depth):
            here, there = f"transformer.blocks.{i}", f"{prefix}encoder.layers.{i}"
            names[f"{here}.attention.in_proj_{kind}"] = [f"{there}.{x}.{kind}" for x in QKV]
            names |= {f"{here}.{ours}.{kind}": [f"{there}.{theirs}.{kind}"] for theirs, ours in LAYER.items()}
    return names


def _outer(stored: Mapping[str, Tensor], prefix: str) -> tuple[dict[str, dict[str, list[str]]], dict[str, list[str]]]:
    """(last norms, head): the pretrained model's norm is inside the backbone, those of a fine-tuned one are outside."""
    outside = prefix.removesuffix("model.")
    names = {"patches": f"{prefix}norm", "mean": f"{outside}fc_norm"}
    norms = {at: {f"norm.{x}": [f"{name}.{x}"] for x in _KINDS} for at, name in names.items()}
    norms = {at: norm for at, norm in norms.items() if all(parts[0] in stored for parts in norm.values())}
    head = {f"head.linear.{x}": [f"{outside}head.{x}"] for x in _KINDS}
    tuned = "mean" in norms and all(parts[0] in stored for parts in head.values())
    return norms, head if tuned else {}


def _check_parts(inside: list[str], where: str) -> None:
    foreign = [name for name in inside if FOREIGN.match(name)]
    if foreign:
        hint = " GigaPath's slide encoder is loaded by SlideEncoder.from_gigapath." if "cls_token" in foreign else ""
        raise ValueError(f"{where} has parts that a LongViT does not compute: {few(foreign)}.{hint}")


def _check_shapes(table: Tensor, patches: Tensor, where: str) -> None:
    if patches.ndim != 4 or patches.shape[2] != patches.shape[3]:
        raise ValueError(
            f"{where}: patch_embed.proj.weight is {tuple(patches.shape)}, but a LongViT embeds square patches, "
            "(E, channels, patch, patch)."
        )
    if table.ndim != 3 or table.shape[::2] != (1, len(patches)) or math.isqrt(table.shape[1]) ** 2 != table.shape[1]:
        raise ValueError(
            f"{where}: pos_embed is {tuple(table.shape)}, but it should be (1, side x side, {len(patches)}), a square table."
        )


def load_longvit(model: Any, path: str | Path) -> None:
    """Copy a file's encoder into `model`, its last norm if it is in the same place, and the head of a release fine-tuned for
    as many classes; unused entries are reported in one line.

    A table of positions for images of another size is resized to the model's.

    Raises:
        FileNotFoundError, ValueError: also where the model's sizes differ from the file's, naming the settings.
    """
    file = read_longvit(path)
    sizes = {name: (x, getattr(model, name)) for name, x in file.sizes().items() if name != "image_size"}
    wrong = [f"{name}={theirs} there and {ours} here" for name, (theirs, ours) in sizes.items() if theirs != ours]
    if wrong:
        raise ValueError(f"{path} does not fit this model: {', '.join(wrong)}. Set the model's sizes to the file's.")
    head = file.head if model.task == "classification" else {}
    if head and len(file.tensor(head["head.linear.bias"])) != model.num_classes:
        head = {}
    names = {**file.encoder, **norm_of(file, model.norm_at), **head}
    used = {x for parts in names.values() for x in parts}
    check_finite({x: file.stored[x] for x in used}, path)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parts in names.items():
            x, parameter = file.tensor(parts), parameters[name]
            if name == "pos_embed" and x.shape != parameter.shape:
                x = resized_table(x, model.image_size // model.patch_size)
            if x.shape != parameter.shape:
                shapes = f"give {tuple(x.shape)}, but here {name} is {tuple(parameter.shape)}"
                raise ValueError(f"{path}: {' and '.join(parts)} {shapes}.")
            parameter.copy_(x)
    extra = set(file.stored) - used
    if extra:
        rank_zero_info(f"{path}: {len(extra)} entries that this model has no place for are not used: {few(extra)}")


def norm_of(file: LongViTFile, norm_at: str) -> dict[str, list[str]]:
    """The file's last norm for a model with `norm_at`; empty for a fresh one on the mean, as when fine-tuning starts.

    Raises:
        ValueError: for a norm of the patches that the file does not have.
    """
    if norm_at == "patches" and norm_at not in file.norms:
        raise ValueError(
            f'{file.where} has no norm.weight and norm.bias, the norm of the patches: load it with norm_at="mean"'
            + (", as it was fine-tuned." if file.norms else ", which begins with a fresh norm.")
        )
    return file.norms.get(norm_at, {})
