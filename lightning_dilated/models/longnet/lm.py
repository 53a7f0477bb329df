"""LongNetLM, a causal language model with dilated attention; TokenModel, its base over tokens.

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
#: entries of a batch that say where a sample comes from, which predictions repeat
PLACE = ("index", "record", "start", "stop", "strand", "region")
#: tokens of a call of `LongNetLM.stream` that are computed at a time
CHUNK = 1 << 16


class TokenModel(WithTokenizer, TransformerModel):
    """Embedding, blocks and output projection of a model over tokens (bytes by default); base of LongNetLM and LongNetMLM.

    Args:
        pattern: see `TransformerModel`.
        vocab_size: V.
        tie_embeddings: the output projection shares the embedding's weights.
        bytes_per_token: mean bytes a token stands for, 1 for bytes; bits per byte are loss / (ln 2 bytes_per_token).
        predict_embeddings: `predict` gives `embedding` (B, E), the mean of each sequence's last hidden states, in place of
            likelihoods. Not kept in checkpoints.
        dim, depth, num_heads: see `TransformerModel`.
        options: its others, but for `drop_path`.

    Raises:
        ValueError, TypeError: naming the argument.
    """

    sequence_spec = SequenceSpec({"tokens": 1, "labels": 1}, whole=["lengths", "cu_seqlens", *PLACE])
    #: of a genome, which the model reads to compute one thing
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
        """Check that every token of the data has an embedding."""
        tokens = self._data_setting("vocab_size", self.vocab_size)
        if tokens > self.vocab_size:
            raise ValueError(
                f"vocab_size={self.vocab_size} is below the data's {tokens} tokens. Set the model's vocab_size to {tokens}."
            )

    @property
    def embedded_tokens(self) -> int:
        """Rows of the embedding."""
        return self.vocab_size

    def build(self) -> None:
        """Embedding, blocks and output projection, with fresh weights."""
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
        """A random text."""
        text = torch.randint(0, self.vocab_size, (1, tokens))
        return {"tokens": text, "labels": text.roll(-1, 1), "index": torch.zeros(1, dtype=torch.int64)}

    def export_inputs(self, length: int, batch_size: int) -> dict[str, Tensor]:
        """Tokens (B, N)."""
        device = self.embedding.weight.device
        return {"tokens": torch.randint(0, self.vocab_size, (batch_size, length), device=device)}

    def export_outputs(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Logits (B, N, V)."""
        return {"logits": self(inputs["tokens"])}

    def _hidden(self, tokens: Tensor, **options: Any) -> Tensor:
        """(B, N, E) of tokens (B, N), before the last norm."""
        x = self.transformer.residual(self.dropout(self.embedding(tokens)))
        bounds, has_positions = options.get("cu_seqlens"), options.get("positions") is not None
        if bounds is not None and not has_positions and self.options.position_encoding != "none":
            options["positions"] = Documents.of(bounds, x.shape[1]).position  # they begin anew with each document
        return self.transformer(x, normed=False, **options)

    def final_norm(self, x: Tensor) -> Tensor:
        """(..., E), as the output projection reads them, of hidden states (..., E)."""
        return self.transformer.norm(working(x, self.head.weight))

    def _logits(self, x: Tensor) -> Tensor:
        """(..., V) of hidden states (..., E)."""
        return self.head(self.final_norm(x))

    def _nats(self, x: Tensor, labels: Tensor) -> Tensor:
        """(B, N) nats of the labels of hidden states (B, N, E), at least fp32, 0 where the label is -100."""
        logits = self._logits(x).flatten(0, 1)
        return token_nats(logits, labels.flatten(), self.compile_blocks).view(labels.shape)

    def _losses(self, x: Tensor, labels: Tensor, summed: bool = False) -> Tensor:
        """`_nats`, or their sum, in tiles if the memory settings say so: logits of all tokens then never exist together."""
        within = (self.transformer.norm, self.head), loss_tile(self.transformer.memory.tile, self.vocab_size), x, labels
        # gradients of a sum are computed with it; in fp16 they would be too small, since a loss scale is applied later
        if summed and torch.float16 not in (x.dtype, autocast(working(x[:, :0], self.head.weight))[0].dtype):
            return tiled_sum(self._nats, *within)
        losses = tiled(self._nats, *within)
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
        """Hidden states of B sequences, without a gradient, at least fp32: (B, E), or (B, N, E) by position.

        Args:
            sequences: as of `score`.
            pool: "mean" over the tokens of each sequence; "none" keeps them, padded on the right with 0.
            layer: the states behind this block, as the next one reads them, -1 for the last; None: the last ones, normed, as
                the output projection reads them.
            strands: of a genome, which are read: "forward", "reverse", or "both" for the mean of both. Positions are those
                of the sequence as given, so with "both" `embed(reverse_complement(x))` is `embed(x)` with positions
                backwards. None: the model's own, "forward" unless it was made with strands="both".
            batch_size: sequences that are computed at a time; those of similar length together.

        Raises:
            TypeError, ValueError: as `score`; for other words or a layer that is not there.
        """
        return hook("embed sequences")(
            self, sequences, pool, layer, self.strands if strands is None else strands, batch_size
        )

    def score_alleles(
        self, variants: Sequence[AlleleWindows], *, strands: Strands = "forward", flank: int = 8, batch_size: int = 8
    ) -> NamedTuple:
        """Log-likelihoods of two alleles of each variant, in nats.

        LongNetLM: of the whole windows, as `score`. LongNetMLM: of substitutions the alleles' log-probabilities at the sites
        where they differ, all of these masked at once; of insertions and deletions those of each site masked by itself, from
        `flank` tokens before the alleles to `flank` behind the longer one, in as many sites of both windows.

        Args:
            variants: windows of both alleles, as `data.allele_windows` makes them.
            strands: as of `score`.
            flank: tokens, as above.
            batch_size: as of `score`.
        """
        flank, size = integer(flank, "flank", 0), integer(batch_size, "batch_size", 1)
        return hook("score alleles")(self, variants, strands, flank, size)

    def _sample_embeddings(self, batch: Mapping[str, Any]) -> Tensor:
        """(B, E), on every rank: the mean of each sample's last hidden states; (D, E) of a row of D packed samples."""
        self.configure_model()
        check_form(self, batch, tokens=("(B, N)", "tokens"))
        tokens, lengths, bounds = batch["tokens"], batch.get("lengths"), batch.get("cu_seqlens")
        documents = sample_documents(batch, tokens.shape[1])
        positions = token_positions(0, tokens.shape[1]) if documents is None else documents.position
        x = self._last_states(tokens, lengths=lengths, cu_seqlens=bounds)
        return mean_token(x, positions, lengths, documents=documents)

    def _last_states(self, tokens: Tensor, **options: Any) -> Tensor:
        """(B, N, E), normed."""
        return self.final_norm(self._hidden(tokens, **options))

    def _predicted(self, batch: Mapping[str, Any], values: dict[str, Tensor]) -> dict[str, Any]:
        """A prediction: where each sample comes from, as the data says it, and then the values."""
        return {**{name: batch[name] for name in PLACE if name in batch}, **values}


