"""LongNetLM, a causal language model with dilated attention; TokenModel, the base of models over tokens.

Shape letters: B batch, N tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_dilated._extensions import hook
from lightning_dilated._validation import flag, integer, real
from lightning_dilated.attention.functional import autocast
from lightning_dilated.attention.rotary import token_positions
from lightning_dilated.memory.chunked_loss import IGNORE, loss_tile, tiled_sum, token_nats
from lightning_dilated.memory.token_chunks import tiled
from lightning_dilated.models.blocks import working
from lightning_dilated.models.documents import Documents, check_form, mean_token, sample_documents
from lightning_dilated.models.transformer import USUAL, init_weights
from lightning_dilated.models.transformer_model import TransformerModel
from lightning_dilated.models.with_tokenizer import WithTokenizer
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.sequence import SequenceSpec, sequence_sum

if TYPE_CHECKING:
    from lightning_dilated import StreamState
    from lightning_dilated.data import AlleleWindows

Strands = Literal["forward", "reverse", "both"]
#: entries of a batch that identify a sample; predictions contain copies of them
PLACE = ("index", "record", "start", "stop", "strand", "region")
#: number of tokens that `LongNetLM.stream` computes at a time
CHUNK = 1 << 16


class TokenModel(WithTokenizer, TransformerModel):
    """The base of LongNetLM and LongNetMLM: embedding, blocks and output projection over tokens (bytes by default).

    Args:
        pattern: see `TransformerModel`.
        vocab_size: V.
        tie_embeddings: whether the output projection shares the embedding's weights.
        bytes_per_token: mean number of bytes in a token, 1 for bytes; bits per byte = loss / (ln 2 bytes_per_token).
        predict_embeddings: let `predict` return `embedding` (B, E), the mean of each sequence's last hidden states,
            instead of likelihoods. Checkpoints do not store this setting.
        dim, depth, num_heads: see `TransformerModel`.
        options: other arguments of `TransformerModel`, except `drop_path`.

    Raises:
        ValueError, TypeError: naming the argument.
    """

    sequence_spec = SequenceSpec({"tokens": 1, "labels": 1}, whole=["lengths", "cu_seqlens", *PLACE])
    #: strands of a genome that the model reads for a prediction: "forward", "reverse" or "both"
    strands: Strands = "forward"
    causal = True
    length_from_data = predicts_rows = True

    def __init__(
        self,
        pattern: dict[str, Any] | DilatedPattern | list[dict[str, Any] | DilatedPattern],
        vocab_size: int = 256,
        dim: int = 256,
        depth: int = 4,
        num_heads: int = 4,
        *,
        tie_embeddings: bool = True,
        bytes_per_token: float = 1.0,
        predict_embeddings: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(pattern, dim, depth, num_heads, drop_path=0.0, **options)
        real(bytes_per_token, "bytes_per_token", above=0)
        self.vocab_size = integer(vocab_size, "vocab_size", 1)
        self.tie_embeddings, self.bytes_per_token = flag(tie_embeddings, "tie_embeddings"), bytes_per_token
        self.predict_embeddings = flag(predict_embeddings, "predict_embeddings")

    def setup(self, stage: str) -> None:
        """Check that the vocabulary includes every token of the data."""
        tokens = self._data_setting("vocab_size", self.vocab_size)
        if tokens > self.vocab_size:
            raise ValueError(
                f"vocab_size={self.vocab_size} is below the data's {tokens} tokens. Set the model's vocab_size to {tokens}."
            )

    @property
    def embedded_tokens(self) -> int:
        """The number of rows of the embedding."""
        return self.vocab_size

    def build(self) -> None:
        """Make the embedding, blocks and output projection, with initial weights."""
        self.embedding = nn.Embedding(self.embedded_tokens, self.dim)
        self.transformer = self._transformer(self.depth)
        self.head = nn.Linear(self.dim, self.vocab_size, bias=False)
        init_weights(self, self.depth, self.dim)
        if self.tie_embeddings:
            self.head.weight = self.embedding.weight
        self.dropout = nn.Dropout(self.options.dropout)
        if self.compile_blocks:
            self.transformer.compile_blocks()

    def example_batch(self, tokens: int) -> dict[str, Any]:
        """Return a batch of N random tokens with labels."""
        text = torch.randint(0, self.vocab_size, (1, tokens))
        return {"tokens": text, "labels": text.roll(-1, 1), "index": torch.zeros(1, dtype=torch.int64)}

    def export_inputs(self, length: int, batch_size: int) -> dict[str, Tensor]:
        """Return random tokens (B, N)."""
        device = self.embedding.weight.device
        return {"tokens": torch.randint(0, self.vocab_size, (batch_size, length), device=device)}

    def export_outputs(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Return logits (B, N, V)."""
        return {"logits": self(inputs["tokens"])}

    def _hidden(self, tokens: Tensor, **options: Any) -> Tensor:
        """Return hidden states (B, N, E) of tokens (B, N), before the last norm."""
        x = self.transformer.residual(self.dropout(self.embedding(tokens)))
        bounds, has_positions = options.get("cu_seqlens"), options.get("positions") is not None
        if bounds is not None and not has_positions and self.options.position_encoding != "none":
            options["positions"] = Documents.of(bounds, x.shape[1]).position  # 0 at each document's start
        return self.transformer(x, normed=False, **options)

    def final_norm(self, x: Tensor) -> Tensor:
        """Return the input (..., E) of the output projection for hidden states (..., E)."""
        return self.transformer.norm(working(x, self.head.weight))

    def _logits(self, x: Tensor) -> Tensor:
        """Return logits (..., V) for hidden states (..., E)."""
        return self.head(self.final_norm(x))

    def _nats(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return losses (B, N) in nats of labels (B, N) for hidden states (B, N, E): at least fp32, 0 at labels of -100."""
        logits = self._logits(x).flatten(0, 1)
        return token_nats(logits, labels.flatten(), self.compile_blocks).view(labels.shape)

    def _losses(self, x: Tensor, labels: Tensor, summed: bool = False) -> Tensor:
        """Return `_nats`, or their sum if `summed`; with the memory setting `tile`, compute one tile at a time."""
        inputs = (self.transformer.norm, self.head), loss_tile(self.transformer.memory.tile, self.vocab_size), x, labels
        # tiled_sum computes gradients in the forward, before the loss is scaled; in fp16 they would underflow
        if summed and torch.float16 not in (x.dtype, autocast(working(x[:, :0], self.head.weight))[0].dtype):
            return tiled_sum(self._nats, *inputs)
        losses = tiled(self._nats, *inputs)
        return losses.sum() if summed else losses

    # -- sequences without a Trainer -----------------------------------------------------------------------------------
    def embed(
        self,
        sequences: Any,
        *,
        pool: Literal["mean", "none"] = "mean",
        layer: int | None = None,
        strands: Strands | None = None,
        batch_size: int = 8,
    ) -> Tensor:
        """Return hidden states of B sequences without gradients, at least fp32: (B, E), or (B, N, E) with pool="none".

        Args:
            sequences: see `score`.
            pool: "mean" over the tokens of each sequence; "none" keeps the tokens, padded on the right with 0.
            layer: index of the block whose output is returned; -1: the last block. None: the normalized states that the
                output projection reads.
            strands: strands of a genome to read: "forward", "reverse", or "both" for their mean. Rows have the order of
                the given sequence: with "both", `embed(reverse_complement(x))` is `embed(x)` in reversed order. None:
                the model's own strands, "forward" unless the model was made with strands="both".
            batch_size: number of sequences computed at a time; a batch has sequences of similar length.

        Raises:
            TypeError, ValueError: as in `score`, and for an invalid `pool`, `strands` or `layer`.
        """
        return hook("embed sequences")(
            self, sequences, pool, layer, self.strands if strands is None else strands, batch_size
        )

    def score_alleles(
        self, variants: Sequence[AlleleWindows], *, strands: Strands = "forward", flank: int = 8, batch_size: int = 8
    ) -> NamedTuple:
        """Return the log-likelihoods of two alleles of each variant, in nats.

        LongNetLM scores the whole windows, as in `score`. LongNetMLM scores masked sites. For a substitution, all sites
        where the alleles differ are masked together. For an insertion or deletion, sites are masked one at a time, from
        `flank` tokens before the alleles to `flank` tokens after the longer allele: the same number in both windows.

        Args:
            variants: windows of both alleles, from `data.allele_windows`.
            flank: number of tokens on each side of an insertion or deletion that LongNetMLM scores.
            strands, batch_size: see `score`.
        """
        flank, size = integer(flank, "flank", 0), integer(batch_size, "batch_size", 1)
        return hook("score alleles")(self, variants, strands, flank, size)

    def _sample_embeddings(self, batch: Mapping[str, Any]) -> Tensor:
        """Return each sample's mean of the last hidden states, on all ranks: (B, E), or (D, E) for D packed samples."""
        self.configure_model()
        check_form(self, batch, tokens=("(B, N)", "tokens"))
        tokens, lengths, bounds = batch["tokens"], batch.get("lengths"), batch.get("cu_seqlens")
        documents = sample_documents(batch, tokens.shape[1])
        positions = token_positions(0, tokens.shape[1]) if documents is None else documents.position
        x = self._last_states(tokens, lengths=lengths, cu_seqlens=bounds)
        return mean_token(x, positions, lengths, documents=documents)

    def _last_states(self, tokens: Tensor, **options: Any) -> Tensor:
        """Return the last hidden states (B, N, E), after the last norm."""
        return self.final_norm(self._hidden(tokens, **options))

    def _predicted(self, batch: Mapping[str, Any], values: dict[str, Tensor]) -> dict[str, Any]:
        """Return a prediction: the batch's entries in `PLACE`, followed by `values`."""
        return {**{name: batch[name] for name in PLACE if name in batch}, **values}


class LongNetLM(TokenModel):
    """A causal language model over tokens (bytes by default).

    Batches are mappings with `tokens` (B, N), `labels` (B, N) and optionally `lengths` (B,) and `cu_seqlens`, see
    `dilated_attention`. A label is the next token, or -100 for none. If a batch has `stream` (B,) and `starts` (B, N),
    each row continues the endless sequence with its number in `stream`, see `StreamDataModule`.

    Bits per byte and perplexity are logged with each mean loss. Arguments: see `TokenModel`.
    """

    predicts_next_token = True
    learns_positions = False
    #: whether `memory.stream` computes long sequences chunk by chunk
    streams = True
    host_entries = (*TokenModel.host_entries, "stream", "position", "starts")
    #: a callback's function, called with a batch and its losses (B, L) before they are summed
    watch_losses: Callable[[Mapping[str, Any], Tensor], None] | None = None
    #: a callback's function, called with a batch and the likeliest tokens (B, L), -100 where the label is -100
    watch_predictions: Callable[[Mapping[str, Any], Tensor], None] | None = None

    @property
    def made_for(self) -> int | None:
        """The number of tokens of the longest sequence that the model is made for, or None."""
        return self.max_seq_len

    def setup(self, stage: str) -> None:
        """Check as in `TokenModel`; warn if `bytes_per_token` is 1 although the vocabulary is too large for bytes."""
        super().setup(stage)
        tokens = self._data_setting("vocab_size", self.vocab_size)
        if tokens > 512 and self.bytes_per_token == 1:
            rank_zero_warn(
                f"bytes_per_token is 1, but {tokens} different tokens cannot be bytes: bits_per_byte will be bits per "
                "token. Set bytes_per_token to the mean bytes a token, which `lightning-dilated tokenize` prints."
            )

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        caches: list[Any] | None = None,
        last_only: bool | Tensor = False,
    ) -> Tensor:
        """Return logits (B, N, V) from tokens (B, N).

        Args:
            caches: caches of earlier tokens, from `model.transformer.new_caches()`; each call extends them.
            last_only: True: return only the last token's logits, (B, 1, V); indices (B,): only logits of these tokens.
        """
        self.configure_model()
        x = self._hidden(tokens, positions=positions, lengths=lengths, cu_seqlens=cu_seqlens, caches=caches)
        if isinstance(last_only, Tensor):
            x = x.gather(1, last_only[:, None, None].expand(-1, 1, x.shape[2]))
        elif last_only:
            x = x[:, -1:]
        return self._logits(x)

    def token_losses(self, batch: Mapping[str, Any]) -> Tensor:
        """Return each label's loss in nats (B, N), at least fp32, and 0 where the label is -100."""
        return self._label_nats(batch)

    def _label_nats(self, batch: Mapping[str, Any]) -> Tensor:
        """Return LongNetLM's `token_losses`, even if a subclass redefines them: predictions must be likelihoods."""
        self._checked(batch)
        if "stream" in batch:
            return self.streaming.nats(self, batch, per_token=True)
        if self._in_chunks(batch):
            return torch.cat([self._losses(*states) for states in self.streaming.chunk_states(self, batch)], 1)
        return self._losses(*self._states(batch))

    def _checked(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        tokens, labels = (batch.get(x) if isinstance(batch, Mapping) else None for x in ("tokens", "labels"))
        if (
            isinstance(tokens, Tensor)
            and isinstance(labels, Tensor)
            and (tokens.shape != labels.shape or tokens.ndim != 2)
        ):
            raise ValueError(
                f"tokens and labels must both be (B, N), got {tuple(tokens.shape)} and {tuple(labels.shape)}; "
                "labels are the next token of each position, already shifted."
            )
        check_form(self, batch, tokens=("(B, N)", "tokens"), labels=("(B, N)", "integers"))
        return batch["tokens"], batch["labels"]

    def _states(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return hidden states (B, N, E) before the last norm, and labels (B, N)."""
        tokens, labels = self._checked(batch)
        self.configure_model()
        return self._hidden(tokens, lengths=batch.get("lengths"), cu_seqlens=batch.get("cu_seqlens")), labels

    def loss_terms(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return (sum of nats, number of labels other than -100)."""
        self._checked(batch)
        redefined = type(self).token_losses is not _TOKEN_LOSSES or "token_losses" in vars(self)
        if "stream" in batch:
            return self.streaming.carried_terms(self, batch, redefined)
        if self._in_chunks(batch):
            return self.streaming.loss_terms(self, batch, redefined)
        states = None if redefined and self.watch_predictions is None else self._states(batch)
        if states is not None and self.watch_predictions is not None:
            self.watch_predictions(batch, self._predictions(*states))
        if states is not None and not redefined and self.watch_losses is None:
            return self._losses(*states, summed=True), (batch["labels"] != IGNORE).sum()
        losses = self.token_losses(batch) if states is None or redefined else self._losses(*states)
        if self.watch_losses is not None:
            self.watch_losses(batch, losses)
        return losses.sum(), (batch["labels"] != IGNORE).sum()

    @torch.no_grad()
    def _predictions(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the likeliest tokens (B, N) for hidden states (B, N, E), in tiles; -100 where the label is -100."""
        counted = labels != IGNORE
        options = (self.transformer.norm, self.head), loss_tile(self.transformer.memory.tile, self.vocab_size)
        likeliest = tiled(lambda states: self._logits(states).argmax(-1), *options, x[counted][None])
        return torch.full_like(labels, IGNORE).masked_scatter_(counted, likeliest[0])

    def derived_metrics(self, loss: Tensor) -> dict[str, Tensor]:
        """Return bits per byte (per base for a genome) and the perplexity of a token, for a scalar mean loss."""
        return {"bits_per_byte": loss / (math.log(2) * self.bytes_per_token), "perplexity": loss.exp()}

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """Return the number of labelled `tokens` (B,) and `bits_per_byte` (B,), NaN without labels.

        The prediction also contains the batch's entries in `PLACE`, such as `index`. With `predict_embeddings` it has
        `embedding` instead of likelihoods. For a row that packs D samples with numbers `index` (D,), shapes are (D,).
        """
        if self.predict_embeddings:
            return self._predicted(batch, {"embedding": self._sample_embeddings(batch)})
        losses, counted = self._label_nats(batch), batch["labels"] != IGNORE
        documents = sample_documents(batch, losses.shape[1])
        if documents is None:
            losses, counted = sequence_sum(losses.sum(1)), sequence_sum(counted.sum(1).to(losses.device))
        else:
            counts = counted[0].to(losses.device, torch.float64)
            losses, counted = documents.sum(losses[0]), documents.sum(counts).long()
        bits = losses / counted / (math.log(2) * self.bytes_per_token)
        return self._predicted(batch, {"tokens": counted, "bits_per_byte": bits})

    def score(
        self,
        sequences: Any,
        *,
        strands: Strands = "forward",
        ignore_tokens: Sequence[int] | None = None,
        batch_size: int = 8,
    ) -> NamedTuple:
        """Return the log-likelihood, in nats, of each of B sequences: the sum over tokens, given all earlier tokens.

        The first token is not counted, because the model has no earlier token to predict it from.

        Args:
            sequences: strings of bases (for a model of a genome), tokens (N,) each, or a tensor (B, N).
            strands: strands of a genome to read: "forward", "reverse", or "both" for the mean of both log-likelihoods.
            ignore_tokens: tokens that are not scored; None: the base "N" of a genome, and no token of other data.
            batch_size: number of sequences computed at a time; a batch has sequences of similar length.

        Raises:
            TypeError: for a single sequence instead of several.
            ValueError: for a character that is not a base, and for tokens beyond the vocabulary. Without the vocabulary
                of a genome, also for strings and for `strands` other than "forward".
        """
        return hook("score sequences")(self, sequences, strands, None, ignore_tokens, batch_size)

    def generate(self, tokens: Tensor, max_new_tokens: int, **options: Any) -> Tensor:
        """Return tokens (B, N + new): the prompt (B, N >= 1) and up to `max_new_tokens` new tokens, until a stop token.

        Args:
            options: temperature, top_k, top_p, generator, stop, prompt_chunk, lengths, max_length; see the function
                `generate_stream`.
        """
        return hook("generate")(self, tokens, max_new_tokens, **options)

    def generate_stream(self, tokens: Tensor, max_new_tokens: int, **options: Any) -> Iterator[Tensor]:
        """Yield the new tokens of `generate`, (B,) for each step, as soon as they are sampled; options are the same."""
        return hook("generate stream")(self, tokens, max_new_tokens, **options)

    def free_generation_memory(self) -> None:
        """Free the caches and CUDA graphs that `generate` keeps for later calls."""
        hook("free generation memory")(self)

    def on_fit_start(self) -> None:
        """Free the memory of generation, and mark the streams' last batch as finished."""
        super().on_fit_start()
        self.free_generation_memory()
        self._tell_streams("finish_batch")

    # -- streams: long sequences chunk by chunk, and endless ones batch by batch ---------------------------------------
    _streaming: Any = None

    @property
    def streaming(self) -> Any:
        """The object that computes sequences chunk by chunk and stores the states of endless sequences."""
        if self._streaming is None:
            self._streaming = hook("streams of a model")()
        return self._streaming

    def _tell_streams(self, event: str, *args: Any) -> None:
        if self._streaming is not None:
            getattr(self._streaming, event)(*args)

    def _in_chunks(self, batch: Mapping[str, Any]) -> bool:
        """Return True if `memory.stream` is set and sequences are longer than a chunk; every rank must call this."""
        self.configure_model()
        return self.transformer.memory.stream is not None and self.streaming.in_chunks(self, batch)

    def stream(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        state: StreamState | None = None,
        *,
        chunk: int = CHUNK,
        starts: Tensor | None = None,
        per_token: bool = False,
    ) -> tuple[Tensor, StreamState]:
        """Return the nats of the next tokens of endless sequences, and a state for the next call.

        Memory holds a chunk, and the keys and values that later tokens read. Memory grows with the number of calls only
        if branches attend over the whole sequence: these keep all keys and values. With gradients enabled, this is
        truncated back-propagation through time: gradients stop at the boundaries of chunks.

        Args:
            tokens: (B, n), which follow the tokens of earlier calls.
            labels: (B, n), -100 for tokens that do not count. None, which needs gradients disabled: each token is the
                label of the token before it.
            state: from the previous call; None at the start of the sequences.
            chunk: number of tokens computed at a time.
            starts: (B, n) bool, True at the first token of each document, which sees no earlier document. None: no new
                document starts. The first token of a sequence always starts a document.
            per_token: return nats (B, n) without gradients instead of their sum.

        Returns:
            The sum of nats (or nats (B, n)), and the new state. The old state is not changed.

        Raises:
            ValueError: for shapes that do not match, missing labels with gradients enabled, a state with other
                `head_chunks`, and ranks that share sequences.
        """
        return self.streaming.stream(self, tokens, labels, state, chunk=chunk, starts=starts, per_token=per_token)

    def truncated_parts(self, batch: Any) -> list[range] | None:
        """Return the last batch's tokens as ranges of positions in documents; gradients stop at the ends of ranges.

        Return None if gradients reach whole documents: the batch has no `stream`, and `memory.truncate` is not set. Also
        return None if ranks share chunks; then the counted FLOPs of truncated training are too high.
        """
        if not isinstance(batch, Mapping) or "tokens" not in batch:
            return None
        if "stream" not in batch and not self.transformer.memory.truncate:
            return None
        return self.streaming.truncated_parts(self, batch)

    def _longest(self, batch: Any) -> int:
        """Return N as `DilatedModule` does; for streams, the longest document so far, rounded down to a power of two."""
        parts = self.truncated_parts(batch) if isinstance(batch, Mapping) and "stream" in batch else None
        return 1 << max(x.stop for x in parts).bit_length() - 1 if parts else super()._longest(batch)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch as `DilatedModule` does; keep sequences that are computed chunk by chunk on the CPU."""
        if isinstance(batch, Mapping) and {"tokens", "labels"} <= batch.keys():
            self.configure_model()
            if self.transformer.memory.stream is not None and self.streaming.stays_on_host(self, batch):
                return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the states of all ranks' training streams; every rank must call this."""
        super().on_save_checkpoint(checkpoint)
        self._tell_streams("save", self, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the states of training streams, on any number of ranks."""
        super().on_load_checkpoint(checkpoint)
        if self._streaming is not None or checkpoint.get("streams"):
            self.streaming.load(checkpoint)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Free the states that the streams had before this batch."""
        super().on_train_batch_end(outputs, batch, batch_idx)
        self._tell_streams("finish_batch")

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Move the streams' states to the host if the model moves there, as it does after a run."""
        moved = super()._apply(*args, **kwargs)
        if self._built and self.head.weight.device.type == "cpu":
            self._tell_streams("to_host")
        return moved

    def _finish_evaluation(self) -> None:
        self._tell_streams("finish_evaluation")

    on_validation_epoch_start = on_test_epoch_start = _finish_evaluation
    on_predict_epoch_start = on_predict_epoch_end = _finish_evaluation

    def _report_all(self, stage: str) -> None:
        self._finish_evaluation()
        super()._report_all(stage)

    @classmethod
    def from_torchscale(
        cls,
        source: str | Path | Mapping[str, Tensor],
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        num_heads: int | None = None,
        scale_embedding: bool = False,
        **options: Any,
    ) -> LongNetLM:
        """Make a model from a torchscale LongNetDecoder with pre-norm and GELU; sub-layer norms and xPos are optional.

        Sizes follow from the tensors. The model has the tensors' dtype, and is in training mode like a new model. A
        warning names unused tensors.

        Args:
            source: a state dict, or a .pt file that contains a state dict, either alone or under "model".
            segment_lengths, dilation_rates: from the decoder's configuration; offsets are "blocked", as in torchscale.
            num_heads: from the decoder's configuration; with xPos it follows from the tensors.
            scale_embedding: True if the decoder's configuration has no_scale_embedding=False. Then the embedding is
                multiplied by sqrt(dim), and is not tied to the output projection.
            options: further arguments of the class; the default xpos_scale_base, 512, equals torchscale's.

        Raises:
            FileNotFoundError, ValueError: for a file that cannot be read, missing tensors, sizes that do not match, or
                layers that a LongNetLM does not have.
        """
        if options.get("recurrence") is not None:
            raise ValueError(
                "a torchscale decoder has no recurrence: leave it out. To add a recurrence, make a LongNetLM with a "
                "recurrence whose gate_init is 0, and load this model's state dict into it with strict=False."
            )
        if options.get("hashed") is not None:
            raise ValueError("a torchscale decoder has no hashed heads: leave hashed out.")
        sizes, state = hook("read torchscale")(source, num_heads, scale_embedding, options.get("depth"))
        pattern = DilatedPattern.longnet(segment_lengths, dilation_rates, offsets="blocked")
        usual = {"norm": "layernorm", "ffn": "gelu", "bias": True, "rotary_base": USUAL}
        model = cls(pattern, **{**usual, **sizes, **options})
        model.to(state["embedding.weight"].dtype)
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            raise ValueError(f"the tensors do not fit each other. {error}") from None
        return model


LongNetLM.loss_terms.streams = True  # type: ignore[attr-defined]  # a user's own loss_terms lacks this mark
LongNetLM.forward.decodes = True  # type: ignore[attr-defined]  # the same work for every token: a graph can capture it
#: the original method, to detect that a subclass or an instance redefines it
_TOKEN_LOSSES = LongNetLM.token_losses
