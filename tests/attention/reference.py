"""Comparisons with the oracle, and a plain low-precision softmax attention as a yardstick for the error of a dtype."""

import torch
from torch import Tensor

from lightning_dilated.attention.oracle import oracle

GRADIENTS = ("dq", "dk", "dv")


def error(got: Tensor, want: Tensor, floor: float = 1e-2) -> float:
    """Return max |got - want| / max(max |want|, floor). The floor is for a `want` of zeros, such as dq of one token."""
    assert got.shape == want.shape, (got.shape, want.shape)
    if not want.numel():
        return 0.0
    got, want = got.detach().double(), want.detach().double()
    assert got.isfinite().all(), "not finite"
    return ((got - want).abs().max() / want.abs().max().clamp(min=floor)).item()


def close(name: str, got: Tensor, want: Tensor, tol: float, floor: float = 1e-2) -> None:
    """Assert that `error` is at most `tol`. The caller should put the pattern into `name`, which the message shows."""
    difference = error(got, want, floor)
    assert difference <= tol, f"{name}: error {difference:.2e} of the largest value, allowed {tol:.0e}"


def close_lse(name: str, got: Tensor, want: Tensor, tol: float) -> None:
    """Assert that both have -inf in the same places, and that the `error` of other values is at most `tol`."""
    bare = want == -torch.inf
    assert torch.equal(got == -torch.inf, bare), f"{name}: -inf at other rows than the oracle's"
    close(name, got[~bare], want[~bare], tol, floor=1.0)


def gradients(out: Tensor, inputs: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Return (dq, dk, dv), with zeros for an input that does not affect the result."""
    grads = torch.autograd.grad(out, inputs, grad, allow_unused=True)
    return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True))


def leaves(*tensors: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """Return detached leaves that require gradients. With a different `dtype` they are copies with the same strides."""
    return tuple(x.detach().to(dtype or x.dtype).requires_grad_() for x in tensors)


def plain(q: Tensor, k: Tensor, v: Tensor, counts: Tensor, n_pad: Tensor, scale: float) -> Tensor:
    """Compute the definition with torch operations in the dtype of the tensors (B, N, H, D), so each step rounds."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    s = (q * scale) @ k.transpose(-1, -2) + counts.log().to(q.dtype)
    s = torch.cat([s, n_pad.log().to(q.dtype)[..., None]], -1)  # one column with score 0 for all pads together
    bare = (counts.sum(-1) == 0)[..., None]
    p = torch.softmax(s.masked_fill(bare, 0.0), -1).masked_fill(bare, 0.0)
    return (p[..., :-1] @ v).transpose(1, 2)


__all__ = ["GRADIENTS", "close", "close_lse", "error", "gradients", "leaves", "oracle", "plain"]
