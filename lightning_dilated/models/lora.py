"""LoRA of the blocks through peft (an optional extra): low-rank updates are trained beside weights that stay as they are."""

from __future__ import annotations

from torch import nn

#: linear layers of a block, and parameters that are no layer of their own (q, k and v's joint projection)
LAYERS = ("out_proj", "fc1", "fc2", "gate")
PARAMETERS = ("attention.in_proj_weight",)


def add_lora(transformer: nn.Module, rank: int, alpha: float) -> None:
    """Put low-rank updates (arXiv 2106.09685), which begin at 0, beside every projection of the blocks, in place.

    Args:
        transformer: a `DilatedTransformer`.
        rank: of the updates.
        alpha: they are scaled by alpha / rank.

    Raises:
        ModuleNotFoundError: without peft.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        raise ModuleNotFoundError("lora_rank needs peft: pip install 'lightning-dilated[lora]'.", name="peft") from None
    found = {name.rpartition(".")[2] for name, m in transformer.named_modules() if isinstance(m, nn.Linear)}
    targets = [name for name in LAYERS if name in found]
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, target_parameters=list(PARAMETERS))
    inject_adapter_in_model(config, transformer)


def merge_lora(transformer: nn.Module) -> None:
    """Add the updates to the weights and leave a plain transformer, in place."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in reversed(list(transformer.named_modules())):  # inner ones first
        if isinstance(module, BaseTunerLayer):
            module.merge()
            parent, _, child = name.rpartition(".")
            setattr(transformer.get_submodule(parent), child, module.get_base_layer())
