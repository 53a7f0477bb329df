"""FLOPs of the op for torch.utils.flop_counter: pairs that the pattern really has, not N squared.

Two matmuls a pair forward (4 D FLOPs), five backward (10 D); softmax, merge and padding are not counted, as torch does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from lightning_dilated.attention import op as _op  # noqa: F401 - registers torch.ops.lightning_dilated
from lightning_dilated.attention.views import spans
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import pairs


def attention_pairs(
    q: Tensor, k: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None, pattern: str, causal: bool
) -> int:
    """(query, key) pairs over samples and heads; traced tensors have no lengths to read, so there every row counts."""
    batch, seq_len, heads, _ = q.shape
    lengths, cu_seqlens = (None if isinstance(x, FakeTensor) else x for x in (lengths, cu_seqlens))
    who = DilatedPattern.decode(pattern)
    found = spans(batch, seq_len, lengths, cu_seqlens)
    return sum(s.batches * pairs(who, s.length, heads, k.shape[2], causal) for s in found)


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
    *rest: Any,
    out_val: Any = None,
    **kwargs: Any,
) -> int:
    return 4 * q.shape[3] * attention_pairs(q, k, lengths, cu_seqlens, pattern, causal)


@register_flop_formula(torch.ops.lightning_dilated.attention_backward, get_raw=True)
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rows: Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    pattern: str,
    causal: bool,
    *rest: Any,
    out_val: Any = None,
    **kwargs: Any,
) -> int:
    return 10 * q.shape[3] * attention_pairs(q, k, lengths, cu_seqlens, pattern, causal)
