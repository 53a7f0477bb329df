"""Checkpoints for the commands: read a file without running its code, and make the model in the file."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from lightning_dilated._compat.lightning import argument_types
from lightning_dilated._extensions import hook
from lightning_dilated.checkpoint.reader import load_file
from lightning_dilated.cli.errors import fail
from lightning_dilated.cli.parsing.class_help import subclass
from lightning_dilated.cli.parsing.parser import check_texts
from lightning_dilated.cli.recipe import class_of
from lightning_dilated.models import DilatedModule
from lightning_dilated.models.pretrained import current_class_path, file_arguments, imported
from lightning_dilated.models.stored import stored_hparams


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint's dict without running code from it; tensors stay on disk until they are used.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if the file is not a checkpoint, or is incomplete.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"ckpt_path {path}: no such file. Pass a .ckpt that fit wrote (run folder, checkpoints/)."
        )
    try:
        stored = load_file(path, mapped=True)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"ckpt_path {path} cannot be read as a checkpoint ({lines[0][:120]}). "
            "It may be cut short or of another kind; use an earlier one."
        ) from None
    if not isinstance(stored, dict) or "state_dict" not in stored:
        raise ValueError(f"ckpt_path {path} is a torch file, but not a Lightning checkpoint: it has no state_dict.")
    return stored


def stored_class(stored: dict[str, Any]) -> str:
    """Return the dotted name of a checkpoint's model class; LongNetLM for an old checkpoint without this name."""
    named = stored_hparams(stored).get("_class_path") or stored.get("class_path")
    return current_class_path(str(named or "lightning_dilated.LongNetLM"))


def checkpoint_settings(path: str, class_name: str | None, set_here: set[str]) -> list[str]:
    """Return a checkpoint's model arguments as options, without the training arguments, which the recipe sets.

    Args:
        path: a .ckpt file.
        class_name: the model's class in recipes and options; None: the checkpoint's class.
        set_here: model arguments that recipes and options set; the checkpoint may have any values for them.
    """
    stored = read_checkpoint(path)
    named = stored_class(stored)
    if class_name is not None and named.rpartition(".")[2] != class_name.rpartition(".")[2]:
        fail(
            f"--ckpt_path {path} holds a {named}, but the recipe or --model names {class_name}. Use one class for both."
        )
    cls = imported(named) if class_name is None else _class_of_recipe(class_name)
    if class_name is None and not (isinstance(cls, type) and issubclass(cls, DilatedModule)):
        fail(
            f"--ckpt_path {path} names {named} (the model's class), which is not an imported DilatedModule, and a file "
            "does not decide what is imported. If you trust the class, name it in your own recipe or as --model, or "
            f"import {named.rpartition('.')[0]} before."
        )
    types = {} if cls is None else argument_types(cls)  # if the class is missing, the parser will report why
    settings: dict[str, Any] = {}
    for name, value in stored_hparams(stored).items() if cls is not None else ():
        try:
            plain = file_arguments({name: value}, f"--ckpt_path {path}")
            check_texts(plain, types, f"--ckpt_path {path}")
        except ValueError as error:
            if name not in set_here:
                fail(error)
        else:
            settings |= plain
    arguments = [f"--model.{key}={x if isinstance(x, str) else json.dumps(x)}" for key, x in settings.items()]
    return arguments if class_name else [f"--model={named}", *arguments]


def _class_of_recipe(name: str) -> Any:
    with contextlib.suppress(ValueError):
        return class_of(Path("the recipe"), name, "lightning_dilated")
    return subclass(DilatedModule, name)


def load_module(path: str | Path) -> DilatedModule:
    """Load the module in a .ckpt or a `save_pretrained` folder, on the CPU and in eval mode.

    The module's class must already be imported. The module has the class's default optimizer and scheduler.

    Raises:
        FileNotFoundError, ValueError: as in `read_checkpoint`; also for a class that is not an imported DilatedModule.
    """
    if (Path(path) / "config.json").is_file():
        return DilatedModule.from_pretrained(path).eval()
    class_path = stored_class(read_checkpoint(path))
    cls = imported(class_path)
    if not (isinstance(cls, type) and issubclass(cls, DilatedModule)):
        raise ValueError(
            f"ckpt_path {path} holds a {class_path}, which is not imported here. Import it and call its "
            "load_from_checkpoint in Python."
        )
    return cls.load_from_checkpoint(path, map_location="cpu", weights_only=True).eval()


def load_any(path: str | Path, tile: int | None = None) -> DilatedModule:
    """Load as in `load_module`, or load a HFCausalLM from a transformers folder or a folder of adapters.

    Args:
        tile: the tile of a HFCausalLM's loss, if the decoder supports tiles.

    Raises:
        FileNotFoundError, ValueError: as in `load_module`; for a folder without config.json; for adapters without a model.
        ModuleNotFoundError: for a transformers folder if transformers is not installed.
    """
    folder = Path(path)
    decoder = hook("decoder of a folder")(folder, tile) if folder.is_dir() else None
    if decoder is not None:
        return decoder
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(
            f"--ckpt_path {path} is a folder without config.json. Give a .ckpt, or a folder of save_pretrained; make such "
            f"a folder of a sharded checkpoint: lightning-dilated consolidate {path} --out FOLDER."
        )
    return load_module(path)
