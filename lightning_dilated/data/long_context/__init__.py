"""Questions about a long context: a value is stated somewhere in filler, and asked for at the end."""

from lightning_dilated.ext.evaluation.module import LongContextDataModule, LongContextSamples

__all__ = ["LongContextDataModule", "LongContextSamples"]
