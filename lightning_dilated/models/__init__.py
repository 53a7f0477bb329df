"""LightningModules over dilated attention; subclass DilatedModule for your own."""

from lightning_dilated.models.longnet.classifier import LongNetClassifier
from lightning_dilated.models.longnet.lm import LongNetLM, TokenModel
from lightning_dilated.models.longnet.mlm import LongNetMLM
from lightning_dilated.models.longvit.image_patches import image_patches
from lightning_dilated.models.longvit.model import LongViT
from lightning_dilated.models.module import DilatedModule, WarmupCosine
from lightning_dilated.models.slides.encoder import SlideEncoder
from lightning_dilated.models.slides.mae import SlidePretrainer

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
