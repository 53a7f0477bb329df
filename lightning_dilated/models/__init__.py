"""LightningModules over dilated attention; subclass DilatedModule for your own."""

from lightning_dilated.models.classifier import LongNetClassifier
from lightning_dilated.models.image_patches import image_patches
from lightning_dilated.models.longnet_lm import LongNetLM, TokenModel
from lightning_dilated.models.longnet_mlm import LongNetMLM
from lightning_dilated.models.longvit import LongViT
from lightning_dilated.models.module import DilatedModule
from lightning_dilated.models.schedules import WarmupCosine
from lightning_dilated.models.slide_encoder import SlideEncoder
from lightning_dilated.models.slide_mae import SlidePretrainer

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
