"""Compiled blocks under fake tensors: the graphs of torch.compile's partitioner, run with the memory that its kernels take.

What is kept for the backward is what Inductor's own partitioner says. Its kernels are modelled, see `counting.kernels`.
Shape letters: B batch, N tokens, E embedding dim.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy

from lightning_dilated.attention.rotary import RotaryTable
from lightning_dilated.models.blocks import TransformerBlock
from lightning_dilated.planning.counting.inductor import Graphs, Kernels

#: how many of a piece's first arguments get a gradient, where it is more than the first
LEADING = {"join": 2}


class Pieces:
    """What of a block is compiled, put in its place; blocks of one pattern and stack share their graphs.

    Until `trace` is called the pieces run uncompiled, and notice what they are called with.
    """

    def __init__(self, block: TransformerBlock, graphs: Graphs, stack: str) -> None:
        self.block, self.graphs, self.stack, self.traced = block, graphs, stack, False
        self.seen: dict[str, tuple] = {}
        if not block.memory.in_pieces:
            self.runs, self.policies = {"whole": self._whole}, {"whole": block.memory.policy}
            block.forward = partial(self._call, "whole")
            return
        self.runs = {"feed": block._feed}
        if block.memory.head_chunks == 1:
            self.runs |= {"attend": block._attend, "attend_kept": block._attend}
        else:
            self.runs |= {"norm": block._normed, "join": block._join}
        self.policies = {name: "attention-kept" if name == "attend_kept" else "none" for name in self.runs}
        block._pieces = {name: partial(self._call, name) for name in self.runs}

    def _whole(self, *given: Any, **options: Any) -> Tensor:
        """The block's forward as one that keeps all: what it recomputes is told to the partitioner."""
        before, self.block._memory = self.block._memory, self.block._memory.__class__()
        try:
            return TransformerBlock.forward(self.block, *given, **options)
        finally:
            self.block._memory = before

    def _call(self, name: str, *given: Any, **options: Any) -> Any:
        if not self.traced:
            self.seen[name] = given, options
            if name == "attend":
                self.seen["attend_kept"] = given, options
            return self.runs[name](*given, **options)
        flat, spec = _flattened(given, options)
        return self._graph(name, flat, spec)(*self.parameters(), *(x for x in flat if isinstance(x, Tensor)))

    def parameters(self) -> list[Tensor]:
        """Of the whole block, used or not."""
        return list(self.block.parameters())

    def trace(self) -> None:
        """Make the graphs, with a gradient and without."""
        self.traced = True
        for name, (given, options) in self.seen.items():
            for grad in (False, True):
                flat, spec = _flattened(given, options)
                flat = [x.detach() if isinstance(x, Tensor) else x for x in flat]
                for x in flat[: LEADING.get(name, 1)]:
                    if isinstance(x, Tensor):
                        x.requires_grad_(grad)
                with torch.set_grad_enabled(grad), self.graphs.tape.paused():
                    self._graph(name, flat, spec)(*self.parameters(), *(x for x in flat if isinstance(x, Tensor)))
        self.seen.clear()

    def _graph(self, name: str, flat: list[Any], spec: Any) -> Callable[..., Any]:
        shapes = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in flat)
        attends = name in ("whole", "attend", "attend_kept")
        pattern = self.block.attention.attention.pattern if attends else None
        key = self.stack, name, self.policies[name], pattern, shapes, torch.is_grad_enabled()
        if key not in self.graphs.made:
            self.graphs.made[key] = self._compiled(name, flat, spec)
        return self.graphs.made[key]

    def _compiled(self, name: str, flat: list[Any], spec: Any) -> Callable[..., Any]:
        from torch._inductor.decomposition import select_decomp_table

        names, run = [n for n, _ in self.block.named_parameters()], self.runs[name]

        def call(*tensors: Tensor) -> Any:
            rest = iter(tensors[len(names) :])
            given, options = _together([next(rest) if isinstance(x, Tensor) else x for x in flat], spec)
            with _reparametrize_module(self.block, dict(zip(names, tensors, strict=False))):
                return run(*given, **options)

        make = lambda graph, inputs: Kernels(graph, self.graphs)  # noqa: E731
        cut = partial(_partition, policy=self.policies[name], parameters=len(names))
        return aot_function(call, make, make, cut, select_decomp_table(), num_params_buffers=len(names))


class _Table(NamedTuple):
    """A rotary table as torch's trees know it."""

    cos: Tensor
    sin: Tensor
    scale: Tensor | None


def _flattened(given: Any, options: Any) -> tuple[list[Any], Any]:
    plain = lambda x: _Table(x.cos, x.sin, x.scale) if isinstance(x, RotaryTable) else x  # noqa: E731
    return tree_flatten(tree_map(plain, (given, options), is_leaf=lambda x: isinstance(x, RotaryTable)))


def _together(flat: list[Any], spec: Any) -> tuple[Any, Any]:
    back = lambda x: RotaryTable(*x) if isinstance(x, _Table) else x  # noqa: E731
    return tree_map(back, tree_unflatten(flat, spec), is_leaf=lambda x: isinstance(x, _Table))


def _partition(joint: fx.GraphModule, inputs: Any, *, policy: str, parameters: int, **options: Any) -> Any:
    """(forward, backward) of a joint graph."""
    behind = {node for node in joint.graph.nodes if node.op == "placeholder" and "tangents" in node.name}
    for node in joint.graph.nodes:
        if behind.intersection(node.all_input_nodes):
            behind.add(node)
        elif node.op == "call_function" and policy != "none":
            node.meta["recompute"] = _tag(node, policy)
            node.meta["ac_graph_id"] = 1
    options["static_lifetime_input_indices"] = list(range(parameters))
    return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **options)


def _tag(node: fx.Node, policy: str) -> CheckpointPolicy:
    made = node.args[0] if node.target is operator.getitem else node
    if policy != "attention-kept":
        return CheckpointPolicy.MUST_RECOMPUTE
    kept = made.target is torch.ops.lightning_dilated.attention.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
