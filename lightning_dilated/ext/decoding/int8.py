"""Weights of linear layers rounded to int8, a scale for each output feature, by torchao; activations are not rounded.

The model keeps its own weights: drawn tokens use the rounded ones in their place, which is half the bytes to read.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dilated.attention.modules import MultiheadDilatedAttention

#: of a model: where its weights lay, and these rounded
_rounded: weakref.WeakKeyDictionary[nn.Module, tuple[tuple, dict[str, Tensor]]] = weakref.WeakKeyDictionary()


def linear_weights(model: nn.Module) -> dict[str, Tensor]:
    """The matrices of all linear layers and joint projections, by name."""
    weights = {}
    for name, module in model.named_modules():
        where = f"{name}." if name else ""
        if isinstance(module, nn.Linear):
            weights[f"{where}weight"] = module.weight
        elif isinstance(module, MultiheadDilatedAttention):
            weights[f"{where}in_proj_weight"] = module.in_proj_weight
    return weights


def check_int8(model: Any) -> None:
    """Raise ImportError without torchao, and ValueError for a model whose products are in float8."""
    if getattr(model, "linear_dtype", None) is not None:
        raise ValueError(
            f"int8_weights=True takes the model's own linear layers, and this one has linear_dtype={model.linear_dtype!r}: "
            "leave one of them out."
        )
    try:
        import torchao.quantization  # noqa: F401
    except ImportError as error:
        raise ModuleNotFoundError(
            "int8_weights=True needs torchao: pip install lightning-dilated[eightbit], or leave it out."
        ) from error


@torch.no_grad()
def rounded_weights(model: nn.Module) -> dict[str, Tensor]:
    """`linear_weights` in int8: the same tensors for the same weights, which every call fills anew.

    A graph that reads them stays valid. Whether values have changed cannot be known: fused optimizers do not tell.

    Raises:
        ImportError: without torchao.
    """
    check_int8(model)
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    weights = linear_weights(model)
    places = tuple((x.data_ptr(), x.shape, x.dtype, x.device) for x in weights.values())
    known = _rounded.get(model)
    before = known[1] if known is not None and known[0] == places else {}
    rounded = {}
    for name, weight in weights.items():
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
        holder = nn.Sequential(layer)
        quantize_(holder, Int8WeightOnlyConfig())
        new = holder[0].weight.detach()
        if name in before:
            _fill(before[name], new)
        rounded[name] = before.get(name, new)
    if not before:
        _rounded[model] = places, rounded
    return before or rounded


def _fill(to: Tensor, value: Tensor) -> None:
    """Copy the numbers and the scales that a rounded weight is made of."""
    if not hasattr(to, "__tensor_flatten__"):
        to.copy_(value)
        return
    for part in to.__tensor_flatten__()[0]:
        _fill(getattr(to, part), getattr(value, part))


def forget_rounded(model: nn.Module) -> None:
    """Free the rounded weights of a model."""
    _rounded.pop(model, None)


def call(model: Any, weights: dict[str, Tensor] | None, *args: Any, **options: Any) -> Tensor:
    """A call of the model with other weights in place of its own; None: with its own."""
    if weights is None:
        return model(*args, **options)
    return torch.func.functional_call(model, weights, args, options, tie_weights=False)
