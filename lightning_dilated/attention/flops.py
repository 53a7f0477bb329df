"""FLOPs of the op for torch.utils.flop_counter: pairs that the pattern really has, not N squared.

Two matmuls a pair forward (4 D FLOPs), five backward (10 D); softmax, merge and padding are not counted, as torch does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from lightning_dilated.attention import op as _op  # noqa: F401 - registers torch.ops.lightning_dilated
from lightning_dilated.attention.resolve import share
from lightning_dilated.attention.views import spans
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import blocks, pairs
from lightning_dilated.sequence.group import find_sequence
from lightning_dilated.sequence.planner import joint_pairs


def attention_pairs(
    q: Tensor,
    k: Tensor,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    pattern: str,
    causal: bool,
    sequence: str = "",
    window: Sequence[int] = (),
) -> int:
    """(query, key) pairs over samples and heads; traced tensors have no lengths to read, so there every row counts.

    On a rank of a sequence: the pairs of its own queries (with head groups, of its heads), which sum to those of one rank.
    """
    batch, seq_len, own, _ = q.shape
    first, heads, kv_heads = window or (0, own, k.shape[2])
    lengths, cu_seqlens = (None if isinstance(x, FakeTensor) else x for x in (lengths, cu_seqlens))
    who = DilatedPattern.decode(pattern)
    group = find_sequence(sequence) if sequence else None
    if group is None or group.agreed is None:
        found = spans(batch, seq_len, lengths, cu_seqlens)
        of = heads, kv_heads, causal, (first, first + own)
        return sum(s.batches * pairs(who, s.length, *of) for s in found)
    seq_len = group.agreed.seq_len
    found = spans(batch, seq_len, lengths, cu_seqlens)
    problem, local = share(group, who, heads, kv_heads, causal, found, seq_len, (first, first + own))
    near = (
        span.batches * block.pairs(causal)
        for span in local
        for block in blocks(who, span.document, heads, kv_heads, span.part, problem.heads)
    )
    return sum(near) + joint_pairs(problem, group.rank // group.head_size)


@register_flop_formula(torch.ops.lightning_dilated.attention, get_raw=True)
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    pattern: str,
    causal: bool,
    scale: float,
    dropout: float,
    engine: str,
    sequence: str,
    grad: bool,
    window: Sequence[int],
    *,
    out_val: Any = None,
    **kwargs: Any,
) -> int:
    return 4 * q.shape[3] * attention_pairs(q, k, lengths, cu_seqlens, pattern, causal, sequence, window)


@register_flop_formula(torch.ops.lightning_dilated.attention_backward, get_raw=True)
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rows: Tensor | None,
    number: Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    pattern: str,
    causal: bool,
    scale: float,
    dropout: float,
    engine: str,
    sequence: str,
    needs_grad: bool,
    window: Sequence[int],
    *,
    out_val: Any = None,
    **kwargs: Any,
) -> int:
    return 10 * q.shape[3] * attention_pairs(q, k, lengths, cu_seqlens, pattern, causal, sequence, window)
