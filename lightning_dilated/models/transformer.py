"""The stack of blocks that all models share; rotary bases and advice about them; initial weights; counts of FLOPs.

Shape letters: B batch, N tokens, w segment length, E embedding dim, V vocabulary, D head dim.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dilated._compat.torch import allow_recompiles, uncompiled
from lightning_dilated._device import send
from lightning_dilated._extensions import hook
from lightning_dilated._validation import integer
from lightning_dilated.attention.context import LayerPlace
from lightning_dilated.attention.functional import autocast
from lightning_dilated.attention.mixer import Mixer
from lightning_dilated.attention.modules import MultiheadDilatedAttention
from lightning_dilated.attention.rotary import Rotary, RotaryTable
from lightning_dilated.memory.block_memory import BlockAttention, BlockSizes, StackMemory
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.models.blocks import BlockOptions, TransformerBlock, default_hidden, drop_path_factors, make_norm
from lightning_dilated.models.documents import Documents
from lightning_dilated.pattern import DilatedPattern, Hashed
from lightning_dilated.pattern.rows import cycle_to, dense_branches, pairs, pairs_of_part, shortest_cycle, window_reach
from lightning_dilated.recurrence import Recurrence
from lightning_dilated.sequence import SequenceSpec

#: values of a model's `rotary_base`
BasesLike: TypeAlias = float | str | Sequence[float | str] | None

#: the rotary base if the length of sequences is unknown
USUAL = 10_000.0
#: "Base of RoPE Bounds Context Length" (arXiv 2405.14591), equation 13: the smallest base for N tokens is 0.0424 N^1.628
FACTOR, POWER = 0.0424, 1.628
#: tolerance, because the constants have three digits: the base 1e4 suffices for 1,996 tokens, but is accepted for 2,048
TOLERANCE = 1.05


def base_of_length(seq_len: int) -> float:
    """Return the rotary base for sequences of N tokens: max(1e4, 0.0424 N^1.628), rounded up to a power of ten."""
    least = FACTOR * integer(seq_len, "max_seq_len", 1) ** POWER
    return max(USUAL, 10.0 ** math.ceil(math.log10(least)))


def served_length(base: float) -> int:
    """Return the longest distance, in tokens, for which a rotary base suffices by the bound of `base_of_length`."""
    return int((base / FACTOR) ** (1 / POWER))


def layer_bases(
    rotary_base: BasesLike, max_seq_len: int | None, depth: int, position_encoding: str = "rotary"
) -> tuple[float | None, ...]:
    """Return the rotary base of each of `depth` layers; None for a layer without positions.

    Args:
        rotary_base: a number; "length" for `base_of_length(max_seq_len)`; "none" for no positions; a list of these for
            layers 0, 1, ..., which repeats; or None: "length" if `max_seq_len` is set, else 10,000.
        max_seq_len: the length of the longest sequence that the model is made for.
        depth: number of layers.
        position_encoding: the model's option; with "none" no layer has positions.

    Raises:
        TypeError, ValueError: for another value, a list that is empty or longer than `depth`, and "length" without
            `max_seq_len`.
    """
    if max_seq_len is not None:
        max_seq_len = integer(max_seq_len, "max_seq_len", 1)
    if rotary_base is None:  # xPos decays with the distance for any base
        rotary_base = USUAL if max_seq_len is None or position_encoding == "xpos" else "length"
    values = list(rotary_base) if isinstance(rotary_base, (list, tuple)) else [rotary_base]
    if not 1 <= len(values) <= depth:
        raise ValueError(
            f"rotary_base lists {len(values)} bases for {depth} layers: it takes 1 to {depth}, and repeats."
        )
    bases = [_base(value, max_seq_len) for value in values]
    return (None,) * depth if position_encoding == "none" else cycle_to(bases, depth)


def _base(value: float | str, max_seq_len: int | None) -> float | None:
    if value == "none":
        return None
    if value == "length":
        if max_seq_len is None:
            raise ValueError(
                'rotary_base="length" needs max_seq_len, the most tokens of a sequence that the model is made for. Set it, '
                "or give rotary_base as a number."
            )
        return base_of_length(max_seq_len)
    if isinstance(value, (bool, str)) or not isinstance(value, (int, float)):
        raise TypeError(f'rotary_base must be a number, "length", "none", or a list of those; got {value!r}.')
    if not 1 < value < math.inf:
        raise ValueError(f"rotary base must be above 1 and finite, got {value!r}; 10000 is usual.")
    return float(value)


def stored_bases(bases: Sequence[float | None]) -> float | str | list[float | str]:
    """Return the bases of all layers as numbers, in the form that `rotary_base` takes, to store them in a checkpoint."""
    cycle = ["none" if base is None else base for base in shortest_cycle(bases)]
    return cycle[0] if len(cycle) == 1 else cycle


def rotary_hint(
    bases: Sequence[float | None],
    patterns: Sequence[DilatedPattern],
    seq_len: int | None,
    max_seq_len: int | None = None,
    global_rotary: bool = True,
) -> str | None:
    """Return advice if a layer attends over distances that are too long for its rotary base, else None.

    Args:
        bases, patterns: one for each layer.
        seq_len: N; None: the model's `max_seq_len`, or any length if that is None.
        max_seq_len, global_rotary: the model's options.
    """
    longest = seq_len or max_seq_len or math.inf
    for layer, (base, pattern) in enumerate(zip(bases, patterns, strict=True)):
        if base is None:
            continue
        unrotated = () if global_rotary else dense_branches(pattern)
        reach = (b.segment_length or window_reach(b) or math.inf for b in pattern.branches if b not in unrotated)
        width = min(max(reach, default=0), longest)
        if width > TOLERANCE * served_length(base):
            wide = "the whole sequence" if width == math.inf else f"{width:,} tokens"
            if longest <= (max_seq_len or 0):
                remedy = f'Set rotary_base to "length", which is {base_of_length(max_seq_len or 1):g} here'
            else:
                remedy = f"Set max_seq_len to the longest sequence{'' if longest == math.inf else f', {longest:,},'}"
                remedy += ' and rotary_base to "length"'
            return (
                f"rotary_base={base:g} serves {served_length(base):,} tokens between a query and a key (arXiv 2405.14591), "
                f"and layer {layer} attends over {wide}: equal tokens further apart score no better than others. {remedy}."
            )
    return None


def step_flops(module: nn.Module, tokens: int, documents: Sequence[int | range], training: bool = True) -> int:
    """Count the FLOPs of a module's blocks and of its output projection `head`, on all ranks together.

    A product with a matrix of P weights costs 2 P a token forward and 4 P backward. Half of the backward is for the
    weight's gradient, unless the weight is frozen; half is for the input's gradient, unless all earlier parameters are
    frozen. A pair of a query and a key costs 4 D forward and 10 D backward, or 6 D backward for a key that truncated
    back-propagation carries without gradient; 0 if all earlier parameters are frozen. A recurrence costs twice as much
    backward as forward (`Recurrence.flops`). Parameters are assumed to be used in the module's order. As usual, norms,
    activations, recomputation and pooled heads are not counted (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).

    Args:
        tokens: number of tokens in all samples, including padding.
        documents: the number of tokens of each document or unpadded sample. In a causal module, a range of positions
            in a document instead of a number means that its tokens also attend to carried keys before the range.
        training: count forward and backward; False: forward only.

    Raises:
        ValueError: for a module without a TransformerBlock.
    """
    blocks = [m for m in module.modules() if isinstance(m, TransformerBlock)]
    stacks = [m for m in module.modules() if isinstance(m, StackMemory) and not isinstance(m, DilatedTransformer)]
    if not blocks and not stacks:
        raise ValueError(f"{type(module).__name__} has no TransformerBlock whose FLOPs could be counted.")
    before = _trained_before(module) if training else {}
    passes = lambda p, early: 1 + (training and p.requires_grad) + early  # noqa: E731 - products with a matrix
    products = features = 0
    for block in blocks:
        products += sum(p.numel() * passes(p, before.get(p, False)) for p in block.parameters() if p.ndim >= 2)
        a = block.attention_layer
        backward = before.get(next(a.out_proj.parameters()))
        for document, times in Counter(documents).items():
            local, carried = _pairs(a, document)
            features += a.head_dim * times * (local * (14 if backward else 4) + carried * (10 if backward else 4))
        features += tokens * sum(mixer.token_flops for mixer in a.mixers) * (3 if backward else 1)
    for stack in stacks:
        for block, a in zip(stack.blocks, stack.attentions(), strict=True):
            first, alike = next(block.parameters()), stack.projections(block)
            early_of = lambda p: before.get(first if p in alike else p, False)  # noqa: B023, E731
            products += sum(p.numel() * passes(p, early_of(p)) for p in block.parameters() if p.ndim >= 2)
            backward = before.get(list(block.parameters())[-1])
            for document, times in Counter(documents).items():
                reached = pairs(a.pattern, int(document), a.num_heads, a.num_kv_heads, a.causal)
                features += a.head_dim * times * reached * (14 if backward else 4)
        if (weight := stack.logit_weight()) is not None:
            products += weight.numel() * (1 + training * weight.requires_grad + (training and any(before.values())))
    if getattr(module, "vocab_size", None) and isinstance(getattr(module, "head", None), nn.Linear):
        head = module.head.weight
        early = training and any(
            p.requires_grad for m in module.children() if m is not module.head for p in m.parameters()
        )
        products += head.shape[1] * module.vocab_size * passes(head, early)
    return (2 * products * tokens + features) * (2 if getattr(module, "strands", "forward") == "both" else 1)


def _pairs(a: MultiheadDilatedAttention, document: int | range) -> tuple[int, int]:
    """Return the numbers of query-key pairs: with keys inside the document (or its range), and with carried keys."""
    if isinstance(document, range):
        return pairs_of_part(a.attention.pattern, document, a.num_heads, a.num_kv_heads)
    return pairs(a.attention.pattern, document, a.num_heads, a.num_kv_heads, a.attention.causal), 0


def _trained_before(module: nn.Module) -> dict[nn.Parameter, bool]:
    """Return {parameter: whether any earlier parameter is trained}."""
    before, so_far = {}, False
    for p in module.parameters():
        before[p] = so_far
        so_far = so_far or p.requires_grad
    for block in (m for m in module.modules() if isinstance(m, TransformerBlock) and m.ffn.gate is not None):
        gate = before[next(block.ffn.gate.parameters())]
        before.update(dict.fromkeys(block.ffn.fc1.parameters(), gate))  # gate and fc1 have the same input
    return before


class Inputs(NamedTuple):
    """The tensors that a stack of blocks takes.

    Attributes:
        x: hidden states (B, N, E).
        lengths: (B,), the number of tokens of each sample, if samples are padded.
        cu_seqlens: (D + 1,), the bounds of the documents that are packed into one row.
        positions: (N,) or (B, N), the positions of the tokens.
        drops: factors of stochastic depth: (depth, 2, B, 1, 1), or (depth, 2, 1, N, 1) with documents.
    """

    x: Tensor
    lengths: Tensor | None = None
    cu_seqlens: Tensor | None = None
    positions: Tensor | None = None
    drops: Tensor | None = None


class DilatedTransformer(StackMemory):
    """A stack of blocks and a last norm; blocks with the same rotary base share a table.

    Args:
        dim: E.
        patterns: one for each block.
        num_heads, num_kv_heads, causal, options: the same for every block.
        hidden: hidden features of the feed-forward; None: `default_hidden`.
        rotary_bases: one for each block, with None for a block without positions; None: `options.rotary_base` for all.
        recurrences: one for each block, with None for a block without recurrence; None: no recurrences.
        hashed: one for each block, with None for a block without hashed heads; None: no hashed heads.
    """

    def __init__(
        self,
        dim: int,
        patterns: Sequence[DilatedPattern],
        num_heads: int,
        *,
        causal: bool,
        hidden: int | None = None,
        num_kv_heads: int | None = None,
        options: BlockOptions | None = None,
        rotary_bases: Sequence[float | None] | None = None,
        recurrences: Sequence[Recurrence | None] | None = None,
        hashed: Sequence[Hashed | None] | None = None,
    ) -> None:
        super().__init__()
        options = options or BlockOptions()
        integer(len(patterns), "depth", 1)
        hidden = integer(hidden, "ffn_dim", 1) if hidden is not None else default_hidden(dim, options.ffn)
        nothing = [None] * len(patterns)
        layers = [options] * len(patterns) if rotary_bases is None else [options.with_base(x) for x in rotary_bases]
        self.blocks = nn.ModuleList(
            TransformerBlock(
                dim,
                num_heads,
                hidden,
                pattern,
                causal=causal,
                num_kv_heads=num_kv_heads,
                options=layer,
                recurrence=memory,
                hashed=codes,
            )
            for pattern, layer, memory, codes in zip(
                patterns, layers, recurrences or nothing, hashed or nothing, strict=True
            )
        )
        self.norm = make_norm(options.norm, dim)
        self.drop_path = options.drop_path
        self.residual_dtype = options.residual_dtype and getattr(torch, options.residual_dtype)
        #: the rotary positions of each block, or None for a block without positions
        self.rotaries: list[Rotary | None] = [block.attention.rotary for block in self.blocks]
        #: CUDA graphs of the blocks' training step; None: kernels are launched without graphs
        self.graphs: Any = None

    def residual(self, x: Tensor) -> Tensor:
        """Cast x to the dtype of the hidden states between blocks; callers cast early to free the wider x."""
        return x if self.residual_dtype is None else x.to(self.residual_dtype)

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        caches: Sequence[Any] | None = None,
        chunk: Sequence[LayerPlace] | None = None,
        watch: Callable[[Tensor], None] | None = None,
        normed: bool = True,
    ) -> Tensor:
        """Map (B, N, E) to (B, N, E).

        Args:
            positions: (N,), in the whole sequence; None: from 0 on, or from the number of cached tokens on.
            lengths, cu_seqlens: see `dilated_attention`.
            caches: one for each block.
            chunk: each block's `LayerPlace`, if x is a chunk of a stream; needs `positions`.
            watch: a function that is called with the input and with every block's output.
            normed: whether to apply the last norm.
        """
        x = self.residual(x)
        drops = self._drops(x, cu_seqlens) if caches is None else None
        inputs = Inputs(x, lengths, cu_seqlens, positions, drops)
        options: dict[str, Any] = {"caches": caches, "chunk": chunk, "watch": watch}
        if self._replays(inputs, options):
            x = self.graphs(self._compute, self.blocks, inputs)
        else:
            x = self._compute(inputs, **options)
        del inputs  # free memory for the norm
        return self.norm(x) if normed else x

    def _drops(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor | None:
        """Return factors of stochastic depth (depth, 2, B, 1, 1), or (depth, 2, 1, N, 1) for documents."""
        rate = self.drop_path if self.training else 0.0
        if cu_seqlens is None or rate == 0:
            return drop_path_factors(rate, len(self.blocks), x)
        documents = Documents.of(cu_seqlens, x.shape[1])
        drops = drop_path_factors(rate, len(self.blocks), x, len(documents))
        return drops[:, :, send(documents.number, x.device), 0][:, :, None]  # type: ignore[index]

    def _replays(self, inputs: Inputs, options: Mapping[str, Any]) -> bool:
        """Return True if CUDA graphs can replay a call with these arguments; otherwise log the reason."""
        if self.graphs is None:
            return False
        named = [name for name, value in options.items() if value is not None]
        reason = self.graphs.why_not(self.blocks, inputs.x)
        if reason is None and (named or self.memory != MemorySettings()):
            reason = f"it is called with {named[0]}" if named else f"its memory settings are {self.memory}"
        if reason is None and inputs.positions is not None and any(r and r.xpos_scale_base for r in self.rotaries):
            reason = "xPos checks the range of the positions that it is called with on the host"
        if reason:
            self.graphs.log_reason(reason)
        return reason is None

    def _compute(
        self,
        inputs: Inputs,
        caches: Sequence[Any] | None = None,
        chunk: Sequence[LayerPlace] | None = None,
        watch: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        x, lengths, cu_seqlens, positions, drops = inputs
        tables = self._tables(x, positions, caches)
        shared = {"lengths": lengths, "cu_seqlens": cu_seqlens}
        if caches is None:
            none = itertools.repeat(None)
            each = zip(self.blocks, tables, none if drops is None else drops, chunk or none, strict=False)
            layers = [partial(block, **shared, positions=t, drop=drop, cache=place) for block, t, drop, place in each]
        else:  # not compiled: every new token changes the length, and would cause another compilation
            each = zip(self.blocks, tables, caches, strict=True)
            layers = [partial(uncompiled(block), **shared, positions=t, cache=cache) for block, t, cache in each]
        if watch is not None:
            watch(x)
            layers = [partial(_watched, layer, watch) for layer in layers]
        return self._run(layers, x, grouped=watch is None)

    def _tables(self, x: Tensor, positions: Tensor | None, caches: Sequence[Any] | None) -> list[RotaryTable | None]:
        """Return each block's table of rotary positions; blocks with the same base share a table."""
        dtype = autocast(x[:0])[0].dtype  # the dtype of q and k, in which xPos factors must not overflow
        start, furthest, tables = caches[0].length if caches else 0, None, {}
        if caches and positions is None:
            positions, furthest = caches[0].token_positions(x)
        for rotary in self.rotaries:
            if rotary is not None and rotary.base not in tables:
                tables[rotary.base] = rotary.table(x, dtype, positions, start, furthest)
        return [None if rotary is None else tables[rotary.base] for rotary in self.rotaries]

    # -- for planning --------------------------------------------------------------------------------------------------
    def attentions(self) -> list[BlockAttention]:
        """Describe the attention of each block."""
        layers = [(block.attention_layer, block.attention_layer.attention) for block in self.blocks]
        return [
            BlockAttention(a.pattern, x.num_heads, x.num_kv_heads, x.head_dim, a.causal, a.dropout, a.engine)
            for x, a in layers
        ]

    def sizes(self) -> BlockSizes:
        """Return the sizes of the first block; only `windows` describes all blocks."""
        block = self.blocks[0]
        inner, weight = block.attention_layer, block.attention_layer.in_proj_weight
        updated = (0, 0)
        if block.attention is not inner:
            trained = [sum(p.numel() for p in m.parameters() if p.requires_grad) for m in (block.attention, inner)]
            updated = (weight.numel(), trained[0] - trained[1]) if trained[0] > trained[1] else updated
        feed_forward = sum(p.numel() for p in block.ffn.parameters())
        windows = not any(mixer.adds for x in self.blocks for mixer in x.attention_layer.mixers)
        sizes = weight.shape[1], block.ffn.fc1.out_features, weight.numel(), feed_forward
        return BlockSizes(*sizes, windows=windows, updated=updated)

    def compile_blocks(self) -> None:
        """Compile each block in place, as one graph; compiled blocks need a rotary table instead of positions."""
        layers = [block.attention_layer for block in self.blocks]
        kinds = len({(x.attention.pattern, x.hashed is None) for x in layers})
        # 24 graphs are enough for a kind: with or without gradients, for sequences or chunks, of fixed or of any length
        allow_recompiles(24 * kinds)
        for block in self.blocks:
            block.compile(fullgraph=True)

    def new_caches(self, max_length: int | None = None, lengths: Sequence[int] | None = None) -> list[Any]:
        """Make an empty cache for every block.

        Args:
            max_length: maximum number of tokens of a sample, to allocate caches at their final size; see `KVCache`.
            lengths: the number of tokens of each sample's prompt, if prompts are padded on the right; see `Clock`.
        """
        return hook("caches of a stack")(self, max_length, lengths)


