"""DilatedPattern: the validated, immutable description of the positions that attend to each other.

Shape letters: H query heads, Hkv kv heads, N tokens, w segment length, r dilation rate, t shift, o offset.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from lightning_dilated._extensions import hook
from lightning_dilated._validation import flag, integer, known_keys, one_of, real
from lightning_dilated.pattern.branch import AnyBranch, Branch, BranchLike, Window, join_residues, read_branch
from lightning_dilated.pattern.rows import counts

if TYPE_CHECKING:
    import torch

    from lightning_dilated.pattern import Explanation


OFFSETS = ("interleaved", "blocked")
OFFSET_HEADS = ("query", "kv")
PADDING = ("masked", "attended")
#: limits on the branches of a pattern and on the layers and query heads of a model, because files may hold any number
BRANCHES, LAYERS, HEADS = 1024, 10_000, 65_536


@dataclass(frozen=True)
class DilatedPattern:
    """Branches of dilated attention for any sequence length; immutable and hashable.

    Args:
        branches: `Branch`, `Window` and `Global` objects, (segment_length, dilation_rate) pairs, or mappings of their
            fields. A window of rate r becomes r windows, one for each residue.
        offsets: the rule for the offset of head h in a branch of rate r: "interleaved" is h mod r (the LongNet paper),
            "blocked" is h // ceil(H / r) (torchscale and GigaPath checkpoints). A branch's `offset` takes precedence.
        offset_heads: "query", or "kv": in grouped-query attention, the offset follows the kv head.
        padding: "masked", or "attended" to reproduce released checkpoints, in which zero pads get softmax weight.

    Raises:
        TypeError, ValueError: if an argument is invalid. The message states the branch and the argument.
    """

    branches: tuple[AnyBranch, ...]
    offsets: str = "interleaved"
    offset_heads: str = "query"
    padding: str = "masked"
    #: the pattern as one string, for the compiled op
    code: str = field(init=False, repr=False, compare=False, default="")

    if TYPE_CHECKING:  # the generated __init__ would not accept pairs and mappings, which `__post_init__` converts

        def __init__(
            self,
            branches: Iterable[BranchLike],
            offsets: str = "interleaved",
            offset_heads: str = "query",
            padding: str = "masked",
        ) -> None: ...

    def __post_init__(self) -> None:
        if isinstance(self.branches, (str, bytes, Mapping, AnyBranch)) or not isinstance(self.branches, Iterable):
            raise TypeError(
                "branches must be a list of Branch, Window, Global or (segment_length, dilation_rate), "
                f"got {self.branches!r}."
            )
        listed = [read_branch(b, f"branches[{i}]") for i, b in enumerate(self.branches)]
        count = sum(x.dilation_rate if isinstance(x, Window) and x.offset is None else 1 for x in listed)
        if count > BRANCHES:
            raise ValueError(
                f"the pattern has {count:,} branches, a window of rate r counted as r, and may have at most {BRANCHES:,}."
            )
        branches = tuple(x for b in listed for x in b.residues())
        if not branches:
            raise ValueError("branches is empty: a pattern needs at least one branch, such as Branch(2048, 1).")
        object.__setattr__(self, "branches", branches)
        for name, allowed in (("offsets", OFFSETS), ("offset_heads", OFFSET_HEADS), ("padding", PADDING)):
            one_of(getattr(self, name), name, allowed)
        if self.padding == "attended":
            for i, branch in enumerate(listed):
                if branch.shift:
                    raise ValueError(
                        f"branches[{i}]: padding='attended' reproduces unshifted releases, so shift={branch.shift} "
                        "is not defined for it. Use shift=0, or padding='masked'."
                    )
                if not isinstance(branch, Branch):
                    raise ValueError(
                        f"branches[{i}]: padding='attended' reproduces releases without windows and global tokens, so it is "
                        f"not defined for {branch}. Use padding='masked'."
                    )
        object.__setattr__(self, "code", json.dumps(self.to_dict(), separators=(",", ":")))

    # -- constructors -----------------------------------------------------------------------------------------------
    @classmethod
    def longnet(cls, segment_lengths: Sequence[int], dilation_rates: Sequence[int], **kwargs: Any) -> DilatedPattern:
        """Make a pattern in which every head uses every branch, as in LongNet (arXiv 2307.02486, section 2.3)."""
        return cls(_paired(segment_lengths, dilation_rates), **kwargs)

    @classmethod
    def geometric(cls, first: int, last: int, ratio: int = 2, **kwargs: Any) -> DilatedPattern:
        """Make branches `(first, 1), (first * ratio, ratio), (first * ratio**2, ratio**2), ...` up to segment `last`.

        Args:
            kwargs: `offsets`, `offset_heads` and `padding` of the pattern.

        Raises:
            ValueError: if `last` is not `first` times a power of `ratio`.
        """
        first, ratio = integer(first, "first", 1), integer(ratio, "ratio", 2)
        last = integer(last, "last", first, f" It is the longest segment, and first={first}.")
        steps = [(first, 1)]
        while steps[-1][0] < last:
            steps.append((steps[-1][0] * ratio, steps[-1][1] * ratio))
        if steps[-1][0] != last:
            raise ValueError(
                f"last must be first times a power of ratio ({first} * {ratio}^k), got {last}; "
                f"the nearest are {steps[-2][0]} and {steps[-1][0]}."
            )
        return cls(tuple(steps), **kwargs)

    @classmethod
    def head_groups(
        cls, segment_lengths: Sequence[int], dilation_rates: Sequence[int], num_heads: int, **kwargs: Any
    ) -> DilatedPattern:
        """Make a pattern in which each branch i serves a separate group of heads, with offset i mod r_i.

        If `num_heads` is not a multiple of the number of branches, the first groups have one more head.

        Raises:
            ValueError: if the lists differ in length, or there are fewer heads than branches.
        """
        plain = cls(_paired(segment_lengths, dilation_rates)).branches  # checked, with the branch named in errors
        num_heads = integer(num_heads, "num_heads", 1)
        if num_heads < len(plain):
            raise ValueError(f"head_groups needs a head for each of {len(plain)} branches, got num_heads={num_heads}.")
        share, larger_groups = divmod(num_heads, len(plain))
        branches, start = [], 0
        for i, branch in enumerate(plain):
            stop = start + share + (i < larger_groups)
            length, rate, heads = branch.segment_length, branch.dilation_rate, tuple(range(start, stop))
            branches.append(Branch(length, rate, heads=heads, offset=i % rate))
            start = stop
        return cls(tuple(branches), **kwargs)

    @staticmethod
    def hybrid(
        depth: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        local: int = 2048,
        global_every: int = 4,
        global_heads: int | Literal["all"] = 1,
        far: DilatedPattern | Mapping[str, Any] | None = None,
        shifted: bool = True,
        global_first: int | None = None,
        window: bool = False,
    ) -> list[DilatedPattern]:
        """Make the patterns of `depth` layers with local segments, and with a few heads that see the whole sequence.

        In layers `global_first`, `global_first + global_every`, ..., the last `global_heads` kv heads and their query
        heads have dense attention over the whole sequence. All other heads have segments of `local` tokens.

        Args:
            depth: layers of the model.
            num_heads, num_kv_heads: query heads and kv heads of the model; None means one kv head per query head.
            local: tokens of a local segment.
            global_every: distance between layers with dense heads.
            global_heads: number of dense kv heads in such a layer; "all" gives it ordinary attention.
            far: a pattern of further branches for layers without dense heads; its other fields apply to all layers.
            shifted: whether local segments of layers 1, 3, ... begin half a segment earlier, so that consecutive layers
                have different boundaries.
            global_first: first layer with dense heads, counted from 0; None means `global_every - 1`. A model learned
                to copy over about 32,768 tokens with None, not with 0 (benchmarks/results/2026-11-24_h100_strains.md).
                To look up single keys, use 0 and `kv_conv`: at 65,536 tokens, four layers recalled 99.99 % with a dense
                head in layer 0, but 0.06 % with one in layer 3 (benchmarks/results/2026-11-24_h100_recall_first.md).
                With dense heads in both layer 0 and the default layers, models recalled keys, but only one of two
                seeds learned to copy (benchmarks/results/2026-11-25_h200_learning.md).
            window: whether to use sliding windows of `local` tokens, which have no boundaries, in place of segments.

        Raises:
            TypeError, ValueError: if an argument is invalid. The message names it.
        """
        depth, local, window = (
            integer(depth, "depth", 1, most=LAYERS),
            integer(local, "local", 1),
            flag(window, "window"),
        )
        num_heads, num_kv_heads = DilatedPattern.dense(local).check_heads(num_heads, num_kv_heads)
        global_every = integer(global_every, "global_every", 1)
        first = _first_global_layer(depth, global_every, global_first)
        dense = num_heads
        if global_heads != "all":
            kv_heads = integer(global_heads, "global_heads", 1, ' Or "all".')
            if kv_heads > num_kv_heads:
                raise ValueError(f"global_heads={kv_heads} is above the {num_kv_heads} kv heads of the model.")
            dense = num_heads // num_kv_heads * kv_heads
        rules: dict[str, Any] = {}
        far_branches: tuple[AnyBranch, ...] = ()
        if far is not None:
            far = DilatedPattern.from_dict(far)
            far_branches = far.branches
            rules = {"offsets": far.offsets, "offset_heads": far.offset_heads, "padding": far.padding}
        layers = []
        for layer in range(depth):
            near: AnyBranch = Window(local) if window else Branch(local, 1, local // 2 if shifted and layer % 2 else 0)
            branches: tuple[AnyBranch, ...]
            if layer < first or (layer - first) % global_every:
                branches = (near, *far_branches)
            elif dense == num_heads:
                branches = (Branch(None, 1),)
            else:
                split = num_heads - dense
                far_heads = tuple(range(split, num_heads))
                branches = (replace(near, heads=tuple(range(split))), Branch(None, 1, heads=far_heads))
            layers.append(DilatedPattern(branches, **rules))
        return layers

    @classmethod
    def dense(cls, segment_length: int | None = None, **kwargs: Any) -> DilatedPattern:
        """Make a pattern of ordinary attention over the whole sequence, or in segments of `segment_length` tokens."""
        return cls((Branch(segment_length, 1),), **kwargs)

    def shifted(self, fraction: float = 0.5, below: int | None = None) -> DilatedPattern:
        """Return the pattern with segments of w < `below` (all finite segments if None) shifted by floor(fraction * w).

        Shifts in every second layer remove the walls of nested segments (see `explain`).
        """
        real(fraction, "fraction", least=0, below=1, hint=" 0.5 shifts by half a segment.")
        if below is not None:
            below = integer(below, "below", 1)
        branches = (
            b
            if not isinstance(b, Branch)
            or b.segment_length is None
            or (below is not None and b.segment_length >= below)
            else replace(b, shift=math.floor(fraction * b.segment_length))
            for b in self.branches
        )
        return replace(self, branches=tuple(branches))

    # -- plain values ----------------------------------------------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        """Return plain values for YAML, JSON and checkpoints; `from_dict` makes an equal pattern from them."""
        return {
            "branches": [b.to_dict() for b in join_residues(self.branches)],
            "offsets": self.offsets,
            "offset_heads": self.offset_heads,
            "padding": self.padding,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | DilatedPattern) -> DilatedPattern:
        """Make a pattern from the values of `to_dict`, or from {segment_lengths, dilation_rates, ...} as in `longnet`.

        Raises:
            TypeError: if `values` is neither a mapping nor a pattern.
            ValueError: if a mapping has neither or both of these forms, or unknown keys.
        """
        if isinstance(values, DilatedPattern):
            return values
        if not isinstance(values, Mapping):
            raise TypeError(
                f"a pattern is given as a mapping with branches, or with segment_lengths and dilation_rates; got {values!r}."
            )
        rules = ("offsets", "offset_heads", "padding")
        known_keys(values, "pattern", ("branches", "segment_lengths", "dilation_rates", *rules))
        options = {name: values[name] for name in rules if name in values}
        lists = [name for name in ("segment_lengths", "dilation_rates") if name in values]
        if ("branches" in values) == bool(lists) or len(lists) == 1:
            raise ValueError(
                "pattern needs either branches, or both segment_lengths and dilation_rates; "
                f"got {', '.join(values) or 'nothing'}."
            )
        if lists:
            return cls.longnet(values["segment_lengths"], values["dilation_rates"], **options)
        return cls(values["branches"], **options)

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def decode(code: str) -> DilatedPattern:
        """Return the pattern with this `code`."""
        return DilatedPattern.from_dict(json.loads(code))

    def __repr__(self) -> str:
        plain = lambda b: isinstance(b, Branch) and not (b.shift or b.heads or b.offset is not None)  # noqa: E731
        inner = ", ".join(
            f"({b.segment_length}, {b.dilation_rate})" if plain(b) else repr(b) for b in join_residues(self.branches)
        )
        defaults = (("offsets", "interleaved"), ("offset_heads", "query"), ("padding", "masked"))
        rules = "".join(f", {name}={getattr(self, name)!r}" for name, value in defaults if getattr(self, name) != value)
        return f"DilatedPattern([{inner}]{rules})"

    # -- geometry ---------------------------------------------------------------------------------------------------
    def offset(self, branch: AnyBranch, head: int, num_heads: int, num_kv_heads: int | None = None) -> int:
        """Return the residue o that query head `head` uses in `branch` (index mod r == o)."""
        if branch.offset is not None:
            return branch.offset
        total = num_heads
        if self.offset_heads == "kv":
            total = num_kv_heads or num_heads
            head = head * total // num_heads
        r = branch.dilation_rate
        return head % r if self.offsets == "interleaved" else head // -(-total // r)

    def listed(self, number: int) -> tuple[int, AnyBranch]:
        """Return (index, branch) of `branches[number]` in the user's list, in which a window of rate r is one branch.

        Raises:
            IndexError: if there is no such branch.
        """
        for index, branch in enumerate(join_residues(self.branches)):
            number -= len(branch.residues())
            if number < 0:
                return index, branch
        raise IndexError(f"the pattern has {len(self.branches)} branches.")

    def check_heads(self, num_heads: int, num_kv_heads: int | None = None) -> tuple[int, int]:
        """Return (H, Hkv), after a check that the model has the heads of every branch.

        Raises:
            ValueError: if a head does not exist, Hkv does not divide H, or offset_heads="kv" and a branch splits a kv group.
        """
        num_heads = integer(num_heads, "num_heads", 1, most=HEADS)
        num_kv_heads = num_heads if num_kv_heads is None else integer(num_kv_heads, "num_kv_heads", 1)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads={num_kv_heads} must divide num_heads={num_heads}.")
        group = num_heads // num_kv_heads
        for i, branch in enumerate(join_residues(self.branches)):
            if branch.heads is None:
                continue
            if branch.heads[-1] >= num_heads:
                raise ValueError(
                    f"branches[{i}] serves head {branch.heads[-1]}, but there are only {num_heads} query heads "
                    f"(0..{num_heads - 1}). Change branches[{i}].heads or the number of heads."
                )
            if self.offset_heads == "kv" and any(
                (h // group * group + j) not in branch.heads for h in branch.heads for j in range(group)
            ):
                raise ValueError(
                    f"branches[{i}].heads={list(branch.heads)} splits a group of {group} query heads that share a kv head; "
                    "offset_heads='kv' takes whole groups only. Name whole groups, or use offset_heads='query'."
                )
        return num_heads, num_kv_heads

    def counts(
        self,
        seq_len: int,
        num_heads: int,
        causal: bool,
        num_kv_heads: int | None = None,
        cu_seqlens: Sequence[int] | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return c(p, j, h), the number of branches in which query p sees key j. This count defines the op.

        Returns:
            (H, N, N) int64 on the CPU, indexed [head, query, key]. Memory O(H N^2).
        """
        return counts(self, seq_len, num_heads, causal, num_kv_heads, cu_seqlens)

    def explain(
        self, seq_len: int, num_heads: int, depth: int, causal: bool, num_kv_heads: int | None = None
    ) -> Explanation:
        """Return a printable report: walls, dead residues, layers to full reach, FLOPs, keys per row, pairs by distance.

        It is for `depth` layers with this pattern at `seq_len` tokens. If layers differ, call `model.explain(seq_len)`.
        """
        return hook("explain patterns")(self, seq_len, num_heads, depth, causal, num_kv_heads)

    def plot(
        self,
        seq_len: int,
        num_heads: int,
        causal: bool,
        path: str | None = None,
        head: int | None = None,
        num_kv_heads: int | None = None,
    ) -> Any:
        """Plot the attention pattern as a matplotlib Figure, and write it to `path` unless `path` is None.

        With `head`, the figure shows only this head. Otherwise it shows all heads together, and up to three single
        heads, if possible with different branches.
        """
        return hook("plot a pattern")(self, seq_len, num_heads, causal, path, head, num_kv_heads)


def _first_global_layer(depth: int, every: int, first: int | None) -> int:
    if first is None and every > depth:
        raise ValueError(
            f"global_every={every} leaves none of {depth} layers with a dense head: it must be at most depth."
        )
    first = every - 1 if first is None else integer(first, "global_first", 0)
    if first >= depth:
        raise ValueError(f"global_first={first} is none of the layers 0 to {depth - 1}.")
    return first


def _paired(segment_lengths: Any, dilation_rates: Any) -> tuple[tuple[int, int], ...]:
    """Return ((w, r), ...) from two lists of equal length."""
    for name, values in (("segment_lengths", segment_lengths), ("dilation_rates", dilation_rates)):
        if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
            raise TypeError(f"{name} must be a list of integers, got {values!r}.")
    lengths, rates = list(segment_lengths), list(dilation_rates)
    if len(lengths) != len(rates):
        raise ValueError(
            f"segment_lengths has {len(lengths)} entries {lengths} and dilation_rates {len(rates)} {rates}; "
            "a branch takes one of each, so the lists must be equally long."
        )
    return tuple(zip(lengths, rates, strict=True))
