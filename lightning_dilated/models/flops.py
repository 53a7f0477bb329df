"""FLOPs of a step, from counted (query, key) pairs and the sizes of the matrices.

Shape letters: N tokens, E embedding dim, V vocabulary, D head dim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

from lightning_dilated.models.blocks import TransformerBlock
from lightning_dilated.pattern.rows import pairs


def step_flops(module: nn.Module, tokens: int, documents: Sequence[int], training: bool = True) -> int:
    """FLOPs of the blocks of a module, and of its output projection `head` if it has one over tokens, on all ranks together.

    A product with a matrix of P weights takes 2 P a token forward and 4 P backward; a pair of a query and a key 4 D forward
    and 10 D backward. Norms, activations, what is computed again and pooled heads are not counted, as usual (Chowdhery et
    al. 2022, arXiv 2204.02311, appendix B).

    Args:
        tokens: of all samples, padding included.
        documents: the tokens of each document or unpadded sample.
        training: forward and backward, else forward only.

    Raises:
        ValueError: for a module without TransformerBlock.
    """
    found = [m for m in module.modules() if isinstance(m, TransformerBlock)]
    if not found:
        raise ValueError(f"{type(module).__name__} has no TransformerBlock whose FLOPs could be counted.")
    weights = sum(p.numel() for block in found for p in block.parameters() if p.ndim >= 2)
    if getattr(module, "vocab_size", None) and isinstance(getattr(module, "head", None), nn.Linear):
        weights += module.head.weight.shape[1] * module.vocab_size
    features = 0  # D times pairs
    for block in found:
        a = block.attention_layer
        for length, times in Counter(documents).items():
            of = a.attention.pattern, length, a.num_heads, a.num_kv_heads, a.attention.causal
            features += times * a.head_dim * pairs(*of)
    return (6 if training else 2) * weights * tokens + (14 if training else 4) * features
