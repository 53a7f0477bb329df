"""Modules of torch that mix tokens or samples, and would do so within one rank's part of a sequence only."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import batchnorm, conv, instancenorm, pooling

from lightning_dilated.sequence import SequenceConv1d

HALO = (
    "use lightning_dilated.sequence.SequenceConv1d, or sequence_halo and allow=[...], or gather the sequence first "
    "(lightning_dilated.sequence.sequence_gather)"
)
GATHER = "gather the sequence first (lightning_dilated.sequence.sequence_gather)"
MEAN = "use lightning_dilated.sequence.sequence_mean"
ATTENTION = "use lightning_dilated.MultiheadDilatedAttention (DilatedPattern.dense() is full attention)"
NORM = "use LayerNorm or RMSNorm, which look at one token"
#: (kinds of modules, why, what to do)
MIXING: tuple[tuple[tuple[type, ...], str, str], ...] = (
    ((batchnorm._BatchNorm, instancenorm._InstanceNorm, nn.GroupNorm), "takes statistics over tokens", NORM),
    ((nn.MultiheadAttention, nn.Transformer), "attends to this rank's tokens only", ATTENTION),
    ((nn.RNNBase,), "runs along the sequence", GATHER),
    ((pooling._MaxPoolNd, pooling._AvgPoolNd, pooling._LPPoolNd), "pools neighbouring tokens", GATHER),
    ((pooling._AdaptiveAvgPoolNd, pooling._AdaptiveMaxPoolNd), "pools over this rank's tokens only", MEAN),
)


def _reason(module: nn.Module) -> tuple[str, str] | None:
    wide = isinstance(module, conv._ConvNd) and any(size > 1 for size in module.kernel_size)
    if wide and not isinstance(module, SequenceConv1d):
        return "reaches over the edge of a shard", HALO
    for kinds, why, remedy in MIXING:
        if isinstance(module, kinds):
            return why, remedy
    return None


def refuse_mixing(root: nn.Module, allow: tuple[str, ...]) -> None:
    """Raise for modules below `root` that would silently compute something else on a part of the sequence.

    Args:
        allow: names of modules (with everything below them) that are known not to see tokens of a cut sequence.

    Raises:
        ValueError: naming every such module.
    """
    found = []
    for name, module in root.named_modules():
        reason = _reason(module)
        allowed = any(name == a or name.startswith(a + ".") for a in allow)
        if reason and not allowed:
            found.append(f"{name or 'the module'} ({type(module).__name__}) {reason[0]}: {reason[1]}")
    if found:
        raise ValueError(
            "modules that mix tokens or samples cannot run on parts of a sequence. "
            + "; ".join(found)
            + ". One that never sees a cut sequence may be named in the strategy's allow=[...]."
        )
