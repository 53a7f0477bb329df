"""The model and the tokenizer that `generate` reads from a checkpoint or a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from lightning_dilated.cli.load_model import load_any, read_checkpoint
from lightning_dilated.data.text.tokenizer_files import MAIN, checked_files
from lightning_dilated.ext.text.tokenizer import load_tokenizer, tokenizer_of
from lightning_dilated.models import DilatedModule

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: ids by which vocabularies are usually padded at most
_PADDING = 1024


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
