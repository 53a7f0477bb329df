"""Sampling from a causal model, one token at a time, with a cache that makes each step equal to the full sequence.

TokenModel, what the models over tokens share, and LongNetLM: a causal language model with dilated attention.

Shape letters: B batch, N tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_dilated._validation import integer
from lightning_dilated.attention.functional import autocast
from lightning_dilated.attention.kv_cache import KVCache
from lightning_dilated.memory.chunked_loss import IGNORE, loss_tile, tiled_sum, token_nats
from lightning_dilated.memory.token_chunks import tiled
from lightning_dilated.models.blocks import BlockOptions, working
from lightning_dilated.models.longnet.torchscale import convert, read_state_dict
from lightning_dilated.models.module import DilatedModule, was_given
from lightning_dilated.models.transformer import USUAL, DilatedTransformer, init_weights, stored_bases
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.layers import plain_patterns
from lightning_dilated.sequence import SequenceSpec, sequence_sum

if TYPE_CHECKING:
    from lightning_dilated.models.transformer import DilatedTransformer


#: tokens of a prompt that are read at once
PROMPT_CHUNK = 1 << 16


class CausalModel(Protocol):
    """What `generate` needs: logits from tokens and caches, and the stack that makes the caches."""

    transformer: DilatedTransformer
    training: bool
    vocab_size: int

    def configure_model(self) -> None:
        """Make the layers, unless they are there."""

    def __call__(self, tokens: Tensor, *, caches: list[KVCache], last_only: bool) -> Tensor: ...


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise for sampling options that make no distribution."""
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be 0 (the likeliest token) or a positive number, got {temperature!r}.")
    if top_k is not None:
        integer(top_k, "top_k", 1)
    number = isinstance(top_p, (int, float)) and not isinstance(top_p, bool)
    if top_p is not None and not (number and 0 < top_p <= 1):
        raise ValueError(f"top_p must lie in (0, 1], got {top_p!r}.")


def check_prompt(tokens: Tensor, vocab_size: int) -> None:
    """Raise unless these are (B, N >= 1) integers from 0 to V - 1."""
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise ValueError(f"the prompt must be (B, N) with at least one token, got {tuple(tokens.shape)}.")
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise TypeError(f"the prompt must hold integer tokens, got {tokens.dtype}.")
    wrong = ((tokens < 0) | (tokens >= vocab_size)).nonzero()
    if len(wrong):
        row, at = wrong[0].tolist()
        raise ValueError(
            f"the prompt holds token {int(tokens[row, at])} at position {at} of row {row}, but vocab_size={vocab_size} "
            f"allows 0 to {vocab_size - 1}. Encode it with the tokenizer that the model was trained with."
        )


