"""Fake tensors of the CPU that take the ways of a GPU's: fake ones of a GPU have no backward where there is none.

Shape letters: L positions.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lightning_dilated.attention import rotary
from lightning_dilated.attention.rotary import RotaryTable
from lightning_dilated.models.longnet import token_loss

#: by its name: the package of models has a function of that name
image_patches = importlib.import_module("lightning_dilated.models.longvit.image_patches")


@contextlib.contextmanager
def as_on_gpu(compiled: bool = False) -> Iterator[None]:
    """Within, tensors are made as a GPU makes them, and checks of values pass.

    Args:
        compiled: whether the model's blocks and loss are; this is about the loss.

    Rotary positions are turned by their kernel; norms are one kernel each way, in the dtype that autocast has on a GPU, and
    logarithms of probabilities of fp16 (not of bf16) one that casts as it reads; positions of patches are told for a whole
    sequence; a number that is read off a tensor is 1.
    """

    def split(table: RotaryTable, joint: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        return rotary.turn(joint, table.cos, table.sin, table.scale, heads)

    plain, layer_norm = torch.rms_norm, torch.layer_norm

    def rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        if weight is not None and weight.dtype != x.dtype:
            return plain(x, shape, weight, eps)
        if _traced() and hasattr(torch.ops.aten, "_fused_rms_norm"):
            return torch.ops.aten._fused_rms_norm(x, shape, weight, eps)[0]
        return plain(x, shape, weight, eps) if _traced() else _RMSNorm.apply(x, weight)

    def wide_layer_norm(x: Tensor, *rest: Any) -> Tensor:
        narrow = torch.is_autocast_enabled("cpu") and x.dtype in (torch.bfloat16, torch.float16)
        return layer_norm(x.float() if narrow else x, *rest)

    log_softmax = torch.log_softmax

    def wide_log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        fused = dtype is not None and x.dtype == torch.float16 and not torch.is_grad_enabled()
        return x.new_empty(x.shape, dtype=dtype) if fused else log_softmax(x, dim, dtype=dtype)

    def in_one_pass(run: Callable) -> Callable:
        return _sizes_of_sums if run is token_loss._sums else lambda logits, *_: torch.empty_like(logits)

    places = image_patches.places

    def places_of_all(positions: Tensor, *sizes: int) -> Any:
        with real():
            return places(torch.arange(len(positions)), *sizes)

    with (
        mock.patch.object(image_patches, "places", places_of_all),
        mock.patch.object(RotaryTable, "split", split),
        mock.patch.object(torch, "rms_norm", rms_norm),
        mock.patch.object(torch, "layer_norm", wide_layer_norm),
        mock.patch.object(torch, "log_softmax", wide_log_softmax),
        mock.patch.object(token_loss, "_fuses", lambda logits, _: compiled and logits.shape[1] >= token_loss.WIDE),
        mock.patch.object(token_loss, "_compiled", in_one_pass),
        _Ones(),
    ):
        yield


def real() -> contextlib.AbstractContextManager[Any]:
    """Within, tensors are made with values, also under fake tensors: those of the host that are read."""
    return _disable_current_modes()


def _traced() -> bool:
    """Whether a graph is being made of what runs."""
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.PROXY, keys.FUNCTIONAL))


def _sizes_of_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    each = logits.new_empty(len(logits), dtype=torch.promote_types(logits.dtype, torch.float32))
    return each, torch.empty_like(each)


class _Ones(TorchDispatchMode):
    """Within, a number that is read off a fake tensor is 1."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._local_scalar_dense.default:
            return func(*args, **(kwargs or {}))
        if args[0].dtype == torch.bool:
            return True
        return 1.0 if args[0].is_floating_point() else 1


class _RMSNorm(torch.autograd.Function):
    """The sizes of RMSNorm; no values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32), weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, _, weight = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)
