"""Op: registers an op of this package with torch, and its backward as an op of its own.

Graphs, recomputation and FLOP counters then see both. `torch.library.custom_op` registers the same, at three times the
host's time for a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lightning_dilated._compat.torch import below_autograd, refuse_transforms

_LIBRARY = torch.library.Library("lightning_dilated", "FRAGMENT")


@dataclass(eq=False)
class Op:
    """An op with a formula for its backward, which is another op.

    Attributes:
        name: `torch.ops.lightning_dilated.NAME`; the backward is called NAME_backward.
        schemas: of both ops: "(Tensor q, ...) -> Tensor". The arguments of the forward begin with those that have gradients,
            which are the results of the backward, in that order.
        caller: what users call, for messages.
        remedy: what to do where a second derivative is asked for.
        run: what both ops compute.
        fake: results of both without values, for tracing.
        saves: (arguments, results) of a call -> (tensors that the backward needs, those with gradients first; the rest).
        arguments: (gradient of the first result, saved tensors, the rest) -> arguments of the backward.
        flops: of both ops, from their arguments; None: not counted.
    """

    name: str
    schemas: tuple[str, str]
    caller: str
    remedy: str
    run: tuple[Callable[..., Any], Callable[..., Any]]
    fake: tuple[Callable[..., Any], Callable[..., Any]]
    saves: Callable[[Sequence[Any], Any], tuple[Sequence[Tensor | None], Any]]
    arguments: Callable[[Tensor, Sequence[Tensor | None], Any], tuple[Any, ...]]
    flops: tuple[Callable[..., int], Callable[..., int]] | None = None
    forward: Any = field(init=False)
    backward: Any = field(init=False)

    def __post_init__(self) -> None:
        names = self.name, f"{self.name}_backward"
        for name, schema in zip(names, self.schemas, strict=True):
            _LIBRARY.define(f"{name}{schema}")
        packets = [getattr(torch.ops.lightning_dilated, name) for name in names]
        self.forward, self.backward = (packet.default for packet in packets)
        functions = _Graph.apply, _Once.apply
        for i, (name, packet) in enumerate(zip(names, packets, strict=True)):
            _LIBRARY.impl(name, torch.compiler.disable(self.run[i]), "CompositeExplicitAutograd")
            torch.library.register_fake(f"lightning_dilated::{name}", self.fake[i], lib=_LIBRARY)
            _LIBRARY.impl(name, self._for_autograd(packet.default, functions[i]), "Autograd")
            if self.flops is not None:
                register_flop_formula(packet, get_raw=True)(_without_results(self.flops[i]))

    def _for_autograd(self, op: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        """The op for autograd: the function where a tensor requires a gradient, else the op alone."""

        def call(*args: Any) -> Any:
            refuse_transforms(self.caller, *args)
            if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
                return function(self, *args)
            return below_autograd(op, *args)

        return torch.compiler.disable(call)


def _without_results(flops: Callable[..., int]) -> Callable[..., int]:
    return lambda *args, out_val=None, **options: flops(*args)


class _Graph(torch.autograd.Function):
    """The forward as a node."""

    @staticmethod
    def forward(ctx, op, *args):
        ctx.set_materialize_grads(False)
        results = below_autograd(op.forward, *args)
        tensors, ctx.rest = op.saves(args, results)
        ctx.op = op
        ctx.save_for_backward(*tensors)
        return results

    @staticmethod
    def backward(ctx, grad, *others):
        inputs = len(ctx.needs_input_grad)
        if grad is None:
            return (None,) * inputs
        saved = ctx.saved_tensors
        grads = ctx.op.backward(*ctx.op.arguments(grad, saved, ctx.rest))
        given = [None if x is None else dx for x, dx in zip(saved, grads, strict=False)]
        return None, *given, *[None] * (inputs - 1 - len(given))


class _Once(torch.autograd.Function):
    """The backward as a node; its own gradient is refused."""

    @staticmethod
    def forward(ctx, op, *args):
        ctx.op = op
        return below_autograd(op.backward, *args)

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(
            f"{ctx.op.caller} has no double backward: its gradient was asked to be differentiated again. {ctx.op.remedy}"
        )
