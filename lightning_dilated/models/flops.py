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
    """FLOPs of the blocks of a module, and of an output projection `head` over tokens, on all ranks together.

    A product with a matrix of P weights takes 2 P a token forward and 4 P backward, of which 2 P are for its own gradient
    and are left out where it is frozen, and 2 P for what lies before it, left out where all of that is frozen; a pair of a
    query and a key takes 4 D forward and 10 D backward, likewise. Parameters are taken to be used in the module's order.
    Norms, activations, what is computed again and pooled heads are not counted, as usual (Chowdhery et al. 2022, arXiv
    2204.02311, appendix B).

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
    before = _trained_before(module) if training else {}
    passes = lambda p, early: 1 + (training and p.requires_grad) + early  # noqa: E731 - products with a matrix
    products = features = 0
    for block in found:
        products += sum(p.numel() * passes(p, before.get(p, False)) for p in block.parameters() if p.ndim >= 2)
        a = block.attention_layer
        each = a.head_dim * (14 if before.get(next(a.out_proj.parameters())) else 4)
        for length, times in Counter(documents).items():
            of = a.attention.pattern, length, a.num_heads, a.num_kv_heads, a.attention.causal
            features += each * times * pairs(*of)
    if getattr(module, "vocab_size", None) and isinstance(getattr(module, "head", None), nn.Linear):
        head = module.head.weight
        early = training and any(
            p.requires_grad for m in module.children() if m is not module.head for p in m.parameters()
        )
        products += head.shape[1] * module.vocab_size * passes(head, early)
    return 2 * products * tokens + features


def _trained_before(module: nn.Module) -> dict[nn.Parameter, bool]:
    """Of each parameter, whether any before it is trained."""
    found, so_far = {}, False
    for p in module.parameters():
        found[p] = so_far
        so_far = so_far or p.requires_grad
    for block in (m for m in module.modules() if isinstance(m, TransformerBlock) and m.ffn.gate is not None):
        of_gate = found[next(block.ffn.gate.parameters())]
        found.update(dict.fromkeys(block.ffn.fc1.parameters(), of_gate))  # both read the same
    return found
