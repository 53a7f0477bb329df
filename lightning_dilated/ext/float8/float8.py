"""Linear layers in float8 through torchao, for wide models on an H100 or later."""

from __future__ import annotations

import torch
from torch import nn

#: lowest compute capability with float8 products
CAPABILITY = (8, 9)
#: float8 products need a number of features that is a multiple of this
GRAIN = 16


def to_float8(module: nn.Module) -> None:
    """Make the linear layers of a module multiply in float8, in place; weights keep their dtype and names.

    Each input, weight and gradient tensor is scaled by its largest value. Layers are skipped if their number of
    features is not a multiple of 16. Without a GPU the same rounding is emulated in a wider dtype, slowly.

    Raises:
        ModuleNotFoundError: without torchao.
        ValueError: if the GPU has no float8 products.
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
    if ".recurrence." in name or ".hashed." in name:  # gates, decays and codes have few features and need precision
        return False
    return isinstance(layer, nn.Linear) and layer.in_features % GRAIN == layer.out_features % GRAIN == 0
