"""LongNetMLM, a bidirectional masked language model with dilated attention, and its masks.

A mask is a hash of sample number and global position. It does not depend on ranks, workers, devices or the order of
calls, so every rank can compute its own part.

Shape letters: B batch, L tokens of this rank, V vocabulary, N tokens (this rank's if shared), M masked tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_dilated._device import send
from lightning_dilated._extensions import hook
from lightning_dilated._validation import integer, one_of, real
from lightning_dilated.attention.dropout import START, fold
from lightning_dilated.attention.rotary import token_positions
from lightning_dilated.memory.chunked_loss import IGNORE, loss_tile, token_nats
from lightning_dilated.memory.token_chunks import tiled
from lightning_dilated.models.documents import Documents, check_form, sample_documents
from lightning_dilated.models.longnet.lm import Strands, TokenModel
from lightning_dilated.models.metrics import TokenMean
from lightning_dilated.models.module import STAGES
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.sequence import sequence_sum

_HASHES = 2**32
#: keys of the hashes: starts of spans, choice of spans, their treatment, random tokens
_BEGIN, _CHOOSE, _TREAT, _REPLACE = range(4)


def sample_numbers(index: object) -> Tensor:
    """Return a batch's `index`, the samples' numbers, as a tensor. Raises TypeError if they are not integers."""
    numbers = torch.as_tensor(index)
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise TypeError(
            f"index must hold integers, each sample's number, got {numbers.dtype}: samples with equal rounded numbers would "
            "share a mask. Let the dataset return an int."
        )
    return numbers


@dataclass(frozen=True)
class Masking:
    """BERT's masking (arXiv 1810.04805, section 3.1) of whole spans, as in SpanBERT (arXiv 1907.10529).

    The sequence is divided into spans of geometric length, `span` tokens on average; each is chosen as a whole with
    probability `fraction`. A chosen span is left unchanged with probability `keep`, gets random tokens with probability
    `random`, and `mask_token` otherwise. With span 1 every token is a span.

    Args:
        fraction: in (0, 1).
        span: tokens, at least 1. Chosen spans may be adjacent, so masked runs have span / (1 - fraction) on average.
        keep, random: at least 0; their sum is at most 1.
        mask_token: id of the token that replaces masked tokens.
        vocab_size: V; random tokens are drawn from all tokens except `never`.
        never: tokens that are never chosen, such as a genome's N.
        seed: seed of the hash.

    Raises:
        ValueError: for an invalid value; the message names the model's argument.
    """

    fraction: float
    span: float
    keep: float
    random: float
    mask_token: int
    vocab_size: int
    never: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        real(self.fraction, "mask_fraction", above=0, below=1)
        real(self.keep, "keep_fraction", least=0, most=1)
        real(self.random, "random_fraction", least=0, most=1)
        if self.keep + self.random > 1:
            raise ValueError(
                f"keep_fraction={self.keep} and random_fraction={self.random} add up to more than 1: they are shares of "
                "the masked tokens."
            )
        real(self.span, "mask_span", least=1, hint=" It is a number of tokens.")
        if len(self.drawn) == 0:
            raise ValueError(f"ignore_tokens={list(self.never)} leaves none of the {self.vocab_size} tokens to mask.")

    @property
    def drawn(self) -> list[int]:
        """The tokens that random tokens are drawn from."""
        return [x for x in range(self.vocab_size) if x not in self.never]

    @property
    def block(self) -> int:
        """Positions per block. Each block starts a new span, so ranks search less than a block for a span's start."""
        return 1 << max(10, math.ceil(math.log2(1024 * self.span)))

    def apply(
        self,
        tokens: Tensor,
        stream: tuple[int, int],
        index: Tensor,
        positions: Tensor,
        lengths: Tensor | None = None,
        documents: Documents | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the model's input (B, L) int64, and a mask (B, L) bool of the tokens to predict.

        Args:
            tokens: (B, L) int64.
            stream: two numbers that distinguish uses of one sample, such as (1, training step).
            index: (B,) integers, the samples' numbers.
            positions: (L,) int64, global; on the CPU, because finding their blocks would wait for a GPU.
            lengths: (B,) number of tokens of each sample; later tokens are padding and never chosen.
            documents: D samples packed into one row; then `index` is (D,), and `positions` count in each sample.
        """
        device = tokens.device
        index = send(index.to(torch.int64), device)
        row = fold(torch.full((), START, dtype=torch.int64, device=device), self.seed, *stream, index[:, None])
        begin = self._span_starts(row, positions, documents)
        if documents is not None:
            row = row[send(documents.number, device), 0][None]  # (1, L)
        positions = send(positions, device)
        chosen = fold(row, _CHOOSE, begin) < round(self.fraction * _HASHES)
        for token in self.never:
            chosen = chosen & (tokens != token)
        if lengths is not None:
            chosen = chosen & (positions < send(torch.as_tensor(lengths), device)[:, None])
        treat = fold(row, _TREAT, begin)
        unchanged = treat < round(self.keep * _HASHES)
        random = ~unchanged & (treat < round((self.keep + self.random) * _HASHES))
        drawn = send(torch.tensor(self.drawn), device)
        random_tokens = drawn[(fold(row, _REPLACE, positions) * len(drawn)) >> 32]
        replaced = torch.where(random, random_tokens, torch.full_like(tokens, self.mask_token))
        return torch.where(chosen & ~unchanged, replaced, tokens), chosen

    def _span_starts(self, row: Tensor, positions: Tensor, documents: Documents | None = None) -> Tensor:
        """Return the first position (B, L) of each token's span, from hashes of rows (B, 1) or of documents (D, 1)."""
        if self.span == 1:
            return send(positions, row.device).expand(len(row) if documents is None else 1, -1)
        if documents is not None:
            return self._packed_starts(row, positions, documents)
        unique = torch.unique(positions // self.block, return_inverse=True)
        blocks, which, within = (send(x, row.device) for x in (*unique, positions % self.block))
        offset = torch.arange(self.block, device=row.device)
        at = blocks[:, None] * self.block + offset
        begins = (fold(row[:, :, None], _BEGIN, at) < round(_HASHES / self.span)) | (offset == 0)
        return torch.where(begins, at, -1).cummax(-1).values[:, which, within]

    def _packed_starts(self, row: Tensor, positions: Tensor, documents: Documents) -> Tensor:
        places = torch.stack([documents.number, positions // self.block])
        unique, which = torch.unique(places, dim=1, return_inverse=True)
        number, blocks, which, within = (send(x, row.device) for x in (*unique, which, positions % self.block))
        offset = torch.arange(self.block, device=row.device)
        at = blocks[:, None] * self.block + offset
        begins = (fold(row[number], _BEGIN, at) < round(_HASHES / self.span)) | (offset == 0)
        return torch.where(begins, at, -1).cummax(-1).values[which, within][None]


class LongNetMLM(TokenModel):
    """Predicts masked tokens (bytes by default, or a genome's) from the tokens on both sides.

    Batches are mappings with `tokens` (B, N) and `index` (B,), each sample's number; optionally `lengths` (B,) and
    `cu_seqlens`, see `dilated_attention`. With `index` (D,) each of the D documents is a sample. `labels` are not used.
    Masks are a hash of `mask_seed`, the sample's number, the token's position in the sample and, in training, the
    optimizer step. They are the same on any number of ranks and workers, new in every step, and fixed in validation and
    test. In `predict` they are a hash of `mask_seed` and the position only, see `predict_step`.

    Args:
        pattern, vocab_size: see `TokenModel`.
        mask_token: the token that replaces masked tokens, one of the V tokens; None embeds an additional token.
        mask_fraction: share of the tokens that are masked and counted by the loss.
        mask_span: mean length, in tokens, of the spans that are masked together; see `Masking`.
        keep_fraction: share of the masked tokens that the model sees unchanged.
        random_fraction: share of the masked tokens that the model sees as a random token.
        ignore_tokens: tokens that are never masked, such as a genome's N; `mask_token` is never masked either.
        mask_seed: seed of the masks.
        strands: "both", for genomes: average the logits with the reverse complement's logits, mapped back to positions
            and bases of the sequence. The logits of a reverse complement then equal the mapped logits of the sequence,
            bit by bit if the same kernels compute both. This doubles the work, and ranks cannot share a sequence.
        options: other arguments of `TokenModel`, except `bytes_per_token`.

    Bits per token, and in validation and test the accuracy over all masked tokens, are logged with the mean loss.

    Raises: ValueError or TypeError for an invalid argument; the message names it.
    """

    causal = False

    def __init__(
        self,
        pattern: dict[str, Any] | DilatedPattern | list[dict[str, Any] | DilatedPattern],
        vocab_size: int = 256,
        mask_token: int | None = None,
        mask_fraction: float = 0.15,
        mask_span: float = 1,
        keep_fraction: float = 0.1,
        random_fraction: float = 0.1,
        ignore_tokens: list[int] | None = None,
        mask_seed: int = 0,
        strands: Literal["forward", "both"] = "forward",
        **options: Any,
    ) -> None:
        super().__init__(pattern, vocab_size, bytes_per_token=1.0, **options)
        if self.options.position_encoding == "xpos":
            raise ValueError("position_encoding='xpos' works for causal attention only; use rotary or none.")
        for name, token in (("mask_token", mask_token), *(("ignore_tokens", x) for x in ignore_tokens or ())):
            if token is not None and integer(token, name, 0) >= vocab_size:
                raise ValueError(
                    f"{name}: {token} is not one of the vocab_size={vocab_size} tokens, 0 to {vocab_size - 1}."
                )
        self.mask_token = vocab_size if mask_token is None else mask_token
        never = sorted({*(ignore_tokens or ()), *(() if mask_token is None else (mask_token,))})
        self.masking = Masking(
            mask_fraction, mask_span, keep_fraction, random_fraction, self.mask_token, vocab_size, tuple(never),
            integer(mask_seed, "mask_seed", 0),
        )  # fmt: skip
        one_of(strands, "strands", ("forward", "both"))
        self.strands = strands
        self._other_strand = hook("other strand")(vocab_size) if strands == "both" else None
        right = nn.ModuleDict({stage: TokenMean() for stage in STAGES[1:]})
        self.accuracy: Mapping[str, TokenMean] = right  # type: ignore[assignment]  # as `mean_loss`

    @property
    def embedded_tokens(self) -> int:
        """Number of rows of the embedding: V, or V + 1 if the mask token is not one of the V tokens."""
        return max(self.vocab_size, self.mask_token + 1)

    def forward(
        self,
        tokens: Tensor,
        *,
        at: Tensor | None = None,
        positions: Tensor | None = None,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Return logits (B, N, V) from tokens (B, N), with `self.mask_token` in place of the tokens to predict.

        With `at` (B, N) bool, return only the logits (M, V) of the M tokens at which it is True.
        """
        self.configure_model()
        x = self._read(tokens, positions=positions, lengths=lengths, cu_seqlens=cu_seqlens)
        return self._logits(x if at is None else x[at])

    def _read(self, tokens: Tensor, **options: Any) -> Tensor:
        """Return hidden states (B, N, E) before the last norm; with both strands (B, N, 2 E), the other strand last."""
        x = self._hidden(tokens, **options)
        if self._other_strand is None:
            return x
        other_tokens, places = self._other_strand.read(tokens, options)
        other = self._hidden(other_tokens, **options)
        return torch.cat([x, other.gather(1, places[:, :, None].expand_as(other))], -1)

    def _last_states(self, tokens: Tensor, **options: Any) -> Tensor:
        """Return normed states (B, N, E); with both strands, the mean of their states."""
        parts = [self.final_norm(x) for x in self._read(tokens, **options).split(self.dim, -1)]
        return parts[0] if len(parts) == 1 else (parts[0] + parts[1]) / 2

    def _logits(self, x: Tensor) -> Tensor:
        # leave out the additional row of a mask token
        weight = self.head.weight[: self.vocab_size]
        logits = [nn.functional.linear(self.final_norm(part), weight) for part in x.split(self.dim, -1)]
        if self._other_strand is None:
            return logits[0]
        return (logits[0] + logits[1][..., self._other_strand.complements]) / 2

    def score(
        self,
        sequences: Any,
        *,
        strands: Strands = "forward",
        passes: int | None = None,
        ignore_tokens: Sequence[int] | None = None,
        batch_size: int = 8,
    ) -> NamedTuple:
        """Return the pseudo-log-likelihood of each of B sequences, in nats (arXiv 1910.14659).

        It is the sum over tokens of the log-probability of a token given all others. Each token is masked alone, in its
        own pass of the model. Nothing is random.

        Args:
            sequences, strands, batch_size: see `LongNetLM.score`.
            passes: K (None: N); pass j masks tokens j, j + K, ... together: K / N of the work, but less context.
            ignore_tokens: tokens that are not scored; None: tokens that are never masked, and a genome's base N.

        Raises:
            TypeError, ValueError: as in `LongNetLM.score`.
        """
        if passes is not None:
            integer(passes, "passes", 1)
        return hook("score sequences")(self, sequences, strands, passes, ignore_tokens, batch_size)

    def masked(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the input (B, N) int64 and a mask (B, N) of tokens to predict, for this rank's part of a batch.

        In training mode the masks depend on the Trainer's step (0 without a Trainer); otherwise they are fixed.

        Raises:
            ValueError: for tokens that are not (B, N), or a missing `index` (B,).
            TypeError: for an `index` that does not hold integers.
        """
        check_form(self, batch, tokens=("(B, N)", "tokens"))
        tokens, index = batch["tokens"], batch.get("index")
        documents = None if index is None else sample_documents(batch, tokens.shape[1])
        if index is None or (documents is None and torch.as_tensor(index).shape != tokens.shape[:1]):
            shape = "none" if index is None else tuple(torch.as_tensor(index).shape)
            raise ValueError(
                f"a batch needs index (B,), each sample's number, for masks that do not depend on ranks; got {shape}. Let "
                'the dataset return {"tokens": ..., "index": index}.'
            )
        index = sample_numbers(index)
        positions = token_positions(0, tokens.shape[1]) if documents is None else documents.position
        stream = (1, self._optimizer_step()) if self.training else (0, 0)
        return self.masking.apply(tokens, stream, index, positions, batch.get("lengths"), documents)

    def masked_terms(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Return three tensors (M,): nats (at least fp32), whether the likeliest token is right, and the sample's row."""
        x, chosen = self._states(batch)
        x = x[chosen]
        tile, labels = loss_tile(self.transformer.memory.tile, self.vocab_size), batch["tokens"][chosen]
        terms = tiled(self._terms, (self.transformer.norm, self.head), tile, x[None], labels[None])[0]
        sample, at = chosen.nonzero().T
        documents = sample_documents(batch, chosen.shape[1])
        if documents is not None:
            sample = send(documents.number, at.device)[at]
        return terms[:, 0], terms[:, 1].detach() > 0, sample

    def _terms(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return (1, M, 2): nats, and 1 if the likeliest token is right, else 0, from states (1, M, E) and labels."""
        logits, labels = self._logits(x[0]), labels[0]
        losses = token_nats(logits, labels, self.compile_blocks)
        return torch.stack([losses, (logits.detach().argmax(-1) == labels).to(losses)], -1)[None]

    def loss_terms(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the sum of nats over the masked tokens, and the number of masked tokens."""
        if type(self).masked_terms is not _MASKED_TERMS or "masked_terms" in vars(self):
            losses, right, _ = self.masked_terms(batch)
            return losses.sum(), torch.full((), len(right), device=losses.device)
        x, chosen = self._states(batch)
        labels = batch["tokens"].masked_fill(~chosen, IGNORE)
        if self.vocab_size > self.dim:  # for a smaller V, all logits cost less than waiting for the number of masks
            x, labels = x[chosen][None], labels[chosen][None]
        return self._losses(x, labels, summed=True), chosen.sum()

    def _states(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return hidden states before the last norm (B, N, E), and a mask (B, N) of the tokens to predict."""
        self.configure_model()
        inputs, chosen = self.masked(batch)
        return self._read(inputs, lengths=batch.get("lengths"), cu_seqlens=batch.get("cu_seqlens")), chosen

    def planning_copy(self, depth: int) -> LongNetMLM:
        """Copy as DilatedModule does; the loss is over all tokens, because fake tensors have no values for masks."""
        model = super().planning_copy(depth)

        def loss_terms(batch: Mapping[str, Any]) -> tuple[Tensor, Any]:
            return model._losses(model._read(batch["tokens"]), batch["labels"], summed=True), batch["labels"].numel()

        model.loss_terms = loss_terms  # type: ignore[method-assign]
        return model

    def derived_metrics(self, loss: Tensor) -> dict[str, Tensor]:
        """Return bits per masked token, from a scalar loss."""
        return {"bits_per_token": loss / math.log(2)}

    def _evaluate(self, stage: str, batch: Any) -> None:
        losses, right, _ = self.masked_terms(batch)
        self.mean_loss[stage].update(losses.sum(), len(right))
        self.accuracy[stage].update(right.sum(), len(right))

    def _report(self, stage: str) -> None:
        super()._report(stage)
        self._log_of_all(f"{stage}_accuracy", self.accuracy[stage].compute(), prog_bar=stage == "val")
        self.accuracy[stage].reset()

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """Return `masked` (number of masked tokens), `bits_per_token` and `accuracy` of each sample, each (B,).

        `bits_per_token` and `accuracy` are NaN without masked tokens. Entries of the batch such as `index` are also
        returned. With `predict_embeddings` the prediction is `embedding` instead.

        Every sample is masked at the same positions, so a sequence has the same values in any row and batch and on any
        number of ranks, and sequences that differ in a few tokens can be compared. For a likelihood of a sequence or a
        score of a variant, see `score` and `score_alleles`.
        """
        if self.predict_embeddings:
            return self._predicted(batch, {"embedding": self._sample_embeddings(batch)})
        check_form(self, batch, tokens=("(B, N)", "tokens"))
        # index 0 for all samples, because different numbers would give equal sequences different masks
        same_masks = {**batch, "index": torch.zeros_like(sample_numbers(batch["index"]))} if "index" in batch else batch
        losses, right, sample = self.masked_terms(same_masks)
        terms = torch.stack([losses.double(), right.double(), torch.ones_like(losses, dtype=torch.float64)])
        sums = terms.new_zeros(3, len(batch.get("index", batch["tokens"]))).index_add(1, sample, terms)
        total, correct, counted = sequence_sum(sums)
        bits = total / counted / math.log(2)
        values = {"masked": counted.long(), "bits_per_token": bits, "accuracy": correct / counted}
        return self._predicted(batch, values)


#: the method of this class, to detect that a user has replaced it
_MASKED_TERMS = LongNetMLM.masked_terms
