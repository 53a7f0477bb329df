"""Linear layers in float8, by torchao: for wide models on an H100 and later."""

from __future__ import annotations

import torch
from torch import nn

#: the first GPUs with products in float8
CAPABILITY = (8, 9)
#: products take features in multiples of this
GRAIN = 16


def to_float8(module: nn.Module) -> None:
    """Let the linear layers of a module multiply in float8, in place; weights stay as they are, and have the same names.

    Inputs, weights and gradients are scaled by their largest values, tensor by tensor. Layers whose features are no
    multiples of 16 stay as they are. Without a GPU the rounding is the same, computed in the wider type, slowly.

    Raises:
        ModuleNotFoundError: without torchao.
        ValueError: on a GPU without such products.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "torchao":
            raise
        raise ModuleNotFoundError(
            "linear_dtype='float8' needs torchao: pip install 'lightning-dilated[eightbit]'.", name="torchao"
        ) from None
    on_gpu = torch.cuda.is_available()
    if on_gpu and torch.cuda.get_device_capability() < CAPABILITY:
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        raise ValueError(
            f"linear_dtype='float8' needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or more, and this one "
            f"has {capability}: leave linear_dtype out."
        )
    config = Float8LinearConfig(emulate=not on_gpu)
    convert_to_float8_training(module, module_filter_fn=_serves, config=config)


def _serves(layer: nn.Module, name: str) -> bool:
    if ".recurrence." in name:  # gates and decays: a few features, whose digits count
        return False
    return isinstance(layer, nn.Linear) and layer.in_features % GRAIN == layer.out_features % GRAIN == 0