def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """(B,) tokens drawn from logits (B, V)."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float()
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # the largest is 0, so no temperature overflows
    if top_k is not None:
        floor = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if top_p is not None:
        values, order = logits.sort(descending=True)
        probability = values.softmax(-1)
        beyond = probability.cumsum(-1) - probability >= top_p  # the likeliest token always stays
        logits = logits.scatter(-1, order, values.masked_fill(beyond, -torch.inf))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def stop_tokens(stop: int | Sequence[int] | None, vocab_size: int) -> list[int]:
    """The tokens that end a continuation, as a list; an error for one that can never be drawn."""
    if stop is None:
        return []
    if isinstance(stop, (str, bytes)) or not isinstance(stop, (int, Sequence)):
        raise TypeError(f"stop must be a token, a list of tokens or None, got {stop!r}.")
    found = [integer(x, "stop", 0) for x in ([stop] if isinstance(stop, int) else stop)]
    if found and max(found) >= vocab_size:
        raise ValueError(f"stop must lie below vocab_size={vocab_size}, got {max(found)}: it would never be drawn.")
    return found


def generate_stream(
    model: CausalModel,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    stop: int | Sequence[int] | None = None,
    prompt_chunk: int = PROMPT_CHUNK,
) -> Iterator[Tensor]:
    """Draw what follows the prompt (B, N >= 1), and yield each step's (B,) tokens as soon as they are drawn.

    The model is in eval mode while it computes, not between tokens.

    Args:
        temperature, top_k, top_p: of the draws; 0 takes the likeliest token.
        generator: of the draws, on the prompt's device; torch's own if None.
        stop: token or tokens that end a row. A row that has ended repeats its last token; when all have, the stream ends.
        prompt_chunk: tokens of the prompt that are read at once, which bounds the memory that a long one takes.

    Raises:
        ValueError, TypeError: at the call, for an empty prompt, tokens that the model does not have, or options that make
            no distribution.
    """
    check_prompt(tokens, model.vocab_size)
    integer(max_new_tokens, "max_new_tokens", 0)
    integer(prompt_chunk, "prompt_chunk", 1)
    check_sampling(temperature, top_k, top_p)
    ends = torch.tensor(stop_tokens(stop, model.vocab_size), device=tokens.device, dtype=torch.int64)
    draw = lambda logits: sample(logits, temperature, top_k, top_p, generator)  # noqa: E731
    return _stream(model, tokens, max_new_tokens, draw, ends, prompt_chunk)


@torch.no_grad()
def _stream(
    model: CausalModel,
    tokens: Tensor,
    max_new_tokens: int,
    draw: Callable[[Tensor], Tensor],
    ends: Tensor,
    prompt_chunk: int,
) -> Iterator[Tensor]:
    with _evaluating(model):
        model.configure_model()
        caches = model.transformer.new_caches()
    ended, step = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device), tokens
    for _ in range(max_new_tokens):
        with _evaluating(model):
            for part in step.split(prompt_chunk, 1):
                logits = model(part, caches=caches, last_only=True)
            drawn = draw(logits[:, -1])
        drawn = torch.where(ended, step[:, -1], drawn)
        step = drawn[:, None]
        if len(ends):
            ended = ended | torch.isin(drawn, ends)
        yield drawn
        if len(ends) and bool(ended.all()):
            return


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """The model in eval mode; afterwards in the mode it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        if was_training:
            model.train()


def generate(model: CausalModel, tokens: Tensor, max_new_tokens: int, **options: Any) -> Tensor:
    """(B, N + new) tokens: the prompt (B, N >= 1) and what the model draws after it, `max_new_tokens` or up to a stop.

    Args and errors: those of `generate_stream`.
    """
    drawn = list(generate_stream(model, tokens, max_new_tokens, **options))
    return torch.cat([tokens, *(x[:, None] for x in drawn)], 1)


