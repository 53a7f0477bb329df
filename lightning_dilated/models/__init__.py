"""LightningModules with dilated attention; subclass DilatedModule to write your own model."""

from typing import TYPE_CHECKING

from lightning_dilated._extensions import lazy_names
from lightning_dilated.models.longnet.lm import LongNetLM, TokenModel
from lightning_dilated.models.module import DilatedModule, WarmupCosine

if TYPE_CHECKING:
    from lightning_dilated.ext.masked.mlm import LongNetMLM
    from lightning_dilated.ext.pooled.classifier import LongNetClassifier
    from lightning_dilated.ext.slides.encoder import SlideEncoder
    from lightning_dilated.ext.slides.mae import SlidePretrainer

__getattr__, __dir__ = lazy_names(__name__)

__all__ = [
    "DilatedModule",
    "LongNetClassifier",
    "LongNetLM",
    "LongNetMLM",
    "SlideEncoder",
    "SlidePretrainer",
    "TokenModel",
    "WarmupCosine",
]