class LongNetLM(TokenModel):
    """Causal language model over tokens (bytes by default).

    Batches are mappings with `tokens` (B, N) and `labels` (B, N), the next token of each position, -100 where there is
    none; optionally `lengths` (B,) and `cu_seqlens` as in `dilated_attention`. Arguments: see `TokenModel`.
    Batches with `stream` (B,), numbers of endless sequences, and `starts` (B, N), go on after those before with the same
    numbers, see `StreamDataModule`.

    Logged with each mean loss: bits per byte and perplexity.
    """

    predicts_next_token = True
    learns_positions = False
    #: whether `memory.stream` computes long sequences chunk by chunk
    streams = True
    host_entries = (*TokenModel.host_entries, "stream", "position", "starts")
    #: called with a batch and its losses (B, L) before they are summed, while a callback watches
    watch_losses: Callable[[Mapping[str, Any], Tensor], None] | None = None
    #: called with a batch and the likeliest token at each label (B, L), -100 elsewhere, while a callback watches
    watch_predictions: Callable[[Mapping[str, Any], Tensor], None] | None = None

    @property
    def made_for(self) -> int | None:
        """Tokens of a sequence that the model is made for, if it says so."""
        return self.max_seq_len

    def setup(self, stage: str) -> None:
        """As `TokenModel`; warn where `bytes_per_token` was left at 1 although more than 512 tokens cannot be bytes."""
        super().setup(stage)
        tokens = self._data_setting("vocab_size", self.vocab_size)
        if tokens > 512 and self.bytes_per_token == 1:
            rank_zero_warn(
                f"bytes_per_token is 1, but {tokens} different tokens are no bytes: bits_per_byte will be bits per token. "
                "Set bytes_per_token to the mean bytes of text a token, which `lightning-dilated tokenize` prints."
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
        """Logits (B, N, V) from tokens (B, N); with `last_only` the last token's (B, 1, V), or those of the tokens (B,) that
        it names.

        `caches` hold the tokens before these: `model.transformer.new_caches()`, which each call extends.
        """
        self.configure_model()
        x = self._hidden(tokens, positions=positions, lengths=lengths, cu_seqlens=cu_seqlens, caches=caches)
        if isinstance(last_only, Tensor):
            x = x.gather(1, last_only[:, None, None].expand(-1, 1, x.shape[2]))
        elif last_only:
            x = x[:, -1:]
        return self._logits(x)

    def token_losses(self, batch: Mapping[str, Any]) -> Tensor:
        """(B, N) nats of each label, at least fp32, 0 where the label is -100."""
        return self._label_nats(batch)

    def _label_nats(self, batch: Mapping[str, Any]) -> Tensor:
        """`token_losses`, whatever a subclass trains on: what likelihoods are made of."""
        self._checked(batch)
        if "stream" in batch:
            return self.streaming.nats(self, batch, per_token=True)
        if self._in_chunks(batch):
            return torch.cat([self._losses(*states) for states in self.streaming.chunk_states(self, batch)], 1)
        return self._losses(*self._states(batch))

    def _checked(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """(tokens, labels)."""
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
        """(hidden states before the last norm (B, N, E), labels)."""
        tokens, labels = self._checked(batch)
        self.configure_model()
        return self._hidden(tokens, lengths=batch.get("lengths"), cu_seqlens=batch.get("cu_seqlens")), labels

    def loss_terms(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """(sum of nats, number of labels that count)."""
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
        """(B, N) the likeliest token at each label of hidden states (B, N, E); -100 elsewhere, without logits."""
        counted = labels != IGNORE
        within = (self.transformer.norm, self.head), loss_tile(self.transformer.memory.tile, self.vocab_size)
        likeliest = tiled(lambda at: self._logits(at).argmax(-1), *within, x[counted][None])
        return torch.full_like(labels, IGNORE).masked_scatter_(counted, likeliest[0])

    def derived_metrics(self, loss: Tensor) -> dict[str, Tensor]:
        """Bits per byte and perplexity of a token, from a scalar loss; of a genome, bits per base."""
        return {"bits_per_byte": loss / (math.log(2) * self.bytes_per_token), "perplexity": loss.exp()}

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """The batch's `index`, and of a genome `record`, `start`, `stop`, `strand` and `region`, those that it has; `tokens`
        (B,) that have a label, and `bits_per_byte` (B,), NaN without labels; or `embedding` with `predict_embeddings`.

        Where a row packs D samples, each with a number in `index` (D,): (D,), one a sample.
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
        """The log-likelihood of each of B sequences, in nats: of every token but the first, given those before it.

        Nothing is in front of the first token, so the model gives it no probability.

        Args:
            sequences: strings of bases (for a model of a genome), tokens (N,) each, or a tensor (B, N).
            strands: of a genome, which are read: "forward", "reverse", or "both" for the mean of both log-likelihoods.
            ignore_tokens: tokens that are not scored; None: of a genome N, of others none.
            batch_size: sequences that are computed at a time; those of similar length together.

        Raises:
            TypeError: for a single sequence in place of several.
            ValueError: for a character that is no base, tokens that the model does not have, and strings or another strand
                where the vocabulary is no genome's.
        """
        return hook("score sequences")(self, sequences, strands, None, ignore_tokens, batch_size)

    def generate(self, tokens: Tensor, max_new_tokens: int, **options: Any) -> Tensor:
        """Tokens (B, N + new): the prompt (B, N >= 1) and its continuation by `max_new_tokens`, or up to a stop token.

        Args:
            options: temperature, top_k, top_p, generator, stop, prompt_chunk, lengths, max_length; see the function
                `generate_stream`.
        """
        return hook("generate")(self, tokens, max_new_tokens, **options)

    def generate_stream(self, tokens: Tensor, max_new_tokens: int, **options: Any) -> Iterator[Tensor]:
        """The continuation as it is drawn, (B,) tokens a step; the same tokens and options as of `generate`."""
        return hook("generate stream")(self, tokens, max_new_tokens, **options)

    def free_generation_memory(self) -> None:
        """Free the caches and CUDA graphs that earlier calls of `generate` left for later ones."""
        hook("free generation memory")(self)

    def on_fit_start(self) -> None:
        """As `DilatedModule`; training needs the memory of generation, and batches of streams are numbered anew."""
        super().on_fit_start()
        self.free_generation_memory()
        self._tell_streams("finish_batch")

    # -- streams: long sequences chunk by chunk, and endless ones batch by batch ---------------------------------------
    _streaming: Any = None

    @property
    def streaming(self) -> Any:
        """The object that computes sequences chunk by chunk and holds the states of endless ones."""
        if self._streaming is None:
            self._streaming = hook("streams of a model")()
        return self._streaming

    def _tell_streams(self, event: str, *args: Any) -> None:
        if self._streaming is not None:
            getattr(self._streaming, event)(*args)

    def _in_chunks(self, batch: Mapping[str, Any]) -> bool:
        """Return True if the memory settings stream and the sequences are longer than a chunk; a collective call."""
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
        """Nats of the next tokens of endless sequences, and what the next call continues from.

        Memory is that of a chunk and of the keys and values that later tokens read, whatever the number of calls; branches
        over the whole sequence keep theirs. With gradients enabled this is truncated back-propagation through time:
        gradients end at the bounds of chunks.

        Args:
            tokens: (B, n) that follow those of earlier calls.
            labels: (B, n), -100 where none counts. None: the tokens themselves, each predicted by those before it; without
                gradients only.
            state: from the call before; None: nothing came before.
            chunk: tokens that are computed at a time.
            starts: (B, n) bool, where a document begins, before which nothing is seen; None: nowhere. The first token of a
                sequence always does.
            per_token: return (B, n) nats without gradients, and not their sum.

        Returns:
            (sum of nats, or (B, n); the new state). The old state stays as it was.

        Raises:
            ValueError: for shapes that do not fit, without labels where gradients are enabled, for a state of other
                `head_chunks`, and where ranks share sequences.
        """
        return self.streaming.stream(self, tokens, labels, state, chunk=chunk, starts=starts, per_token=per_token)

    def truncated_parts(self, batch: Any) -> list[range] | None:
        """The tokens of the batch computed last, in the parts at whose bounds gradients end, as positions in their document.

        None where gradients reach whole documents: for a batch that is none of streams, unless the memory settings truncate.
        Where ranks share chunks it is None as well, so that FLOPs of truncated training are counted too high there.
        """
        if not isinstance(batch, Mapping) or "tokens" not in batch:
            return None
        if "stream" not in batch and not self.transformer.memory.truncate:
            return None
        return self.streaming.truncated_parts(self, batch)

    def _longest(self, batch: Any) -> int:
        """As `DilatedModule`; of documents in streams, which grow, a power of two that the longest one has reached."""
        parts = self.truncated_parts(batch) if isinstance(batch, Mapping) and "stream" in batch else None
        return 1 << max(x.stop for x in parts).bit_length() - 1 if parts else super()._longest(batch)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """As `DilatedModule`; sequences that are computed chunk by chunk stay on the CPU, and each chunk is copied."""
        if isinstance(batch, Mapping) and {"tokens", "labels"} <= batch.keys():
            self.configure_model()
            if self.transformer.memory.stream is not None and self.streaming.stays_on_host(self, batch):
                return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """As `DilatedModule`; adds the states of training streams of all ranks, which therefore call it together."""
        super().on_save_checkpoint(checkpoint)
        self._tell_streams("save", self, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """As `DilatedModule`; restores the states of training streams, on any number of ranks."""
        super().on_load_checkpoint(checkpoint)
        if self._streaming is not None or checkpoint.get("streams"):
            self.streaming.load(checkpoint)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """As `DilatedModule`; what streams had before the batch is freed."""
        super().on_train_batch_end(outputs, batch, batch_idx)
        self._tell_streams("finish_batch")

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """As `DilatedModule`; states of streams follow the model to the host, as after a run, until they go on."""
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
        """The model of a torchscale LongNetDecoder (pre-norm, GELU, sub-layer norms or not, xPos or not).

        Sizes follow from the tensors. The model is in their dtype, and as a new model is in training mode.

        Args:
            source: a state dict, or a .pt file of one, alone or under "model".
            segment_lengths, dilation_rates: of the decoder's configuration; offsets are "blocked", as there.
            num_heads: of its configuration; with xPos it follows from the tensors.
            scale_embedding: whether its configuration has no_scale_embedding=False: the embedding is multiplied by
                sqrt(dim) when it is read, and is then not tied to the output projection.
            options: further arguments of the class; torchscale's xpos_scale_base is 512, too.

        Raises:
            FileNotFoundError, ValueError: for a file that cannot be read, missing tensors, parts that a LongNetLM does not
                have, or sizes that do not fit. A warning names unused tensors.
        """
        if options.get("recurrence") is not None:
            raise ValueError(
                "a torchscale decoder has no recurrence: leave it out. To add one to its weights, make a LongNetLM with it, "
                "whose gate_init is 0, and load this model's state dict into that with strict=False."
            )
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


LongNetLM.loss_terms.streams = True  # type: ignore[attr-defined]  # one that a user puts in its place has no such mark
LongNetLM.forward.decodes = True  # type: ignore[attr-defined]  # does the same for every token: it can be captured
#: the class's own method, to recognise one that a user has put in its place
_TOKEN_LOSSES = LongNetLM.token_losses