def _watched(layer: Callable[[Tensor], Tensor], watch: Callable[[Tensor], None], x: Tensor) -> Tensor:
    x = layer(x)
    watch(x)
    return x


def init_weights(model: nn.Module, depth: int, dim: int) -> None:
    """Draw matrices from Normal(0, std), `out_proj` and `fc2` from Normal(0, std / sqrt(2 depth)); set biases to 0.

    std = sqrt(2 / (5 dim)) is about 0.02 for a `dim` of 1024 (SmallInit in Nguyen and Salazar 2019, arXiv 1910.05895).
    With 0.02 at every width, narrow models would hardly learn.
    """
    std = (2 / (5 * integer(dim, "dim", 1))) ** 0.5
    mixers = [m for m in model.modules() if isinstance(m, Mixer) and m.own_start]
    own = {p for mixer in mixers for p in mixer.parameters(recurse=False)}
    for mixer in mixers:
        mixer.reset_parameters()
    for name, parameter in model.named_parameters():
        if parameter in own:
            continue
        if parameter.ndim < 2:
            if name.endswith("bias") and not name.endswith("decay.dt_bias"):  # the layer initializes its dt_bias
                nn.init.zeros_(parameter)
            continue
        residual = name.endswith(("out_proj.weight", "fc2.weight"))
        nn.init.normal_(parameter, std=std / (2 * depth) ** 0.5 if residual else std)


