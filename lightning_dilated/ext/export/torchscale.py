"""Convert state dicts of torchscale's LongNet decoder (microsoft/torchscale, LongNetDecoder) to weights of a LongNetLM.

Shape letters: V vocabulary, E embedding dim, H heads, D head dim.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_dilated._validation import integer
from lightning_dilated.checkpoint.reader import load_file
from lightning_dilated.ext.slides.weights import check_depth, check_layer_shapes, check_names
from lightning_dilated.models.pretrained import check_finite, layers_of

#: for tensors of a layer, torchscale's name for each of our names, without the suffix `.weight` or `.bias`
LAYER = {
    "attention_norm": "self_attn_layer_norm",
    "attention.out_proj": "self_attn.out_proj",
    "ffn_norm": "final_layer_norm",
    "ffn.fc1": "ffn.fc1",
    "ffn.fc2": "ffn.fc2",
}
#: further names if the decoder has sub-layer norms
SUB_NORMS = {"attention.sub_norm": "self_attn.inner_attn_ln", "ffn.norm": "ffn.ffn_layernorm"}
#: substrings in the names of weights that a LongNetLM does not have
FOREIGN = (
    "embed_positions.weight",
    "layernorm_embedding",
    "relative_position",
    "encoder_attn",
    "moe_layer",
    ".A.",
    ".B.",
)
#: names of buffers, which are not weights
BUFFERS = re.compile(r"(^|\.)(version|_float_tensor|xpos\.scale)$")


def read(
    source: str | Path | Mapping[str, Tensor], num_heads: int | None, scale_embedding: bool, depth: int | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return (the arguments of LongNetLM that follow from a decoder's tensors, the converted state dict).

    Raises:
        FileNotFoundError, ValueError: if `read_state_dict` or `convert` raises it.
    """
    where = "the state dict" if isinstance(source, Mapping) else source
    return convert(read_state_dict(source), num_heads, scale_embedding, depth, where)


