"""Calls of `ShortConvolution.together` and their results, for tests of the kernels."""

from __future__ import annotations

import random
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from lightning_dilated.ext.convolution import convolution
from lightning_dilated.ext.convolution.convolution import ShortConvolution

#: largest error relative to the largest value: rounding of the result, and for fp32 rounding of the sum
TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Case:
    """A call of the convolution.

    Attributes:
        channels: number of channels of each part.
        cuts: bounds of packed documents.
        lengths: numbers of tokens in padded samples.
        layout: "joint": parts are slices of one tensor; "apart": separate tensors; "turned": channels are not adjacent.
    """

    tokens: int
    channels: tuple[int, ...] = (5,)
    taps: int = 4
    causal: bool = True
    batch: int = 1
    cuts: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None
    layout: str = "joint"

    def documents(self) -> dict[str, Tensor | None]:
        as_tensor = lambda x: None if x is None else torch.tensor(x, dtype=torch.int32)  # noqa: E731
        return {"lengths": as_tensor(self.lengths), "cu_seqlens": as_tensor(self.cuts)}

    def module(self, dtype: torch.dtype, device: str = "cpu") -> ShortConvolution:
        """Build a module with random weights that are exact in all dtypes."""
        generator = torch.Generator().manual_seed(self.tokens)
        module = ShortConvolution(sum(self.channels), self.taps, self.causal, device=device, dtype=dtype)
        weight = torch.randn(module.weight.shape, generator=generator).to(torch.bfloat16)
        with torch.no_grad():
            module.weight.copy_(weight.clamp(-4, 4))
        return module

    def parts(self, dtype: torch.dtype, device: str = "cpu", seed: int = 1) -> list[Tensor]:
        """Draw parts with values that are exact in all dtypes. A joint tensor has more channels than its parts."""
        generator = torch.Generator().manual_seed(seed)
        joint = torch.randn(self.batch, self.tokens, sum(self.channels) + 3, generator=generator)
        joint = joint.to(torch.bfloat16).clamp(-4, 4).to(device, dtype)
        parts = joint.split((*self.channels, 3), -1)[:-1]
        if self.layout == "apart":
            return [x.contiguous() for x in parts]
        return [x.mT.contiguous().mT for x in parts] if self.layout == "turned" else list(parts)

    def results(
        self, dtype: torch.dtype, device: str = "cpu", weights: torch.dtype | None = None, kernels: bool = True
    ) -> dict[str, Tensor]:
        """Return outputs and gradients by name. `kernels`: whether the kernels must serve the call."""
        module = self.module(weights or dtype, device)
        assert convolution.serves(torch.device(device), dtype, self.taps) is kernels
        parts = [x.detach().requires_grad_() for x in self.parts(dtype, device)]
        outputs = module.together(parts, **self.documents())
        grads = torch.autograd.grad(outputs, (*parts, module.weight), self.parts(dtype, device, seed=2))
        assert all(y.dtype == dtype for y in outputs) and grads[-1].dtype == module.weight.dtype
        every = {**_numbered("y", outputs), **_numbered("dx", grads[:-1]), "dweight": grads[-1]}
        return {name: x.detach() for name, x in every.items()}

    def by_torch(self, device: str = "cpu") -> dict[str, Tensor]:
        """Return the same as `results`, computed by torch's operations in float64."""
        return self.results(torch.float64, device, kernels=False)


def _numbered(name: str, tensors) -> dict[str, Tensor]:
    return {f"{name} {i}": x for i, x in enumerate(tensors)}


def compare(got: dict[str, Tensor], want: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Assert equality. The weight's gradient is a sum in fp32, so its tolerance does not depend on the rows' dtype."""
    for name, x in want.items():
        tolerance = TOLERANCES[dtype if dtype == got[name].dtype else torch.float32]
        off = float((got[name].to(x) - x).abs().max()) if x.numel() else 0.0
        scale = float(x.abs().max()) if x.numel() else 1.0
        assert off <= tolerance * max(scale, 1.0), f"{name} is {off / max(scale, 1.0):.1e} off"


def without_kernels():
    """Disable the kernels, so that torch computes every call."""
    return mock.patch.object(convolution, "serves", lambda *_: False)


CASES = {
    "one token": Case(1),
    "more taps than tokens": Case(3, taps=8),
    "two taps": Case(40, (1,), taps=2),
    "several programs": Case(600, (3, 4, 2), batch=2),
    "several blocks of channels": Case(70, (130, 64)),
    "centred": Case(300, (6,), causal=False, batch=2),
    "centred, an even number of taps": Case(9, taps=6, causal=False),
    "documents": Case(530, (3, 2), cuts=(0, 1, 1, 2, 7, 300, 530)),
    "centred documents": Case(290, taps=5, causal=False, cuts=(0, 0, 3, 4, 256, 290)),
    "centred lengths": Case(270, causal=False, batch=4, lengths=(270, 258, 1, 0)),
    "own tensors": Case(50, (4, 4, 4), layout="apart"),
    "channels that are not adjacent": Case(33, (4, 6), layout="turned"),
    "no tokens": Case(0, (4, 3)),
    "no samples": Case(5, (4, 3), batch=0),
}


def drawn(chosen: random.Random) -> Case:
    tokens = chosen.choice([1, 2, 5, 31, 32, 64, 255, 257, 310])
    channels = tuple(chosen.choice([1, 3, 7, 17, 64, 70]) for _ in range(chosen.randint(1, 3)))
    options = {"taps": chosen.randint(2, 8), "causal": chosen.random() < 0.5}
    options["layout"] = chosen.choice(["joint", "apart", "turned"])
    kind, batch = chosen.choice(["", "documents", "lengths"]), chosen.randint(1, 3)
    if kind == "documents":
        cuts = sorted(chosen.randint(0, tokens) for _ in range(chosen.randint(0, 6)))
        return Case(tokens, channels, cuts=(0, *cuts, tokens), **options)
    lengths = tuple(chosen.randint(0, tokens) for _ in range(batch)) if kind == "lengths" else None
    return Case(tokens, channels, batch=batch, lengths=lengths, **options)
