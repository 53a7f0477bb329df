"""Log-likelihoods, allele scores and embeddings of sequences with a token model, on either strand of a genome.

Shape letters: B sequences, N tokens of the longest, V vocabulary, E embedding dim, M sites.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_dilated._device import send
from lightning_dilated._validation import integer, one_of
from lightning_dilated.ext.decoding.generation import evaluating
from lightning_dilated.ext.genomes.bases import LETTERS, N_CODE, backward_places, encode_bases, reverse_complement
from lightning_dilated.ext.genomes.variants import AlleleWindows
from lightning_dilated.memory.chunked_loss import IGNORE
from lightning_dilated.models.longnet.lm import Strands

#: maximum vocabulary size of a genome model: bases, N, and some more tokens, such as a mask token or padding
MOST_GENOME_TOKENS = 16


class Scores(NamedTuple):
    """Log-likelihoods of B sequences, on the CPU.

    `log_likelihood`: (B,) float64, in nats. `bases`: (B,) float64, number of summed tokens; with both strands, the mean
    of their two numbers.
    """

    log_likelihood: Tensor
    bases: Tensor

    @property
    def per_base(self) -> Tensor:
        """Nats per token, (B,) float64; NaN if no token was scored."""
        return self.log_likelihood / self.bases


class AlleleScores(NamedTuple):
    """Log-likelihoods in nats of both alleles of M variants, and the numbers of scored tokens: (M,) float64, CPU."""

    reference: Tensor
    alternative: Tensor
    reference_bases: Tensor
    alternative_bases: Tensor

    @property
    def score(self) -> Tensor:
        """Alternative minus reference, (M,) float64 nats; above 0 if the alternative allele is likelier."""
        return self.alternative - self.reference


# -- sequences ---------------------------------------------------------------------------------------------------------
def reads_bases(model: Any) -> bool:
    """Return whether a model's vocabulary can be a genome's: A C G T N, and at most a few further tokens."""
    return len(LETTERS) <= model.vocab_size <= MOST_GENOME_TOKENS


def read_sequences(model: Any, sequences: Any, strands: str) -> list[Tensor]:
    """Return each sequence as tokens (N,) int64 on the CPU. Raises TypeError or ValueError for invalid sequences."""
    one_of(strands, "strands", ("forward", "reverse", "both"))
    if strands != "forward" and not reads_bases(model):
        raise ValueError(f"strands={strands!r} is for genomes, but this model has vocab_size={model.vocab_size}.")
    if isinstance(sequences, str) or (isinstance(sequences, Tensor) and sequences.ndim == 1):
        raise TypeError("sequences are several: put a single one in a list.")
    if isinstance(sequences, Tensor) and sequences.ndim != 2:
        raise ValueError(f"sequences in one tensor must be (B, N), got {tuple(sequences.shape)}.")
    return [_tokens(model, i, sequence) for i, sequence in enumerate(sequences)]


def _tokens(model: Any, number: int, sequence: Any) -> Tensor:
    if isinstance(sequence, str):
        if not reads_bases(model):
            raise ValueError(
                f"strings are bases, and this model's vocab_size={model.vocab_size} is no genome's ({len(LETTERS)} to "
                f"{MOST_GENOME_TOKENS}): pass tokens, (N,) integers."
            )
        try:
            sequence = encode_bases(sequence)
        except ValueError as error:
            raise ValueError(f"sequences[{number}]: {error}") from None
    tokens = torch.as_tensor(sequence).cpu()
    if tokens.ndim != 1 or len(tokens) == 0 or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise ValueError(
            f"sequences[{number}] must be a string or at least one integer (N,), got {tokens.dtype} of shape "
            f"{tuple(tokens.shape)}."
        )
    most = model.embedded_tokens
    if int(tokens.min()) < 0 or int(tokens.max()) >= most:
        raise ValueError(
            f"sequences[{number}] holds tokens from {int(tokens.min())} to {int(tokens.max())}, and the model's are 0 to "
            f"{most - 1}."
        )
    return tokens.long()


def padded(sequences: Sequence[Tensor], device: Any) -> tuple[Tensor, Tensor | None]:
    """Return tokens (B, N) on the device, right-padded with 0, and lengths (B,) on the CPU, or None if all are N."""
    sizes = [len(x) for x in sequences]
    tokens = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)
    return send(tokens, device), None if min(sizes) == max(sizes) else torch.tensor(sizes)


def in_batches(sizes: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """Yield batches of sequence numbers. Lengths in a batch are similar; the longest batch is first, to fail early."""
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    yield from (order[i : i + batch_size] for i in range(0, len(order), batch_size))


def read_by(strands: str) -> tuple[bool, ...]:
    """Return, for each pass over a sequence, whether the pass reads the other strand."""
    return {"forward": (False,), "reverse": (True,), "both": (False, True)}[strands]


def left_out(model: Any, ignore_tokens: Iterable[int] | None) -> list[int]:
    """Return the tokens not scored: mask tokens and `ignore_tokens` (default: a genome's N, tokens never masked)."""
    never = set(range(model.vocab_size, model.embedded_tokens))  # a mask token has no probability
    if ignore_tokens is not None:
        return sorted(never | {integer(x, "ignore_tokens", 0) for x in ignore_tokens})
    masking = getattr(model, "masking", None)
    return sorted(never.union(() if masking is None else masking.never, [N_CODE] if reads_bases(model) else ()))


# -- likelihoods -------------------------------------------------------------------------------------------------------
@torch.no_grad()
def score(
    model: Any,
    sequences: Any,
    strands: Strands,
    passes: int | None,
    ignore_tokens: Iterable[int] | None,
    batch_size: int,
) -> Scores:
    """Compute `LongNetLM.score` and `LongNetMLM.score`; `passes` is None for the former."""
    tokens, size = read_sequences(model, sequences, strands), integer(batch_size, "batch_size", 1)
    never = left_out(model, ignore_tokens)
    model.configure_model()
    readings: list[Tensor] = []
    with evaluating(model):
        for other in read_by(strands):
            read = [reverse_complement(x) if other else x for x in tokens]
            readings.append(
                _causal(model, read, never, size) if model.causal else _masked(model, read, never, passes, size)
            )
    return Scores(*torch.stack(readings).mean(0).unbind(1))


def _scored(tokens: Tensor, never: Sequence[int]) -> Tensor:
    """Return a mask (N,) bool of the tokens that are scored."""
    return ~torch.isin(tokens, torch.tensor(never, dtype=tokens.dtype))


def _causal(model: Any, sequences: Sequence[Tensor], never: Sequence[int], batch_size: int) -> Tensor:
    """Return (B, 2) float64: the sum of nats of all tokens but the first, given the tokens before; and their number."""
    out = torch.zeros(len(sequences), 2, dtype=torch.float64)
    for numbers in in_batches([len(x) for x in sequences], batch_size):
        chosen = [sequences[i] for i in numbers]
        tokens, _ = padded(chosen, model.embedding.weight.device)
        target = torch.full(tokens.shape, IGNORE)
        for row, x in zip(target, chosen, strict=True):
            row[: len(x) - 1] = torch.where(_scored(x, never), x, IGNORE)[1:]
        # the model need not get the lengths, because later tokens do not change a token's nats
        nats = model._label_nats({"tokens": tokens, "labels": send(target, model.embedding.weight.device)})
        out[numbers, 0] = -nats.double().sum(1).cpu()
        out[numbers, 1] = (target != IGNORE).sum(1).double()
    return out


def _masked(
    model: Any, sequences: Sequence[Tensor], never: Sequence[int], passes: int | None, batch_size: int
) -> Tensor:
    """Return (B, 2) float64: the sum of nats of tokens that are masked and predicted, and their number."""
    rows = []
    for number, tokens in enumerate(sequences):
        scored, step = _scored(tokens, never), passes or len(tokens)
        for first in range(min(step, len(tokens))):
            sites = torch.arange(first, len(tokens), step)
            sites = sites[scored[sites]]
            if len(sites):
                rows.append(((number,), (tokens,), sites))
    return _site_nats(model, rows, len(sequences), batch_size)


#: a row that the model reads: indices of the results that it adds to; for each of these results a sequence of tokens
#: (N,) to score; and the sites (M,). The model reads the first sequence, with all sites masked
MaskedRow = tuple[Sequence[int], Sequence[Tensor], Tensor]


def _site_nats(model: Any, rows: Sequence[MaskedRow], results: int, batch_size: int) -> Tensor:
    """Return (results, 2) float64: the sum of nats of the tokens at the sites, and the number of these tokens."""
    out = torch.zeros(results, 2, dtype=torch.float64)
    for numbers in in_batches([len(texts[0]) for _, texts, _ in rows], batch_size):
        chosen = [rows[i] for i in numbers]
        predicted = site_log_probabilities(model, [(texts[0], sites) for _, texts, sites in chosen])
        for (targets, texts, sites), log_probabilities in zip(chosen, predicted, strict=True):
            for target, tokens in zip(targets, texts, strict=True):
                right = log_probabilities.gather(1, tokens[sites][:, None])
                out[target] += torch.tensor([right.sum(), len(sites)], dtype=torch.float64)
    return out


def site_log_probabilities(model: Any, rows: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Return log-probabilities (M, V) float64 at the sites (M,) of each row's tokens (N,), with all sites masked."""
    tokens, lengths = padded([x for x, _ in rows], model.embedding.weight.device)
    at = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, (_, sites) in zip(at, rows, strict=True):
        row[sites] = True
    at = send(at, model.embedding.weight.device)
    logits = model(tokens.masked_fill(at, model.mask_token), at=at, lengths=lengths)
    by_row = logits.double().log_softmax(-1).cpu().split([len(sites) for _, sites in rows])
    # logits are in the order of positions; return the order of `sites`
    return [x[sites.argsort().argsort()] for x, (_, sites) in zip(by_row, rows, strict=True)]


# -- two alleles -------------------------------------------------------------------------------------------------------
def compared_sites(windows: AlleleWindows, flank: int) -> Tensor:
    """Return the sites (M,) to compare in both windows: for a substitution, the tokens that differ, which are masked
    together; otherwise all tokens from `flank` before the alleles to `flank` after them."""
    if windows.substitution:
        return (windows.reference != windows.alternative).nonzero()[:, 0]
    return torch.arange(max(0, windows.start - flank), min(len(windows.reference), windows.stop + flank))


@torch.no_grad()
def score_alleles(
    model: Any, variants: Sequence[AlleleWindows], strands: Strands, flank: int, batch_size: int
) -> AlleleScores:
    """Compute `TokenModel.score_alleles`."""
    pairs = [(a.reference, a.alternative) for a in variants]
    read_sequences(model, [x for pair in pairs for x in pair], strands)
    never, readings = left_out(model, None), []
    model.configure_model()
    with evaluating(model):
        for other in read_by(strands):
            if model.causal:
                read = [reverse_complement(x) if other else x for pair in pairs for x in pair]
                readings.append(_causal(model, read, never, batch_size).view(-1, 2, 2))
            else:
                readings.append(_masked_alleles(model, variants, other, flank, never, batch_size))
    ref, alt = torch.stack(readings).mean(0).unbind(1)
    return AlleleScores(ref[:, 0], alt[:, 0], ref[:, 1], alt[:, 1])


def _masked_alleles(
    model: Any, variants: Sequence[AlleleWindows], other: bool, flank: int, never: Sequence[int], batch_size: int
) -> Tensor:
    """Return (variants, 2, 2) float64: for each allele the sum of nats at the sites, and the number of sites."""
    rows: list[MaskedRow] = []
    for number, alleles in enumerate(variants):
        sites = compared_sites(alleles, flank)
        windows = [reverse_complement(x) if other else x for x in (alleles.reference, alleles.alternative)]
        sites = len(windows[0]) - 1 - sites if other else sites
        if alleles.substitution:
            sites = sites[_scored(windows[0][sites], never) & _scored(windows[1][sites], never)]
            rows += [((2 * number, 2 * number + 1), windows, sites)] if len(sites) else []
            continue
        for allele, tokens in enumerate(windows):
            for site in sites[_scored(tokens[sites], never)]:
                rows.append(((2 * number + allele,), (tokens,), site[None]))
    return _site_nats(model, rows, 2 * len(variants), batch_size).view(-1, 2, 2)


# -- embeddings --------------------------------------------------------------------------------------------------------
@torch.no_grad()
def embed(
    model: Any, sequences: Any, pool: Literal["mean", "none"], layer: int | None, strands: Strands, batch_size: int
) -> Tensor:
    """Compute `TokenModel.embed`."""
    tokens, size = read_sequences(model, sequences, strands), integer(batch_size, "batch_size", 1)
    one_of(pool, "pool", ("mean", "none"))
    if layer is not None and not -model.depth <= integer(layer, "layer") < model.depth:
        raise ValueError(f"layer={layer}, but the model has {model.depth} layers: {-model.depth} to {model.depth - 1}.")
    model.configure_model()
    rows: list[Any] = [None] * len(tokens)
    with evaluating(model):
        for numbers in in_batches([len(x) for x in tokens], size):
            sizes = torch.tensor([len(tokens[i]) for i in numbers])
            states = [_states(model, [tokens[i] for i in numbers], sizes, layer, other) for other in read_by(strands)]
            mean = states[0] if len(states) == 1 else (states[0] + states[1]) / 2
            for i, state, count in zip(numbers, mean, sizes.tolist(), strict=True):
                rows[i] = state[:count].mean(0) if pool == "mean" else state[:count]
    if not rows:
        raise ValueError("there are no sequences to embed.")
    return torch.stack(rows) if pool == "mean" else torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _states(model: Any, sequences: Sequence[Tensor], sizes: Tensor, layer: int | None, other: bool) -> Tensor:
    """Return (B, N, E) in the order of the sequences, at least fp32, read from one strand."""
    tokens, lengths = padded([reverse_complement(x) if other else x for x in sequences], model.embedding.weight.device)
    states: list[Tensor] = []
    target, calls = None if layer is None else layer % model.depth + 1, iter(range(model.depth + 1))

    def watch(x: Tensor) -> None:
        if next(calls) == target:
            states.append(x)

    watching = {} if layer is None else {"watch": watch}
    x = model._hidden(tokens, lengths=lengths, **watching)
    x = model.final_norm(x) if layer is None else states[0]
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if not other:
        return x
    places = send(backward_places(x.shape[1], sizes), x.device)
    return x.gather(1, places[:, :, None].expand_as(x))
