"""Checks of HFCausalLM's inputs: batches of tokens, prompts, and options of transformers' generate.

Shape letters: B batch, N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dilated._compat.torch import is_fake
from lightning_dilated.ext.transformers.padding import Padding
from lightning_dilated.memory.chunked_loss import IGNORE

#: entries of other libraries' batches, which would be ignored -> the equivalent entry of this package
_OTHERS = {
    "attention_mask": "lengths (B,), the tokens of right-padded samples",
    "position_ids": "cu_seqlens, the bounds of packed documents, at which positions restart",
    "input_ids": "tokens",
}
#: options of generate that draft tokens and remove some of them later
_DRAFTS = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")
#: names of modules that hold learned embeddings of positions
_POSITIONS = ("wpe", "embed_positions", "position_embedding", "position_embeddings")


# -- batches -----------------------------------------------------------------------------------------------------------
def check_batch(batch: Any, vocab_size: int, labels: bool = False) -> None:
    """Raise TypeError or ValueError unless a batch has tokens (B, N) below V, and labels (B, N) if `labels` is True."""
    if not isinstance(batch, Mapping):
        raise TypeError(f"a batch is a mapping of tokens (B, N) and labels (B, N), got {type(batch).__name__}.")
    for name, instead in _OTHERS.items():
        if name in batch:
            raise ValueError(
                f"a batch of HFCausalLM takes no {name}: give {instead}. It has {', '.join(map(str, batch))}."
            )
    names = ("tokens", "labels") if labels else ("tokens",)
    if missing := [name for name in names if name not in batch]:
        raise ValueError(
            f"a batch of HFCausalLM has tokens (B, N) and labels (B, N), the next token of each position; got no "
            f"{' and no '.join(missing)} among {', '.join(map(str, batch)) or 'nothing'}."
        )
    check_tokens(batch["tokens"], vocab_size, "tokens", 0)
    if labels:
        check_tokens(batch["labels"], vocab_size, "labels", IGNORE)
        if batch["labels"].shape != batch["tokens"].shape:
            raise ValueError(
                f"tokens and labels must both be (B, N), got {tuple(batch['tokens'].shape)} and "
                f"{tuple(batch['labels'].shape)}; labels are the next token of each position, already shifted."
            )
    bounds = batch.get("cu_seqlens")
    if bounds is not None and not isinstance(bounds, Tensor):
        raise TypeError(f"cu_seqlens must be an int32 tensor of bounds, got {type(bounds).__name__}.")


def check_tokens(tokens: Any, vocab_size: int, name: str, least: int) -> None:
    """Raise unless tokens are integers (B, N) below V; values on a device are not read, to avoid a synchronization."""
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32):
        kind = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
        raise TypeError(f"{name} must be a tensor of token numbers, int64 (B, N); got {kind}.")
    if tokens.ndim != 2:
        raise ValueError(f"{name} must be (B, N), got {tuple(tokens.shape)}: give a batch, even of one sample.")
    if tokens.device.type != "cpu" or is_fake(tokens) or not tokens.numel():
        return
    low, high = (int(x) for x in tokens.aminmax())
    if low < least or high >= vocab_size:
        raise ValueError(
            f"{name} must lie from {least} to {vocab_size - 1}, because the model has vocab_size={vocab_size}; got {low} to "
            f"{high}. Take the model's own tokenizer, or a model with a larger vocabulary."
        )


def check_lengths(lengths: Any, tokens: Tensor, most: int) -> None:
    """Raise ValueError unless lengths are (B,) numbers from 0 to N."""
    if lengths is None:
        return
    values = torch.as_tensor(lengths)
    if values.shape != tokens.shape[:1] or not bool(((values >= 0) & (values <= most)).all()):
        raise ValueError(
            f"lengths must be (B,) = ({len(tokens)},) numbers of tokens from 0 to N = {most}, got {values.tolist()}."
        )


# -- positions ---------------------------------------------------------------------------------------------------------
def check_positions(decoder: nn.Module, length: int) -> None:
    """Raise ValueError if tokens outnumber a decoder's learned positions; rotary positions have no limit."""
    most = _learned_positions(decoder)
    if most is not None and length > most:
        raise ValueError(
            f"{length:,} tokens go beyond the {most:,} positions for which {type(decoder).__name__} has learned embeddings. "
            "Give shorter sequences (data.seq_len, or fewer new tokens), or take a model with rotary positions."
        )


def _learned_positions(decoder: nn.Module) -> int | None:
    """Return the number of learned positions, or None for a decoder without such a table."""
    for name, module in decoder.named_modules():
        if name.rpartition(".")[2] in _POSITIONS and isinstance(module, nn.Embedding):
            return module.num_embeddings - getattr(module, "offset", 0)
    return None


# -- generation --------------------------------------------------------------------------------------------------------
def check_prompts(tokens: Any, vocab_size: int) -> None:
    """Raise TypeError or ValueError unless prompts (B, N) can be continued."""
    if not isinstance(tokens, Tensor):
        raise TypeError(
            f"generate takes prompts (B, N) as a tensor of tokens, got {type(tokens).__name__}: encode a text first, as by "
            "tokenizer(text, return_tensors='pt').input_ids."
        )
    if tokens.ndim != 2 or not tokens.numel():
        raise ValueError(f"generate takes prompts (B, N) of at least one token, got {tuple(tokens.shape)}.")
    check_tokens(tokens, vocab_size, "tokens", 0)


def check_generation(decoder: Any, tokens: Tensor, options: Mapping[str, Any], has_pattern: bool) -> None:
    """Raise ValueError for options of transformers' generate that would fail later, and for padding not on the left."""
    config = options.get("generation_config") or decoder.generation_config
    option = lambda name: options.get(name, getattr(config, name, None))  # noqa: E731
    kind = option("cache_implementation")
    if kind is not None and (has_pattern or kind not in ("dynamic", "offloaded", "quantized")):
        raise ValueError(
            f"cache_implementation={kind!r} is not supported: caches of a fixed size need other masks, and a pattern "
            "needs a dilated_cache. Leave it out; dilated_cache(config, max_length=N) has a fixed size."
        )
    drafts = [name for name in _DRAFTS if option(name) is not None]
    if has_pattern and drafts:
        raise ValueError(
            f"{drafts[0]} drafts tokens and removes some later, but a dilated_cache holds only the rows that later tokens "
            "see. Leave it out, or pass use_cache=False instead of a dilated_cache."
        )
    new, whole = option("max_new_tokens"), option("max_length")
    if new is not None or whole is not None:
        check_positions(decoder, whole if new is None else tokens.shape[1] + new - 1)  # the last new token is no input
    check_padding(options.get("attention_mask"), tokens)


def check_padding(mask: Any, tokens: Tensor) -> None:
    """Raise ValueError for an attention_mask that does not pad prompts (B, N) on the left."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.shape != tokens.shape:
        shape = f"{tuple(mask.shape)}" if isinstance(mask, Tensor) else f"{type(mask).__name__}"
        raise ValueError(f"attention_mask must be (B, N) = {tuple(tokens.shape)}, like the prompts; got {shape}.")
    padding = Padding.of(mask)
    if padding is not None:
        padding.check_prompts()


def step_arguments(mask: Tensor | None, new: int) -> dict[str, Tensor]:
    """Return a decoder's arguments for the last `new` tokens, given a mask (B, N) of all tokens; {} without a mask."""
    if mask is None:
        return {}
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    return {"attention_mask": mask, "position_ids": positions[:, positions.shape[1] - new :]}
