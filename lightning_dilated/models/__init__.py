"""LightningModules over dilated attention; subclass DilatedModule for your own."""

from lightning_dilated.models.longnet_lm import LongNetLM, TokenModel
from lightning_dilated.models.longnet_mlm import LongNetMLM
from lightning_dilated.models.module import DilatedModule
from lightning_dilated.models.schedules import WarmupCosine

__all__ = ["DilatedModule", "LongNetLM", "LongNetMLM", "TokenModel", "WarmupCosine"]
