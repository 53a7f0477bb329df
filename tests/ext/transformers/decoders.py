"""Tiny decoders of transformers with random weights, and the results of a training step.

Shape letters: B batch, N tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from lightning_dilated.integrations.transformers import register, set_pattern

V = 61
WINDOW = 5
SIZES = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2, sliding from layer 1": (
        "Qwen2Config", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "mistral, dense": ("MistralConfig", {"sliding_window": None}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 8, "sliding_window": WINDOW, "num_hidden_layers": 3, "query_pre_attn_scalar": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi": ("PhiConfig", {"num_key_value_heads": 4}),
}  # fmt: skip


class DoubleNorm(Gemma3RMSNorm):
    """Gemma's norm in float64. The original computes in fp32, also the sum over tokens in its weight's gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


def config(family: str, **options: Any) -> Any:
    kind, sizes = FAMILIES.get(family, (family, {}))
    return getattr(transformers, kind)(**{**SIZES, **sizes, **options})


def decoder(
    family: str,
    implementation: str = "ring_dilated",
    dtype: torch.dtype = torch.float64,
    pattern: Any = None,
    **options: Any,
) -> Any:
    """Build the model of a family. The weights are the same for every implementation of attention."""
    register()
    torch.manual_seed(3)
    model_config = config(family, **options)
    set_pattern(model_config, pattern)
    model = transformers.AutoModelForCausalLM.from_config(model_config, attn_implementation=implementation).to(dtype)
    for module in model.modules():
        if isinstance(module, Gemma3RMSNorm) and dtype == torch.float64:
            module.__class__ = DoubleNorm
    assert model.config._attn_implementation == implementation
    return model


def tokens(batch: int, length: int) -> Tensor:
    """Draw random tokens (B, N) without padding tokens."""
    return torch.randint(3, V, (batch, length), generator=torch.Generator().manual_seed(5))


def step(model: Any, inputs: Tensor, labels: Tensor | None = None, **options: Any) -> dict[str, Tensor]:
    """Return the logits at positions with a label, the loss, and the gradient of each parameter.

    Labels (default: the inputs) are not shifted: logits at position i are compared with label i. The loss is a sum in
    the model's dtype, while transformers uses fp32.
    """
    labels = inputs if labels is None else labels
    model.zero_grad()
    logits = model(inputs, **options).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach()[labels != -100], "loss": loss.detach(), **gradients}


def close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    """Assert equal names, and values that differ by at most `tolerance` times the largest value."""
    assert set(got) == set(want)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=tolerance * max(float(value.abs().max()), 1e-3))
