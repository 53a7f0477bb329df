"""LightningModules over dilated attention; subclass DilatedModule for your own."""

from lightning_dilated.ext.pooled.classifier import LongNetClassifier
from lightning_dilated.ext.slides.encoder import SlideEncoder
from lightning_dilated.ext.slides.longvit.image_patches import image_patches
from lightning_dilated.ext.slides.longvit.model import LongViT
from lightning_dilated.ext.slides.mae import SlidePretrainer
from lightning_dilated.models.longnet.lm import LongNetLM, TokenModel
from lightning_dilated.models.longnet.mlm import LongNetMLM
from lightning_dilated.models.module import DilatedModule, WarmupCosine

__all__ = [
    "DilatedModule",
    "LongNetClassifier",
    "LongNetLM",
    "LongNetMLM",
    "LongViT",
    "SlideEncoder",
    "SlidePretrainer",
    "TokenModel",
    "WarmupCosine",
    "image_patches",
]