def read_state_dict(source: str | Path | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the decoder's tensors by torchscale's names, without running code from a file.

    Args:
        source: a state dict, or a file with one, directly or, as in fairseq, under "model"; names may have a prefix.

    Raises:
        FileNotFoundError, ValueError: if a file cannot be read, or does not contain exactly one decoder.
    """
    stored: Any = source
    if not isinstance(source, Mapping):
        if not Path(source).is_file():
            raise FileNotFoundError(f"{source}: no such file; from_torchscale takes a .pt file or a state dict.")
        try:
            stored = load_file(source)
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise ValueError(
                f"{source} cannot be read as plain tensors ({lines[0][:120]}). If it contains other objects, load it "
                "where it was written and save only its state dict: torch.save(state_dict, path)."
            ) from None
    stored = stored["model"] if isinstance(stored, Mapping) and isinstance(stored.get("model"), Mapping) else stored
    if not isinstance(stored, Mapping):
        raise ValueError(
            f"from_torchscale takes a state dict, or {{'model': state dict}}; got {type(stored).__name__}."
        )
    check_names(stored, "the state dict" if isinstance(source, Mapping) else source)
    embeddings = [k.removesuffix("embed_tokens.weight") for k in stored if k.endswith("embed_tokens.weight")]
    several = len(embeddings) > 1
    prefixes = [p for p in embeddings if f"{p}output_projection.weight" in stored] if several else embeddings
    if len(prefixes) != 1:
        raise ValueError(
            f"a LongNet decoder has one embed_tokens.weight, but this state dict has {len(embeddings)}; "
            f"its names begin with {', '.join(list(stored)[:4]) or 'nothing'}."
        )
    return {k.removeprefix(prefixes[0]): v for k, v in stored.items() if k.startswith(prefixes[0])}


def convert(
    theirs: Mapping[str, Tensor],
    num_heads: int | None = None,
    scale_embedding: bool = False,
    asked: int | None = None,
    where: str | Path = "the state dict",
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return (the arguments of LongNetLM that follow from the tensors, the converted state dict).

    With xPos, torchscale rotates pairs of adjacent channels, but this package rotates the two halves of a head.
    Therefore rows of q and k are permuted.

    Args:
        asked: the number of layers that the decoder must have; None: any number.
        where: name of the file, for messages.

    Raises:
        ValueError: if tensors are missing, the decoder has parts that a LongNetLM lacks, or heads do not fit.
    """
    foreign = [k for k in theirs if any(part in k for part in FOREIGN)]
    if foreign:
        raise ValueError(f"this decoder has parts that a LongNetLM does not compute: {', '.join(foreign[:5])}.")
    numbers = [m[1] for k in theirs if (m := re.match(r"layers\.([0-9]+)\.", k))]
    depth = layers_of(numbers, len(theirs), where) if numbers else 0
    integer(depth, "the number of layers", 1)
    check_depth(depth, asked, None, where)
    sub = "layers.0.self_attn.inner_attn_ln.weight" in theirs
    scale = theirs.get("layers.0.self_attn.xpos.scale")
    args = {"depth": depth, "sub_layernorm": sub, "position_encoding": "none" if scale is None else "xpos"}
    names = _names(depth, sub)
    _check(theirs, names)
    used = {x: theirs[x] for parts in names.values() for x in parts}
    check_layer_shapes(used, where)
    check_finite(used, where)
    vocab, dim = theirs["embed_tokens.weight"].shape
    if num_heads is None and scale is not None:
        num_heads = dim // (2 * len(scale))
    if num_heads is None:
        raise ValueError("num_heads cannot be derived from the weights of a decoder without xPos; give num_heads.")
    num_heads = integer(num_heads, "num_heads", 1)
    if dim % num_heads or (scale is not None and dim // num_heads != 2 * len(scale)):
        expected = "" if scale is None else f"; xPos weights are for {dim // (2 * len(scale))} heads"
        raise ValueError(f"num_heads={num_heads} does not fit dim={dim}{expected}.")
    args |= {"vocab_size": vocab, "dim": dim, "num_heads": num_heads, "ffn_dim": len(theirs["layers.0.ffn.fc1.bias"])}
    xpos = scale is not None
    ours = {name: torch.cat([_rows(theirs[x], x, num_heads, xpos) for x in parts]) for name, parts in names.items()}
    tied = torch.equal(ours["embedding.weight"], ours["head.weight"]) and not scale_embedding
    if scale_embedding:
        ours["embedding.weight"] = ours["embedding.weight"] * dim**0.5
    return {**args, "tie_embeddings": tied}, ours


def _names(depth: int, sub: bool) -> dict[str, list[str]]:
    """Map our name of each tensor to torchscale's names of the tensors that are concatenated into it."""
    names = {"embedding.weight": ["embed_tokens.weight"], "head.weight": ["output_projection.weight"]}
    for kind in ("weight", "bias"):
        names[f"transformer.norm.{kind}"] = [f"layer_norm.{kind}"]
        for i in range(depth):
            here, there = f"transformer.blocks.{i}", f"layers.{i}"
            qkv = [f"{there}.self_attn.{x}_proj.{kind}" for x in "qkv"]
            names[f"{here}.attention.in_proj_{kind}"] = qkv
            for ours, theirs in {**LAYER, **(SUB_NORMS if sub else {})}.items():
                names[f"{here}.{ours}.{kind}"] = [f"{there}.{theirs}.{kind}"]
    return names


def _check(theirs: Mapping[str, Tensor], names: dict[str, list[str]]) -> None:
    used = {x for parts in names.values() for x in parts}
    missing = sorted(used - set(theirs))
    if missing:
        hint = (
            " Only decoders that normalise before each part have layer_norm." if "layer_norm.weight" in missing else ""
        )
        raise ValueError(f"the state dict lacks {len(missing)} tensors: {', '.join(missing[:5])}.{hint}")
    unused = sorted(k for k in set(theirs) - used if not BUFFERS.search(k))
    if unused:
        warnings.warn(f"from_torchscale does not use {len(unused)} tensors: {', '.join(unused)}.", stacklevel=5)


def _rows(x: Tensor, name: str, num_heads: int, xpos: bool) -> Tensor:
    """Return a torchscale tensor; for q and k with xPos, move each head's even rows before its odd rows."""
    if not xpos or not re.search(r"self_attn\.[qk]_proj\.", name):
        return x
    heads = x.unflatten(0, (num_heads, -1))
    return torch.cat([heads[:, ::2], heads[:, 1::2]], 1).flatten(0, 1)
