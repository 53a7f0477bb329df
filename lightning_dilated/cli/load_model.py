"""Checkpoints for the commands: read without running code in the file, and turned into a model, or one clear error."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from lightning_dilated._compat.lightning import argument_types
from lightning_dilated._extensions import hook
from lightning_dilated.checkpoint.reader import load_file
from lightning_dilated.cli.errors import fail
from lightning_dilated.cli.parsing.class_help import subclass
from lightning_dilated.cli.parsing.parser import check_texts
from lightning_dilated.cli.recipe import class_of
from lightning_dilated.data.text.tokenizer import load_tokenizer, tokenizer_of
from lightning_dilated.data.text.tokenizer_files import MAIN, checked_files
from lightning_dilated.models import DilatedModule
from lightning_dilated.models.module import stored_hparams
from lightning_dilated.models.pretrained import current_class_path, file_arguments, imported

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: ids by which vocabularies are usually padded at most
_PADDING = 1024


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The checkpoint's dict, tensors left on disk until they are used; no code in the file is run.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a checkpoint, or one cut short.
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
    """The dotted name of the model's class in a checkpoint; LongNetLM where an older one does not name its class."""
    named = stored_hparams(stored).get("_class_path") or stored.get("class_path")
    return current_class_path(str(named or "lightning_dilated.LongNetLM"))


def model_config(stored: dict[str, Any], where: str) -> dict[str, Any]:
    """{"class_path", "init_args"} of the model in a checkpoint.

    Raises:
        ValueError: for arguments that are not plain values, as `file_arguments`; `where` is the file, for messages.
    """
    return {"class_path": stored_class(stored), "init_args": file_arguments(stored_hparams(stored), where)}


def checkpoint_settings(path: str, class_name: str | None, own: set[str]) -> list[str]:
    """The model of a checkpoint as options, without its training options, which are the recipe's.

    Args:
        path: of a .ckpt.
        class_name: the model's class in recipes and options; None takes the checkpoint's.
        own: arguments of the model that recipes and options set; they replace a checkpoint's value that is not plain.
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
            f"--ckpt_path {path} names {named} (the model's class), which is no DilatedModule that is imported here, and "
            "files do not decide what is. If you trust it, name it in your own recipe or as --model, or import "
            f"{named.rpartition('.')[0]} before."
        )
    types = {} if cls is None else argument_types(cls)  # without a class the parser fails, and says why
    settings: dict[str, Any] = {}
    for name, value in stored_hparams(stored).items() if cls is not None else ():
        try:
            plain = file_arguments({name: value}, f"--ckpt_path {path}")
            check_texts(plain, types, f"--ckpt_path {path}")
        except ValueError as error:
            if name not in own:
                fail(error)
        else:
            settings |= plain
    arguments = [f"--model.{key}={x if isinstance(x, str) else json.dumps(x)}" for key, x in settings.items()]
    return arguments if class_name else [f"--model={named}", *arguments]


def _class_of_recipe(name: str) -> Any:
    """The class that a recipe or option names, as a parser reads it; None where there is none."""
    with contextlib.suppress(ValueError):
        return class_of(Path("the recipe"), name, "lightning_dilated")
    return subclass(DilatedModule, name)


def load_module(path: str | Path) -> DilatedModule:
    """The module of a checkpoint, on the CPU and in eval mode. Its class has to be imported already.

    The checkpoint's optimizer and scheduler are not read: the module has the defaults of its class.

    `path` is a .ckpt, or a folder that `save_pretrained` wrote.

    Raises:
        FileNotFoundError, ValueError: as `read_checkpoint`; also for a class that is not a known DilatedModule.
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
    """As `load_module`, also of a folder of transformers or of adapters: a HFCausalLM, in eval mode once it is built.

    Args:
        tile: of a HFCausalLM's loss, where its kind of decoder takes one.

    Raises:
        FileNotFoundError, ValueError: as `load_module`; for folders without config.json, and adapters without their model.
        ModuleNotFoundError: for a folder of transformers without transformers.
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


def load_causal_model(path: str | Path, tile: int | None = None) -> DilatedModule:
    """As `load_any`. Raises: ValueError also for models that do not predict the next token."""
    model = load_any(path, tile)
    if not model.predicts_next_token:
        raise ValueError(
            f"--ckpt_path {path} holds a {type(model).__name__}, which does not predict the next token; evaluate takes a "
            "LongNetLM or a HFCausalLM."
        )
    return model


def stored_tokenizer(path: str | Path) -> Tokenizer | None:
    """The tokenizer that a checkpoint, or a folder of `save_pretrained`, holds; None without.

    Raises:
        FileNotFoundError, ValueError: as `read_checkpoint`; also for a tokenizer that cannot be read.
        ModuleNotFoundError: without the library.
    """
    if Path(path).is_dir():
        return load_tokenizer(Path(path) / MAIN) if (Path(path) / MAIN).is_file() else None
    files = checked_files(read_checkpoint(path).get("tokenizer"), f"ckpt_path {path}")
    return None if files is None else tokenizer_of(files[MAIN], f"the tokenizer of ckpt_path {path}")


def load_language_model(path: str | Path, vocab_size: int | None = None) -> DilatedModule:
    """A language model from a checkpoint: over bytes, or with `vocab_size` over the tokens of a tokenizer that has so many.

    A model may have more tokens than its tokenizer: vocabularies are padded to a multiple of up to 1,024. Where more are
    unused, or more than half, it warns, as that may be another tokenizer than the one of the training. A model over
    bytes (vocab_size 256 and bytes_per_token 1) is never padded.

    Raises:
        ValueError: for another model; for a model over tokens without tokenizer, over bytes with one that has not 256, or
            with fewer tokens than the tokenizer.
    """
    model = load_any(path)
    size = getattr(model, "vocab_size", None)
    description = f"ckpt_path {path} holds a {type(model).__name__} with vocab_size {size}"
    of_bytes = model.predicts_next_token and size == 256 and model.bytes_per_token in (1, None)
    if not model.predicts_next_token or (vocab_size is None and not of_bytes):
        more = f" and bytes_per_token {model.bytes_per_token}" if model.predicts_next_token and size == 256 else ""
        raise ValueError(
            f"{description}{more}; generating text from the command line takes a LongNetLM or HFCausalLM over bytes "
            "(vocab_size 256), or --tokenizer with the tokenizer.json that it was trained with, if it holds none."
        )
    model.configure_model()  # a folder of transformers is read now
    if vocab_size is None:
        return model
    if vocab_size > size:
        raise ValueError(
            f"{description}, but the tokenizer has {vocab_size} tokens. Pass the one that the model was trained with."
        )
    if of_bytes and vocab_size != size:
        raise ValueError(
            f"{description} and bytes_per_token 1, so it is over bytes, but the tokenizer has {vocab_size} tokens. Leave "
            "--tokenizer out."
        )
    if size - vocab_size > min(_PADDING, size // 2):
        rank_zero_warn(
            f"{description}, but the tokenizer has {vocab_size} tokens only, more than padding leaves unused: is it the one "
            "that the model was trained with?"
        )
    return model
