"""Prototypes of three branches that the package lacks: summaries of blocks, selected blocks, undilated queries.

    python benchmarks/branch_prototypes.py check
    # on a core of a CPU, 3 to 8 minutes each
    python benchmarks/branch_prototypes.py recall --arm hybrid-first
    python benchmarks/branch_prototypes.py recall --arm window --branch residue --rate 8 --layers 0
    python benchmarks/branch_prototypes.py recall --arm window --branch selected --layers 0 --test-lengths 512 1024
    python benchmarks/branch_prototypes.py text --arm window --branch summary --block 16
    python benchmarks/branch_prototypes.py compare window.npy summary.npy

Each branch adds keys to the softmax over the local segments of `--arm window`. As with other branches, a key in both
counts twice:

- summary: blocks of `--block` tokens that end before the query's own block. The key of a block is the mean of its
  unrotated keys, rotated at the block's centre. Its value is the mean of the values. The log of the block's number of
  tokens is added to the score. With `--levels` above 1, distant blocks are larger, by the factor `--ratio` per level:
  the largest aligned blocks that do not contain the query.
- selected: each query and head chooses the `--top-k` earlier blocks with the largest q . mean(k), and attends to their
  keys (MoBA, arXiv 2502.13189). The choice has no gradient. If scores are equal, the earlier block is chosen.
- residue: every query of head h attends to the earlier keys at positions o_h mod `--rate`. o_h is h mod rate, or with
  `--offsets spread` h * rate / heads, so that the heads of a layer are spread evenly.

Scores are fp32 matrices for a chunk of queries. `pairs` is the number of keys of a query (for selected, plus the scored
blocks), in units of dense heads. Seconds mean little. `recall` trains on the task of `recall_distance.py`, and can test
at lengths that are not trained. `text` trains on the bytes of Python's standard library in sequences of 1,024, and has
bits per byte of the second half. `arms.py` trains the models. `check` compares branches with loops in
float64 over their definitions. Prints one line of JSON.

Shape letters: B batch, N tokens, H heads, D head dim, C queries of a chunk, M keys of a branch.
"""

from __future__ import annotations

import argparse
import json
import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from arms import Batch, Stage, add_options, batches, model_of, options_of, train
from pairs_distance import token_bits
from recall_distance import DEPTH, HEADS, data, validate
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import lightning_dilated as ld
from lightning_dilated.attention.modules import MultiheadDilatedAttention
from lightning_dilated.attention.oracle import oracle
from lightning_dilated.attention.rotary import Rotary

#: maximum number of scores (B, H, C, keys) in a chunk of queries; from this many tokens on, the backward recomputes them
SCORES, RECOMPUTED = 2**27, 2048


class Inputs(NamedTuple):
    """Rotated q and k, v, and k before its rotation, all (B, H, N, D), and the rotation of a layer."""

    q: Tensor
    k: Tensor
    v: Tensor
    plain_k: Tensor
    rotary: Rotary | None


@dataclass
class Keys:
    """Keys that a branch adds to a layer.

    Attributes:
        k, v: (B, H, M, D).
        bias: (M,), added to the scores of the keys.
        visible: function of queries (B, H, C, D) and positions (C,) that returns a mask to broadcast to (B, H, C, M).
        before: function of a position; returns how many keys, from the first on, earlier queries may see.
    """

    k: Tensor
    v: Tensor
    bias: Tensor
    visible: Callable[[Tensor, Tensor], Tensor]
    before: Callable[[int], int]


