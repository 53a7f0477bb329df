"""Decompose the attention op into plain torch operations, with one graph for all numbers of tokens, for export.

Each branch gathers its heads' rows by segment, attends within segments, and gathers the results back; the results of
branches are merged by their log-sum-exps. The operations depend only on the pattern and the longest sequence, so N may
be a symbol. A branch has one segment if the longest sequence fits into a segment. Rows of tokens and heads share one
axis, because torch would create a separate graph for a symbolic size that can be 1.
Shape letters: B batch, N tokens, H query heads, K kv heads, D head dim; in a branch: w segment length, r dilation rate,
t shift, S segments, J heads that it serves, m rows of a head in a segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_dilated.attention.spec import CallSpec
from lightning_dilated.pattern.branch import AnyBranch
from lightning_dilated.pattern.rows import check_padding

#: log-sum-exp of a row without keys, and score of a masked key; it is finite, so that differences are not NaN
NOTHING = -1e30
#: maximum number of scores that are computed in one step; a step with a single head may compute more
SCORES = 1 << 26


def decomposed(
    q: Tensor, k: Tensor, v: Tensor, spec: CallSpec, longest: int, known: dict[Any, Any] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the op's first two results, out (B, N, H, D) in q's dtype and lse (B, H, N) in fp32 or a wider dtype.

    Args:
        q: (B, N, H, D). N is between 1 and `longest`; if it is symbolic, it is at least 2.
        k, v: (B, N, K, D).
        spec: the call's options; they must be for one rank and a whole sequence, without dropout.
        longest: maximum number of tokens that the graph supports.
        known: cache of row indices for calls with the same shapes in one trace, so that the graph computes them once.

    Raises:
        ValueError: if the call cannot be exported, or if `check_padding` refuses its pattern.
    """
    named = {"sequence": "a sequence shared by ranks", "context": "a chunk of a stream", "window": "a chunk of heads"}
    for name, what in named.items():
        if getattr(spec, name):
            raise ValueError(f"{what} cannot be exported: export whole sequences on one rank.")
    if spec.dropout:
        raise ValueError(f"attention dropout {spec.dropout} cannot be exported: call model.eval() first.")
    check_padding(spec.pattern, longest)
    batch, tokens, heads, head_dim = q.shape
    wide, known = torch.promote_types(q.dtype, torch.float32), {} if known is None else known
    flat = [x.to(wide).reshape(batch, -1, head_dim) for x in (q, k, v)]
    out, total, top = None, None, None
    for i, branch in enumerate(spec.pattern.branches):
        key = spec.pattern.code, i, spec.causal, heads, k.shape[2]
        if key not in known:
            rows = _Rows.of(spec, branch, q, k.shape[2], longest)
            known[key] = rows.places(heads // k.shape[2], spec) if rows.offsets else None
        if known[key] is None:
            continue
        part, lse = known[key].attend(*flat, spec)
        if out is None:
            out, total, top = part, torch.ones_like(lse), lse
            continue
        highest = torch.maximum(top, lse)
        before, new = (top - highest).exp(), (lse - highest).exp()
        out, total, top = out * before[..., None] + part * new[..., None], total * before + new, highest
    if out is None:
        raise ValueError(f"no branch of {spec.pattern} serves any of {heads} heads.")
    lse = torch.where(top > NOTHING / 2, top + total.log(), -torch.inf)
    out = (out / total[..., None]).to(q.dtype).reshape(batch, tokens, heads, head_dim)
    return out, lse.reshape(batch, tokens, heads).transpose(1, 2).contiguous()


def numbers(values: Sequence[int], device: torch.device) -> Tensor:
    """Compute an int64 tensor of `values` by torch operations, because torch cannot trace a tensor made from a list."""
    runs: list[list[int]] = []
    for value in values:
        if runs and (len(runs[-1]) == 1 or value - runs[-1][-1] == runs[-1][1] - runs[-1][0]):
            runs[-1].append(value)
        else:
            runs.append([value])
    steps = [run[1] - run[0] if len(run) > 1 else 0 for run in runs]
    parts = [torch.arange(len(run), device=device) * step + run[0] for run, step in zip(runs, steps, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _over(x: Tensor, divisor: Any) -> Tensor:
    return torch.div(x, divisor, rounding_mode="floor")


def _modulo(x: Tensor, divisor: Any) -> Tensor:
    return x - _over(x, divisor) * divisor  # ONNX has no remainder for a symbolic divisor


@dataclass(frozen=True)
class _Places:
    """Index tensors of a branch.

    Attributes:
        rows: m.
        branch: the branch; its window or global tokens limit the rows that a row attends to.
        parts: a tuple for each group of J heads: (S J m,) each row's index among the N H queries; (S J m,) its index
            among the N K keys; (S J m,) mask of real tokens, or None; (S J, 1, 1) number of zero keys, or None.
        back: (N H,) the row of each token and head.
        used: (N H,) mask of the tokens that their head uses; None if all heads use all tokens.
    """

    rows: Any
    branch: AnyBranch
    parts: tuple[tuple[Tensor, Tensor, Tensor | None, Tensor | None], ...]
    back: Tensor
    used: Tensor | None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: CallSpec) -> tuple[Tensor, Tensor]:
        """Return (out (B, N H, D), lse (B, N H)) of the branch for q (B, N H, D) and k, v (B, N K, D). If a head does
        not use a token, out is 0 and lse is `NOTHING`."""
        batch, _, head_dim = q.shape
        outs, lses = [], []
        for of_query, of_key, is_token, pads in self.parts:
            indexed = (q, of_query), (k, of_key), (v, of_key)
            rows = (x.index_select(1, index).reshape(-1, self.rows, head_dim) for x, index in indexed)
            out, lse = _softmax(*rows, is_token, pads, batch, spec, self.branch)
            outs.append(out.reshape(batch, -1, head_dim))
            lses.append(lse.reshape(batch, -1))
        out, lse = (x[0] if len(x) == 1 else torch.cat(x, 1) for x in (outs, lses))
        out, lse = out.index_select(1, self.back), lse.index_select(1, self.back)
        if self.used is None:
            return out, lse
        return torch.where(self.used[:, None], out, 0.0), torch.where(self.used, lse, NOTHING)


@dataclass(frozen=True)
class _Rows:
    """The layout of a branch's rows.

    Attributes:
        branch: the branch.
        offsets: (head, offset) for each of the J heads that the branch serves.
        tokens, heads: N and H.
        segments, rows: S and m; both may be larger than needed, and the extra rows are not tokens.
        width: w, or N + t if `whole`.
        whole: whether a sequence of any supported length fits into one segment.
        step: number of heads for which scores are computed in one step.
        device: the call's device.
    """

    branch: AnyBranch
    offsets: tuple[tuple[int, int], ...]
    tokens: Any
    heads: int
    segments: Any
    rows: Any
    width: Any
    whole: bool
    step: int
    device: torch.device

    @classmethod
    def of(cls, spec: CallSpec, branch: AnyBranch, q: Tensor, kv_heads: int, longest: int) -> _Rows:
        """Lay out the rows of a branch for q (B, N, H, D)."""
        batch, tokens, heads, _ = q.shape
        rate, shift, length = branch.dilation_rate, branch.shift, branch.segment_length
        offset = lambda h: spec.pattern.offset(branch, h, heads, kv_heads)  # noqa: E731
        offsets = tuple((h, offset(h)) for h in range(heads) if branch.serves(h))
        # a symbolic size must not be 1 for any N, so sizes that could be 1 are increased by 1
        symbolic = int(not isinstance(tokens, int))
        whole = length is None or length >= longest + shift
        width: Any
        if whole:
            width, segments, counted = tokens + shift, 1, 1
            rows, most = (width + rate - 1) // rate + (symbolic if rate > 1 else 0), -(-(longest + shift) // rate)
        else:
            width, counted = length, -(-(longest + shift) // length)
            segments = (tokens + shift + width - 1) // width + (symbolic if batch * len(offsets) == 1 else 0)
            rows = most = -(-width // rate)
        step = max(1, SCORES // (batch * counted * most * most))
        return cls(branch, offsets, tokens, heads, segments, rows, width, whole, step, q.device)

    @property
    def plain(self) -> bool:
        """True if row i of a head is token i, and all rows are tokens."""
        return self.whole and self.branch.dilation_rate == 1 and not self.branch.shift

    def places(self, group: int, spec: CallSpec) -> _Places:
        """Compute the index tensors; `group`: H / K."""
        parts = []
        for first in range(0, len(self.offsets), self.step):
            offsets = self.offsets[first : first + self.step]
            tokens, is_token = self._tokens(offsets)
            of_query, of_key = (
                tokens * (self.heads // each)
                + numbers([h // each for h, _ in offsets], self.device).index_select(0, self._head(len(offsets)))
                for each in (1, group)
            )
            parts.append((of_query, of_key, is_token, self._pads(is_token, spec)))
        return _Places(self.rows, self.branch, tuple(parts), *self._back())

    def _head(self, number: int) -> Tensor:
        """Return the index of each row's head, 0 to J - 1, as (S J m,)."""
        return _modulo(_over(torch.arange(self.segments * number * self.rows, device=self.device), self.rows), number)

    def _tokens(self, offsets: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor | None]:
        """Return two tensors (S J m,): each row's token, clamped to 0..N - 1, and a mask of real tokens or None."""
        number, rate, shift = len(offsets), self.branch.dilation_rate, self.branch.shift
        row = torch.arange(self.segments * number * self.rows, device=self.device)
        offset = numbers([o for _, o in offsets], self.device).index_select(0, self._head(number))
        within = _modulo(row, self.rows) * rate + offset
        place = _over(row, number * self.rows) * self.width + within - shift
        if self.plain:
            return place, None
        is_token = (within < self.width) & (place >= 0) & (place < self.tokens)
        return place.clamp(min=0, max=self.tokens - 1), is_token

    def _pads(self, is_token: Tensor | None, spec: CallSpec) -> Tensor | None:
        """Return the number of zero keys to add, ceil(min(w, N) / r) minus real keys, (S J, 1, 1); None: no padding."""
        if is_token is None or spec.causal or spec.pattern.padding != "attended":
            return None
        rate = self.branch.dilation_rate
        width = (torch.arange(self.tokens, device=self.device) < self.width).sum()
        return (_over(width + rate - 1, rate) - is_token.reshape(-1, self.rows).sum(-1))[:, None, None]

    def _back(self) -> tuple[Tensor, Tensor | None]:
        """Return two tensors (N H,): the row of each token and head, and a mask of tokens that heads use, or None."""
        rate, served = self.branch.dilation_rate, [h for h, _ in self.offsets]
        at = torch.arange(self.tokens * self.heads, device=self.device)
        head, place = _modulo(at, self.heads), _over(at, self.heads) + self.branch.shift
        segment, within = _over(place, self.width), _modulo(place, self.width)
        # for each head: number of heads in earlier groups, number in its group, index in the group, offset
        table: list[tuple[int, int, int, int]] = []
        for h in range(self.heads):
            i = served.index(h) if h in served else 0
            first = i // self.step * self.step
            table.append((first, min(self.step, len(served) - first), i - first, self.offsets[i][1]))
        before, number, index, offset = (
            numbers(list(x), self.device).index_select(0, head) for x in zip(*table, strict=True)
        )
        row = (before * self.segments + segment * number + index) * self.rows + _over(within, rate)
        used = None if rate == 1 else _modulo(within, rate) == offset
        if len(served) < self.heads:
            serves = numbers([int(h in served) for h in range(self.heads)], self.device).index_select(0, head) > 0
            used = serves if used is None else used & serves
        return row, used


def _near(branch: AnyBranch, causal: bool, at: Tensor) -> Iterator[Tensor]:
    """Yield masks (m, m) of (query row, key row) pairs in a segment; `at`: indices of the rows."""
    if causal:
        yield at <= at[:, None]
    if branch.width is not None:
        yield (at < at[:, None] + branch.width) & (at > at[:, None] - branch.width)
    if branch.tokens is not None:
        yield (at < branch.tokens) | (at[:, None] < branch.tokens)


def _softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_token: Tensor | None,
    pads: Tensor | None,
    batch: int,
    spec: CallSpec,
    branch: AnyBranch,
) -> tuple[Tensor, Tensor]:
    """Return dense attention within segments, (out (B S J, m, D), lse (B S J, m)); undefined in rows without tokens."""
    scores = (q * spec.scale) @ k.transpose(-1, -2)
    mask = None if is_token is None else is_token.reshape(-1, 1, q.shape[1])
    if batch > 1:
        mask, pads = (None if x is None else torch.cat([x] * batch) for x in (mask, pads))
    for near in _near(branch, spec.causal, torch.arange(q.shape[1], device=q.device)):
        mask = near if mask is None else mask & near
    if mask is not None:
        scores = torch.where(mask, scores, NOTHING)
    top = scores.amax(-1, keepdim=True)
    if pads is not None:  # zero keys have scores of 0
        top = torch.where(pads > 0, top.clamp(min=0.0), top)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    if pads is not None:
        total = total + pads * torch.where(pads > 0, -top, NOTHING).exp()
    return (weights @ v) / total, (top + total.log())[..., 0]
