"""Subjects: what to count of a model, found from the model itself.

Shape letters: L tokens of a rank, H query heads, K kv heads, D head dim, F features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_dilated.models import DilatedModule
from lightning_dilated.models.classifier import LongNetClassifier
from lightning_dilated.models.longnet_lm import LongNetLM, TokenModel
from lightning_dilated.models.longnet_mlm import LongNetMLM
from lightning_dilated.models.memory import MemorySettings
from lightning_dilated.models.slide_encoder import SlideEncoder
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.planning.counting.footprint import Subject
from lightning_dilated.planning.counting.trial import PRECISIONS
from lightning_dilated.planning.counting.workspace import OpCall

#: arguments of a model that change nothing of its memory, or that a plan sets by itself
LEFT_OUT = ("pretrained", "optimizer", "lr_scheduler", "compile_blocks")


def subject_of(
    model: DilatedModule,
    precision: str = "bf16-mixed",
    memory: MemorySettings | None = None,
    compile_blocks: bool | None = None,
    capability: tuple[int, int] = (9, 0),
) -> Subject:
    """What to count of a model; only its hyperparameters are looked at.

    Args:
        model: a LongNetLM, LongNetMLM (counted as if all tokens had a loss), LongNetClassifier or SlideEncoder.
        precision: the Trainer's.
        memory: settings; None: all is kept.
        compile_blocks: None: as the model has it.
        capability: of the GPU.

    Raises:
        ValueError: for another precision, or a model that cannot be counted.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}; got {precision!r}.")
    given = {k: v for k, v in model.hparams.items() if k not in LEFT_OUT}
    make, batch = _ways(model, given)
    dtype, products = PRECISIONS[precision]
    heads = model.num_heads
    kv, causal = getattr(model, "num_kv_heads", None) or heads, getattr(model, "causal", False)
    options = getattr(model, "options", None)
    call = OpCall(
        model.pattern, heads, kv, model.dim // heads, causal, 1, products or dtype,
        dropout=getattr(options, "attention_dropout", 0.0) > 0, engine=getattr(options, "engine", "auto"),
        capability=capability,
    )  # fmt: skip
    compiled = getattr(model, "compile_blocks", False) if compile_blocks is None else compile_blocks
    return Subject(make, batch, precision, memory or MemorySettings(), bool(compiled), call)


def _ways(model: DilatedModule, given: dict[str, Any]) -> tuple[Callable[[int], DilatedModule], Callable[[int], Any]]:
    """How to make the model at a depth, and its batch at a length."""
    if isinstance(model, LongNetMLM):
        return _as_lm(model), _tokens
    if isinstance(model, TokenModel):
        return lambda depth: type(model)(**{**given, "pattern": model.pattern, "depth": depth}), _tokens
    if isinstance(model, (LongNetClassifier, SlideEncoder)):
        if model.task is None:
            raise ValueError(
                f"this {type(model).__name__} has no task, so it is not trained: give it a task to plan for."
            )
        fixed = {"pattern": model.pattern} if isinstance(model, LongNetClassifier) else {}
        return lambda depth: type(model)(**{**given, **fixed, "depth": depth}), lambda tokens: _rows(model, tokens)
    raise ValueError(
        f"memory is counted for LongNetLM, LongNetMLM, LongNetClassifier and SlideEncoder, not for {type(model).__name__}. "
        "Give --dim, --depth, --heads and --segments of its transformer instead of --config."
    )


def _as_lm(model: LongNetMLM) -> Callable[[int], DilatedModule]:
    """A language model of the same sizes: which tokens are masked depends on values, which fake tensors do not have."""

    def make(depth: int) -> DilatedModule:
        names = ("vocab_size", "dim", "num_heads", "num_kv_heads", "ffn_dim", "tie_embeddings")
        options = {k: v for k, v in vars(model.options).items() if k != "drop_path"}
        found = LongNetLM(model.pattern, depth=depth, **{n: getattr(model, n) for n in names}, **options)
        found.causal = model.causal
        return found

    return make


def _tokens(tokens: int) -> dict[str, Tensor]:
    make = lambda: torch.zeros(1, tokens, dtype=torch.int64)  # noqa: E731
    return {"tokens": make(), "labels": make()}


def _rows(model: Any, tokens: int) -> dict[str, Tensor]:
    """A batch with one label."""
    regression = model.task == "regression"
    label = torch.zeros(1, model.num_classes or 1) if regression else torch.zeros(1, dtype=torch.int64)
    if isinstance(model, SlideEncoder):
        features = torch.zeros(1, tokens, model.feature_dim, dtype=torch.float32)
        return {"features": features, "coords": torch.zeros(1, tokens, 2, dtype=torch.int64), "label": label}
    if model.input == "tokens":
        return {"tokens": torch.zeros(1, tokens, dtype=torch.int64), "label": label}
    return {"features": torch.zeros(1, tokens, model.width, dtype=torch.float32), "label": label}


def language_model(pattern: DilatedPattern, **sizes: Any) -> LongNetLM:
    """A LongNetLM of given sizes, not built."""
    return LongNetLM(pattern, **sizes)
