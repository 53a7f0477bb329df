"""Implement `lightning-dilated consolidate`: write a checkpoint's weights as a safetensors file or a model folder."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_dilated.checkpoint.folder import checked, read_meta, read_tensors
from lightning_dilated.checkpoint.ranks import RankGroup
from lightning_dilated.cli.load_model import read_checkpoint, stored_class
from lightning_dilated.data.tokenizer_files import checked_files, write_files
from lightning_dilated.models import DilatedModule, pretrained
from lightning_dilated.models.stored import stored_hparams

SUFFIX = ".safetensors"


def model_config(stored: dict[str, Any], where: str) -> dict[str, Any]:
    """Return {"class_path", "init_args"} of the model in a checkpoint.

    Raises:
        ValueError: for arguments that are not plain values, as in `file_arguments`; the message names the file `where`.
    """
    return {"class_path": stored_class(stored), "init_args": pretrained.file_arguments(stored_hparams(stored), where)}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "lightning-dilated consolidate",
        description="Write the weights of a checkpoint as safetensors; optimizer states are left out and never read.",
    )
    p.add_argument(
        "checkpoint",
        type=Path,
        help="a folder that ShardedCheckpoint or ring_dilated_fsdp wrote, a folder of several of these (the newest "
        "complete one is taken), or a .ckpt",
    )
    p.add_argument(
        "--out",
        type=Path,
        required=True,
        help=f"NAME{SUFFIX}: one file, with the model's class and arguments in its metadata; any other name: a folder "
        "for from_pretrained and the hub",
    )
    return p


def weights(path: Path) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    """Return (the path of the checkpoint, its model's tensors, all other values).

    Raises:
        FileNotFoundError: if the file or folder does not exist.
        ValueError: if it is not a checkpoint, or is damaged.
    """
    if not path.is_dir():
        stored = read_checkpoint(path)
        return path, stored["state_dict"], stored
    folder = checked(path, RankGroup())
    meta = read_meta(folder)
    return folder, read_tensors(folder, "state_dict.").get("state_dict", {}), meta


def described(path: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return (contents of config.json, unique tensors); check them by building the model if its class is imported.

    Raises:
        ValueError: if the tensors do not fit the model.
        TypeError: if JSON cannot represent a hyperparameter.
    """
    config = model_config(meta, str(path))
    config["init_args"] = pretrained.plain_arguments(config["init_args"], config["class_path"].rpartition(".")[2])
    if meta.get("classes") is not None:
        config["classes"] = meta["classes"]
    cls = pretrained.imported(config["class_path"])
    if isinstance(cls, type) and issubclass(cls, DilatedModule):
        model = pretrained.make_from(cls, config, tensors, f"the weights of {path} do not fit", {})
        return pretrained.config_of(model), pretrained.tensors_of(model)
    storages: set[tuple[int, int]] = set()
    unique = {}
    for key, x in tensors.items():
        storage = (x.data_ptr(), x.nbytes)
        if x.nbytes == 0 or storage not in storages:
            unique[key] = x.detach().contiguous()
        storages.add(storage)
    return config, unique


def run(argv: list[str]) -> None:
    """Run the command: read the checkpoint, write the weights, and print a summary.

    Raises:
        ModuleNotFoundError: if safetensors is not installed.
    """
    args = parser().parse_args(argv)
    library = pretrained.library_of("safetensors.torch")  # raise before reading the checkpoint
    if args.out.suffix not in ("", SUFFIX) and not args.out.is_dir():
        raise ValueError(f"--out {args.out} must end in {SUFFIX}, or be a folder's name without a suffix.")
    source, tensors, meta = weights(args.checkpoint)
    config, tensors = described(source, tensors, meta)
    if args.out.suffix == SUFFIX and not args.out.is_dir():
        metadata = {k: v if isinstance(v, str) else json.dumps(v) for k, v in config.items()}
        if "global_step" in meta:
            metadata["global_step"] = str(meta["global_step"])
        args.out.parent.mkdir(parents=True, exist_ok=True)
        partial = args.out.with_name(f".{args.out.name}.partial")
        library.save_file(tensors, partial, metadata={"format": "pt", **metadata})
        partial.replace(args.out)
    else:
        pretrained.write_folder(args.out, config, tensors)
        write_files(args.out, checked_files(meta.get("tokenizer"), str(source)))
    size = sum(x.nbytes for x in tensors.values())
    print(f"{args.out}: {config['class_path']}, {len(tensors)} tensors, {size:,} bytes, from {source}")