def position_advice(module: Any, seq_len: int) -> str | None:
    """Return advice about the rotary bases for sequences of N tokens; None if the bases suffice."""
    bases, made_for = getattr(module, "rotary_bases", ()), getattr(module, "max_seq_len", None)
    options = getattr(module, "options", None)
    if getattr(options, "position_encoding", "none") != "rotary":
        return None
    hint = rotary_hint(bases, module.patterns, seq_len, made_for, getattr(options, "global_rotary", True))
    return f"{type(module).__name__} at {seq_len} tokens: {hint}" if hint else None


def longest(batch: Any, spec: SequenceSpec | None, group: Any) -> int:
    """Return N of the longest sample or document of a batch; 0 if unknown.

    Args:
        batch: this rank's part of a batch.
        spec: the spec that names the entries that are sequences; None: unknown.
        group: the ranks of the sequence; their latest call contains N. None for one rank.
    """
    if not isinstance(batch, Mapping):
        return 0
    bounds, lengths = batch.get("cu_seqlens"), batch.get("lengths")
    if isinstance(bounds, Tensor) and bounds.numel() > 1:
        return int(bounds.diff().max())
    if isinstance(lengths, Tensor) and lengths.numel():
        return int(lengths.max())
    if group is not None and group.ranks > 1:
        return 0 if group.agreed is None else group.agreed.seq_len
    sizes = [batch[name].shape[dim] for name, dim in (spec.dims if spec else {}).items() if name in batch]
    return sizes[0] if sizes else 0
