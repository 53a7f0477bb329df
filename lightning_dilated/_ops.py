"""Op: registers an op of this package with torch, and its backward as a second op.

Graphs, recomputation and FLOP counters then see both ops. `torch.library.custom_op` would register the same ops, but
each call would take three times as long on the host.
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
    """An op with a gradient formula; its backward is registered as a second op.

    Attributes:
        name: `torch.ops.lightning_dilated.NAME`; the backward is called NAME_backward.
        schemas: schemas of both ops, such as "(Tensor q, ...) -> Tensor". The forward takes the arguments with
            gradients first; the backward returns these gradients in the same order.
        caller: the function that users call, for messages.
        remedy: advice for users who differentiate twice.
        run: the implementations of both ops.
        fake: the fake implementations of both ops, which return results without values for tracing.
        saves: (arguments, results) -> (tensors for the backward, beginning with the inputs with gradients; other state).
        arguments: (gradient of the first result, saved tensors, other state) -> arguments of the backward.
        flops: for each op, a function from its arguments to its FLOPs; None if FLOPs are not counted.
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
        """Return the op's kernel for autograd: `function` if a tensor requires a gradient, else the op alone."""

        def call(*args: Any) -> Any:
            refuse_transforms(self.caller, *args)
            if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
                return function(self, *args)
            return below_autograd(op, *args)

        return torch.compiler.disable(call)


def _without_results(flops: Callable[..., int]) -> Callable[..., int]:
    return lambda *args, out_val=None, **options: flops(*args)


class _Graph(torch.autograd.Function):
    @staticmethod
    def forward(ctx, op, *args):
        ctx.set_materialize_grads(False)
        results = below_autograd(op.forward, *args)
        tensors, ctx.state = op.saves(args, results)
        ctx.op = op
        ctx.save_for_backward(*tensors)
        return results

    @staticmethod
    def backward(ctx, grad, *other_grads):
        inputs = len(ctx.needs_input_grad)
        if grad is None:
            return (None,) * inputs
        saved = ctx.saved_tensors
        grads = ctx.op.backward(*ctx.op.arguments(grad, saved, ctx.state))
        grads = [None if x is None else dx for x, dx in zip(saved, grads, strict=False)]
        return None, *grads, *[None] * (inputs - 1 - len(grads))


class _Once(torch.autograd.Function):
    """Autograd node of the backward, which refuses to be differentiated again."""

    @staticmethod
    def forward(ctx, op, *args):
        ctx.op = op
        return below_autograd(op.backward, *args)

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(
            f"{ctx.op.caller} has no double backward: its gradient was asked to be differentiated again. {ctx.op.remedy}"
        )
