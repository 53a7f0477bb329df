"""MemoryProfiler: where the memory of a training step goes, on every rank."""

from lightning_dilated.ext.profiling.memory.profiler import MemoryProfiler

__all__ = ["MemoryProfiler"]
