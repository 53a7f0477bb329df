"""Applies `MemorySettings` to one transformer block, to a stack of blocks, and to a whole module.

Shape letters: B batch, N tokens, E embedding dim, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_dilated._compat.torch import allow_recompiles, has_hooks, set_compiled_call, uncompiled
from lightning_dilated._extensions import hook
from lightning_dilated.attention.context import LayerContext, LayerPlace
from lightning_dilated.attention.modules import MultiheadDilatedAttention
from lightning_dilated.attention.rotary import RotaryTable
from lightning_dilated.memory.compiled_part import CompiledPart
from lightning_dilated.memory.head_chunks import AttentionParts, HeadChunks, attend_in_chunks
from lightning_dilated.memory.offload import Host
from lightning_dilated.memory.recompute import in_groups, recomputed, result_is_unused
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.memory.token_chunks import step_of, tiled
from lightning_dilated.pattern import DilatedPattern

#: maximum number of graphs for a part of a block: for tiles, last tiles and lengths, each with and without gradients
GRAPHS = 64


class BlockAttention(NamedTuple):
    """The attention of a block.

    Attributes:
        num_heads, num_kv_heads, head_dim: H, K, D.
        dropout: probability for attention weights in training.
        engine: the model's argument `engine`.
    """

    pattern: DilatedPattern
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool
    dropout: float
    engine: str


class BlockSizes(NamedTuple):
    """The sizes of a block.

    Attributes:
        dim, hidden: E, and the hidden features of the feed-forward.
        projection: number of parameters of the projections to q, k and v.
        feed_forward: number of parameters of the feed-forward.
        windows: whether the block's heads can attend in groups, one after another.
        tiles: whether the feed-forward can run in tiles of tokens.
        updated: the number of parameters of a weight, and of the update (such as LoRA's) that is added to it before
            the product; (0, 0) without an update.
    """

    dim: int
    hidden: int
    projection: int
    feed_forward: int
    windows: bool = True
    tiles: bool = True
    updated: tuple[int, int] = (0, 0)


class BlockMemory(nn.Module):
    """The base class of a transformer block: runs attention and feed-forward according to its memory settings.

    A subclass makes the layers `attention_norm`, `attention`, `ffn_norm`, `ffn` and `dropout`, and then sets `memory`.
    It defines these parts, which run and are compiled separately; `drop` are the factors of stochastic depth:

        _attend(x, positions, lengths, cu_seqlens, cache, drop): x + attention(norm(x)), of (B, N, E).
        _normed(x, dtype): norm(x), the input of attention's projection, in the projection's dtype.
        _join(x, out, drop): x + the output projection of the heads' outputs (B, N, H, D).
        _feed(x, drop): x + feed_forward(norm(x)).
    """

    def __init__(self) -> None:
        super().__init__()
        self._compile_options: dict[str, Any] | None = None
        self._pieces: dict[str, Callable[..., Any]] = {}  # {name: compiled part}
        self._shapes: defaultdict[str, set[torch.Size]] = defaultdict(set)  # {part: shapes of whole chunks and tiles}

    @property
    def attention_layer(self) -> MultiheadDilatedAttention:
        """The attention layer itself, even if another module (such as peft's LoRA) wraps it."""
        if isinstance(self.attention, MultiheadDilatedAttention):
            return self.attention
        return next(m for m in self.attention.modules() if isinstance(m, MultiheadDilatedAttention))

    # -- settings ------------------------------------------------------------------------------------------------------
    @property
    def memory(self) -> MemorySettings:
        """The block's memory settings; `every` and `offload` apply to the stack, see `StackMemory`."""
        return self._memory

    @memory.setter
    def memory(self, settings: MemorySettings) -> None:
        """Check the settings against the sizes of the layers, and compile the parts that the settings need."""
        a = self.attention_layer
        chunks = HeadChunks(a.num_heads, a.num_kv_heads, a.head_dim, settings.head_chunks, a.unrotated)
        if settings.head_chunks > 1:
            self._check_bare(settings)
        self._chunks, self._memory = chunks, settings
        self._compile_parts()

    @property
    def recompute(self) -> str:
        """The recomputation policy, which is a part of `memory`."""
        return self._memory.policy

    @recompute.setter
    def recompute(self, policy: str) -> None:
        self.memory = replace(self._memory, policy=policy)

    def _check_bare(self, settings: MemorySettings) -> None:
        """Raise or warn if other modules or hooks would not run, because head chunks read the weights directly."""
        if self.attention is not self.attention_layer:
            raise ValueError(
                f"head_chunks={settings.head_chunks} is not offered with LoRA: {type(self.attention).__name__} around the "
                "attention changes its weights. Set head_chunks=1; policy, every, offload and tile work with it."
            )
        a = self.attention_layer
        for mixer in a.mixers:
            raise ValueError(
                f"head_chunks={settings.head_chunks} is not offered with {mixer.option}, which reads all heads. "
                f"Set head_chunks=1; policy, every, offload and tile work with it. Or leave {mixer.option} out."
            )
        if has_hooks(a):
            warnings.warn(
                f"hooks on the attention layer do not run with head_chunks={settings.head_chunks}: put them on its block, "
                "or set head_chunks=1.",
                stacklevel=3,
            )

    # -- compilation ---------------------------------------------------------------------------------------------------
    def compile(self, **options: Any) -> None:
        """Compile the whole block, as `nn.Module.compile` does, or each part if the settings run parts separately."""
        self._compile_options = options
        self._compile_parts()

    def _compile_parts(self) -> None:
        """Compile the block, or separately each part that the settings run."""
        if self._compile_options is None:
            return
        self._pieces = {}
        set_compiled_call(self, None)
        if not self._memory.in_pieces:
            part = self._compiled("block", uncompiled(self), asserts=False)
            set_compiled_call(
                self, lambda *x, **kwargs: (part.whole if _is_whole(kwargs.get("cache")) else part)(*x, **kwargs)
            )
            return
        allow_recompiles(GRAPHS)
        parts: dict[str, Callable[..., Any]] = {"feed": self._feed}
        if self._memory.head_chunks == 1:
            parts |= {"attend": self._attend, "attend_kept": self._attend_saved}
        else:
            parts |= {"norm": self._normed, "join": self._join}
        asserts = lambda name: not name.startswith("attend")  # noqa: E731
        self._pieces = {name: self._compiled(name, part, asserts(name)) for name, part in parts.items()}

    def _compiled(self, name: str, part: Callable[..., Any], asserts: bool) -> CompiledPart:
        return CompiledPart(part, self._compile_options or {}, self._shapes[name], asserts)

    def _piece(self, name: str, part: Callable[..., Any], whole: bool) -> Callable[..., Any]:
        """Return a part of the block, compiled if the block is; `whole`: the inputs are a whole chunk or tile."""
        piece = self._pieces.get(name, part)
        return piece.whole if whole and isinstance(piece, CompiledPart) else piece

    def _of_tiles(
        self, name: str, part: Callable[..., Any], tile: int | None, x: Tensor, whole: bool
    ) -> Callable[..., Any]:
        """Return `_piece` to run on tiles of x (B, N, E), also on a shorter last tile. `whole`: x is a whole chunk."""
        if name not in self._pieces:
            return part
        step = min(step_of(tile, x), x.shape[1])
        recurs = step < x.shape[1] or whole
        return lambda y, *inputs: self._piece(name, part, recurs and y.shape[1] == step)(y, *inputs)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out compiled parts, which refer to this block's weights. A copy is not compiled, as in `nn.Module`."""
        return {**super().__getstate__(), "_pieces": {}}

    # -- running -------------------------------------------------------------------------------------------------------
    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | RotaryTable | None = None,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: LayerContext | None = None,
        drop: Tensor | None = None,
    ) -> Tensor:
        """Map (B, N, E) to (B, N, E). Keywords are as in `MultiheadDilatedAttention`; `drop` is (2, B, 1, 1) or
        (2, 1, N, 1): factors of stochastic depth for the two halves (see `drop_path_factors`)."""
        attend_drop, feed_drop = (None, None) if drop is None else (drop[0], drop[1])
        arguments = positions, lengths, cu_seqlens, cache, attend_drop
        settings = self._memory
        if cache is not None and not isinstance(cache, LayerPlace):
            return self._cached(x, positions, lengths, cu_seqlens, cache)
        policy, whole = settings.policy if torch.is_grad_enabled() else "none", bool(self._pieces) and _is_whole(cache)
        attend = self._attend_in_chunks if settings.head_chunks > 1 else self._piece("attend", self._attend, whole)

        def run(y: Tensor) -> Tensor:
            return self._fed(attend(y, *arguments), feed_drop, settings.tile, whole)

        if policy == "none":
            return run(x)
        if policy == "block" or not settings.in_pieces:
            return recomputed(run, x, policy, marked=settings.tile is not None)
        h = self._piece("attend_kept", self._attend_saved, whole)(x, *arguments)
        if settings.tile:
            return self._fed(h, feed_drop, settings.tile, whole)
        return recomputed(lambda y: self._fed(y, feed_drop, None, whole), h, "block")

    def _cached(
        self,
        x: Tensor,
        positions: Tensor | RotaryTable | None,
        lengths: Tensor | None,
        cu_seqlens: Tensor | None,
        cache: LayerContext,
    ) -> Tensor:
        """Run the block on tokens that follow a cache; in a compiled block, only parts after attention are compiled."""
        a = self.attention_layer
        if self._compile_options is None or self.attention is not a or any(map(has_hooks, self.modules())):
            return self._feed(self._attend(x, positions, lengths, cu_seqlens, cache, None), None)
        normed = self._normed(x, a.in_proj_weight.dtype)
        out = cache.heads(a, normed, positions, lengths, cu_seqlens, a.attention.causal)
        return _compiled_tail(self._compile_options)(self, x, out)

    def tail(self, x: Tensor, out: Tensor) -> Tensor:
        """Run the parts after attention on x (B, n, E) and the heads' outputs (B, n, H, D)."""
        return self._feed(self._join(x, out, None), None)

    def _attend_saved(self, x: Tensor, *arguments: Any) -> Tensor:
        """Run `_attend` so that the backward recomputes all of it except the attention op, which saves its results."""
        attend = self._attend_in_chunks if self._memory.head_chunks > 1 else self._attend
        return recomputed(lambda y: attend(y, *arguments), x, "attention-kept")

    def _attend_in_chunks(
        self,
        x: Tensor,
        positions: Tensor | RotaryTable | None,
        lengths: Tensor | None,
        cu_seqlens: Tensor | None,
        chunk: LayerPlace | None,
        drop: Tensor | None,
    ) -> Tensor:
        """Run `_attend` for one chunk of heads after another."""
        self._check_bare(self._memory)
        a, tile = self.attention_layer, self._memory.narrow_tile
        documents = {"lengths": lengths, "cu_seqlens": cu_seqlens}
        arguments = partial(a.attention.op_arguments, causal=a.attention.causal, chunk=chunk, **documents)
        whole = _is_whole(chunk)
        normed = self._of_tiles("norm", self._normed, tile, x, whole)
        parts = AttentionParts(normed, (self.attention_norm,), arguments, tile)
        table = a.table(x, positions)
        rows = table.rows() if table else ()
        out = attend_in_chunks(self._chunks, parts, x, a.in_proj_weight, a.in_proj_bias, *rows)
        join = self._of_tiles("join", self._join, tile, x, whole)
        modules = [self.dropout, a.out_proj, *([a.sub_norm] if a.sub_norm else [])]
        if _by_token(drop):
            return tiled(join, modules, tile, x, out, drop)
        return tiled(lambda y, heads: join(y, heads, drop), modules, tile, x, out)

    def _fed(self, x: Tensor, drop: Tensor | None, tile: int | None, whole: bool) -> Tensor:
        """Run `_feed` for one tile of tokens after another; `whole`: x is a whole chunk of a stream."""
        feed = self._of_tiles("feed", self._feed, tile, x, whole)
        modules = self.ffn_norm, self.ffn, self.dropout
        if _by_token(drop):
            return tiled(feed, modules, tile, x, drop, unused=result_is_unused())
        return tiled(lambda y: feed(y, drop), modules, tile, x, unused=result_is_unused())


_tails: dict[str, Callable[..., Tensor]] = {}


def _compiled_tail(options: dict[str, Any]) -> Callable[..., Tensor]:
    """Return `BlockMemory.tail`, compiled with these options; all blocks with equal options share it."""
    key = repr(options)
    if key not in _tails:
        # with fullgraph, torch raises an error after too many recompilations
        _tails[key] = torch.compile(BlockMemory.tail, **{**options, "fullgraph": False})
    return _tails[key]


def _is_whole(cache: object) -> bool:
    """Return True if a call computes a chunk of a stream, and the chunk has the full length."""
    return isinstance(cache, LayerPlace) and cache.whole


def _by_token(drop: Tensor | None) -> bool:
    """Return True if there is a factor of stochastic depth for each token (1, N, 1), not for each sample (B, 1, 1)."""
    return drop is not None and drop.shape[1] > 1


class StackMemory(nn.Module):
    """The base class of a stack of `blocks`, which runs them in groups and offloads their inputs as `memory` says."""

    blocks: nn.ModuleList

    def __init__(self) -> None:
        super().__init__()
        self._memory, self._host = MemorySettings(), Host(0)
        self._stream: Any = None

    @property
    def stream(self) -> Any:
        """The stream that computes sequences chunk by chunk."""
        if self._stream is None:
            self._stream = hook("stream of a stack")()
        return self._stream

    @property
    def memory(self) -> MemorySettings:
        """The memory settings of the stack and of each block."""
        return self._memory

    @memory.setter
    def memory(self, settings: MemorySettings) -> None:
        for block in self.blocks:
            block.memory = settings
        self._memory, self._host = settings, Host(settings.offload)

    def free_host_memory(self) -> None:
        """Free the host memory of offloaded block inputs; the backward of an earlier forward then raises an error."""
        self._host.close()

    def _run(self, layers: list[Callable[[Tensor], Tensor]], x: Tensor, grouped: bool = True) -> Tensor:
        """Run the layers one after another, in groups of `every` unless `grouped` is False."""
        return in_groups(layers, x, self._memory.every if grouped and torch.is_grad_enabled() else 1, self._host)


HasMemorySettings = BlockMemory | StackMemory


def set_memory(module: nn.Module, settings: MemorySettings) -> list[tuple[HasMemorySettings, MemorySettings]]:
    """Apply the settings to all stacks of a module, and to its blocks outside of stacks.

    Returns:
        A list of (stack or block, its earlier settings).

    Raises:
        ValueError: if the module has no stack or block; for `every` or `offload` with blocks outside of stacks; for
            `stream` with a model that cannot be computed chunk by chunk.
    """
    stacks = [m for m in module.modules() if isinstance(m, StackMemory)]
    stacked = {block for stack in stacks for block in stack.blocks}
    alone = [m for m in module.modules() if isinstance(m, BlockMemory) and m not in stacked]
    name = type(module).__name__
    if not stacks and not alone:
        raise ValueError(
            "ActivationRecompute recomputes TransformerBlocks, and decoder layers that transformers can checkpoint, and "
            f"{name} has none. Build it from lightning_dilated.models.blocks, or call torch.utils.checkpoint in its "
            "own blocks."
        )
    if alone and (settings.every > 1 or settings.offload):
        raise ValueError(
            f"every and offload work on a DilatedTransformer's blocks, but {name} has blocks outside of one. Stack "
            "them by lightning_dilated.models.transformer.DilatedTransformer, or leave both settings out."
        )
    if settings.stream is not None and not getattr(module, "streams", False):
        raise ValueError(
            f"stream={settings.stream} computes a sequence chunk by chunk, and {name} cannot: it takes a causal model with "
            "a loss for each token (LongNetLM), as in other models a chunk depends on later ones. Leave stream out."
        )
    if settings.stream is not None and not getattr(type(module).loss_terms, "streams", False):
        raise ValueError(
            f"stream={settings.stream} computes a sequence chunk by chunk, and {name} redefines loss_terms, which takes "
            "whole sequences. Leave stream out."
        )
    before = [(m, m.memory) for m in (*stacks, *alone)]
    for m, _ in before:
        m.memory = settings
    return before
