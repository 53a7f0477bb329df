"""HFCausalLM: a transformers decoder as a DilatedModule, which the Trainer trains on one or many ranks.

Shape letters: B batch, N tokens, L tokens of this rank, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_dilated._compat.torch import is_fake
from lightning_dilated._device import send
from lightning_dilated._validation import flag, integer, real
from lightning_dilated.attention.rotary import token_positions
from lightning_dilated.ext.decoding.sampling import Sampling, stop_tokens
from lightning_dilated.ext.transformers import adapter_folders, batches
from lightning_dilated.ext.transformers.adapter_folders import is_folder, stored_config
from lightning_dilated.ext.transformers.kinds import other_code, refuse_other_code, refuse_states, refuse_without_heads
from lightning_dilated.ext.transformers.layers import DecoderLayers, layers_of
from lightning_dilated.ext.transformers.lora import add_adapters, check_targets, keep_wide, wide_adapters
from lightning_dilated.ext.transformers.masks import checked_on_all, known_documents
from lightning_dilated.ext.transformers.patterns import ENTRY, has_pattern, layer_pattern, set_pattern
from lightning_dilated.ext.transformers.registration import NAME, dilated_cache, register
from lightning_dilated.ext.transformers.rotary import check_rope, furthest_position, length_warning, whole_lengths
from lightning_dilated.ext.transformers.sources import Source, changed_config, is_of_package, stored_values, with_depth
from lightning_dilated.memory.chunked_loss import IGNORE, loss_tile, tiled_sum, token_nats
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.memory.token_chunks import tiled
from lightning_dilated.models.documents import Documents
from lightning_dilated.models.longnet.lm import PLACE
from lightning_dilated.models.with_tokenizer import WithTokenizer
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.layers import layer_patterns, read_patterns
from lightning_dilated.sequence import SequenceSpec, active_sequence

#: decoders that compute logits from the last hidden states with the output projection alone
PLAIN_HEADS = ("gemma3_text", "llama", "mistral", "phi", "qwen2", "qwen3")


class HFCausalLM(WithTokenizer):
    """A causal language model of transformers, with `attn_implementation="ring_dilated"`.

    Batches have the format of `LongNetLM`: mappings with `tokens` (B, N) and `labels` (B, N), the next token of each
    position or -100; optionally `lengths` (B,) and `cu_seqlens` as in `dilated_attention`. Rotary positions are global
    on every rank and restart with each document. With each mean loss, its perplexity is logged, and bits per byte, or
    bits per token if the mean number of bytes of a token is unknown.

    Args:
        model: a folder or hub repository to load weights from; or, for random weights, a config of transformers or a
            mapping of its values, with `model_type`. Weights have the Trainer's dtype.
        pattern: see `set_pattern`. None: the pattern in the model's config if any, else the model's own attention.
        config: values that replace values of the model's config, such as {"max_position_embeddings": 65536,
            "rope_parameters": {"rope_type": "yarn", "factor": 8.0, ...}} to continue training at longer sequences.
        tile: compute the loss from logits of this many tokens at a time; None: all logits (B, N, V) in one step.
            Supported for Llama, Qwen 2 and 3, Mistral, Gemma 3 and Phi.
        lora: options of `peft.LoraConfig` as a mapping, such as {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj",
            "v_proj"]}, to train low-rank updates only and freeze the model's own weights. Adapters are fp32 even if
            weights have 16 bits. Needs the extra `lora`.
        adapters: a folder of adapters, written by `save_pretrained` or peft. Their training continues with the stored
            options, patterns and config; `lora` is optional. None: new adapters, unless `model` is a folder of
            adapters, which are then loaded together with the base model that the folder names.
        gradient_checkpointing: store only a layer's input and recompute the layer in the backward;
            `callbacks.ActivationRecompute` replaces it.
        compile_blocks: compile every layer on its first run with torch.compile, and on a GPU also the loss, if V is at
            least 1,024; generation stays uncompiled.
        bytes_per_token: mean bytes of a token; bits per byte are loss / (ln 2 bytes_per_token). None: the DataModule's
            value, as in `ByteDataModule`; if it has none, `bits_per_token` is logged.
        optimizer, lr_scheduler: see `DilatedModule`.

    A checkpoint holds the config and all weights, even those that `lora` froze; it loads without `model`'s folder.

    Raises:
        ModuleNotFoundError: without transformers, or for `lora` without peft.
        TypeError, ValueError: for an invalid argument; the message names it.
    """

    sequence_spec = SequenceSpec({"tokens": 1, "labels": 1}, whole=["lengths", "cu_seqlens", *PLACE])
    causal = predicts_next_token = takes_any_layout = True
    #: a callback's function or None: it gets a batch and its losses (B, L) before they are summed
    watch_losses: Callable[[Mapping[str, Any], Tensor], None] | None = None
    #: a callback's function or None: it gets a batch and the likeliest token at each label (B, L), -100 elsewhere
    watch_predictions: Callable[[Mapping[str, Any], Tensor], None] | None = None

    def __init__(
        self,
        model: dict[str, Any] | str | Path | Any,
        pattern: dict[str, Any] | DilatedPattern | list[dict[str, Any] | DilatedPattern] | None = None,
        *,
        config: dict[str, Any] | None = None,
        tile: int | None = None,
        lora: dict[str, Any] | None = None,
        adapters: str | Path | None = None,
        gradient_checkpointing: bool = False,
        compile_blocks: bool = False,
        bytes_per_token: float | None = None,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        register()
        source = Source.read(model, adapters, lora)
        self.source, self.adapters, self.lora = source.weights, source.adapters, source.lora
        self.tokenizer_files = source.tokenizer
        self.config = source.config if config is None else changed_config(source.config, config)
        if pattern is not None:
            set_pattern(self.config, pattern)
        self._read_sizes()
        self.gradient_checkpointing = flag(gradient_checkpointing, "gradient_checkpointing")
        self.compile_blocks = flag(compile_blocks, "compile_blocks")
        self.bytes_per_token = None if bytes_per_token is None else real(bytes_per_token, "bytes_per_token", above=0)
        self.tile = None if tile is None else integer(tile, "tile", 1)
        self._check_fit()
        self._length_checked = False
        self._adapted: tuple[Any, ...] = ()  # peft's wrapper of the decoder, in a tuple, so that it is no submodule
        names = ("lora", "tile", "gradient_checkpointing", "compile_blocks", "bytes_per_token")
        self.save_hyperparameters({"model": self.config.to_dict(), **{name: getattr(self, name) for name in names}})

    def _read_sizes(self) -> None:
        text = self.config.get_text_config(decoder=True)
        refuse_without_heads(text)
        self.depth, self.num_heads = text.num_hidden_layers, text.num_attention_heads
        self.num_kv_heads = getattr(text, "num_key_value_heads", None)
        if stored := getattr(text, ENTRY, None):
            cycle = read_patterns(stored, self.depth, self.num_heads, self.num_kv_heads)
            self._patterns = layer_patterns(cycle, self.depth)

    @property
    def own_patterns(self) -> tuple[DilatedPattern, ...]:
        """The pattern of each layer without `set_pattern`: dense attention or a sliding window."""
        text = self.config.get_text_config(decoder=True)
        return tuple(layer_pattern(text, layer) for layer in range(self.depth))

    def _check_fit(self) -> None:
        """Raise ValueError for options that this kind of decoder does not support."""
        check_rope(self.config.get_text_config(decoder=True))
        if self.tile is not None and not self._is_plain():
            kind = self.config.get_text_config(decoder=True).model_type
            raise ValueError(
                f"tile={self.tile} needs a decoder with logits that are the output projection of the hidden states "
                f"({', '.join(PLAIN_HEADS)}, without a soft cap); {kind} may change them. Leave tile out."
            )
        if self.lora is not None:
            with torch.device("meta"):  # needs no memory; a wrong module name fails early
                check_targets(self.lora, self._decoder(None))

    def _decoder(self, source: str | None) -> Any:
        """Return a transformers decoder with the weights of a folder or repository, or random weights."""
        from transformers import AutoModelForCausalLM

        options = {"attn_implementation": NAME, "dtype": torch.get_default_dtype(), "trust_remote_code": False}
        try:
            if source is None:
                return AutoModelForCausalLM.from_config(self.config, **options)
            return AutoModelForCausalLM.from_pretrained(source, config=self.config, **options)
        except KeyError as error:
            if error.args == (NAME,):  # the model has its own table of attention classes
                raise other_code(self.config.model_type) from None
            raise

    def setup(self, stage: str) -> None:
        """Check that every token of the data has an embedding."""
        size = self.config.get_text_config(decoder=True).vocab_size
        tokens = self._data_setting("vocab_size", size)
        if tokens > size:
            raise ValueError(
                f"the model's vocab_size={size} is below the data's {tokens} tokens: set data.tokenizer to the model's "
                f"own, or take a config with vocab_size {tokens} (its embedding is trained from the start)."
            )

    def build(self) -> None:
        """Build the decoder with loaded or random weights, and its adapters.

        Raises: ValueError for `compile_blocks` with a decoder that has no known list of layers.
        """
        self.decoder = self._decoder(self.source)
        refuse_other_code(self.decoder)
        if self.lora is not None:
            self._adapted = (add_adapters(self.decoder, self.lora),)
            if self.adapters is not None:
                adapter_folders.load(self._adapted[0], self.adapters)
        whole_lengths(self.decoder)
        layers = layers_of(self.decoder.base_model, self.depth)
        if layers is not None:
            self.transformer = DecoderLayers(
                self.decoder, layers, self._is_plain(), self.config.get_text_config(decoder=True)
            )
            self.transformer.memory = MemorySettings("block" if self.gradient_checkpointing else "none")
            if self.compile_blocks:
                self.transformer.compile_blocks()
        elif self.compile_blocks:
            raise ValueError(
                f"compile_blocks needs decoder layers in a list, and {type(self.decoder).__name__} has none that is known. "
                "Leave it out, or call torch.compile on the decoder."
            )
        elif self.gradient_checkpointing:
            self.decoder.gradient_checkpointing_enable()

    def _is_plain(self) -> bool:
        """Return whether the decoder is one of `PLAIN_HEADS` and does not soft-cap its logits."""
        text = self.config.get_text_config(decoder=True)
        return text.model_type in PLAIN_HEADS and not getattr(text, "final_logit_softcapping", None)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Extend `nn.Module._apply`: keep adapters in fp32, because 16 bits would lose small updates."""
        before = wide_adapters(self._built_outside())
        result = super()._apply(*args, **kwargs)
        keep_wide(self, before)
        return result

    @contextlib.contextmanager
    def _call(self, batch: Mapping[str, Any]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Yield the decoder's tokens and options, in a context with the whole sequence's documents and last position."""
        tokens, options = self._arguments(batch)
        bounds, group = batch.get("cu_seqlens"), active_sequence()
        agreed = None if group is None else group.agreed  # lengths that ranks exchanged with the positions
        length = tokens.shape[1] if agreed is None else agreed.seq_len
        if bounds is not None and len(bounds) > 1:
            length = int(bounds.diff().max())
        if not is_fake(tokens):  # a plan's tokens have no values
            self._check_length(length)
            batches.check_lengths(batch.get("lengths"), tokens, length)
        shared = group is not None and group.ranks > 1
        if agreed is not None and 0 in agreed.lengths:
            raise ValueError(
                f"a sequence of {agreed.seq_len} tokens on {len(agreed.lengths)} ranks leaves rank "
                f"{agreed.lengths.index(0)} without tokens, but decoders of transformers need at least one. Pack more into "
                "a row (data.pack_tokens), leave such short samples out, or share sequences among fewer ranks (strategy "
                "sequence_size)."
            )
        if shared or (bounds is not None and len(bounds) > 2):
            refuse_states(self.config.get_text_config(decoder=True))
        with known_documents(bounds), furthest_position(length - 1) if shared else contextlib.nullcontext():
            yield tokens, options

    def _check_batch(self, batch: Any, labels: bool = False) -> None:
        """Raise for an invalid batch of tokens, on every rank of the sequence."""
        checked_on_all(batches.check_batch, batch, self.vocab_size, labels)

    def _check_length(self, length: int) -> None:
        """Raise for sequences longer than the model's positions allow; warn if they are longer than in its training."""
        batches.check_positions(self.decoder, length)
        if not self._length_checked and (warning := length_warning(self.config, length)) is not None:
            self._length_checked = True
            rank_zero_warn(warning)

    def _arguments(self, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Return the tokens and options of the decoder's forward."""
        self._check_batch(batch)
        tokens, lengths, bounds = batch["tokens"], batch.get("lengths"), batch.get("cu_seqlens")
        if bounds is None:
            positions = token_positions(0, tokens.shape[1], tokens.device)
            options: dict[str, Any] = {}
        else:
            positions = send(Documents.of(bounds, tokens.shape[1]).position, tokens.device)
            options = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        if lengths is not None:
            if bounds is not None:
                raise ValueError("a batch has lengths (padded samples) or cu_seqlens (packed documents), not both.")
            options["attention_mask"] = positions < torch.as_tensor(lengths, device=tokens.device)[:, None]
        return tokens, {"position_ids": positions.expand(tokens.shape), "use_cache": False, **options}

    def forward(
        self, batch: Mapping[str, Any] | Tensor, *, lengths: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Return logits (B, N, V) of tokens (B, N) or of a batch; only of this rank's tokens in a shared sequence.

        Args:
            lengths, cu_seqlens: as in `dilated_attention`; only if `batch` is a tensor of tokens.

        Raises: ValueError for lengths or cu_seqlens together with a batch.
        """
        options = {k: x for k, x in (("lengths", lengths), ("cu_seqlens", cu_seqlens)) if x is not None}
        if isinstance(batch, Tensor):
            batch = {"tokens": batch, **options}
        elif options:
            raise ValueError(
                f"{' and '.join(options)} must be entries of the batch if forward takes a batch instead of tokens."
            )
        self.configure_model()
        with self._call(batch) as (tokens, options):
            return self.decoder(tokens, **options).logits

    def loss_terms(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the sum of nats over counted labels, and the number of these labels."""
        losses = self._losses(batch, summed=self.watch_losses is None)
        if self.watch_losses is not None:
            self.watch_losses(batch, losses)
        return losses.sum(), (batch["labels"] != IGNORE).sum()

    def token_losses(self, batch: Mapping[str, Any]) -> Tensor:
        """Return nats (B, N) of each label, at least fp32; 0 for labels of -100."""
        return self._losses(batch)

    def _losses(self, batch: Mapping[str, Any], summed: bool = False) -> Tensor:
        self._check_batch(batch, labels=True)
        labels = batch["labels"]
        self.configure_model()
        tile = self._loss_tile()
        if tile is None:
            logits = self(batch)
            self._show_likeliest(batch, lambda counted: logits[counted].argmax(-1))
            nats = token_nats(logits.flatten(0, 1), labels.flatten(), self.compile_blocks)
            return nats.sum() if summed else nats.view(labels.shape)
        with self._call(batch) as (tokens, options):
            states = self.decoder.base_model(tokens, **options).last_hidden_state
        head = self.decoder.get_output_embeddings()
        likeliest = functools.partial(tiled, lambda x: head(x).argmax(-1), (head,), tile)
        self._show_likeliest(batch, lambda counted: likeliest(states[counted][None])[0])

        def nats_of(x: Tensor, y: Tensor) -> Tensor:
            return token_nats(head(x).flatten(0, 1), y.flatten(), self.compile_blocks).view(y.shape)

        return (tiled_sum if summed else tiled)(nats_of, (head,), tile, states, labels)

    @torch.no_grad()
    def _show_likeliest(self, batch: Mapping[str, Any], likeliest: Callable[[Tensor], Tensor]) -> None:
        """Call `watch_predictions` with the likeliest token at each label; `likeliest` gets a mask (B, L) of labels."""
        if self.watch_predictions is not None:
            counted = batch["labels"] != IGNORE
            tokens = torch.full(counted.shape, IGNORE, device=counted.device)
            self.watch_predictions(batch, tokens.masked_scatter_(counted, likeliest(counted)))

    def _loss_tile(self) -> int | None:
        """Return the number of tokens per tile of logits, from the model's option or the memory settings."""
        settings = getattr(self, "transformer", None)
        if self.tile is not None or settings is None:
            return self.tile
        return loss_tile(settings.memory.tile, self.vocab_size)

    @torch.no_grad()
    def generate(self, tokens: Tensor, **options: Any) -> Any:
        """Continue prompts (B, N) with transformers' `generate`: returns (B, N + new) tokens, or outputs by name.

        With a pattern, decoding uses a `dilated_cache`; its rows equal the rows of a forward over the whole sequence.
        Layers with their own attention use transformers' cache. Dropout is off. Generation runs on one rank.

        Args:
            tokens: prompts. Pad shorter ones on the left with any tokens, and set `attention_mask` (B, N) to 0 there.
                Padding does not change how a row is continued.
            options: options of transformers: max_new_tokens, do_sample, temperature, eos_token_id, stop_strings, ...

        Raises:
            ValueError: for parameters that are sharded over ranks, padding that is not on the left, and options that
                transformers refuses.
        """
        self._check_prompts(tokens)
        batches.check_generation(self.decoder, tokens, options, has_pattern(self.decoder))
        if (
            has_pattern(self.decoder)
            and options.get("use_cache", True)
            and not {"cache", "past_key_values"} & set(options)
        ):
            options["cache"] = dilated_cache(self.decoder.config)
        options.setdefault("attention_mask", torch.ones_like(tokens))
        training = self.decoder.training
        self.decoder.eval()
        # compiled layers would recompile for each new length
        eager = torch.compiler.set_stance("force_eager") if self.compile_blocks else contextlib.nullcontext()
        try:
            with eager:
                return self.decoder.generate(tokens, **options)
        finally:
            self.decoder.train(training)

    @torch.no_grad()
    def generate_stream(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
        stop: int | Collection[int] | None = None,
        attention_mask: Tensor | None = None,
    ) -> Iterator[Tensor]:
        """Yield the tokens (B,) that continue prompts (B, N), step by step; options as in `LongNetLM.generate_stream`.

        Caches are the same as in `generate`. A row that drew a token of `stop` repeats it. The stream ends when all
        rows have stopped.

        Args:
            attention_mask: (B, N), 0 at padding, which is on the left; None: all prompts have N tokens.

        Raises:
            ValueError, TypeError: on the first step, as in `generate`, and for options that define no distribution.
        """
        sampling, ends = Sampling(temperature, top_k, top_p), stop_tokens(stop, self.vocab_size)
        self._check_prompts(tokens)
        batches.check_padding(attention_mask, tokens)
        batches.check_positions(self.decoder, tokens.shape[1] + integer(max_new_tokens, "max_new_tokens", 0) - 1)
        cache, last = self._new_cache(), tokens.new_zeros(len(tokens))
        ended, training = torch.zeros_like(last, dtype=torch.bool), self.decoder.training
        self.decoder.eval()
        try:
            for _ in range(max_new_tokens):
                padding = batches.step_arguments(attention_mask, tokens.shape[1])
                logits = self.decoder(tokens, cache=cache, use_cache=True, logits_to_keep=1, **padding).logits[:, -1]
                last = torch.where(ended, last, sampling.draw(logits, generator))
                yield last
                ended |= torch.isin(last, torch.tensor(ends, dtype=last.dtype, device=last.device))
                if ends and bool(ended.all()):
                    return
                tokens = last[:, None]
                if attention_mask is not None:
                    attention_mask = torch.cat([attention_mask, torch.ones_like(attention_mask[:, :1])], 1)
        finally:
            self.decoder.train(training)

    def _check_prompts(self, tokens: Tensor) -> None:
        """Raise unless prompts (B, N) can be continued; builds the model."""
        batches.check_prompts(tokens, self.vocab_size)
        self.configure_model()
        refuse_sharded(self, "generation needs whole parameters")

    def _new_cache(self) -> Any:
        """Return this package's cache if the decoder has a pattern, else transformers' cache."""
        if has_pattern(self.decoder):
            return dilated_cache(self.decoder.config)
        from transformers import DynamicCache

        return DynamicCache(config=self.decoder.config)

    def derived_metrics(self, loss: Tensor) -> dict[str, Tensor]:
        """Return perplexity and bits per byte (per token if a token's bytes are unknown) of a scalar loss."""
        size, bits = self.bytes_per_token, loss / math.log(2)
        if size is None or (size == 1 and self.vocab_size > 512):  # not a vocabulary of bytes
            size = self._data_setting("bytes_per_token")
        name = "bits_per_token" if size is None else "bits_per_byte"
        return {name: bits / (1 if size is None else size), "perplexity": loss.exp()}

    # -- methods for planning ------------------------------------------------------------------------------------------
    def example_batch(self, tokens: int) -> dict[str, Any]:
        """Return a batch of one random text."""
        text = torch.randint(0, self.vocab_size, (1, tokens))
        return {"tokens": text, "labels": text.roll(-1, 1)}

    def planning_copy(self, depth: int) -> Self:
        copy = super().planning_copy(depth)
        if hasattr(copy, "transformer"):
            del copy.transformer
        copy.config = with_depth(self.config, depth)
        copy.source, copy.adapters, copy._adapted = None, None, ()
        if self.lora is not None:
            copy.lora = {**self.lora, "init_lora_weights": False}  # other ways to initialize read the weights
        return copy

    def token_features(self) -> tuple[int, ...]:
        return (self.vocab_size,)

    def reads_logits(self) -> bool:
        return True

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens in the decoder's vocabulary."""
        return self.config.get_text_config(decoder=True).vocab_size

    @property
    def made_for(self) -> int | None:
        """Sequence length that the decoder is made for, or None if its config does not state one."""
        return getattr(self.config.get_text_config(decoder=True), "max_position_embeddings", None)

    @property
    def learns_positions(self) -> bool:
        """True for a decoder without rotary positions; such a decoder has no positions beyond `made_for`."""
        return getattr(self.config.get_text_config(decoder=True), "rope_parameters", None) is None

    # -- folders of transformers ---------------------------------------------------------------------------------------
    def save_pretrained(self, folder: str | Path, merge: bool = False) -> Path:
        """Write a model folder that transformers loads without this package; its config contains the patterns, if any.

        With `lora` the folder has peft's format: it holds the adapters and the name of their base model, plus a
        `decoder_config.json` with which `HFCausalLM(folder)` continues training. The data's tokenizer, if any, is
        written into the folder. On several ranks, call this method on one rank only.

        Args:
            merge: add the updates to the weights, in a copy, and write the whole model.

        Raises:
            FileExistsError: if `folder` is a file.
            ValueError: for parameters that are sharded over ranks.
        """
        flag(merge, "merge")
        if Path(folder).is_file():
            raise FileExistsError(f"save_pretrained writes a folder, and {folder} is a file. Give another name.")
        self.configure_model()
        refuse_sharded(self, "a folder stores whole parameters")
        if self._adapted and merge:
            adapter_folders.save_merged(self._adapted[0], folder)
        elif self._adapted:
            adapter_folders.save(self._adapted[0], folder, self.config)
        else:
            self.decoder.save_pretrained(folder)
        self.write_hub_files(Path(folder))
        return Path(folder)

    @classmethod
    def from_pretrained(cls, path_or_repo: str | Path, **changes: Any) -> Self:
        """Return `HFCausalLM(path_or_repo, **changes)` with loaded weights; also reads what `consolidate` wrote."""
        if is_of_package(path_or_repo):
            return super().from_pretrained(path_or_repo, **changes)
        module = cls(path_or_repo, **changes)
        module.configure_model()
        return module


def refuse_sharded(module: nn.Module, why: str) -> None:
    """Raise ValueError for parameters that are sharded over ranks."""
    if any(isinstance(p, DTensor) for p in module.parameters()):
        raise ValueError(
            f"the parameters are sharded over ranks, but {why}. Save a checkpoint, run `lightning-dilated consolidate`, and "
            "load the model from its file by load_from_checkpoint."
        )


def decoder_of(folder: Path, tile: int | None = None) -> HFCausalLM | None:
    """Return the model of a folder that transformers or peft saved, built on first use, or None for other folders.

    Args:
        tile: tile of the loss; ignored if the decoder does not support it.
    """
    adapted = is_folder(folder)
    config = (stored_config(folder) or {}) if adapted else stored_values(folder)
    if not adapted and "model_type" not in config:
        return None
    plain = config.get("model_type") in PLAIN_HEADS and not config.get("final_logit_softcapping")
    return HFCausalLM(str(folder), tile=tile if plain else None)
