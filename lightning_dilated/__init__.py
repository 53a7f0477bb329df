"""Transformers with dilated attention (LongNet) for PyTorch Lightning: exact, fast and plain, in that order."""

from lightning_dilated import callbacks, data, integrations, sequence
from lightning_dilated.attention import DilatedAttention, MultiheadDilatedAttention, dilated_attention
from lightning_dilated.attention.stream_state import StreamState
from lightning_dilated.ext.export.export import Exported, export
from lightning_dilated.models import (
    DilatedModule,
    LongNetClassifier,
    LongNetLM,
    LongNetMLM,
    LongViT,
    SlideEncoder,
    SlidePretrainer,
)
from lightning_dilated.pattern import Branch, DilatedPattern, Global, Window
from lightning_dilated.recurrence import Recurrence, RecurrentState, recurrent_attention
from lightning_dilated.sequence import SequenceSpec, loss_share
from lightning_dilated.strategy import OuterSteps, RingDilatedFSDPStrategy, RingDilatedStrategy

__version__ = "0.2.0"

__all__ = [
    "Branch",
    "DilatedAttention",
    "DilatedModule",
    "DilatedPattern",
    "Exported",
    "Global",
    "LongNetClassifier",
    "LongNetLM",
    "LongNetMLM",
    "LongViT",
    "MultiheadDilatedAttention",
    "OuterSteps",
    "Recurrence",
    "RecurrentState",
    "RingDilatedFSDPStrategy",
    "RingDilatedStrategy",
    "SequenceSpec",
    "SlideEncoder",
    "SlidePretrainer",
    "StreamState",
    "Window",
    "__version__",
    "callbacks",
    "data",
    "dilated_attention",
    "export",
    "integrations",
    "loss_share",
    "recurrent_attention",
    "sequence",
]
