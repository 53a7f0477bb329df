"""DecoderLayers: the layers of a decoder of transformers as a stack that `MemorySettings` act on.

To recompute single layers, `recompute_by` suffices: in training, transformers then runs each layer (a
`GradientCheckpointingLayer`) through a function of this module. Groups and offloading need the loop over all layers, so
`Loop` gives the decoder one callable for each layer. Each callable returns the hidden states unchanged, except the last
one, which runs all layers. Parameter names do not change.

Shape letters: B batch, N tokens, E embedding dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dilated._compat.torch import allow_recompiles, uncompiled
from lightning_dilated.ext._compat.transformers import recompute_by
from lightning_dilated.ext.transformers.patterns import fix_patterns, layer_pattern
from lightning_dilated.memory.block_memory import BlockAttention, BlockSizes, StackMemory
from lightning_dilated.memory.offload import Host
from lightning_dilated.memory.recompute import recomputed
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.memory.token_chunks import tiled

#: the projections to q, k and v of a layer's attention
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def layers_of(base: nn.Module, depth: int) -> nn.ModuleList | None:
    """Return the list of `depth` layers that `base`, a decoder without its head, runs in order, or None."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    lists = (m for m in base.children() if isinstance(m, nn.ModuleList) and len(m) == depth)
    return next((x for x in lists if all(isinstance(m, GradientCheckpointingLayer) for m in x)), None)


class DecoderLayers(StackMemory):
    """The memory settings of a decoder's layers; it registers no submodule, so state dicts hold each weight once.

    Args:
        decoder: the decoder with its head.
        layers: the decoder's list of layers; its class becomes `Loop`.
        token_wise: whether a layer's feed-forward, `mlp`, computes each token independently.
        config: the config of the layers.
    """

    def __init__(self, decoder: Any, layers: nn.ModuleList, token_wise: bool, config: Any) -> None:
        super().__init__()
        self._decoder = (decoder,)
        self._layers, self._token_wise, self._config = (layers,), token_wise, config
        self.compiled = False
        layers.__class__ = Loop
        vars(layers)["_runner"] = partial(_runners, self)
        self.memory = MemorySettings()

    @property
    def blocks(self) -> nn.ModuleList:  # type: ignore[override]  # not a child
        return self._layers[0]

    @property
    def memory(self) -> MemorySettings:
        """The memory settings of the layers in training."""
        return self._memory

    @memory.setter
    def memory(self, settings: MemorySettings) -> None:
        self._check(settings)
        for layer in self.blocks:
            recompute_by(layer, None if settings.policy == "none" else partial(_recomputed, settings.policy))
            if hasattr(layer, "mlp"):
                _tile(layer.mlp, settings.tile)
        self._memory, self._host = settings, Host(settings.offload)
        self._compile()

    def compile_blocks(self) -> None:
        """Compile each layer; layers with the same code and pattern share a graph. Decoding stays uncompiled."""
        fix_patterns(self.blocks, self._config)
        self.compiled = True
        self._compile()

    def _compile(self) -> None:
        if not self.compiled:
            return
        kinds = len({layer_pattern(self._config, i) for i in range(len(self.blocks))})
        # a pattern has graphs with and without gradients, for first and other layers, for static and dynamic lengths
        allow_recompiles(16 * kinds)
        for layer in self.blocks:
            layer.compile(fullgraph=True)

    @property
    def _has_tiles(self) -> bool:
        return self._token_wise and all(hasattr(x, "mlp") for x in self.blocks)

    def _check(self, settings: MemorySettings) -> None:
        kind = type(self.blocks[0]).__name__
        if settings.head_chunks > 1:
            raise ValueError(
                f"head_chunks={settings.head_chunks} is not offered for {kind}: a decoder of transformers projects q, k "
                "and v of all heads in one call. Set head_chunks=1; policy, every, offload and tile work with it."
            )
        if settings.tile is not None and self.compiled:
            raise ValueError(
                f"tile={settings.tile} runs the feed-forward of {kind} in tiles, which torch.compile cannot follow. Set "
                "compile_blocks=False, or leave tile out here and give it to HFCausalLM, for the logits only."
            )
        if settings.tile is not None and not self._has_tiles:
            raise ValueError(
                f"tile={settings.tile} needs a feed-forward `mlp` that computes each token independently, which is not "
                f"known of {kind}. Leave tile out; policy, every and offload work with it."
            )

    # -- methods for planning ------------------------------------------------------------------------------------------
    def attentions(self) -> list[BlockAttention]:
        c = self._config
        head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        kv_heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
        dropout = getattr(c, "attention_dropout", 0.0)
        return [
            BlockAttention(layer_pattern(c, i), c.num_attention_heads, kv_heads, head_dim, True, dropout, "auto")
            for i in range(len(self.blocks))
        ]

    def logit_weight(self) -> Tensor | None:
        """The output projection, (V, E)."""
        head = self._decoder[0].get_output_embeddings()
        return None if head is None else getattr(head, "base_layer", head).weight

    @staticmethod
    def projections(layer: nn.Module) -> set[nn.Parameter]:
        """Return the parameters that act on a layer's normed input: of q, k, v projections and LoRA's first factors."""
        named = layer.named_parameters()
        return {p for name, p in named if set(name.split(".")) & set(PROJECTIONS) and "lora_B" not in name}

    def sizes(self) -> BlockSizes:
        layer = self.blocks[0]
        numbers = lambda m: sum(p.numel() for p in m.parameters())  # noqa: E731
        projections = [m for n, m in layer.named_modules() if n.rpartition(".")[2] in PROJECTIONS]
        mlp = getattr(layer, "mlp", None)
        hidden = getattr(self._config, "intermediate_size", None) or 4 * self._config.hidden_size
        return BlockSizes(
            self._config.hidden_size, hidden, sum(map(numbers, projections)), 0 if mlp is None else numbers(mlp),
            windows=False, tiles=self._has_tiles,
        )  # fmt: skip

    @property
    def takes_the_loop(self) -> bool:
        """True in training if layers run in groups, or if their inputs are offloaded."""
        return torch.is_grad_enabled() and (self._memory.every > 1 or self._memory.offload > 0)


