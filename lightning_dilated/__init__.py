"""Transformers with dilated attention (LongNet) for PyTorch Lightning."""

from typing import TYPE_CHECKING

from lightning_dilated import sequence
from lightning_dilated._extensions import lazy_names
from lightning_dilated.attention import DilatedAttention, MultiheadDilatedAttention, dilated_attention
from lightning_dilated.models import DilatedModule, LongNetLM
from lightning_dilated.pattern import Branch, DilatedPattern, Global, Hashed, Window
from lightning_dilated.recurrence import Recurrence
from lightning_dilated.sequence import SequenceSpec, loss_share
from lightning_dilated.strategy import OuterSteps, RingDilatedFSDPStrategy, RingDilatedStrategy

if TYPE_CHECKING:
    from lightning_dilated import callbacks, data, integrations
    from lightning_dilated.ext.export.export import Exported, export
    from lightning_dilated.ext.masked.mlm import LongNetMLM
    from lightning_dilated.ext.pooled.classifier import LongNetClassifier
    from lightning_dilated.ext.recurrence.functional import recurrent_attention
    from lightning_dilated.ext.recurrence.state import RecurrentState
    from lightning_dilated.ext.slides.encoder import SlideEncoder
    from lightning_dilated.ext.slides.mae import SlidePretrainer
    from lightning_dilated.ext.streams.state import StreamState

__getattr__, __dir__ = lazy_names(__name__, {x: x for x in ("callbacks", "data", "integrations")})

__version__ = "0.2.0"

__all__ = [
    "Branch",
    "DilatedAttention",
    "DilatedModule",
    "DilatedPattern",
    "Exported",
    "Global",
    "Hashed",
    "LongNetClassifier",
    "LongNetLM",
    "LongNetMLM",
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
