"""DataModules and the resumable sampler and loader that they share."""

from lightning_dilated.data.bytes import ByteDataModule, ByteSequences
from lightning_dilated.data.module import SplitDataModule
from lightning_dilated.data.sampler import ResumableLoader, ResumableSampler
from lightning_dilated.data.stream import ByteStream

__all__ = ["ByteDataModule", "ByteSequences", "ByteStream", "ResumableLoader", "ResumableSampler", "SplitDataModule"]
