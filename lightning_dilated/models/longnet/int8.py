"""Weights of linear layers rounded to int8, a scale for each output feature, by torchao; activations are not rounded.

The model keeps its own weights: drawn tokens use the rounded ones in their place, which is half the bytes to read.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dilated._compat.torch import version_of
from lightning_dilated.attention.modules import MultiheadDilatedAttention

_made: weakref.WeakKeyDictionary[nn.Module, tuple[tuple, dict[str, Tensor]]] = weakref.WeakKeyDictionary()


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


def check_int8() -> None:
    """Raise ImportError without torchao."""
    try:
        import torchao.quantization  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "int8_weights=True needs torchao: pip install lightning-dilated[eightbit], or leave it out."
        ) from error


@torch.no_grad()
def rounded_weights(model: nn.Module) -> dict[str, Tensor]:
    """`linear_weights` in int8; the same tensors again until the weights change.

    Raises:
        ImportError: without torchao.
    """
    check_int8()
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    weights = linear_weights(model)
    versions = tuple((x.data_ptr(), 0 if x.is_inference() else version_of(x)) for x in weights.values())
    made = _made.get(model)
    if made is not None and made[0] == versions:
        return made[1]
    rounded = {}
    for name, weight in weights.items():
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
        holder = nn.Sequential(layer)
        quantize_(holder, Int8WeightOnlyConfig())
        rounded[name] = holder[0].weight.detach()
    _made[model] = versions, rounded
    return rounded


def call(model: Any, weights: dict[str, Tensor] | None, *args: Any, **options: Any) -> Tensor:
    """A call of the model with other weights in place of its own; None: with its own."""
    if weights is None:
        return model(*args, **options)
    return torch.func.functional_call(model, weights, args, options, tie_weights=False)