def _recomputed(policy: str, run: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
    """Run a layer on hidden states (B, N, E) and recompute it in the backward."""
    return recomputed(lambda y: run(y, *args), x, policy)


def _tile(mlp: Any, tile: int | None) -> None:
    """Make a feed-forward run in tiles of tokens; None: in one step for all tokens."""
    vars(mlp).pop("forward", None)
    if tile is not None:
        mlp.forward = partial(_in_tiles, mlp, tile)


def _in_tiles(mlp: nn.Module, tile: int, x: Tensor) -> Tensor:
    return tiled(partial(type(mlp).forward, mlp), (mlp,), tile, x)


class Loop(nn.ModuleList):
    """The decoder's list of layers; slices of it contain callables if `_runners` replaces the layers."""

    _runner: Callable[[list[nn.Module]], list[Callable[..., Tensor]] | None]

    def __getitem__(self, idx: Any) -> Any:
        if not isinstance(idx, slice):
            return super().__getitem__(idx)
        layers = list(self._modules.values())[idx]
        return self._runner(layers) or nn.ModuleList(layers)


def _runners(stack: DecoderLayers, layers: list[nn.Module]) -> list[Callable[..., Tensor]] | None:
    """Return callables that replace the layers, or None if the decoder runs its layers unchanged."""
    if stack.takes_the_loop and len(layers) == len(stack.blocks) and layers[0].training:
        return _deferred(stack, layers)
    return [partial(_called, layer) for layer in layers] if stack.compiled else None


def _called(layer: nn.Module, *args: Any, **options: Any) -> Tensor:
    """Run a layer; run it uncompiled if it has a cache, because each new token would be a new length to compile."""
    cached = any(options.get(name) is not None for name in ("cache", "past_key_values"))
    return (uncompiled(layer) if cached else layer)(*args, **options)


def _deferred(stack: DecoderLayers, layers: list[nn.Module]) -> list[Callable[..., Tensor]]:
    """Return callables that replace the layers; the last callable runs all layers."""
    waiting: list[Callable[[Tensor], Tensor]] = []
    begun: list[Tensor] = []

    def call(layer: nn.Module, x: Tensor, *args: Any, **options: Any) -> Tensor:
        if begun and x is not begun[0]:
            raise ValueError(
                f"every and offload run all layers in one loop, but the decoder of {type(layer).__name__} changes the "
                "hidden states between layers. Leave both settings out; policy and tile work with it."
            )
        begun[:] = [x]
        waiting.append(lambda y: layer(y, *args, **options))
        if len(waiting) < len(layers):
            return x
        begun.clear()  # the first layer's input may be freed
        return stack._run(waiting, x)

    return [partial(call, layer) for layer in layers]
