"""Comparisons with the oracle, and attention by a plain low-precision softmax, to show a dtype's precision."""

import torch
from torch import Tensor

from lightning_dilated.attention.oracle import oracle

GRADIENTS = ("dq", "dk", "dv")


def error(got: Tensor, want: Tensor, floor: float = 1e-2) -> float:
    """Return max |got - want| relative to the largest |want|; the floor is for references of 0, as dq of one token."""
    assert got.shape == want.shape, (got.shape, want.shape)
    if not want.numel():
        return 0.0
    got, want = got.detach().double(), want.detach().double()
    assert got.isfinite().all(), "not finite"
    return ((got - want).abs().max() / want.abs().max().clamp(min=floor)).item()


def close(name: str, got: Tensor, want: Tensor, tol: float, floor: float = 1e-2) -> None:
    """Assert that `error` is at most `tol`; `name` should contain the pattern."""
    difference = error(got, want, floor)
    assert difference <= tol, f"{name}: error {difference:.2e} of the largest value, allowed {tol:.0e}"


def close_lse(name: str, got: Tensor, want: Tensor, tol: float) -> None:
    """Assert equal -inf, and other values up to `tol`."""
    bare = want == -torch.inf
    assert torch.equal(got == -torch.inf, bare), f"{name}: -inf at other rows than the oracle's"
    close(name, got[~bare], want[~bare], tol, floor=1.0)


def gradients(out: Tensor, inputs: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Return (dq, dk, dv), also if the result does not depend on an input."""
    grads = torch.autograd.grad(out, inputs, grad, allow_unused=True)
    return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True))


def leaves(*tensors: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """Return detached copies that require gradients, with the same strides only in another dtype."""
    return tuple(x.detach().to(dtype or x.dtype).requires_grad_() for x in tensors)


def plain(q: Tensor, k: Tensor, v: Tensor, counts: Tensor, n_pad: Tensor, scale: float) -> Tensor:
    """The definition in the tensors' own dtype, (B, N, H, D), as users would write it, rounding at every step."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    s = (q * scale) @ k.transpose(-1, -2) + counts.log().to(q.dtype)
    s = torch.cat([s, n_pad.log().to(q.dtype)[..., None]], -1)  # one column of score 0 for all pads
    bare = (counts.sum(-1) == 0)[..., None]
    p = torch.softmax(s.masked_fill(bare, 0.0), -1).masked_fill(bare, 0.0)
    return (p[..., :-1] @ v).transpose(1, 2)


__all__ = ["GRADIENTS", "close", "close_lse", "error", "gradients", "leaves", "oracle", "plain"]
