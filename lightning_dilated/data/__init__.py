"""DataModules, and the resumable sampler and loader that they share."""

from typing import TYPE_CHECKING

from lightning_dilated._extensions import lazy_names

if TYPE_CHECKING:
    from lightning_dilated.data.module import SplitDataModule
    from lightning_dilated.data.sampler import ResumableLoader, ResumableSampler
    from lightning_dilated.ext.evaluation.module import LongContextDataModule
    from lightning_dilated.ext.evaluation.recall_tasks import FarRecallDataModule
    from lightning_dilated.ext.files.files import ByteStream
    from lightning_dilated.ext.genomes.bases import decode_bases, encode_bases, reverse_complement
    from lightning_dilated.ext.genomes.fasta import GenomeDataModule, GenomeWindows
    from lightning_dilated.ext.genomes.files import Genome
    from lightning_dilated.ext.genomes.variants import AlleleWindows, Variant, allele_windows, read_variants
    from lightning_dilated.ext.slides.coordinates import check_coordinates
    from lightning_dilated.ext.slides.heat_maps import heat_map, write_attention, write_heat_map
    from lightning_dilated.ext.slides.module import SlideDataModule
    from lightning_dilated.ext.slides.sequences import SlideSequences
    from lightning_dilated.ext.slides.synthetic import write_synthetic_slides
    from lightning_dilated.ext.text.bytes import ByteDataModule, ByteSequences
    from lightning_dilated.ext.text.chat import ChatDataModule
    from lightning_dilated.ext.text.encode_files import EncodedFiles, encode_files
    from lightning_dilated.ext.text.endless import StreamDataModule, StreamSequences
    from lightning_dilated.ext.text.hf_chat import ChatStreamDataModule
    from lightning_dilated.ext.text.hf_text import TextStreamDataModule
    from lightning_dilated.ext.text.tokens import TokenDataModule

CORE = {
    "ResumableLoader": "data.sampler:ResumableLoader",
    "ResumableSampler": "data.sampler:ResumableSampler",
    "SplitDataModule": "data.module:SplitDataModule",
}
__getattr__, __dir__ = lazy_names(__name__, CORE)

__all__ = [
    "AlleleWindows",
    "ByteDataModule",
    "ByteSequences",
    "ByteStream",
    "ChatDataModule",
    "ChatStreamDataModule",
    "EncodedFiles",
    "FarRecallDataModule",
    "Genome",
    "GenomeDataModule",
    "GenomeWindows",
    "LongContextDataModule",
    "ResumableLoader",
    "ResumableSampler",
    "SlideDataModule",
    "SlideSequences",
    "SplitDataModule",
    "StreamDataModule",
    "StreamSequences",
    "TextStreamDataModule",
    "TokenDataModule",
    "Variant",
    "allele_windows",
    "check_coordinates",
    "decode_bases",
    "encode_bases",
    "encode_files",
    "heat_map",
    "read_variants",
    "reverse_complement",
    "write_attention",
    "write_heat_map",
    "write_synthetic_slides",
]
