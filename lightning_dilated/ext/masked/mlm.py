"""LongNetMLM, a bidirectional masked language model with dilated attention, and its masks.

A mask is a hash of sample and global position. It does not depend on ranks, workers, devices or the order of calls, so every
rank can compute its own part.

Shape letters: B batch, L tokens of this rank, V vocabulary, N tokens (a rank's own, on many ranks), M masked tokens.
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
    """A batch's `index`, the samples' numbers, as a tensor. Raises TypeError unless they are integers."""
    numbers = torch.as_tensor(index)
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise TypeError(
            f"index must hold integers, each sample's number, got {numbers.dtype}: numbers that round to the same one would "
            "share a mask. Let the dataset return an int."
        )
    return numbers


@dataclass(frozen=True)
class Masking:
    """BERT's masking (arXiv 1810.04805, section 3.1), of whole spans as in SpanBERT (arXiv 1907.10529).

    The sequence is divided into spans of geometric length, `span` tokens on average; each is chosen as a whole with
    probability `fraction`. A chosen span stays as it is with probability `keep`, gets random tokens with probability
    `random`, and `mask_token` otherwise. With span 1 every token is a span.

    Args:
        fraction: in (0, 1).
        span: tokens, at least 1; masked runs are span / (1 - fraction) long on average, as chosen spans may be adjacent.
        keep, random: at least 0, at most 1 together.
        mask_token: its id.
        vocab_size: V; random tokens are drawn from these except `never`.
        never: tokens that are never chosen, such as a genome's N.
        seed: of the hash.

    Raises:
        ValueError: naming the model's argument.
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
        for name, x in (
            ("mask_fraction", self.fraction),
            ("keep_fraction", self.keep),
            ("random_fraction", self.random),
        ):
            real(x, name, least=0, most=1)
        real(self.fraction, "mask_fraction", above=0, below=1)
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
        """The tokens that random ones are drawn from."""
        return [x for x in range(self.vocab_size) if x not in self.never]

    @property
    def block(self) -> int:
        """Every multiple of so many positions starts a span, so that a rank need not look further back for a start."""
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
        """(the model's input, the tokens that it has to predict): (B, L) int64 and (B, L) bool.

        Args:
            tokens: (B, L) int64.
            stream: two numbers that distinguish uses of one sample, such as (1, training step).
            index: (B,) integers, the samples' numbers.
            positions: (L,) int64, global; on the CPU, or finding their blocks waits for the device.
            lengths: (B,) tokens of each sample; tokens beyond are padding and never chosen.
            documents: of D samples packed into one row: `index` is (D,), and `positions` are those in each sample.
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
        kept = treat < round(self.keep * _HASHES)
        random = ~kept & (treat < round((self.keep + self.random) * _HASHES))
        drawn = send(torch.tensor(self.drawn), device)
        other = drawn[(fold(row, _REPLACE, positions) * len(drawn)) >> 32]
        seen = torch.where(random, other, torch.full_like(tokens, self.mask_token))
        return torch.where(chosen & ~kept, seen, tokens), chosen

    def _span_starts(self, row: Tensor, positions: Tensor, documents: Documents | None = None) -> Tensor:
        """(B, L): the first position of each token's span; of rows (B, 1), or of D documents (D, 1) in one row."""
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
        """`_span_starts` of documents."""
        places = torch.stack([documents.number, positions // self.block])
        unique, which = torch.unique(places, dim=1, return_inverse=True)
        number, blocks, which, within = (send(x, row.device) for x in (*unique, which, positions % self.block))
        offset = torch.arange(self.block, device=row.device)
        at = blocks[:, None] * self.block + offset
        begins = (fold(row[number], _BEGIN, at) < round(_HASHES / self.span)) | (offset == 0)
        return torch.where(begins, at, -1).cummax(-1).values[which, within][None]


class LongNetMLM(TokenModel):
    """Predicts masked tokens (bytes by default, or a genome's) from both sides.

    Batches are mappings with `tokens` (B, N) and `index` (B,), each sample's number; optionally `lengths` (B,) and
    `cu_seqlens` as in `dilated_attention`, of documents that `index` (D,) may number as samples; `labels` are not used. The
    masks are a hash of `mask_seed`, the sample's number, the token's position in the sample and, in training, the optimizer
    step: the same on any number of ranks and workers, new in every step, and fixed in validation and test. In predict they
    are a hash of `mask_seed` and the position alone, see `predict_step`.

    Args:
        pattern, vocab_size: as of `TokenModel`.
        mask_token: stands for a masked token: one of the V tokens; None embeds one more.
        mask_fraction: share of the tokens that are masked and that the loss counts.
        mask_span: mean length, in tokens, of the spans that are masked together; see `Masking`.
        keep_fraction: share of the masked tokens that the model sees unchanged.
        random_fraction: share of the masked tokens that the model sees as a random token.
        ignore_tokens: tokens that are never masked, such as a genome's N; `mask_token` never is.
        mask_seed: of the masks.
        strands: "both", for genomes: logits are the mean of those of the sequence and of its reverse complement, read
            backwards and for the complementary bases. The logits of a reverse complement are then those of the sequence,
            backwards and for the complementary bases, to the last bit where both are computed alike. Twice the work. Not
            where ranks share a sequence.
        options: others of `TokenModel`, but for `bytes_per_token`.

    Logged with the mean loss: bits per token, and in validation and test the accuracy over all masked tokens.

    Raises:
        ValueError, TypeError: naming the argument.
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
            raise ValueError("position_encoding='xpos' decays to the past and grows to the future; use rotary or none.")
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
        """Rows of the embedding: V, and one more for a mask token outside of them."""
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
        """Logits (B, N, V) from tokens (B, N), in which `self.mask_token` stands for the tokens to predict.

        With `at`, (B, N) bool, only those of the M tokens where it is true: (M, V).
        """
        self.configure_model()
        x = self._read(tokens, positions=positions, lengths=lengths, cu_seqlens=cu_seqlens)
        return self._logits(x if at is None else x[at])

    def _read(self, tokens: Tensor, **options: Any) -> Tensor:
        """(B, N, E) hidden states before the last norm; with both strands (B, N, 2 E), the other's behind this one's."""
        x = self._hidden(tokens, **options)
        if self._other_strand is None:
            return x
        other_tokens, places = self._other_strand.read(tokens, options)
        other = self._hidden(other_tokens, **options)
        return torch.cat([x, other.gather(1, places[:, :, None].expand_as(other))], -1)

    def _last_states(self, tokens: Tensor, **options: Any) -> Tensor:
        """(B, N, E), normed; with both strands their mean."""
        parts = [self.final_norm(x) for x in self._read(tokens, **options).split(self.dim, -1)]
        return parts[0] if len(parts) == 1 else (parts[0] + parts[1]) / 2

    def _logits(self, x: Tensor) -> Tensor:
        # the embedding may have one more row, the mask token's
        weight = self.head.weight[: self.vocab_size]
        this, *others = (nn.functional.linear(self.final_norm(part), weight) for part in x.split(self.dim, -1))
        if self._other_strand is None:
            return this
        return (this + others[0][..., self._other_strand.complements]) / 2

    def score(
        self,
        sequences: Any,
        *,
        strands: Strands = "forward",
        passes: int | None = None,
        ignore_tokens: Sequence[int] | None = None,
        batch_size: int = 8,
    ) -> NamedTuple:
        """The pseudo-log-likelihood of each of B sequences, in nats (arXiv 1910.14659): of every token by all the others.

        Each token is masked by itself, in as many passes of the model as the sequence has tokens. Nothing is drawn.

        Args:
            sequences, strands, batch_size: as of `LongNetLM.score`.
            passes: of K passes, pass j masks tokens j, j + K, ... together: N / K times less work, for less context. None:
                as many as tokens.
            ignore_tokens: tokens that are not scored; None: those that are never masked, and of a genome N.

        Raises:
            TypeError, ValueError: as `LongNetLM.score`.
        """
        if passes is not None:
            integer(passes, "passes", 1)
        return hook("score sequences")(self, sequences, strands, passes, ignore_tokens, batch_size)

    def masked(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """(the model's input, the tokens that it has to predict) for this rank's part of a batch: (B, N) int64 and bool.

        In training mode the masks are those of the Trainer's step (0 without a Trainer), otherwise the fixed ones.

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
        """(nats, at least fp32; whether the likeliest token is right; the sample's place in the batch), each (M,)."""
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
        """(1, M, 2): nats, and 1 where the likeliest token is right, from hidden states (1, M, E) and labels (1, M)."""
        logits, labels = self._logits(x[0]), labels[0]
        losses = token_nats(logits, labels, self.compile_blocks)
        return torch.stack([losses, (logits.detach().argmax(-1) == labels).to(losses)], -1)[None]

    def loss_terms(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """(sum of nats over the masked tokens, their number)."""
        if type(self).masked_terms is not _MASKED_TERMS or "masked_terms" in vars(self):
            losses, right, _ = self.masked_terms(batch)
            return losses.sum(), torch.full((), len(right), device=losses.device)
        x, chosen = self._states(batch)
        labels = batch["tokens"].masked_fill(~chosen, IGNORE)
        if (
            self.vocab_size > self.dim
        ):  # otherwise logits of all tokens cost less than waiting for the number of masked ones
            x, labels = x[chosen][None], labels[chosen][None]
        return self._losses(x, labels, summed=True), chosen.sum()

    def _states(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """(hidden states before the last norm (B, N, E), the tokens to predict (B, N) bool)."""
        self.configure_model()
        seen, chosen = self.masked(batch)
        return self._read(seen, lengths=batch.get("lengths"), cu_seqlens=batch.get("cu_seqlens")), chosen

    def planning_copy(self, depth: int) -> LongNetMLM:
        """DilatedModule's, with a loss of all tokens: which ones are masked follows from values."""
        made = super().planning_copy(depth)

        def loss_terms(batch: Mapping[str, Any]) -> tuple[Tensor, Any]:
            return made._losses(made._read(batch["tokens"]), batch["labels"], summed=True), batch["labels"].numel()

        made.loss_terms = loss_terms  # type: ignore[method-assign]
        return made

    def derived_metrics(self, loss: Tensor) -> dict[str, Tensor]:
        """Bits per masked token, from a scalar loss."""
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
        """How well the model predicts masked tokens of each sample: `index`, and of a genome `record`, `start`, `stop`,
        `strand` and `region`, those that the batch has; `masked` (their number), `bits_per_token` and `accuracy`, each (B,),
        the latter NaN where none is masked. Or `embedding` with `predict_embeddings`.

        Every sample is masked at the same positions, so a sequence has the same numbers in any row, batch and number of
        ranks, and sequences that differ in a few tokens are compared at the same positions. This is not a likelihood of the
        sequence, nor a score of a variant: see `score` and `score_alleles`.
        """
        if self.predict_embeddings:
            return self._predicted(batch, {"embedding": self._sample_embeddings(batch)})
        check_form(self, batch, tokens=("(B, N)", "tokens"))
        # with the sample's number equal sequences would get different masks
        same_masks = {**batch, "index": torch.zeros_like(sample_numbers(batch["index"]))} if "index" in batch else batch
        losses, right, sample = self.masked_terms(same_masks)
        terms = torch.stack([losses.double(), right.double(), torch.ones_like(losses, dtype=torch.float64)])
        sums = terms.new_zeros(3, len(batch.get("index", batch["tokens"]))).index_add(1, sample, terms)
        total, correct, counted = sequence_sum(sums)
        bits = total / counted / math.log(2)
        values = {"masked": counted.long(), "bits_per_token": bits, "accuracy": correct / counted}
        return self._predicted(batch, values)


#: the class's own method, to recognise one that a user has put in its place
_MASKED_TERMS = LongNetMLM.masked_terms
