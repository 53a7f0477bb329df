"""Load the model and the tokenizer for `lightning-dilated generate` from a checkpoint or a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from lightning_dilated.cli.load_model import load_any, read_checkpoint
from lightning_dilated.data.tokenizer_files import MAIN, checked_files
from lightning_dilated.ext.text.tokenizer import load_tokenizer, tokenizer_of
from lightning_dilated.models import DilatedModule

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: maximum number of unused ids with which vocabularies are usually padded
_PADDING = 1024


def stored_tokenizer(path: str | Path) -> Tokenizer | None:
    """Return the tokenizer stored in a checkpoint or in a folder of `save_pretrained`; None if there is none.

    Raises:
        FileNotFoundError, ValueError: as in `read_checkpoint`; also if the tokenizer cannot be read.
        ModuleNotFoundError: if the library tokenizers is not installed.
    """
    if Path(path).is_dir():
        return load_tokenizer(Path(path) / MAIN) if (Path(path) / MAIN).is_file() else None
    files = checked_files(read_checkpoint(path).get("tokenizer"), f"ckpt_path {path}")
    return None if files is None else tokenizer_of(files[MAIN], f"the tokenizer of ckpt_path {path}")


def load_language_model(path: str | Path, vocab_size: int | None = None) -> DilatedModule:
    """Load a language model over bytes, or over the tokens of a tokenizer with `vocab_size` tokens, from a checkpoint.

    A model may have more tokens than its tokenizer, because vocabularies are padded to a multiple of up to 1,024. If
    more than 1,024 tokens or more than half are unused, this warns, because the model may have been trained with
    a different tokenizer. A model over bytes (vocab_size 256 and bytes_per_token 1) is never padded.

    Raises:
        ValueError: for another kind of model, a model over tokens without a tokenizer, a model over bytes with a
            tokenizer that does not have 256 tokens, or a model with fewer tokens than the tokenizer.
    """
    model = load_any(path)
    size = getattr(model, "vocab_size", None)
    description = f"ckpt_path {path} holds a {type(model).__name__} with vocab_size {size}"
    of_bytes = model.predicts_next_token and size == 256 and model.bytes_per_token in (1, None)
    if not model.predicts_next_token or (vocab_size is None and not of_bytes):
        byte_note = f" and bytes_per_token {model.bytes_per_token}" if model.predicts_next_token and size == 256 else ""
        raise ValueError(
            f"{description}{byte_note}; generating text from the command line takes a LongNetLM or HFCausalLM over bytes "
            "(vocab_size 256). For another model without a stored tokenizer, pass --tokenizer with the tokenizer.json."
        )
    model.configure_model()  # reads a folder of transformers
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
            f"{description}, but the tokenizer has only {vocab_size} tokens, and padding does not explain the "
            "difference: was the model trained with this tokenizer?"
        )
    return model
