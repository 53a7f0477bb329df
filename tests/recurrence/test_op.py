"""The op of a layer's recurrence: its traced results have the strides of the real ones."""

import pytest
import torch

from lightning_dilated.recurrence.op import RECURRENCE, RECURRENCE_BACKWARD, encode
from lightning_dilated.recurrence.rules import KINDS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_results_lie_as_traced(kind, kv_heads):
    """Compiled code reads results by the strides of the traced ones."""
    q = torch.randn(2, 70, 4, 8)
    k, v = torch.randn(2, 2, 70, kv_heads, 8)
    gates = (-torch.rand(2, 70, kv_heads), torch.rand(2, 70, kv_heads)) if kind == "gated_delta" else (None, None)
    rest = (None, None, encode(kind, None if kind == "gated_delta" else 16, True))
    torch.library.opcheck(RECURRENCE, (q, k, v, *gates, *rest), test_utils="test_faketensor")
    grad = torch.randn_like(q)
    torch.library.opcheck(RECURRENCE_BACKWARD, (grad, q, k, v, *gates, *rest), test_utils="test_faketensor")