@dataclass(frozen=True)
class Summary:
    """Adds means of blocks of `block`, `block * ratio`, ... tokens. `levels` is the number of block sizes."""

    block: int
    levels: int = 1
    ratio: int = 4

    @property
    def sizes(self) -> list[int]:
        """The number of tokens in a block of each level."""
        return [self.block * self.ratio**level for level in range(self.levels)]

    def keys(self, x: Inputs) -> Keys:
        """Return pooled keys and values, one level after the other."""
        tokens, pooled = x.k.shape[2], []
        numbers, sizes = [], []
        for size in self.sizes:
            whole = tokens // size
            k, v = (means(y, size) for y in (x.plain_k, x.v))
            if x.rotary is not None:
                centres = torch.arange(whole, device=k.device) * size + (size - 1) / 2
                rows = k.transpose(1, 2)
                k = x.rotary(centres, k.dtype).rotate(rows, rows)[1].transpose(1, 2)
            pooled.append((k, v))
            numbers.append(torch.arange(whole, device=k.device))
            sizes.append(torch.full((whole,), size, device=k.device))
        k, v = (torch.cat(y, 2) for y in zip(*pooled, strict=True))
        number, size = torch.cat(numbers), torch.cat(sizes)
        top = size == self.sizes[-1]

        def visible(q: Tensor, p: Tensor) -> Tensor:
            own = p[:, None] // size
            siblings = number // self.ratio == own // self.ratio
            return (number < own) & (top | siblings)

        return Keys(k, v, size.to(k.dtype).log(), visible, lambda stop: k.shape[2])

    def pairs(self, seq_len: int, heads: int) -> float:
        """Return a query's keys, summed over all heads and averaged over queries."""
        own = [torch.arange(seq_len) // size for size in self.sizes]
        each = sum((y % self.ratio for y in own[:-1]), own[-1])
        return heads * float(each.double().mean())


@dataclass(frozen=True)
class Selected:
    """Adds, for each query and head, the `top_k` blocks of `block` tokens with the largest q . mean(k)."""

    block: int
    top_k: int

    def keys(self, x: Inputs) -> Keys:
        """Return all keys. A mask excludes keys of blocks that are not selected."""
        whole = x.k.shape[2] // self.block
        with torch.no_grad():
            centres = means(x.k, self.block)
        k, v = (y[:, :, : whole * self.block] for y in (x.k, x.v))

        @torch.no_grad()
        def visible(q: Tensor, p: Tensor) -> Tensor:
            past = torch.arange(whole, device=p.device) < p[:, None] // self.block
            scores = (q @ centres.mT).masked_fill(~past, -torch.inf)
            best = scores.argsort(dim=-1, descending=True, stable=True)[..., : self.top_k]
            chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & past
            return chosen.repeat_interleave(self.block, -1)

        bias = k.new_zeros(k.shape[2])
        return Keys(k, v, bias, visible, lambda stop: stop // self.block * self.block)

    def pairs(self, seq_len: int, heads: int) -> float:
        """Return a query's keys plus scored blocks, summed over all heads and averaged over queries."""
        past = (torch.arange(seq_len) // self.block).double()
        return heads * float((past.clamp(max=self.top_k) * self.block + past).mean())


@dataclass(frozen=True)
class Residue:
    """Adds the keys at positions o_h mod `rate` for all queries of head h."""

    rate: int
    spread: bool = False

    def offset(self, head: int, heads: int) -> int:
        """Return the offset o_h of head h."""
        return head * self.rate // heads % self.rate if self.spread and self.rate > heads else head % self.rate

    def keys(self, x: Inputs) -> Keys:
        """Return every `rate`-th key, starting at the offset of each head."""
        heads, tokens = x.k.shape[1:3]
        offsets = torch.tensor([self.offset(h, heads) for h in range(heads)], device=x.k.device)
        at = offsets[:, None] + torch.arange(0, tokens, self.rate, device=x.k.device)  # (H, M)
        k, v = (y.take_along_dim(at.clamp(max=tokens - 1)[None, :, :, None], 2) for y in (x.k, x.v))
        visible = lambda q, p: at[:, None] <= p[:, None]  # noqa: E731
        return Keys(k, v, k.new_zeros(k.shape[2]), visible, lambda stop: (stop - 1) // self.rate + 1)

    def pairs(self, seq_len: int, heads: int) -> float:
        """Return a query's keys, summed over all heads and averaged over queries."""
        p = torch.arange(seq_len)
        each = (torch.div(p - self.offset(h, heads), self.rate, rounding_mode="floor") + 1 for h in range(heads))
        return sum(float(y.double().mean()) for y in each)


Branch = Summary | Selected | Residue


def means(x: Tensor, size: int) -> Tensor:
    """Return means (B, H, N // size, D) over complete blocks of x (B, H, N, D)."""
    whole = x.shape[2] // size
    return x[:, :, : whole * size].unflatten(2, (whole, size)).mean(3)


def attend(
    x: Inputs, segment: int, shift: int, branch: Branch | None, chunk: int | None = None, recompute: bool | None = None
) -> Tensor:
    """Return (B, H, N, D): one causal softmax over the keys of the local segment and of the branch.

    Args:
        segment, shift: segment length and shift of the local branch.
        chunk: C; by default the segment length or 128, whichever is larger, but limited by `SCORES`.
        recompute: whether the backward recomputes scores; by default from `RECOMPUTED` tokens on.
    """
    batch, heads, tokens, _ = x.q.shape
    keys = None if branch is None else branch.keys(x)
    columns = segment + (0 if keys is None else keys.k.shape[2])
    size = chunk or max(16, min(max(segment, 128), SCORES // (batch * heads * columns)))
    recompute = tokens >= RECOMPUTED if recompute is None else recompute
    run = partial(checkpoint, _chunk, use_reentrant=False) if recompute else _chunk
    outs = []
    for start in range(0, tokens, size):
        stop = min(start + size, tokens)
        outs.append(run(x, keys, segment, shift, start, stop))
    return torch.cat(outs, 2)


def _chunk(x: Inputs, keys: Keys | None, segment: int, shift: int, start: int, stop: int) -> Tensor:
    """Return (B, H, C, D) for queries start..stop."""
    first = max(0, (start + shift) // segment * segment - shift)
    p, j = (torch.arange(begin, stop, device=x.q.device) for begin in (start, first))
    q = x.q[:, :, start:stop] * x.q.shape[-1] ** -0.5
    near = ((p[:, None] + shift) // segment == (j + shift) // segment) & (j <= p[:, None])
    scores = [(q @ x.k[:, :, first:stop].mT).masked_fill(~near, -torch.inf)]
    values = [x.v[:, :, first:stop]]
    reached = 0 if keys is None else keys.before(stop)
    if keys is not None and reached:
        visible = keys.visible(x.q[:, :, start:stop], p)[..., :reached]
        scores.append((q @ keys.k[:, :, :reached].mT + keys.bias[:reached]).masked_fill(~visible, -torch.inf))
        values.append(keys.v[:, :, :reached])
    weights = torch.cat(scores, -1).softmax(-1).split([y.shape[2] for y in values], -1)
    return sum(w @ v for w, v in zip(weights, values, strict=True))


class PrototypeAttention(MultiheadDilatedAttention):
    """The attention of a block, with a softmax over one local branch and `self.branch`."""

    branch: Branch | None

    def forward(self, query: Tensor, *, positions: Any = None, **documents: Any) -> tuple[Tensor, None]:
        """Map complete sequences (B, N, E) to (B, N, E)."""
        if any(x is not None for x in documents.values()):
            raise ValueError(f"a prototype takes whole sequences, got {documents}.")
        mix = self._mix(query, None, None, None)
        q, k, v, _, plain_k = self.projected(query, self.table(query, positions), [] if mix is None else [mix])
        kind = torch.promote_types(v.dtype, torch.float32)
        x = Inputs(*(y.to(kind).transpose(1, 2) for y in (q, k, v, plain_k)), self.rotary)
        (local,) = self.attention.pattern.branches
        with torch.autocast(query.device.type, enabled=False):
            out = attend(x, local.segment_length, local.shift, self.branch)
        return self.join(out.transpose(1, 2).to(v.dtype)), None


def give_branch(model: ld.LongNetLM, branch: Branch | None, layers: list[int] | None) -> None:
    """Add the branch to these layers (None: all) of a model with local segments. Other layers get only the same code."""
    for i, block in enumerate(model.transformer.blocks):
        block.attention_layer.__class__ = PrototypeAttention
        block.attention_layer.branch = branch if layers is None or i in layers else None


# -- learning tests ----------------------------------------------------------------------------------------------------
def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = p.add_subparsers(dest="command", required=True)
    commands.add_parser("check")
    recaller, reader = commands.add_parser("recall"), commands.add_parser("text")
    for command in (recaller, reader):
        _add_branch(command)
    recaller.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 512])
    recaller.add_argument("--test-lengths", type=int, nargs="+", help="default: the longest of training")
    recaller.add_argument("--steps", type=int, nargs="+", default=[300], help="of each length; one number for all")
    recaller.add_argument("--vocabulary", type=int, default=64)
    recaller.add_argument("--queries", type=int, default=4)
    recaller.add_argument("--tokens", type=int, default=4096)
    recaller.add_argument("--tokens-per-pair", type=int, default=16)
    recaller.add_argument("--dim", type=int, default=64)
    recaller.set_defaults(lr=3e-3, kv_conv=4)
    reader.add_argument("--steps", type=int, default=300)
    reader.add_argument("--seq-len", type=int, default=1024)
    reader.add_argument("--tokens", type=int, default=4096)
    reader.add_argument("--samples", type=int, default=256, help="of validation")
    reader.add_argument("--windows", type=Path, help="where bits of each sample's second half go")
    reader.set_defaults(lr=2e-3)
    pair = commands.add_parser("compare")
    pair.add_argument("first", type=Path)
    pair.add_argument("second", type=Path)
    a = p.parse_args()
    result = {"check": check, "recall": recall, "text": text, "compare": compare}[a.command](a)
    print(json.dumps(result), flush=True)


def _add_branch(p: argparse.ArgumentParser) -> None:
    add_options(p)
    p.add_argument("--branch", choices=["summary", "selected", "residue"], help="beside the segments of --arm window")
    p.add_argument("--layers", type=int, nargs="+", help="which have the branch; default: all")
    p.add_argument("--block", type=int, default=16)
    p.add_argument("--levels", type=int, default=1)
    p.add_argument("--ratio", type=int, default=4)
    p.add_argument("--top-k", type=int, default=2)
    p.add_argument("--rate", type=int, default=4)
    p.add_argument("--offsets", choices=["interleaved", "spread"], default="interleaved")
    p.set_defaults(local=64, compile=False)


def branch_of(a: Namespace) -> Branch | None:
    if a.branch is None:
        return None
    if a.arm != "window":
        raise SystemExit(f"--branch joins the local segments of --arm window, got --arm {a.arm}.")
    return {
        "summary": lambda: Summary(a.block, a.levels, a.ratio),
        "selected": lambda: Selected(a.block, a.top_k),
        "residue": lambda: Residue(a.rate, a.offsets == "spread"),
    }[a.branch]()


def prepared(a: Namespace, *sizes: int) -> tuple[ld.LongNetLM, dict[str, object]]:
    """Return the model, and a row's fields about the branch. `pairs` is in units of dense heads at full length."""
    model, branch, longest = model_of(a, *sizes), branch_of(a), sizes[-1]
    if branch is None:
        return model, {}
    give_branch(model, branch, a.layers)
    layers = sizes[2] if a.layers is None else len(a.layers)
    pairs = layers * branch.pairs(longest, sizes[3]) / ((longest + 1) / 2)
    return model, {"branch": str(branch), "layers": a.layers, "pairs": round(pairs, 3)}


def recall(a: Namespace) -> dict[str, object]:
    """Train an arm on recall. Return the accuracy at each test length."""
    tests = a.test_lengths or [max(a.lengths)]
    model, row = prepared(a, 1 + 2 * a.vocabulary, a.dim, DEPTH, HEADS, max([*a.lengths, *tests]))
    steps = a.steps * len(a.lengths) if len(a.steps) == 1 else a.steps
    stages = []
    for n, k in zip(a.lengths, steps, strict=True):
        task = data(n, k, a)
        stages.append(Stage(n, k, batches(task, "train", task.batch_size, workers=0 if a.device == "cpu" else 2)))
    trained = train(model, stages, a)
    tested = {n: validate(model, Namespace(**{**vars(a), "lengths": [n]})) for n in tests}
    return {**row, **options_of(a, model, trained), "lengths": a.lengths, "tested": tested}


def text(a: Namespace) -> dict[str, object]:
    """Train an arm on bytes. Return bits per byte of both halves."""
    model, row = prepared(a, 256, 128, DEPTH, HEADS, a.seq_len)
    trained = train(model, [Stage(a.seq_len, a.steps, _sequences(a, "train", a.steps))], a)
    bits = token_bits(model, _sequences(a, "val", a.samples), a.device)
    first, second = bits.split([a.seq_len // 2, bits.shape[1] - a.seq_len // 2], 1)
    each = second.mean(1)
    if a.windows:
        np.save(a.windows, each.numpy())
    return {
        **row, **options_of(a, model, trained), "seq_len": a.seq_len, "samples": len(bits),
        "first": round(float(first.mean()), 4), "second": round(float(each.mean()), 4),
        "error": round(float(each.std() / len(each) ** 0.5), 4),
    }  # fmt: skip


def _sequences(a: Namespace, split: str, steps: int) -> Iterator[Batch]:
    """Yield batches of the quickstart's bytes. The seed determines the order in training; validation is evenly spaced.

    Training repeats epochs. Validation ends after the last sequence if there are fewer than `steps`.
    """
    source = ld.data.ByteDataModule(seq_len=a.seq_len, val_fraction=0.02, test_fraction=0.02).dataset(split)
    if split == "train":
        size, draw = max(1, a.tokens // a.seq_len), np.random.default_rng(a.seed)
        epochs = range(-(-steps * size // len(source)))
        order = np.concatenate([draw.permutation(len(source)) for _ in epochs])[: steps * size].reshape(steps, size)
    else:
        order = np.unique(np.linspace(0, len(source) - 1, steps).astype(int))[:, None]
    for indices in order.tolist():
        rows = [source[i] for i in indices]
        yield {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in ("tokens", "labels")}


def compare(a: Namespace) -> dict[str, object]:
    """Return by how many bits the second arm is below the first, paired by sample, and the standard error."""
    gain = np.load(a.first) - np.load(a.second)
    return {"gain": round(float(gain.mean()), 4), "error": round(float(gain.std(ddof=1) / len(gain) ** 0.5), 4)}


# -- against the definitions -------------------------------------------------------------------------------------------
def check(a: Namespace) -> dict[str, object]:
    """Compare outputs and gradients with loops in float64. Raise if they differ by more than 1e-12."""
    branches = [
        None, Summary(4), Summary(3), Summary(2, 3, 2), Summary(2, 2, 4), Selected(4, 2), Selected(3, 1), Selected(4, 99),
        Residue(1), Residue(3), Residue(4), Residue(8), Residue(8, spread=True),
    ]  # fmt: skip
    worst = {}
    for branch in branches:
        worst[str(branch)] = max(_difference(branch, tokens, t) for tokens, t in ((1, 0), (13, 0), (32, 4), (37, 3)))
        if branch is not None:
            _check_pairs(branch, 37)
    worst["summary, equal keys"] = max(_summary_of_equal_keys(Summary(4)), _summary_of_equal_keys(Summary(2, 2, 2)))
    worst["layer without a branch"] = _layer_difference()
    if not all(x < 1e-12 for x in worst.values()):
        raise AssertionError(f"differences above 1e-12: {worst}")
    return {"largest difference": max(worst.values()), **worst}


def _inputs(tokens: int, heads: int = 4, rotary: Rotary | None = None) -> Inputs:
    generator = torch.Generator().manual_seed(tokens)
    draw = lambda: torch.randn(2, heads, tokens, 8, generator=generator, dtype=torch.float64)  # noqa: E731
    q, k, v = draw(), draw(), draw()
    if rotary is None:
        return Inputs(*(x.requires_grad_() for x in (q, k, v)), k, None)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    turned = rotary(torch.arange(tokens), torch.float64).rotate(q.transpose(1, 2), k.transpose(1, 2))
    return Inputs(turned[0].transpose(1, 2), turned[1].transpose(1, 2), v, k, rotary)


def _difference(branch: Branch | None, tokens: int, shift: int) -> float:
    """Return the largest difference of outputs and gradients between the loops and `attend` in several chunks."""
    results = []
    for run in (_loops, *(partial(attend, chunk=c, recompute=c == 5) for c in (5, 8, 64))):
        x = _inputs(tokens, rotary=Rotary(8))
        out = run(x, 8, shift, branch)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        results.append((out.detach(), *torch.autograd.grad((out * weights).sum(), (x.q, x.plain_k, x.v))))
    return max(float((y - z).abs().max()) for other in results[1:] for y, z in zip(results[0], other, strict=True))


def _loops(x: Inputs, segment: int, shift: int, branch: Branch | None) -> Tensor:
    """Compute (B, H, N, D) query by query."""
    batch, heads, tokens, dim = x.q.shape
    out = []
    for b in range(batch):
        for h in range(heads):
            for p in range(tokens):
                q, k, v = x.q[b, h, p], x.k[b, h], x.v[b, h]
                local = [j for j in range(p + 1) if (j + shift) // segment == (p + shift) // segment]
                rows = [(k[j], v[j], 0.0) for j in local] + _rows(x, b, h, p, branch)
                scores = torch.stack([q @ key * dim**-0.5 + bias for key, _, bias in rows])
                out.append(scores.softmax(0) @ torch.stack([value for _, value, _ in rows]))
    return torch.stack(out).view(batch, heads, tokens, dim)


def _rows(x: Inputs, b: int, h: int, p: int, branch: Branch | None) -> list[tuple[Tensor, Tensor, float]]:
    """Return (key, value, bias) of every key that a branch adds to query p of head h."""
    k, v = x.k[b, h], x.v[b, h]
    if isinstance(branch, Residue):
        return [(k[j], v[j], 0.0) for j in range(p + 1) if j % branch.rate == branch.offset(h, x.k.shape[1])]
    if isinstance(branch, Selected):
        blocks = [range(c * branch.block, (c + 1) * branch.block) for c in range(p // branch.block)]
        score = lambda block: (x.q[b, h, p] @ k[block.start : block.stop].mean(0)).item()  # noqa: E731
        chosen = sorted(blocks, key=lambda block: (-score(block), block.start))[: branch.top_k]
        return [(k[j], v[j], 0.0) for block in chosen for j in block]
    rows, at = [], 0
    while branch is not None and at < p // branch.block * branch.block:
        # the largest aligned block that starts here and does not contain the query
        size = max(s for s in branch.sizes if at % s == 0 and at // s < p // s)
        key = torch.stack([x.plain_k[b, h, j] for j in range(at, at + size)]).mean(0)
        if x.rotary is not None:
            table = x.rotary(torch.tensor([at + (size - 1) / 2]), key.dtype)
            key = table.rotate(key[None, None, None], key[None, None, None])[1][0, 0, 0]
        rows.append((key, v[at : at + size].mean(0), math.log(size)))
        at += size
    return rows


def _check_pairs(branch: Branch, tokens: int) -> None:
    """Compare `pairs` with the number of keys in the loops."""
    x = _inputs(tokens)
    heads = x.q.shape[1]
    keys = sum(len(_rows(x, 0, h, p, branch)) for h in range(heads) for p in range(tokens))
    scored = heads * sum(p // branch.block for p in range(tokens)) if isinstance(branch, Selected) else 0
    if abs((keys + scored) / tokens - branch.pairs(tokens, heads)) > 1e-9:
        raise AssertionError(
            f"{branch} has {(keys + scored) / tokens} pairs a query, not {branch.pairs(tokens, heads)}"
        )


def _summary_of_equal_keys(branch: Summary) -> float:
    """Return the difference from dense causal attention with equal keys in each block, where summaries are exact."""
    tokens, largest = 37, branch.sizes[-1]
    x = _inputs(tokens)
    k = x.k.detach()[:, :, torch.arange(tokens) // largest * largest]
    out = attend(Inputs(x.q, k, x.v, k, None), branch.block, 0, branch)
    exact, _ = oracle(*(y.transpose(1, 2) for y in (x.q, k, x.v)), ld.DilatedPattern.dense(), causal=True)
    return float((out - exact.transpose(1, 2)).detach().abs().max())


def _layer_difference() -> float:
    """Return the difference between a layer without a branch and the package's layer, with kv_conv and shift."""
    torch.manual_seed(0)
    pattern = ld.DilatedPattern.dense(8).shifted()
    layer = MultiheadDilatedAttention(32, 4, pattern, causal=True, position_encoding="rotary", kv_conv=4, engine="math")
    layer = layer.double()
    torch.nn.init.normal_(layer.kv_conv.weight)
    x = torch.randn(2, 37, 32, dtype=torch.float64)
    own = layer(x)[0]
    layer.__class__, layer.branch = PrototypeAttention, None
    return float((own - layer(x)[0]).detach().abs().max())


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    main()