class TokenModel(DilatedModule):
    """Embedding, blocks and output projection of a model over tokens (bytes by default); base of LongNetLM and LongNetMLM.

    Args:
        pattern: a DilatedPattern, or a mapping with segment_lengths and dilation_rates, or with branches; or a list of them,
            one for each of layers 0, 1, ..., which repeats; or {"hybrid": options} of `DilatedPattern.hybrid`, whose depth
            and heads are the model's.
        vocab_size: V.
        dim, depth, num_heads, num_kv_heads, ffn_dim: sizes; ffn_dim None is 4 dim (GELU) or about 8/3 dim (SwiGLU).
        norm, ffn, bias, dropout, attention_dropout, sub_layernorm, position_encoding, xpos_scale_base, engine: see
            `models.blocks.BlockOptions`.
        rotary_base: a number; or "length": that of `max_seq_len`, max(1e4, 0.0424 N^1.628) rounded up to a power of ten (the
            bound of arXiv 2405.14591); or "none", no positions; or a list of those for layers 0, 1, ..., which repeats.
            None is "length" where `max_seq_len` is given, else 10,000, which serves 2,000 tokens.
        max_seq_len: the longest sequence that the model is made for; kept in checkpoints, with the bases that
            followed from it. It never follows the data; the command line sets it to theirs in a recipe that names neither.
        tie_embeddings: the output projection shares the embedding's weights.
        bytes_per_token: mean bytes a token stands for, 1 for bytes; bits per byte are loss / (ln 2 bytes_per_token).
        shift_layers: "odd" shifts the segments of layers 1, 3, ... by half their length, which removes the walls that
            nested segments leave (see `pattern.explain`); where w < `shift_below`, or in every finite branch if None.
        compile_blocks: compile every block, and on a GPU the loss of 1,024 words or more, by torch.compile when it is first
            run; generation stays uncompiled.
        residual_dtype: of the hidden states between blocks; "bfloat16" halves what recomputation keeps under mixed
            precision, where they are float32 else.
        kv_conv: taps of a short convolution on the keys and values of every layer (`attention.convolution`), 4 usually: a
            token then knows the tokens beside it before attention looks for it. None: none.
        optimizer, lr_scheduler: see `DilatedModule`.

    Raises:
        ValueError, TypeError: when made, naming the argument.
    """

    sequence_spec = SequenceSpec({"tokens": 1, "labels": 1}, whole=["index", "lengths", "cu_seqlens"])
    #: whether a token sees the past only
    causal = True
    #: arguments that a subclass settles, so that checkpoints do not name them
    _settled: tuple[str, ...] = ()

    def __init__(
        self,
        pattern: dict[str, Any] | DilatedPattern | list[dict[str, Any] | DilatedPattern],
        vocab_size: int = 256,
        dim: int = 256,
        depth: int = 4,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        ffn_dim: int | None = None,
        norm: Literal["rmsnorm", "layernorm"] = "rmsnorm",
        ffn: Literal["swiglu", "gelu"] = "swiglu",
        bias: bool = False,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        sub_layernorm: bool = False,
        position_encoding: Literal["none", "rotary", "xpos"] = "rotary",
        rotary_base: float | str | list[float | str] | None = None,
        xpos_scale_base: float = 512.0,
        engine: str = "auto",
        tie_embeddings: bool = True,
        bytes_per_token: float = 1.0,
        compile_blocks: bool = False,
        shift_layers: Literal["none", "odd"] = "none",
        shift_below: int | None = None,
        residual_dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        max_seq_len: int | None = None,
        kv_conv: int | None = None,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        self.vocab_size, self.dim = integer(vocab_size, "vocab_size", 1), integer(dim, "dim", 1)
        self._choose_layers(
            pattern,
            depth,
            num_heads,
            num_kv_heads,
            shift_layers,
            shift_below,
            rotary_base,
            max_seq_len,
            position_encoding,
        )
        # plain values only, so that checkpoints load anywhere; without what a subclass settles by itself
        self.save_hyperparameters(ignore=["pattern", "optimizer", "lr_scheduler", "compile_blocks", *self._settled])
        if was_given(self, "pattern"):
            self.save_hyperparameters({"pattern": plain_patterns(self.pattern)})
        if position_encoding != "none" and "rotary_base" in self.hparams:
            # in numbers, so that no other length changes what was trained
            self.save_hyperparameters({"rotary_base": stored_bases(self.rotary_bases)})
        if dim % num_heads:
            raise ValueError(f"num_heads={num_heads} must divide dim={dim}.")
        if not bytes_per_token > 0:
            raise ValueError(f"bytes_per_token must be positive, got {bytes_per_token!r}.")
        self.ffn_dim, self.tie_embeddings, self.bytes_per_token = ffn_dim, tie_embeddings, bytes_per_token
        self.compile_blocks = compile_blocks
        self.options = BlockOptions(
            norm, ffn, bias, dropout, attention_dropout, sub_layernorm,
            position_encoding, xpos_scale_base=xpos_scale_base, engine=engine, residual_dtype=residual_dtype,
            kv_conv=kv_conv,
        )  # fmt: skip
        with torch.device("meta"):  # one layer without memory, so that a wrong size or option is an error here
            self._transformer(depth=1)

    def setup(self, stage: str) -> None:
        """See that every token of the data has an embedding."""
        tokens = getattr(getattr(self._trainer, "datamodule", None), "vocab_size", self.vocab_size)
        if tokens > self.vocab_size:
            raise ValueError(
                f"vocab_size={self.vocab_size} is below the data's {tokens} tokens. Set the model's vocab_size to {tokens}."
            )

    @property
    def embedded_tokens(self) -> int:
        """Rows of the embedding."""
        return self.vocab_size

    def _transformer(self, depth: int) -> DilatedTransformer:
        return DilatedTransformer(
            self.dim, self.patterns[:depth], self.num_heads,
            causal=self.causal, hidden=self.ffn_dim, num_kv_heads=self.num_kv_heads, options=self.options,
            rotary_bases=self.rotary_bases[:depth],
        )  # fmt: skip

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

    def _hidden(self, tokens: Tensor, **options: Any) -> Tensor:
        """(B, N, E) of tokens (B, N), before the last norm."""
        x = self.transformer.residual(self.dropout(self.embedding(tokens)))
        return self.transformer(x, normed=False, **options)

    def _logits(self, x: Tensor) -> Tensor:
        """(..., V) of hidden states (..., E)."""
        return self.head(self.transformer.norm(working(x, self.head.weight)))

    def _nats(self, x: Tensor, labels: Tensor) -> Tensor:
        """(B, N) nats of the labels of hidden states (B, N, E), at least fp32, 0 where the label is -100."""
        logits = self._logits(x).flatten(0, 1)
        return token_nats(logits, labels.flatten(), self.compile_blocks).view(labels.shape)

    def _losses(self, x: Tensor, labels: Tensor, summed: bool = False) -> Tensor:
        """`_nats`, or their sum, in tiles where the memory settings have them: the logits of all tokens never exist then."""
        within = (self.transformer.norm, self.head), loss_tile(self.transformer.memory.tile, self.vocab_size), x, labels
        # of the sum, gradients are made as the logits are there; in fp16 they are too small before a loss scale is on them
        if summed and torch.float16 not in (x.dtype, autocast(working(x[:, :0], self.head.weight))[0].dtype):
            return tiled_sum(self._nats, *within)
        losses = tiled(self._nats, *within)
        return losses.sum() if summed else losses


class LongNetLM(TokenModel):
    """Causal language model over tokens (bytes by default).

    Batches are mappings with `tokens` (B, N) and `labels` (B, N), the next token of each position, -100 where there is
    none; optionally `lengths` (B,) and `cu_seqlens` as in `dilated_attention`. Arguments: see `TokenModel`.
    """

    #: called with a batch and its losses (B, L) before they are summed, while a callback watches
    watch_losses: Callable[[Mapping[str, Any], Tensor], None] | None = None
    #: called with a batch and the likeliest token at each label (B, L), -100 elsewhere, while a callback watches
    watch_predictions: Callable[[Mapping[str, Any], Tensor], None] | None = None

    def setup(self, stage: str) -> None:
        """As `TokenModel`; and see that bits per byte are not those of a token. 512 leaves room for special tokens."""
        super().setup(stage)
        tokens = getattr(getattr(self._trainer, "datamodule", None), "vocab_size", self.vocab_size)
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
        caches: list[KVCache] | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Logits (B, N, V) from tokens (B, N), or with `last_only` the last token's (B, 1, V).

        `caches` holds the tokens before these: `model.transformer.new_caches()`, or what earlier calls left in them.
        """
        self.configure_model()
        x = self._hidden(tokens, positions=positions, lengths=lengths, cu_seqlens=cu_seqlens, caches=caches)
        return self._logits(x[:, -1:] if last_only else x)

    def token_losses(self, batch: Mapping[str, Any]) -> Tensor:
        """(B, N) nats of each label, at least fp32, 0 where the label is -100."""
        return self._losses(*self._states(batch))

    def _states(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """(hidden states before the last norm (B, N, E), labels)."""
        tokens, labels = batch["tokens"], batch["labels"]
        if tokens.shape != labels.shape or tokens.ndim != 2:
            raise ValueError(
                f"tokens and labels must both be (B, N), got {tuple(tokens.shape)} and {tuple(labels.shape)}; "
                "labels are the next token of each position, already shifted."
            )
        self.configure_model()
        return self._hidden(tokens, lengths=batch.get("lengths"), cu_seqlens=batch.get("cu_seqlens")), labels

    def loss_terms(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """(sum of nats, number of labels that count)."""
        own = type(self).token_losses is _TOKEN_LOSSES and "token_losses" not in vars(self)
        states = self._states(batch) if own or self.watch_predictions is not None else None
        if states is not None and self.watch_predictions is not None:
            self.watch_predictions(batch, self._predictions(*states))
        if states is not None and own and self.watch_losses is None:
            return self._losses(*states, summed=True), (batch["labels"] != IGNORE).sum()
        losses = self._losses(*states) if states is not None and own else self.token_losses(batch)
        if self.watch_losses is not None:
            self.watch_losses(batch, losses)
        return losses.sum(), (batch["labels"] != IGNORE).sum()

    @torch.no_grad()
    def _predictions(self, x: Tensor, labels: Tensor) -> Tensor:
        """(B, N) the likeliest token at each label by hidden states (B, N, E), -100 elsewhere, where no logits are made."""
        counted = labels != IGNORE
        within = (self.transformer.norm, self.head), loss_tile(self.transformer.memory.tile, self.vocab_size)
        likeliest = tiled(lambda at: self._logits(at).argmax(-1), *within, x[counted][None])
        return torch.full_like(labels, IGNORE).masked_scatter_(counted, likeliest[0])

    def derived_metrics(self, loss: Tensor) -> dict[str, Tensor]:
        """Bits per byte and perplexity (of a token). A base of a genome is one byte, so there they are bits per base."""
        return {"bits_per_byte": loss / (math.log(2) * self.bytes_per_token), "perplexity": loss.exp()}

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int) -> dict[str, Tensor]:
        """Bits per byte of each sequence (B,), NaN without labels, beside its `index` where the batch has one."""
        losses, counted = self.token_losses(batch).sum(1), (batch["labels"] != IGNORE).sum(1)
        losses, counted = sequence_sum(losses), sequence_sum(counted)
        bits = losses / counted / (math.log(2) * self.bytes_per_token)
        index = {"index": batch["index"]} if "index" in batch else {}
        return {**index, "tokens": counted, "bits_per_byte": bits}

    def generate(self, tokens: Tensor, max_new_tokens: int, **options: Any) -> Tensor:
        """Tokens (B, N + new): the prompt (B, N >= 1) and its continuation, by `max_new_tokens` or up to a stop token.

        Args:
            options: temperature, top_k, top_p, generator, stop, prompt_chunk; see `models.generation.generate_stream`.
        """
        return generate(self, tokens, max_new_tokens, **options)

    def generate_stream(self, tokens: Tensor, max_new_tokens: int, **options: Any) -> Iterator[Tensor]:
        """The continuation as it is drawn: (B,) tokens a step; the same tokens and options as `generate`."""
        return generate_stream(self, tokens, max_new_tokens, **options)

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
            num_heads: of its configuration; with xPos the tensors tell it.
            scale_embedding: its configuration has no_scale_embedding=False: the embedding is multiplied by sqrt(dim), once
                and for all, and is then not tied to the output projection.
            options: further arguments of the class; xpos_scale_base is 512 there too.

        Raises:
            FileNotFoundError, ValueError: for a file that cannot be read, missing tensors, parts that a LongNetLM does not
                have, or sizes that do not fit. Tensors that nothing uses are named in a warning.
        """
        where = "the state dict" if isinstance(source, Mapping) else source
        sizes, state = convert(read_state_dict(source), num_heads, scale_embedding, options.get("depth"), where)
        pattern = DilatedPattern.longnet(segment_lengths, dilation_rates, offsets="blocked")
        usual = {"norm": "layernorm", "ffn": "gelu", "bias": True, "rotary_base": USUAL}
        model = cls(pattern, **{**usual, **sizes, **options})
        model.to(state["embedding.weight"].dtype)
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            raise ValueError(f"the tensors do not fit each other. {error}") from None
        return model


#: that of the class, by which one that someone put in its place is known
_TOKEN_LOSSES = LongNetLM.token_losses
